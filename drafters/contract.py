"""The requirements on a head, stated once: conversion enforces them, and validation reports them."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import TYPE_CHECKING

from ..checkpoint.header import TensorInfo
from ..errors import (
    CapturedUndecided,
    ConfigInvalid,
    KconvError,
    LayoutCannot,
    Problem,
    TensorMissing,
    TensorShape,
    TensorTwins,
    TensorUnknown,
    TensorValue,
    UnknownLayout,
)

if TYPE_CHECKING:
    import numpy as np

    from .base import Spec

FLOATS = ("BF16", "F16", "F32")
# How many tensors a message names besides the first.
NAMED = 6
# Rules by error class, for errors that name no rule themselves; K009 covers all others.
BY_CLASS: Mapping[type[KconvError], str] = {
    UnknownLayout: "K004",
    TensorTwins: "K005",
    CapturedUndecided: "K006",
    LayoutCannot: "K007",
    ConfigInvalid: "K008",
}
# How alike two parts of names are that one misspelling separates.
ALIKE = 0.8
UNPROVEN = "K009"
# Rules about tensors: the error class, and patterns for the slots (for unknown tensors: the names) that each rule
# covers. The first match applies.
BY_TENSOR: tuple[tuple[str, type[KconvError], tuple[str, ...]], ...] = (
    ("K101", TensorMissing, ("lm_head",)),
    ("K102", TensorMissing, ("d2t", "t2d")),
    ("K103", TensorMissing, ("embed_tokens",)),
    ("K104", TensorMissing, ("fc",)),
    ("K105", TensorMissing, ("fc_norm.*", "input_norm")),
    ("K106", TensorMissing, ("*norm*",)),
    ("K107", TensorMissing, ("*.bias",)),
    ("K108", TensorMissing, ("*",)),
    ("K119", TensorShape, ("*_scale", "*_scale_2", "*_scale_inv")),
    ("K111", TensorShape, ("lm_head",)),
    ("K112", TensorShape, ("fc", "fc.bias")),
    ("K113", TensorShape, ("embed_tokens",)),
    ("K114", TensorShape, ("d2t", "t2d")),
    ("K115", TensorShape, tuple(f"*.{x}_proj{y}" for x in ("gate", "up", "down") for y in ("", ".bias"))),
    ("K116", TensorShape, ("*norm*",)),
    ("K117", TensorShape, ("*",)),
    ("K121", TensorUnknown, ("fc_norm.*", "input_norm.*", "aux_norm_*")),
    ("K122", TensorUnknown, ("*.bias",)),
    ("K123", TensorUnknown, ("d2t", "t2d")),
    ("K124", TensorUnknown, ("*.q_norm.*", "*.k_norm.*")),
    ("K125", TensorUnknown, ("model.*",)),
    ("K126", TensorUnknown, ("*.experts.*", "*.mlp.gate.*", "*.shared_experts.*")),
    ("K127", TensorUnknown, ("layers.*",)),
    ("K120", TensorUnknown, ("*",)),
)
SCALE_SHAPE, DTYPE, PREFIXED, PREFIX = "K119", "K118", "K125", "model."
# What DistributedDataParallel puts before the names of the model that it wraps.
WRAPPED = "module."


class Problems(list[Problem]):
    """Problems in the order in which they were found."""

    @contextmanager
    def catching(self) -> Generator[None]:
        """Collect an error that ends the block, and continue after the block."""
        try:
            yield
        except KconvError as error:
            self.append(problem_of(error))

    def add(self, kind: type[KconvError], what: str, where: str, fix: str, code: str = "", needs: str = "") -> None:
        """Add an error, under its code or that of the rule that covers its class."""
        error = kind(what, where=where, fix=fix, code=code, needs=needs)
        self.append(error.problem(code) if code else problem_of(error))

    def refuse(self) -> None:
        """Raise the first error, if there is one."""
        for problem in self:
            if problem.severity == "error":
                raise problem.error()


def problem_of(error: KconvError) -> Problem:
    """Return an error about a head as a problem, under the id of the rule that covers it."""
    named = re.fullmatch(r"K\d{3}", error.code)
    return error.problem(error.code if named else BY_CLASS.get(type(error), UNPROVEN))


@dataclass(frozen=True)
class Expected:
    """A tensor that a head's spec demands.

    Attributes:
        name: its name on disk.
        shape: the shape that the spec needs.
        dtypes: safetensors dtypes it may have.
        may_be_absent: whether engines can do without it.
        formula: how the shape is computed, in the names of `drafters.slots`; empty if it is packed from several.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    may_be_absent: bool
    formula: str = ""


@dataclass(frozen=True)
class Dim:
    """What a config says of a dim: the key, its value, and whether that is a default since the key is left out."""

    key: str
    value: int
    assumed: bool


FC_FIX = "Set the list of captured layers, num_aux_hidden_states and target_hidden_size to the training values."
OTHER_FIX = "Correct the config if the head needs it; leave the tensor out only if its trainer never used it."


