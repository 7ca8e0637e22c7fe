"""A plan carried out. What belongs here: bytes streamed or moved, the manifest written, the folder renamed last."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from ..checkpoint.bytes import Entry, Written, digest, file_digest, stream, write_safetensors
from ..checkpoint.header import TensorInfo
from ..checkpoint.manifest import FileRecord, Manifest, StepRecord, TensorRecord, write_manifest
from ..checkpoint.staging import staged
from ..checkpoint.tensors import entry
from ..head.slots import needs
from .launch import launch_files
from .plan import Plan, Step
from .read import read_slot

WEIGHTS = "model.safetensors"


def execute(plan: Plan, out: Path, advance: Callable[[int], None] = lambda _: None) -> Manifest:
    """Carry out a plan.

    Args:
        plan: what to do.
        out: the folder to make; nothing may be there.
        advance: called with the number of bytes written since the last call.

    Returns:
        The manifest, which is also written beside the weights.

    Raises:
        OutputExists, OutputFailed: see `checkpoint.staging`.
    """
    with staged(out) as folder:
        weights = write_safetensors(folder / WEIGHTS, [_entry(plan, step, advance) for step in plan.steps])
        files = [FileRecord(name=weights.file, size=weights.size, sha256=weights.sha256)]
        for name, text in launch_files(plan.spec, plan.layout.name).items():
            files.append(_write_text(folder / name, text))
        # Last, as without a config no reader takes a folder for a checkpoint.
        files.append(_write_text(folder / "config.json", json.dumps(plan.config, indent=2) + "\n"))
        manifest = _manifest(plan, weights, tuple(files))
        write_manifest(folder, manifest)
    return manifest


def _entry(plan: Plan, step: Step, advance: Callable[[int], None]) -> Entry:
    info = step.sources[0].info
    if not step.is_copy:
        # Packed when its turn comes, so that one tensor is in memory at a time.
        return Entry(
            step.name, info.dtype, step.row.expected.shape, lambda: entry(step.name, _pack(plan, step)).chunks()
        )

    def chunks() -> Iterator[memoryview]:
        for chunk in stream(info):
            yield chunk
            advance(len(chunk))

    return Entry(step.name, info.dtype, info.shape, chunks)


def _pack(plan: Plan, step: Step) -> torch.Tensor:
    return step.row.move.pack([read_slot(plan.source, slot) for slot in step.row.slots])


def _write_text(file: Path, text: str) -> FileRecord:
    file.write_text(text)
    return FileRecord(name=file.name, size=file.stat().st_size, sha256=file_digest(file))


def _record(info: TensorInfo, sha256: str) -> TensorRecord:
    return TensorRecord(name=info.name, dtype=info.dtype, shape=info.shape, sha256=sha256)


def _manifest(plan: Plan, weights: Written, files: tuple[FileRecord, ...]) -> Manifest:
    head = plan.source
    steps: list[StepRecord] = []
    for step in plan.steps:
        sha256 = weights.digests[step.name]
        infos = [source.info for source in step.sources]
        dtype, shape = infos[0].dtype, step.row.expected.shape
        steps.append(
            StepRecord(
                action=step.action,
                output=TensorRecord(name=step.name, dtype=dtype, shape=shape, sha256=sha256),
                # A copy's source has the very bytes that were hashed on their way.
                sources=tuple(_record(info, sha256 if step.is_copy else digest(info)) for info in infos),
            )
        )
    integers = {name for name, need in needs(plan.spec).items() if need.slot.dtype}
    return Manifest(
        exact=True,
        source=head.checkpoint.source,
        source_layout=head.layout.name,
        layout=plan.layout.name,
        spec=asdict(plan.spec) | {"kind": plan.spec.kind},
        captured_by=head.read.captured.how,
        parameters=sum(
            math.prod(step.row.expected.shape) for step in plan.steps if not integers.intersection(step.row.slots)
        ),
        config_carried=tuple(head.read.carried),
        config_dropped=head.read.dropped,
        tensors=tuple(steps),
        dropped=dict(plan.dropped),
        files=files,
    )
