"""What SGLang needs to serve on a CPU without its own kernels: `prepare()`, before anything of SGLang is imported.

SGLang's code stays as it is. `sgl_kernel` beside this file stands in for its kernels, and here

- torchvision, which SGLang imports and text never calls, gets an empty stand-in;
- SGLang's own switch for tests says that the CPU has AMX, as its one attention backend that drafts on a CPU asks for
  that; its layers ask the CPU itself, find none, and so compute in torch;
- processes are forked, as there is no GPU whose state a fork would break: each would import SGLang for itself;
- DFLASH and DSPARK are let through: the lines of `EDITS` are changed as they load. Each must be there, so another
  release fails by name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import multiprocessing
import os
import sys
import types
from pathlib import Path

ABSENT = "torchvision"
# How SGLang's server is started so; "" for an option without a value.
OPTIONS = {
    "--device": "cpu",
    "--attention-backend": "intel_amx",
    "--disable-overlap-schedule": "",
    # Of the memory that is free before the load. What other programs take meanwhile counts as the weights', so a half
    # was too little on a busy machine; the cache's size is what the next option says, whatever the share:
    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/mem_cache/kv_cache_configurator.py#L3038-L3058
    "--mem-fraction-static": "0.95",
    "--max-total-tokens": "8192",
    "--max-running-requests": "8",
}
# What keeps block drafters from a CPU, by module: lines of SGLang, and what stands in their place.
EDITS = {
    # Neither is let through on a CPU:
    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/arg_groups/speculative_hook.py#L294-L296
    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/arg_groups/speculative_hook.py#L669
    "sglang.srt.arg_groups.speculative_hook": (
        (
            'cfg.device.startswith("cuda") or cfg.device == "npu" or cfg.device == "xpu"',
            'cfg.device.startswith(("cuda", "npu", "xpu", "cpu"))',
        ),
        (
            'not cfg.device.startswith(("cuda", "npu", "xpu"))',
            'not cfg.device.startswith(("cuda", "npu", "xpu", "cpu"))',
        ),
    ),
    # The embedded block is made bf16, whatever the drafter's dtype; here that is fp32:
    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/model_executor/model_runner.py#L1772
    "sglang.srt.model_executor.model_runner": (
        ("forward_batch.input_embeds.bfloat16()", "forward_batch.input_embeds.to(self.dtype)"),
    ),
    # The check of a block has no such field; it is a chain, which is what 1 says:
    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/layers/attention/intel_amx_backend.py#L115
    "sglang.srt.layers.attention.intel_amx_backend": (
        ("spec_info.tree_topk != 1", 'getattr(spec_info, "tree_topk", 1) != 1'),
    ),
}  # fmt: skip


class _Nothing(type):
    """A class that has whatever is asked of it, and does nothing."""

    def __getattr__(cls, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)

    def __iter__(cls):
        return iter(())


def _nothing(name: str) -> _Nothing:
    def call(_: object, *given: object, **__: object) -> object:
        # As a decorator it leaves what it decorates.
        return given[0] if given else None

    return _Nothing(name, (), {"__init__": _ignore, "__call__": call})


class _Stub(types.ModuleType):
    __path__ = ()
    __version__ = "0"

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _nothing(name)
        setattr(self, name, value)
        return value


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        found = fullname.partition(".")[0] == ABSENT
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Edited(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        text = Path(self.path).read_text(encoding="utf-8")
        for old, new in EDITS[fullname]:
            assert old in text, f"{fullname} has no {old!r}"
            text = text.replace(old, new)
        return compile(text, self.path, "exec", dont_inherit=True)


class _Edits(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        found = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname in EDITS else None
        if found is not None and found.origin is not None:
            found.loader = _Edited(fullname, found.origin)
        return found


def prepare() -> None:
    """Make SGLang importable and able to serve on this CPU, in this process and in those forked from it."""
    import torch
    from transformers.utils.import_utils import is_torchvision_available, is_torchvision_v2_available

    # Asked once and remembered: transformers shall not take the stand-in for torchvision.
    assert not (is_torchvision_available() or is_torchvision_v2_available())
    sys.meta_path.append(_Stubs())
    sys.meta_path.insert(0, _Edits())
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # A head waits for the GPU after it was given the target's embedding.
    torch.cuda.synchronize = torch.cuda.empty_cache = _ignore
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = _ignore
    from sglang.srt.runtime_context import override_platform  # pyright: ignore[reportMissingImports]

    override_platform(has_amx=True).install()
    # Block drafters record the stream that a tensor is used on; a CPU has none:
    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/speculative/dflash_worker_v2.py#L2481
    torch.Tensor.record_stream = _ignore
    # SGLang lets others list backends for drafts:
    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/arg_groups/choices.py#L227
    from sglang.srt.arg_groups.choices import (  # pyright: ignore[reportMissingImports]
        add_draft_attention_backend_choices,
    )

    add_draft_attention_backend_choices(["intel_amx"])


def _ignore(*_: object, **__: object) -> None:
    pass
