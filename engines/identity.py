"""What a config says a head is called."""

from __future__ import annotations

from typing import Any

from ..head.spec import HeadSpec, Mla


def identity(spec: HeadSpec) -> dict[str, Any]:
    """Return `architectures` and `model_type` as vLLM, SGLang and TensorRT-LLM all take them.

    `deepseek_v3` would be the natural model_type of an MLA head, but vLLM rewrites it to its MTP draft:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L679
    """
    if isinstance(spec.attention, Mla):
        return {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
