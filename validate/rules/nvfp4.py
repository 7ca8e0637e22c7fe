"""A target's NVFP4 tensors and their scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ...checkpoint.bytes import read_floats, stream
from ...checkpoint.formats import FP8_BLOCKS, FP8_PB_WO, NVFP4, ONLY_QUANTIZED, fused_group, is_scale, one_form_group
from ...checkpoint.header import TensorInfo
from ...rule import Found, Rule
from .subject import ENGINES, concerned
from .target import FLOATS, VALUES, TargetSubject

AGAIN = "Quantize the target again."
# Which vLLM and SGLang build without a place for a scale, of DeepSeek-V3.2's and GLM-5's indexer.
INDEXER = ".indexer.weights_proj"
# Modules that no engine reads packed, by the end of their names.
# vLLM builds an indexer's wk as one with it, and reads of wk FP8 besides.
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L710-L719
NEVER = (".mlp.gate", "embed_tokens", ".eh_proj", "mtp.fc", INDEXER, ".indexer.wk")
# Whose loader of SGLang reads ModelOpt's FP8 in blocks:
# https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/kimi_k3.py#L3189-L3191
READS_BLOCKS = ("KimiK3ForConditionalGeneration", "KimiK3LinearForCausalLM")
# The width of a module's input, by the last part of its name, in the config's own keys; `*` multiplies.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj"), ("hidden_size",)),
    "q_b_proj": ("q_lora_rank",),
    "kv_b_proj": ("kv_lora_rank",),
    "o_proj": ("num_attention_heads", "v_head_dim"),
}


def input_scale_missing(subject: TargetSubject) -> Iterator[Found]:
    if not subject.weight_only:
        name = subject.format.inputs
        lacking = [base for base, parts in subject.packed.items() if name not in parts]
        yield from _first(lacking, f"has no {name}")


def _parts(subject: TargetSubject, kind: str) -> Iterator[Found]:
    """Yield the faults of one kind in the tensors of NVFP4 weights."""
    yield from (Found(fault.name, fault.what) for fault in subject.faults if fault.kind == kind)


def packed_width(subject: TargetSubject) -> Iterator[Found]:
    text = subject.config.get("text_config", subject.config)
    for base, parts in subject.packed.items():
        weight, keys = parts.get(subject.format.values), COLUMNS.get(base.rpartition(".")[2])
        if weight is None or keys is None or weight.dtype != VALUES:
            continue
        columns = 1
        for key in keys:
            value = text.get(key) if isinstance(text, Mapping) else None
            columns *= value if isinstance(value, int) else 0
        if columns and (len(weight.shape) != 2 or weight.shape[1] * NVFP4.columns != columns):
            yield Found(weight.name, f"has shape {list(weight.shape)}, but {' x '.join(keys)} is {columns}")


def fused_part_unpacked(subject: TargetSubject) -> Iterator[Found]:
    packed, fp8 = ({one_form_group(base) for base in modules} for modules in (subject.packed, subject.fp8))
    # One finding for a layer: it may have hundreds of experts.
    plain = {group: base for base in reversed(subject.plain) if (group := one_form_group(base)) in packed | fp8}
    mixed = {group: base for base in reversed(tuple(subject.fp8)) if (group := one_form_group(base)) in packed}
    yield from (Found(base, "is not quantized, but modules of the same layer are") for base in plain.values())
    yield from (Found(base, "is FP8, but modules of the same layer are NVFP4") for base in mixed.values())


def fp8_part(subject: TargetSubject) -> Iterator[Found]:
    for base, parts in subject.blocks.items():
        yield from (Found(fault.name, fault.what) for fault in FP8_PB_WO.faults(base, parts))


def never_quantized(subject: TargetSubject) -> Iterator[Found]:
    for base in subject.packed:
        if base.endswith(NEVER):
            yield Found(base, "is NVFP4")
    yield from (Found(base, "is FP8") for base in subject.fp8 if base.endswith(INDEXER))


def fp8_blocks_unread(subject: TargetSubject) -> Iterator[Found]:
    classes = subject.config.get("architectures")
    if not any(one in classes for one in READS_BLOCKS if isinstance(classes, list)):
        scaled = [base for base, parts in subject.blocks.items() if FP8_PB_WO.scale in parts]
        yield from _first(scaled, "is FP8 in blocks")


def lm_head_quantized(subject: TargetSubject) -> Iterator[Found]:
    for base in subject.packed:
        if base.rpartition(".")[2] == "lm_head":
            yield Found(base, "is NVFP4")


def other_format_left(subject: TargetSubject) -> Iterator[Found]:
    if subject.is_nvfp4:
        own = {*subject.format.tensors, *(FP8_BLOCKS.tensors if subject.is_hybrid else ())}
        foreign = tuple(f".{suffix}" for suffix in ONLY_QUANTIZED if suffix not in own)
        left = [name for name in subject.tensors if name.endswith(foreign)]
        yield from _first(left, "belongs to another quantized format")


def kv_b_proj_quantized(subject: TargetSubject) -> Iterator[Found]:
    for base in subject.packed:
        if base.endswith(".kv_b_proj"):
            yield Found(base, "is NVFP4")


def mtp_quantized(subject: TargetSubject) -> Iterator[Found]:
    yield from (Found(root, "has NVFP4 modules") for root, packed in subject.mtp.items() if packed)


def kv_scale_half(subject: TargetSubject) -> Iterator[Found]:
    for name, info in subject.tensors.items():
        if name.endswith((".k_scale", ".v_scale")):
            if info.dtype not in FLOATS or info.shape not in ((), (1,)):
                yield Found(name, f"{info.dtype} {list(info.shape)}")
            if _partners(name).isdisjoint(subject.tensors):
                yield Found(name, "has no partner")


def _partners(name: str) -> set[str]:
    """Return where the other scale of a pair may be: next to it, or, as the exporter writes it, in v_proj or k_proj."""
    own, other = ("k", "v") if name.endswith(".k_scale") else ("v", "k")
    stem = name.removesuffix(f"{own}_scale")
    return {f"{stem}{other}_scale", f"{stem.removesuffix(f'{own}_proj.')}{other}_proj.{other}_scale"}


def _first(names: list[str], what: str) -> Iterator[Found]:
    """Yield one finding for something that may be true of each of 70,000 modules."""
    if names:
        more = f"; so do {len(names) - 1:,} more" if len(names) > 1 else ""
        yield Found(names[0], f"{what}{more}")


def parts_of(subject: TargetSubject, suffix: str) -> Iterator[TensorInfo]:
    """Yield one kind of scale of all packed modules."""
    yield from (parts[suffix] for parts in subject.packed.values() if suffix in parts)


FUSED = (
    "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L2055-L2064"
)


# e4m3 has one NaN, with either sign.
NAN = 0x7F
DATA_FREE = 1.0  # the input_scale of a target that was not calibrated


def scale_value(subject: TargetSubject) -> Iterator[Found]:
    for suffix in (subject.format.scale_2, subject.format.inputs):
        for info in parts_of(subject, suffix):
            value = _scalar(info)
            if value is not None and not (value and is_scale(subject.format.stored_scale(value))):
                yield Found(info.name, f"is {value:g}")


def block_scale_value(subject: TargetSubject) -> Iterator[Found]:
    for info in parts_of(subject, NVFP4.scale):
        if info.dtype != "F8_E4M3":
            continue
        nan = negative = other = 0
        for chunk in stream(info):
            bits = np.frombuffer(chunk, np.uint8)
            nan += int(np.count_nonzero(bits & NAN == NAN))
            negative += int(np.count_nonzero(bits > 0x80))
            other += int(np.count_nonzero(bits & NAN))
        if nan or negative or (info.size and not other):
            what = f"{nan:,} are NaN" if nan else f"{negative:,} are negative" if negative else "all are zero"
            yield Found(info.name, what)


def input_scale_beyond_norm(subject: TargetSubject) -> Iterator[Found]:
    from ...quantize.calibration import beyond_norms

    suffix = subject.format.inputs
    scales = {info.name: _scalar(info) for info in parts_of(subject, suffix)}
    amaxes = {
        name.removesuffix(f".{suffix}"): subject.format.stored_scale(scale) * NVFP4.largest
        for name, scale in scales.items()
        if scale and scale != DATA_FREE
    }
    for beyond in beyond_norms(amaxes, subject.tensors, str(subject.text.get("model_type", ""))):
        yield Found(
            f"{beyond.module}.{suffix}",
            f"implies an amax of {beyond.amax:g}, but {beyond.norm} reaches at most {beyond.bound:g}",
        )


def _unequal(subject: TargetSubject, suffix: str) -> Iterator[Found]:
    groups: dict[str, list[TensorInfo]] = {}
    for info in parts_of(subject, suffix):
        groups.setdefault(fused_group(info.name.removesuffix(f".{suffix}")), []).append(info)
    for infos in groups.values():
        values = [_scalar(info) for info in infos] if len(infos) > 1 else []
        if any(value != values[0] and value == value for value in values if value is not None):
            yield Found(infos[0].name, f"is {values[0]}, but {infos[1].name} is {values[1]}")


def _scalar(info: TensorInfo) -> float | None:
    """Return a scale's value; None if it is not a single float32, which another rule reports."""
    return float(read_floats(info).reshape(())) if info.dtype == "F32" and info.shape in ((), (1,)) else None


