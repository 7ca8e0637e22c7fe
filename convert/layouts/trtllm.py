"""TensorRT-LLM's layout, which ModelOpt's exporter writes. What belongs here: its rows, its config keys, its limits.

Loader: https://github.com/NVIDIA/TensorRT-LLM/blob/main/tensorrt_llm/_torch/models/modeling_speculative.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...head.spec import HeadSpec, Mla
from ..captured import CONVENTION, OUTPUTS
from ..config import write_keys
from ..layout import Layout, Limit, Row
from .identity import identity
from .rows import head_rows

LATER_NORM = "layers.{i}.hidden_norm.weight"


def _write(spec: HeadSpec) -> dict[str, Any]:
    config = identity(spec) | write_keys(spec)
    config["eagle_config"] |= {
        "eagle_aux_hidden_state_layer_ids": list(spec.captured),
        CONVENTION: OUTPUTS,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
    }
    return config


def _rows() -> tuple[Row, ...]:
    """Layers after the first call the norm before their attention `hidden_norm` in TensorRT-LLM."""
    rows = []
    for row in head_rows("layers.{i}"):
        if row.slots == ("{i}.input_layernorm",):
            rows += [replace(row, layers="first"), Row(LATER_NORM, row.slots, layers="later")]
        else:
            rows.append(row)
    return tuple(rows)


TRTLLM = Layout(
    name="trtllm",
    engine="TensorRT-LLM (PyTorch backend), one-model Eagle3",
    rows=_rows(),
    told_by=lambda config, names: (
        "eagle_config" in config and LATER_NORM.format(i=1) in names and "layers.1.input_layernorm.weight" not in names
    ),
    write_config=_write,
    limits=(
        Limit(
            lambda s: s.norms.before_residual,
            "TensorRT-LLM takes the residual before hidden_norm, always (norm_before_residual is not read)",
            "Serve this head with vLLM.",
        ),
        Limit(
            lambda s: isinstance(s.attention, Mla) and s.draft_vocab != s.vocab,
            "TensorRT-LLM cannot load an MLA head with a reduced vocabulary",
            "Expand the head to the full vocabulary first, or serve it with vLLM.",
        ),
    ),
)

MODELOPT = Layout(
    name="modelopt",
    engine="ModelOpt's export_speculative_decoding",
    rows=head_rows("layers.{i}"),
    told_by=lambda config, names: "eagle_config" in config,
)
