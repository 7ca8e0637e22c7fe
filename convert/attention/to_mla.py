"""MHA or GQA to MLA.

1. Second moments of the attention's input, and how far back each head looks.
2. One rotary key for all heads (`rotary`), on each ladder (`ladder`); the one whose attention is nearest on rows that
   were not fitted is kept. It is near over the lengths of these texts, so they should be as long as what is served.
3. One latent for keys and values, and one for the queries, each with its norm (`fit_latents`).
4. o_proj, fitted to what the original gave (`refit`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...head.chain import unroll
from ...head.forward import DraftHead
from ...head.rope import rotary_dims
from ...head.spec import Gqa
from .assemble_mla import Shape, as_gqa, assemble_mla
from .calibration import Calibration, Part, in_pieces
from .fit_latents import Metric, factorize_both, fit_latents, measure_costs
from .ladder import Ladder, find_ladders
from .latent import Gauge
from .moments import Moments, factor
from .refit import refit_output
from .rotary import Options, Split, split_rotary
from .swap import Attention, attention_of, with_attention
from .trace import Distances, run_both, trace

# Dims whose part in any score is below this share of the greatest hold nothing: the zeros of a padded head.
DEAD = 1e-12


@dataclass(frozen=True)
class Choices:
    """What an ablation may switch off."""

    ladders: tuple[str, ...] = ("high", "stride")
    rotary: Options = field(default_factory=Options)
    gauges: tuple[str, ...] = ("white", "sphere")
    refit_latents: bool = True
    refit_output: bool = True
    metric: Metric = "fisher"


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
    """What is known of the attention before anything is fitted.

    Attributes:
        cholesky: L with `L L^T = E[x x^T]` over the fitted rows, `[attn_in, attn_in]`.
        distances: attention weight of each query head by distance, summed over queries of the first draft step on
            other rows, `[heads, T]`.
    """

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
    costs = measure_costs(trial, split, value, output, statistics.cholesky, calibration, choices.metric)
    factors = factorize_both(split, value, costs, shape, statistics.cholesky, by_keys=choices.metric != "none")
    latents, gauges = fit_latents(head, calibration, split, value, factors, choices.gauges, refit=choices.refit_latents)
    mla = assemble_mla(split, latents, output, ladder, dims.heads)
    if choices.refit_output:
        fitted = refit_output(head, with_attention(head, mla), calibration)
        mla = replace(mla, weights={**mla.weights, "0.o_proj": fitted})
    return mla, Found(name, errors, *gauges)


def gather(head: DraftHead, calibration: Calibration) -> Statistics:
    """Take the statistics: moments of the fitted rows, and distances on those that choose a ladder."""
    moments, distances = Moments(2 * head.spec.hidden, device=head.weights["fc"].device), Distances()
    for step in trace(head, calibration.part("fit")):
        moments.add(step.rows)
    with torch.no_grad():
        for piece in in_pieces(calibration.part("choose"), head.spec.draft_vocab):
            first = next(unroll(head, piece.tokens, piece.captured, 1))
            x = head.attention_input(first.tokens, first.hidden)
            head.attend(0, x, torch.arange(x.shape[1], device=x.device), distances)
    return Statistics(factor(moments.mean()), distances.weight)


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
