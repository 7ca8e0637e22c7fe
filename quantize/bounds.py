"""What a calibrated amax can be. What belongs here: bounds that follow from formats and from the model's own norms."""

from __future__ import annotations

from collections.abc import Mapping

from ..checkpoint.folder import Checkpoint
from ..checkpoint.tensors import read_tensor
from ..errors import InputScalesInvalid
from ..target.config import TargetConfig
from .pack import scale_2

# Engines take the reciprocal of an input_scale in float32, where that of a denormal number may be infinite:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L2097
NORMAL = 2.0**-126
# The next norm squares in float32 what is made of an activation; beyond this a square is infinite.
LARGEST = 2.0**64
# The norm in the same layer whose output a module reads, by the last part of the module's name. Of o_proj and down_proj
# there is none.
NORMS = {
    **dict.fromkeys(("q_proj", "q_a_proj", "kv_a_proj_with_mqa"), "input_layernorm"),
    "q_b_proj": "self_attn.q_a_layernorm",
    "kv_b_proj": "self_attn.kv_a_layernorm",
    **dict.fromkeys(("gate_proj", "up_proj"), "post_attention_layernorm"),
}
# Two roundings to bf16 on the way, of 2^-8 each.
SLACK = 1.02


def check_amax(name: str, amax: float) -> None:
    """Raise InputScalesInvalid unless an amax has an input_scale that engines can calculate with.

    Args:
        name: the module's.
        amax: the largest magnitude that it was seen to read.
    """
    if not 0 < amax < LARGEST or float(scale_2(amax)) < NORMAL:
        raise InputScalesInvalid(
            f"the amax of {name} is {amax:g}, and its input_scale nothing that float32 can calculate with",
            where=name,
            fix="Calibrate this target again, with more prompts.",
        )


def check_norms(amaxes: Mapping[str, float], target: Checkpoint, config: TargetConfig) -> None:
    """Raise InputScalesInvalid for an amax beyond what the norm before the module can put out.

    RMSNorm of n numbers puts out sqrt(n) times its largest weight, at most: where all but one are zero.

    Args:
        amaxes: by module, in the text model.
        target: the target that they are of.
        config: its config.
    """
    bounds: dict[str, float] = {}
    for name, amax in amaxes.items():
        parts = name.split(".")  # model.layers.1.….up_proj
        norm = ".".join((*parts[:3], NORMS.get(parts[-1], "")))
        info = target.tensors.get(f"{config.prefix}{norm}.weight")
        if info is None:
            continue
        if norm not in bounds:
            weight = read_tensor(info).float()
            bounds[norm] = float(weight.abs().max()) * weight.numel() ** 0.5
        if amax > SLACK * bounds[norm]:
            raise InputScalesInvalid(
                f"the amax of {name} is {amax:g}, and {norm}, which it reads, reaches {bounds[norm]:g} at most",
                where=name,
                fix="The file was changed, or is of another target: calibrate this one again.",
            )
