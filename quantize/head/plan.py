"""Quantize a head's linear layers, from end to end.

For the planner this is a change like any other: unquantized tensors keep their bytes, and each source tensor is
accounted for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from ...checkpoint.bytes import digest, file_digest
from ...checkpoint.formats import CONFIG_KEY, INPUT_SCALE, SIDE_FILE
from ...checkpoint.manifest import FileRecord, Manifest, write_manifest
from ...checkpoint.source import Source
from ...checkpoint.staging import refuse_existing, staged
from ...checkpoint.tensors import read_tensor
from ...convert.computed import from_values
from ...convert.execute import fill
from ...convert.plan import Change, Plan, Replaced, SourceTensor, WriteOptions, check_layout, plan
from ...convert.read import Head, read_weights
from ...convert.shared import SLOTS, find_shared
from ...drafters.eagle3 import only_eagle3
from ...errors import ConfigUnsupported, LayoutCannot
from ...measure.batches import Calibration
from ...measure.calibration import stored_texts
from ...measure.retention import MIN_RETENTION, Retention, conversion_record
from ...targets.config import read_target_config
from ...targets.states import open_states
from .formats import LinearFormat, choice_of, groups_of
from .quantize import QuantizedLinears, quantize_linears


def quantize_head(
    head: Head,
    format_: LinearFormat,
    out: Path,
    target: Source,
    states: Path,
    *,
    min_retention: float = MIN_RETENTION,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Manifest, Retention]:
    """Write a head with quantized linear layers: check that it can be done, then calibrate, measure and write.

    Args:
        target: the head's target, with its embedding and lm_head.
        states: a folder that `kconv states` wrote for it.
        min_retention: refuse a head that retains less of the sampled acceptance length on held-out text.

    Returns:
        The manifest, and the share of the acceptance length retained on held-out text.

    Raises:
        OutputExists, OutputFailed: something exists at `out`, or it cannot be written.
        ConfigUnsupported: the head is already quantized.
        LayoutCannot: kconv does not write its layout, or an engine that reads it does not support the format or the
            head.
        TensorShape: a weight cannot be split into the format's groups.
        StatesInvalid: the states cannot be read, come from another target, or lack one of the head's layers.
        CalibrationInvalid: the states come from another target, or are too few.
        InputScalesInvalid: a linear layer reads NaN, only zeros, or more than a scale can hold.
        TensorValue: a weight is all zeros, or holds NaN or Inf.
        ConversionInaccurate: the held-out loss is greater than allowed.
    """
    refuse_existing(out)
    shared = find_shared(target, SLOTS)
    lm_head = read_tensor(shared.lm_head).float()
    check_head(head, format_)
    plan(head, head.layout, WriteOptions(shared))
    config = read_target_config(target.fetch_config())
    stored = open_states(states, config=config, captured=head.spec.captured)
    stored.check_target(target, digest(shared.lm_head))
    texts = stored_texts(stored, head.spec, is_fitted=False)
    weights = read_weights(head)
    weights |= {slot: read_tensor(shared.matching(slot, head.spec)) for slot in SLOTS if slot not in weights}
    calibration = texts.calibration(lm_head)
    quantized = quantize_linears(head.spec, weights, format_, calibration, min_retention=min_retention, say=say)
    with torch.no_grad():
        planned = plan(head, head.layout, WriteOptions(shared), change_linears(head, quantized, calibration))
        return write(planned, format_, out), quantized.held_out


def check_head(head: Head, format_: LinearFormat) -> None:
    """Refuse a head that cannot be quantized, before the work starts."""
    if head.is_quantized:
        raise ConfigUnsupported(
            "the head is already quantized",
            where=head.checkpoint.folder,
            fix="Pass the head that it was quantized from.",
        )
    if head.layout.write_config is None:
        raise LayoutCannot(
            f"kconv writes no quantized head in this one's layout, {head.layout.name}, but in those of engines",
            where=head.checkpoint.folder,
            fix="Convert it first, exactly: kconv to-vllm (or to-trtllm, to-sglang, to-portable) HEAD OUT.",
        )
    spec = only_eagle3(head.spec, "quantizes")
    slots = [slot for group in groups_of(spec, format_) for slot in group]
    check_layout(head.spec, head.layout, [f"{slot}.{suffix}" for slot in slots for suffix in format_.scales])


def change_linears(head: Head, quantized: QuantizedLinears, calibration: Calibration) -> Change:
    """Return the planner's change for quantized linear layers."""
    format_ = quantized.format
    replaced: dict[str, Replaced] = {}
    for slot, linear in quantized.linears.items():
        row, info = head.places[slot]
        for suffix, tensor in linear.items():
            if suffix == format_.stored.values:
                computed = from_values(tensor, f"{format_.name} of {info.dtype}")
                replaced[slot] = Replaced(computed, "quantized", (SourceTensor(row, info),))
            else:
                reason = "largest input of the calibration" if suffix == INPUT_SCALE else "with its weight"
                replaced[f"{slot}.{suffix}"] = Replaced(from_values(tensor, reason), "quantized")
    conversion = conversion_record(
        calibration,
        quantized.held_out,
        method=quantized.method,
        rows=quantized.rows,
        details={"format": format_.name, "input_amax": dict(quantized.input_amax)},
    )
    config = {CONFIG_KEY: format_.stored.quantization_config(choice_of(head.spec).exclude)}
    return Change(head.spec, replaced, config, conversion=conversion)


def write(planned: Plan, format_: LinearFormat, out: Path) -> Manifest:
    """Execute a plan of `change_linears`, and write the file that says how to read the scales."""
    with staged(out) as folder:
        manifest = fill(planned, folder)
        side = folder / SIDE_FILE
        content = format_.stored.hf_quant_config(choice_of(planned.spec).exclude)
        side.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        record = FileRecord(name=side.name, size=side.stat().st_size, sha256=file_digest(side))
        manifest = manifest.model_copy(update={"files": (*manifest.files, record)})
        write_manifest(folder, manifest)
    return manifest
