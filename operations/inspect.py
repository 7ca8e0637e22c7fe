"""`kconv inspect`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from .base import Context, Name, argument
from .reading import Reading

if TYPE_CHECKING:
    from ..convert.read import HeadReading

# Not weights: maps and masks.
INTEGERS = ("I64", "I32", "BOOL")


@dataclass(frozen=True)
class Inspected:
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
        """Return everything as plain values; `spec` and `captured` are null if a problem leaves them open."""
        reading, spec = self.reading, self.reading.spec
        known = {"captured": reading.captured.ids if reading.captured else None}
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


class Inspect(Reading):
    """Show what HEAD is: its layout, attention, dims, RoPE, captured layers, tensors and parameters.

    Reads only the config and the headers; from a Hub id it downloads nothing else. UNDECIDED marks what the files
    leave open, with the candidates and what would decide it. A checkpoint that is not an Eagle3 head is named. The exit
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
