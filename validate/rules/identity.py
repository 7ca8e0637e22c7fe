"""What a head calls itself, and what a launch flag must supply beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...engines import sglang, trtllm, vllm
from ...head.spec import Gqa, Mla
from .head import HeadSubject
from .rule import ENGINES, SGLANG, TRTLLM, VLLM, Found, Rule


def first_architecture(subject: HeadSubject) -> str | None:
    """Return the class that a head names first, which is the one that engines look up."""
    names = subject.config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _other_class(subject: HeadSubject, known: Mapping[type, frozenset[str]]) -> Iterator[Found]:
    name, classes = first_architecture(subject), known[Mla if subject.is_mla else Gqa]
    if name is not None and subject.layout is not None and name not in classes:
        kind = "an MLA" if subject.is_mla else "a GQA"
        yield Found("config.json: architectures", f"{name} has no class for {kind} head; {', '.join(sorted(classes))}")


def experts_null(subject: HeadSubject) -> Iterator[Found]:
    for key in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"):
        if subject.is_mla and key in subject.config and subject.config[key] is None:
            yield Found(f"config.json: {key}", "null")


def is_speculators(subject: HeadSubject) -> bool:
    """Say whether a head is in speculators' format."""
    return subject.layout is not None and subject.layout.name == "speculators"


def latent_size(subject: HeadSubject) -> Iterator[Found]:
    attention = subject.spec.attention if subject.spec else None
    if isinstance(attention, Mla):
        size = attention.kv_lora_rank + attention.qk_rope_head_dim
        if size not in (320, 512, 576):
            yield Found("config.json: kv_lora_rank", f"kv_lora_rank + qk_rope_head_dim is {size}; 576 is Kimi's")


