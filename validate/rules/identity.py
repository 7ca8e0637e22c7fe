"""A head's class and model type, and what a launch flag must supply."""

from __future__ import annotations

from ...drafters.spec import Gqa
from ...engines.checks import first_architecture, is_speculators
from ...rule import Found, Rule
from .head import HeadSubject
from .subject import ENGINES, concerned

RULES: tuple[Rule[HeadSubject], ...] = (
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
        "K192",
        "speculators-not-read",
        "error",
        "SGLang and TensorRT-LLM cannot read speculators' format.",
        fix="Convert the head (kconv to-sglang, to-trtllm or to-portable).",
        engines=concerned("K192"),
        seen_in="https://github.com/vllm-project/speculators/issues/610",
        check=lambda s: (
            [Found("config.json: speculators_model_type", "the head is in speculators' format")]
            if is_speculators(s)
            else ()
        ),
    ),
    Rule(
        "K194",
        "backend-of-its-own",
        "note",
        "The head is not MLA, but would inherit its MLA target's attention backend.",
        fix="In SGLang, add --speculative-draft-attention-backend, e.g. fa3. In vLLM, set attention_backend and"
        " the draft's KV cache dtype in speculative_config if the target's do not fit.",
        engines=concerned("K194"),
        seen_in="https://github.com/sgl-project/sglang/issues/23490",
        check=lambda s: (
            [Found("config.json", f"{s.spec.kind.upper()} with {s.spec.attention.kv_heads} key-value heads")]
            if s.spec and isinstance(s.spec.attention, Gqa)
            else ()
        ),
    ),
)
