"""TensorRT-LLM's layout, and ModelOpt's, whose exporter writes for it.

Loader: Eagle3ForCausalLM.load_weights, lines 943 to 987 of the file that `limits.TRTLLM_MODEL` links to.
"""

from __future__ import annotations

from typing import Any

from ..head.spec import HeadSpec
from .config import write_keys
from .identity import identity
from .keys import CONVENTION, OUTPUTS
from .layout import Layout, Limit
from .limits import FC_NORMS_TWICE, MLA_ROPE, TRTLLM_MODEL, TRTLLM_ROPE, is_mla, trtllm_scales_otherwise
from .marks import eagle_config, has_midlayer
from .rows import HIDDEN, INPUT, MIDLAYER, MIDLAYERS, beside, head_rows, instead, later_norm

# What TensorRT-LLM reads of eagle_config, and what ModelOpt's exporter writes for it.
FLAGS = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
}

EMBEDDING = {
    "embed_tokens": f"TensorRT-LLM takes the target's embedding in place of the head's own ({TRTLLM_MODEL}#L793-L811)"
}


def _write(spec: HeadSpec) -> dict[str, Any]:
    config = identity(spec) | write_keys(spec)
    config["eagle_config"] |= {
        "eagle_aux_hidden_state_layer_ids": list(spec.captured),
        CONVENTION: OUTPUTS,
        **FLAGS,
    }
    return config


TRTLLM = Layout(
    name="trtllm",
    engine="TensorRT-LLM (PyTorch backend), one-model Eagle3",
    rows=head_rows("layers.{i}", later=(HIDDEN,)) + instead(MIDLAYER, MIDLAYERS) + beside(later_norm(INPUT)),
    told_by=lambda config, names: (
        CONVENTION in eagle_config(config)
        or (
            "eagle_config" in config
            and "layers.1.hidden_norm.weight" in names
            and "layers.1.input_layernorm.weight" not in names
        )
    ),
    write_config=_write,
    replaces=EMBEDDING,
    limits=(
        *MLA_ROPE,
        Limit(
            lambda s: s.norms.before_residual,
            "TensorRT-LLM takes the residual before hidden_norm, always (norm_before_residual is not read)",
            "Serve this head with vLLM.",
            f"{TRTLLM_MODEL}#L654-L656",
        ),
        Limit(
            lambda s: len(s.captured) == 1,
            "TensorRT-LLM builds no fc for a single captured layer",
            "Serve this head with vLLM.",
            f"{TRTLLM_MODEL}#L719-L726",
        ),
        Limit(
            lambda s: len(s.captured) * s.target_hidden == s.hidden,
            "TensorRT-LLM skips fc where what it reads is as wide as the head",
            "Serve this head with vLLM.",
            f"{TRTLLM_MODEL}#L1007-L1020",
        ),
        Limit(
            lambda s: is_mla(s) and s.draft_vocab != s.vocab,
            "TensorRT-LLM cannot load an MLA head with a reduced vocabulary",
            "Expand it first, kconv vocab HEAD --expand OUT, and convert OUT; or serve this head with vLLM.",
            # With d2t on the model itself (#L773-L778), the loader looks for the layer under names that nobody stores.
            f"{TRTLLM_MODEL}#L971-L979",
        ),
        Limit(
            trtllm_scales_otherwise,
            "TensorRT-LLM reads this YaRN's attention_factor, mscale or mscale_all_dim otherwise than the trainer does",
            "Serve this head with vLLM.",
            f"{TRTLLM_ROPE}#L750-L751",
        ),
        FC_NORMS_TWICE,
    ),
)

MODELOPT = Layout(
    name="modelopt",
    engine="ModelOpt's export_speculative_decoding",
    rows=head_rows("layers.{i}") + instead(MIDLAYERS) + beside(later_norm(HIDDEN)),
    told_by=lambda config, names: "eagle_config" in config and not has_midlayer(names),
)
