"""A head against the manifest and the source that it was made from.

Linears that one head stores with scales and the other without have no bits in common. What was rounded is near its
source all the same; what has another's scale, nibbles in another order or another weight's values is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ..checkpoint.bytes import Look, Wanted
from ..checkpoint.formats import BLOCK
from ..checkpoint.header import TensorInfo, byte_size
from ..checkpoint.manifest import MANIFEST, hold, read_manifest, wanted_digests
from ..convert.provenance import Origin
from ..convert.quantized import SUFFIXES
from ..convert.read import Head, read_slot
from ..engines.moves import Same, Stack
from ..errors import KconvError
from ..head.slots import needs
from .report import Finding
from .rules.comparisons import FLOOR
from .rules.head import HeadSubject
from .rules.rule import run_rules
from .rules.values import WEIGHTS

if TYPE_CHECKING:
    from torch import Tensor

# An FP8 value is within a sixteenth of itself, three bits of mantissa: 24 dB. Four are left to values that the scale
# of a fused group makes too small for that.
FP8_FLOOR = 20.0


@dataclass(frozen=True)
class Form:
    """A form that linears are stored in.

    Attributes:
        name: what it is called.
        floor: signal over noise that rounding leaves at the least, dB.
        unpack: the stored weight, and its scales by suffix, to what they stand for: `[out, in]`.
    """

    name: str
    floor: float
    unpack: Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def _unpack_nvfp4(weight: Tensor, scales: Mapping[str, Tensor]) -> Tensor:
    from ..targets.weights import dequantize_nvfp4

    return dequantize_nvfp4(weight, scales["weight_scale"], scales["weight_scale_2"])


def _unpack_blocks(weight: Tensor, scales: Mapping[str, Tensor]) -> Tensor:
    from ..targets.weights import dequantize_fp8

    return dequantize_fp8(weight, scales["weight_scale_inv"], (BLOCK, BLOCK))


def _unpack_fp8(weight: Tensor, scales: Mapping[str, Tensor]) -> Tensor:
    # One for all, or one for each row.
    return weight.float() * scales["weight_scale"].reshape(-1, 1)


# By a scale that tells it from those below.
FORMS = {
    "weight_scale_2": Form("NVFP4", FLOOR, _unpack_nvfp4),
    "weight_scale_inv": Form("FP8 in blocks", FP8_FLOOR, _unpack_blocks),
    "weight_scale": Form("FP8", FP8_FLOOR, _unpack_fp8),
}


def rounded(output: Head, source: Head) -> dict[str, Form]:
    """Return the linears, by slot, that an output stores with scales and its source without."""
    ours, theirs = needs(output.spec), needs(source.spec)
    # What differs in its shape, too, is another's.
    alike = sorted(slot for slot in ours.keys() & theirs.keys() if ours[slot].shape == theirs[slot].shape)
    found: dict[str, Form] = {}
    for suffix, form in FORMS.items():
        for slot in alike:
            if slot in source.places and f"{slot}.{suffix}" in output.places.keys() - source.places.keys():
                found.setdefault(slot, form)
    return found


def check_rounded(output: Head, source: Head, forms: Mapping[str, Form]) -> list[Finding]:
    """Hold each linear that was rounded against its source: those too far from it, or how near all are."""
    noise = {slot: _noise(output, source, slot, form) for slot, form in forms.items()}
    # NaN is no distance.
    far = [slot for slot, found in noise.items() if not found >= forms[slot].floor]
    if noise and not far:
        return [_summary(noise, forms)]
    return [_too_far(slot, noise[slot], forms[slot]) for slot in far]


def _noise(output: Head, source: Head, slot: str, form: Form) -> float:
    """Return the power of a weight over that of its change, in dB."""
    from ..targets.weights import spans
    from .quantized import decibels

    scales = {suffix: read_slot(output, f"{slot}.{suffix}") for suffix in FORMS if f"{slot}.{suffix}" in output.places}
    its, mine = read_slot(source, slot), form.unpack(read_slot(output, slot), scales)
    signal = change = 0.0
    # In blocks of rows, as doubles of the whole would be four times the weight.
    for begin, end in spans(tuple(its.shape)):
        one, other = its[begin:end].double(), mine[begin:end].double()
        signal += float(one.square().sum())
        change += float((other - one).square().sum())
    return decibels(signal, change)


def _too_far(slot: str, found: float, form: Form) -> Finding:
    return Finding(
        rule="K305",
        severity="error",
        where=slot,
        message=f"its signal over noise is {found:.1f} dB, and rounding to {form.name} leaves {form.floor} dB at the"
        " least",
        fix="Quantize the head again, and compare it with the head that it was made from.",
    )


def _summary(noise: Mapping[str, float], forms: Mapping[str, Form]) -> Finding:
    worst = min(noise, key=lambda slot: noise[slot])
    names = ", ".join(dict.fromkeys(form.name for form in forms.values()))
    return Finding(
        rule="K306",
        severity="note",
        where=worst,
        message=f"{len(noise)} linears are rounded to {names}: signal over noise {median(noise.values()):.1f} dB in the"
        f" middle, {noise[worst]:.1f} dB at worst; the scales of their inputs, which no source has, are not compared",
        fix="Nothing to do. What the head keeps of its acceptance is measured by kconv quantize-head.",
    )


def check_values(head: Head) -> list[Finding]:
    """Read every weight and find those that cannot be right: NaN, Inf, or zero throughout."""
    return list(run_rules(WEIGHTS, HeadSubject(head.checkpoint)))


# Actions that leave a slot's bits as they are.
SAME_BITS = ("copied", "renamed", "repacked")
# What a manifest's action changes about a head, beside the weights it speaks of.
CHANGES = {
    "cast": {"dtype"},
    "pruned": {"draft_vocab"},
    "expanded": {"draft_vocab"},
    "converted": {"attention", "rope"},
}


def wanted(output: Head, source: Head) -> list[Wanted]:
    """Return what is wanted of a head's files and its source's to hold the one against the other."""
    # A slot that is packed with others is compared as a part of what is stored.
    parts = [_part(head, slot) for head in (output, source) for slot in head.places]
    return [
        *wanted_digests(output.checkpoint, whole=True),
        *wanted_digests(source.checkpoint),
        *(Wanted(part.file, digests=[part]) for part in parts if part is not None),
    ]


def check_source(output: Head, source: Head, look: Look | None = None) -> list[Finding]:
    """Hold an output against its source: the manifest byte by byte, and each slot bit by bit.

    What the manifest says was computed, added from the target or left out is not the source's, and is not
    compared with it; what was quantized is, by its noise, with a manifest or without.

    Args:
        output: the head.
        source: what it was made from.
        look: what reads both already, as `wanted` says; a reading of its own if None.
    """
    if look is None:
        with Look(wanted(output, source)) as look:
            return check_source(output, source, look)
    findings: list[Finding] = []
    actions: dict[str, str] = {}
    left_out: set[str] = set()
    if (output.checkpoint.folder / MANIFEST).exists():
        try:
            manifest = read_manifest(output.checkpoint.folder)
            hold(manifest, output.checkpoint, source.checkpoint, look)
            actions = {step.output.name: step.action for step in manifest.tensors}
            left_out = {record.name for record in manifest.dropped}
        except KconvError as fault:
            findings.append(from_fault(fault, rule="K301"))
    else:
        findings.append(
            Finding(
                rule="K302",
                severity="warning",
                where=MANIFEST,
                message="the folder has no manifest; only its tensors are compared with the source's",
                fix="Convert the head with kconv to have one.",
            )
        )
    changed = {field for action in actions.values() for field in CHANGES.get(action, ())}
    fields = [name for name, value in vars(source.spec).items() if getattr(output.spec, name) != value]
    if set(fields) - changed:
        findings.append(
            Finding(
                rule="K303",
                severity="error",
                where="config.json",
                message=f"the output is another head than the source: {', '.join(fields)} differ",
                fix="Convert the source again.",
            )
        )
    computed = {slot for slot, (row, _) in output.places.items() if actions.get(row.name, "copied") not in SAME_BITS}
    forms = rounded(output, source)
    computed |= {name for slot in forms for name in (slot, *(f"{slot}.{suffix}" for suffix in SUFFIXES))}
    absent = {slot for slot, (_, info) in source.places.items() if info.name in left_out}
    if "converted" in actions.values():
        absent |= source.places.keys() - needs(output.spec).keys()
    for slot in sorted(source.places.keys() | output.places.keys()):
        if slot not in computed | absent and not _same_bits(source, output, slot, look):
            findings.append(
                Finding(
                    rule="K304",
                    severity="error",
                    where=slot,
                    message="the output's bits are not the source's",
                    fix="Convert the source again; do not serve this output.",
                )
            )
    return findings + check_rounded(output, source, forms)


def check_origin(source: Origin) -> list[Finding]:
    """Find where a user's word made another head of a source than its own files do."""
    fields = source.overruled
    if not fields:
        return []
    said = {name: (getattr(source.recorded.spec, name), getattr(source.alone.spec, name)) for name in fields}
    differ = "; ".join(
        f"{name} is {told} by the conversion's options, {alone} by its own files"
        for name, (told, alone) in said.items()
    )
    return [
        Finding(
            rule="K307",
            severity="warning",
            where=f"{source.alone.checkpoint.source}/config.json",
            message=f"the source reads otherwise by itself: {differ}",
            fix="Convert the source again without --captured, --captured-are and the other options that say how to "
            "read it; or, if its config is wrong, correct it there.",
        )
    ]


