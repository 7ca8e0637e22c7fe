"""The output's files besides the weights: config, index, copied files, manifest."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ..checkpoint.bytes import file_digest
from ..checkpoint.folder import INDEX
from ..checkpoint.formats import (
    CONFIG_KEY,
    MXFP4_AMID_FP8,
    NVFP4,
    NVFP4_AMID_FP8,
    NVFP4_MIXED,
    NVFP4_PACKED,
    SIDE_FILE,
    experts_of,
)
from ..checkpoint.manifest import MANIFEST, FileRecord, Manifest, Parameters
from .plan import ROUTER, QuantizePlan, exclude_modules
from .stream import Workplace

# Files that are written again, or describe only the source's weights.
NOT_COPIED = ("config.json", INDEX, SIDE_FILE, MANIFEST, "README.md", ".gitattributes")
# Records of a training or an evaluation of the source, by the end of their names.
RECORDS = ("training.json", "trainer_state.json", "_results.json")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Config blocks of another quantization, which a reader would believe.
STALE = (CONFIG_KEY, "compression_config")
# The published NVFP4 targets' prefix for a wrapped text model, which every engine builds under it.
TEXT_MODEL_TYPES = {"kimi_k2": "deepseek_v3"}


def finish(plan: QuantizePlan, place: Workplace) -> Path:
    """Write the files besides the weights, once all weights are there, and return the manifest's path."""
    weight_map = {name: unit.file for unit in plan.units for name, _, _ in unit.outputs()}
    files = write_beside(plan, place.files, weight_map, plan.bytes_out)
    # One file's tensors at a time: a large target has half a million of them.
    records = [place.reread(unit.file).file for unit in plan.units]
    return write_manifest(
        plan, place.files, [*records, *files], _tensor_texts(plan, place), made_by={"backend": "stream"}
    )


def write_beside(plan: QuantizePlan, folder: Path, weight_map: dict[str, str], size: int) -> list[FileRecord]:
    """Write the output's files, except the weights and the manifest; `size` is the bytes of all tensors."""
    config, side = quantized_config(plan)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    return [
        *(_copy(file, folder) for file in copied_files(plan.source.folder)),
        *([_write(folder / SIDE_FILE, side)] if side else []),
        _write(folder / INDEX, index),
        _write(folder / "config.json", config),
    ]


def copied_files(source: Path) -> list[Path]:
    """Return the files of a target's folder to copy: tokenizer, code, license, generation config."""
    return sorted(
        file
        for file in source.iterdir()
        if file.is_file() and file.name not in NOT_COPIED and not file.name.endswith((*WEIGHTS, *RECORDS))
    )


def bytes_needed(plan: QuantizePlan, place: Workplace | None = None) -> int:
    """Return the disk space in bytes that a plan still needs, for all ranks together."""
    left = sum(unit.bytes_out for unit in plan.units if place is None or not place.is_done(unit.file))
    return left + sum(file.stat().st_size for file in copied_files(plan.source.folder))


def quantized_config(plan: QuantizePlan) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return config.json and hf_quant_config.json of the output; the second is ModelOpt's alone."""
    config = copy.deepcopy(plan.source.config)
    text = config.get("text_config")
    for part in (config, text):
        for key in STALE:
            if isinstance(part, dict):
                part.pop(key, None)
    if isinstance(text, dict) and text.get("model_type") in TEXT_MODEL_TYPES:
        text["model_type"] = TEXT_MODEL_TYPES[text["model_type"]]
    packed, rounded = ([module.name for module in modules] for modules in (plan.modules, plan.rounded))
    if plan.form == MXFP4_AMID_FP8.form:
        config[CONFIG_KEY], side = NVFP4_AMID_FP8.described(
            plan.config.quantization or {}, dict.fromkeys(map(experts_of, packed))
        )
        return config, side
    # Engines build an output matrix of its own before they tie it to the embedding, and ModelOpt lists it so.
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama.py#L503-L510
    tied = [f"{plan.config.prefix}lm_head"] if plan.config.tied else []
    excludes = exclude_modules([*plan.linear, *tied], {*packed, *rounded}, plan.mtp)
    if plan.recipe.stored == NVFP4_PACKED:
        # Its target is each Linear, and of some families' routers that is the class.
        excludes += [module for module in plan.linear if module.endswith(ROUTER)]
    said = {"weight_only": plan.recipe.weight_only, "exclude": excludes}
    config[CONFIG_KEY] = plan.recipe.stored.quantization_config(**said)
    side = None if plan.recipe.stored == NVFP4_PACKED else NVFP4.hf_quant_config(**said)
    if side and plan.recipe.stored == NVFP4_MIXED:
        layers = NVFP4_MIXED.layers(_together(packed, plan.linear), rounded, weight_only=plan.recipe.weight_only)
        config[CONFIG_KEY], side = NVFP4_MIXED.described(config[CONFIG_KEY], side, layers)
    return config, side


