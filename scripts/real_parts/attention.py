"""What a real head keeps of its acceptance with the other attention, as `kconv to-vllm --attention` makes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.source import Folder
from kconv.convert.attention.convert import HEAL_STEPS, FittedAttention, as_stored, change_attention, changed_slots
from kconv.convert.attention.heal import ATTENTION, RATE, REST, descend, heal, mean_loss
from kconv.convert.attention.swap import Shape, with_attention
from kconv.convert.attention.to_mha import convert_to_mha
from kconv.convert.attention.to_mla import convert_to_mla
from kconv.convert.execute import execute
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import Head, read_head
from kconv.convert.shared import SLOTS, find_shared
from kconv.drafters.forward import DraftHead
from kconv.drafters.spec import Gqa
from kconv.engines import by_name
from kconv.measure.batches import Calibration, Part, StatesBatch, part_of
from kconv.measure.compare import compare
from kconv.measure.retention import Retention
from kconv.targets.config import read_target_config
from kconv.targets.model import load_target
from kconv.targets.states import open_states
from kconv.validate.parity import load_head

# A text is the beginning of a dialogue; so many of them side by side.
TOKENS, ROWS = 192, 8
MLA, SERVED = "gqa-mla-4", "mla-mha"


@dataclass(frozen=True)
class Conversion:
    """One conversion.

    Attributes:
        says: what of what.
        source: the head that is converted.
        ratio: latent entries to those of all keys and values, 1 : ratio; 0 for MHA.
    """

    says: str
    source: str
    ratio: int = 0


CONVERSIONS: Mapping[str, Conversion] = {
    MLA: Conversion("GQA → MLA, 1 : 4", "gqa", 4),
    SERVED: Conversion("MLA → MHA", "mla"),
    "mha-mla-8": Conversion("MHA → MLA, 1 : 8", "mha", 8),
    "mha-mla-16": Conversion("MHA → MLA, 1 : 16", "mha", 16),
}
# An original takes the steps that heal the last of these.
ALIKE, LAST = "mha-alike", "mha-mla-16"


@dataclass(frozen=True)
class Counts:
    """Dialogues at most: the attention is fitted to the first, healed on the second, and so on."""

    fit: int
    heal: int
    choose: int
    held_out: int

    @property
    def of_parts(self) -> Mapping[Part, int]:
        """Of each part, those that are read."""
        return {"fit": max(self.fit, self.heal), "choose": self.choose, "held-out": self.held_out}


def calibration_of(target: Path, states: Path, captured: Sequence[int], counts: Mapping[Part, int]) -> Calibration:
    """Return the beginnings of stored dialogues, those of one prompt in one part (`measure.calibration`).

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
    batches, parts = list[StatesBatch](), list[Part]()
    for part, indices in taken.items():
        for begin in range(0, len(indices), ROWS):
            rows = [stored.read(index) for index in indices[begin : begin + ROWS]]
            batches.append(
                StatesBatch(
                    torch.stack([row.tokens[:TOKENS].long() for row in rows]),
                    torch.stack([row.captured[:TOKENS].float() for row in rows]),
                    torch.stack([row.hidden[:TOKENS].float() for row in rows]),
                )
            )
            parts.append(part)
    return Calibration(batches, load_target(target, torch.float32).lm_head.weight.detach(), states.name, (), parts)


