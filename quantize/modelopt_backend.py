"""The backend for targets that fit into memory: ModelOpt calibrates, quantizes and exports.

Its tensors are kept unchanged and compared with the plan. Every value is checked, as the streaming backend does while
it writes, since an export that overflowed looks complete. Everything except the tensors is written by kconv, so that
both backends write one format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from ..checkpoint.bytes import digest, file_digest, stream
from ..checkpoint.folder import Checkpoint
from ..checkpoint.formats import FP8_PB_WO, INPUT_SCALE, NVFP4, Fp8Blocks, is_scale
from ..checkpoint.header import TensorInfo, read_header
from ..checkpoint.manifest import FileRecord
from ..checkpoint.staging import check_disk, staged
from ..checkpoint.tensors import TORCH, entry, read_tensor
from ..checkpoint.values import Scan
from ..errors import RecipeInvalid, TargetInvalid, TensorMissing, TensorValue
from ..installed import version
from ..targets.config import TargetConfig
from ..targets.model import load_target
from ..targets.mtp import mtp_roots
from ..targets.weights import StoredWeight, read_format
from .calibration import CalibrationPrompts, InputScales
from .output import bytes_needed, write_beside, write_manifest
from .plan import QuantizePlan, plan_quantize
from .recipe import NEVER, Recipe
from .stream import steps

Say = Callable[[str], None]
# ModelOpt's message if none of its patterns matched a quantizer.
NOTHING = "no weight quantizer is enabled"
# What to do about a target that is larger than memory.
INSTEAD = "Use --backend stream with a file from kconv calibrate; both need memory for at most one layer."
# ModelOpt's own numbers of an NVFP4 quantizer.
NUMBERS = {"num_bits": (2, 1), "block_sizes": {-1: NVFP4.group, "type": "dynamic", "scale_bits": (4, 3)}}
# And those of an FP8 one in blocks.
BLOCKS = {"num_bits": (4, 3), "block_sizes": {-1: FP8_PB_WO.width, -2: FP8_PB_WO.height}}


def plan_in_memory(
    source: Checkpoint, config: TargetConfig, recipe: Recipe, prompts: CalibrationPrompts | None
) -> QuantizePlan:
    """Decide what becomes of each tensor; ModelOpt chooses the files.

    Without prompts activations stay unquantized.
    """
    if config.prefix:
        raise RecipeInvalid(
            "ModelOpt loads only a bare text model, but this target wraps it",
            where=source.folder,
            fix="Use kconv calibrate, then kconv quantize with its file.",
        )
    if recipe.weight_scales != "max":
        raise RecipeInvalid(
            f"ModelOpt searches for block scales ({recipe.weight_scales}) on a GPU only; this backend runs on a CPU",
            where=f"weight_scales in the recipe {recipe.name}",
            fix="Use kconv quantize with --backend stream, which finds the same scales.",
        )
    if recipe.format != "modelopt":
        raise RecipeInvalid(
            f"ModelOpt does not write the format {recipe.format}",
            where=f"format in the recipe {recipe.name}",
            fix="Use kconv quantize with --backend stream.",
        )
    if recipe.fp8 and isinstance(read_format(source, config), Fp8Blocks):
        raise RecipeInvalid(
            "ModelOpt would round FP8 once more, which is kept as it is otherwise",
            where=f"fp8 in the recipe {recipe.name}",
            fix="Use kconv quantize with --backend stream.",
        )
    said = "none"
    if mtp := sorted(mtp_roots(source.tensors, config.layers)):
        raise TargetInvalid(
            f"ModelOpt loads no MTP layer, and its export would lose {', '.join(mtp)}",
            where=source.folder,
            fix="Use kconv calibrate, then kconv quantize with its file, which keeps them.",
        )
    if prompts:
        digest = prompts.sha256[:16]
        said = f"calibrated by ModelOpt on {prompts.count} prompts, {prompts.tokens} tokens (file sha256 {digest})"
    digests = prompts.digests if prompts else ()
    return plan_quantize(source, config, recipe, InputScales(said, digests=digests))


def quantize_in_memory(
    plan: QuantizePlan, out: Path, batches: Sequence[torch.Tensor], *, say: Say = lambda _: None
) -> None:
    """Quantize a target with ModelOpt, its input scales calibrated.

    Args:
        plan: from `plan_in_memory`; the target is loaded whole, in its own dtype.
        batches: token ids for calibration, [batch, T] each.

    Raises:
        RecipeInvalid: ModelOpt has no module for the recipe.
        TensorMissing: ModelOpt exported other tensors than planned. This happens without a calibration, or if the
            recipe splits what ModelOpt quantizes as one.
        TensorValue: it changed a tensor that the plan leaves unchanged, or produced NaN, Inf or a scale of zero.
        TargetInvalid: the target cannot be built.
        TargetTooLarge: it is larger than the free memory.
        OutputExists, OutputFailed: something exists at `out`, it cannot be written, or the disk is too small.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    check_disk(out, bytes_needed(plan))
    config, recipe = plan.config, plan.recipe
    with staged(out) as folder:
        say("loading the target")
        model = load_target(plan.source.folder, TORCH[config.dtype or "BF16"], instead=INSTEAD)
        model.config.architectures = [config.architecture or "DeepseekV3ForCausalLM"]  # the exporter requires it

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
                f"ModelOpt finds no module for the recipe {recipe.name}: it treats the experts of a layer as one",
                fix="Use kconv quantize with --backend stream.",
            ) from fault
        say("exporting")
        export_hf_checkpoint(model, export_dir=folder)
        del model
        say("comparing the export with the plan, and hashing it")
        take_export(plan, folder)