RULES: tuple[Rule[HeadSubject], ...] = (
    Rule(
        "K183",
        "model-type-rewritten",
        "error",
        "vLLM rewrites this model_type to DeepSeek's MTP draft, for which no Eagle3 class exists: the head never"
        " loads.",
        fix="Set model_type to kimi_k2, as ModelOpt and kconv do.",
        engines=VLLM,
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L679",
        check=lambda s: (
            [Found("config.json: model_type", f"{s.config['model_type']!r}")]
            if s.config.get("model_type") in vllm.ENGINE.rewritten
            else ()
        ),
    ),
    Rule(
        "K184",
        "not-seen-as-mla",
        "note",
        "vLLM does not count kimi_k2 among the drafts with latent attention (use_mla); the layer has it all the same,"
        " and only context-parallel prefill asks.",
        fix="Nothing to do, or set model_type to deepseek_v2 for vLLM alone.",
        engines=VLLM,
        seen_in="https://github.com/vllm-project/vllm/issues/45760",
        check=lambda s: (
            [Found("config.json: model_type", "kimi_k2")]
            if s.is_mla and s.config.get("model_type") == "kimi_k2"
            else ()
        ),
    ),
    Rule(
        "K185",
        "architecture-unnamed",
        "error",
        "The config names no architecture, by which every engine chooses its class.",
        fix='Write ["LlamaForCausalLMEagle3"], or ["Eagle3DeepseekV2ForCausalLM"] for an MLA head.',
        engines=ENGINES,
        check=lambda s: (
            [Found("config.json: architectures", f"{s.config.get('architectures')!r}")]
            if first_architecture(s) is None
            else ()
        ),
    ),
    Rule(
        "K186",
        "architecture-unknown-to-vllm",
        "error",
        "vLLM has no Eagle3 class of this name with the head's attention.",
        fix="Convert the head (kconv to-vllm), which names the class.",
        engines=VLLM,
        seen_in="https://github.com/sgl-project/SpecForge/pull/640",
        # In speculators' format the class follows from the inner config's model_type.
        check=lambda s: _other_class(s, vllm.ENGINE.architectures) if not is_speculators(s) else (),
    ),
    Rule(
        "K187",
        "architecture-unknown-to-sglang",
        "error",
        "SGLang knows one name for each kind of head; LlamaForCausalLM it loads as a plain Llama, and"
        " DeepseekV3ForCausalLM it rewrites to NextN.",
        fix="Convert the head (kconv to-sglang), which names the class.",
        engines=(SGLANG,),
        seen_in="https://github.com/sgl-project/sglang/pull/33966",
        check=lambda s: _other_class(s, sglang.ENGINE.architectures),
    ),
    Rule(
        "K188",
        "latent-by-class",
        "error",
        "TensorRT-LLM takes a head for MLA where the config has a kv_lora_rank, which this model_type's class has by"
        " default; the head's attention is not latent.",
        fix="Set model_type to llama.",
        engines=(TRTLLM,),
        seen_in="https://github.com/NVIDIA/TensorRT-LLM/pull/9677",
        check=lambda s: (
            [Found("config.json: model_type", f"{s.config['model_type']!r}, of a head without kv_b_proj")]
            if not s.is_mla and s.config.get("model_type") in trtllm.ENGINE.latent_by_default
            else ()
        ),
    ),
    Rule(
        "K189",
        "q-lora-absent",
        "error",
        "An MLA head without q_lora_rank: vLLM finds no parameter, SGLang refuses it, TensorRT-LLM builds another"
        " shape.",
        fix="Train a head with a q_lora_rank; no engine serves one without.",
        engines=ENGINES,
        seen_in="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/kimi_k25_eagle3.py",
    ),
    Rule(
        "K190",
        "experts-null",
        "error",
        "vLLM parses an MLA head's config as DeepSeek's, whose counts of experts must be whole numbers: null is"
        " refused.",
        fix="Remove the key: the head's MLP is dense.",
        engines=VLLM,
        seen_in="https://github.com/vllm-project/vllm/pull/36361",
        check=experts_null,
    ),
    Rule(
        "K191",
        "speculators-mla",
        "error",
        "vLLM reads a speculators config for llama and qwen3 only: an MLA head in it never loads.",
        fix="Convert the head (kconv to-vllm).",
        engines=VLLM,
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/configs/speculators/algos.py",
        check=lambda s: (
            [Found("config.json: transformer_layer_config", "an MLA head in speculators' format")]
            if is_speculators(s) and s.is_mla
            else ()
        ),
    ),
    Rule(
        "K192",
        "speculators-not-read",
        "error",
        "SGLang and TensorRT-LLM have no reader of speculators' format.",
        fix="Convert the head (kconv to-sglang, to-trtllm or to-portable).",
        engines=(SGLANG, TRTLLM),
        seen_in="https://github.com/vllm-project/speculators/issues/610",
        check=lambda s: (
            [Found("config.json: speculators_model_type", "the head is in speculators' format")]
            if is_speculators(s)
            else ()
        ),
    ),
    Rule(
        "K193",
        "latent-size",
        "note",
        "The latent cache is of a size for which few attention backends have a kernel.",
        fix="In vLLM choose TRITON_MLA for the draft (speculative_config.attention_backend); its CPU build has 576"
        " alone.",
        engines=VLLM,
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/attention/mla_attention.py#L1601",
        check=latent_size,
    ),
    Rule(
        "K194",
        "backend-of-its-own",
        "note",
        "The head's attention is not the latent one of a Kimi target, whose attention backend it would inherit.",
        fix="In SGLang add --speculative-draft-attention-backend, e.g. fa3; in vLLM set attention_backend, and the"
        " dtype of the draft's own KV cache, in speculative_config where the target's does not fit.",
        engines=(SGLANG, *VLLM),
        seen_in="https://github.com/sgl-project/sglang/issues/23490",
        check=lambda s: (
            [Found("config.json", f"{s.spec.kind.upper()}, of {s.spec.attention.kv_heads} key-value heads")]
            if s.spec and isinstance(s.spec.attention, Gqa)
            else ()
        ),
    ),
    Rule(
        "K195",
        "method-by-flag",
        "note",
        "vLLM takes a head for a plain draft model unless it is told, or reads eagle3 in its path.",
        fix='Serve with "method": "eagle3" in --speculative-config.',
        engines=VLLM,
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L1327-L1337",
        check=lambda s: (
            [Found("config.json", "no key of a config says that a head is one of Eagle3's")]
            if not is_speculators(s)
            else ()
        ),
    ),
    Rule(
        "K196",
        "one-model",
        "note",
        "TensorRT-LLM serves MLA heads as part of the target (eagle3_one_model, its default); NVIDIA's own deployment"
        " test serves its Kimi heads beside it.",
        fix="Leave the flag out; try eagle3_one_model: false if your release does not load the head.",
        engines=(TRTLLM,),
        seen_in="https://github.com/NVIDIA/TensorRT-LLM/pull/9677",
        check=lambda s: (
            [Found("config.json: architectures", f"{first_architecture(s)}, an MLA head")] if s.is_mla else ()
        ),
    ),
)
