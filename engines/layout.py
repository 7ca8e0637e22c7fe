"""What a layout is: a table of rows and config keys."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol, get_args

from ..drafters.base import Drafter, Spec
from ..drafters.contract import Expected, dtypes_of
from ..drafters.keys import ConfigTable
from ..drafters.slots import layers_of, needs
from .moves import Move, Same

Role = Literal["written", "instead", "beside"]


@dataclass(frozen=True)
class Row:
    """A stored tensor: its name, the slots it holds, and the reversible move between the two.

    A row cannot contradict its slots: its stored shape is derived through its move.

    Attributes:
        name: tensor name on disk; `{i}` is the layer, `{a}` the index of a captured state.
        slots: canonical slots, in the order in which the move packs them.
        move: the reversible packing.
        layers: "all", "first" or "later", if it differs from the slots' own.
        role: "written"; or read only: "instead" of the rows that are written, or "beside" them.
    """

    name: str
    slots: tuple[str, ...]
    move: Move = field(default_factory=Same)
    layers: str = ""
    role: Role = "written"


@dataclass(frozen=True)
class Stored:
    """A row of one head, with numbers filled in: the tensor it expects, its slots and the move between them."""

    expected: Expected
    slots: tuple[str, ...]
    move: Move

    @property
    def name(self) -> str:
        """The tensor's name on disk."""
        return self.expected.name


@dataclass(frozen=True)
class Limit:
    """Something that a layout, or the engine that reads it, does not support.

    Attributes:
        id: the rule that reports it, e.g. "K320"; an id is never reused.
        name: the rule's name, e.g. "vllm-mla-norm-before-fc".
        hits: whether a head of this spec is affected.
        what: one sentence for the user.
        fix: what to do instead.
        source: tag-pinned link to the line that decides it.
        holds: if the spec alone does not decide: a pattern of slots, one of which the head must have as well.
        lacks: likewise, a slot that the head must not have.
    """

    id: str
    name: str
    hits: Callable[[Any], bool]
    what: str
    fix: str
    source: str = ""
    holds: str = ""
    lacks: str = ""

    def applies(self, spec: Spec, slots: Iterable[str]) -> bool:
        """Return whether a head of this spec with these slots is affected."""
        if not self.hits(spec) or (self.lacks and self.lacks in (slots := tuple(slots))):
            return False
        return not self.holds or any(fnmatchcase(slot, self.holds) for slot in slots)


class TargetFacts(Protocol):
    """The target's properties that a limit depends on and a config names."""

    @property
    def name(self) -> str:
        """Its folder or hub id."""
        ...

    @property
    def architecture(self) -> str:
        """Class of the whole target, e.g. "KimiK25ForConditionalGeneration"; empty if unknown."""
        ...

    @property
    def layers(self) -> int | None:
        """Number of its decoder layers; None if unknown."""
        ...

    @property
    def model_type(self) -> str:
        """Model type of its text model, e.g. "kimi_k2"; empty if unknown."""
        ...


@dataclass(frozen=True)
class TargetLimit:
    """A property of a head that a layout can express for some targets but not for others.

    Attributes:
        hits: whether a head of this spec is affected with this target; None for an unknown target.
        what: one sentence for the user.
        fix: what to do instead.
        source: tag-pinned link to the line that decides it.
        rule: the rule that reports it for a head's own files; "" if none does.
        at_depth: whether a head of this spec is affected with a target of so many layers, whatever else it is.
    """

    hits: Callable[[Any, TargetFacts | None], bool]
    what: str
    fix: str
    source: str
    rule: str = ""
    at_depth: Callable[[Any, int | None], bool] = lambda _spec, _depth: False


def _same(spec: Any) -> Any:
    return spec


IGNORED = {"*.rotary_emb.inv_freq": "engines compute RoPE's frequencies from the config"}


