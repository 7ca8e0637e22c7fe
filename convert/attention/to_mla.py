"""MHA or GQA to MLA. What belongs here: the order of the steps.

1. A pass over the fitted rows: second moments of the attention's input, and how far back each head looks.
2. One rotary key for all heads (`rotary`), on each ladder (`ladder`); the one whose attention is nearest on rows that
   were not fitted is kept. It is near over the lengths of these texts, so they should be as long as what is served.
3. One latent for keys and values, in the metric of what an error in them costs (`sensitivity`), and one for the
   queries, weighed by the keys (`latent`).
4. A gauge for each norm, and the maps behind the norms fitted again (`latent`).
5. o_proj, fitted to what the original gave (`refit`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...head.chain import unroll
from ...head.forward import DraftHead
from ...head.rope import rotary_dims
from ...head.spec import Gqa
from .assemble_mla import Latents, Shape, as_gqa, assemble_mla
from .calibration import Calibration, Part
from .ladder import Ladder, find_ladders
from .latent import Factor, Gauge, factorize, fit_gauge
from .moments import Moments, factor, root
from .refit import RIDGES, choose, refit_output
from .rotary import Options, Split, split_rotary
from .sensitivity import measure_sensitivity
from .swap import Attention, attention_of, with_attention
from .trace import Distances, run_both, trace

# Dims whose part in any score is below this share of the greatest hold nothing: the zeros of a padded head.
DEAD = 1e-12
# Rows that a gauge is fitted on; more are thinned out.
SAMPLE = 65536
# Batches that the Fisher information is taken over: blocks of a few dozen dims need no more.
FISHER_BATCHES = 24


@dataclass(frozen=True)
class Choices:
    """What an ablation may switch off."""

    ladders: tuple[str, ...] = ("high", "stride")
    rotary: Options = field(default_factory=Options)
    gauges: tuple[str, ...] = ("white", "sphere")
    refit_latents: bool = True
    refit_output: bool = True
    metric: Literal["fisher", "output", "none"] = "fisher"


@dataclass(frozen=True)
class Found:
    """What was chosen and measured on the way.

    Attributes:
        ladder: its name.
        ladder_errors: relative error of the attention's output by ladder, before the rank is cut.
        query_gauge, kv_gauge: how much the lengths of the latents still vary.
    """

    ladder: str
    ladder_errors: dict[str, float]
    query_gauge: Gauge
    kv_gauge: Gauge


@dataclass(frozen=True)
class Statistics:
    """What one pass over the fitted rows leaves: L with `L L^T = E[x x^T]`, and attention weight by distance."""

    cholesky: Tensor
    distances: Tensor


def convert_to_mla(
    head: DraftHead, calibration: Calibration, shape: Shape, choices: Choices | None = None
) -> tuple[Attention, Found]:
    """Return a GQA head's attention as MLA, not yet filled up to an engine's dims, and what was found on the way.

    Args:
        head: of one layer.
        calibration: states of its target.
        shape: the dims to make; `latent`, `rotary` and `q_lora_rank` are cut to what the head has use for.
        choices: for ablations.
    """
    choices = choices or Choices()
    gqa, dims = attention_of(head), head.spec.attention
    assert isinstance(dims, Gqa)
    value, output = _live_values(gqa, dims)
    statistics = gather(head, calibration)
    pairs = rotary_dims(dims, gqa.rope) // 2
    splits: dict[str, tuple[Ladder, Split]] = {}
    errors: dict[str, float] = {}
    for ladder in find_ladders(gqa.rope, pairs, shape.rotary // 2):
        if ladder.name in choices.ladders:
            split = split_rotary(gqa, ladder, statistics.cholesky, statistics.distances, choices.rotary)
            split = _live_keys(split, statistics.cholesky)
            splits[ladder.name] = ladder, split
            trial = with_attention(head, as_gqa(split, value, output, ladder))
            errors[ladder.name] = attention_error(head, trial, calibration, "choose")
    name = min(errors, key=lambda ladder: errors[ladder])
    ladder, split = splits[name]
    trial = with_attention(head, as_gqa(split, value, output, ladder))
    metrics = _metrics(trial, split, value, output, statistics.cholesky, calibration, choices)
    kv, query = _factorize(split, value, metrics, shape, statistics.cholesky, choices)
    latents, gauges = _fit_latents(head, calibration, split, value, kv, query, choices)
    mla = assemble_mla(split, latents, output, ladder, dims.heads)
    if choices.refit_output:
        fitted = refit_output(head, with_attention(head, mla), calibration)
        mla = replace(mla, weights={**mla.weights, "0.o_proj": fitted})
    return mla, Found(name, errors, *gauges)


def gather(head: DraftHead, calibration: Calibration) -> Statistics:
    """Take the statistics of the fitted rows."""
    moments, distances = Moments(2 * head.spec.hidden, device=head.weights["fc"].device), Distances()
    for step in trace(head, calibration.part("fit")):
        moments.add(step.rows)
    with torch.no_grad():
        for batch in calibration.part("choose"):
            first = next(unroll(head, batch.tokens, batch.captured, 1))
            x = head.attention_input(first.tokens, first.hidden)
            head.attend(0, x, torch.arange(x.shape[1], device=x.device), distances)
    return Statistics(factor(moments.mean()), distances.weight.to(moments.xx.dtype))


def attention_error(original: DraftHead, other: DraftHead, calibration: Calibration, part: Part) -> float:
    """Return the relative error of another head's attention output on the inputs that the original sees."""
    apart = whole = 0.0
    for pair in run_both(original, other, calibration.part(part)):
        apart += float((pair.output - pair.original).double().square().sum())
        whole += float(pair.original.double().square().sum())
    return (apart / whole) ** 0.5


