"""Quantized heads."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from ...checkpoint.folder import read_json
from ...checkpoint.formats import CONFIG_KEY, HEAD_SCALES, SIDE_FILE
from ...convert.quantized import UNQUANTIZED, has_scales
from ...drafters.contract import FLOATS
from ...drafters.spec import Gqa
from ...errors import KconvError
from ...rule import Found, Rule
from .head import HeadSubject
from .subject import concerned
from .target import entries_of

NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def dtype_not_stated_one(subject: HeadSubject) -> Iterator[Found]:
    for key in ("torch_dtype", "dtype"):
        stated = NAMES.get(str(subject.flat.get(key)).removeprefix("torch."))
        if subject.spec and stated and stated != subject.spec.dtype:
            yield Found(f"config.json: {key}", f"is {subject.flat[key]}, but most weights are {subject.spec.dtype}")


def dtypes_mixed(subject: HeadSubject) -> Iterator[Found]:
    dtypes = sorted({info.dtype for info in subject.tensors.values() if info.dtype in FLOATS})
    if len(dtypes) > 1 and not has_scales(subject.tensors):
        yield Found("config.json", ", ".join(dtypes))


def kv_cache_inherited(subject: HeadSubject) -> Iterator[Found]:
    stated = (subject.target.quantization or {}) if subject.target else {}
    scheme = stated.get("kv_cache_scheme") or stated.get("kv_cache_quant_algo")
    if scheme and subject.spec and isinstance(subject.spec.attention, Gqa):
        yield Found("config.json", f"the target's KV cache is {scheme!r}, but the head is {subject.spec.kind.upper()}")


def quantized_but_excluded(subject: HeadSubject) -> Iterator[Found]:
    scaled = dict.fromkeys(
        name.rpartition(".")[0] for name in subject.tensors if name.rpartition(".")[2] in HEAD_SCALES
    )
    for where, entries in _excludes(subject).items():
        for entry in entries:
            covered = [module for module in scaled if _covers(entry, module)]
            if covered:
                yield Found(where, f"{entry!r} covers {len(covered)} quantized linear layers, among them {covered[0]}")


def _excludes(subject: HeadSubject) -> dict[str, tuple[str, ...]]:
    """Return the entries that exclude modules, by their place."""
    stated = subject.config.get(CONFIG_KEY)
    found = {f"config.json: {CONFIG_KEY}": entries_of(stated) if isinstance(stated, dict) else ()}
    side = subject.checkpoint.folder / SIDE_FILE
    try:
        inner = read_json(side).get("quantization") if not subject.checkpoint.headers_only and side.is_file() else None
    except KconvError:
        inner = None
    return found | {SIDE_FILE: entries_of(inner) if isinstance(inner, dict) else ()}


def _covers(entry: str, module: str) -> bool:
    """Return whether an entry covers a module, as a part of its name or as a wildcard; engines prefix `model.`."""
    names = (module, f"model.{module}")
    return any(entry.removesuffix("*") in name or fnmatchcase(name, entry) for name in names)


RULES: tuple[Rule[HeadSubject], ...] = (
    Rule(
        "K197",
        "quantization-unstated",
        "error",
        "Weights have scales, but no config says how to read them. Engines read packed bytes as weights.",
        fix="Export the head again, with quantization_config or hf_quant_config.json.",
        seen_in="https://github.com/vllm-project/vllm/issues/45102",
    ),
    Rule(
        "K198",
        "quantization-stale",
        "error",
        "The config says that the head is quantized, but no tensor has scales. Engines look for scales that"
        " do not exist.",
        fix="Remove quantization_config. It belongs to the target or to another export.",
        seen_in="https://github.com/vllm-project/vllm/issues/45102",
    ),
    Rule(
        "K199",
        "scale-missing",
        "error",
        "A quantized weight lacks a scale.",
        fix="Export the head again.",
    ),
    Rule(
        "K200",
        "quantized-otherwise",
        "error",
        "kconv does not know a weight's quantized format, or the weight was fused before quantizing.",
        fix=UNQUANTIZED,
    ),
    Rule(
        "K208",
        "dtype-not-stated-one",
        "warning",
        "The config states a different dtype than most weights have. TensorRT-LLM casts to the stated one;"
        " from bfloat16 to float16, large values become Inf.",
        fix="Set torch_dtype (and dtype) to the dtype of the weights.",
        check=dtype_not_stated_one,
    ),
    Rule(
        "K209",
        "dtypes-mixed",
        "note",
        "Weights have several float dtypes. Engines cast each to the target's.",
        fix="No action is needed. --dtype casts all weights when you convert.",
        check=dtypes_mixed,
    ),
    Rule(
        "K211",
        "kv-cache-inherited",
        "note",
        "The target's KV cache is quantized, and the draft inherits that. A GQA head's attention backend may"
        " not support it.",
        fix="In vLLM, set kv_cache_dtype in speculative_config. In TensorRT-LLM, check the log for the draft.",
        engines=concerned("K211"),
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py",
        check=kv_cache_inherited,
    ),
    Rule(
        "K212",
        "quantized-but-excluded",
        "error",
        "A linear has scales, but an exclude list covers it. Engines build it unquantized and read packed"
        " bytes as weights.",
        fix="Keep only unquantized modules, such as lm_head, in ignore (or exclude_modules).",
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L187-L222",
        check=quantized_but_excluded,
    ),
)
