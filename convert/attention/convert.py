"""A head with the other attention, from end to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from ...errors import LayoutCannot, TensorValue
from ...head.forward import DraftHead
from ...head.rope import partial_factor, rotary_dims
from ...head.spec import Gqa, HeadSpec, Mla
from .assemble_mla import Shape, pad_mla
from .calibration import Calibration, check_calibration
from .expand_mla import fit_head_dim
from .heal import ATTENTION, REST, Progress, heal
from .held_out import compare
from .kept import KEEP, check_kept
from .ladder import find_ladders, lengthen
from .plan import Converted, as_stored, changed_slots
from .swap import Attention, attention_of, check_convertible, with_attention
from .to_mha import convert_to_mha
from .to_mla import convert_to_mla

Kind = Literal["mha", "mla"]
HEAL_STEPS = 200
"""Enough for 99.9 % of the acceptance at 1 : 4; at 1 : 32 more steps gain more still (docs/attention.md)."""


def convert_attention(
    head: DraftHead,
    kind: Kind,
    calibration: Calibration,
    *,
    dtype: str,
    head_dim: int | None = None,
    shape: Shape | None = None,
    steps: int = HEAL_STEPS,
    slots: Sequence[str] = (*ATTENTION, *REST),
    keep: float = KEEP,
    say: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> Converted:
    """Return a head with the other attention.

    Args:
        head: the head, in fp32.
        kind: what it shall have.
        calibration: states of its target.
        dtype: safetensors name of what is stored; the figures are of weights so rounded.
        head_dim: of MHA, padded with zeros; None for the least.
        shape: dims of MLA; Kimi-K2's own by default.
        steps: of healing; the record says 0 where they did not come nearer, and are not in the output.
        slots: what is healed.
        keep: refuse a head that keeps less of the sampled acceptance length on held-out text.
        say: told what is going on.
        progress: told after each step of healing.

    Raises:
        LayoutCannot: the head has that attention already, or parts that the other has no place for.
        TensorValue: a weight of the head is no finite number.
        CalibrationInvalid: the states are not of this head's target, or too few.
        ConversionInaccurate: the held-out loss is greater than allowed.
        TrainingFailed: healing broke off.
    """
    outline(head.spec, kind, head_dim, shape or Shape())
    _check_values(head)
    rows = check_calibration(calibration, head.spec)
    say(f"fitting on {rows:,} rows")
    attention, details = _fit(head, kind, calibration, head_dim, shape or Shape())
    converted = with_attention(head, attention)
    tried: int | None = steps
    if steps:
        say("healing")
        healed = heal(head, converted, calibration, steps, slots=slots, progress=progress)
        if healed is converted:
            say("healing did not come nearer to the original: the head is left as it was fitted")
            steps, tried = 0, None
        converted = healed
    if kind == "mla":
        converted = with_attention(converted, pad_mla(attention_of(converted), shape or Shape()))
    converted = as_stored(converted, dtype)
    say("measuring on held-out text")
    figures = compare(head, converted, calibration)
    check_kept(figures, keep, "" if tried is None else f"Heal for more steps (--heal {max(200, 5 * tried)}).")
    method = f"{head.spec.kind.upper()} to {kind.upper()}, approximate: least squares on states"
    method += f", {steps} steps of healing" if steps else ", no healing"
    return Converted(converted, changed_slots(head, converted), method, rows, steps, figures, details)


def outline(spec: HeadSpec, kind: Kind, head_dim: int | None = None, shape: Shape | None = None) -> HeadSpec:
    """Return what a converted head will be, by its source's spec alone: the first of MLA's ladders stands for all.

    Raises:
        LayoutCannot: as `convert_attention`.
    """
    if isinstance(spec.attention, Mla) == (kind == "mla"):
        raise LayoutCannot(
            f"the head's attention is {spec.kind.upper()} already",
            where="--attention",
            fix="Leave --attention out: the conversion is exact then.",
        )
    check_convertible(spec)
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
                f"{name} of the head holds values that are no finite numbers",
                where=name,
                fix="Convert a head whose weights are whole; kconv validate says which tensors are not.",
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
    return attention, {
        "ladder": found.ladder,
        "ladder_errors": found.ladder_errors,
        "latent_length_variation": {name: gauge.variation for name, gauge in gauges.items()},
    }
