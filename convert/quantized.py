"""Quantized heads: linear layers stored with scales.

A quantized linear layer is copied whole, weight and scales, and never repacked: a scale belongs to the tensor that it
was measured on. `kconv quantize-head` makes such heads. kconv computes only with unquantized ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..checkpoint.formats import CONFIG_KEY, HEAD_SCALES, OF_HEADS
from ..checkpoint.header import TensorInfo
from ..drafters.contract import Expected, Problems
from ..engines.layout import Stored
from ..engines.moves import Same
from ..errors import LayoutCannot, TensorMissing

# What to do about linear layers in a format that kconv does not know.
UNQUANTIZED = "Pass the unquantized head, or one whose linear layers were quantized separately."


def has_scales(names: Iterable[str]) -> bool:
    """Return whether tensor names or slots are those of a quantized head."""
    return any(name.rpartition(".")[2] in HEAD_SCALES for name in names)


def add_scales(rows: Mapping[str, Stored], tensors: Mapping[str, TensorInfo]) -> dict[str, Stored]:
    """Return an unquantized head's rows with the quantized linear layers as stored, and rows for their scales."""
    problems = Problems()
    found = find_scales(rows, tensors, problems)
    problems.refuse()
    return found


def find_scales(rows: Mapping[str, Stored], tensors: Mapping[str, TensorInfo], problems: Problems) -> dict[str, Stored]:
    """Like `add_scales`, but add errors to `problems`; the row of such a linear layer then expects what is stored."""
    found: dict[str, Stored] = {}
    for name, row in rows.items():
        base = name.removesuffix(".weight")
        suffixes = [suffix for suffix in HEAD_SCALES if f"{base}.{suffix}" in tensors]
        if base == name or not suffixes or name not in tensors or len(row.expected.shape) != 2:
            found[name] = row
            continue
        found |= _quantized(base, row, tensors, suffixes, problems)
    return found


def _quantized(
    base: str, row: Stored, tensors: Mapping[str, TensorInfo], suffixes: list[str], problems: Problems
) -> dict[str, Stored]:
    weight = tensors[row.name]
    format_ = next(
        (f for f in OF_HEADS if weight.dtype in f.tensors[f.values].dtypes and f.scales.keys() >= set(suffixes)), None
    )
    if format_ is None or not isinstance(row.move, Same):
        error = LayoutCannot(
            f"{row.name} is {weight.dtype} with {', '.join(suffixes)}, "
            + ("fused before quantizing" if format_ else "a format that kconv does not support"),
            where=row.name,
            fix=UNQUANTIZED,
        )
        problems.append(error.problem("K200"))
        there = [tensors[f"{base}.{suffix}"] for suffix in suffixes]
        scales = {
            info.name: Stored(
                Expected(info.name, info.shape, (info.dtype,), True), (f"{row.slots[0]}.{suffix}",), Same()
            )
            for suffix, info in zip(suffixes, there, strict=True)
        }
        stored = replace(row.expected, shape=weight.shape, dtypes=(weight.dtype,))
        return {row.name: replace(row, expected=stored), **scales}
    rows, columns = row.expected.shape
    values = format_.tensors[format_.values]
    packed = replace(row.expected, shape=values.shapes(rows, columns)[0], dtypes=values.dtypes)
    found = {row.name: replace(row, expected=packed)}
    for suffix, scale in format_.scales.items():
        name, shapes = f"{base}.{suffix}", scale.shapes(rows, columns)
        if name not in tensors:
            if scale.is_needed:
                error = TensorMissing(
                    f"{name} is missing, so {row.name} ({format_.name}) cannot be read",
                    where=name,
                    fix="Export the head again.",
                )
                problems.append(error.problem("K199"))
            continue
        shape = next((s for s in shapes if s == tensors[name].shape), shapes[0])
        expected = Expected(name, shape, scale.dtypes, may_be_absent=True)
        found[name] = Stored(expected, (f"{row.slots[0]}.{suffix}",), Same())
    return found


def names_beside(base_slot: str, name: str, slots: Iterable[str]) -> dict[str, str]:
    """Return the names of a linear layer's scales, by slot, for a weight of this name."""
    held = set(slots)
    found = {f"{base_slot}.{suffix}": f"{name.removesuffix('.weight')}.{suffix}" for suffix in HEAD_SCALES}
    return {slot: scale for slot, scale in found.items() if slot in held}


def refuse_renaming(config: Mapping[str, object], renamed: Mapping[str, str]) -> None:
    """Refuse to rename modules that a quantization config names; `renamed` has the new tensor names by old ones.

    It names one if a text in it contains a part of an old name that the new names lack.
    """
    text = json.dumps(config, ensure_ascii=False)
    old, new = ({part for name in names for part in name.split(".")} for names in (renamed, renamed.values()))
    gone = sorted(part for part in old - new if part in text)
    if gone:
        raise LayoutCannot(
            f"the quantization config names {', '.join(gone)}, but this layout names it differently",
            where=CONFIG_KEY,
            fix="Pass the unquantized head, or one that was quantized with the engines' names (layers.0).",
        )
