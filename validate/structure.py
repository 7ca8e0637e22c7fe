"""Compare a head with its manifest and the source that it was made from.

Linear layers that one head stores with scales and the other without have no bits in common. A rounded layer is still
close to its source; one with the wrong scale, nibble order or values is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from ..checkpoint.bytes import Look, Wanted
from ..checkpoint.formats import FP8, FP8_BLOCKS, HEAD_SCALES, NVFP4, OF_HEADS, StoredFormat
from ..checkpoint.manifest import MANIFEST, hold, read_manifest, wanted_digests
from ..convert.provenance import Origin
from ..convert.read import Head, find_part, read_slot
from ..drafters.slots import needs
from ..errors import AnotherSource, KconvError
from ..rule import Found
from .report import Finding
from .rules.comparisons import FLOOR, FP8_FLOOR, RULE
from .rules.head import HeadSubject
from .rules.subject import run_rules
from .rules.values import WEIGHTS

# Minimum signal over noise after rounding, dB, by format.
FLOORS = {NVFP4: FLOOR, FP8_BLOCKS: FP8_FLOOR, FP8: FP8_FLOOR}


def rounded(output: Head, source: Head) -> dict[str, StoredFormat]:
    """Return the linear layers, by slot, that an output stores with scales and its source without."""
    ours, theirs = needs(output.spec), needs(source.spec)
    # A different shape too means a different layer.
    alike = sorted(slot for slot in ours.keys() & theirs.keys() if ours[slot].shape == theirs[slot].shape)
    found: dict[str, StoredFormat] = {}
    for format_ in OF_HEADS:
        for slot in alike:
            if slot in source.places and f"{slot}.{format_.mark}" in output.places.keys() - source.places.keys():
                found.setdefault(slot, format_)
    return found


def check_rounded(output: Head, source: Head, formats: Mapping[str, StoredFormat]) -> list[Finding]:
    """Compare each rounded linear layer with its source: yield those too far from it, or a note on all."""
    noise = {slot: _noise(output, source, slot, format_) for slot, format_ in formats.items()}
    # NaN is not a distance.
    far = [slot for slot, found in noise.items() if not found >= FLOORS[formats[slot]]]
    if noise and not far:
        return [_summary(noise, formats)]
    return [_too_far(slot, noise[slot], formats[slot]) for slot in far]


def _noise(output: Head, source: Head, slot: str, format_: StoredFormat) -> float:
    """Return the ratio of a weight's power to that of its change, in dB."""
    from ..targets.weights import spans
    from .quantized import decibels

    scales = {s: read_slot(output, f"{slot}.{s}") for s in format_.scales if f"{slot}.{s}" in output.places}
    its, mine = read_slot(source, slot), format_.unpack({format_.values: read_slot(output, slot), **scales})
    signal = change = 0.0
    # In blocks of rows: in float64 the whole would take four times the weight.
    for begin, end in spans(tuple(its.shape)):
        one, other = its[begin:end].double(), mine[begin:end].double()
        signal += float(one.square().sum())
        change += float((other - one).square().sum())
    return decibels(signal, change)


def _too_far(slot: str, found: float, format_: StoredFormat) -> Finding:
    least = f"rounding to {format_.name} leaves at least {FLOORS[format_]} dB"
    return RULE["K305"].finding(Found(slot, f"its signal over noise is {found:.1f} dB, but {least}"))


def _summary(noise: Mapping[str, float], formats: Mapping[str, StoredFormat]) -> Finding:
    worst = min(noise, key=lambda slot: noise[slot])
    names = ", ".join(dict.fromkeys(format_.name for format_ in formats.values()))
    return RULE["K306"].finding(
        Found(
            worst,
            f"{len(noise)} linear layers are rounded to {names}: signal over noise {median(noise.values()):.1f} dB"
            f" median, {noise[worst]:.1f} dB at worst; their input scales, which no source has, are not compared",
        )
    )


def check_values(head: Head) -> list[Finding]:
    """Read every weight and find impossible ones: NaN, Inf, or all zeros."""
    return list(run_rules(WEIGHTS, HeadSubject(head.checkpoint)))


# Actions that keep a slot's bits.
SAME_BITS = ("copied", "renamed", "repacked")
# What a manifest's action changes about a head, besides its weights.
CHANGES = {
    "cast": {"dtype"},
    "pruned": {"draft_vocab"},
    "expanded": {"draft_vocab"},
    "converted": {"attention", "rope"},
}


