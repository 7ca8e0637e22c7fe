"""A head's class and model type, and what a launch flag must supply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...drafters.spec import Gqa, Mla
from ...engines import sglang, trtllm, vllm
from .head import HeadSubject
from .rule import ENGINES, SGLANG, TRTLLM, VLLM, Found, Rule


def first_architecture(subject: HeadSubject) -> str | None:
    """Return the class that a head names first, the one that engines look up."""
    names = subject.config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _other_class(subject: HeadSubject, known: Mapping[type, frozenset[str]]) -> Iterator[Found]:
    name, classes = first_architecture(subject), known[Mla if subject.is_mla else Gqa]
    if name is not None and subject.layout is not None and name not in classes:
        kind = "an MLA" if subject.is_mla else "a GQA"
        yield Found(
            "config.json: architectures",
            f"{name} is not a class for {kind} head; known are {', '.join(sorted(classes))}",
        )


def experts_null(subject: HeadSubject) -> Iterator[Found]:
    for key in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"):
        if subject.is_mla and key in subject.config and subject.config[key] is None:
            yield Found(f"config.json: {key}", "null")


def is_speculators(subject: HeadSubject) -> bool:
    """Return whether a head is in speculators' format."""
    return subject.layout is not None and subject.layout.name == "speculators"


def latent_size(subject: HeadSubject) -> Iterator[Found]:
    attention = subject.spec.attention if subject.spec else None
    if isinstance(attention, Mla):
        size = attention.kv_lora_rank + attention.qk_rope_head_dim
        if size not in (320, 512, 576):
            yield Found("config.json: kv_lora_rank", f"kv_lora_rank + qk_rope_head_dim is {size}; Kimi's is 576")


RULES: tuple[Rule[HeadSubject], ...] = (
    Rule(
        "K183",
        "model-type-rewritten",
        "error",
        "vLLM rewrites this model_type to DeepSeek's MTP draft, which has no Eagle3 class. The head never loads.",
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
        "vLLM's use_mla does not list kimi_k2. The head's layer uses MLA all the same; only context-parallel"
        " prefill checks this.",
        fix="No action is needed. To change it for vLLM alone, set model_type to deepseek_v2.",
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
        "The config names no architecture. Every engine needs it to choose a class.",
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
        "vLLM has no Eagle3 class of this name for the head's attention.",
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
        "SGLang does not know this class name for this kind of head. It loads LlamaForCausalLM as a plain Llama, and"
        " rewrites DeepseekV3ForCausalLM to NextN.",
        fix="Convert the head (kconv to-sglang), which names the class.",
        engines=(SGLANG,),
        seen_in="https://github.com/sgl-project/sglang/pull/33966",
        check=lambda s: _other_class(s, sglang.ENGINE.architectures),
    ),
    Rule(
        "K188",
        "latent-by-class",
        "error",
        "TensorRT-LLM builds MLA for this model_type, but the head's attention is not MLA. The model_type's config "
        "class has a default kv_lora_rank.",
        fix="Set model_type to llama.",
        engines=(TRTLLM,),
        seen_in="https://github.com/NVIDIA/TensorRT-LLM/pull/9677",
        check=lambda s: (
            [Found("config.json: model_type", f"{s.config['model_type']!r}, but the head has no kv_b_proj")]
            if not s.is_mla and s.config.get("model_type") in trtllm.ENGINE.latent_by_default
            else ()
        ),
    ),
    Rule(
        "K189",
        "q-lora-absent",
        "error",
        "An MLA head has no q_lora_rank. vLLM finds no parameter, SGLang refuses it, and TensorRT-LLM builds"
        " another shape.",
        fix="Train a head with a q_lora_rank; no engine serves one without.",
        engines=ENGINES,
        seen_in="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/kimi_k25_eagle3.py",
    ),
    Rule(
        "K190",
        "experts-null",
        "error",
        "An expert count is null, which vLLM refuses. It parses an MLA head's config as DeepSeek's, where expert "
        "counts must be whole numbers.",
        fix="Remove the key. The head's MLP is dense.",
        engines=VLLM,
        seen_in="https://github.com/vllm-project/vllm/pull/36361",
        check=experts_null,
    ),
    Rule(
        "K191",
        "speculators-mla",
        "error",
        "vLLM reads a speculators config only for llama and qwen3. An MLA head in this format never loads.",
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
        "SGLang and TensorRT-LLM cannot read speculators' format.",
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
        "Few attention backends support a latent cache of this size.",
        fix="In vLLM, choose TRITON_MLA for the draft (speculative_config.attention_backend). vLLM's CPU build"
        " supports only 576.",
        engines=VLLM,
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/attention/mla_attention.py#L1601",
        check=latent_size,
    ),
    Rule(
        "K194",
        "backend-of-its-own",
        "note",
        "The head is not MLA, but would inherit its MLA target's attention backend.",
        fix="In SGLang, add --speculative-draft-attention-backend, e.g. fa3. In vLLM, set attention_backend and"
        " the draft's KV cache dtype in speculative_config if the target's do not fit.",
        engines=(SGLANG, *VLLM),
        seen_in="https://github.com/sgl-project/sglang/issues/23490",
        check=lambda s: (
            [Found("config.json", f"{s.spec.kind.upper()} with {s.spec.attention.kv_heads} key-value heads")]
            if s.spec and isinstance(s.spec.attention, Gqa)
            else ()
        ),
    ),
    Rule(
        "K195",
        "method-by-flag",
        "note",
        "vLLM takes a head for a plain draft model unless the method or the path says eagle3.",
        fix='Serve with "method": "eagle3" in --speculative-config.',
        engines=VLLM,
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L1327-L1337",
        check=lambda s: (
            [Found("config.json", "vLLM cannot tell from the config that this is an Eagle3 head")]
            if not is_speculators(s)
            else ()
        ),
    ),
    Rule(
        "K196",
        "one-model",
        "note",
        "TensorRT-LLM serves MLA heads as part of the target (eagle3_one_model, its default). NVIDIA's own"
        " deployment test serves its Kimi heads separately.",
        fix="Leave the flag out. Try eagle3_one_model: false if your release does not load the head.",
        engines=(TRTLLM,),
        seen_in="https://github.com/NVIDIA/TensorRT-LLM/pull/9677",
        check=lambda s: (
            [Found("config.json: architectures", f"{first_architecture(s)}, an MLA head")] if s.is_mla else ()
        ),
    ),
)
