"""What a target's norms can put out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..checkpoint.header import TensorInfo
from ..checkpoint.tensors import read_tensor

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
