"""Make one file of the output, from start to end.

What becomes NVFP4 is read twice: fused modules share a scale that is known only after all of them were read, and the
scales come first in the file. The second read comes from the page cache, which holds a file of `SHARD` bytes. What
stays is read once.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from blake3 import blake3

from ..checkpoint.bytes import Entry, stream, write_safetensors
from ..checkpoint.formats import FP8_PB_WO, Int4
from ..checkpoint.header import TensorInfo
from ..checkpoint.manifest import Action, FileRecord, StepRecord, TensorRecord
from ..checkpoint.schema import load_json
from ..checkpoint.staging import files_of
from ..checkpoint.tensors import entry
from ..checkpoint.values import Values
from ..errors import TensorValue, WorkerFailed
from ..strict import StrictModel
from ..targets.weights import Seen, StoredWeight, unseen
from .fp8 import kept, scales_of, values_of
from .int4_to_nvfp4 import Int4Packer, amax_int4, fits
from .mxfp4_to_nvfp4 import cast, is_mxfp4, scale_2_of
from .pack import NativePacker, Packed, amax, fastest, pack, scale_2
from .plan import FusedGroup, Module, QuantizePlan, Rounded, Unit
from .recipe import WeightScales


class UnitRecord(StrictModel):
    """A finished file: itself, and how each of its tensors was made."""

    file: FileRecord
    tensors: tuple[StepRecord, ...]


@dataclass(frozen=True)
class Workplace:
    """The folder next to the output in which the output is made."""

    root: Path

    @property
    def files(self) -> Path:
        """The folder that becomes the output."""
        return files_of(self.root)

    def record(self, file: str) -> Path:
        return self.root / f"{file}.json"

    def write(self, record: UnitRecord) -> None:
        """Write a record atomically, once what it records is on disk."""
        temporary = self.root / f"{record.file.name}.{os.getpid()}.tmp"
        with temporary.open("w", encoding="utf-8") as out:
            out.write(record.model_dump_json(by_alias=True))
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(self.record(record.file.name))

    def read(self, file: str) -> UnitRecord | None:
        """Return the record of a finished file; None if there is none, or the file has another size.

        A record is written after its file was flushed, so a file of the recorded size holds the recorded bytes;
        `kconv verify` hashes them again.
        """
        try:
            record = self.reread(file)
            whole = (self.files / file).stat().st_size == record.file.size
        except (OSError, WorkerFailed):
            return None
        return record if whole else None

    def reread(self, file: str) -> UnitRecord:
        """Return the record of a finished file."""
        return load_json(UnitRecord, self.record(file), WorkerFailed, what="file record", fix="Delete it.")

    def is_done(self, file: str) -> bool:
        """Return whether a file exists with a record, without reading the whole record."""
        return self.record(file).exists() and (self.files / file).exists()

    def clear(self, file: str) -> None:
        """Remove what a killed process left of a file that will be made again."""
        for folder in (self.root, self.files):
            for left in folder.glob(f"{file}.*.tmp"):
                left.unlink(missing_ok=True)

    def failure(self, rank: int) -> Path:
        """Return the path of a rank's error report."""
        return self.root / f"rank-{rank}.failed"


Advance = Callable[[int], None]


def make_unit(unit: Unit, place: Workplace, *, inputs: str, advance: Advance = lambda _: None) -> UnitRecord:
    """Make one file of the output, and record it; it gets its name only when it is whole."""
    jobs, taken = [], Digests()
    for group in unit.groups:
        scale = shared_scale(group, taken)
        jobs += [_Job(module, scale, group, advance) for module in group.modules]
    rounded = [(module, scales_of(module.weight, taken)) for module in unit.rounded]
    entries = [
        *(made for job in jobs for made in job.entries()),
        *(made for module, scales in rounded for made in _rounded(module, scales, advance)),
        *(_dequantized(weight, taken, advance) for weight in unit.dequantized),
        *(_carried(info, advance) for info in unit.carried),
    ]
    temporary = place.files / f"{unit.file}.{os.getpid()}.tmp"
    temporary.unlink(missing_ok=True)
    try:
        written = write_safetensors(temporary, entries, check=_finite)
        with temporary.open("rb") as whole:
            os.fsync(whole.fileno())
        temporary.replace(place.files / unit.file)
    finally:
        temporary.unlink(missing_ok=True)
    file = FileRecord(name=unit.file, size=written.size, sha256=written.sha256)
    # Copied tensors have exactly the bytes that were hashed while copying.
    digests = taken.found() | {info.name: written.digests[info.name] for info in unit.carried}
    record = UnitRecord(file=file, tensors=tuple(steps(unit, written.digests, digests, inputs)))
    place.write(record)
    return record


