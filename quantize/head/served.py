"""A quantized head that runs: weights as stored, inputs rounded as engines round them.

A linear layer's scales decide how its input is rounded, and modules that an engine fuses share the largest scale:

- NVFP4 with `input_scale`: groups of sixteen along a row, each with its own e4m3 scale below that one
  (https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L2095,
  https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py#L640-L654);
  without it, only weights are quantized.
- FP8 with `input_scale`: one scale for all; the weights of one fused module are rounded again by their largest scale
  (https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L2147-L2169);
  without it, a scale for each token.
- FP8 in blocks: a scale for each token and 128 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checkpoint.formats import E4M3_MAX, FP8_BLOCKS, HEAD_SCALES, INPUT_SCALE, fused_group, marked_format
from ...convert.read import Head, read_slot
from ...drafters.attention import Context
from ...drafters.forward import DraftHead
from ...drafters.spec import HeadSpec
from ...measure.trace import WatchedInputs
from .formats import FP8, NVFP4

Round = Callable[[Tensor], Tensor]
Scales = Mapping[str, Tensor]


class RoundedHead(DraftHead):
    """A head whose linear layers read rounded inputs.

    Args:
        weights: quantized ones are dequantized.
        inputs: by slot, the function with which an engine rounds an input `[..., in]` before the multiplication.
    """

    def __init__(self, spec: HeadSpec, weights: Mapping[str, Tensor], inputs: Mapping[str, Round]) -> None:
        super().__init__(spec, weights)
        self.inputs = dict(inputs)
        self._rounds = False

    def altered(self, spec: HeadSpec | None = None, weights: Mapping[str, Tensor] | None = None) -> DraftHead:
        """See `DraftHead.altered`; inputs are rounded as before."""
        return RoundedHead(spec or self.spec, {**self.weights, **(weights or {})}, self.inputs)

    @contextmanager
    def _rounding(self) -> Iterator[None]:
        if self._rounds:  # within a step
            yield
            return
        self._rounds = True
        try:
            watched = {slot: self.weights[slot] for slot in self.inputs}
            with WatchedInputs(watched, lambda slot, x: self.inputs[slot](x)):
                yield
        finally:
            self._rounds = False

    def fuse(self, captured: Tensor) -> Tensor:
        with self._rounding():
            return super().fuse(captured)

    def attend(self, layer: int, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        with self._rounding():
            return super().attend(layer, x, positions, context)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        with self._rounding():
            return super().mlp(layer, x)

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        with self._rounding():
            return super().step(tokens, hidden, positions, context)


def read_served(head: Head) -> tuple[dict[str, Tensor], dict[str, Round]]:
    """Read a quantized head in the form in which an engine computes it.

    Returns:
        Each weight by slot, the quantized ones in fp32; and by slot, how their inputs are rounded.
    """
    scales = _scales_of(head)
    weights = {slot: read_slot(head, slot) for slot in head.places if slot.rpartition(".")[2] not in HEAD_SCALES}
    inputs: dict[str, Round] = {}
    for slot, own in scales.items():
        shared = [other for name, other in scales.items() if fused_group(name) == fused_group(slot)]
        weights[slot] = _unpack(weights[slot], own, shared)
        how = _rounding_of(own, shared)
        if how is not None:
            inputs[slot] = how
    return weights, inputs


def _scales_of(head: Head) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name in head.places:
        slot, _, suffix = name.rpartition(".")
        if suffix in HEAD_SCALES:
            found.setdefault(slot, {})[suffix] = read_slot(head, name)
    return found


def _unpack(weight: Tensor, own: Scales, shared: Sequence[Scales]) -> Tensor:
    format_ = marked_format(own)
    stored = {format_.values: weight, **own}
    if format_ == NVFP4.stored:
        return format_.unpack({**stored, format_.mark: _largest(shared, format_.mark)})
    plain = format_.unpack(stored)
    if format_ != FP8.stored or own[format_.scale].numel() > 1:
        return plain
    largest = _largest(shared, format_.scale)
    if torch.equal(own[format_.scale].float().reshape(()), largest):
        return plain
    return (plain / largest).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * largest


def _rounding_of(own: Scales, shared: Sequence[Scales]) -> Round | None:
    format_ = marked_format(own)
    static = _largest(shared, INPUT_SCALE) if INPUT_SCALE in own else None
    if format_ == NVFP4.stored:
        return None if static is None else lambda x: NVFP4.round(x, static)
    if format_ == FP8_BLOCKS:
        return _by_blocks
    return _by_token if static is None else lambda x: FP8.round(x, static)


def _largest(shared: Sequence[Scales], suffix: str) -> Tensor:
    return torch.stack([one[suffix].float().reshape(()) for one in shared if suffix in one]).max()


def _by_token(x: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True).float()
    return FP8.round(x, torch.where(largest > 0, largest / E4M3_MAX, 1.0)).to(x.dtype)


def _by_blocks(x: Tensor) -> Tensor:
    columns = x.shape[-1]
    padded = F.pad(x, (0, -columns % FP8_BLOCKS.width)).unflatten(-1, (-1, FP8_BLOCKS.width))
    return _by_token(padded).flatten(-2)[..., :columns]
