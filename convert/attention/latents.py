"""Fit the two latents of an MLA head to states.

1. The cost of an error in a key or a value (`measure_sensitivity`), and in a query, by its effect on the keys.
2. One latent for keys and values and one for the queries, each the best of its rank in that metric (`factorize`).
3. A gauge for each norm, after which the maps that follow the norms are fitted again to their outputs.

The cost of an error in a key or a value.

A small latent must choose what to keep of keys and values, which have no common unit: an error in a key changes where a
head looks, one in a value what it sees. Both change the drafted distribution, and the Fisher information says by how
much: with g the gradient of `log q(y)`, y drawn from q itself, an error e costs about `e^T E[g g^T] e / 2` nats. It
also knows which directions of a value the rest of the head does not use, which o_proj alone does not tell.

A latent shared by many rows.

The goal is to write rows Y = W_Y x (the keys and values of all heads, or the queries) as B A x with few rows in A. The
best pair in a metric S, the one with the least `E|S (Y - B A x)|^2`, follows from the top left singular
vectors U of `S W_Y L`, `L L^T = E[x x^T]`:  A = U^T S W_Y,  B = S^-1 U.

MLA normalizes the latent, and the norm can neither be omitted nor given a constant divisor (that would need a bias of
kv_a, which engines drop). But before the norm the basis is free: any invertible T gives `T A` and `B T^-1`. A gauge T
that makes |T c| nearly equal for all tokens makes the norm nearly a constant. Whitening does so for a normal
distribution; from there, minimizing `E(|T c|^2 / r - 1)^2` does so for this one. B is then fitted once more, to the
latent after the norm.

Such a T is nearly singular: it makes directions that few tokens use hundreds of times smaller than others (15 of 128
more than tenfold, in the queries of a small trained head), and B T^-1 makes them large again. So the bf16 rounding of
one entry of the latent must not leak into another. |T c| determines T only up to a rotation. In the rotation where T is
a diagonal after a rotation of the white latent, each direction is an entry, rounded relative to its own size, and T
costs nothing. Without that rotation T can cost a tenth of the acceptance ("In bf16" in docs/attention.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...drafters.attention import ChainContext
from ...drafters.chain import along_chains
from ...drafters.forward import DraftHead
from ...measure.batches import STEPS, Calibration, Part, StatesBatch, in_pieces
from ...measure.trace import trace
from .moments import DTYPE, RIDGES, Moments, choose, root
from .rotary import Split
from .swap import Latents, Shape


@dataclass(frozen=True)
class Sensitivity:
    """Fisher information by kv head.

    Attributes:
        key: `[kv_heads, qk_dim, qk_dim]`, of keys as attention uses them, after RoPE.
        value: `[kv_heads, v_dim, v_dim]`.
    """

    key: Tensor
    value: Tensor


class _Leaves:
    """A chain's context that keeps each step's keys and values for their gradients."""

    def __init__(self) -> None:
        self._inner = ChainContext()
        self.entries: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        key, value = key.detach().requires_grad_(), value.detach().requires_grad_()
        self.entries.append((key, value))
        return self._inner.attend(layer, query, key, value, scale)


def measure_sensitivity(head: DraftHead, batches: Iterable[StatesBatch], seed: int = 0) -> Sensitivity:
    """Return the Fisher information of a GQA head's drafts, K steps along the chain, in its keys and values."""
    totals: list[Tensor] = []
    device = head.weights["fc"].device
    generator = torch.Generator(device).manual_seed(seed)
    rows = 0
    for piece in in_pieces(batches, head.spec.draft_vocab):
        context, loss = _Leaves(), torch.zeros((), device=device)
        inputs = along_chains(piece.tokens, STEPS)
        positions = torch.arange(inputs.shape[2], device=device)
        hidden = head.fuse(piece.captured[:, : inputs.shape[2]])
        for k, tokens in enumerate(inputs):
            hidden, logits = head.step(tokens, hidden, positions + k, context)
            q = logits.float().log_softmax(-1)
            drawn = torch.multinomial(q.detach().exp().flatten(0, 1), 1, generator=generator)
            loss = loss + q.flatten(0, 1).gather(1, drawn).sum()
        gradients = torch.autograd.grad(loss, [leaf for entry in context.entries for leaf in entry])
        for found, place in zip((gradients[0::2], gradients[1::2]), (0, 1), strict=True):
            part = sum(torch.einsum("bgti,bgtj->gij", g, g).double() for g in found)
            assert isinstance(part, Tensor)
            totals[place : place + 1] = [part + totals[place] if len(totals) > place else part]
        rows += inputs[0].numel()
    return Sensitivity(totals[0] / rows, totals[1] / rows)


