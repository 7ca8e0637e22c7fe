"""One rotary key for all heads.

A pair of rotary dims is one complex number, and RoPE multiplies it by `e^(i * theta * position)`; a query q and a key k
score `Re(conj(q) e^(i theta (s - t)) k)`. A complex-linear map over the heads at one frequency therefore commutes with
RoPE. So of the keys z of all kv heads at one frequency, MLA's one shared key takes the best complex number: with
`S = sum_h E[q_h q_h^H]` (each query at its own kv head) and `C = E[z z^H]`, the top eigenvector V of
`S^1/2 C S^1/2` gives

    k_pe = V^H S^1/2 z,    q_pe,h = V^H S^-1/2 q_h,    rest = z - S^-1/2 V V^H S^1/2 z.

The rest is not rotated, nor are the pairs that the ladder omits. The average effect of the missing rotation is known,
`c_hj = E[e^(i theta_j (s - t))]` under the head's own attention weights, and is applied to the queries.

S^1/2 leaves the shared key and its queries on very different scales, and an optimizer with one learning rate then ruins
the smaller one. So they are rebalanced to equal row norms, which changes nothing else.

Which frequencies an MLA head can rotate at.

MHA rotates P pairs of each head, at `theta ** (-j / P)`; MLA has one rotary key of n pairs, at `theta' ** (-i / n)`.
With n < P not every frequency is available. Two choices of theta' keep some of them exactly:

* "high", `theta' = theta ** (n / P)`: the n fastest pairs, each at its own frequency. The slow ones are not rotated.
* "stride", `theta' = theta`: every (P / n)-th pair; those in between rotate like the pair before them.

Which one loses less depends on how far back the head looks: slow pairs hardly rotate over short distances. With n >= P
"high" has them all, and pairs to spare. YaRN's ramp shifts along with "high": its bounds are pairs, and stay the same
as long as the last one is below 2n, where engines clamp it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...drafters.rope import inverse_frequencies, rotary_dims
from ...drafters.rope_keys import LARGEST_THETA
from ...drafters.spec import Gqa, Rope, Yarn
from ...drafters.yarn import cos_sin_factor, softmax_scale
from ...errors import LayoutCannot
from .moments import root
from .swap import Attention


@dataclass(frozen=True)
class Ladder:
    """A rotary embedding for MLA, and which of MHA's pairs each of its pairs replaces.

    Attributes:
        name: "high" or "stride".
        rope: of the MLA head; its ladder has `pairs` steps.
        pairs: n.
        folded: for each used pair of MLA, the pairs of MHA.
    """

    name: str
    rope: Rope
    pairs: int
    folded: tuple[tuple[int, ...], ...]


def find_ladders(rope: Rope, source_pairs: int, pairs: int) -> list[Ladder]:
    """Return the ladders of n pairs that can replace a head's P pairs, or refuse a scaling that engines do not read."""
    if rope.scaling is not None and not isinstance(rope.scaling, Yarn):
        raise LayoutCannot(
            f"RoPE scaling is {type(rope.scaling).__name__}, but engines support only YaRN for an MLA head",
            where="rope_scaling",
            fix="Serve this head with its original attention.",
        )
    used = min(source_pairs, pairs)
    high = replace(lengthen(rope, source_pairs, pairs), partial_rotary_factor=1.0)
    ladders = [Ladder("high", high, pairs, tuple((j,) for j in range(used)))]
    if source_pairs > pairs and source_pairs % pairs == 0:
        fold = source_pairs // pairs
        groups = tuple(tuple(range(i * fold, (i + 1) * fold)) for i in range(pairs))
        ladders.append(Ladder("stride", replace(rope, partial_rotary_factor=1.0), pairs, groups))
    return ladders


def lengthen(rope: Rope, pairs: int, longer: int) -> Rope:
    """Return the ladder of `longer` pairs that begins with a given ladder; the pairs after that may hold zeros.

    With fewer pairs, it is the ladder of the fastest ones.
    """
    theta = rope.theta ** (longer / pairs)
    if theta > LARGEST_THETA:
        raise LayoutCannot(
            f"{longer} rotary pairs that begin with the {pairs} of this head would need a theta of {theta:.0e}",
            where="rope_theta",
            fix="Serve this head with its original attention.",
        )
    return replace(rope, theta=theta)


@dataclass(frozen=True)
class Split:
    """Attention with one rotary key: maps from the input, scored by plain dot products (softmax scale 1).

    Attributes:
        key_rope: `[2n, attn_in]`, interleaved pairs; cos and sin unscaled.
        query_rope: `[heads, 2n, attn_in]`.
        key_nope: `[kv_heads, nope, attn_in]`.
        query_nope: `[heads, nope, attn_in]`.
    """

    key_rope: Tensor
    query_rope: Tensor
    key_nope: Tensor
    query_nope: Tensor


@dataclass(frozen=True)
class Options:
    """The refinements to use: all of them, except in an ablation.

    Attributes:
        is_complex: PCA over complex numbers; otherwise over real ones, the same for both dims of a pair.
        by_queries: whether to weigh the keys by S; otherwise S = 1.
        phases: whether to rotate unrotated pairs by their mean phase.
        rebalance: whether to bring the shared key and its queries to one scale.
    """

    is_complex: bool = True
    by_queries: bool = True
    phases: bool = True
    rebalance: bool = True


