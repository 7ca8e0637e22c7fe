"""Convert a head's attention, from end to end.

`convert_attention` writes the head; `fit_attention` computes it; `change_attention` passes it to the planner as a
change like any other: unconverted tensors keep their bytes, and each source tensor is accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.bytes import digest
from ...checkpoint.manifest import Manifest
from ...checkpoint.source import Source
from ...checkpoint.tensors import TORCH, read_tensor
from ...drafters.fingerprint import fingerprint
from ...drafters.forward import DraftHead
from ...drafters.rope import partial_factor, rotary_dims
from ...drafters.slots import needs
from ...drafters.spec import Gqa, HeadSpec, Mla
from ...engines.layout import Layout
from ...errors import TensorValue
from ...measure.batches import Calibration, check_calibration
from ...measure.calibration import prompted_texts, stored_texts
from ...measure.compare import compare
from ...measure.retention import MIN_RETENTION, Retention, check_retention, conversion_record
from ...targets.states import StoredStates
from ..computed import from_blocks
from ..config import refuse_unstated
from ..execute import execute
from ..options import AttentionOptions
from ..plan import Change, Replaced, SourceTensor, WriteOptions, check_layout, plan
from ..provenance import read_provenance
from ..read import Head, read_weights
from ..shared import SLOTS, find_shared, refuse_target
from .heal import ATTENTION, REST, Progress, heal, train_alike
from .rotary import find_ladders, lengthen
from .swap import Attention, Kind, Shape, attention_of, check_convertible, with_attention
from .to_mha import convert_to_mha, fit_head_dim
from .to_mla import convert_to_mla, pad_mla

HEAL_STEPS = 200
"""What is kept after these, of an original with the same training, is in docs/attention.md."""


@dataclass(frozen=True)
class FittedAttention:
    """A head with another attention.

    Attributes:
        head: in the dtype of the source's weights; computed in fp32.
        slots: the slots that differ from the source.
        method: the steps, in one sentence.
        held_out: figures on text that neither the fit nor healing saw.
    """

    head: DraftHead
    slots: frozenset[str]
    method: str
    rows: int
    heal_steps: int
    held_out: Retention
    details: Mapping[str, Any]


def convert_attention(
    head: Head,
    layout: Layout,
    out: Path,
    kind: Kind,
    options: AttentionOptions,
    target: Source,
    states: StoredStates | None,
    *,
    say: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> tuple[Manifest, Retention]:
    """Write a head with the other attention: check that it can be done, then calibrate, fit, measure and write.

    Without states the target runs over the options' prompts; its weights are needed in any case.

    Returns:
        The manifest, and the share of the acceptance length retained on held-out text.

    Raises:
        OutputExists, OutputFailed: the folder exists, or cannot be written.
        LayoutCannot: the head already has that attention, or has parts that the other attention or the layout does not
            support.
        ConfigInvalid: see `refuse_unstated`.
        PromptsInvalid: the prompts cannot be read.
        StatesInvalid, CalibrationInvalid: the states are damaged, too few, or come from another target.
        TensorValue: a weight of the head is not finite.
        ConversionInaccurate: the held-out loss is greater than allowed.
        TrainingFailed: healing stopped with an error.
    """
    refuse_unstated(head.read)
    spec = head.spec
    head_dim = None if options.head_dim == "auto" else int(options.head_dim)
    check_layout(replace(outline(spec, kind, head_dim), dtype=spec.dtype), layout, head.places)
    shared = find_shared(target, SLOTS)
    if states is not None:
        states.check_target(target, digest(shared.lm_head))
        texts = stored_texts(states, spec)
    else:
        file, trusted = Path(options.prompts or ""), options.trust_remote_code
        texts = prompted_texts(file, options.context, spec, target, trust_remote_code=trusted)
    refuse_target(head, layout, shared)
    read_provenance(head.checkpoint.folder).check_target(shared)
    weights = read_weights(head)
    weights |= {slot: read_tensor(shared.matching(slot, spec)) for slot in SLOTS if slot not in weights}
    moved = {n: w.to(options.device, torch.float32 if w.is_floating_point() else None) for n, w in weights.items()}
    say("gathering states")
    calibration = texts.calibration(read_tensor(shared.lm_head).to(options.device, torch.float32))
    fitted = fit_attention(
        DraftHead(spec, moved),
        kind,
        calibration,
        dtype=spec.dtype,
        head_dim=head_dim,
        shape=Shape(options.latent),
        steps=HEAL_STEPS if options.heal is None else options.heal,
        min_retention=options.min_retention,
        say=say,
        progress=progress,
    )
    with torch.no_grad():
        planned = plan(head, layout, WriteOptions(shared), change_attention(head, fitted, calibration))
        return execute(planned, out), fitted.held_out


def change_attention(head: Head, fitted: FittedAttention, calibration: Calibration) -> Change:
    """Return the planner's change for a fitted attention."""
    spec = replace(fitted.head.spec, dtype=head.spec.dtype)
    before, after = needs(head.spec), needs(spec)
    old = tuple(SourceTensor(*place) for slot, place in head.places.items() if slot not in after)
    reason = (
        f"{fitted.method}; retains {fitted.held_out.kept:.2%} of {fitted.held_out.against} sampled acceptance length "
        f"on {fitted.held_out.sequences} held-out sequences"
    )
    replaced: dict[str, Replaced] = {}
    for slot in fitted.slots:
        own = (SourceTensor(*head.places[slot]),) if slot in head.places else ()
        # A tensor of the new attention derives from the whole old one; a healed tensor only from itself.
        is_new = slot not in before or slot == "0.o_proj"
        computed = from_blocks(
            spec.dtype, after[slot].shape, reason, partial(_stored, fitted.head.weights[slot], spec.dtype)
        )
        replaced[slot] = Replaced(computed, "converted", tuple(dict.fromkeys([*own, *(old if is_new else ())])))
    conversion = conversion_record(
        calibration,
        fitted.held_out,
        method=fitted.method,
        rows=fitted.rows,
        details=fitted.details,
        heal_steps=fitted.heal_steps,
        fingerprint=fingerprint(fitted.head),
    )
    return Change(spec, replaced, conversion=conversion)


