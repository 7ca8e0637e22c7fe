"""A quantized target against the target it was made from, tensor by tensor.

Perplexity forgives much: a whole expert with its scale doubled hardly moves it. The noise of one tensor does not:
NVFP4 leaves about 20 dB of signal over noise, a doubled scale 0 dB, swapped nibbles or an exchanged gate less than 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median

import torch

from ..checkpoint.bytes import digest
from ..checkpoint.folder import Checkpoint
from ..targets.config import parse_target_config
from ..targets.weights import Plain, StoredWeight, stored_weights
from .figures import NoiseFigures
from .quantized_config import check_config
from .report import Finding

# Signal over noise, dB. The worst that sixteen values and their scale can do: all but the largest at 5/6 of it, the
# middle of the widest step, lose a fifth each, which is 14 dB; what is below was not rounded but changed.
FLOOR = 13.5


def check_quantized(
    output: Checkpoint, source: Checkpoint, say: Callable[[str], None] = lambda _: None
) -> tuple[list[Finding], NoiseFigures]:
    """Hold every tensor of a quantized target, and what its config decides, against its source's.

    Args:
        output: the quantized target.
        source: what it was made from, in any form that is read.
        say: told what is going on.

    Returns:
        Findings, and the noise over all tensors that became NVFP4.

    Raises:
        SourceFormatUnknown, TensorShape: one of the two cannot be read.
    """
    configs = [parse_target_config(one.config) for one in (output, source)]
    ours, theirs = map(stored_weights, (output, source), configs)
    findings = check_config(*configs)
    findings += [_absent(name, "is missing") for name in sorted(theirs.keys() - ours.keys())]
    findings += [_absent(name, "is not the source's") for name in sorted(ours.keys() - theirs.keys())]
    noise: dict[str, float] = {}
    for i, name in enumerate(sorted(ours.keys() & theirs.keys())):
        if i % 100 == 0:
            say(f"comparing {name}")
        mine, its = ours[name], theirs[name]
        if mine.shape != its.shape:
            findings.append(_absent(name, f"is {list(mine.shape)}, and the source's is {list(its.shape)}"))
        elif mine.form == "nvfp4" and its.form != "nvfp4":
            noise[name] = signal_to_noise(its, mine)
            if not noise[name] >= FLOOR:
                findings.append(_noisy(name, noise[name]))
        elif not _same(mine, its):
            findings.append(_changed(name))
    return findings, _figures(noise)


def signal_to_noise(source: StoredWeight, output: StoredWeight) -> float:
    """Return the power of a weight over that of its change, in dB; infinite if nothing changed.

    Args:
        source: the weight.
        output: the same, quantized.
    """
    signal = change = 0.0
    for its, mine in _aligned(source, output):
        its, mine = its.double(), mine.double()
        signal += float(its.square().sum())
        change += float((mine - its).square().sum())
    return decibels(signal, change)


def decibels(signal: float, change: float) -> float:
    """Return a power over another in dB; infinite where the second is nothing, NaN where that says nothing."""
    if not change:
        return math.inf
    return 10 * math.log10(signal / change) if signal > 0 and math.isfinite(signal / change) else math.nan


def _aligned(source: StoredWeight, output: StoredWeight) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both weights in the same blocks of rows, though each is read in its own."""
    streams = (source.blocks(), output.blocks())
    held: list[torch.Tensor | None] = [None, None]
    while True:
        for i, blocks in enumerate(streams):
            if held[i] is None:
                held[i] = next(blocks, None)
        one, other = held
        if one is None or other is None:
            return
        rows = min(len(one), len(other))
        yield one[:rows], other[:rows]
        held = [part[rows:] if len(part) > rows else None for part in (one, other)]


def _same(mine: StoredWeight, its: StoredWeight) -> bool:
    if isinstance(mine, Plain) and isinstance(its, Plain):
        return mine.dtype == its.dtype and digest(mine.info) == digest(its.info)
    return all(torch.equal(a, b) for a, b in _aligned(its, mine)) and mine.dtype == its.dtype


def _figures(noise: dict[str, float]) -> NoiseFigures:
    finite = {name: value for name, value in noise.items() if not math.isnan(value)}
    if not finite:
        return NoiseFigures(tensors=len(noise))
    worst = min(finite, key=lambda name: finite[name])
    return NoiseFigures(
        tensors=len(noise),
        median=round(median(finite.values()), 2),
        worst=round(finite[worst], 2),
        worst_tensor=worst,
        by_tensor={name: round(value, 2) for name, value in finite.items() if math.isfinite(value)},
    )


def _noisy(name: str, decibels: float) -> Finding:
    return Finding(
        rule="K390",
        severity="error",
        where=name,
        message=f"its signal over noise is {decibels:.1f} dB, and rounding to NVFP4 leaves {FLOOR} dB at the least",
        fix="Quantize the target again; a scale, the order of the nibbles or the tensor itself is another's.",
    )


def _changed(name: str) -> Finding:
    return Finding(
        rule="K391",
        severity="error",
        where=name,
        message="it is not quantized, and its values are not the source's",
        fix="Quantize the target again, and give the very target that it is made from.",
    )


def _absent(name: str, what: str) -> Finding:
    return Finding(
        rule="K392",
        severity="error",
        where=name,
        message=f"the tensor {what}",
        fix="Quantize the target again, and give the very target that it is made from.",
    )
