"""In which layout a trained head comes out."""

from __future__ import annotations

from ..engines import by_name
from ..engines.layout import Layout
from ..errors import LayoutCannot
from ..head.spec import HeadSpec

# TensorRT-LLM's first: its names are ModelOpt's own.
ORDER = ("trtllm", "vllm")


def choose_layout(spec: HeadSpec) -> Layout:
    """Return the layout that a head will be written in: TensorRT-LLM's, or vLLM's where only that engine can load it.

    It is asked for before training, so that no head is trained that could not be written.

    Args:
        spec: what the head will be.

    Raises:
        LayoutCannot: neither can load it; vLLM's reason is given.
    """
    found = None
    for layout in map(by_name, ORDER):
        found = next((limit for limit in layout.limits if limit.applies(spec, ())), None)
        if found is None:
            return layout
    assert found is not None, "ORDER names layouts"
    raise LayoutCannot(found.what, where=found.source, fix=found.fix)
