"""`kconv diff`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ..errors import KconvError, LayoutCannot, StepFailed
from ..lines import Line, Part, Result, Styled, Table, filename
from ..options import Name, argument, option
from .base import Context
from .reading import Reading

if TYPE_CHECKING:
    from ..checkpoint.header import TensorInfo
    from ..checkpoint.manifest import Hints
    from ..convert.read import HeadReading
    from ..validate.report import Report

# In place of a value: the files leave it open, or do not have it.
UNDECIDED, ABSENT = Styled("UNDECIDED", "bold yellow"), Styled("absent", "dim")
Stored = tuple["TensorInfo", ...]


@dataclass(frozen=True)
class Drafted:
    """One of the two drafters.

    Attributes:
        name: as the user gave it.
        reading: the checkpoint read as a head, as far as possible.
        report: what engines would make of it, from its config and headers.
    """

    name: str
    reading: HeadReading
    report: Report

    @cached_property
    def open_fields(self) -> set[str]:
        """The fields of the spec that the files leave open; they hold a default, or a filler."""
        facts = self.reading.layout.drafter.facts if self.reading.layout else {}
        found = {facts[one.fact].path for one in self.reading.undecided}
        return found if self.reading.captured else found | {"captured"}

    @cached_property
    def keys(self) -> dict[str, Any]:
        """The keys of config.json, by dotted path."""
        return dict(_leaves(self.reading.checkpoint.config))

    @cached_property
    def carried(self) -> dict[str, Any]:
        """The keys whose meaning kconv does not know, by dotted path, whatever object a layout puts them into."""
        return dict(_leaves(self.reading.read.carried)) if self.reading.read else {}

    def ignores(self, key: str) -> bool:
        """Return whether a key of the config means nothing for a drafter."""
        nested = self.reading.layout.config.nested if self.reading.layout else ""
        key = key.removeprefix(f"{nested}.") if nested else key
        dropped = self.reading.read.dropped if self.reading.read else ()
        return any(key == one or key.startswith(f"{one}.") for one in dropped)

    def tensors(self, *, by_slot: bool) -> dict[str, Stored]:
        """Return where the bytes of each slot are, once for each name that it has; or of each tensor, by name.

        A tensor that no slot describes is there by its name in both cases. Slots that cannot be told apart in their
        tensor are there together.
        """
        from ..convert.read import find_parts

        found: dict[str, list[TensorInfo]] = defaultdict(list)
        for name, info in self.reading.checkpoint.tensors.items():
            row = self.reading.rows.get(name) if by_slot else None
            parts = find_parts(self.reading.spec, row, info) if row else {name: info}
            for slot, part in (parts or {" + ".join(row.slots if row else ()): info}).items():
                found[slot].append(part)
        return {slot: tuple(parts) for slot, parts in found.items()}

    def stops(self, runners: Sequence[str]) -> list[str]:
        """Return the rules by which a head does not pass for some runners."""
        from ..validate.report import STOPS

        own = (one for one in self.report.findings if one.severity in STOPS and one.concerns(runners))
        return sorted({one.rule for one in own})

    def to_json(self) -> dict[str, Any]:
        layout = self.reading.layout
        return {
            "source": self.reading.checkpoint.source,
            "family": layout.drafter.name if layout else None,
            "layout": layout.name if layout else None,
            "undecided": [one.fact for one in self.reading.undecided],
            "problems": [{"code": p.code, "where": p.where, "what": p.what} for p in self.reading.errors],
        }


@dataclass(frozen=True)
class DifferingValue:
    """A field of the spec, or a key of the config, and its value in each drafter.

    Attributes:
        name: its dotted path.
        decides: whether the drafters differ for it: a key may only say the same in another layout's way.
    """

    name: str
    a: Any
    b: Any
    decides: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values, without a side that does not have it; null is a value, or undecided."""
        sides = {side: _plain(value) for side, value in (("a", self.a), ("b", self.b)) if value is not ABSENT}
        return {"name": self.name} | sides


@dataclass(frozen=True)
class DifferingTensor:
    """A slot, or a tensor that no slot describes, and where each drafter stores it.

    Attributes:
        what: the slot's name, or the tensor's.
        how: what differs: "only in A", "only in B", "dtype", "shape", "dtype and shape" or "bytes".
        note: why no engine reads it; empty if one does.
    """

    what: str
    how: str
    a: Stored
    b: Stored
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        sides = {
            side: [{"name": one.name, "dtype": one.dtype, "shape": one.shape} for one in held]
            for side, held in (("a", self.a), ("b", self.b))
        }
        return {"what": self.what, "how": self.how, "note": self.note} | sides