def _live_values(gqa: Attention, dims: Gqa) -> tuple[Tensor, Tensor]:
    """Return v `[kv_heads, v_dim, attn_in]` and o `[hidden, heads, v_dim]` without the dims that are zero."""
    value = gqa.weights["0.v_proj"].unflatten(0, (dims.kv_heads, dims.head_dim))
    output = gqa.weights["0.o_proj"].unflatten(1, (dims.heads, dims.head_dim))
    live = (value.abs().amax((0, 2)) > 0) & (output.abs().amax((0, 1)) > 0)
    return value[:, live], output[:, :, live]


def _live_keys(split: Split, cholesky: Tensor) -> Split:
    """Leave out the dims that have no part in any score."""
    part = (split.key_nope @ cholesky).square().sum(-1).amax(0) * (split.query_nope @ cholesky).square().sum(-1).amax(0)
    live = part > DEAD * (part.max() + (split.key_rope @ cholesky).square().sum(-1).max())
    return replace(split, key_nope=split.key_nope[:, live], query_nope=split.query_nope[:, live])


def _metrics(
    trial: DraftHead,
    split: Split,
    value: Tensor,
    output: Tensor,
    cholesky: Tensor,
    calibration: Calibration,
    choices: Choices,
) -> tuple[Tensor, Tensor]:
    """Return by kv head what an error in its keys and values costs, `[kv_heads, nope, nope]` and `[.., v, v]`."""
    kv_heads, nope, rotary = len(split.key_nope), split.key_nope.shape[1], len(split.key_rope)
    if choices.metric == "fisher":
        batches = islice(calibration.part("fit"), FISHER_BATCHES)
        found = measure_sensitivity(trial, batches)
        own = slice(rotary, rotary + nope)
        dtype = cholesky.dtype
        return found.key[:, own, own].to(dtype), found.value[:, : value.shape[1], : value.shape[1]].to(dtype)
    asked = (split.query_nope @ cholesky).unflatten(0, (kv_heads, -1))
    read = output.permute(1, 2, 0).unflatten(0, (kv_heads, -1))
    metrics = [torch.einsum("ghin,ghjn->gij", rows, rows) for rows in (asked, read)]
    if choices.metric == "none":
        metrics = [torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device).expand_as(rows) for rows in metrics]
    # Keys and values count the same as a whole: these errors have no common unit.
    return tuple(
        metric / torch.einsum("gin,gij,gjn->", rows @ cholesky, metric, rows @ cholesky).clamp(min=1e-30)
        for metric, rows in zip(metrics, (split.key_nope, value), strict=True)
    )  # pyright: ignore[reportReturnType]


