"""Compare two heads along the drafting chain: the inputs and outputs of their attention, and their acceptance.

The inputs and outputs of a head's attention along the drafting chain.

An Eagle3 head reads its own output from the second draft step on, so its attention's input differs from the first
step's. Each step of a conversion is fitted on all draft steps.

A converted head compared with the original, on text that neither the fit nor healing saw.

Sampled acceptance is the sum of min(p, q), in expectation over every position (`drafters.chain`). The two heads are
compared position by position, and the standard error is that of the mean over sequences, since adjacent positions share
their text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..drafters.attention import ChainContext, Context
from ..drafters.chain import lengths, overlap_at, served_shares, unroll
from ..drafters.forward import DraftHead
from .batches import STEPS, Batch, Calibration, in_pieces
from .retention import Retention


class WatchedInputs(TorchFunctionMode):
    """Calls a function with the input of each of some weights, and computes with what it returns.

    Args:
        weights: by slot; exactly the tensors that are multiplied.
        see: called with a slot and its input `[..., in]`; returns the input to use instead.
    """

    def __init__(self, weights: Mapping[str, Tensor], see: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__()
        self._slots = {id(weight): slot for slot, weight in weights.items()}
        self._weights, self._see = weights, see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and (slot := self._slots.get(id(args[1]))) is not None:
            args = (self._see(slot, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Traced:
    """One draft step of some texts, as the attention sees it.

    Attributes:
        x: its input `[B, T', attn_in]`, normed.
        positions: `[T']`.
        is_first: whether it is the first step, whose entries all later steps see.
    """

    x: Tensor
    positions: Tensor
    is_first: bool

    @property
    def rows(self) -> Tensor:
        """The input as rows, `[B * T', attn_in]`."""
        return self.x.flatten(0, 1)


@torch.no_grad()
def trace(head: DraftHead, batches: Iterable[Batch]) -> Iterator[Traced]:
    """Yield each draft step of each piece of each batch, fed with the head's own hidden states."""
    for piece in in_pieces(batches, head.spec.draft_vocab):
        for k, step in enumerate(unroll(head, piece.tokens, piece.captured, STEPS)):
            x = head.attention_input(step.tokens, step.hidden)
            yield Traced(x, torch.arange(x.shape[1], device=x.device) + k, k == 0)


class Watched:
    """A chain's context that keeps the heads' outputs of the last step, before o_proj: `[B, T', heads * v_dim]`."""

    def __init__(self) -> None:
        self._inner = ChainContext()
        self.heads = torch.empty(0)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `drafters.attention.Context.attend`."""
        output = self._inner.attend(layer, query, key, value, scale)
        self.heads = output.transpose(1, 2).flatten(2)
        return output


@dataclass(frozen=True)
class Pair:
    """Outputs of two attentions for the same input: `[N, hidden]` each, and of the second's heads `[N, attn_out]`."""

    original: Tensor
    output: Tensor
    heads: Tensor


@torch.no_grad()
def run_both(original: DraftHead, other: DraftHead, batches: Iterable[Batch]) -> Iterator[Pair]:
    """Yield the attention outputs of a head and of its conversion, on the first one's inputs."""
    contexts: tuple[Context, Watched] = ChainContext(), Watched()
    for step in trace(original, batches):
        if step.is_first:
            contexts = ChainContext(), Watched()
        one = original.attend(0, step.x, step.positions, contexts[0])
        two = other.attend(0, step.x, step.positions, contexts[1])
        yield Pair(one.flatten(0, 1), two.flatten(0, 1), contexts[1].heads.flatten(0, 1))


@torch.no_grad()
def compare(
    original: DraftHead, converted: DraftHead, calibration: Calibration, batches: Iterable[Batch] | None = None
) -> Retention:
    """Measure both heads on the held-out part of a calibration, or on the given batches."""
    batches = calibration.part("held-out") if batches is None else batches
    context, lost, whole = 0, 0.0, 0.0
    one, two, greedy_one, greedy_two = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    kl = torch.zeros(STEPS, dtype=torch.float64, device=calibration.lm_head.device)
    for piece in in_pieces(batches, original.spec.vocab):
        for ran in run_both(original, converted, [piece]):
            lost += float((ran.output - ran.original).double().square().sum())
            whole += float(ran.original.double().square().sum())
        context = max(context, piece.tokens.shape[1])
        likeliest, shares = _served(calibration.logits(piece), original.target_ids)
        ours, theirs, apart = list[Tensor](), list[Tensor](), list[Tensor]()
        our_hits, their_hits = list[Tensor](), list[Tensor]()
        drafts = (unroll(head, piece.tokens, piece.captured, STEPS) for head in (original, converted))
        # Step by step: over a large vocabulary one step's logits take gigabytes.
        for k, (own, other) in enumerate(zip(*drafts, strict=True), start=1):
            p, q = own.logits.float().log_softmax(-1), other.logits.float().log_softmax(-1)
            chance = p.exp()
            ours.append(overlap_at(shares, k, chance))
            theirs.append(overlap_at(shares, k, q.exp()))
            # KL(original || converted), in place: each of these takes gigabytes over a large vocabulary.
            apart.append(chance.mul_(p.sub_(q)).sum(-1))
            wanted = likeliest[:, k : k + p.shape[1]]
            our_hits.append((original.target_ids[own.logits.argmax(-1)] == wanted).double())
            their_hits.append((converted.target_ids[other.logits.argmax(-1)] == wanted).double())
        greedy_one.extend(lengths(torch.stack(our_hits)))
        greedy_two.extend(lengths(torch.stack(their_hits)))
        one.extend(lengths(torch.stack(ours)).double())
        two.extend(lengths(torch.stack(theirs)).double())
        kl += torch.stack(apart).double().sum((1, 2))
    places = sum(len(row) for row in one)
    before, after, error = _ratio(one, two)
    greedy_before, greedy_after, greedy_error = _ratio(greedy_one, greedy_two)
    return Retention(
        sequences=len(one),
        positions=places,
        context=context,
        steps=STEPS,
        before=before,
        after=after,
        kept=after / before,
        kept_error=error,
        kl=tuple((kl / places).tolist()),
        attention_error=(lost / whole) ** 0.5,
        greedy_before=greedy_before,
        greedy_after=greedy_after,
        greedy_kept=greedy_after / greedy_before,
        greedy_kept_error=greedy_error,
    )


def _served(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's likeliest tokens, and its probabilities of the draft tokens; nothing keeps its logits."""
    return logits.argmax(-1), served_shares(logits, ids)


def _ratio(one: list[Tensor], two: list[Tensor]) -> tuple[float, float, float]:
    """Return both means over all positions of all sequences, and the paired standard error of their ratio."""
    places = sum(len(row) for row in one)
    before, after = (float(torch.cat(rows).mean()) for rows in (one, two))
    # For a ratio of means, the error is that of the mean of the sequences' deviations from it.
    off = torch.stack([(b - after / before * a).sum() for a, b in zip(one, two, strict=True)])
    error = float(off.std() * len(off) ** 0.5 / (places * before)) if len(off) > 1 else float("nan")
    return before, after, error
