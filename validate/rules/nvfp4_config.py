"""What a target's config says of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...quantize.formats import GROUP_SIZE
from .rule import TRTLLM, Found, rule
from .target import BLOCK, LAYER, SIDE_FILE, WEIGHT_ONLY, TargetSubject, bare, entries_of

ALGORITHMS = ("NVFP4", WEIGHT_ONLY)
MODELOPT = "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py"


@rule(
    "K420",
    "nvfp4-unstated",
    "error",
    "Weights are NVFP4, and neither config.json nor hf_quant_config.json says so: engines take packed bytes for"
    " weights.",
    fix="Write quantization_config and hf_quant_config.json; kconv quantize writes both.",
)
def nvfp4_unstated(subject: TargetSubject) -> Iterator[Found]:
    if subject.packed and not subject.block and not subject.side:
        yield Found("config.json", f"{len(subject.packed):,} modules are NVFP4")


@rule(
    "K421",
    "nvfp4-stale",
    "error",
    "The config says NVFP4, and no tensor is packed: engines look for scales that are not there.",
    fix="Remove quantization_config and hf_quant_config.json; they are of another export.",
)
def nvfp4_stale(subject: TargetSubject) -> Iterator[Found]:
    if subject.is_nvfp4 and not subject.packed:
        yield Found(f"config.json: {BLOCK}", f"says {subject.block.get('quant_algo')}")


@rule(
    "K422",
    "stale-text-block",
    "error",
    "A quantization_config of the format before is left in text_config: engines that look there first read NVFP4 as"
    " INT4 or FP8.",
    fix="Remove quantization_config from text_config; it belongs at the root.",
)
def stale_text_block(subject: TargetSubject) -> Iterator[Found]:
    block = subject.text_block
    if subject.packed and block and dict(block) != dict(subject.root_block):
        named = block.get("quant_method") or block.get("quant_algo")
        yield Found(f"config.json: text_config.{BLOCK}", f"says {named!r}, and the weights are NVFP4")


@rule(
    "K423",
    "algorithm-unknown",
    "error",
    "The weights are NVFP4, and the config says another method, another algorithm or another group size.",
    fix='Write quant_method "modelopt", quant_algo "NVFP4" or "W4A16_NVFP4", and groups of 16.',
    seen_in=f"{MODELOPT}#L793-L824",
)
def algorithm_unknown(subject: TargetSubject) -> Iterator[Found]:
    if not subject.packed:
        return
    for where, block in (("config.json", subject.root_block), (SIDE_FILE, subject.side)):
        if not block:
            continue
        algorithm, method = block.get("quant_algo"), block.get("quant_method", "modelopt")
        if algorithm not in ALGORITHMS:
            yield Found(f"{where}: quant_algo", f"is {algorithm!r}")
        if where == "config.json" and not str(method).startswith(("modelopt", "nvfp4")):
            yield Found(f"{where}: quant_method", f"is {method!r}")
        for size in _sizes(block):
            if size != GROUP_SIZE:
                yield Found(f"{where}: group_size", f"is {size!r}, and NVFP4's groups are of {GROUP_SIZE}")


@rule(
    "K424",
    "side-file-differs",
    "error",
    "hf_quant_config.json and config.json's quantization_config differ: TensorRT-LLM goes by the one, vLLM by the"
    " other.",
    fix="Write both from one recipe; kconv quantize does.",
)
def side_file_differs(subject: TargetSubject) -> Iterator[Found]:
    one, other = subject.root_block, subject.side
    if not one or not other:
        return
    if one.get("quant_algo") != other.get("quant_algo"):
        yield Found(
            f"{SIDE_FILE}: quant_algo", f"{other.get('quant_algo')!r}, and config.json {one.get('quant_algo')!r}"
        )
    mine, its = ({bare(entry) for entry in entries_of(block)} for block in (one, other))
    if mine != its:
        entry = sorted(mine ^ its)[0]
        yield Found(f"{SIDE_FILE}: exclude_modules", f"{len(mine ^ its)} entries stand in one only, e.g. {entry!r}")
    if _kv(one) != _kv(other):
        yield Found(f"{SIDE_FILE}: kv_cache_quant_algo", f"{_kv(other)}, and config.json's scheme is {_kv(one)}")


@rule(
    "K425",
    "side-file-missing",
    "info",
    "There is no hf_quant_config.json; older TensorRT-LLM reads no other block.",
    fix="Write hf_quant_config.json too; kconv quantize does.",
    engines=(TRTLLM,),
)
def side_file_missing(subject: TargetSubject) -> Iterator[Found]:
    if subject.packed and subject.block and not subject.side and not subject.checkpoint.headers_only:
        yield Found(SIDE_FILE, "is not there")


@rule(
    "K426",
    "kv-scheme-unknown",
    "error",
    "The KV cache's scheme is none that engines know for NVFP4 targets: FP8, or nothing.",
    fix='Write kv_cache_scheme {"dynamic": false, "num_bits": 8, "type": "float"}, or leave it out.',
)
def kv_scheme_unknown(subject: TargetSubject) -> Iterator[Found]:
    for where, block in ((f"config.json: {BLOCK}", subject.root_block), (SIDE_FILE, subject.side)):
        if subject.packed and _kv(block) not in ("FP8", "none"):
            yield Found(where, f"the KV cache's scheme is {_kv(block)}")


@rule(
    "K427",
    "kv-scales-unstated",
    "warning",
    "The target has scales for its KV cache, and its config states no quantized one: engines leave them out.",
    fix='State it (kv_cache_scheme, kv_cache_quant_algo "FP8"), or drop k_scale and v_scale.',
)
def kv_scales_unstated(subject: TargetSubject) -> Iterator[Found]:
    if subject.packed and _kv(subject.block) == "none":
        names = [name for name in subject.tensors if name.endswith((".k_scale", ".v_scale"))]
        if names:
            yield Found(names[0], f"one of {len(names)} scales of the KV cache")


@rule(
    "K428",
    "layers-miscounted",
    "error",
    "The config counts other decoder layers than are stored. One that is counted and absent is served as memory was"
    " when it was allocated: of a quantized model vLLM does not look which weights came.",
    fix="State as many as the weights have (num_hidden_layers), or fetch the missing ones.",
    seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/model_loader/default_loader.py#L505-L509",
)
def layers_miscounted(subject: TargetSubject) -> Iterator[Found]:
    counted, extra = (subject.text.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    layers = (LAYER.match(bare(name)) for name in subject.tensors)
    stored = {int(layer[1]) for layer in layers if layer}
    if not isinstance(counted, int):
        yield Found("config.json: num_hidden_layers", f"is {counted!r}, and {len(stored)} layers are stored")
        return
    absent = next((layer for layer in range(counted) if layer not in stored), None)
    if absent is not None:
        yield Found("config.json: num_hidden_layers", f"is {counted}, and layer {absent} is not stored")
    # Layers that draft the next tokens stand behind the last one, or are left out.
    uncounted = [layer for layer in stored if layer >= counted + (extra if isinstance(extra, int) else 0)]
    if uncounted:
        yield Found("config.json: num_hidden_layers", f"is {counted}, and layer {min(uncounted)} is stored")


def _kv(block: Mapping[str, Any]) -> str:
    """Return what a block says of the KV cache in one word, whichever of its two shapes it has."""
    scheme, algorithm = block.get("kv_cache_scheme"), block.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        bits, kind = scheme.get("num_bits"), scheme.get("type")
        return "FP8" if (bits, kind) == (8, "float") else f"{bits} bits of {kind}"
    return str(scheme or algorithm or "none")


def _sizes(block: Mapping[str, Any]) -> Iterator[object]:
    if "group_size" in block:
        yield block["group_size"]
    groups = block.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        for part in ("weights", "input_activations"):
            numbers = group.get(part) if isinstance(group, Mapping) else None
            if isinstance(numbers, Mapping) and "group_size" in numbers:
                yield numbers["group_size"]


RULES = (
    nvfp4_unstated,
    nvfp4_stale,
    stale_text_block,
    algorithm_unknown,
    side_file_differs,
    side_file_missing,
    kv_scheme_unknown,
    kv_scales_unstated,
    layers_miscounted,
)
