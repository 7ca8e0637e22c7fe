"""What a conversion holds in memory at Kimi-K2's size."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kconv.convert.attention.heal import ATTENTION, REST, loss_by_piece
from kconv.convert.attention.latents import measure_sensitivity
from kconv.drafters.chain import count_chains
from kconv.drafters.forward import DraftHead
from kconv.drafters.slots import needs
from kconv.drafters.spec import Gqa, HeadSpec
from kconv.measure.batches import PIECE_BYTES, ROWS_PER_DIM, STEPS, Calibration, StatesBatch
from kconv.measure.compare import compare

from .attention_store import load, save
from .heads import KIMI_MLA
from .machine import apart

NAME, TEXT = "memory", 512
# A vocabulary that dwarfs all else, in a head that is small otherwise.
SPEC = replace(
    KIMI_MLA, attention=Gqa(2, 2, 16), hidden=32, target_hidden=32, intermediate=32, vocab=60_000, draft_vocab=60_000
)


def _heal(original: DraftHead, converted: DraftHead, calibration: Calibration) -> None:
    for name in ("fc", "0.q_proj"):
        converted.weights[name].requires_grad_()
    for part in loss_by_piece(original, converted, calibration, calibration.batch(0)):
        part.total.backward()


PASSES: dict[str, Callable[[DraftHead, DraftHead, Calibration], object]] = {
    "a step of healing": _heal,
    "measuring the two heads": lambda one, two, calibration: compare(one, two, calibration, calibration.batches),
    "the Fisher information": lambda one, two, calibration: measure_sensitivity(one, calibration.batches),
}


def measure_memory() -> None:
    """Count the tensors as large as one draft step's logits that each pass holds at its peak."""
    found = {name: apart(count_logits, name) for name in PASSES}
    save(NAME, found)
    for name, count in found.items():
        print(f"{name}: {count:.1f}")


def count_logits(name: str) -> float:
    """Return by how many such tensors a pass over one text raises the peak of this process's memory."""
    original, converted = make_head(SPEC, 0), make_head(SPEC, 1)
    text = make_states(SPEC, batches=1, length=TEXT)
    # Libraries that the first call loads are not its tensors.
    PASSES[name](original, converted, make_states(SPEC, batches=1, length=STEPS + 2))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    PASSES[name](original, converted, text)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (peak - pages * resource.getpagesize()) / logits_bytes(SPEC)


def logits_bytes(spec: HeadSpec) -> int:
    """Return what one draft step's fp32 logits over a text take."""
    return 4 * count_chains(TEXT, STEPS) * spec.draft_vocab


def make_head(spec: HeadSpec, seed: int) -> DraftHead:
    """Return a head of random weights."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, need in needs(spec).items():
        drawn = torch.randn(need.shape, generator=generator)
        weights[name] = drawn * need.shape[1] ** -0.5 if drawn.ndim == 2 else 1 + 0.1 * drawn
    return DraftHead(spec, weights)


def make_states(spec: HeadSpec, batches: int, length: int) -> Calibration:
    """Return random states over batches of one random text each."""
    generator = torch.Generator().manual_seed(0)

    def draw(width: int) -> Tensor:
        return torch.randn(1, length, width, generator=generator)

    found = [
        StatesBatch(
            torch.randint(spec.vocab, (1, length), generator=generator),
            draw(len(spec.captured) * spec.target_hidden),
            draw(spec.target_hidden),
        )
        for _ in range(batches)
    ]
    return Calibration(found, torch.randn(spec.vocab, spec.target_hidden, generator=generator), "random")


def describe_memory(spec: HeadSpec = KIMI_MLA) -> list[str]:
    """Return the arithmetic as Markdown: by the dims of a head, and by the counts that were measured."""
    inputs, logits = 2 * spec.hidden, logits_bytes(spec)
    widths = [
        need.shape[1] for name, need in needs(spec).items() if name in (*ATTENTION, *REST) and len(need.shape) == 2
    ]
    factors = 4 * sum(width**2 for width in widths)
    counted = load(NAME)
    held = ", ".join(f"{name} {count:.1f} ({_size(count * logits)})" for name, count in counted.items())
    return [
        f"- The fit: {ROWS_PER_DIM} rows for each of the attention's {inputs:,} inputs, {ROWS_PER_DIM * inputs:,} in "
        f"all, "
        f"or more. Their second moments take {_size(8 * inputs**2)}, and so does their factor.",
        f"- A pass over the states: the logits of one draft step of a text of {TEXT} tokens take {_size(logits)}. A "
        f"pass goes through texts in pieces of {PIECE_BYTES >> 20} MiB of logits, or one text. Tensors of that size "
        f"at the peak: "
        f"{held or 'not counted yet'}. Longer texts need in proportion more.",
        f"- Healing an MLA head with an MLP of {spec.intermediate:,}: a triangular factor for each matrix, "
        f"{_size(factors)} "
        f"in fp32, from second moments of {_size(2 * factors)} in fp64, each dropped in turn.",
    ]


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
