"""Read a checkpoint as a head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..checkpoint.bytes import read_integers, same_bytes
from ..checkpoint.folder import Checkpoint
from ..checkpoint.formats import CONFIG_KEY, HEAD_SCALES, SIDE_FILE
from ..checkpoint.header import TensorInfo, byte_size
from ..checkpoint.manifest import Hints
from ..checkpoint.schema import MAX_YAML, parse_object, read_bounded
from ..drafters.base import Drafter, Kind, Spec
from ..drafters.captured import Captured
from ..drafters.contract import FLOATS, Dim, Problems, check_d2t, compare, name_prefix, problem_of, summarize
from ..drafters.facts import Fact, Undecided, find_undecided
from ..drafters.keys import ABSENT, find
from ..drafters.slots import INTEGER, needs
from ..drafters.spec import Gqa, Mla
from ..engines import detect
from ..engines.layout import Layout, Stored, ignorable, readable, unclaimed
from ..engines.moves import Same
from ..errors import (
    ConfigInvalid,
    ConfigUnsupported,
    LayoutCannot,
    Problem,
    TensorMissing,
    TensorShape,
    TensorTwins,
    TensorUnknown,
    UnknownLayout,
    Where,
    in_config,
)
from .config import ReadConfig, find_config
from .identify import identify, not_a_head
from .quantized import add_scales, find_scales, has_scales

if TYPE_CHECKING:
    import torch

# What to do about two tensors that hold one weight with different values.
ONE_NAME = "Find out which one the head was trained with, and remove the other."
NO_MAP = "a full vocabulary needs no map, and this one maps each token to itself"


@dataclass(frozen=True)
class Head:
    """A head on disk, with each tensor assigned to a row of its layout.

    Attributes:
        places: stored tensor and header entry, by each slot that is present.
        twins: tensors that repeat others under a second name; their name and the others' slots.
        ignored: tensors that have no effect, with the reason.
    """

    checkpoint: Checkpoint
    layout: Layout
    read: ReadConfig
    places: Mapping[str, tuple[Stored, TensorInfo]]
    twins: Mapping[str, Stored] = field(default_factory=dict[str, Stored])
    ignored: Mapping[str, str] = field(default_factory=dict[str, str])
    hints: Hints = field(default_factory=Hints)

    @property
    def spec(self) -> Any:
        """The spec of the head, a dataclass of its family."""
        return self.read.spec

    @property
    def drafter(self) -> Drafter:
        return self.layout.drafter

    @property
    def is_quantized(self) -> bool:
        """Whether any linear layer is stored with scales."""
        return has_scales(self.places)

    @cached_property
    def side(self) -> bytes:
        """The file next to config.json that says how to read the scales; empty without one."""
        file = self.checkpoint.folder / SIDE_FILE
        if not self.is_quantized or self.checkpoint.headers_only or not file.is_file():
            return b""
        return read_bounded(file, ConfigInvalid, limit=MAX_YAML, fix="Export it again.")

    @cached_property
    def side_values(self) -> Mapping[str, Any]:
        """The same, parsed."""
        try:
            return parse_object(self.side) if self.side else {}
        except ValueError as fault:
            where = self.checkpoint.folder / SIDE_FILE
            raise ConfigInvalid(f"{SIDE_FILE} is no JSON: {fault}", where=where, fix="Export it again.") from fault


@dataclass(frozen=True)
class HeadReading:
    """A checkpoint read as a head, as far as possible: what is known, and every problem found.

    Attributes:
        problems: in the order in which they were found; `sound_head` raises the first error.
        config: config.json in the common keys; unchanged if the layout is unknown.
        read: the contents of the config; None if a problem makes a spec impossible.
        captured: the captured layers; None if unknown. `read` and `head` then have as many as fc has room for, which
            determines their tensors.
        head: the head, with the tensors that were assigned; None without a spec. With errors it may lack tensors.
        rows: the layout's tensors for this head, by name.
        misfits: the problems about tensors that are missing, unknown or have another shape or dtype.
        kind: what the checkpoint is by its marks, if it is not simply a drafter of a known family.
    """

    checkpoint: Checkpoint
    hints: Hints
    problems: tuple[Problem, ...]
    layout: Layout | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    read: ReadConfig | None = None
    captured: Captured | None = None
    head: Head | None = None
    rows: Mapping[str, Stored] = field(default_factory=dict[str, Stored])
    misfits: tuple[Problem, ...] = ()
    kind: Kind | None = None

    @property
    def undecided(self) -> tuple[Undecided, ...]:
        """The facts that the head's files leave open."""
        facts: Mapping[str, Fact] = self.layout.drafter.facts if self.layout else {}
        return find_undecided(facts, self.problems, self.config, self.hints, self.checkpoint.tensors)

    @property
    def spec(self) -> Any:
        """The head's spec, as far as known, a dataclass of its family; None if unknown."""
        return self.read.spec if self.read else None

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that stop a conversion."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    def sound_head(self) -> Head:
        """Return the head, or raise the first error found while reading."""
        for problem in self.errors:
            problem = summarize(self.misfits) if problem in self.misfits else problem
            if isinstance(problem.where, Where):
                problem = replace(problem, where=problem.where.within(self.checkpoint.source))
            raise problem.error()
        if self.head is None:
            raise RuntimeError("the head was neither read nor refused")
        return self.head


