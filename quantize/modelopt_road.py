"""The road for targets that fit into memory: ModelOpt calibrates, quantizes and exports.

Its tensors are kept as they are. All beside them is kconv's own, so that both roads write one format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.folder import Checkpoint
from ..checkpoint.staging import staged
from ..checkpoint.tensors import TORCH
from ..errors import RecipeInvalid
from ..targets.config import TargetConfig
from ..targets.model import load_target
from .calibration import Prompts
from .exported import take_export
from .inputs import InputScales
from .plan import QuantizePlan, plan_quantize
from .recipe import NEVER, Recipe
from .run import check_disk

Say = Callable[[str], None]
# What ModelOpt says where none of its patterns met a quantizer.
NOTHING = "no weight quantizer is enabled"
# What to do with a target that is larger than the memory.
INSTEAD = "Use --road stream with a file of kconv calibrate; both hold a layer at a time at the most."
# ModelOpt's own numbers of an NVFP4 quantizer.
NUMBERS = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}


def plan_in_memory(source: Checkpoint, config: TargetConfig, recipe: Recipe, prompts: Prompts | None) -> QuantizePlan:
    """Decide what becomes of each tensor; its files are ModelOpt's to choose.

    Args:
        source: a text target, in any form that is read.
        config: its config.
        recipe: what is quantized. A KV cache in FP8 is stated and has no scales, as on the streaming road.
        prompts: what is calibrated on; None if activations stay as they are.

    Raises:
        RecipeInvalid: the target is wrapped or NVFP4 already, or a pattern matches no module.
        SourceFormatUnknown, TensorShape: the target cannot be read.
    """
    if config.prefix:
        raise RecipeInvalid(
            "ModelOpt loads the text model alone, and this target is wrapped in another",
            where=source.folder,
            fix="Use kconv calibrate, and kconv quantize with its file.",
        )
    said = "none"
    if prompts:
        digest = prompts.sha256[:16]
        said = f"calibrated by ModelOpt on {prompts.count} prompts, {prompts.tokens} tokens (file sha256 {digest})"
    return plan_quantize(source, config, recipe, InputScales(said))


def quantize_in_memory(
    plan: QuantizePlan, out: Path, batches: Sequence[torch.Tensor], *, say: Say = lambda _: None
) -> None:
    """Quantize a target with ModelOpt, its input scales calibrated.

    Args:
        plan: as `plan_in_memory` makes it; the target is loaded whole, in its own dtype.
        out: the folder to make.
        batches: token ids to calibrate on, [batch, T] each.
        say: told what is going on.

    Raises:
        RecipeInvalid: ModelOpt has no module for the recipe.
        TensorMissing: ModelOpt exported other tensors than the plan has, as it does without a calibration, or if the
            recipe cuts through what it quantizes as one.
        TensorValue: it changed a tensor that the plan leaves as it is, or made NaN, Inf or a scale of zero.
        TargetInvalid: the target cannot be built.
        TargetTooLarge: it is larger than what memory is left.
        OutputExists, OutputFailed: see `checkpoint.staging`; or the disk is too small.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    check_disk(plan, out)
    config, recipe = plan.config, plan.recipe
    with staged(out) as folder:
        say("loading the target")
        model = load_target(plan.source.folder, TORCH[config.dtype or "BF16"], instead=INSTEAD)
        model.config.architectures = [config.architecture or "DeepseekV3ForCausalLM"]  # the exporter asks for it

        def forward(calibrated: Any) -> None:
            with torch.no_grad():
                for i, batch in enumerate(batches, 1):
                    say(f"calibrating, {i} of {len(batches)} prompts")
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
        say("exporting")
        export_hf_checkpoint(model, export_dir=folder)
        del model
        say("comparing the export with the plan, and hashing it")
        take_export(plan, folder)


def quant_cfg(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as ModelOpt's config: all off, its patterns on, and what it keeps off again."""
    kinds = ("weight_quantizer",) if recipe.weight_only else ("weight_quantizer", "input_quantizer")
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    entries += [
        {"quantizer_name": f"{pattern}*{kind}", "cfg": NUMBERS} for pattern in recipe.quantize for kind in kinds
    ]
    entries += [{"quantizer_name": f"{pattern}.*", "enable": False} for pattern in (*recipe.keep, *NEVER)]
    return {"quant_cfg": entries, "algorithm": "max"}