def wanted(output: Head, source: Head) -> list[Wanted]:
    """Return what to read of a head's files and its source's in order to compare them."""
    # A slot that is packed with others is compared as a part of the stored tensor.
    parts = [find_part(head, slot) for head in (output, source) for slot in head.places]
    return [
        *wanted_digests(output.checkpoint, whole=True),
        *wanted_digests(source.checkpoint),
        *(Wanted(part.file, digests=[part]) for part in parts),
    ]


def check_source(output: Head, source: Head, look: Look | None = None) -> list[Finding]:
    """Compare an output with its source: the manifest byte by byte, and each slot bit by bit.

    Tensors that the manifest records as computed, added from the target or dropped are not compared with the source;
    quantized ones are compared by their noise, with or without a manifest.

    Args:
        output: the head.
        source: what it was made from.
        look: the reader of both, if one is running, see `wanted`; a separate reading if None.
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
        except AnotherSource as fault:
            return [RULE["K301"].of_problem(fault.problem("K301"))]  # that the two differ is a consequence
        except KconvError as fault:
            findings.append(RULE["K301"].of_problem(fault.problem("K301")))
    else:
        message = "the folder has no manifest, so only its tensors are compared with the source"
        if (source.checkpoint.folder / MANIFEST).exists():
            message += ", which has one: if the source was made from this head, exchange the two"
        findings.append(RULE["K302"].finding(Found(MANIFEST, message)))
    changed = {field for action in actions.values() for field in CHANGES.get(action, ())}
    meant = output.layout.becomes(source.spec)
    fields = [name for name, value in vars(meant).items() if getattr(output.spec, name) != value]
    if set(fields) - changed:
        message = f"the output is a different head from the source: {', '.join(fields)} differ"
        findings.append(RULE["K303"].finding(Found("config.json", message)))
    computed = {slot for slot, (row, _) in output.places.items() if actions.get(row.name, "copied") not in SAME_BITS}
    formats = rounded(output, source)
    computed |= {name for slot in formats for name in (slot, *(f"{slot}.{suffix}" for suffix in HEAD_SCALES))}
    absent = {slot for slot, (_, info) in source.places.items() if info.name in left_out}
    if "converted" in actions.values():
        absent |= source.places.keys() - needs(output.spec).keys()
    differing = [
        Found((output.places.get(slot) or source.places[slot])[1].name, _apart(source, output, slot))
        for slot in sorted(source.places.keys() | output.places.keys())
        if slot not in computed | absent and not _same_bits(source, output, slot, look)
    ]
    if output.spec.kind != source.spec.kind and not changed and len(differing) > 1:
        # Two heads of other architectures; that each tensor differs says no more.
        rest = f"so do {len(differing) - 1} other tensors: this is not what the output was made from"
        differing = [replace(differing[0], message=f"{differing[0].message}, and {rest}")]
    findings += map(RULE["K304"].finding, differing)
    return findings + check_rounded(output, source, formats)


def check_origin(source: Origin) -> list[Finding]:
    """Find where the user's options made a different head of a source than its own files do."""
    fields = source.overruled
    if not fields:
        return []
    said = {name: (getattr(source.recorded.spec, name), getattr(source.alone.spec, name)) for name in fields}
    differ = "; ".join(
        f"{name} is {told} with the conversion's options, but {alone} in its own files"
        for name, (told, alone) in said.items()
    )
    message = f"without the conversion's options the source reads differently: {differ}"
    return [RULE["K307"].finding(Found(f"{source.alone.checkpoint.source}/config.json", message))]


def is_identical(output: Head, findings: list[Finding]) -> bool | None:
    """Return whether every weight of an output has its source's bits: none differs, and none was computed.

    None if its manifest, which says what was computed, does not hold.
    """
    if any(finding.rule in ("K304", "K305", "K306") for finding in findings):
        return False
    if any(finding.rule == "K301" for finding in findings):
        return None
    folder = output.checkpoint.folder
    return not (folder / MANIFEST).exists() or read_manifest(folder).exact


def _apart(source: Head, output: Head, slot: str) -> str:
    if slot not in output.places:
        return "the output lacks it"
    return "the output's bits differ from the source's" if slot in source.places else "the source has no such tensor"


def _same_bits(source: Head, output: Head, slot: str, look: Look) -> bool:
    if slot not in source.places or slot not in output.places:
        return False
    one, other = find_part(source, slot), find_part(output, slot)
    return (one.dtype, one.shape) == (other.dtype, other.shape) and look.digest(one) == look.digest(other)
