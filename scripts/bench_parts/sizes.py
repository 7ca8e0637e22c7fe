"""What a draft step reads of a head."""

from __future__ import annotations

from kconv.checkpoint.header import byte_size
from kconv.drafters.slots import needs
from kconv.drafters.spec import HeadSpec
from kconv.quantize.head.formats import FP8, LinearFormat, groups_of

# Of the embedding and the maps a step reads a row or an entry; the others run once for all steps of a draft.
NOT_EACH_STEP = ("embed_tokens", "d2t", "t2d", "fc", "fc.bias", "fc_norm.{a}", "input_norm")


def linears(spec: HeadSpec) -> dict[str, tuple[int, int]]:
    """Return rows and columns of each linear that `kconv quantize-head` quantizes, by slot."""
    shapes = {slot: needs(spec)[slot].shape for group in groups_of(spec, FP8) for slot in group}
    return {slot: (rows, columns) for slot, (rows, columns) in shapes.items()}


def linear_bytes(spec: HeadSpec) -> int:
    """Return the bytes of these linears as they are."""
    return sum(byte_size(spec.dtype, shape) for shape in linears(spec).values())


def step_bytes(spec: HeadSpec) -> int:
    """Return the bytes of weights that a draft step reads of a plain head."""
    read = [need for need in needs(spec).values() if need.slot.name not in NOT_EACH_STEP]
    return sum(byte_size(spec.dtype, need.shape) for need in read)


def quantized_bytes(spec: HeadSpec, format_: LinearFormat) -> int:
    """Return the bytes of weights that a draft step reads of a quantized head."""
    stored = sum(stored_bytes(format_, rows, columns) for rows, columns in linears(spec).values())
    return step_bytes(spec) - linear_bytes(spec) + stored


def stored_bytes(format_: LinearFormat, rows: int, columns: int) -> int:
    """Return the bytes of a linear in a format, its scales included."""
    return sum(byte_size(one.dtype, one.shapes(rows, columns)[0]) for one in format_.stored.tensors.values())
