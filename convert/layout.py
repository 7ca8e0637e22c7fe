"""What a layout is: a table of rows and config keys. What belongs here: the types, and what follows from a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..head.contract import Expected, dtypes_of
from ..head.slots import SLOTS, layers_of, needs
from ..head.spec import HeadSpec
from .moves import Move, Same

_SLOT_LAYERS = {slot.name: slot.layers for slot in SLOTS}


@dataclass(frozen=True)
class Row:
    """A stored tensor: its name, the slots it holds, and the move between the two.

    A row cannot contradict its slots: its stored shape is derived through its move.

    Attributes:
        name: tensor name on disk; `{i}` is the layer, `{a}` the index of a captured state.
        slots: canonical slots, in the order in which the move packs them.
        move: the reversible packing.
        layers: "all", "first" or "later", where it differs from the slots' own.
    """

    name: str
    slots: tuple[str, ...]
    move: Move = field(default_factory=Same)
    layers: str = ""


@dataclass(frozen=True)
class Stored:
    """A row of one head, with its numbers filled in: the tensor it expects, its slots and the move between."""

    expected: Expected
    slots: tuple[str, ...]
    move: Move

    @property
    def name(self) -> str:
        """The tensor's name on disk."""
        return self.expected.name


@dataclass(frozen=True)
class Limit:
    """Something that a layout, or the engine behind it, has no place for.

    Attributes:
        hits: whether a head of this spec has it.
        what: one sentence for the user.
        fix: what to do instead.
        source: tag-pinned link to the line that decides it.
    """

    hits: Callable[[HeadSpec], bool]
    what: str
    fix: str
    source: str = ""


@dataclass(frozen=True)
class Layout:
    """One layout, as data.

    Attributes:
        name: what the user calls it.
        engine: who reads or writes it, one phrase.
        rows: the table of tensors.
        told_by: whether a config and tensor names bear this layout's marks.
        write_config: spec to config.json; None where the layout is only read.
        limits: what it cannot hold.
        ignored: names that it may hold and that carry nothing, with the reason.
    """

    name: str
    engine: str
    rows: tuple[Row, ...]
    told_by: Callable[[Mapping[str, Any], Iterable[str]], bool]
    write_config: Callable[[HeadSpec], dict[str, Any]] | None = None
    limits: tuple[Limit, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)


def stored(layout: Layout, spec: HeadSpec) -> dict[str, Stored]:
    """Return each tensor that a head of this spec has, or may have, in a layout, by name.

    A slot that two rows hold is stored twice, under both names.
    """
    known = needs(spec)
    found: dict[str, Stored] = {}
    for row, name, slots in _fill(layout, spec):
        own = [known[slot] for slot in slots if slot in known]
        if len(own) == len(slots):
            expected = Expected(
                name,
                row.move.stored_shape([need.shape for need in own]),
                dtypes_of(own[0].slot.dtype),
                all(need.slot.absent_when(spec) for need in own),
            )
            found[name] = Stored(expected, slots, row.move)
    return found


def unclaimed(layout: Layout, spec: HeadSpec) -> dict[str, str]:
    """Return the names that a layout knows but a head of this spec does not have, and why it does not."""
    known = needs(spec)
    return {
        name: f"the config says that the head has no {slots[0].split('.', 1)[-1]}"
        for _, name, slots in _fill(layout, spec)
        if not all(slot in known for slot in slots)
    }


def _fill(layout: Layout, spec: HeadSpec) -> Iterator[tuple[Row, str, tuple[str, ...]]]:
    for row in layout.rows:
        for i in layers_of(row.layers or _SLOT_LAYERS[row.slots[0]], spec.layers):
            for a in range(len(spec.captured) if "{a}" in row.name else 1):
                yield row, row.name.format(i=i, a=a), tuple(slot.format(i=i, a=a) for slot in row.slots)