def read(
    checkpoint: Checkpoint, *, layout: Layout | None = None, hints: Hints | None = None, values: bool = True
) -> HeadReading:
    """Read a checkpoint as a head and collect every problem: conversion stops at them, validation lists them.

    Reads config and headers, and the values of only maps and twins; with `values=False`, as a checkpoint with headers
    only needs, no values. The layout is detected from the marks if None.
    """
    problems, hints, tensors = Problems(), hints or Hints(), checkpoint.tensors
    kind = identify(checkpoint.config, tensors) if layout is None else None
    if kind and not kind.is_head:
        problem = not_a_head(kind, checkpoint.config)
        return HeadReading(checkpoint, hints, (problem,), config=checkpoint.config, kind=kind)
    if layout is None:
        with problems.catching():
            layout = detect(checkpoint.config, tensors)
    # The checker does not know that `catching` ends the block above.
    if layout is None:  # pyright: ignore[reportUnnecessaryComparison]
        return HeadReading(checkpoint, hints, tuple(problems), config=checkpoint.config, kind=kind)
    dtype = FLOATS[0]
    with problems.catching():
        dtype = weight_dtype(checkpoint)
    found = find_config(
        checkpoint.config, tensors, problems, drafter=layout.drafter, dtype=dtype, hints=hints, table=layout.config
    )
    if found.read is None:
        return HeadReading(checkpoint, hints, tuple(problems), layout, found.keys, captured=found.captured, kind=kind)
    spec = found.read.spec
    rows = find_scales(readable(layout, spec, tensors), tensors, problems)
    ignored = ignorable(layout, tensors) | _idle_maps(spec, tensors)
    misfits = compare(
        {name: row.expected for name, row in rows.items()},
        tensors,
        ignored=ignored,
        unclaimed=unclaimed(layout, spec),
        slots={name: row.slots[0] for name, row in rows.items()},
        norm_fix=layout.drafter.norm_fix,
        dims=_dims(layout, spec, found.keys),
    )
    misfits = name_prefix(misfits, rows, tensors)
    if misfits and (another := _other_attention(spec, tensors)) is not None:
        misfits = [another]  # what else does not fit is a consequence
    if any(problem.kind is TensorShape for problem in misfits):
        # With a wrong size in the config, tensors that it demands and the head never had are a consequence.
        misfits = sorted(misfits, key=lambda problem: problem.kind is TensorMissing)
    problems += misfits
    held = {name: row for name, row in rows.items() if name in tensors}
    places = {slot: (row, tensors[name]) for name, row in held.items() for slot in row.slots}
    if not misfits:
        for slot, need in needs(spec).items():
            if slot not in places and not need.slot.absent_when(spec):
                error = LayoutCannot(
                    f"{layout.name} has no place for {slot}, which the config requires",
                    where=in_config(),
                    fix="Name the head's layout with --from.",
                )
                problems.append(problem_of(error))
    twins = {name: row for name, row in held.items() if any(places[slot][1].name != name for slot in row.slots)}
    head = Head(checkpoint, layout, found.read, places, twins, ignored, hints)
    _check_quantization(head, problems)
    if values and not checkpoint.headers_only:
        unfit = {problem.where for problem in problems}
        _check_twins(head, unfit, problems)
        _check_idle_maps(head, problems)
        if "d2t" in places and places["d2t"][1].name not in unfit:
            info = tensors.get("t2d")
            usable = info is not None and (info.dtype, info.shape) == ("BOOL", (spec.vocab,))
            marks = read_integers(info) if info is not None and usable and "t2d" in places else None
            d2t = places["d2t"][1]
            problems += check_d2t(spec, read_integers(d2t), d2t.name, marks)
    known = (layout, found.keys, found.read, found.captured, head, rows, tuple(misfits), kind)
    return HeadReading(checkpoint, hints, tuple(problems), *known)


