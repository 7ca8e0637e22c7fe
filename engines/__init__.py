"""One table per layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import UnknownLayout
from .layout import Layout
from .portable import PORTABLE
from .sglang import SGLANG
from .speculators import SPECULATORS
from .trainers import SAFEAILAB, SPECFORGE, TORCHSPEC
from .trtllm import MODELOPT, TRTLLM
from .vllm import VLLM

LAYOUTS: tuple[Layout, ...] = (
    SPECULATORS,
    SGLANG,
    PORTABLE,
    VLLM,
    SAFEAILAB,
    SPECFORGE,
    TORCHSPEC,
    TRTLLM,
    MODELOPT,
)
BY_NAME = {layout.name: layout for layout in LAYOUTS}


def detect(config: Mapping[str, Any], names: Iterable[str]) -> Layout:
    """Return the layout whose marks a config and its tensor names bear.

    Raises:
        UnknownLayout: none fits.
    """
    names = set(names)
    if "fc.weight" in names or "eagle_config" in config:
        for layout in LAYOUTS:
            if layout.told_by(config, names):
                return layout
    what = "this may be an Eagle3 head, whose config and tensor names bear no layout's marks"
    raise UnknownLayout(
        (what if "fc.weight" in names else "this is no Eagle3 head in a layout that kconv knows")
        + f": architectures {config.get('architectures')}, model_type {config.get('model_type')!r}",
        where="config.json",
        fix="Give a target to kconv validate or with --target. If this is a head all the same, name its layout with "
        f"--from: {', '.join(BY_NAME)}.",
    )


def by_name(name: str) -> Layout:
    """Return a layout by the name that a user gives.

    Raises:
        UnknownLayout: no layout of that name.
    """
    if name not in BY_NAME:
        raise UnknownLayout(f"no layout is called {name!r}", fix=f"Choose one of {', '.join(BY_NAME)}.")
    return BY_NAME[name]


def writable() -> tuple[str, ...]:
    """Return the layouts that kconv writes, the commonest first."""
    return tuple(layout.name for layout in (VLLM, TRTLLM, SGLANG, PORTABLE))
