"""Run by SGLang's python: what is particular to SGLang when kconv starts it, see start_server.py."""

# SGLang is not installed beside kconv, so its types are unknown.
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

# Parts of the class names of each family's drafters, which no target's has.
DRAFTERS = ("Eagle3", "DFlash", "DSpark")


def prepare() -> None:
    """Let SGLang run on a CPU without its own kernels, in the environment that scripts/engine-env makes."""
    with contextlib.suppress(ModuleNotFoundError):
        import sglang_on_cpu  # pyright: ignore[reportMissingImports]

        sglang_on_cpu.prepare()
        sys.argv += [word for option in sglang_on_cpu.OPTIONS.items() for word in option if word]


def watch(watch_load: Callable[[Any, Any], Any]) -> None:
    from sglang.srt.model_loader.loader import DefaultModelLoader  # pyright: ignore[reportMissingImports]

    own = DefaultModelLoader.load_weights_only

    def load_weights_only(model: Any, *rest: Any, **options: Any) -> Any:
        if not any(part in type(model).__name__ for part in DRAFTERS):
            return own(model, *rest, **options)
        return watch_load(model, lambda: own(model, *rest, **options))

    DefaultModelLoader.load_weights_only = staticmethod(load_weights_only)
