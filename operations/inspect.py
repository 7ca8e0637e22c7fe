"""`kconv inspect`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from ..lines import Facts, Line, Part, Result, Styled, Table, Words, counted
from ..options import Name, argument
from .base import Context
from .reading import Reading

if TYPE_CHECKING:
    from ..checkpoint.header import TensorInfo
    from ..convert.read import HeadReading

# Not weights: maps and masks.
INTEGERS = ("I64", "I32", "BOOL")
# What is shown of a config that kconv cannot read.
STATED = (
    "architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "vocab_size", "draft_vocab_size", "rope_theta", "max_position_embeddings",
)  # fmt: skip


# More tensors than any drafter has are a whole model's; of these, the number of a layer or an expert is left out.
MANY = 200


@dataclass(frozen=True, repr=False)
class Inspected(Result):
    """What a checkpoint is, as far as its files show.

    Attributes:
        reading: the checkpoint read as a head, with every problem found.
        targets: hub ids of the targets that its files name.
    """

    reading: HeadReading
    targets: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """What it is: the title of its family, e.g. "Eagle3 head", another kind by its name, or "unknown"."""
        if self.reading.kind is not None:
            return self.reading.kind.name
        if self.reading.layout is not None:
            return self.reading.layout.drafter.title
        from ..drafters.registry import drafters

        tensors = self.reading.checkpoint.tensors
        return next((one.title for one in drafters() if one.looks_like(tensors)), "unknown")

    @property
    def parameters(self) -> int:
        """The number of weight elements."""
        return sum(prod(i.shape) for i in self.reading.checkpoint.tensors.values() if i.dtype not in INTEGERS)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values; `spec`, and a field of it, are null if a problem leaves them open."""
        reading, spec = self.reading, self.reading.spec
        keys = spec.drafter.keys_of(spec) if spec else ()
        opened = {key.field for one in reading.undecided for key in keys if one.fact in key.names}
        known: dict[str, Any] = dict.fromkeys(opened & vars(spec).keys() if spec else ())
        known["captured"] = reading.captured.ids if reading.captured else None
        return {
            "source": reading.checkpoint.source,
            "kind": self.kind,
            "layout": reading.layout.name if reading.layout else None,
            "spec": asdict(spec) | {"kind": spec.kind} | known if spec else None,
            "captured_by": reading.captured.how if reading.captured else None,
            "undecided": [asdict(one) for one in reading.undecided],
            "unverified": [one.model_dump() for one in reading.read.unverified] if reading.read else [],
            "problems": [
                {"code": p.code, "severity": p.severity, "where": p.where, "what": p.what, "fix": p.fix}
                for p in reading.problems
            ],
            "convertible": not reading.errors and not reading.undecided,
            "targets": self.targets,
            "parameters": self.parameters,
            "tensors": [
                {"name": i.name, "dtype": i.dtype, "shape": i.shape, "bytes": i.size}
                for i in reading.checkpoint.tensors.values()
            ],
        }

    def lines(self) -> Iterator[Part]:
        """Yield what is known, the tensors, and each problem that stands in no line above."""
        reading = self.reading
        yield Facts(self._facts())
        yield ""
        yield from _tables(reading.checkpoint.tensors.values())
        shown = {one.what for one in reading.undecided}
        for problem in reading.problems:
            if problem.what not in shown:
                kind = Styled(f"{problem.severity} {problem.code}", "bold")
                yield Line((kind, f" {problem.where}: {problem.what}"))
                yield Line(f"  fix: {problem.fix}")

    def _facts(self) -> dict[str, Words]:
        """Return what describes a checkpoint; undecided facts are marked in their line."""
        reading, spec, config = self.reading, self.reading.spec, self.reading.config
        known = reading.layout.drafter.facts if reading.layout else {}
        facts = {"source": reading.checkpoint.source, "what": self.kind}
        if reading.kind is not None:
            facts["what"] += f": {reading.kind.what}"
        if reading.layout is not None:
            facts["layout"] = f"{reading.layout.name} ({reading.layout.engine})"
        if spec is not None and reading.layout is not None:
            drafter, how = reading.layout.drafter, reading.captured
            mlp = f", MLP {spec.intermediate}" if hasattr(spec, "intermediate") else ""
            facts |= {
                "attention": f"{spec.kind.upper()} {_dims(spec.attention)}" if drafter.attention else "none",
                "hidden": f"{spec.hidden} (target {spec.target_hidden}){mlp}, {counted(spec.layers, 'layer')}",
                "vocabulary": f"{spec.draft_vocab} of {spec.vocab}",
                "rope": f"theta {spec.rope.theta!r}, {_dims(spec.rope.scaling) if spec.rope.scaling else 'no scaling'}",
                "captured": f"outputs of layers {list(spec.captured)}: {how.how}" if how else "",
            } | drafter.lines(spec)
        else:
            stated = {key: config.get(key) for key in STATED if config.get(key) is not None}
            facts["config"] = ", ".join(f"{key} {value}" for key, value in stated.items()) or "states no dims"
            if mtp := _mtp(config, reading.checkpoint.tensors):
                facts["MTP"] = mtp
            if reading.captured:
                facts["captured"] = f"outputs of layers {list(reading.captured.ids)}: {reading.captured.how}"
        dtype = f", {spec.dtype}" if spec else ""
        facts["weights"] = f"{len(reading.checkpoint.tensors)} tensors, {self.parameters:,} parameters{dtype}"
        if self.targets:
            named = ", ".join(self.targets)
            facts["target"] = f"{named}, named in its files; --target {self.targets[0]} reads its config"
        shown: dict[str, tuple[str | Styled, ...]] = {name: (fact,) for name, fact in facts.items()}
        opened = {one.fact: one for one in reading.undecided}
        for name, fact in known.items():
            if (one := opened.get(name)) is not None:
                candidates = "".join(f"\n- {candidate}" for candidate in one.phrases)
                shown[fact.line] = (Styled("UNDECIDED", "bold yellow"), f": {one.what}{candidates}\n{one.decide}")
        for one in reading.read.unverified if reading.read else ():
            against = f"; {one.against}" if one.against else ""
            line, said = known[one.fact].line, f"(by {one.word}, not verified{against})"
            shown[line] = (*shown[line], " ", Styled(said, "yellow"))
        return dict(shown)


