"""The speculators library's layout.

Reader: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/configs/speculators/algos.py#L15-L50
"""

from __future__ import annotations

from .keys import ConfigTable
from .layout import Layout
from .rows import head_rows

SPECULATORS = Layout(
    name="speculators",
    engine="the speculators library",
    rows=head_rows("layers.{i}"),
    told_by=lambda config, names: "speculators_model_type" in config or "transformer_layer_config" in config,
    config=ConfigTable(
        nested="transformer_layer_config",
        ballast=frozenset(("speculators_config", "speculators_model_type", "speculators_version")),
        must_state={
            "norm_before_residual": "vLLM takes the absent key for true, the speculators library for false"
            " (https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/configs/speculators/algos.py#L33)"
        },
    ),
)
