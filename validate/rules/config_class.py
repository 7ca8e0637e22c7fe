"""What an engine's config class asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...head.spec import Mla
from .head import HeadSubject
from .identity import is_speculators
from .rule import ENGINES, Found, readers, rule

# torch's own names of the dtypes that a head is computed in, by which transformers looks them up.
DTYPES = frozenset("bfloat16 float16 half float32 float float64 double".split())
# Heads of an MLA config that states none, as its class has them; the engines say which keys they read:
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/deepseek_v3/configuration_deepseek_v3.py#L87-L88
DEFAULT_HEADS = 128
HEAD_KEYS: Mapping[str, tuple[str, ...]] = readers(lambda engine: engine.head_counts)


@rule(
    "K020",
    "model-type-unstated",
    "error",
    "The config states no model_type, by which transformers chooses the class that reads it: no engine opens the head.",
    fix="Set model_type to llama, or to kimi_k2 for an MLA head; kconv's conversions write it.",
    engines=ENGINES,
    seen_in="https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/auto/"
    "configuration_auto.py#L442-L445",
)
def model_type_unstated(subject: HeadSubject) -> Iterator[Found]:
    # vLLM knows speculators' format by another key, and the other engines do not read it.
    stated = subject.config.get("model_type")
    if not is_speculators(subject) and not isinstance(stated, str):
        yield Found("config.json: model_type", "the key is absent or null" if stated is None else f"{stated!r}")


@rule(
    "K021",
    "heads-by-default",
    "error",
    "An MLA head's config states its heads under one of two names, and an engine that reads the other takes the 128 of"
    " DeepSeek-V3.",
    fix="State num_attention_heads and num_key_value_heads, as many each; kconv's conversions write both.",
    engines=ENGINES,
    seen_in="https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/deepseek_v3/"
    "configuration_deepseek_v3.py#L87-L88",
)
def heads_by_default(subject: HeadSubject) -> Iterator[Found]:
    attention = subject.spec.attention if subject.spec else None
    if not isinstance(attention, Mla) or attention.heads == DEFAULT_HEADS:
        return
    for key, read_by in HEAD_KEYS.items():
        engines = sorted(subject.engines.intersection(read_by))
        if engines and subject.flat.get(key) is None:
            taken = f"{', '.join(engines)} would take {DEFAULT_HEADS}, and the head has {attention.heads}"
            yield Found(f"config.json: {key}", f"the key is absent or null: {taken}")


@rule(
    "K022",
    "dtype-unknown",
    "error",
    "The stated dtype is none that torch has under this name, or none that a head is computed in: the config is"
    " refused, or the weights are cast to what they are not.",
    fix="Set torch_dtype (and dtype) to the weights' own, e.g. bfloat16.",
    engines=ENGINES,
    seen_in="https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/configuration_utils.py#L317-L325",
)
def dtype_unknown(subject: HeadSubject) -> Iterator[Found]:
    for key in ("torch_dtype", "dtype"):
        stated = subject.flat.get(key)
        if stated is not None and (not isinstance(stated, str) or stated not in DTYPES):
            yield Found(f"config.json: {key}", f"{stated!r} is none of {', '.join(sorted(DTYPES))}")


RULES = (model_type_unstated, heads_by_default, dtype_unknown)