def _stored(weight: Tensor, dtype: str) -> list[Tensor]:
    return [weight.detach().cpu().to(TORCH[dtype]).contiguous()]


def fit_attention(
    head: DraftHead,
    kind: Kind,
    calibration: Calibration,
    *,
    dtype: str,
    head_dim: int | None = None,
    shape: Shape | None = None,
    steps: int = HEAL_STEPS,
    slots: Sequence[str] = (*ATTENTION, *REST),
    min_retention: float = MIN_RETENTION,
    say: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> FittedAttention:
    """Return a head, given in fp32, with the other attention, fitted, healed and measured.

    Args:
        dtype: safetensors name of the stored dtype; figures are computed with weights rounded to it.
        head_dim: of MHA, padded with zeros; None for the smallest possible.
        shape: dims of MLA; Kimi-K2's own by default.
        steps: healing steps; the record says 0 if they gained nothing, and the output then omits them.
        slots: the slots to heal.
        min_retention: refuse a head that retains less of the sampled acceptance length on held-out text.
    """
    shape = shape or Shape()
    outline(head.spec, kind, head_dim, shape)
    _check_values(head)
    rows = check_calibration(calibration, head.spec)
    say(f"fitting on {rows:,} rows")
    attention, details = _fit(head, kind, calibration, head_dim, shape)
    converted = with_attention(head, attention)
    tried: int | None = steps
    trained = None
    if steps:
        say("healing")
        healed = heal(head, converted, calibration, steps, slots=slots, progress=progress)
        if healed is converted:
            say("healing gained nothing on the texts that choose; keeping the head as fitted")
            steps, tried = 0, None
        else:
            say("training the original by the same steps, to compare with it")
            trained = as_stored(train_alike(head, converted, calibration, steps, slots=slots, progress=progress), dtype)
        converted = healed
    if kind == "mla":
        converted = with_attention(converted, pad_mla(attention_of(converted), shape))
    converted = as_stored(converted, dtype)
    say("measuring on held-out text")
    figures = compare(head, converted, calibration, trained=trained)
    check_retention(
        figures, min_retention, "" if tried is None else f"Heal for more steps (--heal {max(200, 5 * tried)})."
    )
    method = f"{head.spec.kind.upper()} to {kind.upper()}, approximate: least squares on states"
    if kind == "mla" and shape.latent < shape.kv_lora_rank:
        method += f", a latent of {shape.latent} entries"
    method += f", {steps} steps of healing" if steps else ", no healing"
    return FittedAttention(converted, changed_slots(head, converted), method, rows, steps, figures, details)


def as_stored(head: DraftHead, dtype: str) -> DraftHead:
    """Return a head whose weights are rounded to the stored dtype, in the dtype used before.

    The embedding and lm_head stay unchanged: they are not converted, and may be the target's.
    """
    rounded = {
        name: w.to(TORCH[dtype]).to(w.dtype) if w.is_floating_point() and name not in SLOTS else w
        for name, w in head.weights.items()
    }
    return DraftHead(head.spec, rounded)


def changed_slots(original: DraftHead, converted: DraftHead) -> frozenset[str]:
    """Return the slots that the original lacks, or has with other values."""
    own = original.weights
    return frozenset(
        name
        for name, weight in converted.weights.items()
        if name not in own or own[name].shape != weight.shape or not torch.equal(own[name], weight)
    )


def outline(spec: HeadSpec, kind: Kind, head_dim: int | None = None, shape: Shape | None = None) -> HeadSpec:
    """Return the spec of a converted head from its source's spec; the first of MLA's ladders stands for all."""
    check_convertible(spec, kind)
    dims, shape = spec.attention, shape or Shape()
    if isinstance(dims, Mla):
        head_dim = fit_head_dim(dims, head_dim)
        rope = replace(spec.rope, partial_rotary_factor=partial_factor(dims.qk_rope_head_dim, head_dim))
        return replace(spec, attention=Gqa(dims.heads, dims.heads, head_dim), rope=rope)
    ladder = find_ladders(spec.rope, rotary_dims(dims, spec.rope) // 2, shape.rotary // 2)[0]
    mla = Mla(dims.heads, shape.q_lora_rank, shape.kv_lora_rank, dims.head_dim, shape.qk_rope_head_dim, dims.head_dim)
    rope = lengthen(ladder.rope, shape.rotary // 2, shape.qk_rope_head_dim // 2)
    return replace(spec, attention=mla, rope=rope)


def _check_values(head: DraftHead) -> None:
    for name, weight in head.weights.items():
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            raise TensorValue(
                f"the head's {name} holds NaN or Inf",
                where=name,
                fix="Convert a head with finite weights. kconv validate lists the bad tensors.",
            )


def _fit(
    head: DraftHead, kind: Kind, calibration: Calibration, head_dim: int | None, shape: Shape
) -> tuple[Attention, dict[str, Any]]:
    if kind == "mha":
        attention, linear = convert_to_mha(head, calibration, head_dim)
        figures = {name: {k: v for k, v in asdict(one).items() if k != "map"} for name, one in linear.items()}
        return attention, {"latent_norms": figures}
    attention, found = convert_to_mla(head, calibration, shape)
    gauges = {"q": found.query_gauge, "kv": found.kv_gauge}
    assert isinstance(attention.dims, Mla)
    return attention, {
        "latent": attention.dims.kv_lora_rank,
        "ladder": found.ladder,
        "ladder_errors": found.ladder_errors,
        "latent_length_variation": {name: gauge.variation for name, gauge in gauges.items()},
    }