def is_identical(output: Head, findings: list[Finding]) -> bool:
    """Say whether every weight of an output has its source's bits: no bit was found to differ, and none computed."""
    if any(finding.rule in ("K301", "K304", "K305", "K306") for finding in findings):
        return False
    folder = output.checkpoint.folder
    return not (folder / MANIFEST).exists() or read_manifest(folder).exact


def from_fault(fault: KconvError, *, rule: str) -> Finding:
    """Return a fault that stopped a check as a finding."""
    return Finding(rule=rule, severity="error", where=fault.where, message=fault.what, fix=fault.fix)


def _part(head: Head, slot: str) -> TensorInfo | None:
    """Return where a slot's bytes are in the tensor that holds them; None where its layout packs it in another way."""
    row, info = head.places[slot]
    if isinstance(row.move, Same):
        return info
    known = needs(head.spec)
    if not isinstance(row.move, Stack) or not known.keys() >= set(row.slots):
        return None
    shapes = [known[one].shape for one in row.slots]
    place = row.slots.index(slot)
    before = sum(byte_size(info.dtype, shape) for shape in shapes[:place])
    size = byte_size(info.dtype, shapes[place])
    return info._replace(shape=shapes[place], begin=info.begin + before, size=size)


def _same_bits(source: Head, output: Head, slot: str, look: Look) -> bool:
    if slot not in source.places or slot not in output.places:
        return False
    one, other = _part(source, slot), _part(output, slot)
    if one is not None and other is not None:
        return (one.dtype, one.shape) == (other.dtype, other.shape) and look.digest(one) == look.digest(other)
    import torch

    # As bytes: NaN equals itself, and 0.0 is not -0.0.
    mine, its = (read_slot(head, slot) for head in (output, source))
    return (mine.dtype, mine.shape) == (its.dtype, its.shape) and torch.equal(
        *(t.contiguous().reshape(-1).view(torch.uint8) for t in (mine, its))
    )
