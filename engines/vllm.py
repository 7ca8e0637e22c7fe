"""vLLM's layout of an Eagle3 head, MHA and MLA.

Loaders: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama_eagle3.py and
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_eagle3.py
"""

from __future__ import annotations

from typing import Any

from ..head.spec import HeadSpec
from .config import write_keys
from .identity import identity
from .keys import CONVENTION, INPUTS, TOP
from .layout import Layout, Limit
from .limits import MLA_ROPE, VLLM_SOURCE, is_mla
from .rows import HIDDEN, MIDLAYER, beside, first_only, fused_rows, head_rows, instead, later_norm


def captured_keys(spec: HeadSpec) -> dict[str, Any]:
    """Return the keys by which vLLM finds the captured layers.

    The V2 runner reads the top-level list only, V1 reads it first; both mean layer inputs:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py#L106
    """
    ids = [i + 1 for i in spec.captured]
    return {TOP: ids, CONVENTION: INPUTS, "num_aux_hidden_states": len(ids)}


def _write(spec: HeadSpec) -> dict[str, Any]:
    return identity(spec) | write_keys(spec) | captured_keys(spec)


VLLM = Layout(
    name="vllm",
    engine="vLLM 0.20 or newer (MHA/GQA: LlamaForCausalLMEagle3; MLA: Eagle3DeepseekV2ForCausalLM)",
    rows=head_rows("layers.{i}")
    + instead(MIDLAYER, fused_rows("layers.{i}"), first_only(fused_rows("midlayer")))
    # Built in every layer, and used in the first one alone.
    + beside(later_norm(HIDDEN)),
    told_by=lambda config, names: TOP in config,
    write_config=_write,
    limits=(
        *MLA_ROPE,
        Limit(
            lambda s: is_mla(s) and s.norms.before_fc,
            "vLLM's MLA head has no norm before fc (norm_before_fc)",
            "Serve this head with TensorRT-LLM, or train one without norm_before_fc.",
            f"{VLLM_SOURCE}/model_executor/models/deepseek_eagle3.py#L360-L368",
        ),
        Limit(
            lambda s: is_mla(s) and s.mlp_bias,
            "vLLM's MLA head drops the biases of its MLP in silence",
            "Serve this head with TensorRT-LLM, or train one without mlp_bias.",
            f"{VLLM_SOURCE}/model_executor/models/deepseek_eagle3.py#L85",
        ),
        Limit(
            lambda s: s.fc_bias,
            "vLLM drops fc.bias in silence",
            "Serve this head with TensorRT-LLM, or train one without the bias.",
            f"{VLLM_SOURCE}/model_executor/models/utils.py#L458",
        ),
        Limit(
            is_mla,
            "vLLM's MLA head has a plain lm_head, and fails on the scales of a quantized one",
            "Leave lm_head out when the head is quantized.",
            f"{VLLM_SOURCE}/model_executor/models/deepseek_eagle3.py#L299-L303",
            holds="lm_head.weight_scale*",
        ),
    ),
)
