"""Where the scales of activations come from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint.folder import Checkpoint
from ..errors import InputScalesInvalid
from ..targets.config import TargetConfig
from .bounds import check_amax, check_norms
from .calibration import identify, read_calibration
from .formats import fused_group
from .pack import scale_2

EXPERT = re.compile(r"(?P<layer>.*\.mlp\.experts)\.\d+\.(?P<part>\w+)")


@dataclass(frozen=True)
class InputScales:
    """The input_scale of each module, and where it comes from.

    Attributes:
        description: for the manifest and the output's reader.
        amax: largest magnitude at each module's input, by its name in the text model; None if every scale is 1.0.
        prefix: of the names on disk.
    """

    description: str
    amax: Mapping[str, float] | None = field(default=None, repr=False)
    prefix: str = ""

    def scales(self, modules: Collection[str]) -> dict[str, float]:
        """Return the input_scale of each module, equal among modules that an engine fuses.

        An expert that no token was routed to takes the largest amax of its layer's experts, as ModelOpt has it.

        Args:
            modules: names on disk of all that become NVFP4.

        Raises:
            InputScalesInvalid: the calibration has no amax for a module, or one that cannot be.
        """
        if self.amax is None:
            return dict.fromkeys(modules, 1.0)
        layers: dict[str, float] = {}
        for name, value in self.amax.items():
            if expert := EXPERT.fullmatch(name):
                key = f"{expert['layer']}.{expert['part']}"
                layers[key] = max(layers.get(key, 0.0), value)
        shared: dict[str, float] = {}
        for module in modules:
            found = self._amax_of(module.removeprefix(self.prefix), layers)
            group = fused_group(module)
            shared[group] = max(shared.get(group, 0.0), found)
        return {module: float(scale_2(shared[fused_group(module)])) for module in modules}

    def _amax_of(self, name: str, layers: Mapping[str, float]) -> float:
        expert = EXPERT.fullmatch(name)
        found = (self.amax or {}).get(name, layers.get(f"{expert['layer']}.{expert['part']}") if expert else None)
        if found is None:
            raise InputScalesInvalid(
                f"the calibration has no amax of {name}",
                where=name,
                fix="Calibrate this target again, with more prompts.",
            )
        check_amax(name, found)
        return found


def data_free() -> InputScales:
    """Return what ModelOpt's data-free recipes write: 1.0 for every module, whatever its activations are."""
    return InputScales("data-free: every input_scale is 1.0")


def from_calibration(file: Path, target: Checkpoint, config: TargetConfig) -> InputScales:
    """Return the scales that a calibration of this very target found.

    Args:
        file: as `kconv calibrate` wrote it.
        target: the target that is quantized, in whatever form.
        config: its config.

    Raises:
        InputScalesInvalid: the file cannot be read, is of another target, or has an amax that this target cannot reach.
    """
    calibration, own = read_calibration(file), identify(target, config)
    differing = [name for name, value in own if getattr(calibration.target, name) != value]
    if differing:
        raise InputScalesInvalid(
            f"{file.name} is a calibration of another target: its {', '.join(differing)} differ",
            where=file,
            fix="Calibrate this target, or give --input-scale data-free.",
        )
    check_norms(calibration.input_amax, target, config)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    prompts = calibration.prompts
    return InputScales(
        f"calibrated on {prompts.count} prompts, {prompts.tokens} tokens (file sha256 {digest[:16]})",
        calibration.input_amax,
        config.prefix,
    )
