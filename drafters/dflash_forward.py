"""The reference forward of a DFlash or DSpark drafter in plain torch, along a given text.

The anchor is the token at position p, whose states the target has not computed. The context is the states before it:

    context  = hidden_norm(fc(captured states))           of positions 0 .. p-1
    block    = [ anchor, mask, mask, ... ]                at positions p .. p + block - 1

Every layer projects the same context to keys and values, without its `input_layernorm`, and the block's states to
queries, keys and values. A slot sees the whole context, and the whole block; in a causal drafter no later slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigInvalid
from .attention import hide_future, project_gqa, repeat_heads, rms_norm, softmax
from .dflash import GATED, RNN, DFlashSpec
from .forward import ready
from .rope import cos_sin
from .yarn import softmax_scale

# Blocks that are computed at once: their scores are [heads, blocks * slots, context].
AT_ONCE = 64


class BlockDrafter:
    """A DFlash or DSpark drafter that can run.

    Args:
        spec: what it is.
        weights: each of its tensors by slot name, with the target's `embed_tokens` and `lm_head` if it shares them.
            They are cast to the dtype of `fc`.

    Attributes:
        target_ids: `[draft_vocab]`, the target id of each row of `lm_head`.

    Raises:
        TensorMissing, TensorUnknown, TensorShape, TensorValue: the weights do not match this spec.
    """

    def __init__(self, spec: DFlashSpec, weights: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.weights, self.target_ids = ready(spec, weights)

    def draft(self, tokens: Tensor, captured: Tensor, steps: int) -> Tensor:
        """See `base.RunningDrafter.draft`: chain t is the block whose anchor is at position t + 1.

        A block has only as many slots as it drafts tokens, as in engines, which are told K: vLLM and SGLang leave out
        the other slots, which a bidirectional drafter would see. The Markov head reads the text's own tokens. Where a
        draft counts, they are the drafts before it.

        Raises:
            ConfigInvalid: a block has fewer places than steps.
        """
        places = self.each_place(tokens, captured, steps)
        first = next(places)
        found = first.new_empty(steps, *first.shape)
        found[0] = first
        for place, logits in enumerate(places, start=1):
            found[place] = logits
        return found

    def each_place(self, tokens: Tensor, captured: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield what `draft` returns place by place, and so without the logits of all places in memory."""
        spec, weights = self.spec, self.weights
        if steps > spec.places:
            raise ConfigInvalid(
                f"a block of {spec.block} slots drafts {spec.places} tokens, not {steps}",
                where="--draft-tokens",
                fix=f"Pass --draft-tokens {spec.places} or less.",
            )
        chains = tokens.shape[1] - 1 - steps
        slots = steps if spec.shift else steps + 1
        context = F.linear(captured[:, :chains].to(weights["fc"].dtype), weights["fc"])
        context = rms_norm(context, weights["hidden_norm"], spec.eps)
        entries = [self._project(layer, context, torch.arange(chains))[1:] for layer in range(spec.layers)]
        found: list[Tensor] = []
        for begin in range(0, chains, AT_ONCE):
            block = torch.arange(begin, min(begin + AT_ONCE, chains))
            found.append(self._hidden(tokens[:, block + 1], block, entries, slots)[:, :, slots - steps :])
        hidden = torch.cat(found, dim=1)
        previous = torch.stack([tokens[:, 1 + place : 1 + place + chains] for place in range(steps)], dim=2)
        embedded = self._before(previous, hidden) if spec.markov.rank else None
        for place in range(steps):
            logits = F.linear(hidden[:, :, place], weights["lm_head"])
            if embedded is not None:
                logits += F.linear(embedded[:, :, place], weights["markov_w2"])
            yield logits

    def _project(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = cos_sin(self.spec.rope, self.spec.attention, positions.to(x.device)[None])
        cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
        return project_gqa(self.spec.attention, self.weights, layer, x, cos, sin, self.spec.eps)

    def _hidden(self, anchors: Tensor, chains: Tensor, entries: list[tuple[Tensor, Tensor]], slots: int) -> Tensor:
        """Return the final states of some blocks.

        Args:
            anchors: `[B, C]`, the blocks' first tokens.
            chains: `[C]`, the last position of each block's context.
            entries: for each layer, keys and values of the context `[B, kv_heads, T, head_dim]`.
            slots: of each block.

        Returns:
            `[B, C, slots, hidden]`.
        """
        spec, weights = self.spec, self.weights
        ids = torch.full((*anchors.shape, slots), spec.mask, device=anchors.device)
        ids[:, :, 0] = anchors
        x = F.embedding(ids.flatten(1), weights["embed_tokens"])
        positions = (chains[:, None] + 1 + torch.arange(slots)).flatten()
        last = chains.repeat_interleave(slots).to(x.device)
        unseen = torch.arange(entries[0][0].shape[2], device=x.device) > last[:, None]
        for layer in range(spec.layers):
            normed = rms_norm(x, weights[f"{layer}.input_layernorm"], spec.eps)
            query, key, value = self._project(layer, normed, positions)
            past_key, past_value = (repeat_heads(entry, query) for entry in entries[layer])
            # [B, heads, C, slots, head_dim]
            whole = (query, repeat_heads(key, query), repeat_heads(value, query))
            own = [torch.unflatten(part, 2, (-1, slots)) for part in whole]
            inside = own[0] @ own[1].transpose(-1, -2)
            inside = (hide_future(inside) if spec.causal else inside).flatten(2, 3)
            outside = (query @ past_key.transpose(-1, -2)).masked_fill(unseen, float("-inf"))
            scale = softmax_scale(spec.rope, spec.attention)
            shares = softmax(torch.cat([outside, inside], dim=-1) * scale)
            of_block = torch.unflatten(shares[..., -slots:], 2, (-1, slots)) @ own[2]
            output = shares[..., :-slots] @ past_value + of_block.flatten(2, 3)
            x = x + self._linear(f"{layer}.o_proj", output.transpose(1, 2).flatten(2))
            normed = rms_norm(x, weights[f"{layer}.post_attention_layernorm"], spec.eps)
            gate, up = self._linear(f"{layer}.gate_proj", normed), self._linear(f"{layer}.up_proj", normed)
            x = x + self._linear(f"{layer}.down_proj", F.silu(gate) * up)
        return torch.unflatten(rms_norm(x, weights["norm"], spec.eps), 1, (-1, slots))

    def _before(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Return what the Markov head makes of the token before each place, `[B, C, K, rank]`.

        Args:
            previous: `[B, C, K]`, these tokens.
            hidden: `[B, C, K, hidden]`.
        """
        spec = self.spec
        embedded = F.embedding(previous, self.weights["markov_w1"])
        if spec.markov.kind == GATED:
            embedded = self._linear("markov_gate", torch.cat([hidden, embedded], dim=-1)).sigmoid() * embedded
        elif spec.markov.kind == RNN:
            state = torch.zeros_like(embedded[:, :, 0])
            outputs: list[Tensor] = []
            for place in range(embedded.shape[2]):
                read = torch.cat([state, embedded[:, :, place], hidden[:, :, place]], dim=-1)
                keep, new, output = self._linear("markov_joint", read).chunk(3, dim=-1)
                state = keep.sigmoid() * state + (1 - keep.sigmoid()) * new.tanh()
                outputs.append(output.tanh())
            embedded = torch.stack(outputs, dim=2)
        return embedded

    def _linear(self, slot: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[slot], self.weights.get(f"{slot}.bias"))
