"""A folder against its own config, and against its source."""

from __future__ import annotations

import torch

from ..checkpoint.manifest import MANIFEST, read_manifest, verify
from ..convert.provenance import Origin
from ..convert.quantized import SUFFIXES
from ..convert.read import Head, read_slot
from ..errors import KconvError
from ..head.slots import needs
from .quantized_head import check_rounded, rounded
from .report import Finding
from .rules.head import HeadSubject
from .rules.rule import run_rules
from .rules.values import WEIGHTS


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


def check_source(output: Head, source: Head) -> list[Finding]:
    """Hold an output against its source: the manifest byte by byte, and each slot bit by bit.

    What the manifest says was computed, added from the target or left out is not the source's, and is not
    compared with it; what was quantized is, by its noise, with a manifest or without.
    """
    findings: list[Finding] = []
    actions: dict[str, str] = {}
    left_out: set[str] = set()
    if (output.checkpoint.folder / MANIFEST).exists():
        try:
            manifest = verify(output.checkpoint.folder, source.checkpoint)
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
        if slot not in computed | absent and not _same_bits(source, output, slot):
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
        f"{name} is {told} as the conversion was told, {alone} by itself" for name, (told, alone) in said.items()
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


def _same_bits(source: Head, output: Head, slot: str) -> bool:
    if slot not in source.places or slot not in output.places:
        return False
    one, other = read_slot(source, slot), read_slot(output, slot)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    # As bytes: NaN equals itself, and 0.0 is not -0.0.
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))
