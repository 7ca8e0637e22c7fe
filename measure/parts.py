"""Where two heads differ: the error of each part of the first draft step.

Each part of both heads gets the source's own input at that point, so an error shows where it arises and not in
everything after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..drafters.attention import CausalContext, rms_norm
from ..drafters.forward import DraftHead
from .figures import PartFigures, TextKind

PARTS = ("fc", "norms", "attention", "mlp", "lm_head")


@dataclass
class Parts:
    """Errors collected over batches.

    Attributes:
        source, output: the two heads, of one hidden size and number of layers.
        stored: the layers whose outputs the states hold, including the heads' own.
    """

    source: DraftHead
    output: DraftHead
    stored: tuple[int, ...]
    _sums: dict[str, list[float]] = field(default_factory=dict)

    @property
    def comparable(self) -> bool:
        """Whether both heads' parts read and return the same widths."""
        a, b = self.source.spec, self.output.spec
        return (a.hidden, a.target_hidden, a.captured, a.layers) == (b.hidden, b.target_hidden, b.captured, b.layers)

    @torch.no_grad()
    def add(self, tokens: Tensor, captured: Tensor) -> None:
        """Compare the parts on a batch, tokens `[B, T]` and the target's states for them."""
        columns = [self.stored.index(layer) for layer in self.output.spec.captured]
        own = captured.unflatten(-1, (len(self.stored), -1))[..., columns, :].flatten(-2)
        for part, ours, theirs in self._compare(tokens, own):
            difference, scale = (theirs - ours).double(), ours.double()
            found = self._sums.setdefault(part, [0.0, 0.0, 0.0, 0.0])
            found[0] = max(found[0], float(difference.abs().max()))
            found[1] = max(found[1], float(scale.abs().max()))
            found[2] += float(difference.square().sum())
            found[3] += float(scale.square().sum())

    def figures(self, text: TextKind) -> tuple[PartFigures, ...]:
        """Return the parts' errors, in the order in which a step runs them."""
        return tuple(
            PartFigures(
                part=part,
                text=text,
                relative_error=largest / (scale or 1.0),
                rms_error=(squares / (own or 1.0)) ** 0.5,
            )
            for part in PARTS
            if part in self._sums
            for largest, scale, squares, own in [self._sums[part]]
        )

    def _compare(self, tokens: Tensor, captured: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the outputs of both heads' parts; a part that every layer has occurs once per layer."""
        one, other = self.source, self.output
        inputs, states = tokens[:, 1:], captured[:, :-1]
        hidden = one.fuse(states)
        yield "fc", hidden, other.fuse(states)
        x = one.attention_input(inputs, hidden)
        yield "norms", x, other.attention_input(inputs, hidden)
        positions = torch.arange(inputs.shape[1])
        contexts = CausalContext(), CausalContext()
        residual = _normed(one, hidden, "0.hidden_norm") if one.spec.norms.before_residual else hidden
        for layer in range(one.spec.layers):
            if layer:
                name = f"{layer}.input_layernorm"
                x = _normed(one, residual, name)
                yield "norms", x, _normed(other, residual, name)
            attended = one.attend(layer, x, positions, contexts[0])
            yield "attention", attended, other.attend(layer, x, positions, contexts[1])
            residual = residual + attended
            name = f"{layer}.post_attention_layernorm"
            x = _normed(one, residual, name)
            yield "norms", x, _normed(other, residual, name)
            mixed = one.mlp(layer, x)
            yield "mlp", mixed, other.mlp(layer, x)
            residual = residual + mixed
        normed = _normed(one, residual, "norm")
        yield "norms", normed, _normed(other, residual, "norm")
        if torch.equal(one.target_ids, other.target_ids):
            ours, theirs = (F.linear(normed, head.weights["lm_head"]) for head in (one, other))
            yield "lm_head", ours, theirs


def _normed(head: DraftHead, x: Tensor, slot: str) -> Tensor:
    return rms_norm(x, head.weights[slot], head.spec.eps)
