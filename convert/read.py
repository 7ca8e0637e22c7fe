"""A checkpoint read as a head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.folder import Checkpoint
from ..checkpoint.formats import CONFIG_KEY, SIDE_FILE
from ..checkpoint.header import TensorInfo
from ..engines import detect
from ..engines.layout import Layout, Stored, ignorable, readable, unclaimed
from ..errors import ConfigInvalid, ConfigUnsupported, LayoutCannot, Problem, TensorTwins, TensorUnknown, UnknownLayout
from ..head.contract import FLOATS, Problems, check_d2t, compare, problem_of, summarize
from ..head.slots import INTEGER, needs
from ..head.spec import HeadSpec
from .captured import Captured, Hints
from .config import ReadConfig, find_config
from .identify import Kind, Undecided, find_undecided, identify, not_a_head
from .quantized import add_scales, find_scales, has_scales

if TYPE_CHECKING:
    import torch

NO_MAP = "a full vocabulary needs no map, and this one leads each token to itself"


@dataclass(frozen=True)
class Head:
    """A head on disk, with each tensor claimed by a row of its layout.

    Attributes:
        checkpoint: the folder.
        layout: the layout it is in.
        read: what its config says.
        places: stored tensor and header entry, by each slot that is present.
        twins: tensors that repeat what others hold under another name; name and the others' slots.
        ignored: tensors that carry nothing, with the reason.
        hints: what the user said where the config is silent or ambiguous.
    """

    checkpoint: Checkpoint
    layout: Layout
    read: ReadConfig
    places: Mapping[str, tuple[Stored, TensorInfo]]
    twins: Mapping[str, Stored] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    hints: Hints = field(default_factory=Hints)

    @property
    def spec(self) -> HeadSpec:
        """What the head is."""
        return self.read.spec

    @property
    def is_quantized(self) -> bool:
        """Whether a linear is stored with scales."""
        return has_scales(self.places)

    @property
    def side_file(self) -> Path | None:
        """The file beside config.json that says how to read the scales, where there is one."""
        file = self.checkpoint.folder / SIDE_FILE
        return file if self.is_quantized and not self.checkpoint.headers_only and file.is_file() else None


@dataclass(frozen=True)
class HeadReading:
    """A checkpoint read as a head as far as it can be: what is known, and every problem that was found on the way.

    Attributes:
        checkpoint: the folder.
        hints: what the user said where the config is silent or ambiguous.
        problems: in the order in which they were found; `refuse` raises the first error.
        layout: the layout the head is in; None where that is not known.
        config: config.json in the keys of `engines.keys`; as it is where the layout is not known.
        read: what the config says; None where a problem makes a spec impossible.
        captured: the captured layers; None where they are not known. `read` and `head` then have as many as fc has room
            for, which is what their tensors follow from.
        head: the head, with the tensors that were claimed; None without a spec. With errors it may lack tensors.
        rows: what the layout stores for this head, by name.
        misfits: those of the problems that are tensors missing, unknown or of another shape or dtype.
        kind: what the checkpoint is by its marks, where that is no plain Eagle3 head.
    """

    checkpoint: Checkpoint
    hints: Hints
    problems: tuple[Problem, ...]
    layout: Layout | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    read: ReadConfig | None = None
    captured: Captured | None = None
    head: Head | None = None
    rows: Mapping[str, Stored] = field(default_factory=dict)
    misfits: tuple[Problem, ...] = ()
    kind: Kind | None = None

    @property
    def undecided(self) -> tuple[Undecided, ...]:
        """The facts that the head's files leave open."""
        return find_undecided(self.problems, self.config, self.hints, self.checkpoint.tensors)

    @property
    def spec(self) -> HeadSpec | None:
        """What the head is, as far as it is known."""
        return self.read.spec if self.read else None

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems for which kconv converts nothing."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    def sound_head(self) -> Head:
        """Return the head.

        Raises:
            KconvError: the first error of the reading.
        """
        for problem in self.errors:
            problem = summarize(self.misfits) if problem in self.misfits else problem
            # What reads a config does not know whose it is, and a command may have two.
            in_config = problem.where.partition(":")[0] == "config.json"
            where = f"{self.checkpoint.source}/{problem.where}" if in_config else problem.where
            raise replace(problem, where=where).error()
        if self.head is None:
            raise RuntimeError("the head was neither read nor refused")
        return self.head


