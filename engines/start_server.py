"""Run by an engine's python, not by kconv's: start its server, and write down what no tensor of a head reached.

    python start_server.py MODULE OPTIONS...

MODULE is the engine's own program, e.g. vllm.entrypoints.openai.api_server. An engine builds a head's parameters with
whatever the memory holds and fills in what the folder's tensors name; of the others it says nothing. So each parameter
of a head is filled with a mark before it loads, and one that still bears the mark is put back as it was and named in
the file that the environment variable `REPORT` names, at the head's first step: what it shares with the target by then
is filled. The server is otherwise the engine's own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

REPORT, MODULE = "KCONV_UNREACHED", "KCONV_ENGINE_MODULE"
# Part of the name of a head's class in vLLM and SGLang, and of no target's.
HEAD_CLASS = "Eagle3"
# What a head may take from its target, in the place of its own.
SHARED = ("embed_tokens", "lm_head")
# Scales of a cache, which have their default where a folder says nothing.
DEFAULTED = ("q_scale", "k_scale", "v_scale", "prob_scale")


def marked(values: Any) -> Any:
    """Return where a tensor bears the mark: NaN, or the least of whole numbers that no map of ids holds."""
    import torch

    if values.is_floating_point():
        return values.float().isnan()
    return values == torch.iinfo(values.dtype).min


def watch_load(model: Any, load: Any) -> Any:
    """Load a head's weights, and let its first step write down what they left as it was."""
    import torch

    if HEAD_CLASS not in type(model).__name__:
        return load()
    before = {}
    for name, parameter in model.named_parameters():
        values = parameter.data
        # Bytes have no value to spare for a mark.
        if name.rpartition(".")[2] in DEFAULTED or not (values.is_floating_point() or values.dtype.itemsize > 1):
            continue
        before[name] = values.clone()
        values.fill_(float("nan") if values.is_floating_point() else torch.iinfo(values.dtype).min)
    result = load()
    unreached = {}
    for name, parameter in model.named_parameters():
        if name in before and parameter.shape == before[name].shape and (left := marked(parameter.data)).any():
            parameter.data[left] = before[name][left]
            unreached[name] = parameter
    forward = model.forward

    @functools.wraps(forward)
    def first_step(*arguments: Any, **options: Any) -> Any:
        model.forward = forward
        now = dict(model.named_parameters())
        # After the load an engine may lay out a parameter anew, which fills nothing, or take the target's for it.
        left = (
            n
            for n, parameter in unreached.items()
            if not n.rpartition(".")[0].endswith(SHARED) or now.get(n) is parameter
        )
        report(sorted(left))
        return forward(*arguments, **options)

    model.forward = first_step
    return result


def report(names: list[str]) -> None:
    """Write names down, at once whole."""
    if file := os.environ.get(REPORT):
        part = Path(f"{file}.{os.getpid()}")
        part.write_text(json.dumps(names))
        part.replace(file)


def watch_vllm() -> None:
    """Let vLLM's loader be watched."""
    from vllm.model_executor.model_loader.default_loader import (  # pyright: ignore[reportMissingImports]
        DefaultModelLoader,
    )

    own = DefaultModelLoader.load_weights

    def load_weights(self: Any, model: Any, *rest: Any, **options: Any) -> Any:
        return watch_load(model, lambda: own(self, model, *rest, **options))

    DefaultModelLoader.load_weights = load_weights


def without_amx() -> None:
    """Let vLLM take no kernel that needs AMX, on whatever CPU: those of MLA are for bf16 and stop at fp32.

    A head's backend is chosen apart from the target's, so that an option of the server would not reach both:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/platforms/cpu.py#L152-L164
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/spec_decode/llm_base_proposer.py#L1282-L1291
    """
    import vllm.platforms  # noqa: F401, I001  # pyright: ignore[reportMissingImports]
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


def watch_sglang() -> None:
    """Let SGLang's loader be watched."""
    from sglang.srt.model_loader.loader import DefaultModelLoader  # pyright: ignore[reportMissingImports]

    own = DefaultModelLoader.load_weights_only

    def load_weights_only(model: Any, *rest: Any, **options: Any) -> Any:
        return watch_load(model, lambda: own(model, *rest, **options))

    DefaultModelLoader.load_weights_only = staticmethod(load_weights_only)


def prepare(module: str) -> None:
    """Make an engine ready to be started: on a CPU without its kernels, and watched."""
    # This folder's files have the engines' names.
    own_folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != own_folder]
    engine = module.partition(".")[0]
    if engine == "sglang":
        # Only in the environment that scripts/engine-env makes.
        with contextlib.suppress(ModuleNotFoundError):
            import sglang_on_cpu  # pyright: ignore[reportMissingImports]

            sglang_on_cpu.prepare()
            sys.argv += [word for option in sglang_on_cpu.OPTIONS.items() for word in option if word]
    if engine == "vllm":
        with contextlib.suppress(ImportError):
            without_amx()
    if engine == "vllm" and "--speculative-config" in sys.argv:
        # New in 0.32; without it the counters tell.
        with contextlib.suppress(ImportError):
            from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]

            if hasattr(EngineArgs, "per_request_spec_decode_metrics"):
                sys.argv += ["--per-request-spec-decode-metrics", "summary"]
    # Of another release of the engine no report comes, which kconv says.
    with contextlib.suppress(ImportError, AttributeError):
        {"vllm": watch_vllm, "sglang": watch_sglang}[engine]()


def start(python: Path, module: str) -> list[str]:
    """Return the words that begin the command line of an engine's own program, started from here.

    Args:
        python: of the engine's environment. It is not resolved: the link in that environment's folder is what makes it
            that environment's.
        module: the program.
    """
    return [str(python.absolute()), str(Path(__file__).absolute()), module]


def main() -> None:
    """Start the engine's own program."""
    prepare(module := sys.argv.pop(1))
    os.environ[MODULE] = module
    # Not altering sys: a process that is spawned from here shall run this file again, and be watched too.
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and (known := os.environ.get(MODULE)):
    prepare(known)
