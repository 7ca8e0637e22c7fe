"""ModelOpt's draft decoders, changed to train what engines serve.

ModelOpt 0.47 builds a head from a decoder layer class of its choice. This module corrects four things about that
choice, without changing any weight's name or shape:

* `kimik2` downloads a decoder from the Hub, without a revision, and runs it; with transformers 5 it fails to import.
  Here it is transformers' own DeepSeek-V3 layer, which needs no download and accepts any batch.
  https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/utils.py#L509
* The latent norms `q_a_layernorm` and `kv_a_layernorm` get the config's `rms_norm_eps`, as vLLM gives them
  (https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1082-L1098);
  transformers always uses 1e-6
  (https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/models/deepseek_v3/modeling_deepseek_v3.py#L382-L390).
* RoPE's frequencies stay float32 (`ExactRotary`).
* The hidden state is normed once. ModelOpt norms the embedding (`input_layernorm`) and the hidden state
  (`hidden_norm`) in a hook before the first attention, but leaves `input_layernorm` in the layer as well, so the
  hook receives a hidden state that went through the embedding's norm. Engines pass the residual stream.
  https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/plugins/modeling_eagle.py#L76-L80
  https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama_eagle3.py#L131-L143
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from modelopt.torch.speculative.plugins import hf_eagle
from torch import Tensor, nn
from transformers import DeepseekV3Config, PretrainedConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class _ServedOrder:
    """The order of norms and residuals in which engines run a layer of an Eagle3 head."""

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    self_attn: nn.Module
    mlp: nn.Module

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run one layer on `[B, T, hidden]`; the keyword arguments go to its attention."""
        # ModelOpt gives hidden_norm to the one layer whose inputs its hook norms.
        normed = hidden_states if hasattr(self, "hidden_norm") else self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class GqaLayer(_ServedOrder, LlamaDecoderLayer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Llama's decoder layer, for `eagle_decoder_type: llama`."""


class ExactRotary(DeepseekV3RotaryEmbedding):
    """RoPE whose frequencies stay float32, as engines keep them.

    ModelOpt casts the whole head to the target's dtype, including buffers. Frequencies in bf16 are off by up to one
    part in 512, which is several radians at position 4,096.
    https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/plugins/hf_eagle.py#L399
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExactRotary:
        kept = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, exact in kept.items():
            # Changes only the device.
            setattr(self, name, exact.to(getattr(self, name).device))
        return self


class MlaLayer(_ServedOrder, DeepseekV3DecoderLayer):
    """DeepSeek-V3's decoder layer, for `eagle_decoder_type: kimik2`; its RoPE is DeepSeek's interleaved one."""

    def __init__(self, config: PretrainedConfig, layer_idx: int) -> None:
        config = as_deepseek(config)
        super().__init__(config, layer_idx)
        self.rotary_emb = ExactRotary(config)
        attention: Any = self.self_attn
        attention.q_a_layernorm.variance_epsilon = config.rms_norm_eps
        attention.kv_a_layernorm.variance_epsilon = config.rms_norm_eps

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, *, position_ids: Tensor, **kwargs: Any
    ) -> Tensor:
        """Run one layer on `[B, T, hidden]` at `position_ids` [1 or B, T]."""
        # ModelOpt leaves RoPE to this decoder and passes None.
        kwargs["position_embeddings"] = self.rotary_emb(hidden_states, position_ids)
        return super().forward(hidden_states, position_ids=position_ids, **kwargs)


# Others, like Llama's head_dim and gpt-oss's attention_bias, mean something else to DeepSeek's layer.
OF_MLA = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
    "max_position_embeddings", "rope_parameters", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip


def as_deepseek(config: PretrainedConfig) -> DeepseekV3Config:
    """Return the config of a head as a DeepSeek one, from which transformers builds MLA.

    ModelOpt makes a head's config of the target's class, which for a Llama target derives nothing from MLA's dims.
    https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/plugins/hf_eagle.py#L371
    """
    if isinstance(config, DeepseekV3Config):
        return config
    given = config.to_dict()
    made = DeepseekV3Config(**{key: given[key] for key in OF_MLA})
    made._attn_implementation = config._attn_implementation
    return made


@contextmanager
def served_decoders() -> Iterator[None]:
    """Make ModelOpt's Eagle3 conversion use the layers above inside this context.

    Only building a head looks up the classes, so the context should span `mtsp.convert` and nothing more.
    """
    before = hf_eagle._setup_kimi_k2_decoder, hf_eagle.LlamaDecoderLayer
    hf_eagle._setup_kimi_k2_decoder, hf_eagle.LlamaDecoderLayer = lambda: MlaLayer, GqaLayer
    try:
        yield
    finally:
        hf_eagle._setup_kimi_k2_decoder, hf_eagle.LlamaDecoderLayer = before