# Up to this size a whole factorization is cheap enough.
WHOLE = 2048
OVERSAMPLED, POWER = 32, 3
# From this width on a gauge's steps run in fp32: in the white basis all directions count equally, and rounding is far
# smaller than the effect of choosing other rows.
WIDE = 512
GAUGE_STEPS, GAUGE_RATE, GAUGE_BATCH = 400, 3e-3, 4096


@dataclass(frozen=True)
class Factor:
    """Rows as `up @ down`: `[m, r]` and `[r, attn_in]`."""

    down: Tensor
    up: Tensor


def factorize(rows: Tensor, metric: Tensor, inverse: Tensor, cholesky: Tensor, rank: int) -> Factor:
    """Return the nearest rank-r factor in a block-diagonal metric.

    Args:
        rows: `[blocks, dim, attn_in]`.
        metric, inverse: S and its inverse, `[blocks, dim, dim]`.
        cholesky: L, `[attn_in, attn_in]`.
    """
    weighted = (metric @ rows).flatten(0, 1)
    left = _top_left(weighted, cholesky, rank)
    up = inverse @ left.unflatten(0, rows.shape[:2])
    return Factor(left.T @ weighted, up.flatten(0, 1))


def _top_left(rows: Tensor, cholesky: Tensor, rank: int) -> Tensor:
    """Return the top left singular vectors of `rows @ cholesky`, `[m, r]`.

    Large ones use subspace iteration (Halko et al., algorithm 4.4, https://arxiv.org/abs/0909.4061), which forms the
    product itself only if it has fewer columns than the passes would process. All passes but the last are in fp32: they
    only choose where the last one looks, and it sees every direction in the precision of the inputs.
    """
    if min(rows.shape) <= WHOLE:
        return torch.linalg.svd(rows @ cholesky, full_matrices=False).U[:, :rank]
    width = min(rank + OVERSAMPLED, *rows.shape)
    # A pass in fp32 costs half of one in fp64, and each goes through the factors twice.
    factors = [rows, cholesky] if (POWER + 2) * width < len(rows) else [rows @ cholesky]
    generator = torch.Generator(rows.device).manual_seed(0)
    basis = torch.randn(len(rows), width, generator=generator, dtype=rows.dtype, device=rows.device).float()
    rough = [one.float() for one in factors]
    for _ in range(POWER):
        basis, _ = _pass(rough, basis)
    del rough
    basis, inside = _pass(factors, basis.to(rows.dtype))
    # The top vectors within the basis come from a matrix only as large as the basis is wide.
    return basis @ torch.linalg.eigh(inside @ inside.T).eigenvectors.flip(1)[:, :rank]


