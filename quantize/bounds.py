"""What a scale of a module can be. What belongs here: bounds that follow from formats, and from the model's norms."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..checkpoint.folder import Checkpoint
from ..checkpoint.header import TensorInfo
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
MODULE = re.compile(r"(?P<layer>(?:.*\.)?layers\.\d+)\.(?:.*\.)?(?P<last>\w+)")


@dataclass(frozen=True)
class Beyond:
    """A module that reads more than the norm before it can put out.

    Attributes:
        module: its name.
        amax: the largest magnitude that it is said to read.
        norm: the norm's name.
        bound: the largest magnitude that the norm puts out.
    """

    module: str
    amax: float
    norm: str
    bound: float


def is_scale(value: float) -> bool:
    """Say whether float32 can calculate with a scale of a whole module: weight_scale_2, or input_scale."""
    return NORMAL <= value < float(scale_2(LARGEST))


def beyond_norms(amaxes: Mapping[str, float], tensors: Mapping[str, TensorInfo]) -> Iterator[Beyond]:
    """Yield the modules whose amax is beyond what the norm before them can put out.

    RMSNorm of n numbers puts out sqrt(n) times its largest weight, at most: where all but one are zero.

    Args:
        amaxes: largest magnitude read, by module, as the target names it.
        tensors: the target's; a module whose norm is not among them is passed over.
    """
    bounds: dict[str, float] = {}
    for module, amax in amaxes.items():
        found = MODULE.fullmatch(module)
        norm = f"{found['layer']}.{NORMS[found['last']]}" if found and found["last"] in NORMS else ""
        info = tensors.get(f"{norm}.weight")
        if info is None:
            continue
        if norm not in bounds:
            weight = read_tensor(info).float()
            bounds[norm] = float(weight.abs().max()) * weight.numel() ** 0.5
        if amax > SLACK * bounds[norm]:
            yield Beyond(module, amax, norm, bounds[norm])


def check_amax(name: str, amax: float) -> None:
    """Raise InputScalesInvalid unless an amax has an input_scale that engines can calculate with.

    Args:
        name: the module's.
        amax: the largest magnitude that it was seen to read.
    """
    if not is_scale(float(scale_2(amax))):
        raise InputScalesInvalid(
            f"the amax of {name} is {amax:g}, and its input_scale nothing that float32 can calculate with",
            where=name,
            fix="Calibrate this target again, with more prompts.",
        )


def check_norms(amaxes: Mapping[str, float], target: Checkpoint, config: TargetConfig) -> None:
    """Raise InputScalesInvalid for an amax beyond what the norm before the module can put out.

    Args:
        amaxes: by module, in the text model.
        target: the target that they are of.
        config: its config.
    """
    named = {f"{config.prefix}{name}": amax for name, amax in amaxes.items()}
    for beyond in beyond_norms(named, target.tensors):
        name = beyond.module.removeprefix(config.prefix)
        norm = beyond.norm.removeprefix(config.prefix)
        raise InputScalesInvalid(
            f"the amax of {name} is {beyond.amax:g}, and {norm}, which it reads, reaches {beyond.bound:g} at most",
            where=name,
            fix="The file was changed, or is of another target: calibrate this one again.",
        )