def _factorize(
    split: Split, value: Tensor, metrics: tuple[Tensor, Tensor], shape: Shape, cholesky: Tensor, choices: Choices
) -> tuple[Factor, Factor]:
    """Return the factors of keys and values, and of the queries."""
    kv_heads, heads = len(split.key_nope), len(split.query_nope)
    nope, v_dim = split.key_nope.shape[1], value.shape[1]
    roots = [root(metric, floor=1e-8) if metric.numel() else (metric, metric) for metric in metrics]
    square, inverse = (
        torch.stack([torch.block_diag(*pair) for pair in zip(*sides, strict=True)])
        for sides in zip(*roots, strict=True)
    )
    rows = torch.cat([split.key_nope, value], dim=1)
    limit = min(rows.shape[2], kv_heads * (nope + v_dim))
    kv = factorize(rows, square, inverse, cholesky, min(shape.latent, limit))

    queries = torch.cat([split.query_nope, split.query_rope], dim=1)
    keys = torch.cat([split.key_nope, split.key_rope.expand(kv_heads, -1, -1)], dim=1) @ cholesky
    metric = (keys @ keys.mT).repeat_interleave(heads // kv_heads, dim=0)
    if choices.metric == "none":
        metric = torch.eye(metric.shape[1], dtype=metric.dtype, device=metric.device).expand_as(metric)
    limit = min(queries.shape[2], heads * queries.shape[1])
    query = factorize(queries, *root(metric, floor=1e-8), cholesky, min(shape.q_lora_rank, limit))
    return kv, query


def _fit_latents(
    head: DraftHead,
    calibration: Calibration,
    split: Split,
    value: Tensor,
    kv: Factor,
    query: Factor,
    choices: Choices,
) -> tuple[Latents, tuple[Gauge, Gauge]]:
    """Choose the gauges, and fit the maps behind the norms to what is to come out of them."""
    dtype = kv.down.dtype
    queries = torch.cat([split.query_nope, split.query_rope], dim=1)
    keys_values = torch.cat([split.key_nope, value], dim=1)
    ranks = [len(query.down), len(kv.down)]
    down = torch.cat([query.down, kv.down])
    rows = sum(b.tokens.numel() for b in calibration.part("fit")) * 3
    every = -(-rows // SAMPLE)
    sample = torch.cat([F.linear(x[::every].to(dtype), down) for x in _inputs(head, calibration, "fit")])
    unseen = torch.cat([F.linear(x.to(dtype), down) for x in _inputs(head, calibration, "choose")])
    gauges = [
        fit_gauge(one, other, choices.gauges)
        for one, other in zip(sample.split(ranks, 1), unseen.split(ranks, 1), strict=True)
    ]
    downs = [gauge.matrix @ own for gauge, own in zip(gauges, (query.down, kv.down), strict=True)]
    priors = [
        torch.linalg.solve(gauge.matrix, own.up, left=False) for gauge, own in zip(gauges, (query, kv), strict=True)
    ]
    wanted = [queries.flatten(0, 1), keys_values.flatten(0, 1)]
    ups = priors
    if choices.refit_latents:
        moments = [Moments(rank, len(rows), down.device) for rank, rows in zip(ranks, wanted, strict=True)]
        for x in _inputs(head, calibration, "fit"):
            for own, (normed, result) in zip(moments, _normed(x.to(dtype), downs, wanted, head), strict=True):
                own.add(normed, result)
        held = [_normed(x.to(dtype), downs, wanted, head) for x in _inputs(head, calibration, "choose")]
        ups = [
            choose(own, prior, [batch[i] for batch in held], RIDGES)
            for i, (own, prior) in enumerate(zip(moments, priors, strict=True))
        ]
    latents = Latents(
        downs[0], ups[0].unflatten(0, queries.shape[:2]), downs[1], ups[1].unflatten(0, keys_values.shape[:2])
    )
    return latents, (gauges[0], gauges[1])


def _inputs(head: DraftHead, calibration: Calibration, part: Part) -> Iterator[Tensor]:
    return (step.rows for step in trace(head, calibration.part(part)))


def _normed(x: Tensor, downs: list[Tensor], wanted: list[Tensor], head: DraftHead) -> list[tuple[Tensor, Tensor]]:
    """Return each latent behind its norm, and what should be made of it."""
    return [
        (F.rms_norm(F.linear(x, down), (len(down),), None, head.spec.eps), F.linear(x, rows))
        for down, rows in zip(downs, wanted, strict=True)
    ]
