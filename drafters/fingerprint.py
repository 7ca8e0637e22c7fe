"""Outputs of a head on fixed inputs: a few numbers that tell whether two folders hold the same function.

A digest shows whether bytes are the ones written, not whether they were the right ones. These numbers are computed from
the head in memory that a manifest's figures describe. A folder that gives other numbers holds another head, whichever
name, order, norm or config key is to blame.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from .attention import CausalContext
from .forward import DraftHead

# RandomState's streams are frozen (NEP 19), so every machine draws the same inputs.
SEED = 24
ENTRIES, COLUMNS, STEPS = 8, 8, 2
# Far enough apart to show RoPE's slow pairs, and close enough for fp32 angles.
POSITIONS = (0, 1, 3, 9, 40, 170, 400, 900)
# From inputs so small that a norm's epsilon matters to inputs as large as a target's states.
SMALLEST, LARGEST = 1e-3, 1e1
# Summing fp32 values in another order changes less than a hundredth of this.
TOLERANCE = 1e-3
DIGITS = 7


@torch.no_grad()
def fingerprint(head: DraftHead) -> tuple[float, ...]:
    """Return logits of a head on inputs drawn with a fixed seed: `STEPS * ENTRIES * COLUMNS` numbers.

    Args:
        head: an fp32 head; it runs on the CPU.
    """
    spec = head.spec
    weights = {name: w.cpu() for name, w in head.weights.items()}
    head = DraftHead(spec, {name: w.float() if w.is_floating_point() else w for name, w in weights.items()})
    draw = np.random.RandomState(SEED)
    tokens = torch.from_numpy(draw.randint(spec.vocab, size=(1, ENTRIES)).astype(np.int64))
    states = torch.from_numpy(draw.standard_normal((1, ENTRIES, len(spec.captured) * spec.target_hidden))).float()
    states *= torch.logspace(np.log10(SMALLEST), np.log10(LARGEST), ENTRIES)[None, :, None]
    positions, context = torch.tensor(POSITIONS), CausalContext()
    columns = torch.linspace(0, spec.draft_vocab - 1, COLUMNS).long()
    hidden, found = head.fuse(states), list[torch.Tensor]()
    for step in range(STEPS):
        hidden, logits = head.step(tokens, hidden, positions + step, context)
        found.append(logits[0][:, columns])
    values = cast(list[float], torch.stack(found).flatten().tolist())
    return tuple(float(f"{value:.{DIGITS}g}") for value in values)


def difference(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the distance of two fingerprints: the largest relative error of an entry, root mean square over columns.

    Fingerprints with different numbers of values, e.g. from another version, are infinitely far apart.
    """
    if len(one) != len(other) or len(one) % COLUMNS:
        return float("inf")
    a, b = (np.array(values).reshape(-1, COLUMNS) for values in (one, other))
    off = np.sqrt(((a - b) ** 2).mean(1)) / np.maximum(np.sqrt((a**2).mean(1)), np.finfo(np.float32).tiny)
    return float(off.max())
