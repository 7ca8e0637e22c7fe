"""What the recipes of all families of drafters have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict

from ..drafters.base import Spec
from ..drafters.rope_keys import read_rope
from ..drafters.spec import Gqa, Rope
from ..errors import RecipeInvalid
from ..targets.config import TargetConfig

if TYPE_CHECKING:
    from torch import Tensor

Where = Callable[[Sequence[str | int]], str]
"""Returns where a key of a recipe comes from; see `recipe.Stated.where`."""


class Unfit(NamedTuple):
    """Why a recipe does not fit a target: the key, what is wrong with it, and what to do."""

    key: str
    what: str
    fix: str


# Bytes of a number.
WIDTHS = {"F32": 4, "BF16": 2, "F16": 2}


class Sizes(NamedTuple):
    """Bytes of what a process computes with some rows of a batch, beyond weights and optimizer.

    Attributes:
        kept: of the forward pass, for the gradient.
        once: the most beyond that, at any one time of the step.
        evaluation: the most of an evaluation.
    """

    kept: int
    once: int
    evaluation: int


@dataclass(frozen=True, kw_only=True)
class DrafterRecipe(ABC):
    """A drafter, and its training with ModelOpt.

    It counts steps, not seconds, so that a recipe gives the same head on a slow machine.

    Attributes:
        intermediate: width of the dense SwiGLU MLP.
        captured: the captured layers, as 0-based outputs.
        rope: rotary embedding of the head.
        eps: epsilon of each RMSNorm.
        batches: distinct batches of text.
        steps: optimizer steps; those beyond `batches` are further passes.
        batch: sequences per batch.
        seq: tokens per sequence.
        optimizer: "muon" for the matrices and AdamW for the rest, or "adamw" for all.
        lr: peak learning rate of the matrices.
        rest_lr: that of the norms, and of matrices that have a row for each token.
        schedule: how both decay after `warmup` steps, by transformers' name.
        warmup: steps.
        accumulate: batches whose gradients are summed into one step.
        seed: random seed.
        dtype: of the trained weights. In BF16 a step below 1/256 of a weight is lost.
        compute: dtype of the matrix products and of the resulting head; None for `dtype`.
        pack: put several isolated documents into a row.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    SPEC: ClassVar[type]
    """The spec of its drafters."""
    TRAINED_BY: ClassVar[str]
    """The module of this package that has the rest of what is its family's own, `FAMILY`."""
    LAYOUTS: ClassVar[tuple[str, ...]] = ()
    """The layouts to write a head in, the first that can hold it; none: as ModelOpt exports it."""
    OF_THE_HEAD: ClassVar[tuple[str, ...]] = ("attention", "intermediate", "captured", "rope", "eps")
    """The keys that a head to continue from decides."""
    SHORT: ClassVar[tuple[str, ...]] = ()
    """Keys of a file or --set that `of_target` resolves."""
    POSITIVE: ClassVar[tuple[str, ...]] = (
        "intermediate", "batches", "steps", "batch", "seq", "accumulate", "lr", "rest_lr", "eps",
    )  # fmt: skip

    intermediate: int
    captured: tuple[int, ...]
    rope: Rope
    eps: float = 1e-5
    batches: int = 300
    steps: int = 1000
    batch: int = 4
    seq: int = 96
    optimizer: Literal["muon", "adamw"] = "muon"
    lr: float = 0.07
    rest_lr: float = 3e-3
    schedule: Literal["cosine", "linear", "constant_with_warmup"] = "cosine"
    warmup: int = 20
    accumulate: int = 1
    seed: int = 0
    dtype: Literal["F32", "BF16"] = "F32"
    compute: Literal["BF16"] | None = None
    pack: bool = False

    @property
    @abstractmethod
    def draft_steps(self) -> int:
        """Draft steps that are trained and measured, K."""

    @property
    def draft_vocab(self) -> int | None:
        """Rows of the head's own `lm_head`; None if it shares the target's."""
        return None

    @property
    def exports_lm_head(self) -> bool:
        """Whether the target's output matrix is written into the resulting head."""
        return False

    @abstractmethod
    def spec(self, target: TargetConfig) -> Spec:
        """Return what the resulting head is."""

    @abstractmethod
    def sizes(self, target: TargetConfig, rows: int) -> Sizes | None:
        """Return what so many rows take; None if that is not estimated."""

    def wrong(self) -> Iterator[tuple[str, str]]:
        """Yield the keys whose values are invalid for any target, and what is wrong with them."""
        yield from self.not_positive(vars(self))
        if self.warmup < 0:
            yield "warmup", f"warmup is {self.warmup}, but must be 0 or more"
        if not 0 <= self.seed < 2**32:  # the bounds of numpy, which the Trainer also seeds
            yield "seed", f"seed is {self.seed}, but must be from 0 to {2**32 - 1}"
        if self.seq < self.draft_steps + 2:
            yield "seq", f"{self.seq} tokens are too few for {self.draft_steps} draft steps"
        if not self.captured or list(self.captured) != sorted(set(self.captured)) or self.captured[0] < 0:
            yield "captured", f"captured is {list(self.captured)}, not a list of ascending layers"

    @classmethod
    def not_positive(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the keys among some of a recipe's whose values must be above 0 and are not."""
        for name in cls.POSITIVE:
            # A file may state a number as text, which its type admits.
            if name in values and not float(values[name]) > 0:
                yield name, f"{name} is {values[name]}, but must be above 0"

    def unfit(self, layers: int, vocab: int) -> Iterator[Unfit]:
        """Yield why the recipe does not fit a target of so many layers and tokens."""
        if beyond := [str(layer) for layer in self.captured if layer >= layers]:
            yield Unfit(
                "captured",
                f"the recipe captures layer{'s' * (len(beyond) > 1)} {', '.join(beyond)}, but the target's layers are "
                f"0 to {layers - 1}",
                "Choose among these, counted from 0, or leave captured out for the target's default.",
            )

    def unfit_for(self, target: TargetConfig) -> Iterator[Unfit]:
        """Yield why the recipe does not fit a target."""
        yield from self.unfit(target.layers, target.vocab)

    def unfit_for_text(self, ids: Tensor) -> Iterator[Unfit]:
        """Yield why the recipe does not fit a text, [N, T] ids."""
        yield from ()

    @classmethod
    def contradictions(cls, stated: Mapping[str, Any]) -> Iterator[Unfit]:
        """Yield the keys that contradict others, whatever the target is."""
        yield from ()

    @classmethod
    @abstractmethod
    def of_head(cls, spec: Any) -> dict[str, Any]:
        """Return the keys that a head to continue from decides.

        Raises:
            RecipeInvalid: ModelOpt cannot continue it.
        """

    @classmethod
    def other_than(cls, spec: Any, stated: Mapping[str, Any]) -> list[str]:
        """Return the stated keys outside of `OF_THE_HEAD` that contradict a head to continue from."""
        return []

    @classmethod
    @abstractmethod
    def of_target(cls, target: TargetConfig, stated: Mapping[str, Any], where: Where) -> dict[str, Any]:
        """Return the keys that follow from the target, and from the stated keys in `SHORT`."""


def refuse_unlike(unlike: Mapping[str, bool]) -> None:
    """Raise RecipeInvalid for a head to continue from that has what ModelOpt's has not."""
    if any(unlike.values()):
        raise RecipeInvalid(
            f"ModelOpt cannot continue this head: it has {', '.join(what for what, has in unlike.items() if has)}",
            fix="Continue with the trainer that made the head.",
        )


def target_theta(target: TargetConfig) -> float:
    """Return the base of a target's RoPE, even if its scaling is one that no head can have."""
    parameters = target.rope.get("rope_parameters")
    nested = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    return read_rope({"rope_theta": target.rope.get("rope_theta", nested)}).theta


def wrong_heads(attention: Gqa) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the dims of grouped heads."""
    heads, kv_heads, dims = attention.heads, attention.kv_heads, attention.head_dim
    if min(heads, kv_heads) < 1 or heads % kv_heads:
        yield "attention", f"attention has {heads} heads and {kv_heads} kv_heads, which is no whole number of groups"
    if dims < 2 or dims % 2:
        yield "attention", f"attention's head_dim is {dims}, but RoPE rotates pairs"


def fewer_kv_heads(heads: int) -> int:
    """Return the number of key-value heads for a drafter of so many heads, if its target does not say any."""
    return next(count for count in (8, 4, 2, 1) if heads % count == 0)