def split_rotary(
    gqa: Attention, ladder: Ladder, cholesky: Tensor, distances: Tensor, options: Options | None = None
) -> Split:
    """Return a GQA's maps with one rotary key for all heads, rotating at a ladder's frequencies.

    Args:
        cholesky: L with `L L^T = E[x x^T]`, `[attn_in, attn_in]`.
        distances: attention weight of each query head by distance, `[heads, T]`.
    """
    options = options or Options()
    dims = gqa.dims
    assert isinstance(dims, Gqa)
    pairs, group = rotary_dims(dims, gqa.rope) // 2, dims.heads // dims.kv_heads
    scale, factor = softmax_scale(gqa.rope, dims), cos_sin_factor(gqa.rope, dims)
    query = gqa.weights["0.q_proj"].unflatten(0, (dims.heads, dims.head_dim)) * scale
    key = gqa.weights["0.k_proj"].unflatten(0, (dims.kv_heads, dims.head_dim))
    turned_query, turned_key = _complex(query, pairs) * factor**2, _complex(key, pairs)

    key_rope, query_rope = [], []
    rest = turned_key.clone()
    for members in ladder.folded:
        index = list(members)
        mine = turned_key[:, index].flatten(0, 1)
        asked = turned_query[:, index]
        down, back = _shared_key(mine, asked, group, cholesky, options)
        shared = down @ mine
        up = back.conj().unflatten(0, (dims.kv_heads, len(index))).repeat_interleave(group, dim=0)
        answer = (up[..., None] * asked).sum(1)
        rest[:, index] -= (back[:, None] * shared).unflatten(0, (dims.kv_heads, len(index)))
        balance = (answer.abs().square().sum(-1).mean().sqrt() / shared.norm()).sqrt() if options.rebalance else 1.0
        key_rope.append(shared * balance)
        query_rope.append(answer / balance)

    if options.phases:
        turned_query = turned_query * _phases(gqa.rope, dims, pairs, distances)[..., None].conj()
    lacking = ladder.pairs - len(ladder.folded)
    return Split(
        key_rope=_interleave(torch.stack(key_rope), lacking),
        query_rope=_interleave(torch.stack(query_rope, dim=1), lacking),
        key_nope=torch.cat([rest.real, rest.imag, key[:, 2 * pairs :]], dim=1),
        query_nope=torch.cat([turned_query.real, turned_query.imag, query[:, 2 * pairs :]], dim=1),
    )


def _shared_key(keys: Tensor, queries: Tensor, group: int, cholesky: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return `V^H S^1/2` and `S^-1/2 V` at one frequency, each `[kv_heads * members]`.

    Args:
        keys: complex maps `[kv_heads * members, attn_in]`.
        queries: complex maps `[heads, members, attn_in]`.
    """
    size, members = len(keys), queries.shape[1]
    spread = _times(keys, cholesky)
    covariance = spread @ spread.mH
    metric = torch.eye(size, dtype=keys.dtype, device=keys.device)
    if options.by_queries:
        asked = _times(queries, cholesky).unflatten(0, (-1, group))
        blocks = torch.einsum("ghmn,ghkn->gmk", asked, asked.conj())
        metric = torch.block_diag(*blocks)
    if not options.is_complex:
        covariance, metric = covariance.real.to(keys.dtype), metric.real.to(keys.dtype)
    square, inverse = root(metric, floor=1e-8)
    top = torch.linalg.eigh(square @ covariance @ square).eigenvectors[:, -1]
    assert members * (size // members) == size
    return top.conj() @ square, inverse @ top


def _phases(rope: Rope, dims: Gqa, pairs: int, distances: Tensor) -> Tensor:
    """Return the mean of `e^(i theta_j (s - t))` by head and pair, `[heads, pairs]`; a key at s comes after t."""
    back = torch.arange(distances.shape[-1], dtype=distances.dtype, device=distances.device)
    angles = -back[:, None] * inverse_frequencies(rope, 2 * pairs).to(distances)
    weights = distances / distances.sum(-1, keepdim=True)
    turned = torch.polar(torch.ones_like(angles), angles)
    return weights.to(turned.dtype) @ turned


def _complex(rows: Tensor, pairs: int) -> Tensor:
    """Return the half-split pairs of heads `[heads, head_dim, n]` as complex numbers, `[heads, pairs, n]`."""
    return torch.complex(rows[:, :pairs].contiguous(), rows[:, pairs : 2 * pairs].contiguous())


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    return torch.complex(rows.real @ matrix, rows.imag @ matrix)


def _interleave(rows: Tensor, lacking: int) -> Tensor:
    """Return complex `[..., pairs, n]` as MLA's real rows `[..., 2 * (pairs + lacking), n]`; the last ones are zero."""
    real = torch.stack([rows.real, rows.imag], dim=-2).flatten(-3, -2)
    return torch.cat([real, real.new_zeros(*real.shape[:-2], 2 * lacking, real.shape[-1])], dim=-2)