RULES: tuple[Rule[TargetSubject], ...] = (
    Rule(
        "K401",
        "input-scale-missing",
        "error",
        "An NVFP4 module has no input_scale. Engines cannot quantize its input. ModelOpt's exporter"
        " silently leaves it out without calibration.",
        fix="Quantize again with a calibration or --input-scale data-free, or name the algorithm W4A16_NVFP4.",
        check=input_scale_missing,
    ),
    Rule(
        "K402",
        "weight-part-missing",
        "error",
        "An NVFP4 module lacks its weight, block scales or weight_scale_2.",
        fix="Fetch the target again, or quantize it again.",
        check=lambda s: _parts(s, "missing"),
    ),
    Rule(
        "K403",
        "nvfp4-dtype",
        "error",
        "A part of an NVFP4 weight has the wrong dtype. Its bytes would be read as other numbers.",
        fix=AGAIN,
        check=lambda s: _parts(s, "dtype"),
    ),
    Rule(
        "K404",
        "nvfp4-scale-shape",
        "error",
        "Block scales are not one per sixteen values, or a module's scale is not one number.",
        fix=AGAIN,
        check=lambda s: _parts(s, "shape"),
    ),
    Rule(
        "K405",
        "packed-width",
        "error",
        "A packed weight is not half as wide as the config requires. Each byte holds two values.",
        fix="Check that config.json and the weights belong to the same model. Otherwise quantize the target again.",
        check=packed_width,
    ),
    Rule(
        "K406",
        "fused-part-unpacked",
        "error",
        "Engines build these modules as one layer, but they are not all NVFP4, or all FP8. No such layer exists.",
        fix="Quantize all of q_a/kv_a, of q/k/v, of gate/up or of a layer's routed experts in one form, or none.",
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L187-L222",
        check=fused_part_unpacked,
    ),
    Rule(
        "K407",
        "never-quantized",
        "error",
        "A router, an embedding, an MTP projection or an indexer's wk or weights_proj is quantized. Engines have no"
        " place for its scales.",
        fix="Quantize the target again without them.",
        check=never_quantized,
    ),
    Rule(
        "K408",
        "lm-head-quantized",
        "warning",
        "lm_head is NVFP4. A draft head that shares it cannot read it, and not every engine can.",
        fix="Leave lm_head unquantized and exclude it.",
        seen_in="https://github.com/vllm-project/vllm/issues/45102",
        check=lm_head_quantized,
    ),
    Rule(
        "K409",
        "other-format-left",
        "error",
        "A tensor of the previous quantized format is still there beside NVFP4.",
        fix="Quantize the target again into a new folder.",
        check=other_format_left,
    ),
    Rule(
        "K410",
        "kv-b-proj-quantized",
        "error",
        "kv_b_proj is NVFP4. TensorRT-LLM and SGLang split it per head while loading and need it unquantized.",
        fix="Keep kv_b_proj out of the recipe.",
        engines=concerned("K410"),
        check=kv_b_proj_quantized,
    ),
    Rule(
        "K411",
        "kv-scale-half",
        "error",
        "k_scale exists without v_scale or the reverse, or one is not a single float32.",
        fix="Export the target again, or remove both. Engines then use 1.0.",
        engines=ENGINES,
        check=kv_scale_half,
    ),
    Rule(
        "K412",
        "mtp-quantized",
        "error",
        "An MTP layer has NVFP4 modules. SGLang reads the MTP of a ModelOpt NVFP4 target as unquantized.",
        fix="Quantize the target again with a recipe that does not name the MTP layer.",
        engines=concerned("K412"),
        seen_in="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/deepseek_nextn.py#L75-L79",
        check=mtp_quantized,
    ),
    Rule(
        "K413",
        "fp8-part",
        "error",
        "An FP8 module beside NVFP4 lacks its weight_scale, or that is not one float32 for each block of 128 by 128.",
        fix=AGAIN,
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L2221-L2255",
        check=fp8_part,
    ),
    Rule(
        "K414",
        "fp8-blocks-unread",
        "error",
        "Modules are FP8 in ModelOpt's blocks. SGLang wants their scales in two dims, as weight_scale_inv: it drops"
        " ModelOpt's weight_scale with a line in its log, or stops at its four dims. It reads Kimi-K3's alone.",
        fix="For SGLang, quantize again with a recipe without fp8. For vLLM alone, validate with --for vllm.",
        engines=concerned("K414"),
        seen_in="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/deepseek_common/deepseek_weight_loader.py#L89-L97",
        check=fp8_blocks_unread,
    ),
    Rule(
        "K440",
        "fused-scale-unequal",
        "error",
        "Modules that engines fuse have different weight_scale_2. Only the largest is kept and block scales"
        " are not adjusted, so the other weights are wrong.",
        fix="Quantize the target again. kconv quantize gives q/k/v, q_a/kv_a and gate/up one scale.",
        seen_in=FUSED,
        values=True,
        check=lambda s: _unequal(s, s.format.scale_2),
    ),
    Rule(
        "K441",
        "fused-input-scale-unequal",
        "error",
        "Modules that engines fuse have different input_scale. They read the same input. TensorRT-LLM stops.",
        fix="Calibrate again, with one amax for modules that read the same input.",
        engines=concerned("K441"),
        values=True,
        check=lambda s: _unequal(s, s.format.inputs),
    ),
    Rule(
        "K442",
        "scale-value",
        "error",
        "A module's scale is NaN, zero, negative, or too small or too large for float32 arithmetic.",
        fix=AGAIN,
        values=True,
        check=scale_value,
    ),
    Rule(
        "K443",
        "block-scale-value",
        "error",
        "Block scales are NaN, negative, or all zero.",
        fix=AGAIN,
        values=True,
        check=block_scale_value,
    ),
    Rule(
        "K444",
        "input-scale-beyond-norm",
        "error",
        "An input_scale implies a larger input than the norm before it can produce. It belongs to"
        " another target, or was changed. 1.0, from data-free recipes, is ignored.",
        fix="Calibrate this target again, and quantize it with the result.",
        values=True,
        check=input_scale_beyond_norm,
    ),
)
