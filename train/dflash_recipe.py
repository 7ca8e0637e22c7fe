"""Recipes of DFlash and DSpark drafters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..drafters.dflash import Confidence, DFlashSpec, Markov
from ..drafters.dflash_captured import guessed
from ..drafters.spec import Gqa, Rope
from ..errors import RecipeInvalid
from ..targets.config import TargetConfig
from .drafter_recipe import DrafterRecipe, Sizes, Unfit, Where, fewer_kv_heads, refuse_unlike, target_theta, wrong_heads

if TYPE_CHECKING:
    from torch import Tensor

# Of the drafter: ModelOpt's default.
LAYERS = 5
UNUSED = "Use the id of a token that no text has."


@dataclass(frozen=True, kw_only=True)
class BlockRecipe(DrafterRecipe):
    """What the recipes of DFlash and DSpark have in common; the drafter has one layer for each captured layer.

    Attributes:
        attention: heads and head dim of each layer.
        block: slots of a block; `seq` is a multiple of it.
        mask: the token in all slots but the first: one that no text has.
        causal: whether a slot sees no later ones.
        anchors: the most blocks of a row that are trained in a step, at random places.
        decay: after so many slots the weight of a slot's loss is 1/e; 0 for equal weights.
    """

    SPEC: ClassVar[type] = DFlashSpec
    TRAINED_BY: ClassVar[str] = "dflash"
    OF_THE_HEAD: ClassVar[tuple[str, ...]] = (*DrafterRecipe.OF_THE_HEAD, "mask", "causal")
    SHORT: ClassVar[tuple[str, ...]] = ("layers",)
    POSITIVE: ClassVar[tuple[str, ...]] = (*DrafterRecipe.POSITIVE, "block", "anchors")

    attention: Gqa
    mask: int
    block: int = 8
    causal: bool = False
    anchors: int = 512
    decay: float = 0.0

    def sizes(self, target: TargetConfig, rows: int) -> Sizes:
        from .dflash_memory import block_sizes  # which computes with what measures, and so loads torch

        return block_sizes(self, target, rows)

    def wrong(self) -> Iterator[tuple[str, str]]:
        yield from super().wrong()
        yield from wrong_heads(self.attention)
        if self.block > 0 and self.seq % self.block:
            yield "seq", f"seq is {self.seq}, which is no multiple of block, {self.block}"
        if self.draft_steps < 1:
            yield "block", f"block is {self.block}: it drafts no token"
        if not self.decay >= 0:
            yield "decay", f"decay is {self.decay}, but must be 0 or more"

    def unfit(self, layers: int, vocab: int) -> Iterator[Unfit]:
        yield from super().unfit(layers, vocab)
        if not 0 <= self.mask < vocab:
            yield Unfit(
                "mask",
                f"mask is {self.mask}, but the target's embedding has {vocab} rows",
                UNUSED,
            )

    def unfit_for_text(self, ids: Tensor) -> Iterator[Unfit]:
        if found := int((ids == self.mask).sum()):
            yield Unfit("mask", f"mask is {self.mask}, which the text has {found:,} times", UNUSED)

    def unfit_for(self, target: TargetConfig) -> Iterator[Unfit]:
        yield from super().unfit_for(target)
        if self.mask in (target.bos, target.pad, *target.eos):
            yield Unfit(
                "mask",
                f"mask is {self.mask}, which begins, ends or pads the target's texts",
                UNUSED,
            )
        if self.rope != Rope(target_theta(target)):
            yield Unfit(
                "rope",
                f"the recipe's rope is {self.rope}, but ModelOpt trains with the target's base and no scaling",
                f"Leave out rope: the target's base is {target_theta(target):g}.",
            )

    @classmethod
    def of_head(cls, spec: DFlashSpec) -> dict[str, Any]:
        unlike = {
            "a width other than its target's": spec.hidden != spec.target_hidden,
            "a vocabulary of its own": spec.draft_vocab != spec.vocab,
            "no layer for each captured layer": spec.layers != len(spec.captured),
        }
        refuse_unlike(unlike)
        return {
            "attention": asdict(spec.attention),
            "intermediate": spec.intermediate,
            "captured": list(spec.captured),
            "rope": asdict(spec.rope),
            "eps": spec.eps,
            "block": spec.block,
            "mask": spec.mask,
            "causal": spec.causal,
        }

    @classmethod
    def other_than(cls, spec: DFlashSpec, stated: Mapping[str, Any]) -> list[str]:
        return ["layers"] if stated.get("layers", spec.layers) != spec.layers else []

    @classmethod
    def contradictions(cls, stated: Mapping[str, Any]) -> Iterator[Unfit]:
        layers = stated.get("layers", LAYERS)
        if not isinstance(layers, int) or layers < 1 or ("captured" in stated and "layers" in stated):
            yield Unfit(
                "layers",
                f"layers is {layers!r}" + (", and captured is stated too" if "captured" in stated else ""),
                "Set layers to the number of the drafter's layers, or captured to as many layers of the target.",
            )

    @classmethod
    def of_target(cls, target: TargetConfig, stated: Mapping[str, Any], where: Where) -> dict[str, Any]:
        layers = stated.get("layers", LAYERS)
        captured = guessed(target.layers, layers)
        if "captured" not in stated and list(captured) != sorted(set(captured)):
            raise RecipeInvalid(
                f"a drafter of {layers} layers reads as many of the target's, among 1 to {target.layers - 3} of its "
                f"{target.layers}, which are too few",
                where=where(("layers",)),
                fix=f"Set layers to {max(1, target.layers - 3)} or fewer (--set layers=N), or name the target's layers "
                "(--set captured=1,2,3).",
            )
        if "mask" not in stated:
            raise RecipeInvalid(
                "the recipe has no mask, the token in all slots of a block but the first",
                fix="Pass --set mask=ID: the tokenizer's mask token, or else a token that no text has.",
            )
        # A target of another attention says nothing of heads that share keys.
        kv_heads = None if target.text.get("kv_lora_rank") else target.text.get("num_key_value_heads")
        attention = {
            "heads": target.heads,
            "kv_heads": kv_heads or fewer_kv_heads(target.heads),
            "head_dim": target.text.get("head_dim") or (target.hidden // target.heads if kv_heads else 128),
        }
        return {
            "attention": attention,
            "intermediate": target.text.get("intermediate_size"),
            "eps": target.text.get("rms_norm_eps", 1e-6),
            "captured": list(captured),
            "rope": {"theta": target_theta(target)},
        }

    def _spec(self, target: TargetConfig, **more: Any) -> DFlashSpec:
        return DFlashSpec(
            attention=self.attention,
            hidden=target.hidden,
            target_hidden=target.hidden,
            intermediate=self.intermediate,
            layers=len(self.captured),
            vocab=target.vocab,
            draft_vocab=target.vocab,
            rope=self.rope,
            captured=self.captured,
            eps=self.eps,
            dtype=self.compute or self.dtype,
            max_positions=target.max_positions,
            block=self.block,
            mask=self.mask,
            causal=self.causal,
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class DFlashRecipe(BlockRecipe):
    """A DFlash drafter, and its training with ModelOpt.

    Attributes:
        drafter: the family.
        distill: learn the target's probabilities, or else the text's tokens.
        objective: what weighs a slot's loss: "dpace" by how likely the drafts before it are
            (https://arxiv.org/abs/2605.18810), "decay" by its place.
        dpace_alpha: how much D-PACE counts an unlikely draft, above 0 and up to 1.
    """

    drafter: Literal["dflash"] = "dflash"
    distill: bool = True
    objective: Literal["dpace", "decay"] = "dpace"
    dpace_alpha: float = 0.5

    @property
    def draft_steps(self) -> int:
        return self.block - 1

    def spec(self, target: TargetConfig) -> DFlashSpec:
        return self._spec(target)

    def wrong(self) -> Iterator[tuple[str, str]]:
        yield from super().wrong()
        if not 0 < self.dpace_alpha <= 1:
            yield "dpace_alpha", f"dpace_alpha is {self.dpace_alpha}, but must be above 0 and at most 1"
        if self.decay and self.objective != "decay":
            yield "decay", f"decay is {self.decay}, but it needs objective decay: D-PACE weighs slots by itself"

    @classmethod
    def of_head(cls, spec: DFlashSpec) -> dict[str, Any]:
        if spec.is_dspark:
            raise RecipeInvalid(
                "the --init-from head is a DSpark drafter, and the recipe trains DFlash",
                fix="Use a recipe of dspark.",
            )
        return super().of_head(spec)


@dataclass(frozen=True, kw_only=True)
class DSparkRecipe(BlockRecipe):
    """A DSpark drafter, and its training with ModelOpt.

    Attributes:
        drafter: the family.
        markov_rank: of the Markov head's two matrices.
        markov_kind: "vanilla", or "gated" or "rnn" if the Markov head reads the slot's state too.
        ce_loss: weight of the cross-entropy to the text's tokens.
        l1_loss: weight of the distance between the drafter's probabilities and the target's.
        confidence_loss: weight of the confidence head's loss; 0 for no confidence head.
    """

    OF_THE_HEAD: ClassVar[tuple[str, ...]] = (*BlockRecipe.OF_THE_HEAD, "markov_rank", "markov_kind")
    POSITIVE: ClassVar[tuple[str, ...]] = (*BlockRecipe.POSITIVE, "markov_rank")

    drafter: Literal["dspark"] = "dspark"
    markov_rank: int = 256
    markov_kind: Literal["vanilla", "gated", "rnn"] = "vanilla"
    ce_loss: float = 0.1
    l1_loss: float = 0.9
    confidence_loss: float = 1.0

    @property
    def draft_steps(self) -> int:
        return self.block

    def spec(self, target: TargetConfig) -> DFlashSpec:
        markov, confident = Markov(self.markov_rank, self.markov_kind), self.confidence_loss > 0
        return self._spec(target, shift=True, markov=markov, confidence=Confidence(confident, confident))

    def wrong(self) -> Iterator[tuple[str, str]]:
        yield from super().wrong()
        for name in ("ce_loss", "l1_loss", "confidence_loss"):
            if not (value := getattr(self, name)) >= 0:
                yield name, f"{name} is {value}"
        if not self.ce_loss + self.l1_loss > 0:
            yield "ce_loss", "ce_loss and l1_loss are 0: nothing would be learned"

    @classmethod
    def of_head(cls, spec: DFlashSpec) -> dict[str, Any]:
        """See `DrafterRecipe.of_head`; a DFlash drafter's Markov and confidence heads begin untrained."""
        if not spec.is_dspark:
            return super().of_head(spec)
        if not spec.shift or not spec.markov.rank:
            raise RecipeInvalid(
                "ModelOpt's DSpark samples from the anchor and has a Markov head; the --init-from head does not",
                fix="Continue with the trainer that made the head.",
            )
        if spec.confidence.present and not spec.confidence.with_markov:
            raise RecipeInvalid(
                "the confidence head of the --init-from head reads the state alone, ModelOpt's also the Markov head",
                fix="Continue with the trainer that made the head.",
            )
        without = {} if spec.confidence.present else {"confidence_loss": 0.0}
        return super().of_head(spec) | {"markov_rank": spec.markov.rank, "markov_kind": spec.markov.kind} | without

    @classmethod
    def other_than(cls, spec: DFlashSpec, stated: Mapping[str, Any]) -> list[str]:
        confident = stated.get("confidence_loss", 1.0 if spec.confidence.present else 0.0) > 0
        unlike = spec.is_dspark and confident != spec.confidence.present
        return super().other_than(spec, stated) + ["confidence_loss"] * unlike