def read(
    checkpoint: Checkpoint, *, layout: Layout | None = None, hints: Hints | None = None, values: bool = True
) -> HeadReading:
    """Read a checkpoint as a head and collect every problem: converting refuses by it, validating lists them.

    Config and headers are read, and the values of maps and twins alone.

    Args:
        checkpoint: an opened folder, or one of headers.
        layout: the layout it is in; found by its marks if None.
        hints: what the user says where the config is silent or ambiguous.
        values: whether values may be read; never of a checkpoint of headers.
    """
    problems, hints, tensors = Problems(), hints or Hints(), checkpoint.tensors
    kind = identify(checkpoint.config, tensors) if layout is None else None
    if kind and not kind.is_head:
        problem = not_a_head(kind, checkpoint.config)
        return HeadReading(checkpoint, hints, (problem,), config=checkpoint.config, kind=kind)
    if layout is None:
        with problems.catching():
            layout = detect(checkpoint.config, tensors)
    if layout is None:
        return HeadReading(checkpoint, hints, tuple(problems), config=checkpoint.config, kind=kind)
    dtype = FLOATS[0]
    with problems.catching():
        dtype = weight_dtype(checkpoint)
    found = find_config(checkpoint.config, tensors, problems, dtype=dtype, hints=hints, table=layout.config)
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
    )
    problems += misfits
    held = {name: row for name, row in rows.items() if name in tensors}
    places = {slot: (row, tensors[name]) for name, row in held.items() for slot in row.slots}
    if not misfits:
        for slot, need in needs(spec).items():
            if slot not in places and not need.slot.absent_when(spec):
                error = LayoutCannot(
                    f"{layout.name} has no place for {slot}, which the config requires",
                    where="config.json",
                    fix="Name the layout that the head is in with --from.",
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
            marks = read_slot(head, "t2d") if usable and "t2d" in places else None
            problems += check_d2t(spec, read_slot(head, "d2t"), places["d2t"][1].name, marks)
    known = (layout, found.keys, found.read, found.captured, head, rows, tuple(misfits), kind)
    return HeadReading(checkpoint, hints, tuple(problems), *known)


def read_head(checkpoint: Checkpoint, *, layout: Layout | None = None, hints: Hints | None = None) -> Head:
    """Read a checkpoint as a head; see `read` for the arguments.

    Raises:
        UnknownLayout, ConfigInvalid, ConfigUnsupported, CapturedUndecided: the config cannot be read.
        TensorMissing, TensorUnknown, TensorShape, TensorValue: the tensors are not what it demands.
        TensorTwins: two tensors hold the same weight, and differ.
    """
    return read(checkpoint, layout=layout, hints=hints).sound_head()


def claim_tensors(checkpoint: Checkpoint, *, layout: Layout | None = None, hints: Hints | None = None) -> Head:
    """Read a checkpoint as a head like `read_head`, but look at no value: d2t may be no map at all.

    Raises:
        As `read_head`, but TensorValue.
    """
    return read(checkpoint, layout=layout, hints=hints, values=False).sound_head()


def rows_of(layout: Layout, spec: HeadSpec, tensors: Mapping[str, TensorInfo]) -> dict[str, Stored]:
    """Return each tensor that a head of this spec has or may have, by the names and in the formats that are there.

    Raises:
        LayoutCannot, TensorMissing: a quantized linear that cannot be read; see `convert.quantized`.
    """
    return add_scales(readable(layout, spec, tensors), tensors)


def _idle_maps(spec: HeadSpec, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return the maps that trainers save with a full vocabulary; vLLM refuses such a head."""
    dtypes = {"d2t": INTEGER, "t2d": ("BOOL",)}
    return {
        name: NO_MAP
        for name in dtypes.keys() & tensors.keys()
        if spec.draft_vocab == spec.vocab
        and tensors[name].shape == (spec.vocab,)
        and tensors[name].dtype in dtypes[name]
    }


def _check_idle_maps(head: Head, problems: Problems) -> None:
    for name, why in head.ignored.items():
        if why == NO_MAP:
            from ..checkpoint.tensors import read_tensor

            values = read_tensor(head.checkpoint.tensors[name])
            if values.any() if name == "d2t" else not values.all():
                error = TensorUnknown(
                    f"the vocabulary is full, but {name} does not map each token to itself",
                    where=name,
                    fix="Correct draft_vocab_size if the head is reduced. Remove the map if it is not.",
                )
                problems.append(error.problem("K182"))


def _check_twins(head: Head, unfit: Collection[str], problems: Problems) -> None:
    """Compare tensors that hold one weight, but for those that are unfit by their shape or dtype."""
    for name, row in head.twins.items():
        if name in unfit or any(head.places[slot][1].name in unfit for slot in row.slots):
            continue
        for slot, part in zip(row.slots, _unpack(head, row, head.checkpoint.tensors[name]), strict=True):
            other = head.places[slot][1]
            if other.name != name and not _same_bits(part, read_slot(head, slot)):
                error = TensorTwins(
                    f"{name} and {other.name} are two names for one weight, but their values differ",
                    where=name,
                    fix="Find out which one the head was trained with, and remove the other.",
                )
                problems.append(problem_of(error))


def _check_quantization(head: Head, problems: Problems) -> None:
    stated = CONFIG_KEY in head.read.carried or head.side_file is not None or head.checkpoint.headers_only
    if head.is_quantized and not stated:
        error = ConfigInvalid(
            f"the weights are quantized, but neither {CONFIG_KEY} in the config nor {SIDE_FILE} says how",
            where="config.json",
            fix="Export the head again. Engines would read its packed bytes as weights.",
        )
        problems.append(error.problem("K197"))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    # As bytes: NaN equals itself, and 0.0 is not -0.0.
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def read_slot(head: Head, slot: str) -> torch.Tensor:
    """Read one slot's tensor, unpacked from wherever the layout keeps it.

    Raises:
        KeyError: the head does not hold the slot.
    """
    row, info = head.places[slot]
    return next(part for s, part in zip(row.slots, _unpack(head, row, info), strict=True) if s == slot)


def _unpack(head: Head, row: Stored, info: TensorInfo) -> Iterator[torch.Tensor]:
    from ..checkpoint.tensors import read_tensor

    known, stored = needs(head.spec), read_tensor(info)
    # A scale is no slot of the spec, and never packed with others.
    shapes = [known[slot].shape if slot in known else info.shape for slot in row.slots]
    return iter(row.move.unpack(stored, shapes))


def read_weights(head: Head) -> dict[str, torch.Tensor]:
    """Read every slot that the head holds into memory.

    Raises:
        ConfigUnsupported: the head is quantized, and cannot be computed with.
    """
    if head.is_quantized:
        raise ConfigUnsupported(
            "the head is quantized, but this needs unquantized weights",
            where=head.checkpoint.folder,
            fix="Give the head that it was quantized from.",
        )
    return {slot: read_slot(head, slot) for slot in head.places}


def weight_dtype(checkpoint: Checkpoint) -> str:
    """Return the dtype that most of a checkpoint's weight bytes are in.

    Raises:
        UnknownLayout: it holds no floating-point weights.
    """
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype in FLOATS:
            sizes[info.dtype] += info.size
    if not sizes:
        raise UnknownLayout(
            "the checkpoint holds no BF16, F16 or F32 weights",
            where=checkpoint.folder,
            fix="Give the unquantized head.",
        )
    return sizes.most_common(1)[0][0]
