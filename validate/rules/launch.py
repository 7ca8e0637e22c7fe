"""What a launch flag must supply, or a server's log should be read for."""

from __future__ import annotations

from collections.abc import Iterator

from ...head.spec import Gqa, Mla
from .head import HeadSubject
from .identity import first_architecture, is_speculators
from .rule import SGLANG, TRTLLM, VLLM, Found, rule


@rule(
    "K193",
    "latent-size",
    "info",
    "The latent cache is of a size for which few attention backends have a kernel.",
    fix="In vLLM choose TRITON_MLA for the draft (speculative_config.attention_backend); its CPU build has 576 alone.",
    engines=VLLM,
    seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/attention/mla_attention.py#L1601",
)
def latent_size(subject: HeadSubject) -> Iterator[Found]:
    attention = subject.spec.attention if subject.spec else None
    if isinstance(attention, Mla):
        size = attention.kv_lora_rank + attention.qk_rope_head_dim
        if size not in (320, 512, 576):
            yield Found("config.json: kv_lora_rank", f"kv_lora_rank + qk_rope_head_dim is {size}; 576 is Kimi's")


@rule(
    "K194",
    "backend-of-its-own",
    "info",
    "The head's attention is not the latent one of a Kimi target, whose attention backend it would inherit.",
    fix="In SGLang add --speculative-draft-attention-backend, e.g. fa3; in vLLM set attention_backend, and the dtype of"
    " the draft's own KV cache, in speculative_config where the target's does not fit.",
    engines=(SGLANG, *VLLM),
    seen_in="https://github.com/sgl-project/sglang/issues/23490",
)
def backend_of_its_own(subject: HeadSubject) -> Iterator[Found]:
    if subject.spec and isinstance(subject.spec.attention, Gqa):
        yield Found("config.json", f"{subject.spec.kind.upper()}, of {subject.spec.attention.kv_heads} key-value heads")


@rule(
    "K195",
    "method-by-flag",
    "info",
    "vLLM takes a head for a plain draft model unless it is told, or reads eagle3 in its path.",
    fix='Serve with "method": "eagle3" in --speculative-config.',
    engines=VLLM,
    seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L1327-L1337",
)
def method_by_flag(subject: HeadSubject) -> Iterator[Found]:
    if not is_speculators(subject):
        yield Found("config.json", "no key of a config says that a head is one of Eagle3's")


@rule(
    "K196",
    "one-model",
    "info",
    "TensorRT-LLM serves MLA heads as part of the target (eagle3_one_model, its default); NVIDIA's own deployment test"
    " serves its Kimi heads beside it.",
    fix="Leave the flag out; try eagle3_one_model: false if your release does not load the head.",
    engines=(TRTLLM,),
    seen_in="https://github.com/NVIDIA/TensorRT-LLM/pull/9677",
)
def one_model(subject: HeadSubject) -> Iterator[Found]:
    if subject.is_mla:
        yield Found("config.json: architectures", f"{first_architecture(subject)}, an MLA head")


RULES = (latent_size, backend_of_its_own, method_by_flag, one_model)
