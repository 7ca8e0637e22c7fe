"""A folder against its own config, and against its source. What belongs here: findings that need no target."""

from __future__ import annotations

import torch

from ..checkpoint.manifest import MANIFEST, verify
from ..checkpoint.tensors import read_tensor
from ..convert.read import Head, read_slot
from ..errors import KconvError
from ..head.contract import FLOATS
from .report import Finding


def check_values(head: Head) -> list[Finding]:
    """Read every weight and find those that cannot be right: NaN, Inf, or zero throughout."""
    findings: list[Finding] = []
    for info in head.checkpoint.tensors.values():
        if info.dtype not in FLOATS:
            continue
        tensor = read_tensor(info)
        wrong = int((~torch.isfinite(tensor)).sum())
        if wrong:
            findings.append(
                Finding(
                    rule="K201",
                    severity="error",
                    where=info.name,
                    message=f"{wrong} of {tensor.numel()} values are NaN or Inf",
                    fix="Export the head again from a checkpoint of before the loss broke.",
                )
            )
        elif not tensor.any():
            findings.append(
                Finding(
                    rule="K202",
                    severity="error",
                    where=info.name,
                    message="every value is zero",
                    fix="Export the head again; this tensor was never filled.",
                )
            )
    return findings


def check_source(output: Head, source: Head) -> list[Finding]:
    """Hold an output against its source: the manifest byte by byte, and each slot bit by bit."""
    findings: list[Finding] = []
    if (output.checkpoint.folder / MANIFEST).exists():
        try:
            verify(output.checkpoint.folder, source.checkpoint)
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
    if output.spec != source.spec:
        fields = [name for name in vars(source.spec) if getattr(source.spec, name) != getattr(output.spec, name)]
        findings.append(
            Finding(
                rule="K303",
                severity="error",
                where="config.json",
                message=f"the output is another head than the source: {', '.join(fields)} differ",
                fix="Convert the source again.",
            )
        )
    for slot in source.places.keys() | output.places.keys():
        if not _same_bits(source, output, slot):
            findings.append(
                Finding(
                    rule="K304",
                    severity="error",
                    where=slot,
                    message="the output's bits are not the source's",
                    fix="Convert the source again; do not serve this output.",
                )
            )
    return findings


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
