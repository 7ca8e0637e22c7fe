"""How a draft head is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..errors import RecipeInvalid
from ..head.spec import Gqa, Mla, Rope, Yarn


@dataclass(frozen=True)
class EagleRecipe:
    """An Eagle3 head of one decoder layer, and its training with ModelOpt.

    Steps, not seconds, are counted, so that a recipe gives the same head on a slow machine.

    Attributes:
        attention: decides ModelOpt's decoder: `Mla` is its `kimik2`, `Gqa` (or MHA) its `llama`.
        intermediate: width of the dense SwiGLU MLP.
        captured: target layers whose states the head reads, as outputs of 0-based decoder layers.
        rope: rotary embedding that the head is trained with, and that its config says.
        eps: epsilon of each RMSNorm, the latent ones included.
        draft_vocab: rows of the head's own `lm_head`, for the tokens that are most frequent in the training
            text; None for the target's whole vocabulary and its own `lm_head`.
        ttt_steps: draft steps that are trained at once (training-time test).
        loss_decay: weight of each draft step's loss relative to the step before.
        batches: distinct batches of text; the target runs over each of them once.
        steps: optimizer steps; more than `batches` are further passes over them, each in a new order.
        batch: sequences per batch.
        seq: tokens per sequence.
        optimizer: "muon" for the matrices and AdamW for the rest, or "adamw" for all.
        lr: peak learning rate of the matrices.
        rest_lr: peak learning rate of the norms and of the head's own `lm_head`.
        schedule: how both fall after `warmup` steps, by transformers' name.
        warmup: steps.
        accumulate: batches whose gradients make one step.
        seed: of the weights and of the order of the windows.
        dtype: of the weights that are trained, as safetensors names it. In BF16 a step below 1/256 of a weight is
            lost: a gain of 1.0 stays 1.0 at usual rates.
        compute: of the matrix products over them (autocast), and of the head that comes out; None for `dtype`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    attention: Gqa | Mla
    intermediate: int
    captured: tuple[int, ...]
    rope: Rope
    eps: float = 1e-5
    draft_vocab: int | None = None
    ttt_steps: int = 3
    loss_decay: float = 0.9
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

    @property
    def decoder(self) -> Literal["kimik2", "llama"]:
        """ModelOpt's `eagle_decoder_type`."""
        return "kimik2" if isinstance(self.attention, Mla) else "llama"


_CHECK = TypeAdapter(EagleRecipe)
POSITIVE = (
    "intermediate", "ttt_steps", "batches", "steps", "batch", "seq", "accumulate", "lr", "rest_lr", "eps", "loss_decay",
)  # fmt: skip


def parse_recipe(values: Mapping[str, Any]) -> EagleRecipe:
    """Read a recipe from plain values, as a YAML file gives them.

    Raises:
        RecipeInvalid: a key that does not exist, one that is missing, or a value of a wrong type or range.
    """
    try:
        recipe = _CHECK.validate_python(dict(values))
    except ValidationError as fault:
        # A choice (GQA or MLA) reports the faults of each alternative; the one with the fewest was meant.
        errors = fault.errors()
        first = min(errors, key=lambda e: sum(other["loc"][:2] == e["loc"][:2] for other in errors))
        place = ".".join(str(part) for part in first["loc"])
        raise RecipeInvalid(
            f"the head's recipe is wrong at {place}: {first['msg']}",
            fix=f"The keys are {', '.join(field.name for field in dataclasses.fields(EagleRecipe))}.",
        ) from fault
    check_recipe(recipe)
    return recipe


def check_recipe(recipe: EagleRecipe) -> None:
    """Raise RecipeInvalid for values that cannot be, whatever the target."""
    wrong = [f"{name} is {getattr(recipe, name)}" for name in POSITIVE if not getattr(recipe, name) > 0]
    if recipe.warmup < 0:
        wrong.append(f"warmup is {recipe.warmup}")
    if not 0 <= recipe.seed < 2**32:  # numpy's bounds, which the Trainer seeds too
        wrong.append(f"seed is {recipe.seed}")
    if recipe.seq < recipe.ttt_steps + 2:
        wrong.append(f"{recipe.seq} tokens are too few for {recipe.ttt_steps} draft steps")
    if not recipe.captured or list(recipe.captured) != sorted(set(recipe.captured)) or recipe.captured[0] < 0:
        wrong.append(f"captured is {list(recipe.captured)}, no list of ascending layers")
    if isinstance(recipe.attention, Gqa) and recipe.attention.bias:
        wrong.append("attention.bias is true, and engines drop the bias of o_proj")
    if wrong:
        raise RecipeInvalid(f"the head's recipe cannot be: {'; '.join(wrong)}", fix="Put these values right.")


def check_fit(recipe: EagleRecipe, layers: int, vocab: int) -> None:
    """Raise RecipeInvalid for a recipe that asks of a target what it has not.

    Args:
        recipe: the head's.
        layers: how many the target has.
        vocab: rows of its vocabulary.
    """
    if recipe.captured[-1] >= layers:
        raise RecipeInvalid(
            f"the recipe captures layer {recipe.captured[-1]}, and the target's layers are 0 to {layers - 1}",
            fix="Name outputs of 0-based layers.",
        )
    if recipe.draft_vocab is not None and not 0 < recipe.draft_vocab < vocab:
        raise RecipeInvalid(
            f"draft_vocab is {recipe.draft_vocab}, and the target's vocabulary {vocab}",
            fix="Give fewer tokens than the target has, or null for all of them.",
        )


# Kimi-K2.5's own, which the MLA heads share.
KIMI_ROPE = Rope(50000.0, Yarn(64.0, 4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0))
# A GQA head is trained without scaling, and its config says so.
PLAIN_ROPE = Rope(10000.0)

# For the tiny target of the demo. The latent and rotary dims are Kimi-K2's, for the sake of vLLM on CPU.
TINY_MLA = EagleRecipe(
    attention=Mla(4, q_lora_rank=64, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32),
    intermediate=384,
    captured=(1, 3, 5),
    rope=KIMI_ROPE,
)
TINY_GQA = dataclasses.replace(TINY_MLA, attention=Gqa(4, kv_heads=2, head_dim=32), rope=PLAIN_ROPE)

# For the tiny target of the tests: enough steps to learn something, in seconds.
TEST_MLA = dataclasses.replace(
    TINY_MLA,
    attention=Mla(2, q_lora_rank=32, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32),
    intermediate=128,
    batches=40,
    steps=80,
    seq=64,
    warmup=5,
)
TEST_GQA = dataclasses.replace(TEST_MLA, attention=Gqa(4, kv_heads=2, head_dim=16), rope=PLAIN_ROPE)
TEST_MHA = dataclasses.replace(TEST_GQA, attention=Gqa(4, kv_heads=4, head_dim=16))
