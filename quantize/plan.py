"""What becomes what, decided from headers alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from math import prod

from ..checkpoint.folder import Checkpoint
from ..errors import RecipeInvalid, TensorShape
from ..targets.config import TargetConfig
from ..targets.source_formats import read_form, stored_weights
from ..targets.stored import Stored
from .excludes import LAYER
from .formats import GROUP_SIZE
from .inputs import InputScales
from .recipe import Recipe
from .units import Module, Unit, cut_units

# Bytes of an output shard, about: what ranks share is whole files, so that these are many more than ranks; and one is
# read twice, the second time from the page cache, where those of all ranks fit. Of 1 T parameters it makes 550.
SHARD = 1 << 30
# Names of what a module with a weight of two dims is not: a linear layer.
TABLES = ("embed_tokens",)


@dataclass(frozen=True)
class QuantizePlan:
    """A whole quantization, decided.

    Attributes:
        source: the target.
        config: its config.
        form: how its weights are stored, as `target.source_formats` names it.
        recipe: what is quantized.
        inputs: where the input scales come from.
        units: the output's files, in order.
        linear: names of every linear module on disk, quantized or not.
    """

    source: Checkpoint
    config: TargetConfig
    form: str
    recipe: Recipe
    inputs: InputScales
    units: tuple[Unit, ...]
    linear: tuple[str, ...]

    @property
    def modules(self) -> list[Module]:
        """Every module that becomes NVFP4."""
        return [module for unit in self.units for module in unit.modules]

    @property
    def bytes_in(self) -> int:
        """Bytes of the source's tensors."""
        return sum(unit.bytes_in for unit in self.units)

    @property
    def bytes_out(self) -> int:
        """Bytes of the output's tensors."""
        return sum(unit.bytes_out for unit in self.units)

    @property
    def key(self) -> str:
        """Sixteen hex digits of all that decides the output: a restart goes on only with its own work."""
        facts = {
            "recipe": self.recipe.model_dump(),
            "config": self.source.config,
            "tensors": [(i.name, i.dtype, i.shape, i.file.name, i.begin) for i in self.source.tensors.values()],
            "stamps": [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in self.source.files],
            "inputs": self.inputs.description,
            "scales": [module.input_scale for module in self.modules],
            # Another cut has files of the same names.
            "files": [(unit.file, [name for name, _, _ in unit.outputs()]) for unit in self.units],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def plan_quantize(
    source: Checkpoint, config: TargetConfig, recipe: Recipe, inputs: InputScales, *, shard: int = SHARD
) -> QuantizePlan:
    """Decide what becomes of each tensor.

    Args:
        source: the target.
        config: its config.
        recipe: what is quantized.
        inputs: where the input scales come from.
        shard: bytes of an output file, about.

    Raises:
        SourceFormatUnknown: the target is stored in a form that is not read here.
        RecipeInvalid: a pattern of the recipe matches no module, or the target is NVFP4 already.
        TensorShape: a module cannot be cut into groups of sixteen.
        CalibrationInvalid: the calibration has no amax for a module.
    """
    form, _ = read_form(source, config)
    if form == "nvfp4":
        raise RecipeInvalid(
            f"{source.folder.name} is NVFP4 already", where=source.folder, fix="Give the target it was made from."
        )
    stored = stored_weights(source, config)
    linear = {n.removesuffix(".weight"): w for n, w in stored.items() if _is_linear(n, w)}
    chosen = _choose(linear, config, recipe)
    for weight in chosen.values():
        _check_dims(weight)
    scales = {} if recipe.weight_only else inputs.scales(chosen)
    modules = {name: Module(name, weight, scales.get(name)) for name, weight in chosen.items()}
    return QuantizePlan(source, config, form, recipe, inputs, cut_units(stored, modules, shard), tuple(linear))


def _is_linear(name: str, weight: Stored) -> bool:
    return name.endswith(".weight") and len(weight.shape) == 2 and not name.split(".")[-2].endswith(TABLES)


def _choose(linear: dict[str, Stored], config: TargetConfig, recipe: Recipe) -> dict[str, Stored]:
    chosen: dict[str, Stored] = {}
    for name, weight in linear.items():
        inner, layer = name.removeprefix(config.prefix), LAYER.fullmatch(name)
        # Layers beyond the model's own predict further tokens (MTP); the published targets leave them out.
        own = name.startswith(config.prefix) and layer is not None and int(layer["index"]) < config.layers
        if own and recipe.takes(inner):
            chosen[name] = weight
    inner = [name.removeprefix(config.prefix) for name in chosen]
    for pattern in recipe.quantize:
        if not any(recipe.model_copy(update={"quantize": (pattern,)}).takes(name) for name in inner):
            raise RecipeInvalid(
                f"{pattern!r} of the recipe {recipe.name} matches no linear module of this target",
                fix=f"Modules are named like {min(linear, default='none', key=len).removeprefix(config.prefix)}.",
            )
    return chosen


def _check_dims(weight: Stored) -> None:
    if weight.shape[1] % GROUP_SIZE or not prod(weight.shape):
        raise TensorShape(
            f"{weight.name} is {list(weight.shape)}, and {weight.shape[1]} columns make no groups of {GROUP_SIZE}",
            where=weight.infos[0].file,
            fix="Keep this module out of the recipe (keep: ...).",
        )
