"""How each tensor of an output came to be, as its manifest says it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..checkpoint.header import TensorInfo
from ..checkpoint.manifest import Action, StepRecord, TensorRecord
from .units import Unit

Origin = tuple[Action, tuple[TensorInfo, ...], str]


def steps(unit: Unit, made: Mapping[str, str], taken: Mapping[str, str], inputs: str) -> Iterator[StepRecord]:
    """Yield the record of each tensor of a file.

    Args:
        unit: the file, as it was planned.
        made: the blake3 of each of its tensors.
        taken: the blake3 of each tensor that it is made of.
        inputs: where the input scales come from.
    """
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
    for module in unit.modules:
        for name in module.outputs:
            suffix = name.removeprefix(f"{module.name}.")
            sources = module.weight.infos if suffix == "weight" else ()
            reason = {"weight": f"NVFP4 of {module.weight.form}", "input_scale": inputs}.get(suffix, "with its weight")
            found[name] = ("added" if suffix == "input_scale" else "quantized", sources, reason)
    for weight in unit.dequantized:
        found[weight.name] = ("dequantized", weight.infos, f"{weight.form} cannot stand beside NVFP4")
    for info in unit.carried:
        found[info.name] = ("copied", (info,), "")
    return found
