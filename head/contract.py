"""What a head must be, stated once: the plan refuses by it, and validation reports by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..checkpoint.header import TensorInfo
from ..errors import KconvError, TensorMissing, TensorShape, TensorUnknown, TensorValue
from .spec import HeadSpec

if TYPE_CHECKING:
    import torch

FLOATS = ("BF16", "F16", "F32")
# How many tensors a message names beside the first.
NAMED = 6


@dataclass(frozen=True)
class Expected:
    """A tensor that a head's spec demands.

    Attributes:
        name: its name on disk.
        shape: the shape its meaning demands.
        dtypes: safetensors dtypes it may have.
        may_be_absent: whether engines can do without it.
        formula: what the shape follows from, in the names of `head.slots`; empty where it is packed of several.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    may_be_absent: bool
    formula: str = ""


@dataclass(frozen=True)
class Breach:
    """One way in which a checkpoint is not what its spec demands."""

    fault: type[KconvError]
    what: str
    where: str
    fix: str

    def error(self) -> KconvError:
        """Return the breach as an exception to raise."""
        return self.fault(self.what, where=self.where, fix=self.fix)


def compare(
    expected: Mapping[str, Expected],
    held: Mapping[str, TensorInfo],
    *,
    ignored: Mapping[str, str],
    unclaimed: Mapping[str, str],
) -> list[Breach]:
    """Compare what a spec demands with what a checkpoint's headers hold.

    Args:
        expected: what the layout stores for this spec, by name.
        held: what is there, by name.
        ignored: names that may be there and mean nothing.
        unclaimed: names that the layout knows for other specs, and what this config lacks for them.

    Returns:
        Every breach, missing tensors first.
    """
    missing = [name for name, want in expected.items() if name not in held and not want.may_be_absent]
    breaches = [_missing(expected[name], held) for name in missing]
    for name in sorted(held.keys() - expected.keys() - ignored.keys()):
        why = unclaimed.get(name, "no row of the layout accounts for it")
        breaches.append(
            Breach(
                TensorUnknown,
                f"{name} {held[name].dtype} {list(held[name].shape)} has no place in this head: {why}",
                name,
                "Correct the config if the head needs it; remove the tensor if it does not.",
            )
        )
    for name in sorted(expected.keys() & held.keys()):
        breaches += _compare_one(expected[name], held[name])
    return breaches


def summarize(breaches: Sequence[Breach]) -> Breach:
    """Return the first of several breaches, which tells how many more there are, and where."""
    first, *others = breaches
    if not others:
        return first
    named = ", ".join(breach.where for breach in others[:NAMED]) + (", ..." if len(others) > NAMED else "")
    return replace(first, what=f"{first.what}; {len(others)} more do not fit: {named}")


def _missing(want: Expected, held: Iterable[str]) -> Breach:
    what = f"{want.name} is missing; the config demands it, of shape {list(want.shape)}"
    fix = "Export the head again, or correct the config if the head never had it. An engine would leave this weight "
    fix += "uninitialised and say nothing."
    for name in held:
        if name.endswith(f".{want.name}"):
            prefix = name.removesuffix(want.name)
            return Breach(TensorMissing, f"{what}; there is {name}", want.name, f"Take {prefix!r} off the names.")
    return Breach(TensorMissing, what, want.name, fix)


def _compare_one(want: Expected, have: TensorInfo) -> Iterable[Breach]:
    if have.shape != want.shape:
        follows = f" ({want.formula})" if want.formula else ""
        yield Breach(
            TensorShape,
            f"{want.name} is {list(have.shape)}; the config demands {list(want.shape)}{follows}",
            want.name,
            "Correct the config's dims, or export the head again; its config belongs to another head.",
        )
    if have.dtype not in want.dtypes:
        yield Breach(
            TensorShape,
            f"{want.name} is {have.dtype}; it should be {' or '.join(want.dtypes)}",
            want.name,
            "Export the head again with that dtype.",
        )


def check_d2t(spec: HeadSpec, d2t: torch.Tensor, name: str = "d2t") -> list[Breach]:
    """Check a map from draft to target ids: `d2t[i]` is the *offset* of target id `i + d2t[i]`.

    Args:
        spec: the head.
        d2t: [draft_vocab] integers.
        name: its name on disk.
    """
    import torch  # here, as a plan needs the rest of this module and no torch

    ids = d2t.to(torch.int64) + torch.arange(d2t.numel())
    outside = int(((ids < 0) | (ids >= spec.vocab)).sum())
    if outside:
        return [
            Breach(
                TensorValue,
                f"{outside} of {ids.numel()} draft ids lead outside the target's vocabulary of {spec.vocab}",
                name,
                "d2t holds offsets (target id minus draft id); rebuild it from the list of kept tokens.",
            )
        ]
    repeated = ids.numel() - ids.unique().numel()
    if repeated:
        return [
            Breach(
                TensorValue,
                f"{repeated} draft ids lead to a target id that another one already leads to",
                name,
                "d2t may hold absolute ids instead of offsets, or zeros; rebuild it.",
            )
        ]
    return []


def dtypes_of(slot_dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the dtypes a slot may be stored in: its own, or any float dtype that engines cast from."""
    return slot_dtypes or FLOATS
