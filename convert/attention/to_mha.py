"""MLA to MHA.

1. One pass over the fitted rows: second moments of the attention's input against both normed latents.
2. A linear map in place of each (`linear_norm`), its ridge chosen on rows that were not fitted.
3. The exact rest (`expand_mla`).
4. A second pass: o_proj, fitted to what the original gave (`refit`).
"""

from __future__ import annotations

from dataclasses import replace

from ...head.forward import DraftHead
from ...head.spec import Mla
from .calibration import Calibration
from .expand_mla import assemble_mha
from .linear_norm import RIDGES, Latent, Linearized, gather, linearize
from .refit import refit_output
from .swap import Attention, attention_of, with_attention
from .trace import trace


def convert_to_mha(
    head: DraftHead,
    calibration: Calibration,
    head_dim: int | None = None,
    *,
    ridges: tuple[float, ...] = RIDGES,
    refit: bool = True,
) -> tuple[Attention, dict[str, Linearized]]:
    """Return an MLA head's attention as MHA, and how well each latent's norm was taken up.

    Args:
        head: of one layer.
        calibration: states of its target.
        head_dim: of the output, padded with zeros; None for the least.
        ridges: to choose from; empty for a fitted constant alone (an ablation).
        refit: whether o_proj is fitted again (an ablation).
    """
    dims = head.spec.attention
    assert isinstance(dims, Mla)
    mla = attention_of(head)
    weights = mla.weights
    latents = {
        "q": Latent(weights["0.q_a_proj"], weights["0.q_a_layernorm"], head.spec.eps),
        "kv": Latent(weights["0.kv_a_proj_with_mqa"][: dims.kv_lora_rank], weights["0.kv_a_layernorm"], head.spec.eps),
    }
    moments = gather((step.rows for step in trace(head, calibration.part("fit"))), list(latents.values()))
    linear = {
        name: linearize(latent, own, (step.rows for step in trace(head, calibration.part("choose"))), ridges)
        for (name, latent), own in zip(latents.items(), moments, strict=True)
    }
    mha = assemble_mha(mla, linear["q"].map, linear["kv"].map, head_dim)
    if refit:
        fitted = refit_output(head, with_attention(head, mha), calibration)
        mha = replace(mha, weights={**mha.weights, "0.o_proj": fitted})
    return mha, linear