ITS_CONFIG = "Put the config.json that was exported with these tensors beside them."


def _dims(layout: Layout, spec: Spec, keys: Mapping[str, Any]) -> dict[str, Dim]:
    """Return what a config says of dims, by their names in the shape formulas."""
    kind = Mla if isinstance(getattr(spec, "attention", None), Mla) else Gqa
    own = (*layout.drafter.keys, *layout.drafter.attention.get(kind, ()))
    dims, known = layout.drafter.dims(spec, 0), dict[str, Dim]()
    for key in own:
        name, absent = key.field.rpartition(".")[2], all(find(keys, one) is ABSENT for one in key.names + key.also)
        if name in dims and dims[name] and (key.default or not absent):
            known[name] = Dim(key.names[0], dims[name], assumed=absent)
    return known


def _other_attention(spec: Spec, tensors: Mapping[str, TensorInfo]) -> Problem | None:
    """Return that the config is of another kind of attention than the tensors."""
    latent, plain = (any(part in name for name in tensors) for part in (".kv_b_proj.", ".k_proj."))
    if latent == plain or isinstance(getattr(spec, "attention", None), Mla) == latent:
        return None
    asks, has = ("MHA or GQA", "kv_b_proj, as MLA has") if latent else ("MLA", "k_proj and no kv_b_proj")
    what = f"it is of {asks}, but the tensors have {has}"
    return Problem("K026", "error", in_config(), what, ITS_CONFIG, ConfigInvalid)


def read_head(checkpoint: Checkpoint, *, layout: Layout | None = None, hints: Hints | None = None) -> Head:
    """Read a checkpoint as a head; see `read` for the arguments.

    Raises:
        UnknownLayout, ConfigInvalid, ConfigUnsupported, CapturedUndecided: the config cannot be read.
        TensorMissing, TensorUnknown, TensorShape, TensorValue: the tensors do not match the config.
        TensorTwins: two tensors hold the same weight, and differ.
    """
    # What config and headers show is refused before the values of maps are read.
    read(checkpoint, layout=layout, hints=hints, values=False).sound_head()
    return read(checkpoint, layout=layout, hints=hints).sound_head()


def claim_tensors(checkpoint: Checkpoint, *, layout: Layout | None = None, hints: Hints | None = None) -> Head:
    """Read a checkpoint as a head like `read_head`, but check no values: d2t may not be a valid map."""
    return read(checkpoint, layout=layout, hints=hints, values=False).sound_head()


def rows_of(layout: Layout, spec: Spec, tensors: Mapping[str, TensorInfo]) -> dict[str, Stored]:
    """Return each tensor that a head of this spec has or may have, by the stored names and formats.

    Raises:
        LayoutCannot, TensorMissing: a quantized linear layer cannot be read.
    """
    return add_scales(readable(layout, spec, tensors), tensors)


