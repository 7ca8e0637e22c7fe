"""The tensor names that most layouts share. What belongs here: row tables, to be composed by the layouts."""

from __future__ import annotations

from ..layout import Row


def head_rows(layer: str) -> tuple[Row, ...]:
    """Return the rows of a head whose decoder layers are stored under the prefix `layer`."""
    return OUTSIDE + tuple(Row(f"{layer}.{name}", (slot,)) for name, slot in LAYER)


OUTSIDE = (
    Row("fc.weight", ("fc",)),
    Row("fc.bias", ("fc.bias",)),
    Row("fc_norm.{a}.weight", ("fc_norm.{a}",)),
    Row("input_norm.weight", ("input_norm",)),
    Row("norm.weight", ("norm",)),
    Row("lm_head.weight", ("lm_head",)),
    Row("embed_tokens.weight", ("embed_tokens",)),
    Row("d2t", ("d2t",)),
    Row("t2d", ("t2d",)),
)

LAYER = (
    ("input_layernorm.weight", "{i}.input_layernorm"),
    ("hidden_norm.weight", "{i}.hidden_norm"),
    ("post_attention_layernorm.weight", "{i}.post_attention_layernorm"),
    *(
        (f"self_attn.{part}.{kind}", "{i}." + part + ("" if kind == "weight" else ".bias"))
        for part in ("q_proj", "k_proj", "v_proj", "o_proj")
        for kind in ("weight", "bias")
    ),
    *(
        (f"self_attn.{part}.weight", "{i}." + part)
        for part in (
            "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj",
        )
    ),
    *(
        (f"mlp.{part}.{kind}", "{i}." + part + ("" if kind == "weight" else ".bias"))
        for part in ("gate_proj", "up_proj", "down_proj")
        for kind in ("weight", "bias")
    ),
)  # fmt: skip
