"""The inputs and outputs of a head's attention along the drafting chain.

An Eagle3 head reads its own output from the second draft step on, so its attention's input differs from the first
step's. Each step of a conversion is fitted on all draft steps.
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
from ..drafters.chain import unroll
from ..drafters.forward import DraftHead
from .batches import STEPS, StatesBatch, in_pieces


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
def trace(head: DraftHead, batches: Iterable[StatesBatch]) -> Iterator[Traced]:
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
def run_both(original: DraftHead, other: DraftHead, batches: Iterable[StatesBatch]) -> Iterator[Pair]:
    """Yield the attention outputs of a head and of its conversion, on the first one's inputs."""
    contexts: tuple[Context, Watched] = ChainContext(), Watched()
    for step in trace(original, batches):
        if step.is_first:
            contexts = ChainContext(), Watched()
        one = original.attend(0, step.x, step.positions, contexts[0])
        two = other.attend(0, step.x, step.positions, contexts[1])
        yield Pair(one.flatten(0, 1), two.flatten(0, 1), contexts[1].heads.flatten(0, 1))