@dataclass(frozen=True, repr=False)
class Diffed(Result):
    """What differs between two drafters.

    Attributes:
        values: fields of the spec that differ, and keys whose meaning kconv does not know.
        keys: keys of config.json that differ.
        tensors: slots and tensors that differ.
        by_slot: whether tensors were compared by slot, which needs two drafters of one family.
        with_bytes: whether the bytes were compared too.
    """

    a: Drafted
    b: Drafted
    values: tuple[DifferingValue, ...]
    keys: tuple[DifferingValue, ...]
    tensors: tuple[DifferingTensor, ...]
    by_slot: bool
    with_bytes: bool

    @property
    def equal(self) -> bool:
        """Whether both are the same drafter, maybe in two layouts."""
        return not (self.values or self.tensors or any(one.decides for one in self.keys))

    @cached_property
    def engines(self) -> dict[str, tuple[tuple[str, list[str]], tuple[str, list[str]]]]:
        """The verdict about each drafter, and the rules by which it does not pass, for each engine that tells apart."""
        pairs = zip(self.a.report.verdicts, self.b.report.verdicts, strict=True)
        found = {
            a.engine: ((a.outcome, self.a.stops(a.runners)), (b.outcome, self.b.stops(b.runners))) for a, b in pairs
        }
        return {engine: (a, b) for engine, (a, b) in found.items() if a != b}

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "equal": self.equal,
            "bytes_compared": self.with_bytes,
            "compared_by": "slot" if self.by_slot else "name",
            "a": self.a.to_json(),
            "b": self.b.to_json(),
            "values": [one.to_json() for one in self.values],
            "keys": [one.to_json() | {"decides": one.decides} for one in self.keys],
            "tensors": [one.to_json() for one in self.tensors],
            "engines": [
                {"engine": engine}
                | {
                    side: {"outcome": outcome, "rules": rules}
                    for side, (outcome, rules) in zip("ab", both, strict=True)
                }
                for engine, both in self.engines.items()
            ],
        }

    def lines(self) -> Iterator[Part]:
        """Yield what each drafter is, what differs, and the result in one line."""
        sides = (self.a, self.b)
        layouts = [one.reading.layout for one in sides]
        about = [
            ("source", *(one.reading.checkpoint.source for one in sides)),
            ("what", *(one.drafter.title if one else "unknown" for one in layouts)),
            ("layout", *(one.name if one else "unknown" for one in layouts)),
        ]
        yield Table(("", "A", "B"), about)
        for letter, one in zip("AB", sides, strict=True):
            for problem in one.reading.errors:
                yield Line((Styled(f"{letter}: {problem.severity} {problem.code}", "bold"), f" {problem.what}"))
        if self.values:
            yield ""
            yield Table(("meaning", "A", "B"), [(one.name, _words(one.a), _words(one.b)) for one in self.values])
        if self.keys:
            yield ""
            yield Table(("config.json", "A", "B"), [(one.name, _words(one.a), _words(one.b)) for one in self.keys])
        if self.tensors:
            yield ""
            rows = [(one.what, _how(one), _stored(one.a), _stored(one.b)) for one in self.tensors]
            yield Table(("slot" if self.by_slot else "tensor", "differs in", "A", "B"), rows)
        if self.engines:
            yield ""
            rows = [
                (engine, *(" ".join([outcome.upper(), *rules]) for outcome, rules in both))
                for engine, both in self.engines.items()
            ]
            yield Table(("engine", "A", "B"), rows)
        yield ""
        yield self._summary()

    def _summary(self) -> Line:
        names = f"{filename(self.a.name)} and {filename(self.b.name)}"
        unread = "" if self.with_bytes else "; bytes were not compared"
        if self.equal:
            keys = f"; {_counted(len(self.keys), 'key')} of config.json differ, the meaning does not" * bool(self.keys)
            return Line((Styled("EQUAL", "bold green"), f" {names}{keys}{unread}"))
        counts = (
            (len(self.values), "value"),
            (sum(one.decides for one in self.keys), "key"),
            (len(self.tensors), "slot" if self.by_slot else "tensor"),
        )
        said = ", ".join(_counted(count, what) for count, what in counts if count)
        return Line((Styled("DIFFERENT", "bold red"), f" {names}: {said}{unread}"))


