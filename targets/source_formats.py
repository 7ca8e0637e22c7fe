"""Which form a target's weights are stored in."""

from __future__ import annotations

from ..checkpoint.folder import Checkpoint, read_json
from ..checkpoint.header import TensorInfo
from ..errors import SourceFormatUnknown
from .config import TargetConfig
from .fp8 import SCALE, block_of, fp8_of
from .int4 import SUFFIXES, check_int4, int4_of
from .nvfp4 import BESIDE, check_nvfp4, nvfp4_of
from .stored import Plain, Stored

SIDE_CONFIG = "hf_quant_config.json"
KNOWN = {
    "plain": "bf16, fp16 or fp32",
    "int4": "compressed-tensors pack-quantized INT4 in groups",
    "fp8": "FP8 in blocks",
    "nvfp4": "ModelOpt's NVFP4",
}
# Dtypes that are a weight's only together with scales.
PACKED = ("F8_E4M3", "F8_E5M2", "U8", "I8", "I32", "F4")


def read_form(checkpoint: Checkpoint, config: TargetConfig) -> tuple[str, dict]:
    """Return the form that a target's config says its weights have, and the config block that says so.

    Returns:
        A key of `KNOWN`, and the quantization block, empty for "plain".

    Raises:
        SourceFormatUnknown: the block is of a form that is not read here.
    """
    where = checkpoint.folder / "config.json"
    block = config.quantization
    if not block:
        block = _side_block(checkpoint)
    if not block:
        return "plain", {}
    method, form = block.get("quant_method"), block.get("format")
    if method == "compressed-tensors" and form == "pack-quantized":
        check_int4(block, where)
        return "int4", block
    if method == "fp8":
        block_of(block, where)
        return "fp8", block
    if isinstance(method, str) and method.startswith("modelopt"):
        check_nvfp4(block, where)
        return "nvfp4", block
    named = f"{method!r}" + (f" in {form!r}" if form else "")
    raise SourceFormatUnknown(
        f"{checkpoint.folder.name} is quantized ({named}), which kconv does not read",
        where=where,
        fix=f"Give a target in {'; '.join(KNOWN.values())}.",
    )


def stored_weights(checkpoint: Checkpoint, config: TargetConfig) -> dict[str, Stored]:
    """Return every tensor of a target as what it stands for, by its name as a plain tensor.

    Scales and shapes are part of their weight and no entry of their own; nothing is read but headers.

    Raises:
        SourceFormatUnknown: a form that is not read here, or tensors that are not what the config says.
        TensorShape: scales that do not fit their values.
    """
    form, block = read_form(checkpoint, config)
    tensors = checkpoint.tensors
    found: list[Stored]
    beside: tuple[str, ...] = ()
    if form == "int4":
        found = [int4_of(base, tensors) for base in _bases(tensors, SUFFIXES[0])]
    elif form == "fp8":
        size = block_of(block, checkpoint.folder)
        found = [fp8_of(base, tensors, size) for base in _bases(tensors, SCALE)]
    elif form == "nvfp4":
        found, beside = [nvfp4_of(base, tensors) for base in _bases(tensors, "weight_scale_2")], BESIDE
    else:
        found = []
    if form != "plain" and not found:
        raise SourceFormatUnknown(
            f"the config says {KNOWN[form]}, and no tensor is stored so",
            where=checkpoint.folder,
            fix="Check that config.json and the weights are of the same model.",
        )
    part_of = {info.name for weight in found for info in weight.infos}
    for name, info in tensors.items():
        if name in part_of or name.endswith(tuple(f".{suffix}" for suffix in beside)):
            continue
        _refuse_packed(info, form)
        found.append(Plain(info))
    return {weight.name: weight for weight in found}


def _side_block(checkpoint: Checkpoint) -> dict | None:
    """Return what ModelOpt wrote beside a config that does not say it."""
    file = checkpoint.folder / SIDE_CONFIG
    if checkpoint.headers_only or not file.exists():
        return None
    said = read_json(file).get("quantization")
    return {**said, "quant_method": "modelopt"} if isinstance(said, dict) else None


def _bases(tensors: dict[str, TensorInfo], suffix: str) -> list[str]:
    return [name.removesuffix(f".{suffix}") for name in tensors if name.endswith(f".{suffix}")]


def _refuse_packed(info: TensorInfo, form: str) -> None:
    scale = info.name.endswith((".weight_scale", ".weight_scale_inv", ".weight_shape", ".weight_packed"))
    if scale or (info.name.endswith(".weight") and info.dtype in PACKED):
        raise SourceFormatUnknown(
            f"{info.name} is {info.dtype}, a part of a quantized weight, and the config says {KNOWN[form]}",
            where=info.file,
            fix="Check that config.json and the weights are of the same model, and that the download is whole.",
        )
