"""What a drafter family is: one object with everything that is its own.

All other code asks the object, which a layout names (`Layout.drafter`) and a spec (`Spec.drafter`). Another package
adds a family with an entry point in the group `kconv.drafters` that names such an object, see `registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..checkpoint.header import TensorInfo
from .keys import ATTENTION, Key
from .slots import Slot

if TYPE_CHECKING:
    from torch import Tensor

    from ..checkpoint.manifest import Hints
    from ..rule import Rule
    from .captured import Captured
    from .contract import Problems
    from .facts import Fact
    from .spec import Rope

Config = Mapping[str, Any]
Names = Mapping[str, TensorInfo]


class Spec(Protocol):
    """What the spec of every family states; see `spec.HeadSpec` for the meaning of the fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def hidden(self) -> int: ...
    @property
    def target_hidden(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def draft_vocab(self) -> int: ...
    @property
    def captured(self) -> tuple[int, ...]: ...
    @property
    def layers(self) -> int: ...
    @property
    def rope(self) -> Rope: ...
    @property
    def eps(self) -> float: ...
    @property
    def dtype(self) -> str: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def kind(self) -> str:
        """A word for its attention, or for its variant of the family."""
        ...

    @property
    def drafter(self) -> Drafter:
        """Its family."""
        ...


class RunningDrafter(Protocol):
    """A drafter with its weights, ready to draft.

    Attributes:
        spec: what it is.
        weights: all of its tensors, by slot.
        target_ids: `[draft_vocab]`, the target id of each draft id.
    """

    @property
    def spec(self) -> Any: ...
    @property
    def weights(self) -> Mapping[str, Tensor]: ...
    @property
    def target_ids(self) -> Tensor: ...

    def draft(self, tokens: Tensor, captured: Tensor, steps: int) -> Tensor:
        """Draft along a given text, each draft from the text before it.

        Args:
            tokens: the text, target ids `[B, T]`.
            captured: the outputs of the captured layers at each position, side by side, `[B, T, A * target_hidden]`.
            steps: K.

        Returns:
            Logits `[K, B, T', draft_vocab]`, T' = T - 1 - K: `result[k-1, b, t]` predicts `tokens[b, t+1+k]`.
        """
        ...


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint that is not read, or a relative of a family that is named and refused.

    Attributes:
        name: its name in `kconv inspect`.
        what: a phrase that says what it is, after "this is".
        fix: what to do with it.
        marks: whether a config and tensor names identify it.
        is_head: whether its files are still read as far as possible as those of its family.
    """

    name: str
    what: str
    fix: str
    marks: Callable[[Config, Names], bool]
    is_head: bool = False


def _nothing_more(values: Config, config: Config, names: Names) -> dict[str, Any]:
    return {}


def _no_checks(*_: Any) -> None:
    return None


@dataclass(frozen=True, eq=False)
class Drafter:
    """A family of drafters.

    Attributes:
        name: e.g. "eagle3"; the drafter's tag on the Hub.
        title: what one of them is called, e.g. "Eagle3 head".
        lead: the beginning of a card about one, from its spec.
        spec: the dataclass that says what one is, a `Spec`.
        slots: its tensors, with shape formulas over `dims`.
        dims: the numbers that the formulas use, from a spec and a layer.
        marks: whether a config and tensor names are one of its own, or a relative's.
        signs: ends of tensor names that no whole model has.
        captured: the captured layers, from a config in the common keys, the user's options and the tensors' names; None
            if a problem leaves them open.
        room: how many captured states a stored drafter has room for, from its tensors and the values read before; None
            if unknown.
        load: a drafter that can run, from a spec and all of its weights by slot.
        keys: config keys that all producers share, besides those of the attention.
        attention: the kinds of attention that it may have.
        parts: the classes of the spec's fields that the keys fill field by field, besides the attention's.
        nested: the object of a config that holds keys of the family; "" for none.
        fixed: keys that change what it computes, and the only values that kconv supports.
        elsewhere: further keys that kconv reads.
        derived: fields that no key states, from the values read, the config and the tensors.
        check_keys: finds what the config asks for and kconv does not support.
        check_captured: finds contradictions between the captured layers, the config and the room for them.
        facts: what its files may leave open, by name.
        relatives: kinds of checkpoints that its marks may fit and that it is not; the first whose marks fit wins.
        looks_like: whether tensor names are its own under any prefix, so that it is named though its layout is unknown.
        lines: the lines of `kconv inspect` about a spec, besides those that every drafter has.
        norm_fix: what to do about a norm that the config does not ask for; "" for what is said of any other tensor.
        rules: the rules of `validate` that are its own, `Rule`s; read by `validate.rules.table`.
        trainer: ModelOpt's mode for it; "" if kconv cannot train it.
        draft_tokens: how many tokens one drafts in a verify step, from its spec, unless a user asks for another number.
    """

    name: str
    title: str
    lead: Callable[[Any], str]
    spec: type
    slots: tuple[Slot, ...]
    dims: Callable[[Any, int], dict[str, int]]
    marks: Callable[[Config, Names], bool]
    signs: tuple[str, ...]
    captured: Callable[[Config, Hints, Names, Problems], Captured | None]
    room: Callable[[Names, Config], int | None]
    load: Callable[[Any, Mapping[str, Tensor]], RunningDrafter]
    keys: tuple[Key, ...]
    attention: Mapping[type, tuple[Key, ...]] = field(default_factory=lambda: ATTENTION)
    parts: Mapping[str, type] = field(default_factory=dict[str, type])
    nested: str = ""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    elsewhere: frozenset[str] = frozenset()
    derived: Callable[[Config, Config, Names], dict[str, Any]] = _nothing_more
    check_keys: Callable[[Config, Names, Problems], None] = _no_checks
    check_captured: Callable[[Config, Captured | None, Hints, int | None, Problems], None] = _no_checks
    facts: Mapping[str, Fact] = field(default_factory=dict[str, "Fact"])
    relatives: tuple[Kind, ...] = ()
    looks_like: Callable[[Names], bool] = lambda _: False
    lines: Callable[[Any], dict[str, str]] = lambda _: {}
    norm_fix: str = ""
    rules: Callable[[], tuple[Rule[Any], ...]] = tuple
    trainer: str = ""
    draft_tokens: Callable[[Any], int] = lambda _: 3

    def keys_of(self, spec: Any) -> tuple[Key, ...]:
        """Return the config keys of one drafter, those of its attention last."""
        return (*self.keys, *self.attention[type(spec.attention)]) if self.attention else self.keys

    @property
    def a_title(self) -> str:
        """Its title with its article."""
        return f"{'an' if self.title[0] in 'AEIOU' else 'a'} {self.title}"