class Diff(Reading):
    """Show what differs between two drafters, A and B, of any family and in any two layouts.

    The config is compared by meaning and key by key, tensors by slot: dtype, shape and bytes. If one of them cannot
    be read, or their families differ, keys and tensors are compared by name. Keys that two layouts spell differently
    are shown, but do not count. Engines whose verdicts on A and B differ are shown with the rules. Exit code 0: the
    same drafter; 1: they differ.

    Options state a fact for whichever of the two leaves it open: what files say, no option changes.
    """

    EXAMPLES = (
        "kconv diff my-head-vllm my-head",
        "kconv diff org/head@v1 org/head@v2 --headers-only",
        "kconv diff my-head-vllm org/silent-head --target org/target",
    )

    a: Name = argument("A drafter: a folder or a Hub id.", kind="checkpoint")
    b: Name = argument("The one to compare it with.", kind="checkpoint")
    headers_only: bool = option(False, "Compare no bytes; read and download no weights.")

    def run(self, context: Context) -> Diffed:
        """Return what differs.

        Raises:
            NotACheckpoint, ConfigInvalid, CorruptHeader, CorruptIndex: one of them cannot be parsed, or is no drafter.
            LayoutCannot: one of them stores several slots in a tensor that cannot be taken apart, the other does not.
        """
        a, b = self._side(context, self.a), self._side(context, self.b)
        one, other = a.reading.head, b.reading.head
        by_slot = one is not None and other is not None and one.drafter is other.drafter
        same_layout = a.reading.layout is b.reading.layout
        values: list[DifferingValue] = []
        if by_slot:
            values += _specs(a, b, same_layout=same_layout)
        # Two layouts state what kconv knows in different keys; of the other keys only the value is known.
        if by_slot and not same_layout:
            values += _unequal(a.carried, b.carried)
        keys = list(_unequal(a.keys, b.keys))
        if by_slot:
            keys = [replace(key, decides=same_layout and not _is_ignored(key, a, b)) for key in keys]
        with context.status("comparing"):
            tensors = _tensors(a, b, by_slot=by_slot, with_bytes=not self.headers_only)
        return Diffed(a, b, tuple(values), tuple(keys), tuple(tensors), by_slot, not self.headers_only)

    def passed(self, result: Diffed) -> bool:
        """Return whether both are the same drafter."""
        return result.equal

    def failure(self, result: Diffed) -> KconvError:
        """Return the error of two drafters that differ, if another step depends on it."""
        return StepFailed(f"{self.a} and {self.b} differ", fix="Do what made B again, or remove the step.")

    def _side(self, context: Context, name: str) -> Drafted:
        from ..convert.identify import WHOLE_MODEL
        from ..convert.read import read
        from ..validate.head import validate_head
        from ..validate.options import ValidateOptions

        source = context.source(name)
        headers = source.open_headers()
        reading = read(headers, values=False)
        if reading.kind is not None and not reading.kind.is_head:
            try:
                reading.sound_head()
            except KconvError as fault:  # with the folder's name
                if reading.kind is WHOLE_MODEL:
                    fault.fix = f"A and B are drafters. For a head and its target: kconv validate HEAD --target {name}."
                raise
        layout, hints = reading.layout or self.layout(), self._about(reading, context)
        # A checkpoint on the Hub is downloaded once its headers are known to be a drafter's.
        downloads = reading.checkpoint.headers_only and not self.headers_only
        reading = read(source.open_weights() if downloads else headers, layout=layout, hints=hints, values=False)
        report = validate_head(
            source, headers, ValidateOptions(for_=("all",), headers_only=True), layout=layout, hints=hints,
            target=context.maybe(self.target), say=lambda _: None,
        )  # fmt: skip
        return Drafted(name, reading, report)

    def _about(self, reading: HeadReading, context: Context) -> Hints:
        """Return the options about what a drafter's files leave open."""
        from ..checkpoint.manifest import Hints

        facts = reading.layout.drafter.facts if reading.layout else {}
        silent = {facts[one.fact].hint for one in reading.undecided}
        silent |= {"captured_are", "target_layers"} if "captured" in silent else set()
        silent |= {"max_positions"} if reading.config.get("max_position_embeddings") is None else set()
        given = self.hints(self.target_config(context)).model_dump(exclude_none=True)
        return Hints.model_validate({name: value for name, value in given.items() if name in silent})


def _specs(a: Drafted, b: Drafted, *, same_layout: bool) -> Iterator[DifferingValue]:
    """Yield the fields in which two specs of a family differ; one that both leave open may differ in two layouts."""
    left_open = a.open_fields | b.open_fields
    for one in _fields(a.reading.spec, b.reading.spec):
        if one.name not in left_open:
            yield one
    for path in sorted(left_open):
        if not (same_layout and path in a.open_fields & b.open_fields):
            mine, its = (UNDECIDED if path in one.open_fields else attrgetter(path)(one.reading.spec) for one in (a, b))
            yield DifferingValue(path, mine, its)