class Digests:
    """The blake3 of each tensor whose parts it has seen, all of them in order."""

    def __init__(self) -> None:
        self._hashes: dict[str, blake3] = {}

    def __call__(self, info: TensorInfo, part: torch.Tensor) -> None:
        self._hashes.setdefault(info.name, blake3()).update(_bytes(part))

    def found(self) -> dict[str, str]:
        return {name: hashed.hexdigest() for name, hashed in self._hashes.items()}


def largest(weight: StoredWeight, seen: Seen = unseen) -> float:
    """Return a weight's amax, from which the packer computes scale_2; it is not zero, NaN or infinite."""
    if fits(weight):
        found = amax_int4(weight, seen=seen)
    else:
        found = 0.0
        for block in weight.blocks(seen):
            part = float(amax(block))
            found = part if not part <= found else found  # NaN stays
            if math.isnan(found):
                break
    if not 0 < found < math.inf:
        raise TensorValue(
            f"{weight.name} is all zeros" if found == 0 else f"{weight.name} holds NaN or Inf",
            where=weight.infos[0].file,
            fix="Fetch the shard again, or keep this module out of the recipe (keep: ...).",
        )
    return found


def shared_scale(group: FusedGroup, seen: Seen = unseen) -> float:
    """Return the weight_scale_2 of a fused group, from the largest amax of its modules; of MXFP4 see `scale_2_of`."""
    if group.mxfp4:
        return scale_2_of(group.mxfp4, seen)
    return float(scale_2(max(largest(module.weight, seen) for module in group.modules), group.weight_scales))


def pack_stored(weight: StoredWeight, weight_scale_2: float, scales: WeightScales = "max") -> Iterator[Packed]:
    """Yield a stored weight as NVFP4, in consecutive blocks of rows."""
    if not fits(weight):
        yield from (pack(block, weight_scale_2, scales) for block in weight.blocks())
    elif scales == "max":
        packer = Int4Packer(weight_scale_2)
        yield from (packer.pack(stored[Int4.values], stored[Int4.scale]) for stored in weight.stored())
    elif isinstance(native := fastest(), NativePacker):
        # Which scale a block gets depends on all its values, so that no table has it.
        parts = ((stored[Int4.values], stored[Int4.scale]) for stored in weight.stored())
        yield from (native.pack_int4(*part, weight_scale_2, scales) for part in parts)
    else:
        yield from (pack(block, weight_scale_2, scales) for block in weight.blocks())


def pack_module(group: FusedGroup, weight: StoredWeight, weight_scale_2: float) -> Iterator[Packed]:
    """Yield a weight of a fused group as NVFP4: cast if the group is MXFP4, otherwise packed."""
    if group.mxfp4 and is_mxfp4(weight):
        return cast(weight, weight_scale_2)
    return pack_stored(weight, weight_scale_2, group.weight_scales)


@dataclass
class _Job:
    """A module in progress: its nibbles are packed when their turn comes, its scales wait for theirs."""

    module: Module
    scale: float
    group: FusedGroup
    advance: Advance
    _block_scales: list[torch.Tensor] = field(default_factory=list)

    def entries(self) -> list[Entry]:
        """Return one entry for each tensor of the module."""
        form = self.module.format
        makers = {
            form.values: self._weight,
            form.scale: self._weight_scale,
            form.scale_2: lambda: _scalar(form.stored_scale(self.scale)),
            form.inputs: lambda: _scalar(form.stored_scale(self.module.input_scale or 1.0)),
        }
        return [
            Entry(name, dtype, shape, makers[name.removeprefix(f"{self.module.name}.")])
            for name, (dtype, shape) in self.module.outputs.items()
        ]

    def _weight(self) -> Iterator[memoryview]:
        self._block_scales = []
        for part in pack_module(self.group, self.module.weight, self.scale):
            self._block_scales.append(part.weight_scale)
            yield _bytes(part.weight)
        self.advance(sum(info.size for info in self.module.weight.infos))

    def _weight_scale(self) -> Iterator[memoryview]:
        # Its name follows the weight's, and its dtype is as wide, so `write_safetensors` asks for it next.
        taken, self._block_scales = self._block_scales, []
        for part in taken:
            yield _bytes(part)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _scalar(value: float) -> list[memoryview]:
    return [_bytes(torch.tensor([value], dtype=torch.float32))]


def _rounded(module: Rounded, scales: torch.Tensor, advance: Advance) -> list[Entry]:
    def values() -> Iterator[memoryview]:
        for rows in values_of(module.weight, scales):
            yield _bytes(rows)
        advance(sum(info.size for info in module.weight.infos))

    makers = {FP8_PB_WO.values: values, FP8_PB_WO.scale: lambda: [_bytes(scales)]}
    return [
        Entry(name, dtype, shape, makers[name.removeprefix(f"{module.name}.")])
        for name, (dtype, shape) in module.outputs.items()
    ]


