"""A target's NVFP4 tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...checkpoint.header import TensorInfo
from ...quantize.formats import GROUP_SIZE, TENSORS, fused_group
from .rule import SGLANG, TRTLLM, VLLM, Found, rule
from .target import FLOATS, MARK, SCALES, TargetSubject

AGAIN = "Quantize the target again."
SCALARS = (MARK, "input_scale")
# Modules that no engine reads packed, by the end of their names.
NEVER = (".mlp.gate", "embed_tokens", ".eh_proj")
# What a module reads, by the last part of its name, in the config's own keys; `*` multiplies.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj"), ("hidden_size",)),
    "q_b_proj": ("q_lora_rank",),
    "kv_b_proj": ("kv_lora_rank",),
    "o_proj": ("num_attention_heads", "v_head_dim"),
}
LEFT = ("weight_packed", "weight_shape", "weight_scale_inv", "weight_zero_point")


@rule(
    "K401",
    "input-scale-missing",
    "error",
    "An NVFP4 module lacks its input_scale, without which engines cannot quantize what it reads. ModelOpt's exporter"
    " writes none if nothing was calibrated, and says nothing.",
    fix="Quantize again with a calibration or --input-scale data-free; or name the algorithm W4A16_NVFP4.",
)
def input_scale_missing(subject: TargetSubject) -> Iterator[Found]:
    if not subject.weight_only:
        lacking = [base for base, parts in subject.packed.items() if "input_scale" not in parts]
        yield from _first(lacking, "has no input_scale")


@rule(
    "K402",
    "weight-part-missing",
    "error",
    "An NVFP4 module lacks its weight, its block scales or its weight_scale_2: the values cannot be read.",
    fix="Fetch the target again, or quantize it again.",
)
def weight_part_missing(subject: TargetSubject) -> Iterator[Found]:
    for base, parts in subject.modules.items():
        lacking = [suffix for suffix in ("weight", "weight_scale", MARK) if suffix not in parts]
        if lacking and (MARK in parts or base in subject.packed):
            yield Found(base, f"lacks {' and '.join(lacking)}")


@rule(
    "K403",
    "nvfp4-dtype",
    "error",
    "A part of an NVFP4 weight is of another dtype than the format has: its bytes would be read as other numbers.",
    fix=AGAIN,
)
def nvfp4_dtype(subject: TargetSubject) -> Iterator[Found]:
    for parts in subject.packed.values():
        for suffix, info in parts.items():
            if info.dtype != TENSORS[suffix][0]:
                yield Found(info.name, f"{info.dtype}, and the format has {TENSORS[suffix][0]}")


@rule(
    "K404",
    "nvfp4-scale-shape",
    "error",
    "Block scales are not one for each sixteen values, or a scale of a whole module is no single number.",
    fix=AGAIN,
)
def nvfp4_scale_shape(subject: TargetSubject) -> Iterator[Found]:
    for parts in subject.packed.values():
        weight, scale = parts.get("weight"), parts.get("weight_scale")
        if weight and scale and weight.dtype == "U8" and len(weight.shape) == 2:
            wanted = TENSORS["weight_scale"][1](weight.shape[0], weight.shape[1] * 2)
            if scale.shape != wanted or weight.shape[1] * 2 % GROUP_SIZE:
                yield Found(
                    scale.name, f"{list(scale.shape)}, and its weight {list(weight.shape)} wants {list(wanted)}"
                )
        for info in (parts[suffix] for suffix in SCALARS if suffix in parts):
            if info.shape not in ((), (1,)):
                yield Found(info.name, f"{list(info.shape)}, and it is one number for the module")


@rule(
    "K405",
    "packed-width",
    "error",
    "A packed weight is not half as wide as what its module reads by the config: two values stand in each byte.",
    fix="Check that config.json and the weights are of the same model; else quantize the target again.",
)
def packed_width(subject: TargetSubject) -> Iterator[Found]:
    text = subject.config.get("text_config", subject.config)
    for base, parts in subject.packed.items():
        weight, keys = parts.get("weight"), COLUMNS.get(base.rpartition(".")[2])
        if weight is None or keys is None or weight.dtype != "U8":
            continue
        columns = 1
        for key in keys:
            value = text.get(key) if isinstance(text, Mapping) else None
            columns *= value if isinstance(value, int) else 0
        if columns and (len(weight.shape) != 2 or weight.shape[1] * 2 != columns):
            yield Found(weight.name, f"{list(weight.shape)}, and {' x '.join(keys)} is {columns}")


@rule(
    "K406",
    "fused-part-unpacked",
    "error",
    "Of modules that engines fuse into one, some are NVFP4 and some are not: there is no such fused layer.",
    fix="Quantize all of q_a/kv_a, of q/k/v or of gate/up, or none.",
    seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L187-L222",
)
def fused_part_unpacked(subject: TargetSubject) -> Iterator[Found]:
    packed = {fused_group(base) for base in subject.packed}
    for base in subject.plain:
        if fused_group(base) in packed:
            yield Found(base, "is not quantized, and what it is fused with is")


@rule(
    "K407",
    "never-quantized",
    "error",
    "A router, an embedding or an MTP projection is NVFP4; no engine reads these packed.",
    fix="Quantize the target again without them.",
)
def never_quantized(subject: TargetSubject) -> Iterator[Found]:
    for base in subject.packed:
        if base.endswith(NEVER):
            yield Found(base, "is NVFP4")


@rule(
    "K408",
    "lm-head-quantized",
    "warning",
    "The lm_head is NVFP4: a draft head that shares it cannot read it, and engines differ on whether they can.",
    fix="Keep lm_head as it is, and exclude it.",
    seen_in="https://github.com/vllm-project/vllm/issues/45102",
)
def lm_head_quantized(subject: TargetSubject) -> Iterator[Found]:
    for base in subject.packed:
        if base.rpartition(".")[2] == "lm_head":
            yield Found(base, "is NVFP4")


@rule(
    "K409",
    "other-format-left",
    "error",
    "A tensor of the format that the target was stored in before is still there beside NVFP4.",
    fix="Quantize the target again into a new folder.",
)
def other_format_left(subject: TargetSubject) -> Iterator[Found]:
    if subject.is_nvfp4:
        left = [name for name in subject.tensors if name.endswith(tuple(f".{suffix}" for suffix in LEFT))]
        yield from _first(left, "is of another quantized format")


@rule(
    "K410",
    "kv-b-proj-quantized",
    "error",
    "kv_b_proj is NVFP4: TensorRT-LLM and SGLang split it per head when they load it, and want it plain.",
    fix="Keep kv_b_proj out of the recipe.",
    engines=(SGLANG, TRTLLM),
)
def kv_b_proj_quantized(subject: TargetSubject) -> Iterator[Found]:
    for base in subject.packed:
        if base.endswith(".kv_b_proj"):
            yield Found(base, "is NVFP4")


@rule(
    "K411",
    "kv-scale-half",
    "error",
    "One of k_scale and v_scale is there without the other, or is no single float32.",
    fix="Export the target again, or drop both: engines then take 1.0.",
    engines=(*VLLM, SGLANG, TRTLLM),
)
def kv_scale_half(subject: TargetSubject) -> Iterator[Found]:
    for name, info in subject.tensors.items():
        if name.endswith((".k_scale", ".v_scale")):
            if info.dtype not in FLOATS or info.shape not in ((), (1,)):
                yield Found(name, f"{info.dtype} {list(info.shape)}")
            if _partners(name).isdisjoint(subject.tensors):
                yield Found(name, "stands alone")


def _partners(name: str) -> set[str]:
    """Return where the other of a pair may stand: beside it, or, as the exporter writes it, in v_proj or k_proj."""
    own, other = ("k", "v") if name.endswith(".k_scale") else ("v", "k")
    stem = name.removesuffix(f"{own}_scale")
    return {f"{stem}{other}_scale", f"{stem.removesuffix(f'{own}_proj.')}{other}_proj.{other}_scale"}


def _first(names: list[str], what: str) -> Iterator[Found]:
    """Yield one finding for what may be true of each of 70,000 modules."""
    if names:
        more = f"; so do {len(names) - 1:,} more" if len(names) > 1 else ""
        yield Found(names[0], f"{what}{more}")


def parts_of(subject: TargetSubject, suffix: str) -> Iterator[TensorInfo]:
    """Yield one kind of scale of all packed modules."""
    assert suffix in SCALES
    yield from (parts[suffix] for parts in subject.packed.values() if suffix in parts)


RULES = (
    input_scale_missing,
    weight_part_missing,
    nvfp4_dtype,
    nvfp4_scale_shape,
    packed_width,
    fused_part_unpacked,
    never_quantized,
    lm_head_quantized,
    other_format_left,
    kv_b_proj_quantized,
    kv_scale_half,
)