def _fields(a: Any, b: Any, path: str = "") -> Iterator[DifferingValue]:
    if is_dataclass(a) and type(a) is type(b):
        for one in fields(a):
            yield from _fields(getattr(a, one.name), getattr(b, one.name), f"{path}.{one.name}".lstrip("."))
    elif a != b:
        yield DifferingValue(path, a, b)


def _leaves(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested objects by their dotted path."""
    for key, inner in value.items():
        name = f"{path}.{key}" if path else key
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, name)
        else:
            yield name, inner


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[DifferingValue]:
    for name in dict.fromkeys((*a, *b)):
        one, other = a.get(name, ABSENT), b.get(name, ABSENT)
        # To Python, true is 1.
        if one != other or isinstance(one, bool) is not isinstance(other, bool):
            yield DifferingValue(name, one, other)


def _is_ignored(key: DifferingValue, a: Drafted, b: Drafted) -> bool:
    """Return whether a key means nothing in either config that has it."""
    return all(side.ignores(key.name) for side, value in ((a, key.a), (b, key.b)) if value is not ABSENT)


def _tensors(a: Drafted, b: Drafted, *, by_slot: bool, with_bytes: bool) -> Iterator[DifferingTensor]:
    from ..checkpoint.bytes import Look, Wanted

    ours, theirs = a.tensors(by_slot=by_slot), b.tensors(by_slot=by_slot)
    _refuse_packed(a, ours, theirs)
    _refuse_packed(b, theirs, ours)
    pairs = {what: (ours.get(what, ()), theirs.get(what, ())) for what in dict.fromkeys((*ours, *theirs))}
    hows = {what: _differ(*pair) for what, pair in pairs.items()}
    alike = [what for what, how in hows.items() if not how] if with_bytes else []
    # Each file is read once, in chunks.
    with Look(Wanted(part.file, digests=[part]) for what in alike for held in pairs[what] for part in held) as look:
        for what, (one, other) in pairs.items():
            how = hows[what]
            if what in alike and not _same(one, other, [look.digest(part) for part in (*one, *other)]):
                how = "bytes"
            if how:
                heads = (side.reading.head for side in (a, b))
                note = next((head.ignored[what] for head in heads if head and what in head.ignored), "")
                yield DifferingTensor(what, how, one, other, note)


def _differ(a: Stored, b: Stored) -> str:
    """Return what headers show to differ; "" for nothing."""
    if not a or not b:
        return "only in A" if a else "only in B"
    kinds = [(one.dtype, one.shape) for one in (*a, *b)]
    if _same(a, b, kinds):
        return ""
    return " and ".join(
        word for word, seen in zip(("dtype", "shape"), zip(*kinds, strict=True), strict=True) if len(set(seen)) > 1
    )


def _same(a: Stored, b: Stored, values: Sequence[Any]) -> bool:
    """Return whether values are the same on both sides: name by name, or all of them.

    Args:
        a: where A stores a slot, possibly under two names.
        b: where B does.
        values: of each in A, then in B.
    """
    mine = dict(zip((part.name for part in a), values[: len(a)], strict=True))
    its = dict(zip((part.name for part in b), values[len(a) :], strict=True))
    return mine == its or len(set(values)) == 1


def _refuse_packed(side: Drafted, own: Mapping[str, Stored], others: Mapping[str, Stored]) -> None:
    """Refuse slots that one drafter stores together, so that they cannot be compared with the other's.

    Raises:
        LayoutCannot: there are such slots.
    """
    held = {slot for what in others for slot in what.split(" + ")}
    for what in own.keys() - others.keys():
        if " + " in what and held.intersection(what.split(" + ")):
            [info, *_] = own[what]
            raise LayoutCannot(
                f"{info.name} ({info.dtype} {list(info.shape)}) holds {what} in a form that kconv cannot take apart",
                where=info.name,
                fix="Compare it with a drafter in the same layout, or compare what both were quantized from.",
            )


def _plain(value: Any) -> Any:
    if value is UNDECIDED:
        return None
    return {type(value).__name__: asdict(value)} if is_dataclass(value) and not isinstance(value, type) else value


def _words(value: Any) -> str | tuple[Styled]:
    return (value,) if isinstance(value, Styled) else str(value)


def _how(one: DifferingTensor) -> str:
    return f"{one.how} ({one.note})" if one.note else one.how


def _stored(held: Stored) -> str:
    return "\n".join(f"{one.name} {one.dtype} {' x '.join(map(str, one.shape))}" for one in held)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
