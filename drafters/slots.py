"""What a tensor of a drafter is: its meaning and its only shape formula.

A slot is a canonical name, independent of any file layout. A layout's rows say which tensor stores a slot, and which
reversible operation it applies; the stored shape follows from the formula here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Spec


def _always(_: Spec) -> bool:
    return True


def _never(_: Spec) -> bool:
    return False


@dataclass(frozen=True)
class Slot:
    """A tensor's meaning and its only shape formula.

    Attributes:
        name: canonical name; `{i}` is the layer, `{a}` the index of a captured state.
        shape: comma-separated dims, each a sum of products of numbers and names in the family's `dims`.
        when: whether a head of this spec has the slot.
        absent_when: whether a head of this spec may omit the tensor.
        layers: which layers have it: "all", "first" or "later"; empty for slots outside the layers.
        dtype: safetensors dtypes it may have; empty if it has the head's weight dtype.
        may_be_zero: whether it may be all zeros; of any other matrix or norm this shows that it was never filled.
    """

    name: str
    shape: str
    when: Callable[[Any], bool] = _always
    absent_when: Callable[[Any], bool] = _never
    layers: str = ""
    dtype: tuple[str, ...] = ()
    may_be_zero: bool = False


INTEGER = ("I64", "I32")


def shape(formula: str, known: dict[str, int]) -> tuple[int, ...]:
    """Evaluate a shape formula, e.g. `"heads*head_dim, attn_in"` to `(128, 256)`."""

    def number(factor: str) -> int:
        return known[factor] if factor in known else int(factor)

    terms = [[term.split("*") for term in dim.split("+")] for dim in formula.replace(" ", "").split(",")]
    return tuple(sum(math.prod(map(number, factors)) for factors in dim) for dim in terms)


@dataclass(frozen=True)
class Need:
    """A slot of one head, with numbers instead of formulas."""

    slot: Slot
    shape: tuple[int, ...]


@cache
def needs(spec: Spec) -> dict[str, Need]:
    """Return each slot that a head of this spec has or may have, by filled-in name, in table order."""
    found: dict[str, Need] = {}
    for slot in spec.drafter.slots:
        if not slot.when(spec):
            continue
        for layer in layers_of(slot.layers, spec.layers):
            formula_dims = spec.drafter.dims(spec, layer)
            for a in range(len(spec.captured) if "{a}" in slot.name else 1):
                found[slot.name.format(i=layer, a=a)] = Need(slot, shape(slot.shape, formula_dims))
    return found


def layers_of(which: str, count: int) -> range:
    """Return the layer numbers for "all", "first", "later" or "" (outside the layers: one entry)."""
    return {"all": range(count), "first": range(1), "later": range(1, count), "": range(1)}[which]
