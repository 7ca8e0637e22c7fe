"""MLA to MHA.

1. One pass over the fitted rows: second moments of the attention's input against both normed latents.
2. A linear map in place of each latent (`linearize`), with a ridge chosen on rows outside the fit.
3. The exact rest (`assemble_mha`).
4. A second pass: o_proj, fitted to the original's output (`moments.refit_output`).

A normed latent as a linear map.

`n(Wx) = g * Wx / rms(Wx)` is a linear map times a number that differs from token to token, so no linear map equals it:
the number multiplies each key and value (a temperature per key), or each query (a temperature per query), and the
softmax cancels neither. The nearest map depends on the data:

* `s * g * W` with one number s, fitted: the right direction, the wrong length;
* least squares from x to n(Wx), regularized towards the former by a ridge: it captures the part of the length that is
  linear in x. The ridge is the one that does best on rows outside the fit.

Without data no s is known: guessing it keeps half of the acceptance (docs/attention.md).

The exact part of MLA to MHA: everything but the two latent norms.

With linear maps L_q and L_kv in place of the normed latents, `q_a_layernorm(q_a_proj x)` and
`kv_a_layernorm(kv_a_proj x)`, an MLA head *is* an MHA head:

* a query or key head is [rope | nope | zeros]: RoPE rotates its first `partial_rotary_factor * head_dim` dims,
  half-split, so MLA's interleaved pairs (0,1), (2,3), ... are reordered to 0, 2, ..., 1, 3, ...; the same order on
  both sides leaves every dot product unchanged;
* the one rotary key is repeated for each head;
* a value head is [v | zeros], and o_proj has a column of zeros for each of these;
* MLA scales its softmax by `(nope + rope) ** -0.5` and YaRN's `m(mscale_all_dim) ** 2`, MHA by `head_dim ** -0.5`: the
  quotient goes into the queries, and so does the quotient of their factors of cos and sin. The config keeps
  mscale and mscale_all_dim: without them readers would scale cos and sin of an MHA head by `m(1)` (`drafters.yarn`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...drafters.attention import rms_norm
from ...drafters.forward import DraftHead
from ...drafters.rope import partial_factor
from ...drafters.spec import Gqa, Mla
from ...drafters.yarn import cos_sin_factor, softmax_scale
from ...errors import LayoutCannot
from ...measure.batches import Calibration
from ...measure.trace import trace
from .moments import Moments, refit_output
from .swap import Attention, attention_of, with_attention

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True)
class Latent:
    """A latent of an MLA head: `[rank, attn_in]` and the gain `[rank]` of its norm."""

    down: Tensor
    gain: Tensor
    eps: float

    @property
    def scaled(self) -> Tensor:
        """The map without the norm, `g * W`."""
        return self.gain[:, None] * self.down

    def normed(self, x: Tensor) -> Tensor:
        """Return n(Wx) of rows `[N, attn_in]`, as the head computes it."""
        return rms_norm(F.linear(x, self.down.to(x.dtype)), self.gain.to(x.dtype), self.eps)


@dataclass(frozen=True)
class Linearized:
    """A linear map in place of a normed latent, and its distance from it on rows outside the fit.

    Attributes:
        map: `[rank, attn_in]`.
        constant: s, the best single number.
        ridge: the chosen ridge; infinite for the constant alone.
        error: relative error of the latent, `|Lx - n(Wx)| / |n(Wx)|`, root mean square.
        constant_error: the same of `s * g * W`.
    """

    map: Tensor
    constant: float
    ridge: float
    error: float
    constant_error: float


def gather(rows: Iterable[Tensor], latents: Sequence[Latent]) -> list[Moments]:
    """Sum up inputs `[N, attn_in]` against each latent's normed values, in one pass."""
    width = latents[0].down.shape[1]
    ranks = [len(latent.gain) for latent in latents]
    moments = Moments(width, sum(ranks), latents[0].down.device)
    for x in rows:
        moments.add(x, torch.cat([latent.normed(x) for latent in latents], dim=-1))
    return moments.split(ranks)