def measure_conversions(
    target: Path, heads: Mapping[str, Path], states: Path, steps: Sequence[int], counts: Counts, out: Path
) -> None:
    """Convert heads, and measure what is kept after each number of healing steps; what `out` holds is kept.

    Args:
        target: its folder.
        heads: their folders.
        states: of the target, over dialogues.
        steps: of healing.
        counts: of dialogues.
        out: a folder of figures and of the converted heads' weights.
    """
    out.mkdir(exist_ok=True)
    for name, conversion in CONVERSIONS.items():
        file = out / f"{name}.json"
        left = [count for count in steps if str(count) not in _read(file)]
        if not left or conversion.source not in heads:
            continue
        head = read_head(open_checkpoint(heads[conversion.source]))
        original = _load(head, target)
        calibration = calibration_of(target, states, original.spec.captured, counts.of_parts)
        begun = out / f"{name}-0.pt"
        if not begun.exists():
            torch.save(_convert(original, of_fewer(calibration, counts.fit // ROWS), conversion.ratio), begun)
        start = torch.load(begun, weights_only=False)
        for count in left:
            with products_in_bf16():
                healed = as_stored(heal(original, start, calibration, count), original.spec.dtype)
            figures = compare(original, healed, calibration)
            print(f"{name}, {count} steps: {figures.kept:.4f}", flush=True)
            torch.save(healed, out / f"{name}-{count}.pt")
            file.write_text(json.dumps(_read(file) | {str(count): asdict(figures)}, indent=1) + "\n")


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def write_served(target: Path, folder: Path, states: Path, counts: Counts, out: Path) -> None:
    """Write a converted head (`SERVED`) for vLLM, as `kconv to-vllm --attention` does.

    Args:
        target: its folder.
        folder: the original's.
        states: of the target, over dialogues.
        counts: of dialogues.
        out: the folder of `measure_conversions`.
    """
    weights = out / f"{SERVED}-{HEAL_STEPS}.pt"
    if (out / SERVED).exists() or not weights.exists():
        return
    head, healed = read_head(open_checkpoint(folder)), torch.load(weights, weights_only=False)
    calibration = calibration_of(target, states, head.spec.captured, counts.of_parts)
    changed = changed_slots(as_stored(_load(head, target), head.spec.dtype), healed)
    figures = Retention(**_read(out / f"{SERVED}.json")[str(HEAL_STEPS)])
    fitted = FittedAttention(healed, changed, CONVERSIONS[SERVED].says, counts.fit, HEAL_STEPS, figures, {})
    options = WriteOptions(find_shared(Folder(target), SLOTS))
    execute(plan(head, by_name("vllm"), options, change_attention(head, fitted, calibration)), out / SERVED)


def measure_alike(target: Path, folder: Path, states: Path, steps: Sequence[int], counts: Counts, out: Path) -> None:
    """Measure what an original gains by the steps that heal a conversion of it (`LAST`), at the same rate.

    Its arguments are those of `measure_conversions`, and the original's folder.
    """
    file = out / f"{ALIKE}.json"
    left = [count for count in steps if count >= HEAL_STEPS and str(count) not in _read(file)]
    if not left or not (out / f"{LAST}-0.pt").exists():
        return
    original = _load(read_head(open_checkpoint(folder)), target)
    calibration = calibration_of(target, states, original.spec.captured, counts.of_parts)
    start = torch.load(out / f"{LAST}-0.pt", weights_only=False)
    for count in left:
        with products_in_bf16():
            rate = RATE * float(mean_loss(original, start, calibration).apart) ** 0.5
            trained = descend(original, original, calibration, count, (*ATTENTION, *REST), rate)
        figures = compare(original, as_stored(trained, original.spec.dtype), calibration)
        print(f"{ALIKE}, {count} steps: {figures.kept:.4f}", flush=True)
        file.write_text(json.dumps(_read(file) | {str(count): asdict(figures)}, indent=1) + "\n")


def _load(head: Head, target: Path) -> DraftHead:
    return load_head(head, open_checkpoint(target), read_target_config(target), torch.float32)


def of_fewer(calibration: Calibration, fitted: int) -> Calibration:
    """Return a calibration with only so many of its fitted batches."""
    kept = sorted(
        [*calibration.indices("fit")[:fitted], *calibration.indices("choose"), *calibration.indices("held-out")]
    )
    parts = calibration.part_of_each()
    return replace(calibration, batches=[calibration.batches[i] for i in kept], parts=[parts[i] for i in kept])


def _convert(head: DraftHead, calibration: Calibration, ratio: int) -> DraftHead:
    if not ratio:
        return with_attention(head, convert_to_mha(head, calibration)[0])
    dims = head.spec.attention
    assert isinstance(dims, Gqa)
    # Half of the rotary dims, as at Kimi-K2's size: 64 of 128.
    shape = Shape(2 * dims.kv_heads * dims.head_dim // ratio, rotary=dims.head_dim // 2, q_lora_rank=4 * dims.head_dim)
    return with_attention(head, convert_to_mla(head, calibration, shape)[0])


@contextmanager
def products_in_bf16() -> Iterator[None]:
    """Compute products in bf16, which takes a fourth of the time here."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
