"""The scales of a target's NVFP4."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...checkpoint.bytes import stream
from ...checkpoint.header import TensorInfo
from ...quantize.formats import E2M1_MAX, E4M3_MAX, fused_group, is_scale
from .nvfp4 import AGAIN, SCALARS, parts_of
from .rule import TRTLLM, Found, rule
from .target import MARK, TargetSubject

FUSED = (
    "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L2055-L2064"
)
# e4m3 has one NaN, with either sign.
NAN = 0x7F
DATA_FREE = 1.0  # the input_scale of a target that was not calibrated


@rule(
    "K440",
    "fused-scale-unequal",
    "error",
    "Modules that engines fuse have unequal weight_scale_2; only the largest survives, block scales are not rescaled,"
    " and the others' weights come out wrong.",
    fix="Quantize the target again; kconv quantize gives q/k/v, q_a/kv_a and gate/up one scale.",
    seen_in=FUSED,
    values=True,
)
def fused_scale_unequal(subject: TargetSubject) -> Iterator[Found]:
    yield from _unequal(subject, MARK)


@rule(
    "K441",
    "fused-input-scale-unequal",
    "error",
    "Modules that engines fuse read the same activations, and their input_scale are unequal: TensorRT-LLM stops.",
    fix="Calibrate again; what reads the same activations has one amax.",
    engines=(TRTLLM,),
    values=True,
)
def fused_input_scale_unequal(subject: TargetSubject) -> Iterator[Found]:
    yield from _unequal(subject, "input_scale")


@rule(
    "K442",
    "scale-value",
    "error",
    "A scale of a whole module is NaN, zero, negative, or too small or too large to be calculated with in float32.",
    fix=AGAIN,
    values=True,
)
def scale_value(subject: TargetSubject) -> Iterator[Found]:
    for suffix in SCALARS:
        for info in parts_of(subject, suffix):
            value = _scalar(info)
            if value is not None and not is_scale(value):
                yield Found(info.name, f"is {value:g}")


@rule(
    "K443",
    "block-scale-value",
    "error",
    "Block scales are NaN, negative, or zero throughout.",
    fix=AGAIN,
    values=True,
)
def block_scale_value(subject: TargetSubject) -> Iterator[Found]:
    for info in parts_of(subject, "weight_scale"):
        if info.dtype != "F8_E4M3":
            continue
        nan = negative = other = 0
        for chunk in stream(info):
            bits = np.frombuffer(chunk, np.uint8)
            nan += int(np.count_nonzero(bits & NAN == NAN))
            negative += int(np.count_nonzero(bits > 0x80))
            other += int(np.count_nonzero(bits & NAN))
        if nan or negative or (info.size and not other):
            what = f"{nan:,} are NaN" if nan else f"{negative:,} are negative" if negative else "all are zero"
            yield Found(info.name, what)


@rule(
    "K444",
    "input-scale-beyond-norm",
    "error",
    "An input_scale says that a module read more than the norm before it can put out: it is another target's, or was"
    " changed. 1.0, which data-free recipes write, is passed over.",
    fix="Calibrate this very target again, and quantize it with that.",
    values=True,
)
def input_scale_beyond_norm(subject: TargetSubject) -> Iterator[Found]:
    from ...quantize.calibration import beyond_norms

    scales = {info.name: _scalar(info) for info in parts_of(subject, "input_scale")}
    amaxes = {
        name.removesuffix(".input_scale"): scale * E2M1_MAX * E4M3_MAX
        for name, scale in scales.items()
        if scale is not None and scale != DATA_FREE
    }
    for beyond in beyond_norms(amaxes, subject.tensors):
        yield Found(
            f"{beyond.module}.input_scale",
            f"is of an amax of {beyond.amax:g}, and {beyond.norm} reaches {beyond.bound:g} at most",
        )


def _unequal(subject: TargetSubject, suffix: str) -> Iterator[Found]:
    groups: dict[str, list[TensorInfo]] = {}
    for info in parts_of(subject, suffix):
        groups.setdefault(fused_group(info.name.removesuffix(f".{suffix}")), []).append(info)
    for infos in groups.values():
        values = [_scalar(info) for info in infos] if len(infos) > 1 else []
        if any(value != values[0] and value == value for value in values if value is not None):
            yield Found(infos[0].name, f"{values[0]}, and {infos[1].name} {values[1]}")


def _scalar(info: TensorInfo) -> float | None:
    """Return a scale's value; None if it is no single float32, which another rule speaks of."""
    from ...checkpoint.tensors import read_tensor  # here, as headers are checked without torch

    return float(read_tensor(info).reshape(())) if info.dtype == "F32" and info.shape in ((), (1,)) else None


RULES = (fused_scale_unequal, fused_input_scale_unequal, scale_value, block_scale_value, input_scale_beyond_norm)