def linearize(latent: Latent, moments: Moments, rows: Iterable[Tensor], ridges: Sequence[float] = RIDGES) -> Linearized:
    """Return the linear map that replaces a normed latent.

    Args:
        moments: of the rows to fit on, from `gather`.
        rows: other rows, `[N, attn_in]` each, which choose the ridge; read once.
        ridges: the choices; empty for the constant alone.
    """
    plain = latent.scaled.to(moments.xx.dtype)
    constant = float((plain * moments.xy.T).sum() / ((plain @ moments.xx) * plain).sum())
    prior = constant * plain
    maps = {math.inf: prior} | {ridge: moments.solve(prior, ridge) for ridge in ridges}
    apart, whole = dict.fromkeys(maps, 0.0), 0.0
    for x in rows:
        wanted = latent.normed(x)
        whole += float(wanted.double().square().sum())
        for ridge, linear in maps.items():
            apart[ridge] += float((F.linear(x, linear.to(x.dtype)) - wanted).double().square().sum())
    errors = {ridge: (lost / whole) ** 0.5 for ridge, lost in apart.items()}
    best = min(errors, key=lambda ridge: errors[ridge])
    return Linearized(maps[best], constant, best, errors[best], errors[math.inf])


def assemble_mha(mla: Attention, query_map: Tensor, kv_map: Tensor, head_dim: int | None = None) -> Attention:
    """Return the MHA that equals an MLA with linear maps in place of its normed latents.

    Args:
        query_map: L_q, `[q_lora_rank, attn_in]`.
        kv_map: L_kv, `[kv_lora_rank, attn_in]`.
        head_dim: of the output, padded with zeros; None for the smallest that fits.
    """
    dims = mla.dims
    assert isinstance(dims, Mla)
    nope, rotary, heads, v_dim = dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.heads, dims.v_head_dim
    head_dim = fit_head_dim(dims, head_dim)
    target = Gqa(heads, heads, head_dim)
    rope = replace(mla.rope, partial_rotary_factor=partial_factor(rotary, head_dim))
    factor = cos_sin_factor(mla.rope, dims) / cos_sin_factor(rope, target)
    scale = softmax_scale(mla.rope, dims) / softmax_scale(rope, target)

    order = torch.cat([torch.arange(0, rotary, 2), torch.arange(1, rotary, 2)])
    query = (mla.weights["0.q_b_proj"] @ query_map).unflatten(0, (heads, nope + rotary)) * scale
    query_nope, query_rope = query.split([nope, rotary], dim=1)
    key_rope = mla.weights["0.kv_a_proj_with_mqa"][dims.kv_lora_rank :][order]
    expanded = (mla.weights["0.kv_b_proj"] @ kv_map).unflatten(0, (heads, nope + v_dim))
    key_nope, value = expanded.split([nope, v_dim], dim=1)
    query = torch.cat([query_rope[:, order] * factor**2, query_nope], dim=1)
    key = torch.cat([key_rope.expand(heads, -1, -1), key_nope], dim=1)
    output = mla.weights["0.o_proj"].unflatten(1, (heads, v_dim)).permute(1, 2, 0)
    padded = [_pad(rows, head_dim).flatten(0, 1) for rows in (query, key, value, output)]
    return Attention(
        target, rope, dict(zip(("0.q_proj", "0.k_proj", "0.v_proj", "0.o_proj"), padded, strict=True))
        | {"0.o_proj": padded[3].T.contiguous()},
    )  # fmt: skip


def fit_head_dim(dims: Mla, head_dim: int | None) -> int:
    """Return the head_dim to use: by default the smallest that holds queries, keys and values."""
    least = max(dims.qk_nope_head_dim + dims.qk_rope_head_dim, dims.v_head_dim)
    if head_dim is not None and head_dim < least:
        raise LayoutCannot(
            f"a head of {dims.qk_nope_head_dim} + {dims.qk_rope_head_dim} dims with values of {dims.v_head_dim} "
            f"does not fit into a head_dim of {head_dim}",
            where="head_dim",
            fix=f"Use --head-dim auto, or at least {least}.",
        )
    return head_dim or least


def _pad(rows: Tensor, head_dim: int) -> Tensor:
    """Pad heads of rows `[heads, dim, n]` with zeros to `[heads, head_dim, n]`."""
    return torch.cat([rows, rows.new_zeros(rows.shape[0], head_dim - rows.shape[1], rows.shape[2])], dim=1)


def convert_to_mha(
    head: DraftHead,
    calibration: Calibration,
    head_dim: int | None = None,
    *,
    ridges: tuple[float, ...] = RIDGES,
    refit: bool = True,
) -> tuple[Attention, dict[str, Linearized]]:
    """Return a one-layer MLA head's attention as MHA, and how well the linear maps replace each latent's norm.

    Args:
        head_dim: of the output, padded with zeros; None for the smallest possible.
        ridges: the choices; empty for a fitted constant alone (an ablation).
        refit: whether to fit o_proj again (False for an ablation).
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