def compare(
    expected: Mapping[str, Expected],
    held: Mapping[str, TensorInfo],
    *,
    ignored: Mapping[str, str],
    unclaimed: Mapping[str, str],
    slots: Mapping[str, str] | None = None,
    norm_fix: str = "",
    dims: Mapping[str, Dim] | None = None,
) -> list[Problem]:
    """Compare the tensors that a spec demands with a checkpoint's headers.

    Args:
        expected: the tensors that the layout stores for this spec, by name.
        held: the tensors in the checkpoint, by name.
        ignored: names that are allowed and have no meaning.
        unclaimed: names that the layout knows for other specs, with the reason why they do not apply here.
        slots: the first slot of each tensor, by tensor name; it decides which rule covers the tensor.
        norm_fix: what to do about an unknown norm; "" for what is said of any other tensor.
        dims: what the config states of dims, by their names in the shape formulas.

    Returns:
        Every problem, missing tensors first.
    """
    slots, dims = slots or {}, dims or {}
    missing = [name for name, want in expected.items() if name not in held and not want.may_be_absent]
    problems = [_missing(expected[name], slots.get(name, name)) for name in missing]
    for name in sorted(held.keys() - expected.keys() - ignored.keys()):
        why = unclaimed.get(name, "no row of the layout accounts for it")
        fix = (norm_fix if "norm" in name else "") or OTHER_FIX
        lacking = [one for one in expected.keys() - held.keys() if expected[one].shape == held[name].shape]
        if near := [one for one in lacking if _misspelt(name, one)]:
            fix = f"Rename it to {near[0]}, which is missing and has this shape, if it is that one."
        what = f"{name} {held[name].dtype} {list(held[name].shape)} has no place in this head: {why}"
        problems.append(_problem(TensorUnknown, name, what, name, fix, knows=bool(near)))
    both = sorted(expected.keys() & held.keys())
    fitting = {part for name in both for part in _fitting(expected[name], held[name])}
    for name in both:
        problems += _compare_one(expected[name], held[name], slots.get(name, name), dims, fitting)
    return problems


def name_prefix(problems: Sequence[Problem], expected: Iterable[str], held: Collection[str]) -> list[Problem]:
    """Return what `compare` found, as one problem where tensors are missing only since their names begin otherwise."""
    missing, unknown = ([p.where for p in problems if p.kind is kind] for kind in (TensorMissing, TensorUnknown))
    prefixes = {one.removesuffix(name) for name in missing for one in unknown if one.endswith(f".{name}")}
    expected = [*expected]
    # With one that some names rightly have, a tensor is misplaced.
    if len(prefixes) != 1 or any(name.startswith(tuple(prefixes)) for name in expected):
        return [*problems]
    [prefix] = prefixes
    longer = {name: prefix + name for name in expected if name not in held and prefix + name in unknown}
    name, found = next(iter(longer.items()))
    count = sum(one.startswith(prefix) for one in held)
    what = f"{count} of {len(held)} names begin with {prefix!r}: {found} is {name} in this layout"
    own = "Save the wrapped model's own state dict (model.module), or remove 'module.' from the names."
    fix = own if prefix == WRAPPED else f"Remove {prefix!r} from the names."
    explained = {*longer, *longer.values()}
    return [
        _problem(TensorMissing, name, what, found, fix, PREFIXED, knows=True),
        *(problem for problem in problems if problem.where not in explained),
    ]


def _misspelt(name: str, other: str) -> bool:
    """Return whether two names differ in one of their parts alone, and there by little."""
    apart = [pair for pair in zip_longest(name.split("."), other.split("."), fillvalue="") if pair[0] != pair[1]]
    return len(apart) == 1 and SequenceMatcher(None, *apart[0]).ratio() > ALIKE


def summarize(problems: Sequence[Problem]) -> Problem:
    """Return the first of several tensor problems, extended by the number of the others and their names."""
    first, *others = problems
    if not others:
        return first
    named = ", ".join(problem.where for problem in others[:NAMED]) + (", ..." if len(others) > NAMED else "")
    return replace(first, what=f"{first.what}; {len(others)} more {'do' if others[1:] else 'does'} not fit: {named}")


def _problem(
    kind: type[KconvError], about: str, what: str, where: str, fix: str, code: str = "", *, knows: bool = False
) -> Problem:
    if not code:
        code = next(code for code, of, slots in BY_TENSOR if of is kind and any(fnmatchcase(about, s) for s in slots))
    return Problem(code, "error", where, what, fix, kind, knows=knows)


def _missing(want: Expected, slot: str) -> Problem:
    what = f"{want.name} is missing; the config demands it with shape {list(want.shape)}"
    fix = "Export the head again, or correct the config if the head never had it. An engine would leave this weight "
    fix += "uninitialized without any message."
    return _problem(TensorMissing, slot, what, want.name, fix)


def _fitting(want: Expected, have: TensorInfo) -> Iterator[str]:
    """Yield the parts of the formula of each dim that is as wanted."""
    for dim, wanted, held in zip(want.formula.split(","), want.shape, have.shape, strict=False):
        yield from re.findall(r"\w+", dim if held == wanted else "")


