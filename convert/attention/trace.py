"""What a head's attention reads and gives along the drafting chain.

An Eagle3 head reads its own output from the second draft step on, so its attention's input is another one there
than at the first. Each step of a conversion is fitted on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...head.attention import CausalContext, ChainContext, Context, hide_future, repeat_heads, softmax
from ...head.chain import unroll
from ...head.forward import DraftHead
from .calibration import STEPS, Batch, in_pieces


@dataclass(frozen=True)
class Traced:
    """One draft step of some texts, as the attention sees it.

    Attributes:
        x: its input `[B, T', attn_in]`, normed.
        positions: `[T']`.
        is_first: whether it is the first step, whose entries all later ones see.
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
    """A chain's context that keeps what the heads gave at the last step, before o_proj: `[B, T', heads * v_dim]`."""

    def __init__(self) -> None:
        self._inner = ChainContext()
        self.heads = torch.empty(0)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `head.attention.Context.attend`."""
        output = self._inner.attend(layer, query, key, value, scale)
        self.heads = output.transpose(1, 2).flatten(2)
        return output


@dataclass(frozen=True)
class Pair:
    """What two attentions made of the same input: outputs `[N, hidden]`, and of the second's heads `[N, attn_out]`."""

    original: Tensor
    output: Tensor
    heads: Tensor


@torch.no_grad()
def run_both(original: DraftHead, other: DraftHead, batches: Iterable[Batch]) -> Iterator[Pair]:
    """Yield the attention outputs of a head and of its conversion, on the inputs that the first one sees."""
    contexts: tuple[Context, Watched] = ChainContext(), Watched()
    for step in trace(original, batches):
        if step.is_first:
            contexts = ChainContext(), Watched()
        one = original.attend(0, step.x, step.positions, contexts[0])
        two = other.attend(0, step.x, step.positions, contexts[1])
        yield Pair(one.flatten(0, 1), two.flatten(0, 1), contexts[1].heads.flatten(0, 1))


class Distances:
    """How far back each query head looks: attention weight by distance, summed over queries, `[heads, T]`."""

    def __init__(self) -> None:
        self.weight = torch.zeros(0, 0)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `head.attention.Context.attend`."""
        scores = hide_future(query @ repeat_heads(key, query).transpose(-1, -2) * scale)
        weights = softmax(scores).sum(0, dtype=torch.float64)
        length = weights.shape[-1]
        # Sheared so that what stands at one distance stands in one column.
        back = torch.arange(length, device=weights.device)[:, None] - torch.arange(length, device=weights.device)
        found = weights.new_zeros(weights.shape[0], length)
        found.index_add_(1, back.clamp(min=0).flatten(), weights.flatten(1))
        if self.weight.shape[-1] < length:
            grown = found.new_zeros(found.shape)
            grown[:, : self.weight.shape[-1]] = self.weight if self.weight.numel() else 0.0
            self.weight = grown
        self.weight[:, :length] += found
        return CausalContext().attend(layer, query, key, value, scale)
