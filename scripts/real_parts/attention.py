"""What a real head keeps of its acceptance with the other attention, as `kconv to-vllm --attention` makes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kconv.calibrate.batches import Batch, Calibration, Part, part_of
from kconv.calibrate.measure import compare
from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.attention.convert import as_stored
from kconv.convert.attention.heal import heal
from kconv.convert.attention.swap import Shape, with_attention
from kconv.convert.attention.to_mha import convert_to_mha
from kconv.convert.attention.to_mla import convert_to_mla
from kconv.convert.read import read_head
from kconv.head.forward import DraftHead
from kconv.head.spec import Gqa
from kconv.targets.config import read_target_config
from kconv.targets.model import load_target
from kconv.targets.states import open_states
from kconv.validate.parity import load_head

# A text is the beginning of a dialogue; so many of them side by side.
TOKENS, ROWS = 192, 4
MLA = "gqa-mla-4"


@dataclass(frozen=True)
class Conversion:
    """One conversion.

    Attributes:
        says: what of what.
        source: the name of the conversion whose last head it starts from; empty for the trained head.
        ratio: latent entries to those of all keys and values, 1 : ratio; 0 for MHA.
    """

    says: str
    source: str = ""
    ratio: int = 0


CONVERSIONS: Mapping[str, Conversion] = {
    MLA: Conversion("GQA → MLA, 1 : 4", ratio=4),
    "mla-mha": Conversion("MLA → MHA, of the head above", source=MLA),
    "gqa-mla-16": Conversion("GQA → MLA, 1 : 16", ratio=16),
    "gqa-mla-8": Conversion("GQA → MLA, 1 : 8", ratio=8),
}


def calibration_of(target: Path, states: Path, captured: Sequence[int], counts: Mapping[Part, int]) -> Calibration:
    """Return the beginnings of stored dialogues, those of one prompt in one part (`calibrate.texts`).

    Args:
        target: its folder.
        states: what `kconv states` wrote.
        captured: the layers that a head reads.
        counts: of each part, how many dialogues are taken at most.
    """
    stored = open_states(states, config=read_target_config(target), captured=captured)
    own = {digest: part_of(place) for place, digest in enumerate(sorted({s.digest for s in stored.sequences}))}
    taken: dict[Part, list[int]] = {part: [] for part in counts}
    for index, sequence in enumerate(stored.sequences):
        some = taken[own[sequence.digest]]
        if sequence.length >= TOKENS and len(some) < counts[own[sequence.digest]]:
            some.append(index)
    batches, parts = list[Batch](), list[Part]()
    for part, indices in taken.items():
        for begin in range(0, len(indices), ROWS):
            rows = [stored.read(index) for index in indices[begin : begin + ROWS]]
            batches.append(
                Batch(
                    torch.stack([row.tokens[:TOKENS].long() for row in rows]),
                    torch.stack([row.captured[:TOKENS].float() for row in rows]),
                    torch.stack([row.hidden[:TOKENS].float() for row in rows]),
                )
            )
            parts.append(part)
    return Calibration(batches, load_target(target, torch.float32).lm_head.weight.detach(), states.name, (), parts)


def measure_conversions(
    target: Path, folder: Path, states: Path, steps: Sequence[int], counts: Mapping[Part, int], out: Path
) -> None:
    """Convert a GQA head, and measure what is kept after each number of healing steps; what `out` holds is kept.

    Args:
        target: its folder.
        folder: the head's.
        states: of the target, over dialogues.
        steps: of healing, the most last.
        counts: of each part, how many dialogues are taken at most.
        out: JSON; beside it the converted heads' weights.
    """
    found = json.loads(out.read_text()) if out.exists() else {}
    head = load_head(
        read_head(open_checkpoint(folder)), open_checkpoint(target), read_target_config(target), torch.float32
    )
    calibration = calibration_of(target, states, head.spec.captured, counts)
    for name, conversion in CONVERSIONS.items():
        done = found.setdefault(name, {})
        left = [count for count in steps if str(count) not in done]
        if not left:
            continue
        original = torch.load(_beside(out, conversion.source), weights_only=False) if conversion.source else head
        start = _convert(original, calibration, conversion.ratio)
        for count in left:
            healed = as_stored(_heal(original, start, calibration, count), head.spec.dtype)
            done[str(count)] = asdict(compare(original, healed, calibration))
            print(f"{name}, {count} steps: {done[str(count)]['kept']:.4f}", flush=True)
            torch.save(healed, _beside(out, name))
            out.write_text(json.dumps(found, indent=1) + "\n")


def _beside(out: Path, name: str) -> Path:
    return out.with_name(f"{out.stem}-{name}.pt")


def _convert(head: DraftHead, calibration: Calibration, ratio: int) -> DraftHead:
    if not ratio:
        return with_attention(head, convert_to_mha(head, calibration)[0])
    dims = head.spec.attention
    assert isinstance(dims, Gqa)
    # Half of the rotary dims, as at Kimi-K2's size: 64 of 128.
    shape = Shape(2 * dims.kv_heads * dims.head_dim // ratio, rotary=dims.head_dim // 2, q_lora_rank=4 * dims.head_dim)
    return with_attention(head, convert_to_mla(head, calibration, shape)[0])


def _heal(head: DraftHead, start: DraftHead, calibration: Calibration, steps: int) -> DraftHead:
    """Heal with products in bf16, which take a fourth of the time here."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        return heal(head, start, calibration, steps)
    finally:
        torch.set_float32_matmul_precision(before)
