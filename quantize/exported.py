"""What ModelOpt exported, held against the plan.

Every value is looked at, as the streaming road does while it writes: an export that overflowed is whole to the eye.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from blake3 import blake3

from ..checkpoint.bytes import digest, file_digest, stream
from ..checkpoint.header import TensorInfo, read_header
from ..checkpoint.manifest import FileRecord
from ..checkpoint.tensors import entry, read_tensor
from ..checkpoint.values import Scan
from ..errors import TensorMissing, TensorValue
from ..targets.stored import Stored
from .finish import write_beside, write_manifest
from .formats import is_scale
from .plan import QuantizePlan
from .steps import steps

WEIGHTS = "*.safetensors"
ANOTHER_ROAD = "Use the streaming road."
# Numbers that a kernel multiplies by, one per module.
SCALARS = ("weight_scale_2", "input_scale")


def take_export(plan: QuantizePlan, folder: Path) -> None:
    """Check what ModelOpt exported into a folder, and write all that stands beside its weights anew.

    Args:
        plan: what was to be made.
        folder: the export, which becomes the output.

    Raises:
        TensorMissing: it has other tensors than the plan, or of other shapes.
        TensorValue: it holds NaN or Inf, a scale that cannot be multiplied by, or other values than the source's
            where nothing is quantized.
        CorruptHeader, NotACheckpoint: it cannot be read.
        OSError: a file cannot be written.
    """
    made = {name: info for file in sorted(folder.glob(WEIGHTS)) for name, info in read_header(file).items()}
    _check_names(plan, made)
    digests = {name: _look(info) for name, info in made.items()}
    _check_scales(plan, made)
    taken = {name: digest(info) for name, info in plan.source.tensors.items()}
    _check_kept(plan, digests, taken)
    for file in folder.iterdir():
        if not file.match(WEIGHTS):
            file.unlink()  # ModelOpt's own config blocks and index are made anew
    weight_map = {name: info.file.name for name, info in made.items()}
    files = [
        FileRecord(name=file.name, size=file.stat().st_size, sha256=file_digest(file))
        for file in sorted(folder.glob(WEIGHTS))
    ]
    files += write_beside(plan, folder, weight_map, plan.bytes_out)
    records = (step for unit in plan.units for step in steps(unit, digests, taken, plan.inputs.description))
    made_by = {"road": "modelopt", "modelopt": version("nvidia-modelopt"), "torch": torch.__version__}
    write_manifest(plan, folder, files, (step.model_dump_json(by_alias=True) for step in records), made_by=made_by)


def _check_names(plan: QuantizePlan, made: dict[str, TensorInfo]) -> None:
    wanted = {name: (dtype, shape) for unit in plan.units for name, dtype, shape in unit.outputs()}
    odd = sorted(wanted.keys() ^ made.keys())
    if odd:
        raise TensorMissing(
            f"ModelOpt's export and the plan differ in {len(odd)} tensors, among them {odd[0]}",
            where=odd[0],
            fix="Give prompts to calibrate on, or use the streaming road, which needs none.",
        )
    for name, info in made.items():
        if (info.dtype, info.shape) != wanted[name]:
            raise TensorMissing(
                f"ModelOpt made {name} {info.dtype} {list(info.shape)}, not {wanted[name][0]} {list(wanted[name][1])}",
                where=name,
                fix=ANOTHER_ROAD,
            )


def _look(info: TensorInfo) -> str:
    """Return a tensor's blake3, its values looked at on the way."""
    hashed, scan = blake3(), Scan(info.dtype)
    for chunk in stream(info):
        hashed.update(chunk)
        scan.update(chunk)
    if count := scan.result().not_finite:
        raise TensorValue(
            f"{count:,} values of {info.name} are NaN or Inf in ModelOpt's export", where=info.name, fix=ANOTHER_ROAD
        )
    return hashed.hexdigest()


def _check_scales(plan: QuantizePlan, made: dict[str, TensorInfo]) -> None:
    for name in (name for module in plan.modules for name in module.outputs if name.endswith(SCALARS)):
        found = float(read_tensor(made[name]))
        if not is_scale(found):
            raise TensorValue(
                f"ModelOpt made {name} {found}, and a scale is a normal number that float32 can calculate with",
                where=name,
                fix="Give more prompts, keep this module out of the recipe (keep: ...), or use the streaming road.",
            )


def _check_kept(plan: QuantizePlan, digests: dict[str, str], taken: dict[str, str]) -> None:
    for unit in plan.units:
        kept = {info.name: taken[info.name] for info in unit.carried}
        kept |= {weight.name: _as_it_reads(weight) for weight in unit.dequantized}
        for name, wanted in kept.items():
            if digests[name] != wanted:
                raise TensorValue(
                    f"ModelOpt changed {name}, which the recipe leaves as it is", where=name, fix=ANOTHER_ROAD
                )


def _as_it_reads(weight: Stored) -> str:
    """Return the blake3 of a weight dequantized, as the streaming road writes it."""
    hashed = blake3()
    for block in weight.blocks():
        for chunk in entry(weight.name, block).chunks():
            hashed.update(chunk)
    return hashed.hexdigest()