def _together(packed: Sequence[str], linear: Iterable[str]) -> list[str]:
    """Return names of NVFP4 modules; of a layer's routed experts that of all together, which each engine looks up.

    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L1729-L1732
    """
    split = {experts_of(module) for module in set(linear).difference(packed)}
    groups = {module: experts_of(module) for module in packed}
    return list(dict.fromkeys(module if group in split else group for module, group in groups.items()))


def _copy(file: Path, folder: Path) -> FileRecord:
    made = folder / file.name
    shutil.copyfile(file, made)
    return FileRecord(name=made.name, size=made.stat().st_size, sha256=file_digest(made))


def _write(file: Path, value: dict[str, Any]) -> FileRecord:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return FileRecord(name=file.name, size=file.stat().st_size, sha256=file_digest(file))


def write_manifest(
    plan: QuantizePlan, folder: Path, files: list[FileRecord], tensors: Iterable[str], *, made_by: Mapping[str, str]
) -> Path:
    """Write kconv.json.

    Args:
        files: every file of it except this one.
        tensors: the step of each tensor, as JSON; read one at a time.
        made_by: the backend, and the versions of everything else that determined its bytes.
    """
    count = sum(prod(shape) for shape in _logical_shapes(plan))
    manifest = Manifest(
        exact=False,
        source=plan.source.source,
        source_config=file_digest(plan.source.folder / "config.json"),
        source_layout=plan.form,
        layout=plan.recipe.stored.form,
        spec={
            "kind": "target",
            "recipe": plan.recipe.model_dump(mode="json"),
            "weight_scales": plan.weight_scales,
            "input_scale": "none" if plan.recipe.weight_only else plan.inputs.description,
            "quantized_modules": len(plan.modules),
            "mtp": _describe_mtp(plan),
            "plan": plan.key,
            "prompts": [] if plan.recipe.weight_only else list(plan.inputs.digests),
            **made_by,
        },
        captured_by="",
        parameters=count,
        parameters_by_origin=Parameters(trained=0, copied_from_target=0, unknown=count),
        tensors=(),
        files=tuple(files),
    )
    before, hole, after = manifest.model_dump_json(indent=1, by_alias=True).partition('"tensors": []')
    if not hole:
        raise RuntimeError("the manifest's JSON has no empty list of tensors")
    file = folder / MANIFEST
    with file.open("w", encoding="utf-8") as out:
        out.write(f'{before}"tensors": [')
        for i, text in enumerate(tensors):
            out.write((",\n  " if i else "\n  ") + text)
        out.write(f"\n ]{after}\n")
    return file


def _describe_mtp(plan: QuantizePlan) -> dict[str, str]:
    """Return what became of each MTP layer, by its name."""
    modules = [module.name for module in plan.modules]
    counts = {root: sum(name.startswith(f"{root}.") for name in modules) for root in plan.mtp}
    return {root: f"{count:,} modules in NVFP4" if count else "unquantized" for root, count in counts.items()}


def _tensor_texts(plan: QuantizePlan, place: Workplace) -> Iterator[str]:
    for unit in plan.units:
        for step in place.reread(unit.file).tensors:
            yield step.model_dump_json(by_alias=True)


def _logical_shapes(plan: QuantizePlan) -> Iterator[tuple[int, ...]]:
    for unit in plan.units:
        yield from (module.weight.shape for module in (*unit.modules, *unit.rounded))
        yield from (weight.shape for weight in unit.dequantized)
        yield from (info.shape for info in unit.carried)
