"""The drafting chain of a head, and its acceptance.

Alignment. Entry t of draft step 1 has rotary position t: it pairs token x[t+1] with the fused target states of
position t, and predicts x[t+2]. Step k of chain t takes token x[t+k] and the hidden state that step k-1 of the same
chain returned, at position t+k-1. It sees step 1's entries at positions <= t and its own chain's later entries, and
predicts x[t+1+k]. Engines do the same: tokens shifted by one against the states, positions unchanged
(https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/spec_decode/llm_base_proposer.py#L836-L850), then
one position further with each step
(https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/spec_decode/llm_base_proposer.py#L776-L815).

A P-EAGLE head drafts the same places in one pass: step k > 1 takes the mask token and the fused `mask_hidden` instead,
so it does not depend on what was drafted before
(https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/spec_decode/llm_base_proposer.py#L1402-L1414).

A text of T tokens has chains t = 0 .. T-2-K, whose K predictions all lie within it: T' = T-1-K chains.

The text is given (teacher forcing), so all chains run at once. In an engine, a chain is fed the tokens that it drafted,
and a draft counts only while every token before it was accepted.
Greedy: an accepted token *is* the text's token, so wherever a draft counts, the given token is the drafted one and the
figures are exact. Sampled: see `overlap_acceptance`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..errors import PromptsInvalid
from .attention import ChainContext

if TYPE_CHECKING:
    from .base import RunningDrafter
    from .forward import DraftHead

GREEDY = "greedy; mean over the verify steps of simulated speculative decoding; bonus token included"
SAMPLED = "sampled; expectation over all positions of the text, teacher-forced; bonus token included"


@dataclass(frozen=True)
class DraftStep:
    """One draft step of all chains.

    Attributes:
        tokens: input tokens `[B, T']`.
        hidden: input hidden states `[B, T', hidden]`.
        returned: hidden states for the next step `[B, T', hidden]`.
        logits: `[B, T', draft_vocab]`.
    """

    tokens: Tensor
    hidden: Tensor
    returned: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Acceptance:
    """How many drafted tokens were accepted.

    Attributes:
        steps: tokens drafted per verify step (K).
        drafts: the number of verify steps (greedy) or positions (sampled).
        accepted: for each of the K places in a draft, the number of drafts in which the tokens up to this place were
            all
        accepted; an expectation if sampled.
        note: what the figures mean.
    """

    steps: int
    drafts: int
    accepted: tuple[float, ...]
    note: str

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of all drafts accepted up to each place: vLLM's per-position acceptance rate."""
        return tuple(count / self.drafts for count in self.accepted)

    @property
    def length(self) -> float:
        """Acceptance length: tokens per verify step, between 1 and K + 1, the bonus token included.

        https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/spec_decode/metrics.py#L113-L117
        """
        return 1.0 + sum(self.accepted) / self.drafts


def count_chains(length: int, steps: int) -> int:
    """Return T', the number of chains of K steps in a text of T tokens.

    Raises:
        PromptsInvalid: the text is too short for one chain.
    """
    if length < steps + 2:
        raise PromptsInvalid(
            f"a text of {length} tokens is too short for {steps} draft steps",
            fix=f"Use a text of at least {steps + 2} tokens, or fewer draft steps.",
        )
    return length - 1 - steps


def along_chains(values: Tensor, steps: int) -> Tensor:
    """Arrange per-position values by chain and step: `[B, T, ...]` to `[K, B, T', ...]`.

    `result[k-1, b, t]` is `values[b, t+k]`, the position that predicts what step k of chain t predicts.
    """
    chains = count_chains(values.shape[1], steps)
    return torch.stack([values[:, k : k + chains] for k in range(1, steps + 1)])


def unroll(head: DraftHead, tokens: Tensor, captured: Tensor, steps: int) -> Iterator[DraftStep]:
    """Run K draft steps of all chains, one step at a time.

    Args:
        tokens: the text, target ids `[B, T]`.
        captured: the target's captured states at each position `[B, T, A * target_hidden]`.
        steps: K.
    """
    chains = count_chains(tokens.shape[1], steps)
    inputs, hidden = tokens[:, 1 : 1 + chains], head.fuse(captured[:, :chains])
    positions = torch.arange(chains, device=tokens.device)
    context, mask = ChainContext(), head.spec.mask
    for k in range(1, steps + 1):
        returned, logits = head.step(inputs, hidden, positions + k - 1, context)
        yield DraftStep(inputs, hidden, returned, logits)
        if mask is None:
            inputs, hidden = tokens[:, k + 1 : k + 1 + chains], returned
        else:
            inputs, hidden = torch.full_like(inputs, mask), head.fuse(head.weights["mask_hidden"]).expand_as(returned)


def draft_logits(head: DraftHead, tokens: Tensor, captured: Tensor, steps: int) -> Tensor:
    """Return the logits of each step of each chain, `[K, B, T', draft_vocab]`; arguments as in `unroll`.

    `result[k-1, b, t]` predicts `tokens[b, t+1+k]`.
    """
    return torch.stack([step.logits for step in unroll(head, tokens, captured, steps)])


