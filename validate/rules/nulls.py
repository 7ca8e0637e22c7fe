"""Keys that are null."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from .head import HeadSubject
from .identity import is_speculators
from .rule import ENGINES, SGLANG, TRTLLM, VLLM, VLLM_V1, Found, rule


def _always(_: HeadSubject) -> bool:
    return True


def _is_mla(subject: HeadSubject) -> bool:
    return subject.is_mla


def _is_gqa(subject: HeadSubject) -> bool:
    return not subject.is_mla


def _is_deep(subject: HeadSubject) -> bool:
    return subject.spec is not None and subject.spec.layers > 1


def _is_normed_before_fc(subject: HeadSubject) -> bool:
    return subject.stated("norm_before_fc") is True


class Null(NamedTuple):
    """A key that may be absent and may not be null.

    Attributes:
        path: dotted path in config.json.
        engines: who asks whether the key is there, or what it holds, and does not expect null.
        becomes: what follows.
        of: the heads that it concerns.
    """

    path: str
    engines: tuple[str, ...]
    becomes: str
    of: Callable[[HeadSubject], bool] = _always


# Both read a head's config as transformers' Llama or DeepSeek-V3, whose fields are checked for their types:
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/llama/configuration_llama.py#L71-L83
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/deepseek_v3/configuration_deepseek_v3.py#L92-L115
TYPED = (*VLLM, SGLANG)
REFUSED = "the config is refused"
NULLS = (
    Null("attention_bias", TYPED, REFUSED),
    Null("initializer_range", TYPED, REFUSED),
    Null("max_position_embeddings", TYPED, REFUSED),
    Null("mlp_bias", TYPED, REFUSED, _is_gqa),
    Null("routed_scaling_factor", TYPED, REFUSED, _is_mla),
    Null("tie_word_embeddings", TYPED, REFUSED),
    Null("use_cache", TYPED, REFUSED),
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama_eagle3.py#L218-L221
    # and lines 707 to 710 of the file of TensorRT-LLM's that `convert.layouts.limits.TRTLLM_MODEL` links to.
    Null("target_hidden_size", (*VLLM, TRTLLM), "fc's width is a multiple of it"),
    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama_eagle3.py#L151
    Null("target_hidden_size", (SGLANG,), "fc's width is a multiple of it", _is_gqa),
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/logits_processor.py#L213
    Null("logit_scale", VLLM, "logits are scaled by it"),
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1138
    Null("index_topk", VLLM, "the attention is taken for DeepSeek-V3.2's sparse one", _is_mla),
    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/deepseek_v2.py#L2166
    Null("rope_interleave", (SGLANG,), "the rotary dims are taken for half-split", _is_mla),
    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama.py#L199-L200
    Null("partial_rotary_factor", (SGLANG,), "the dims that RoPE turns are a multiple of it", _is_gqa),
    # Lines 695 to 704, and 596 to 598, of the same file.
    Null("eagle_config", (TRTLLM,), "keys are looked for in it"),
    Null("eagle_config.next_layer_regular", (TRTLLM,), "later layers are built as wide as layer 0", _is_deep),
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama_eagle3.py#L180-L181
    Null("eagle_config.use_aux_hidden_state", VLLM, "fc is left out", _is_gqa),
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/spec_decode/llm_base_proposer.py#L1683-L1685
    Null("eagle_config.use_aux_hidden_state", (VLLM_V1,), "no layers are captured", _is_mla),
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama_eagle3.py#L184-L188
    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama_eagle3.py#L173-L175
    Null("eagle_config.norm_before_fc", (*VLLM, SGLANG), "the norm before fc is left out", _is_normed_before_fc),
)


@rule(
    "K019",
    "key-null",
    "error",
    "A key is null, which an engine does not take for absent: it fails, or runs another computation.",
    fix="Remove the key, or state what the head was trained with; kconv's conversions write none of these as null.",
    engines=ENGINES,
    seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1138",
)
def key_null(subject: HeadSubject) -> Iterator[Found]:
    # vLLM builds a config of its own from speculators' format, and the other engines do not read it.
    if subject.layout is None or is_speculators(subject):
        return
    for null in NULLS:
        engines = sorted(subject.engines.intersection(null.engines))
        if engines and subject.stated(null.path) is None and null.of(subject):
            yield Found(f"config.json: {null.path}", f"null, and {null.becomes} ({', '.join(engines)})")


RULES = (key_null,)
