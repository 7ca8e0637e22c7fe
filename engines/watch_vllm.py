"""Run by vLLM's python: what is particular to vLLM when kconv starts it, see start_server.py."""

# vLLM is not installed beside kconv, so its types are unknown.
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

# Parts of the class names of each family's drafters, which no target's has.
DRAFTERS = ("Eagle3", "DFlash", "DSpark")
# Parameters of theirs that are used only with a file of its own:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/qwen3_dflash.py#L517
DEFAULTED = ("mask_embedding",)


def prepare() -> None:
    """Keep vLLM from kernels that fail on fp32, and let it report what it drafts for each request."""
    with contextlib.suppress(ImportError):
        without_amx()
        fork_on_cpu()
    if "--speculative-config" in sys.argv:
        # New in 0.32; without it the counters have to tell.
        with contextlib.suppress(ImportError):
            from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]

            if hasattr(EngineArgs, "per_request_spec_decode_metrics"):
                sys.argv += ["--per-request-spec-decode-metrics", "summary"]


def without_amx() -> None:
    """Keep vLLM from using AMX kernels on any CPU: those for MLA are for bf16 and fail on fp32.

    A head's backend is chosen separately from the target's, so a server option would not reach both:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/platforms/cpu.py#L152-L164
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/spec_decode/llm_base_proposer.py#L1282-L1291
    """
    import vllm.platforms  # noqa: F401, I001  # pyright: ignore[reportMissingImports, reportUnusedImport]
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False  # pyright: ignore[reportPrivateUsage]


def fork_on_cpu() -> None:
    """Fork a server's processes on a CPU, as vLLM does on a GPU: spawned, each of three imports vLLM for itself.

    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/platforms/cpu.py#L409
    """
    import multiprocessing

    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.utils import system_utils  # pyright: ignore[reportMissingImports]

    if current_platform.is_cpu() and hasattr(system_utils, "get_mp_context"):
        system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def norm_by_layer(model: Any) -> None:
    """Norm the keys that a block drafter makes of its context by each layer's own weights.

    vLLM gives its kernel one row of weights for each layer. The CPU's takes the first row for all of them:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/qwen3_dflash.py#L639-L649
    """
    import torch

    kind, own = type(getattr(model, "model", None)), "_normalize_context_k"
    if hasattr(kind, own) and next(model.parameters()).device.type == "cpu":

        def normalize(self: Any, keys: Any) -> Any:
            normed = keys.float() * torch.rsqrt(keys.float().pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
            return (normed.to(keys.dtype) * self._k_norm_weights[:, None, None]).contiguous()

        setattr(kind, own, normalize)


def watch(watch_load: Callable[..., Any]) -> None:
    from vllm.model_executor.model_loader.default_loader import (  # pyright: ignore[reportMissingImports]
        DefaultModelLoader,
    )

    own = DefaultModelLoader.load_weights

    def load_weights(self: Any, model: Any, *rest: Any, **options: Any) -> Any:
        if not any(part in type(model).__name__ for part in DRAFTERS):
            return own(self, model, *rest, **options)
        norm_by_layer(model)
        return watch_load(model, lambda: own(self, model, *rest, **options), DEFAULTED)

    DefaultModelLoader.load_weights = load_weights