def _pass(factors: Sequence[Tensor], basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q and R of a product's columns, after passing a basis of them through its transpose and through it."""
    for one in factors:
        basis = one.T @ basis
    basis = torch.linalg.qr(basis).Q
    for one in reversed(factors):
        basis = one @ basis
    orthogonal, inside = torch.linalg.qr(basis)
    return orthogonal, inside


@dataclass(frozen=True)
class Gauge:
    """A basis T of a latent, `[r, r]`, and how much the length still varies on other rows than the fitted ones.

    Attributes:
        matrix: T; with it the mean square of a latent's entries averages 1.
        variation: standard deviation of rms(T c), relative to its mean.
        before: the same value without T.
    """

    matrix: Tensor
    variation: float
    before: float


def whiten(latents: Tensor) -> Tensor:
    """Return the T that makes a sample `[N, r]` white."""
    return root(latents.T @ latents / len(latents), floor=1e-10)[1]


def fit_gauge(latents: Tensor, unseen: Tensor, kinds: Sequence[str] = ("white", "sphere")) -> Gauge:
    """Return the best gauge for a latent.

    Args:
        latents, unseen: a sample for the fit, and another one, which decides; `[N, r]`.
        kinds: the choices; "none" keeps the basis except for its mean length.
    """
    # In the white basis each direction counts equally, and one learning rate fits all.
    found = {"none": torch.eye(latents.shape[1], dtype=latents.dtype, device=latents.device)}
    if set(kinds) & {"white", "sphere"}:
        found["white"] = whiten(latents)
    if "sphere" in kinds:
        found["sphere"] = _to_sphere(F.linear(latents, found["white"])) @ found["white"]
    best = min((found[kind] for kind in kinds), key=lambda matrix: _variation(unseen, matrix))
    size = F.linear(latents, best).square().mean().sqrt()
    return Gauge(best / size, _variation(unseen, best), _variation(unseen, found["none"]))


def _variation(latents: Tensor, matrix: Tensor) -> float:
    lengths = F.linear(latents, matrix).norm(dim=-1)
    return float(lengths.std() / lengths.mean())


def _to_sphere(white: Tensor) -> Tensor:
    """Minimize `E(|T c|^2 / r - 1)^2` over T, from the identity; T is returned as a diagonal times a rotation."""
    generator = torch.Generator(white.device).manual_seed(0)
    exact, white = white.dtype, white.float() if white.shape[1] >= WIDE else white
    matrix = torch.eye(white.shape[1], dtype=white.dtype, device=white.device, requires_grad=True)
    optimizer = torch.optim.Adam([matrix], lr=GAUGE_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, GAUGE_STEPS)
    for _ in range(GAUGE_STEPS):
        count = min(GAUGE_BATCH, len(white))
        chosen = torch.randint(len(white), (count,), generator=generator, device=white.device)
        lengths = F.linear(white[chosen], matrix).square().mean(dim=-1)
        # Relative to the batch's own mean: only the variation should vanish; the mean is set afterwards.
        (lengths / lengths.mean() - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    _, sizes, directions = torch.linalg.svd(matrix.detach().to(exact))
    return sizes[:, None] * directions


Metric = Literal["fisher", "output", "none"]
# Rows for fitting a gauge, and as many for deciding; larger sets are thinned out.
SAMPLE = 65536
# Batches for the Fisher information: blocks of a few dozen dims need no more.
FISHER_BATCHES = 24


def measure_costs(
    trial: DraftHead,
    split: Split,
    value: Tensor,
    output: Tensor,
    cholesky: Tensor,
    calibration: Calibration,
    metric: Metric = "fisher",
) -> tuple[Tensor, Tensor]:
    """Return for each kv head the cost of an error in its keys and in its values.

    Args:
        trial: the head as a GQA with one rotary key and its full rank (`as_gqa`).
        value: `[kv_heads, v_dim, attn_in]`.
        output: `[hidden, heads, v_dim]`.
        cholesky: L with `L L^T = E[x x^T]`, `[attn_in, attn_in]`.
        metric: "fisher", the cost in the drafts; "output" and "none" for ablations.

    Returns:
        Symmetric matrices, `[kv_heads, nope, nope]` and `[kv_heads, v_dim, v_dim]`.
    """
    nope, rotary = split.key_nope.shape[1], len(split.key_rope)
    if metric == "fisher":
        found = measure_sensitivity(trial, islice(calibration.part("fit"), FISHER_BATCHES))
        own, width = slice(rotary, rotary + nope), value.shape[1]
        return found.key[:, own, own], found.value[:, :width, :width]
    kv_heads = len(split.key_nope)
    asked = (split.query_nope @ cholesky).unflatten(0, (kv_heads, -1))
    read = output.permute(1, 2, 0).unflatten(0, (kv_heads, -1))
    keys, values = (
        torch.einsum("ghin,ghjn->gij", rows, rows) if metric == "output" else _unit(rows.shape[2], asked)
        for rows in (asked, read)
    )
    # Keys and values get equal total weight: these errors have no common unit.
    return _even(keys, split.key_nope @ cholesky), _even(values, value @ cholesky)


def factorize_both(
    split: Split, value: Tensor, costs: tuple[Tensor, Tensor], shape: Shape, cholesky: Tensor, *, by_keys: bool = True
) -> tuple[Factor, Factor]:
    """Return the factors of the queries, and of keys and values.

    Args:
        value: `[kv_heads, v_dim, attn_in]`.
        costs: from `measure_costs`.
        shape: its `latent` and `q_lora_rank` are cut to what the head uses.
        by_keys: whether to weigh an error in a query by the keys; False for an ablation.
    """
    kv_heads, heads = len(split.key_nope), len(split.query_nope)
    roots = [root(cost, floor=1e-8) if cost.numel() else (cost, cost) for cost in costs]
    square, inverse = (
        torch.stack([torch.block_diag(*pair) for pair in zip(*sides, strict=True)])
        for sides in zip(*roots, strict=True)
    )
    rows = torch.cat([split.key_nope, value], dim=1)
    kv = factorize(rows, square, inverse, cholesky, min(shape.latent, _rank(rows)))

    queries = torch.cat([split.query_nope, split.query_rope], dim=1)
    keys = torch.cat([split.key_nope, split.key_rope.expand(kv_heads, -1, -1)], dim=1) @ cholesky
    metric = keys @ keys.mT if by_keys else _unit(keys.shape[1], keys).expand(kv_heads, -1, -1)
    square, inverse = root(metric.repeat_interleave(heads // kv_heads, dim=0), floor=1e-8)
    return factorize(queries, square, inverse, cholesky, min(shape.q_lora_rank, _rank(queries))), kv


def fit_latents(
    head: DraftHead,
    calibration: Calibration,
    split: Split,
    value: Tensor,
    factors: tuple[Factor, Factor],
    gauges: Sequence[str] = ("white", "sphere"),
    *,
    refit: bool = True,
) -> tuple[Latents, tuple[Gauge, Gauge]]:
    """Choose the gauges, and fit the maps after the norms to their outputs.

    Args:
        value: `[kv_heads, v_dim, attn_in]`.
        factors: of the queries, and of keys and values.
        gauges: the choices, as in `fit_gauge`.
        refit: whether to fit the maps again (False for an ablation).
    """
    queries = torch.cat([split.query_nope, split.query_rope], dim=1)
    keys_values = torch.cat([split.key_nope, value], dim=1)
    wanted = [queries.flatten(0, 1), keys_values.flatten(0, 1)]
    found = _fit_gauges(head, calibration, factors, gauges)
    downs = [gauge.matrix @ factor.down for gauge, factor in zip(found, factors, strict=True)]
    ups = [torch.linalg.solve(gauge.matrix, own.up, left=False) for gauge, own in zip(found, factors, strict=True)]
    if refit:
        moments = [Moments(len(down), len(rows), down.device) for down, rows in zip(downs, wanted, strict=True)]
        for x in _inputs(head, calibration, "fit"):
            for own, down, rows in zip(moments, downs, wanted, strict=True):
                own.add(_normed(x, down, head.spec.eps), F.linear(x, rows))

        def unseen(down: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
            return ((_normed(x, down, head.spec.eps), F.linear(x, rows)) for x in _inputs(head, calibration, "choose"))

        ups = [
            choose(own, prior, unseen(down, rows), RIDGES)
            for own, prior, down, rows in zip(moments, ups, downs, wanted, strict=True)
        ]
    query_up, kv_up = ups[0].unflatten(0, queries.shape[:2]), ups[1].unflatten(0, keys_values.shape[:2])
    return Latents(downs[0], query_up, downs[1], kv_up), (found[0], found[1])


def _fit_gauges(
    head: DraftHead, calibration: Calibration, factors: tuple[Factor, Factor], kinds: Sequence[str]
) -> list[Gauge]:
    down = torch.cat([factor.down for factor in factors])

    def sample(part: Part) -> Sequence[Tensor]:
        rows = sum(batch.tokens.numel() for batch in calibration.part(part)) * STEPS
        every = -(-rows // SAMPLE)
        found = torch.cat([F.linear(x[::every], down) for x in _inputs(head, calibration, part)])
        return found.split([len(factor.down) for factor in factors], dim=1)

    return [fit_gauge(one, other, kinds) for one, other in zip(sample("fit"), sample("choose"), strict=True)]


def _inputs(head: DraftHead, calibration: Calibration, part: Part) -> Iterator[Tensor]:
    return (step.rows.to(DTYPE) for step in trace(head, calibration.part(part)))


def _normed(x: Tensor, down: Tensor, eps: float) -> Tensor:
    """Return a latent of rows `[N, attn_in]` after its norm, `[N, r]`."""
    return F.rms_norm(F.linear(x, down), (len(down),), None, eps)


def _rank(rows: Tensor) -> int:
    """Return the greatest rank that maps `[heads, dim, attn_in]` can have."""
    return min(rows.shape[2], rows.shape[0] * rows.shape[1])


def _unit(size: int, like: Tensor) -> Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device)


def _even(metric: Tensor, spread: Tensor) -> Tensor:
    """Scale a metric `[.., dim, dim]` so that all of `spread [kv_heads, dim, n]` measures 1 in it."""
    metric = metric.expand(len(spread), -1, -1)
    return metric / torch.einsum("gin,gij,gjn->", spread, metric, spread).clamp(min=1e-30)