@dataclass(frozen=True)
class Layout:
    """One layout, as data.

    Attributes:
        name: what the user calls it.
        drafter: the family of the drafters that it stores.
        engine: what reads or writes it, as one phrase.
        rows: the table of tensors.
        told_by: whether a config and tensor names show that this is the layout.
        write_config: spec to config.json; None if the layout is only read.
        write_beside: the same for a known target; None if the target makes no difference.
        called: the layout of another family under whose name a user asks for it; "" for its own name.
        becomes: returns the spec to write for a drafter that the layout holds only in another form, one that drafts the
            same if each slot that the form has besides is zero.
        limits: what it does not support.
        target_limits: what it cannot express for some targets.
        needs: slots that its engine requires even if other engines share the target's, with the reason.
        replaces: slots that its engine takes from the target if they fit, even if the head has them, with the reason.
        config: how its config differs from the common keys.
        ignored: patterns of names that it may hold and that have no effect, with the reason.
        written_for: names of further engines that load it, besides those whose own layout it is.
    """

    name: str
    drafter: Drafter
    engine: str
    rows: tuple[Row, ...]
    told_by: Callable[[Mapping[str, Any], Iterable[str]], bool]
    write_config: Callable[[Any], dict[str, Any]] | None = None
    write_beside: Callable[[Any, TargetFacts], dict[str, Any]] | None = None
    called: str = ""
    becomes: Callable[[Any], Any] = _same
    limits: tuple[Limit, ...] = ()
    target_limits: tuple[TargetLimit, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict[str, str])
    replaces: Mapping[str, str] = field(default_factory=dict[str, str])
    config: ConfigTable = field(default_factory=ConfigTable)
    ignored: Mapping[str, str] = field(default_factory=lambda: IGNORED)
    written_for: tuple[str, ...] = ()


def stored(layout: Layout, spec: Spec) -> dict[str, Stored]:
    """Return each tensor that a head of this spec has, or may have, as a layout writes it, by name.

    A slot that two rows hold is stored twice, under both names.
    """
    return _rows(layout, spec)["written"]


def readable(layout: Layout, spec: Spec, names: Container[str]) -> dict[str, Stored]:
    """Return each tensor that a head of this spec has, or may have, by the names that a checkpoint uses.

    What is only read is there if a tensor bears its name. What is written is there too, unless no tensor bears
    its name and each of its slots is held by a row that is read instead.
    """
    rows = _rows(layout, spec)
    there = {role: {name: row for name, row in held.items() if name in names} for role, held in rows.items()}
    covered = {slot for row in there["instead"].values() for slot in row.slots}
    needed = {name: row for name, row in rows["written"].items() if name in names or not covered.issuperset(row.slots)}
    return there["beside"] | there["instead"] | needed


def ignorable(layout: Layout, names: Iterable[str]) -> dict[str, str]:
    """Return those of the names that carry nothing in a layout, with the reason."""
    return {name: why for name in names for pattern, why in layout.ignored.items() if fnmatchcase(name, pattern)}


def _rows(layout: Layout, spec: Spec) -> dict[Role, dict[str, Stored]]:
    """Return what the rows say of a head of this spec, by role and name."""
    known = needs(spec)
    found: dict[Role, dict[str, Stored]] = {role: {} for role in get_args(Role)}
    for row, name, slots in _fill(layout, spec):
        own = [known[slot] for slot in slots if slot in known]
        if len(own) == len(slots):
            expected = Expected(
                name,
                row.move.stored_shape([need.shape for need in own]),
                dtypes_of(own[0].slot.dtype),
                all(need.slot.absent_when(spec) for need in own),
                own[0].slot.shape if len(own) == 1 else "",
            )
            found[row.role][name] = Stored(expected, slots, row.move)
    return found


def unclaimed(layout: Layout, spec: Spec) -> dict[str, str]:
    """Return the names that a layout knows but a head of this spec does not have, and why it does not."""
    known = needs(spec)
    return {
        name: f"the config says that the head has no {_without_layer(next(s for s in slots if s not in known))}"
        for _, name, slots in _fill(layout, spec)
        if not all(slot in known for slot in slots)
    }


def _without_layer(slot: str) -> str:
    layer, _, rest = slot.partition(".")
    return rest if layer.isdigit() else slot


def _fill(layout: Layout, spec: Spec) -> Iterator[tuple[Row, str, tuple[str, ...]]]:
    own_layers = {slot.name: slot.layers for slot in layout.drafter.slots}
    for row in layout.rows:
        # A slot with its numbers filled in, as fc_norm.0, is outside the layers.
        for i in layers_of(row.layers or own_layers.get(row.slots[0], ""), spec.layers):
            for a in range(len(spec.captured) if "{a}" in row.name else 1):
                yield row, row.name.format(i=i, a=a), tuple(slot.format(i=i, a=a) for slot in row.slots)