def _dequantized(weight: StoredWeight, seen: Seen, advance: Advance) -> Entry:
    def chunks() -> Iterator[bytes | memoryview]:
        for block in weight.blocks(seen):
            yield from entry(weight.name, block).chunks()
        advance(sum(info.size for info in weight.infos))

    return Entry(weight.name, weight.dtype, weight.shape, chunks)


def _carried(info: TensorInfo, advance: Advance) -> Entry:
    def chunks() -> Iterator[memoryview]:
        for chunk in stream(info):
            yield chunk
            advance(len(chunk))

    return Entry(info.name, info.dtype, info.shape, chunks)


def _finite(name: str, values: Values) -> None:
    if values.not_finite:
        raise TensorValue(
            f"{values.not_finite:,} values of {name} are NaN or Inf",
            where=name,
            fix="Fetch the shard again; compare its sha256 with the publisher's.",
        )


Origin = tuple[Action, tuple[TensorInfo, ...], str]


def steps(unit: Unit, made: Mapping[str, str], taken: Mapping[str, str], inputs: str) -> Iterator[StepRecord]:
    """Yield the record of each tensor of a file, with the blake3 of these (`made`) and of their sources (`taken`)."""
    origins = _origins(unit, inputs)
    for name, dtype, shape in unit.outputs():
        action, sources, reason = origins[name]
        yield StepRecord(
            action=action,
            output=TensorRecord(name=name, dtype=dtype, shape=shape, blake3=made[name]),
            sources=tuple(
                TensorRecord(name=i.name, dtype=i.dtype, shape=i.shape, blake3=taken[i.name]) for i in sources
            ),
            reason=reason,
        )


def _origins(unit: Unit, inputs: str) -> dict[str, Origin]:
    found: dict[str, Origin] = {}
    for group, module in ((one, module) for one in unit.groups for module in one.modules):
        searched = "" if group.weight_scales == "max" else f", block scales by {group.weight_scales}"
        searched = ", cast exactly" if group.mxfp4 else searched
        for name in module.outputs:
            suffix = name.removeprefix(f"{module.name}.")
            form = module.format
            sources = module.weight.infos if suffix == form.values else ()
            reasons = {form.values: f"NVFP4 of {module.weight.form}{searched}", form.inputs: inputs}
            action: Action = "added" if suffix == form.inputs else "quantized"
            found[name] = (action, sources, reasons.get(suffix, "with its weight"))
    for module in unit.rounded:
        values, *scales = module.weight.infos
        origins: tuple[Origin, Origin] = (
            (("copied", (values,), ""), ("repacked", tuple(scales), "with ModelOpt's name and dims"))
            if kept(module.weight)
            else (
                ("quantized", module.weight.infos, f"FP8 of {module.weight.form}"),
                ("quantized", (), "with its weight"),
            )
        )
        suffixes = (FP8_PB_WO.values, FP8_PB_WO.scale)
        found |= {f"{module.name}.{suffix}": one for suffix, one in zip(suffixes, origins, strict=True)}
    for weight in unit.dequantized:
        found[weight.name] = ("dequantized", weight.infos, f"{weight.form} cannot be combined with NVFP4")
    for info in unit.carried:
        found[info.name] = ("copied", (info,), "")
    return found


# Approximate number of source bytes to time: a second's work.
SAMPLE = 256 << 20


@dataclass(frozen=True)
class Estimate:
    """Timing of a sample of the work.

    Attributes:
        rate: source bytes per second and process, with reading, packing and hashing but without writing.
        seconds: estimated for the whole plan with the requested processes.
    """

    rate: float
    seconds: float


def estimate(plan: QuantizePlan, processes: int) -> Estimate:
    """Pack a sample of a plan's modules in memory, and estimate how long all of it will take.

    Raises:
        TensorValue: a weight is all zeros, or holds NaN or Inf.
        CorruptHeader, NotACheckpoint: the source cannot be read.
    """
    begin, done = time.perf_counter(), 0
    for unit in plan.units:
        for group in unit.groups:
            _make(group)
            done += sum(info.size for module in group.modules for info in module.weight.infos)
            if done >= SAMPLE:
                break
        if done >= SAMPLE:
            break
    rate = done / (time.perf_counter() - begin)
    return Estimate(rate, plan.bytes_in / rate / processes)


def _make(group: FusedGroup) -> None:
    whole, tensor = hashlib.sha256(), blake3()
    scale = shared_scale(group, Digests())
    for module in group.modules:
        for part in pack_module(group, module.weight, scale):
            for made in (part.weight, part.weight_scale):
                view = made.contiguous().view(torch.uint8).numpy().data
                whole.update(view)
                tensor.update(view)
