"""How to train a draft head: recipes in code, by name, and from files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ValidationError

from ..checkpoint.schema import MAX_YAML, Wrong, line_of, no_such_key, parse_yaml, read_bounded, wrong_value
from ..drafters.base import Spec
from ..drafters.captured import default_outputs
from ..drafters.dflash import DFlashSpec
from ..drafters.eagle3 import is_parallel
from ..drafters.rope_keys import read_rope
from ..drafters.spec import Gqa, HeadSpec, Linear, Llama3, Mla, Norms, Rope, Tokens, Yarn
from ..errors import RecipeInvalid, Setting
from ..strict import adapter
from ..targets.config import TargetConfig
from .dflash_recipe import DFlashRecipe, DSparkRecipe
from .drafter_recipe import (
    DrafterRecipe,
    Sizes,
    Unfit,
    Where,
    fewer_kv_heads,
    refuse_unlike,
    target_theta,
    wrong_heads,
)


@dataclass(frozen=True, kw_only=True)
class EagleRecipe(DrafterRecipe):
    """An Eagle3 head of one decoder layer, and its training with ModelOpt.

    Attributes:
        drafter: the family.
        attention: decides ModelOpt's decoder: `Mla` is its `kimik2`, `Gqa` (or MHA) its `llama`.
        decoder_layer: "served" computes as engines do; "stock" is ModelOpt's own, which no engine computes, and only
            for `Gqa`.
        draft_vocab: rows of the head's own `lm_head`, for the most frequent tokens; None for the target's `lm_head`.
        ttt_steps: draft steps trained at once.
        loss_decay: weight of each draft step's loss relative to the step before.
        lk_loss: weight of the LK loss, which is added to ModelOpt's in each draft step: minus the logarithm of the
            share of drafts that the target accepts (https://arxiv.org/abs/2602.23881). Needs kernel "sdpa".
        kernel: "eager" computes as ModelOpt does, "sdpa" the same sums in bounded memory; `pack` needs it.
    """

    SPEC: ClassVar[type] = HeadSpec
    TRAINED_BY: ClassVar[str] = "module"
    # TensorRT-LLM's first: its names are ModelOpt's own.
    LAYOUTS: ClassVar[tuple[str, ...]] = ("trtllm", "vllm")
    OF_THE_HEAD: ClassVar[tuple[str, ...]] = (*DrafterRecipe.OF_THE_HEAD, "draft_vocab")
    SHORT: ClassVar[tuple[str, ...]] = ("decoder",)
    POSITIVE: ClassVar[tuple[str, ...]] = (*DrafterRecipe.POSITIVE, "ttt_steps", "loss_decay")

    drafter: Literal["eagle3"] = "eagle3"
    attention: Gqa | Mla
    decoder_layer: Literal["served", "stock"] = "served"
    draft_vocab: int | None = None  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    ttt_steps: int = 3
    loss_decay: float = 0.9
    lk_loss: float = 0.0
    kernel: Literal["eager", "sdpa"] = "eager"

    @property
    def decoder(self) -> Literal["kimik2", "llama"]:
        """ModelOpt's `eagle_decoder_type`."""
        return "kimik2" if isinstance(self.attention, Mla) else "llama"

    @property
    def draft_steps(self) -> int:
        return self.ttt_steps

    @property
    def exports_lm_head(self) -> bool:
        return self.draft_vocab is None

    def spec(self, target: TargetConfig) -> HeadSpec:
        eos = target.eos if len(target.eos) > 1 else (target.eos[0] if target.eos else None)
        return HeadSpec(
            attention=self.attention,
            hidden=target.hidden,
            target_hidden=target.hidden,
            intermediate=self.intermediate,
            layers=1,
            vocab=target.vocab,
            draft_vocab=self.draft_vocab or target.vocab,
            rope=self.rope,
            captured=self.captured,
            eps=self.eps,
            dtype=self.compute or self.dtype,
            max_positions=target.max_positions,
            tokens=Tokens(target.bos, eos, target.pad),
        )

    def sizes(self, target: TargetConfig, rows: int) -> Sizes | None:
        if self.kernel != "sdpa":
            return None
        from .eagle_memory import eagle_sizes  # which computes with what measures, and so loads torch

        return eagle_sizes(self, target, rows)

    def wrong(self) -> Iterator[tuple[str, str]]:
        yield from super().wrong()
        if not self.lk_loss >= 0:
            yield "lk_loss", f"lk_loss is {self.lk_loss}, but must be 0 or more"
        if self.lk_loss and self.kernel != "sdpa":
            yield "lk_loss", "lk_loss is not 0, but it needs kernel sdpa: eager computes ModelOpt's own loss"
        if self.pack and self.kernel != "sdpa":
            yield "pack", "pack is true, but it needs kernel sdpa, whose masks keep documents apart"
        if self.decoder_layer == "stock" and isinstance(self.attention, Mla):
            reason = "ModelOpt downloads its own from the Hub, and transformers 5 cannot import it"
            yield "decoder_layer", f"decoder_layer is stock, but the attention is MLA: {reason}"
        if isinstance(self.attention, Gqa):
            yield from wrong_heads(self.attention)
            if self.attention.bias:
                yield "attention", "attention.bias is true, but engines drop the bias of o_proj"

    def unfit(self, layers: int, vocab: int) -> Iterator[Unfit]:
        yield from super().unfit(layers, vocab)
        if self.draft_vocab is not None and not 0 < self.draft_vocab < vocab:
            yield Unfit(
                "draft_vocab",
                f"draft_vocab is {self.draft_vocab}, but the target's vocabulary has {vocab} tokens",
                "Use fewer tokens than the target has, or null for all of them.",
            )

    @classmethod
    def of_head(cls, spec: HeadSpec) -> dict[str, Any]:
        unlike = {
            "layers": spec.layers != 1,
            "norms": spec.norms != Norms(),
            "biases": spec.mlp_bias or spec.fc_bias,
            "a different width": spec.hidden != spec.target_hidden,
            "parallel drafting": is_parallel(spec),
        }
        refuse_unlike(unlike)
        return {
            "attention": asdict(spec.attention),
            "intermediate": spec.intermediate,
            "captured": list(spec.captured),
            "rope": asdict(spec.rope),
            "eps": spec.eps,
            "draft_vocab": spec.draft_vocab if spec.draft_vocab != spec.vocab else None,
        }

    @classmethod
    def other_than(cls, spec: HeadSpec, stated: Mapping[str, Any]) -> list[str]:
        decoder = stated.get("decoder")
        return ["decoder"] if decoder and decoder != ("mla" if spec.kind == "mla" else "gqa") else []

    @classmethod
    def of_target(cls, target: TargetConfig, stated: Mapping[str, Any], where: Where) -> dict[str, Any]:
        defaults: dict[str, Any] = {
            "intermediate": target.text.get("intermediate_size"),
            "eps": target.text.get("rms_norm_eps", 1e-5),
            "captured": list(default_outputs(target.layers)),
        }
        if "attention" in stated:
            return defaults | ({} if "rope" in stated else {"rope": asdict(read_rope(target.rope))})
        decoder = stated.get("decoder")
        if decoder not in DECODERS:
            raise RecipeInvalid(
                f"the recipe's decoder is {decoder!r}, and no attention dims are given",
                where=where(("decoder",)),
                fix=f"Write decoder: {' or '.join(DECODERS)}, or state the attention's dims.",
            )
        if decoder == "gqa":
            # Without the target's scaling: engines differ in how they scale a Llama layer's softmax under YaRN.
            attention = {
                "heads": target.heads,
                "kv_heads": fewer_kv_heads(target.heads),
                "head_dim": 128,
                "bias": False,
            }
            return defaults | {"attention": attention, "rope": {"theta": target_theta(target)}}
        dims = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        absent = [key for key in dims if not target.text.get(key)]
        if absent:
            raise RecipeInvalid(
                f"the target has no {', '.join(absent)}, which an MLA head would copy",
                fix="State the attention's dims in the recipe, or train a GQA head.",
            )
        return defaults | {
            "attention": {"heads": target.heads} | {key: target.text[key] for key in dims},
            "rope": asdict(read_rope(target.rope)),
        }


RECIPES: Mapping[str, type[DrafterRecipe]] = {"eagle3": EagleRecipe, "dflash": DFlashRecipe, "dspark": DSparkRecipe}
"""The families that can be trained, by the word for each in a recipe (`drafter`), and their recipes."""


# pydantic's name for each alternative of a choice, in an error's location.
CHOICES = {one.__name__: one for one in (Gqa, Mla, Yarn, Linear, Llama3)}


class Stated(dict[str, Any]):
    """A recipe's keys as a file states them; `stated | settings` adds the values of --set."""

    def __init__(self, values: Mapping[str, Any], name: str, text: bytes, settings: frozenset[str] = frozenset()):
        super().__init__(values)
        self.name, self.text, self.settings = name, text, settings

    def __or__(self, settings: Mapping[str, Any]) -> Stated:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Stated({**self, **settings}, self.name, self.text, self.settings | settings.keys())

    def where(self, place: Sequence[str | int]) -> str:
        """Return where a key comes from: the file and its line, or --set."""
        if place and place[0] in self.settings:
            return Setting(place[0])
        line = line_of(self.text, place)
        return f"{self.name}:{line}" if line and self.name not in NAMES else self.name


def with_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a recipe's keys, and `defaults` for those that it leaves out; a file's keys stay a file's."""
    whole = {**defaults, **values}
    return Stated(whole, values.name, values.text, values.settings) if isinstance(values, Stated) else whole


def where_of(values: Mapping[str, Any]) -> Where:
    """Return a function that says where a key of a recipe stands."""
    return values.where if isinstance(values, Stated) else lambda _: ""


def recipe_type(values: Mapping[str, Any]) -> type[DrafterRecipe]:
    """Return the class of the recipe that plain values state, an Eagle3 head's if they name no family.

    Raises:
        RecipeInvalid: kconv trains no such family.
    """
    drafter = values.get("drafter", EagleRecipe.drafter)
    if not isinstance(drafter, str) or drafter not in RECIPES:
        raise RecipeInvalid(
            f"the recipe's drafter is {drafter!r}",
            where=where_of(values)(("drafter",)),
            fix=f"Set drafter to one of {', '.join(RECIPES)}.",
        )
    return RECIPES[drafter]


def parse_recipe(values: Mapping[str, Any], where: Where | None = None) -> Any:
    """Read a recipe from plain values, e.g. from a YAML file; `where` returns where a key comes from."""
    where, kind = where or where_of(values), recipe_type(values)
    try:
        recipe = adapter(kind).validate_python(dict(values))
    except ValidationError as fault:
        raise _wrong(kind, fault.errors(), where) from fault
    check_recipe(recipe, where)
    return recipe


def _wrong(kind: type[DrafterRecipe], errors: Sequence[Any], where: Where) -> RecipeInvalid:
    wrong = _find_wrong(kind, errors)
    keys = f"The keys are {', '.join(field.name for field in fields(kind))}."
    fix = "Correct it." if wrong.subject is None else keys
    return RecipeInvalid(wrong.of("head's recipe"), where=where(wrong.place), fix=fix)


def _find_wrong(kind: type[DrafterRecipe], found: Sequence[Any]) -> Wrong:
    """Return the first error, with the nearest valid key."""
    choices: dict[tuple[str | int, ...], list[Any]] = {}
    for error in found:
        tag = max((i + 1 for i, part in enumerate(error["loc"]) if part in CHOICES), default=0)
        choices.setdefault(error["loc"][:tag], []).append(error)
    # A choice (GQA or MLA) reports the errors of each alternative; the one with the fewest was meant. Errors outside of
    # all choices hold in any case.
    errors = choices.get(()) or min(choices.values(), key=len)
    # A misspelled key also leaves the right one missing; the typo is what the user must fix.
    first = next((error for error in errors if error["type"] == "unexpected_keyword_argument"), errors[0])
    place = tuple(part for part in first["loc"] if part not in CHOICES)
    if first["type"] != "unexpected_keyword_argument":
        wrong = wrong_value(first, place)
        kinds = {field.name: str(field.type) for field in fields(kind)}
        # Most such keys are better left out than set to their one word.
        optional = first["type"] == "literal_error" and "None" in kinds.get(str(place[-1]), "")
        return replace(wrong, what=f"{wrong.what}; or leave it out") if optional else wrong
    tag = next((part for part in reversed(first["loc"]) if part in CHOICES), None)
    model = CHOICES[str(tag)] if tag else {"attention": Gqa, "rope": Rope}.get(str(place[0]), kind)
    return no_such_key(place, [field.name for field in fields(model)])


def check_recipe(recipe: DrafterRecipe, where: Where = lambda _: "") -> None:
    """Raise RecipeInvalid for values that are invalid for any target."""
    _refuse(recipe.wrong(), where)


def _refuse(wrong: Iterable[tuple[str, str]], where: Where) -> None:
    if found := list(wrong):
        raise RecipeInvalid(
            f"the recipe is invalid: {'; '.join(what for _, what in found)}",
            where=where(found[0][:1]),
            fix="Correct these values.",
        )


def check_fit(unfit: Iterable[Unfit], where: Where = lambda _: "") -> None:
    """Raise RecipeInvalid for a recipe that does not fit a target."""
    for key, what, fix in unfit:
        raise RecipeInvalid(what, where=where((key,)), fix=fix)


# Kimi-K2.5's own, which the MLA heads share.
KIMI_ROPE = Rope(50000.0, Yarn(64.0, 4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0))
# A GQA head is trained without scaling, and its config states that.
PLAIN_ROPE = Rope(10000.0)

# For the demo's tiny target. The latent and rotary dims are Kimi-K2's, as vLLM on CPU requires.
TINY_MLA = EagleRecipe(
    attention=Mla(4, q_lora_rank=64, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32),
    intermediate=384,
    captured=(1, 3, 5),
    rope=KIMI_ROPE,
)
TINY_GQA = dataclasses.replace(TINY_MLA, attention=Gqa(4, kv_heads=2, head_dim=32), rope=PLAIN_ROPE)

# For the tests' tiny target: enough steps to learn something, in seconds.
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


NAMES = ("eagle3-mla", "eagle3-gqa", "dflash", "dspark")
MEANT = {name: name for name in NAMES} | {"eagle3-mha": "eagle3-gqa"}
DECODERS = ("mla", "gqa")

# Keys by which other tools' files build on one another.
BUILDS_ON = ("recipe", "base", "extends", "defaults")
# What other trainers call them.
OTHER_KEYS = {
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "passes"),
    **dict.fromkeys(("batch_size", "micro_batch_size", "per_device_train_batch_size"), "batch"),
    **dict.fromkeys(("learning_rate", "max_lr"), "lr"),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps"), "steps"),
    **dict.fromkeys(("seq_len", "seq_length", "max_length", "max_seq_len"), "seq"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulation"), "accumulate"),
    **dict.fromkeys(("warmup_steps", "num_warmup_steps"), "warmup"),
    "ttt_length": "ttt_steps",
    "draft_vocab_size": "draft_vocab",
    "block_size": "block",
    **dict.fromkeys(("mask_token", "mask_token_id"), "mask"),
    "num_anchors": "anchors",
    "target_layer_ids": "captured",
}


def read_recipe_file(name: str) -> Stated:
    """Read one of kconv's own recipes, or a YAML file.

    Raises:
        RecipeInvalid: there is no such recipe, or the file is not a YAML mapping.
    """
    fix = f"Use one of {', '.join(NAMES)}, or a YAML file."
    if name in NAMES:
        text = (files("kconv.train") / "recipes" / f"{name}.yaml").read_bytes()
    else:
        close = get_close_matches(name.lower(), MEANT, n=1)
        meant = f" Did you mean {MEANT[close[0]]}?" if close else ""
        missing = RecipeInvalid(f"there is no recipe and no file {name!r}", fix=fix + meant)
        text = read_bounded(Path(name), RecipeInvalid, limit=MAX_YAML, fix=fix, missing=missing)
    values = parse_yaml(text, RecipeInvalid, where=name, what="recipe", fix=fix)
    if not isinstance(values, dict):
        raise RecipeInvalid(
            f"{name} is not a mapping of keys to values",
            where=name,
            fix="Write KEY: VALUE lines, as in eagle3-mla.yaml.",
        )
    if isinstance(values.get("steps"), dict):
        raise RecipeInvalid(
            f"{name} is a release's recipe, not a training's",
            where=name,
            fix=f"Run it with kconv run {name}, or pass the recipe that its train step names.",
        )
    return Stated(values, name, text)


def keys_of(kind: type[DrafterRecipe]) -> tuple[str, ...]:
    """Return the keys of a file or --set: the recipe's own, and those that `complete` resolves."""
    return (*kind.SHORT, "passes", *(field.name for field in fields(kind)))


def find_key(name: str) -> str | None:
    """Return the key of any recipe that a name stands for, as kconv or another trainer calls it."""
    return next((name for kind in RECIPES.values() if name in keys_of(kind)), OTHER_KEYS.get(name))


def check_keys(values: Mapping[str, Any]) -> None:
    """Raise RecipeInvalid for unknown keys, values of a wrong type and keys that contradict each other.

    This needs only the values.
    """
    kind = recipe_type(values)
    keys = keys_of(kind)
    unknown = [str(key) for key in values if key not in keys]
    if based := [key for key in unknown if key in BUILDS_ON]:
        raise RecipeInvalid(
            f"{based[0]} is no key of a recipe: a file cannot build on another",
            where=where_of(values)(based[:1]),
            fix="Pass kconv's own with --recipe and its changes with --set, or state in the file all that differs from"
            " the defaults.",
        )
    if unknown:
        others = [name for name, other in RECIPES.items() if other is not kind and unknown[0] in keys_of(other)]
        near = [OTHER_KEYS[unknown[0]]] if unknown[0] in OTHER_KEYS else get_close_matches(unknown[0], keys, n=1)
        hint = f", only of {' and '.join(others)}" if others else f"; did you mean {near[0]}?" if near else ""
        whose = f"recipe of {values.get('drafter', EagleRecipe.drafter)}" if others else "recipe"
        raise RecipeInvalid(
            f"no {whose} has a key {', '.join(map(repr, unknown))}{hint}",
            where=where_of(values)(unknown[:1]),
            fix="Correct the key." if near and not others else f"The keys are {', '.join(keys)}.",
        )
    passes = values.get("passes", 1)
    if not isinstance(passes, int) or passes < 1:
        raise RecipeInvalid(
            f"passes is {passes!r}",
            where=where_of(values)(("passes",)),
            fix="Set passes to the number of passes through the data: 1 or more.",
        )
    check_fit(kind.contradictions(values), where_of(values))
    own = {key: value for key, value in values.items() if key not in (*kind.SHORT, "passes")}
    try:
        adapter(kind).validate_python(own)
    except ValidationError as fault:
        # The target, or the head to continue from, states what a recipe leaves out.
        wrong = [one for one in fault.errors() if one["type"] != "missing" or len(one["loc"]) > 1]
        if wrong:
            raise _wrong(kind, wrong, where_of(values)) from fault
    _refuse(kind.not_positive(own), where_of(values))


def complete(
    values: Mapping[str, Any], target: TargetConfig, rows: int, init_from: Spec | None = None
) -> DrafterRecipe:
    """Return a complete recipe: keys missing in a file come from the head to continue, or from the target.

    Of an Eagle3 head `decoder` ("mla" or "gqa") stands for an attention with the target's dims; `passes` stands for the
    steps of that many passes through the data.

    Raises:
        RecipeInvalid: a key does not exist, a value is invalid or contradicts the head, or the head or a value does not
            fit the target.
    """
    check_keys(values)
    where, kind = where_of(values), recipe_type(values)
    stated = {key: value for key, value in values.items() if key != "passes"}
    own = {key: value for key, value in stated.items() if key not in kind.SHORT}
    decided: dict[str, Any] = {}
    if init_from is None:
        defaults = kind.of_target(target, stated, where)
    else:
        _check_start(kind, init_from, target)
        defaults = decided = kind.of_head(init_from)
    filled = defaults | own
    if "batches" not in filled and rows < (batch := _count(filled, "batch")):
        seq = _count(filled, "seq")
        raise RecipeInvalid(
            f"a batch is {batch} rows of {seq:,} tokens, but the data fills only {rows:,}",
            where=where(("batch",)),
            fix="Use more data, or set smaller rows or batches, e.g. --set seq=512 --set batch=1.",
        )
    filled.setdefault("batches", rows // _count(filled, "batch"))
    passes = values.get("passes", 1)
    filled.setdefault("steps", max(1, _count(filled, "batches") * passes // _count(filled, "accumulate")))
    recipe = parse_recipe(filled, where)
    check_fit(recipe.unfit_for(target), where)
    if init_from is not None:
        whole = parse_recipe(filled | decided, where)
        wrong = [key for key in kind.OF_THE_HEAD if key in own and getattr(whole, key) != getattr(recipe, key)]
        wrong += kind.other_than(init_from, stated)
        if wrong:
            named = isinstance(values, Stated) and values.name in NAMES and wrong[0] not in values.settings
            own_name = _own_recipe(init_from)
            raise RecipeInvalid(
                f"the recipe's {', '.join(wrong)} differs from the --init-from head's, which is of {own_name}",
                where=where(wrong[:1]),
                fix=f"Use {own_name}, or start from another head: training keeps what the head is."
                if named
                else f"Remove {', '.join(wrong)}: the head decides it.",
            )
    if recipe.batches * recipe.batch > rows:
        raise RecipeInvalid(
            f"the recipe needs {recipe.batches:,} batches of {recipe.batch}, but the data has {rows:,} rows",
            where=where(("batches",)),
            fix="Lower batches or batch, or use more data.",
        )
    # The recipes that come with kconv are for long runs.
    of_kconv = isinstance(values, Stated) and values.name in NAMES and "warmup" not in values.settings
    if of_kconv or "warmup" not in stated:
        return replace(recipe, warmup=min(recipe.warmup, recipe.steps // 10))
    if recipe.warmup >= recipe.steps:
        raise RecipeInvalid(
            f"the rate would rise for {recipe.warmup:,} steps, but the run has {recipe.steps:,}",
            where=where(("warmup",)),
            fix="Lower warmup (--set warmup=N), or use more data or passes.",
        )
    return recipe


def _own_recipe(spec: Spec) -> str:
    """Return the name of kconv's recipe that trains heads like this one, "" if there is none."""
    if isinstance(spec, HeadSpec):
        return "eagle3-mla" if spec.kind == "mla" else "eagle3-gqa"
    if isinstance(spec, DFlashSpec):
        return "dspark" if spec.is_dspark else "dflash"
    return ""


def _check_start(kind: type[DrafterRecipe], spec: Spec, target: TargetConfig) -> None:
    """Refuse a head to continue from of another family or target."""
    if not isinstance(spec, kind.SPEC):
        raise RecipeInvalid(
            f"the --init-from head is {spec.drafter.a_title}, which this recipe does not train",
            fix=f"Start from a head of the same family{f', or use {own}' if (own := _own_recipe(spec)) else ''}.",
        )
    if (spec.target_hidden, spec.vocab) != (target.hidden, target.vocab):
        raise RecipeInvalid(
            f"the --init-from head needs states of width {spec.target_hidden} and {spec.vocab:,} tokens, but the "
            f"target has {target.hidden} and {target.vocab:,}",
            fix="Start from a head of this target.",
        )


def _count(values: Mapping[str, Any], key: str) -> int:
    """Return a count for arithmetic; if it is invalid, `parse_recipe` reports the error."""
    count = values.get(key, DrafterRecipe.__dataclass_fields__[key].default)
    return count if isinstance(count, int) and count > 0 else 1
