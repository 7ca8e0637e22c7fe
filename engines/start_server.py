"""Run by an engine's python, not kconv's: start its server, and record which parameters of a head no tensor filled.

    python start_server.py WATCH MODULE OPTIONS...

WATCH is a file with what is particular to the engine: `prepare()`, called before it starts, and `watch(watch_load)`,
which lets its loader call `watch_load(model, load)` for each drafter. MODULE is its own program, e.g.
vllm.entrypoints.openai.api_server. An engine allocates a head's parameters without clearing the memory and fills those
that the folder's tensors name; it does not report the others. So each parameter of a head is filled with a mark before
loading. At the head's first step, a parameter that still has the mark is restored and listed in the file that the
environment variable `REPORT` names; parameters shared with the target are filled by then. Otherwise the server is the
engine's own.
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

REPORT, WATCH = "KCONV_UNREACHED", "KCONV_ENGINE_WATCH"
# Parameters that a head may take from its target instead of its own.
SHARED = ("embed_tokens", "lm_head")
# Scales of a cache, which have a default if the folder lacks them.
DEFAULTED = ("q_scale", "k_scale", "v_scale", "prob_scale")


def marked(values: Any) -> Any:
    """Return where a tensor has the mark: NaN, or the smallest integer, which no map of ids contains."""
    import torch

    if values.is_floating_point():
        return values.float().isnan()
    return values == torch.iinfo(values.dtype).min


def watch_load(model: Any, load: Any, defaulted: tuple[str, ...] = ()) -> Any:
    """Load a head's weights, and record at its first step which parameters stayed unfilled.

    Args:
        model: the head, with its parameters.
        load: fills them.
        defaulted: parameters that the engine does without, besides `DEFAULTED`.
    """
    import torch

    before: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        values = parameter.data
        # Bytes have no spare value for a mark.
        if name.rpartition(".")[2] in (*DEFAULTED, *defaulted) or not (
            values.is_floating_point() or values.dtype.itemsize > 1
        ):
            continue
        before[name] = values.clone()
        values.fill_(float("nan") if values.is_floating_point() else torch.iinfo(values.dtype).min)
    result = load()
    unreached: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if name in before and parameter.shape == before[name].shape and (left := marked(parameter.data)).any():
            parameter.data[left] = before[name][left]
            unreached[name] = parameter
    forward = model.forward

    @functools.wraps(forward)
    def first_step(*arguments: Any, **options: Any) -> Any:
        model.forward = forward
        now = dict(model.named_parameters())
        # After loading, an engine may copy a parameter into a new layout, which fills nothing, or replace it by the
        # target's.
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
    """Write the names to a file in one atomic step."""
    if file := os.environ.get(REPORT):
        part = Path(f"{file}.{os.getpid()}")
        part.write_text(json.dumps(names), encoding="utf-8")
        part.replace(file)


def prepare(watch: str) -> None:
    """Prepare an engine for start with the file that watches its loader."""
    # This folder's files have the same names as the engines.
    own_folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != own_folder]
    own = runpy.run_path(watch)
    own["prepare"]()
    # Other releases of the engine write no report; kconv then says so.
    with contextlib.suppress(ImportError, AttributeError):
        own["watch"](watch_load)


def start(python: Path, watch: str, module: str) -> list[str]:
    """Return the start of the command line that runs an engine's own program through this file.

    Args:
        python: of the engine's environment. It is not resolved: the link in that environment's folder makes it that
        environment's python.
        watch: the file that watches its loader, as a name beside this file or a path.
    """
    own = Path(__file__).absolute()
    return [str(python.absolute()), str(own), str(own.parent / watch), module]


def main() -> None:
    watch, module = sys.argv.pop(1), sys.argv.pop(1)
    prepare(watch)
    os.environ[WATCH] = watch
    # Leaves sys unchanged: a process spawned from here must run this file again, to be watched too.
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and (known := os.environ.get(WATCH)):
    prepare(known)
