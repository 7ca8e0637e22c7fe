"""What becomes what, decided before a byte is written. What belongs here: a conversion's plan and its refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint.header import TensorInfo
from ..errors import LayoutCannot
from ..head.spec import HeadSpec
from .layout import Layout, Stored, stored
from .read import Head


@dataclass(frozen=True)
class Source:
    """A stored tensor that a step reads, and the row that says what it holds."""

    row: Stored
    info: TensorInfo


@dataclass(frozen=True)
class Step:
    """How one tensor of the output comes to be.

    Attributes:
        name: its name in the output.
        sources: the stored tensors it is made of.
        row: the output's row.
        action: "carried" (same name), "renamed" (same bytes, other name) or "re-packed".
    """

    name: str
    sources: tuple[Source, ...]
    row: Stored
    action: str

    @property
    def is_copy(self) -> bool:
        """Whether the bytes stay as they are."""
        return self.action != "re-packed"


@dataclass(frozen=True)
class Plan:
    """A conversion, decided.

    Attributes:
        source: the head that is read.
        layout: the layout that is written.
        spec: what the output is.
        config: the output's config.json.
        steps: one for each tensor of the output.
        dropped: source tensors that are not in the output, with the reason.
    """

    source: Head
    layout: Layout
    spec: HeadSpec
    config: Mapping[str, Any]
    steps: tuple[Step, ...]
    dropped: Mapping[str, str]


def plan(head: Head, layout: Layout) -> Plan:
    """Plan a head's conversion into another layout of the same attention.

    Args:
        head: the source.
        layout: the layout to write.

    Raises:
        LayoutCannot: the layout, or the engine behind it, has no place for something this head has.
    """
    spec = head.spec
    if layout.write_config is None:
        raise LayoutCannot(f"{layout.name} is read, not written", fix="Write trtllm or vllm.")
    for limit in layout.limits:
        if limit.hits(spec):
            raise LayoutCannot(limit.what, where=limit.source, fix=limit.fix)
    steps = tuple(
        _step(name, row, head)
        for name, row in stored(layout, spec).items()
        if all(slot in head.places for slot in row.slots)
    )
    used = {source.info.name for step in steps for source in step.sources}
    dropped = {name: why for name, why in head.layout.ignored.items() if name in head.checkpoint.tensors}
    lost = head.checkpoint.tensors.keys() - used - dropped.keys()
    if lost:
        raise LayoutCannot(
            f"{layout.name} has no place for {', '.join(sorted(lost))}",
            where=head.checkpoint.folder,
            fix="Choose another layout.",
        )
    config = dict(layout.write_config(spec)) | dict(head.read.carried)
    return Plan(head, layout, spec, config, steps, dropped)


def _step(name: str, row: Stored, head: Head) -> Step:
    sources: list[Source] = []
    for slot in row.slots:
        source = Source(*head.places[slot])
        if source not in sources:
            sources.append(source)
    same = len(sources) == 1 and (sources[0].row.slots, sources[0].row.move) == (row.slots, row.move)
    action = ("carried" if sources[0].info.name == name else "renamed") if same else "re-packed"
    return Step(name, tuple(sources), row, action)