def _mtp(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """Return what a target has of layers for multi-token prediction, and what its config promises; "" for nothing."""
    from ..targets.mtp import mtp_faults, mtp_root, mtp_roots

    text = config.get("text_config", config)
    layers = text.get("num_hidden_layers") if isinstance(text, Mapping) else None
    if not isinstance(layers, int):
        return ""
    dtypes: dict[str, set[str]] = {}
    for one in tensors.values():
        dtypes.setdefault(mtp_root(one.name, layers), set()).add(one.dtype)
    roots = mtp_roots(tensors, layers).items()
    found = [f"{root} ({count} tensors: {', '.join(sorted(dtypes[root]))})" for root, count in roots]
    return "; ".join([*found, *(f"{where} {what}" for where, what in mtp_faults(text, tensors))])


def _tables(tensors: Collection[TensorInfo]) -> Iterator[Part]:
    """Yield the tensors: each of a head's, or how many of each kind a whole model has."""

    def shape(one: TensorInfo) -> str:
        return " x ".join(map(str, one.shape))

    if len(tensors) <= MANY:
        rows = [(one.name, one.dtype, shape(one), f"{one.size:,}") for one in tensors]
        yield Table(("tensor", "dtype", "shape", "bytes"), rows)
        return
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for one in tensors:
        kinds.setdefault((one.kind, one.dtype, shape(one)), []).append(one.size)
    counted = [
        (name, f"{len(sizes):,}", dtype, dims, f"{sum(sizes):,}") for (name, dtype, dims), sizes in kinds.items()
    ]
    yield Table(("tensors", "number", "dtype", "shape of each", "bytes of all"), counted)
    yield f"--json names all {len(tensors):,}."


def _dims(value: Any) -> str:
    return " ".join(f"{name}={v}" for name, v in vars(value).items() if v is not None)


class Inspect(Reading):
    """Show what HEAD is: its layout, attention, dims, RoPE, captured layers, tensors and parameters.

    Reads only the config and the headers; from a Hub id it downloads nothing else. UNDECIDED marks what the files
    leave open, with the candidates and what would decide it. A checkpoint that is no drafter is named. The exit
    code is 0 for every checkpoint that can be parsed.
    """

    EXAMPLES = (
        "kconv inspect my-head",
        "kconv inspect nvidia/Kimi-K2.6-Eagle3",
        "kconv inspect https://huggingface.co/RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3 --target-layers 32",
    )

    head: Name = argument("The head: a folder, a Hub id or its URL.", kind="checkpoint")

    def run(self, context: Context) -> Inspected:
        """Return what the checkpoint is, from its headers.

        Raises:
            NotACheckpoint, ConfigInvalid, CorruptHeader, CorruptIndex: it cannot be parsed.
            TargetInvalid: the target cannot be read.
        """
        from ..convert.identify import named_targets
        from ..convert.opening import find_misfit
        from ..convert.read import read

        source = context.source(self.head)
        checkpoint = source.open_headers()
        target = self.target_config(context)
        reading = read(checkpoint, layout=self.layout(), hints=self.hints(target), values=False)
        if target and reading.read and (problem := find_misfit(reading.read.spec, target, str(self.target))):
            reading = replace(reading, problems=(*reading.problems, problem))
        return Inspected(reading, named_targets(source, checkpoint.config))
