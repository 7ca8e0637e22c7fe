"""The two latents of an MLA head, fitted to states.

1. What an error in a key or a value costs (`sensitivity`), and in a query: what the keys make of it.
2. One latent for keys and values and one for the queries, each the best of its rank in that metric (`latent`).
3. A gauge for each norm, and the maps behind the norms fitted again, to what they are to give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...head.forward import DraftHead
from .assemble_mla import Latents, Shape
from .calibration import STEPS, Calibration, Part
from .latent import Factor, Gauge, factorize, fit_gauge
from .moments import DTYPE, Moments, root
from .refit import RIDGES, choose
from .rotary import Split
from .sensitivity import measure_sensitivity
from .trace import trace

Metric = Literal["fisher", "output", "none"]
# Rows that a gauge is fitted on, and as many that decide; more are thinned out.
SAMPLE = 65536
# Batches that the Fisher information is taken over: blocks of a few dozen dims need no more.
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
    """Return by kv head what an error in its keys and in its values costs.

    Args:
        trial: the head as a GQA with one rotary key, its rank not cut (`assemble_mla.as_gqa`).
        split: the same attention's keys and queries.
        value: `[kv_heads, v_dim, attn_in]`.
        output: `[hidden, heads, v_dim]`.
        cholesky: L with `L L^T = E[x x^T]`, `[attn_in, attn_in]`.
        calibration: whose fitted part is drafted on.
        metric: "fisher", what it costs the drafts; "output" and "none" for ablations.

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
    # Keys and values count the same as a whole: these errors have no common unit.
    return _even(keys, split.key_nope @ cholesky), _even(values, value @ cholesky)


def factorize_both(
    split: Split, value: Tensor, costs: tuple[Tensor, Tensor], shape: Shape, cholesky: Tensor, *, by_keys: bool = True
) -> tuple[Factor, Factor]:
    """Return the factors of the queries, and of keys and values.

    Args:
        split: keys and queries.
        value: `[kv_heads, v_dim, attn_in]`.
        costs: as `measure_costs` gives them.
        shape: its `latent` and `q_lora_rank` are cut to what the head has use for.
        cholesky: L with `L L^T = E[x x^T]`.
        by_keys: weigh an error in a query by the keys; for an ablation, not.
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
    """Choose the gauges, and fit the maps behind the norms to what is to come out of them.

    Args:
        head: the head that is converted.
        calibration: states of its target.
        split: keys and queries.
        value: `[kv_heads, v_dim, attn_in]`.
        factors: of the queries, and of keys and values.
        gauges: to choose from, as `latent.fit_gauge`.
        refit: whether the maps are fitted again (an ablation).
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
    """Return a gauge for each latent."""
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
    """Return a latent of rows `[N, attn_in]` behind its norm, `[N, r]`."""
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
