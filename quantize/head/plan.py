"""A quantized head as a plan like any other, and its files.

The plan is carried out by `convert.execute`: what is not quantized keeps its bytes, and each source tensor is
accounted for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ...checkpoint.bytes import file_digest
from ...checkpoint.manifest import FileRecord, Manifest, write_manifest
from ...checkpoint.staging import staged
from ...checkpoint.tensors import NAMES
from ...convert.attention.calibration import Calibration
from ...convert.attention.plan import record
from ...convert.execute import fill
from ...convert.made import Values
from ...convert.plan import Plan, Step, Wishes, plan
from ...convert.quantized import CONFIG_KEY, SIDE_FILE
from ...convert.read import Head
from ...convert.shared import Shared
from ...engines.layout import Stored
from ...engines.moves import Same
from ...errors import ConfigUnsupported, LayoutCannot
from ...head.contract import Expected
from .formats import Format, config_block, side_file
from .linears import choice_of, groups_of
from .quantize import Quantized


def plan_plain(head: Head, format_: Format, target: Shared) -> Plan:
    """Plan a head as it is, in the layout it has, or refuse one that cannot be quantized: before the work, not behind.

    Args:
        head: the source.
        format_: what its linears shall become.
        target: whose embedding and lm_head the head may share.

    Raises:
        ConfigUnsupported: it is quantized already.
        LayoutCannot: kconv does not write its layout, or the engine behind it cannot read the format or the head.
        TensorShape: a weight cannot be cut into the format's groups.
    """
    if head.is_quantized:
        raise ConfigUnsupported(
            "the head is quantized already",
            where=head.checkpoint.folder,
            fix="Give the head that it was quantized from.",
        )
    if head.layout.write_config is None:
        raise LayoutCannot(
            f"the head is in {head.layout.name}'s layout, which is a trainer's, and no engine's",
            where=head.checkpoint.folder,
            fix="Convert it first, exactly: kconv to-vllm (or to-trtllm, to-sglang, to-portable) HEAD OUT.",
        )
    slots = [slot for group in groups_of(head.spec, format_) for slot in group]
    scales = [f"{slot}.{suffix}" for slot in slots for suffix in format_.scales]
    for limit in head.layout.limits:
        if limit.applies(head.spec, scales):
            raise LayoutCannot(limit.what, where=limit.source, fix=limit.fix)
    return plan(head, head.layout, Wishes(target))


def plan_quantized(plain: Plan, quantized: Quantized, calibration: Calibration) -> Plan:
    """Return the plan of a head with its linears quantized.

    Args:
        plain: as `plan_plain` gave it.
        quantized: what became of the linears.
        calibration: what their scales are of.
    """
    steps = tuple(made for step in plain.steps for made in _steps(step, quantized))
    config = dict(plain.config) | {CONFIG_KEY: config_block(quantized.format, choice_of(plain.spec).exclude)}
    told = record(
        calibration,
        quantized.held_out,
        method=quantized.method,
        rows=quantized.rows,
        details={"format": quantized.format.name, "input_amax": dict(quantized.input_amax)},
    )
    return replace(plain, config=config, steps=steps, conversion=told)


def write(plan_: Plan, format_: Format, out: Path) -> Manifest:
    """Carry out a plan of `plan_quantized`.

    Raises:
        As `convert.execute.execute`.
    """
    with staged(out) as folder:
        manifest = fill(plan_, folder)
        side = folder / SIDE_FILE
        side.write_text(json.dumps(side_file(format_, choice_of(plan_.spec).exclude), indent=2) + "\n")
        record = FileRecord(name=side.name, size=side.stat().st_size, sha256=file_digest(side))
        manifest = manifest.model_copy(update={"files": (*manifest.files, record)})
        write_manifest(folder, manifest)
    return manifest


def _steps(step: Step, quantized: Quantized) -> Iterator[Step]:
    (slot, *_), name = step.row.slots, step.name
    linear = quantized.linears.get(slot)
    if linear is None:
        yield step
        return
    algorithm = quantized.format.name
    for suffix, tensor in linear.items():
        if suffix == "weight":
            made = Values(tensor, f"{algorithm} of {step.sources[0].info.dtype}")
            yield Step(name, step.sources, _row(name, slot, tensor), "quantized", made)
            continue
        said = "largest input of the calibration" if suffix == "input_scale" else "with its weight"
        scale = f"{name.removesuffix('.weight')}.{suffix}"
        yield Step(scale, (), _row(scale, f"{slot}.{suffix}", tensor), "quantized", Values(tensor, said))


def _row(name: str, slot: str, tensor: Tensor) -> Stored:
    return Stored(Expected(name, tuple(tensor.shape), (NAMES[tensor.dtype],), may_be_absent=True), (slot,), Same())
