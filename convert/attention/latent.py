"""A latent that many rows share.

Rows Y = W_Y x (the keys and values of all heads, or the queries) are to be written as B A x with few rows in A. The
best such pair in a metric S, that is the one with the least `E|S (Y - B A x)|^2`, follows from the top left singular
vectors U of `S W_Y L`, `L L^T = E[x x^T]`:  A = U^T S W_Y,  B = S^-1 U.

MLA normalises the latent, and the norm cannot be left out, nor given a constant to divide by (a bias of kv_a, which
engines drop). But before the norm the basis is free: any invertible T gives `T A` and `B T^-1`. A gauge T under which
|T c| is nearly the same for every token makes the norm nearly nothing. Whitening makes it so for a normal
distribution; from there, minimising `E(|T c|^2 / r - 1)^2` makes it so for this one. B is then fitted once more, to
the latent as it is after the norm.

Such a T is nearly singular: it makes directions that few tokens have much of hundreds of times smaller than others
(15 of 128 more than tenfold, in the queries of a small trained head), and B T^-1 makes them as large again. What the
latent is rounded to in bf16 must therefore not come from one entry into another. |T c| leaves T free up to a rotation:
in the one where T is a diagonal behind a rotation of the white latent, each direction is an entry, rounded to its own
size, and T costs nothing. Left as the minimum was found, it can cost a tenth of the acceptance ("In bf16" in
docs/attention.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .moments import root

# Up to here a whole factorization costs less than it is worth to avoid.
WHOLE = 2048
OVERSAMPLED, POWER = 32, 3
GAUGE_STEPS, GAUGE_RATE, GAUGE_BATCH = 400, 3e-3, 4096


@dataclass(frozen=True)
class Factor:
    """Rows as `up @ down`: `[m, r]` and `[r, attn_in]`."""

    down: Tensor
    up: Tensor


def factorize(rows: Tensor, metric: Tensor, inverse: Tensor, cholesky: Tensor, rank: int) -> Factor:
    """Return the rank-r factor that is nearest in a block-diagonal metric.

    Args:
        rows: `[blocks, dim, attn_in]`.
        metric: S, `[blocks, dim, dim]`.
        inverse: of S.
        cholesky: L, `[attn_in, attn_in]`.
        rank: r.
    """
    weighted = metric @ rows
    spread = (weighted @ cholesky).flatten(0, 1)
    left = _top_left(spread, rank)
    up = inverse @ left.unflatten(0, rows.shape[:2])
    return Factor(left.T @ weighted.flatten(0, 1), up.flatten(0, 1))


def _top_left(matrix: Tensor, rank: int) -> Tensor:
    """Return the top left singular vectors `[m, r]`."""
    if min(matrix.shape) <= WHOLE:
        return torch.linalg.svd(matrix, full_matrices=False).U[:, :rank]
    with torch.random.fork_rng(devices=[matrix.device] if matrix.is_cuda else []):
        torch.manual_seed(0)
        return torch.svd_lowrank(matrix, q=rank + OVERSAMPLED, niter=POWER)[0][:, :rank]


@dataclass(frozen=True)
class Gauge:
    """A basis T of a latent, `[r, r]`, and how much the length still varies on rows it was not fitted on.

    Attributes:
        matrix: T; under it the mean square of a latent's entries is 1 on average.
        variation: standard deviation of rms(T c), relative to its mean.
        before: the same without T.
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
        latents: a sample to fit on, `[N, r]`.
        unseen: another, which decides.
        kinds: what to choose from; "none" leaves the basis as it is but for its mean length.
    """
    # In the white basis each direction counts the same, and one learning rate serves them all.
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
    """Minimise `E(|T c|^2 / r - 1)^2` over T, from the identity; T comes as a diagonal times a rotation."""
    generator = torch.Generator(white.device).manual_seed(0)
    matrix = torch.eye(white.shape[1], dtype=white.dtype, device=white.device, requires_grad=True)
    optimizer = torch.optim.Adam([matrix], lr=GAUGE_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, GAUGE_STEPS)
    for _ in range(GAUGE_STEPS):
        count = min(GAUGE_BATCH, len(white))
        chosen = torch.randint(len(white), (count,), generator=generator, device=white.device)
        lengths = F.linear(white[chosen], matrix).square().mean(dim=-1)
        # Relative to the batch's own mean: only the variation is to be lost, the mean is set afterwards.
        (lengths / lengths.mean() - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    _, sizes, directions = torch.linalg.svd(matrix.detach())
    return sizes[:, None] * directions
