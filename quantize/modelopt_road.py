"""The road for targets that fit into memory: ModelOpt calibrates, quantizes and exports. What belongs here: driving it.

Its tensors are kept as they are. The config blocks are kconv's own, so that both roads write one format.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.folder import open_checkpoint
from ..checkpoint.header import read_header
from ..checkpoint.staging import staged
from ..errors import RecipeInvalid, TensorMissing
from ..target.config import parse_target_config
from ..target.model import load_target
from ..target.source_formats import SIDE_CONFIG
from .finish import copied_files, quantized_config
from .inputs import data_free
from .plan import QuantizePlan, plan_quantize
from .recipe import NEVER, Recipe

# What ModelOpt says where none of its patterns met a quantizer.
NOTHING = "no weight quantizer is enabled"
# ModelOpt's own numbers of an NVFP4 quantizer.
NUMBERS = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}


def quantize_in_memory(target: Path, out: Path, recipe: Recipe, batches: Sequence[torch.Tensor]) -> None:
    """Quantize a target with ModelOpt, its input scales calibrated.

    Args:
        target: a text target's folder, in any form that is read; it is loaded whole, in bf16.
        out: the folder to make.
        recipe: what is quantized. A KV cache in FP8 is stated and has no scales, as on the streaming road.
        batches: token ids to calibrate on, [batch, T] each.

    Raises:
        RecipeInvalid: the target is wrapped or NVFP4 already, or ModelOpt has no module for the recipe.
        TensorMissing: ModelOpt exported other tensors than the plan has, as it does without a calibration, or if the
            recipe cuts through what it quantizes as one.
        TargetInvalid, SourceFormatUnknown, TensorShape: the target cannot be read.
        OutputExists, OutputFailed: see `checkpoint.staging`.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    source = open_checkpoint(target)
    config = parse_target_config(source.config, where=target / "config.json")
    if config.prefix:
        raise RecipeInvalid(
            "ModelOpt loads the text model alone, and this target is wrapped in another",
            where=target,
            fix="Use kconv calibrate, and kconv quantize with its file.",
        )
    plan = plan_quantize(source, config, recipe, data_free())
    with staged(out) as folder:
        model = load_target(target, torch.bfloat16)
        model.config.architectures = [config.architecture or "DeepseekV3ForCausalLM"]  # the exporter asks for it

        def forward(calibrated: Any) -> None:
            with torch.no_grad():
                for batch in batches:
                    calibrated(batch)

        try:
            mtq.quantize(model, quant_cfg(recipe), forward_loop=forward)
        except RuntimeError as fault:
            if NOTHING not in str(fault):
                raise
            raise RecipeInvalid(
                f"ModelOpt finds no module for the recipe {recipe.name}: it takes the experts of a layer as one",
                fix="Use kconv quantize, which takes each module by itself.",
            ) from fault
        export_hf_checkpoint(model, export_dir=folder)
        _check_exported(plan, folder)
        _finish(plan, folder)


def quant_cfg(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as ModelOpt's config: all off, its patterns on, and what it keeps off again."""
    kinds = ("weight_quantizer",) if recipe.weight_only else ("weight_quantizer", "input_quantizer")
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    entries += [
        {"quantizer_name": f"{pattern}*{kind}", "cfg": NUMBERS} for pattern in recipe.quantize for kind in kinds
    ]
    entries += [{"quantizer_name": f"{pattern}.*", "enable": False} for pattern in (*recipe.keep, *NEVER)]
    return {"quant_cfg": entries, "algorithm": "max"}


def _check_exported(plan: QuantizePlan, folder: Path) -> None:
    wanted = {name: (dtype, shape) for unit in plan.units for name, dtype, shape in unit.outputs()}
    headers = [read_header(file) for file in folder.glob("*.safetensors")]
    made = {name: (info.dtype, info.shape) for header in headers for name, info in header.items()}
    odd = sorted(wanted.keys() ^ made.keys())
    if odd:
        raise TensorMissing(
            f"ModelOpt's export and the plan differ in {len(odd)} tensors, among them {odd[0]}",
            where=odd[0],
            fix="Give batches to calibrate on, or use kconv quantize, which needs none.",
        )
    modules = {name for module in plan.modules for name in module.outputs}
    changed = sorted(name for name in modules if made[name] != wanted[name])
    if changed:
        raise TensorMissing(
            f"ModelOpt made {changed[0]} {made[changed[0]]}, not {wanted[changed[0]]}",
            where=changed[0],
            fix="Use kconv quantize.",
        )


def _finish(plan: QuantizePlan, folder: Path) -> None:
    for file in copied_files(plan.source.folder):
        shutil.copyfile(file, folder / file.name)
    for name, value in zip(("config.json", SIDE_CONFIG), quantized_config(plan), strict=True):
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