def _idle_maps(spec: Spec, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return the maps that trainers save for a full vocabulary; vLLM refuses such a head."""
    dtypes = {"d2t": INTEGER, "t2d": ("BOOL",)}
    return {
        name: NO_MAP
        for name in dtypes
        if name in tensors
        and spec.draft_vocab == spec.vocab
        and tensors[name].shape == (spec.vocab,)
        and tensors[name].dtype in dtypes[name]
    }


def _check_idle_maps(head: Head, problems: Problems) -> None:
    for name, why in head.ignored.items():
        if why == NO_MAP:
            values = read_integers(head.checkpoint.tensors[name])
            if values.any() if name == "d2t" else not values.all():
                error = TensorUnknown(
                    f"the vocabulary is full, but {name} does not map each token to itself",
                    where=name,
                    fix="If the head has a reduced vocabulary, correct draft_vocab_size. Otherwise remove the map.",
                )
                problems.append(error.problem("K182"))


def _check_twins(head: Head, unfit: Collection[str], problems: Problems) -> None:
    """Compare tensors that hold the same weight, except those with a wrong shape or dtype."""
    for name, row in head.twins.items():
        if name in unfit or any(head.places[slot][1].name in unfit for slot in row.slots):
            continue
        info = head.checkpoint.tensors[name]
        parts = find_parts(head.spec, row, info)
        for slot in row.slots if parts else row.slots[:1]:
            other = head.places[slot][1]
            # Slots that cannot be told apart are compared together.
            one, another = (parts[slot], find_part(head, slot)) if parts else (info, other)
            if other.name != name and not same_bytes(one, another):
                error = TensorTwins(
                    f"{name} and {other.name} are two names for one weight, but their values differ",
                    where=name,
                    fix=ONE_NAME,
                )
                problems.append(problem_of(error))


def _check_quantization(head: Head, problems: Problems) -> None:
    stated = CONFIG_KEY in head.read.carried or head.checkpoint.headers_only
    with problems.catching():
        stated = bool(head.side_values) or stated
    if head.is_quantized and not stated:
        error = ConfigInvalid(
            f"the weights are quantized, but neither {CONFIG_KEY} in the config nor {SIDE_FILE} says how",
            where=in_config(),
            fix="Export the head again. Engines would read its packed bytes as weights.",
        )
        problems.append(error.problem("K197"))


def read_slot(head: Head, slot: str) -> torch.Tensor:
    """Read one slot's tensor from its place in the layout; KeyError if the head does not have the slot."""
    from ..checkpoint.tensors import read_tensor

    return read_tensor(find_part(head, slot))


def find_part(head: Head, slot: str) -> TensorInfo:
    """Return where a slot's bytes are; KeyError if the head does not have the slot, or not in a tensor that fits."""
    row, info = head.places[slot]
    return (find_parts(head.spec, row, info) or {})[slot]


def find_parts(spec: Spec, row: Stored, info: TensorInfo) -> dict[str, TensorInfo] | None:
    """Return where each slot's bytes are inside a stored tensor; None if they cannot be told apart."""
    if isinstance(row.move, Same):
        return {row.slots[0]: info}
    known = needs(spec)
    # The scales of slots that were fused before they were quantized belong to all of them.
    if not known.keys() >= set(row.slots) or info.dtype not in FLOATS:
        return None
    shapes = [known[slot].shape for slot in row.slots]
    if info.shape != row.move.stored_shape(shapes):
        return None
    found, begin = dict[str, TensorInfo](), info.begin
    for slot, shape in zip(row.slots, shapes, strict=True):
        found[slot] = info._replace(shape=shape, begin=begin, size=byte_size(info.dtype, shape))
        begin += found[slot].size
    return found


def read_weights(head: Head) -> dict[str, torch.Tensor]:
    """Read every slot of the head into memory.

    Raises:
        ConfigUnsupported: the head is quantized, and kconv cannot compute with it.
    """
    if head.is_quantized:
        raise ConfigUnsupported(
            "the head is quantized, but this needs unquantized weights",
            where=head.checkpoint.folder,
            fix="Pass the head that it was quantized from.",
        )
    return {slot: read_slot(head, slot) for slot in head.places}


def weight_dtype(checkpoint: Checkpoint) -> str:
    """Return the dtype of most of a checkpoint's weight bytes."""
    sizes: Counter[str] = Counter()
    for name, info in checkpoint.tensors.items():
        # In a quantized head without lm_head, the scales may outweigh the norms.
        if info.dtype in FLOATS and name.rpartition(".")[2] not in HEAD_SCALES:
            sizes[info.dtype] += info.size
    if not sizes:
        raise UnknownLayout(
            "the checkpoint holds no BF16, F16 or F32 weights",
            where=checkpoint.folder,
            fix="Pass the unquantized head.",
        )
    return sizes.most_common(1)[0][0]
