"""Compute what an engine must count for a head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...checkpoint.folder import open_checkpoint
from ...convert.read import Head
from ...drafters.chain import Acceptance, draft_tokens, greedy_acceptance, pool
from ...targets.config import read_target_config
from ...targets.forward import run_target
from ..parity import load_head


def simulate(
    head: Head,
    model,
    target: Path,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    steps: int,
) -> Acceptance:
    """Return what kconv's chain with a head accepts on greedy continuations.

    Args:
        head: the head.
        model: its target.
        target: the target's folder.
        prompts: token ids.
        continuations: the target's own, `steps - 1` tokens longer than requested from a server, since their last draft
            looks that far ahead.
        steps: K.
    """
    drafter = load_head(head, open_checkpoint(target), read_target_config(target))
    accepted = []
    for prompt, output in zip(prompts, continuations, strict=True):
        tokens = torch.tensor([[*prompt, *output]])
        with torch.no_grad():
            captured = run_target(model, tokens, head.spec.captured).captured
            drafted = draft_tokens(drafter, tokens, captured, steps)[:, 0]
        accepted.append(greedy_acceptance(drafted, tokens[0], len(prompt)))
    return pool(accepted)


def with_captured(head: Head, captured: tuple[int, ...]) -> Head:
    """Return a head with other captured layers in its config, as outputs."""
    return replace(head, read=replace(head.read, spec=replace(head.spec, captured=captured)))


def find_reading(
    head: Head,
    chain: Callable[[Head], Acceptance],
    counted: tuple[int, ...],
    lists: Iterable[tuple[int, ...]],
    *,
    layers: int,
) -> tuple[int, ...] | None:
    """Return the captured layers with which the chain gives exactly an engine's counts; None if there are none.

    Args:
        head: the head.
        chain: computes what a head accepts.
        counted: the engine's drafts, and those accepted up to each position.
        lists: the layers to try, as outputs; impossible ones for this target or head are skipped.
        layers: number of layers of the target.
    """
    for captured in lists:
        # The input of layer 0 is the embedding, not a layer's output.
        if set(captured) <= set(range(layers)) and len(set(captured)) == len(captured) == len(head.spec.captured):
            said = chain(with_captured(head, captured))
            if (said.drafts, *said.accepted) == counted:
                return captured
    return None
