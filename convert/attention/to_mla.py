"""MHA or GQA to MLA.

1. Second moments of the attention's input, and how far back each head looks.
2. One rotary key for all heads (`rotary`), on each ladder; the one with the nearest attention on rows outside the fit
   is kept. It is near over the lengths of these texts, so they should be as long as those in serving.
3. One latent for keys and values, and one for the queries, each with its norm (`latents`).
4. o_proj, fitted to the original's output (`refit_output`).

Assembling MLA from its parts.

Engines build their kernels for Kimi-K2's own latent (512) and rotary dims (64), so a smaller latent is padded with
zeros. RMSNorm then divides by the mean over 512 entries instead of r: the rows of kv_a_proj grow by sqrt(512 / r) and
the gain shrinks by the same factor, which leaves the norm's output unchanged, including its epsilon. Added rotary pairs
hold zeros, after a ladder with the same frequencies (`lengthen`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...drafters.attention import CausalContext, hide_future, repeat_heads, softmax
from ...drafters.chain import unroll
from ...drafters.forward import DraftHead
from ...drafters.rope import partial_factor, rotary_dims
from ...drafters.spec import Gqa, Mla, Rope
from ...drafters.yarn import cos_sin_factor, softmax_scale
from ...measure.batches import Calibration, Part, in_pieces
from ...measure.trace import run_both, trace
from .latents import Gauge, Metric, factorize_both, fit_latents, measure_costs
from .moments import Moments, factor, refit_output
from .rotary import Ladder, Options, Split, find_ladders, lengthen, split_rotary
from .swap import Attention, Latents, Shape, attention_of, with_attention


def assemble_mla(split: Split, latents: Latents, output: Tensor, ladder: Ladder, heads: int) -> Attention:
    """Return the MLA with these parts; `output` is o_proj, `[hidden, heads, v_head_dim]`."""
    nope, rotary, v_dim = split.key_nope.shape[1], len(split.key_rope), output.shape[2]
    dims = Mla(heads, len(latents.query_down), len(latents.kv_down), nope, rotary, v_dim)
    scale = 1 / softmax_scale(ladder.rope, dims)
    by_dim = output.new_full((nope + rotary, 1), scale)
    by_dim[nope:] /= cos_sin_factor(ladder.rope, dims) ** 2
    group = heads // len(latents.kv_up)
    return Attention(
        dims,
        ladder.rope,
        {
            "0.q_a_proj": latents.query_down,
            "0.q_a_layernorm": output.new_ones(dims.q_lora_rank),
            "0.q_b_proj": (latents.query_up * by_dim).flatten(0, 1),
            "0.kv_a_proj_with_mqa": torch.cat([latents.kv_down, split.key_rope]),
            "0.kv_a_layernorm": output.new_ones(dims.kv_lora_rank),
            "0.kv_b_proj": latents.kv_up.repeat_interleave(group, dim=0).flatten(0, 1),
            "0.o_proj": output.flatten(1, 2),
        },
    )


def as_gqa(split: Split, value: Tensor, output: Tensor, ladder: Ladder) -> Attention:
    """Return the same attention before its rank is cut, as a GQA with extra dims, to measure what RoPE costs.

    `value` is `[kv_heads, v_dim, attn_in]`, and `output` is `[hidden, heads, v_dim]`.
    """
    kv_heads, heads = len(split.key_nope), len(split.query_nope)
    rotary, nope = len(split.key_rope), split.key_nope.shape[1]
    head_dim = max(rotary + nope, value.shape[1])
    dims = Gqa(heads, kv_heads, head_dim)
    rope: Rope = replace(ladder.rope, partial_rotary_factor=partial_factor(rotary, head_dim))
    halves = torch.cat([torch.arange(0, rotary, 2), torch.arange(1, rotary, 2)])
    query = torch.cat([split.query_rope[:, halves] / cos_sin_factor(rope, dims) ** 2, split.query_nope], dim=1)
    key = torch.cat([split.key_rope[halves].expand(kv_heads, -1, -1), split.key_nope], dim=1)

    def pad(rows: Tensor) -> Tensor:
        zeros = rows.new_zeros(rows.shape[0], head_dim - rows.shape[1], rows.shape[2])
        return torch.cat([rows, zeros], dim=1).flatten(0, 1)

    return Attention(
        dims,
        rope,
        {
            "0.q_proj": pad(query / softmax_scale(rope, dims)),
            "0.k_proj": pad(key),
            "0.v_proj": pad(value),
            "0.o_proj": pad(output.permute(1, 2, 0)).T.contiguous(),
        },
    )


def pad_mla(mla: Attention, shape: Shape) -> Attention:
    """Return an equivalent MLA with its latent and rotary dims padded with zeros to an engine's dims.

    The softmax scale depends on the number of dims, so the queries take up the quotient.
    """
    dims = mla.dims
    assert isinstance(dims, Mla)
    wide = replace(dims, kv_lora_rank=shape.kv_lora_rank, qk_rope_head_dim=shape.qk_rope_head_dim)
    more_latent, more_rope = wide.kv_lora_rank - dims.kv_lora_rank, wide.qk_rope_head_dim - dims.qk_rope_head_dim
    rope = lengthen(mla.rope, dims.qk_rope_head_dim // 2, wide.qk_rope_head_dim // 2)
    weights = dict(mla.weights)
    growth = (wide.kv_lora_rank / dims.kv_lora_rank) ** 0.5

    query = weights["0.q_b_proj"].unflatten(0, (dims.heads, -1)) * (
        softmax_scale(mla.rope, dims) / softmax_scale(rope, wide)
    )
    weights["0.q_b_proj"] = _more(query, more_rope, dim=1).flatten(0, 1)
    down, key_rope = weights["0.kv_a_proj_with_mqa"].split([dims.kv_lora_rank, dims.qk_rope_head_dim])
    weights["0.kv_a_proj_with_mqa"] = torch.cat([_more(down * growth, more_latent), _more(key_rope, more_rope)])
    gain = weights["0.kv_a_layernorm"] / growth
    weights["0.kv_a_layernorm"] = torch.cat([gain, gain.new_ones(more_latent)])
    weights["0.kv_b_proj"] = _more(weights["0.kv_b_proj"], more_latent, dim=1)
    return Attention(wide, rope, weights)


def _more(rows: Tensor, count: int, dim: int = 0) -> Tensor:
    shape = list(rows.shape)
    shape[dim] = count
    return torch.cat([rows, rows.new_zeros(shape)], dim=dim)


# Dims whose part in every score is below this share of the greatest hold nothing, like the zeros of a padded head.
DEAD = 1e-12


class Distances:
    """How far back each query head looks: attention weight by distance, summed over queries, `[heads, T]`."""

    def __init__(self) -> None:
        self.weight = torch.zeros(0, 0)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        scores = hide_future(query @ repeat_heads(key, query).transpose(-1, -2) * scale)
        weights = softmax(scores).sum(0, dtype=torch.float64)
        length = weights.shape[-1]
        # Sheared so that each column holds one distance.
        back = torch.arange(length, device=weights.device)[:, None] - torch.arange(length, device=weights.device)
        found = weights.new_zeros(weights.shape[0], length)
        found.index_add_(1, back.clamp(min=0).flatten(), weights.flatten(1))
        if self.weight.shape[-1] < length:
            grown = found.new_zeros(found.shape)
            grown[:, : self.weight.shape[-1]] = self.weight if self.weight.numel() else 0.0
            self.weight = grown
        self.weight[:, :length] += found
        return CausalContext().attend(layer, query, key, value, scale)


@dataclass(frozen=True)
class Choices:
    """Options that an ablation may turn off."""

    ladders: tuple[str, ...] = ("high", "stride")
    rotary: Options = field(default_factory=Options)
    gauges: tuple[str, ...] = ("white", "sphere")
    refit_latents: bool = True
    refit_output: bool = True
    metric: Metric = "fisher"


@dataclass(frozen=True)
class Found:
    """Choices and measurements of a fit.

    Attributes:
        ladder: its name.
        ladder_errors: relative error of the attention's output by ladder, before the rank is cut.
        query_gauge, kv_gauge: how much the latents' lengths still vary.
    """

    ladder: str
    ladder_errors: dict[str, float]
    query_gauge: Gauge
    kv_gauge: Gauge


@dataclass(frozen=True)
class Statistics:
    """Statistics of the attention before the fit.

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
    """Return a one-layer GQA head's attention as MLA, not yet padded to an engine's dims, and the choices made.

    The shape's `latent`, `rotary` and `q_lora_rank` are cut to what the head uses.
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
    """Compute the statistics: moments of the fitted rows, and distances on the rows that choose a ladder."""
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
    """Return the relative error of another head's attention output on the original's inputs."""
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
    """Remove the dims that affect no score."""
    part = (split.key_nope @ cholesky).square().sum(-1).amax(0) * (split.query_nope @ cholesky).square().sum(-1).amax(0)
    live = part > DEAD * (part.max() + (split.key_rope @ cholesky).square().sum(-1).max())
    return replace(split, key_nope=split.key_nope[:, live], query_nope=split.query_nope[:, live])
