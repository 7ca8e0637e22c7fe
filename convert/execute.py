"""Execute a plan."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from ..checkpoint.bytes import Entry, Written, digest, file_digest, stream, write_safetensors
from ..checkpoint.formats import SIDE_FILE
from ..checkpoint.header import TensorInfo
from ..checkpoint.manifest import (
    DroppedRecord,
    FileRecord,
    Manifest,
    StepRecord,
    TensorRecord,
    Unverified,
    write_manifest,
)
from ..checkpoint.pickles import PICKLE
from ..checkpoint.staging import staged
from ..checkpoint.values import BEFORE_IT_BROKE, Values
from ..drafters.slots import needs
from ..engines.base import Deployment, needs_code
from ..engines.registry import launch_files
from ..errors import TensorValue
from .plan import Plan, Step
from .provenance import Provenance, count_parameters, read_provenance
from .read import Head, find_part

WEIGHTS = "model.safetensors"


def execute(plan: Plan, out: Path, advance: Callable[[int], None] = lambda _: None) -> Manifest:
    """Execute a plan; return the manifest, which is also written next to the weights.

    `advance` is called with the number of bytes written since the last call.

    Raises:
        OutputExists, OutputFailed: the folder exists, or cannot be written.
        TensorValue: a tensor of the output would hold NaN or Inf, or only zeros.
        NotACheckpoint, CorruptHeader: a source cannot be read, or became shorter.
        ManifestMismatch: the source has a kconv.json that does not match the schema.
        TargetInvalid: the target is not the one that the source left a tensor to.
    """
    with staged(out) as folder:
        return fill(plan, folder, advance)


def fill(
    plan: Plan, folder: Path, advance: Callable[[int], None] = lambda _: None, training: Mapping[str, Any] | None = None
) -> Manifest:
    """Execute a plan in a folder that the caller has staged.

    The record of how a head was trained, and how its attention was converted, is copied from the source's manifest;
    `training` is for the code that trained it.
    """
    past = read_provenance(plan.source.checkpoint.folder)
    past.check_config(plan.source.spec)
    if plan.target is not None:
        past.check_target(plan.target)
    weights = write_safetensors(
        folder / WEIGHTS, [_entry(plan, step) for step in plan.steps], check=_filled(plan), advance=advance
    )
    files = [FileRecord(name=weights.file, size=weights.size, sha256=weights.sha256)]
    # A layout that is only read belongs to a trainer, not an engine.
    if plan.layout.write_config is not None:
        own_code = needs_code(plan.target.config if plan.target else None, plan.config)
        served = Deployment(own_code=own_code)
        # A folder's path is of this machine.
        if plan.target is not None and not plan.target.is_folder:
            target, revision = plan.target.served
            served = Deployment(target, own_code=own_code, revision=revision)
        for name, text in launch_files(plan.spec, plan.layout.name, served).items():
            files.append(_write(folder / name, text.encode()))
    if plan.source.side:
        files.append(_write(folder / SIDE_FILE, plan.source.side))
    # Written last: without a config no reader mistakes the folder for a checkpoint.
    files.append(_write(folder / "config.json", (json.dumps(plan.config, indent=2) + "\n").encode()))
    manifest = _manifest(plan, past, weights, tuple(files), training)
    # What is rebuilt was wrong; that it is not what was written is no news.
    past.check(source for step in manifest.tensors if step.action != "rebuilt" for source in step.sources)
    write_manifest(folder, manifest)
    return manifest


def _entry(plan: Plan, step: Step) -> Entry:
    computed = step.computed
    if computed is not None:
        return Entry(step.name, step.dtype, step.shape, computed.chunks)
    if step.is_copy:
        info = step.sources[0].info
        return Entry(step.name, info.dtype, info.shape, lambda: stream(info))
    # Each move puts the slots' bytes one after the other.
    parts = [find_part(plan.source, slot) for slot in step.row.slots]
    return Entry(step.name, step.dtype, step.shape, lambda: chain.from_iterable(map(stream, parts)))


def _filled(plan: Plan) -> Callable[[str, Values], None]:
    sources = {step.name: [source.info for source in step.sources] for step in plan.steps}
    known = needs(plan.spec)
    zeros = {step.name for step in plan.steps if all(s in known and known[s].slot.may_be_zero for s in step.row.slots)}

    def check(name: str, values: Values) -> None:
        # A bias may be all zeros; an all-zero matrix or norm was never filled.
        never_filled = values.zero and not name.endswith(".bias") and name not in zeros
        if not values.not_finite and not never_filled:
            return
        stored = " + ".join(info.name for info in sources[name]) or name
        where = ", ".join(sorted({str(info.file) for info in sources[name]}))
        if never_filled:
            raise TensorValue(f"every value of {stored} is zero", where=where, fix="Export the head again.")
        raise TensorValue(
            f"{values.not_finite:,} value{'s' * (values.not_finite > 1)} of {stored} "
            f"{'are' if values.not_finite > 1 else 'is'} NaN or Inf",
            where=where,
            fix=BEFORE_IT_BROKE,
        )

    return check


def _write(file: Path, data: bytes) -> FileRecord:
    file.write_bytes(data)
    if data.startswith(b"#!"):
        file.chmod(file.stat().st_mode | 0o111)
    return FileRecord(name=file.name, size=len(data), sha256=file_digest(file))


def _record(info: TensorInfo, blake3: str) -> TensorRecord:
    return TensorRecord(name=info.name, dtype=info.dtype, shape=info.shape, blake3=blake3)


def _dropped(info: TensorInfo, reason: str) -> DroppedRecord:
    return DroppedRecord(name=info.name, dtype=info.dtype, shape=info.shape, blake3=digest(info), reason=reason)


def _unverified(head: Head, past: Provenance) -> tuple[Unverified, ...]:
    """Return the facts about a head that rest on the user's word or on a default, now or at its source's conversion."""
    found = {one.fact: one for one in head.read.unverified}
    every = (*found.values(), *(one for one in past.unverified if one.fact not in found))
    return tuple(one for one in every if one.fact not in head.read.measured)


def _manifest(
    plan: Plan, past: Provenance, weights: Written, files: tuple[FileRecord, ...], training: Mapping[str, Any] | None
) -> Manifest:
    head = plan.source
    conversion = past.conversion(plan.conversion, exact=plan.exact)
    # A newly trained head is not the draft of anything else.
    same = training is not None or (plan.exact and conversion is None and not past.altered)
    told = training or past.training
    steps: list[StepRecord] = []
    for step in plan.steps:
        blake3 = weights.digests[step.name]
        infos = [source.info for source in step.sources]
        steps.append(
            StepRecord(
                action=step.action,
                output=TensorRecord(name=step.name, dtype=step.dtype, shape=step.shape, blake3=blake3),
                # A copied tensor has exactly the bytes that were hashed while copying.
                sources=tuple(_record(info, blake3 if step.is_copy else digest(info)) for info in infos),
                reason=step.computed.reason if step.computed else "",
            )
        )
    parameters = count_parameters(plan)
    return Manifest(
        exact=plan.exact,
        draft="as it ships" if same else "another",
        source=head.checkpoint.source,
        source_config=file_digest(head.checkpoint.folder / "config.json"),
        source_pickles=tuple(file.name for file in head.checkpoint.files if fnmatch.fnmatch(file.name, PICKLE)),
        source_layout=head.layout.name,
        layout=plan.layout.name,
        hints=head.hints,
        spec=asdict(plan.spec) | {"kind": plan.spec.kind},
        captured_by=head.read.captured.how,
        unverified=_unverified(head, past),
        parameters=parameters.total,
        parameters_by_origin=parameters,
        config_copied=tuple(head.read.carried),
        config_dropped=head.read.dropped,
        tensors=tuple(steps),
        dropped=tuple(_dropped(head.checkpoint.tensors[name], reason) for name, reason in plan.dropped.items()),
        left_to_target=past.left_to_target({slot for step in plan.steps for slot in step.row.slots})
        | {slot: _record(info, digest(info)) for slot, info in plan.left.items()},
        files=files,
        training=dict(told) if told else None,
        conversion=conversion,
    )