def _suspects(want: Expected, have: TensorInfo, dims: Mapping[str, Dim]) -> Iterator[tuple[str, Dim, int]]:
    """Yield the dims of which another value would give a tensor its shape, and that value."""
    for dim, wanted, held in zip(want.formula.split(","), want.shape, have.shape, strict=False):
        for name in re.findall(r"\w+", dim if held != wanted and "+" not in dim else ""):
            if name not in dims:
                continue
            others, rest = divmod(wanted, dims[name].value)
            # Whole states of this width are of another number of layers.
            layers = "captured" in dim and held % dims[name].value == 0
            # A packed weight, or its scales, has less than the formula says.
            if others and not (rest or layers or held % others):
                yield name, dims[name], held // others


def _compare_one(
    want: Expected, have: TensorInfo, slot: str, dims: Mapping[str, Dim], fitting: Collection[str]
) -> Iterator[Problem]:
    if have.shape != want.shape:
        follows, knows = f" ({want.formula})" if want.formula else "", True
        # What another tensor confirms is not the one.
        suspects = [(dim, other) for name, dim, other in _suspects(want, have, dims) if name not in fitting]
        stated = [(dim, other) for dim, other in suspects if not dim.assumed]
        if have.shape == want.shape[::-1]:
            follows, fix = f"{follows}; it is transposed", "Transpose it: a weight is [outputs, inputs]."
        elif suspects and not stated:
            left_out = suspects[0][0].key
            follows += f"; the config has no {left_out}, so its default is taken"
            fix = f"Add {left_out} to config.json as the head was trained, or export the head again."
            # The default may be that of another key, which is the wrong one.
            knows = False
        elif slot == "fc":
            fix, knows = FC_FIX, False
        elif len(stated) == 1:
            [(dim, other)] = stated
            follows += f"; {dim.key} is {dim.value}, and {other} would fit"
            fix = (
                f"State {dim.key} as the head was trained, or put the config.json beside it that it was exported with."
            )
        else:
            fix, knows = "Correct the config's dims; the config may belong to another head.", False
        yield _problem(
            TensorShape,
            slot,
            f"{want.name} is {list(have.shape)}; the config demands {list(want.shape)}{follows}",
            want.name,
            fix,
            knows=knows,
        )
    if have.dtype not in want.dtypes:
        scale = any(code == SCALE_SHAPE and any(fnmatchcase(slot, s) for s in slots) for code, _, slots in BY_TENSOR)
        yield _problem(
            TensorShape,
            slot,
            f"{want.name} is {have.dtype}; it should be {' or '.join(want.dtypes)}",
            want.name,
            "Export the head again with that dtype.",
            SCALE_SHAPE if scale else DTYPE,
        )


def check_d2t(
    spec: Spec,
    d2t: np.ndarray,
    name: str = "d2t",
    t2d: np.ndarray | None = None,
    rows: tuple[int, int] | None = None,
) -> list[Problem]:
    """Check a map from draft to target ids: `d2t[i]` is the *offset* of target id `i + d2t[i]`.

    Args:
        spec: the head.
        d2t: [draft_vocab] integers.
        name: its name on disk.
        t2d: [vocab] bool, the head's mask; it helps to tell target ids from offsets in the map.
        rows: as of `kind_of`.
    """
    from .vocab import ABSOLUTE, kind_of, read_ids, target_ids  # imported here, since planning needs no numpy

    offsets, absolute = read_ids(target_ids(d2t), spec.vocab, t2d), read_ids(d2t, spec.vocab, t2d)
    if kind_of(offsets, absolute, rows) == ABSOLUTE:
        code = "K175"
        what = "it holds absolute ids; engines read offsets (target id minus draft id)"
        fix = "Rewrite it: kconv vocab HEAD OUT --absolute."
    elif offsets.outside:
        code = "K176"
        what = f"{offsets.outside} of {offsets.ids.size} draft ids map outside the target's vocabulary of {spec.vocab}"
        fix = "d2t holds offsets (target id minus draft id); rebuild it from the list of kept tokens."
    elif offsets.duplicates:
        code = "K177"
        what = f"{offsets.duplicates} draft ids map to a target id that another draft id already uses"
        fix = "d2t may hold absolute ids instead of offsets, or zeros; rebuild it."
    elif offsets.marked_otherwise:
        code = "K178"
        what = f"t2d marks {offsets.marked_otherwise} tokens otherwise than it maps: one of them is of another head"
        fix = "See which: kconv vocab HEAD --target TARGET. If d2t is right, rebuild t2d: kconv vocab HEAD OUT"
        fix += " --rebuild-t2d --target TARGET."
    else:
        return []
    return [Problem(code, "error", name, what, fix, TensorValue)]


def dtypes_of(slot_dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the dtypes that a slot may be stored in: its own, or any float dtype that engines cast from."""
    return slot_dtypes or FLOATS