def draft_tokens(head: RunningDrafter, tokens: Tensor, captured: Tensor, steps: int) -> Tensor:
    """Return the most likely token of each step of each chain as target ids, `[K, B, T']`."""
    return head.target_ids[head.draft(tokens, captured, steps).argmax(-1)]


def greedy_acceptance(drafted: Tensor, tokens: Tensor, prompt_length: int) -> Acceptance:
    """Simulate greedy speculative decoding of one text.

    The target's prefill gives the token after the prompt. Each verify step then drafts K tokens, accepts those that
    match the text up to the first mismatch, and continues after them and the bonus token. The simulation ends at the
    first draft whose K places do not all lie within the text.

    Args:
        drafted: `[K, T']` target ids, as `draft_tokens(...)[:, b]`; -1 where nothing is drafted.
        tokens: `[T]`: a prompt and the target's own greedy continuation.
        prompt_length: tokens of the prompt, at least 1.

    Raises:
        PromptsInvalid: no draft fits after the prompt.
    """
    steps, chains = drafted.shape
    if not 1 <= prompt_length <= chains:
        raise PromptsInvalid(
            f"no draft of {steps} tokens fits between a prompt of {prompt_length} and {len(tokens)} tokens",
            fix="Use a prompt of at least one token and a longer continuation.",
        )
    # Step k of chain t predicts the token after position t+k.
    matches = drafted == along_chains(tokens[None].roll(-1, 1), steps)[:, 0]
    survivors = cast(list[int], matches.long().cumprod(0).sum(0).tolist())
    accepted, drafts, chain = [0] * steps, 0, prompt_length - 1
    while chain < chains:
        for place in range(survivors[chain]):
            accepted[place] += 1
        drafts += 1
        chain += survivors[chain] + 1
    return Acceptance(steps, drafts, tuple(accepted), GREEDY)


def overlap(draft_logits: Tensor, target_logits: Tensor, target_ids: Tensor) -> Tensor:
    """Return the probability that rejection sampling accepts a drafted token: the sum of min(p, q).

    Args:
        draft_logits: `[K, B, T', draft_vocab]`, of the distribution q from which the token is drafted.
        target_logits: `[B, T, vocab]` in the target's usual alignment (position i predicts token i+1), of the served
        distribution p; both are already divided by the temperature.
        target_ids: `[draft_vocab]`, the target id of each draft token; q is 0 for all others.

    Returns:
        `[K, B, T']` fp32, between 0 and 1.
    """
    served = served_shares(target_logits, target_ids)
    return torch.stack([overlap_at(served, k, q.float().softmax(-1)) for k, q in enumerate(draft_logits, start=1)])


def served_shares(target_logits: Tensor, target_ids: Tensor) -> Tensor:
    """Return the target's probability of each draft token, `[B, T, vocab]` to `[B, T, draft_vocab]` fp32."""
    return target_logits.float().softmax(-1)[..., target_ids]


def overlap_at(served: Tensor, k: int, drafted: Tensor) -> Tensor:
    """Return the share of step k's drafts that is accepted, `[B, T']`.

    Args:
        served: see `served_shares`.
        k: the draft step, from 1.
        drafted: its distribution, `[B, T', draft_vocab]`.
    """
    return torch.minimum(served[:, k : k + drafted.shape[1]], drafted).sum(-1)


def overlap_acceptance(overlaps: Tensor) -> Acceptance:
    """Sum up acceptance probabilities `[K, B, T']` of a text that was sampled from the target.

    Place k of a draft counts a1 * ... * ak. In an engine the tokens before place k are the accepted ones, here they are
    the text's: the two agree if ak does not depend on these tokens, and K = 1 is exact. Every position counts once,
    while an engine starts a draft only after the previous one.
    """
    steps = overlaps.shape[0]
    accepted = cast(list[float], overlaps.double().cumprod(0).flatten(1).sum(1).tolist())
    return Acceptance(steps, overlaps[0].numel(), tuple(accepted), SAMPLED)


def pool(acceptances: Iterable[Acceptance]) -> Acceptance:
    """Add up acceptances of the same K and kind: a mean over drafts, so long texts weigh more.

    Raises:
        PromptsInvalid: there are none, or they are of different kinds.
    """
    parts = list(acceptances)
    kinds = {(part.steps, part.note) for part in parts}
    if len(kinds) != 1:
        raise PromptsInvalid(
            f"{len(kinds)} kinds of acceptance cannot be pooled",
            fix="Pool one or more acceptances of the same number of steps and the same kind.",
        )
    accepted = tuple(sum(counts) for counts in zip(*(part.accepted for part in parts), strict=True))
    return Acceptance(parts[0].steps, sum(part.drafts for part in parts), accepted, parts[0].note)
