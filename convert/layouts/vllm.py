"""vLLM's layout of an Eagle3 head, MHA and MLA. What belongs here: its rows, its config keys, its limits.

Loaders: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama_eagle3.py and
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_eagle3.py
"""

from __future__ import annotations

from typing import Any

from ...head.spec import HeadSpec, Mla
from ..captured import TOP
from ..config import write_keys
from ..layout import Layout, Limit
from .identity import identity
from .rows import head_rows


def _write(spec: HeadSpec) -> dict[str, Any]:
    # The V2 runner reads the top-level list only, V1 reads it first; both mean layer inputs.
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py#L106
    captured = {TOP: [i + 1 for i in spec.captured], "num_aux_hidden_states": len(spec.captured)}
    return identity(spec) | write_keys(spec) | captured


VLLM = Layout(
    name="vllm",
    engine="vLLM 0.20 or newer (MHA/GQA: LlamaForCausalLMEagle3; MLA: Eagle3DeepseekV2ForCausalLM)",
    rows=head_rows("layers.{i}"),
    told_by=lambda config, names: TOP in config,
    write_config=_write,
    limits=(
        Limit(
            lambda s: isinstance(s.attention, Mla) and s.norms.before_fc,
            "vLLM's MLA head has no norm before fc (norm_before_fc)",
            "Serve this head with TensorRT-LLM, or train one without norm_before_fc.",
            "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_eagle3.py",
        ),
        Limit(
            lambda s: s.fc_bias,
            "vLLM drops fc.bias in silence",
            "Serve this head with TensorRT-LLM, or train one without the bias.",
            "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/utils.py#L458",
        ),
    ),
)
