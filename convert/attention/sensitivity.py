"""What an error in a key or a value costs.

A latent with few entries must choose what to keep of keys and values, which have no common unit: an error in a key
changes where a head looks, one in a value what it sees. Both change the drafted distribution, and by how much the
Fisher information says: with g the gradient of `log q(y)`, y drawn from q itself, an error e costs about
`e^T E[g g^T] e / 2` nats. It also knows which directions of a value the rest of the head has no use for, which
o_proj alone does not tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...head.attention import ChainContext
from ...head.chain import along_chains
from ...head.forward import DraftHead
from .calibration import STEPS, Batch, in_pieces


@dataclass(frozen=True)
class Sensitivity:
    """Fisher information by kv head.

    Attributes:
        key: `[kv_heads, qk_dim, qk_dim]`, of keys as they are attended to: rotary dims turned.
        value: `[kv_heads, v_dim, v_dim]`.
    """

    key: Tensor
    value: Tensor


class _Leaves:
    """A chain's context that keeps each step's keys and values to ask for their gradients."""

    def __init__(self) -> None:
        self._inner = ChainContext()
        self.entries: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `head.attention.Context.attend`."""
        key, value = key.detach().requires_grad_(), value.detach().requires_grad_()
        self.entries.append((key, value))
        return self._inner.attend(layer, query, key, value, scale)


def measure_sensitivity(head: DraftHead, batches: Iterable[Batch], seed: int = 0) -> Sensitivity:
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