def quant_cfg(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as ModelOpt's config: everything off, then its patterns on, then what it keeps off again."""
    kinds = ("weight_quantizer",) if recipe.weight_only else ("weight_quantizer", "input_quantizer")
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    entries += [
        {"quantizer_name": f"{pattern}*{kind}", "cfg": NUMBERS} for pattern in recipe.quantize for kind in kinds
    ]
    entries += [{"quantizer_name": f"{pattern}*weight_quantizer", "cfg": BLOCKS} for pattern in recipe.fp8]
    entries += [{"quantizer_name": f"{pattern}.*", "enable": False} for pattern in (*recipe.keep, *NEVER)]
    return {"quant_cfg": entries, "algorithm": "max"}


WEIGHTS = "*.safetensors"
ANOTHER_BACKEND = "Use the streaming backend."
# Numbers that a kernel multiplies by, one per module.
SCALARS = (NVFP4.scale_2, INPUT_SCALE)


def take_export(plan: QuantizePlan, folder: Path) -> None:
    """Check ModelOpt's export in a folder, which becomes the output, and write everything except its weights again."""
    made = {name: info for file in sorted(folder.glob(WEIGHTS)) for name, info in read_header(file).items()}
    _check_names(plan, made)
    digests = {name: _look(info) for name, info in made.items()}
    _check_scales(plan, made)
    taken = {name: digest(info) for name, info in plan.source.tensors.items()}
    _check_kept(plan, digests, taken)
    for file in folder.iterdir():
        if not file.match(WEIGHTS):
            file.unlink()  # ModelOpt's own config blocks and index are written again
    weight_map = {name: info.file.name for name, info in made.items()}
    files = [
        FileRecord(name=file.name, size=file.stat().st_size, sha256=file_digest(file))
        for file in sorted(folder.glob(WEIGHTS))
    ]
    files += write_beside(plan, folder, weight_map, plan.bytes_out)
    records = (step for unit in plan.units for step in steps(unit, digests, taken, plan.inputs.description))
    made_by = {"backend": "modelopt", "modelopt": version("nvidia-modelopt"), "torch": torch.__version__}
    write_manifest(plan, folder, files, (step.model_dump_json(by_alias=True) for step in records), made_by=made_by)


def _check_names(plan: QuantizePlan, made: dict[str, TensorInfo]) -> None:
    wanted = {name: (dtype, shape) for unit in plan.units for name, dtype, shape in unit.outputs()}
    odd = sorted(wanted.keys() ^ made.keys())
    if odd:
        raise TensorMissing(
            f"ModelOpt's export and the plan differ in {len(odd)} tensors, among them {odd[0]}",
            where=odd[0],
            fix="Pass prompts for calibration, or use the streaming backend, which needs none.",
        )
    for name, info in made.items():
        if (info.dtype, info.shape) != wanted[name]:
            raise TensorMissing(
                f"ModelOpt made {name} {info.dtype} {list(info.shape)}, not {wanted[name][0]} {list(wanted[name][1])}",
                where=name,
                fix=ANOTHER_BACKEND,
            )


def _look(info: TensorInfo) -> str:
    """Return a tensor's blake3, checking its values on the way."""
    hashed, scan = blake3(), Scan(info.dtype)
    for chunk in stream(info):
        hashed.update(chunk)
        scan.update(chunk)
    if count := scan.result().not_finite:
        raise TensorValue(
            f"{count:,} values of {info.name} are NaN or Inf in ModelOpt's export", where=info.name, fix=ANOTHER_BACKEND
        )
    return hashed.hexdigest()


def _check_scales(plan: QuantizePlan, made: dict[str, TensorInfo]) -> None:
    for name in (name for module in plan.modules for name in module.outputs if name.endswith(SCALARS)):
        found = float(read_tensor(made[name]))
        if not is_scale(found):
            raise TensorValue(
                f"ModelOpt made {name} {found}, but a scale must be a normal float32 number",
                where=name,
                fix="Use more prompts, keep this module out of the recipe (keep: ...), or use the streaming backend.",
            )


def _check_kept(plan: QuantizePlan, digests: dict[str, str], taken: dict[str, str]) -> None:
    for unit in plan.units:
        kept = {info.name: taken[info.name] for info in unit.carried}
        kept |= {weight.name: _as_it_reads(weight) for weight in unit.dequantized}
        for name, wanted in kept.items():
            if digests[name] != wanted:
                raise TensorValue(
                    f"ModelOpt changed {name}, which the recipe does not quantize", where=name, fix=ANOTHER_BACKEND
                )


def _as_it_reads(weight: StoredWeight) -> str:
    """Return the blake3 of a weight dequantized as the streaming backend writes it."""
    hashed = blake3()
    for block in weight.blocks():
        for chunk in entry(weight.name, block).chunks():
            hashed.update(chunk)
    return hashed.hexdigest()
