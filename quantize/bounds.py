"""What a calibrated amax can be."""

from __future__ import annotations

from collections.abc import Mapping

from ..checkpoint.folder import Checkpoint
from ..errors import InputScalesInvalid
from ..targets.config import TargetConfig
from ..targets.norms import beyond_norms
from .formats import is_scale
from .pack import scale_2


def check_amax(name: str, amax: float) -> None:
    """Raise InputScalesInvalid unless an amax has an input_scale that engines can calculate with.

    Args:
        name: the module's.
        amax: the largest magnitude that it was seen to read.
    """
    if not is_scale(float(scale_2(amax))):
        raise InputScalesInvalid(
            f"the amax of {name} is {amax:g}, and its input_scale nothing that float32 can calculate with",
            where=name,
            fix="Calibrate again, with other prompts.",
        )


def check_norms(amaxes: Mapping[str, float], target: Checkpoint, config: TargetConfig) -> None:
    """Raise InputScalesInvalid for an amax beyond what the norm before the module can put out.

    Args:
        amaxes: by module, in the text model.
        target: the target that they are of.
        config: its config.
    """
    named = {f"{config.prefix}{name}": amax for name, amax in amaxes.items()}
    for beyond in beyond_norms(named, target.tensors):
        name = beyond.module.removeprefix(config.prefix)
        norm = beyond.norm.removeprefix(config.prefix)
        raise InputScalesInvalid(
            f"the amax of {name} is {beyond.amax:g}, and {norm}, which it reads, reaches {beyond.bound:g} at most",
            where=name,
            fix="The file was changed, or is of another target: calibrate this one again.",
        )
