"""How to train a draft head: recipes in code, by name, and from files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..checkpoint.schema import MAX_YAML, Wrong, line_of, no_such_key, parse_yaml, read_bounded, wrong_value
from ..drafters.captured import default_outputs
from ..drafters.rope_keys import read_rope
from ..drafters.spec import Gqa, HeadSpec, Linear, Llama3, Mla, Norms, Rope, Yarn
from ..errors import RecipeInvalid
from ..targets.config import TargetConfig


@dataclass(frozen=True)
class EagleRecipe:
    """An Eagle3 head of one decoder layer, and its training with ModelOpt.

    It counts steps, not seconds, so that a recipe gives the same head on a slow machine.

    Attributes:
        attention: decides ModelOpt's decoder: `Mla` is its `kimik2`, `Gqa` (or MHA) its `llama`.
        decoder_layer: "served" computes as engines do; "stock" is ModelOpt's own, which no engine computes, and only
            for `Gqa`.
        intermediate: width of the dense SwiGLU MLP.
        captured: the captured layers, as 0-based outputs.
        rope: rotary embedding of the head.
        eps: epsilon of each RMSNorm.
        draft_vocab: rows of the head's own `lm_head`, for the most frequent tokens; None for the target's `lm_head`.
        ttt_steps: draft steps trained at once.
        loss_decay: weight of each draft step's loss relative to the step before.
        lk_loss: weight of the LK loss, which is added to ModelOpt's in each draft step: minus the logarithm of the
            share of drafts that the target accepts (https://arxiv.org/abs/2602.23881). Needs kernel "sdpa".
        batches: distinct batches of text.
        steps: optimizer steps; those beyond `batches` are further passes.
        batch: sequences per batch.
        seq: tokens per sequence.
        optimizer: "muon" for the matrices and AdamW for the rest, or "adamw" for all.
        lr: peak learning rate of the matrices.
        rest_lr: that of the norms and of the head's own `lm_head`.
        schedule: how both decay after `warmup` steps, by transformers' name.
        warmup: steps.
        accumulate: batches whose gradients are summed into one step.
        seed: random seed.
        dtype: of the trained weights. In BF16 a step below 1/256 of a weight is lost.
        kernel: "eager" computes as ModelOpt does, "sdpa" the same sums in bounded memory.
        pack: put several isolated documents into a row; needs kernel "sdpa".
        compute: dtype of the matrix products and of the resulting head; None for `dtype`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    attention: Gqa | Mla
    intermediate: int
    captured: tuple[int, ...]
    rope: Rope
    eps: float = 1e-5
    decoder_layer: Literal["served", "stock"] = "served"
    draft_vocab: int | None = None
    ttt_steps: int = 3
    loss_decay: float = 0.9
    lk_loss: float = 0.0
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
    kernel: Literal["eager", "sdpa"] = "eager"
    pack: bool = False

    @property
    def decoder(self) -> Literal["kimik2", "llama"]:
        """ModelOpt's `eagle_decoder_type`."""
        return "kimik2" if isinstance(self.attention, Mla) else "llama"


_CHECK = TypeAdapter(EagleRecipe)
# pydantic's name for each alternative of a choice, in an error's location.
CHOICES = {one.__name__: one for one in (Gqa, Mla, Yarn, Linear, Llama3)}
POSITIVE = (
    "intermediate", "ttt_steps", "batches", "steps", "batch", "seq", "accumulate", "lr", "rest_lr", "eps", "loss_decay",
)  # fmt: skip


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
            return f"--set {place[0]}"
        line = line_of(self.text, place)
        return f"{self.name}:{line}" if line else self.name


Where = Callable[[Sequence[str | int]], str]
"""Returns where a key of a recipe comes from; see `Stated.where`."""


def _where(values: Mapping[str, Any]) -> Where:
    return values.where if isinstance(values, Stated) else lambda _: ""


def parse_recipe(values: Mapping[str, Any], where: Where | None = None) -> EagleRecipe:
    """Read a recipe from plain values, e.g. from a YAML file; `where` returns where a key comes from."""
    where = where or _where(values)
    try:
        recipe = _CHECK.validate_python(dict(values))
    except ValidationError as fault:
        raise _wrong(fault.errors(), where) from fault
    check_recipe(recipe, where)
    return recipe


def _wrong(errors: Sequence[Any], where: Where) -> RecipeInvalid:
    wrong = _find_wrong(errors)
    return RecipeInvalid(
        wrong.of("head's recipe"),
        where=where(wrong.place),
        fix=f"The keys are {', '.join(field.name for field in fields(EagleRecipe))}.",
    )


def _find_wrong(found: Sequence[Any]) -> Wrong:
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
        return wrong_value(first, place)
    tag = next((part for part in reversed(first["loc"]) if part in CHOICES), None)
    model = CHOICES[str(tag)] if tag else Rope if place[:-1] else EagleRecipe
    return no_such_key(place, [field.name for field in fields(model)])


def check_recipe(recipe: EagleRecipe, where: Where = lambda _: "") -> None:
    """Raise RecipeInvalid for values that are invalid for any target."""
    wrong = [(name, f"{name} is {value}") for name in POSITIVE if not (value := getattr(recipe, name)) > 0]
    if recipe.warmup < 0:
        wrong.append(("warmup", f"warmup is {recipe.warmup}"))
    if not 0 <= recipe.seed < 2**32:  # the bounds of numpy, which the Trainer also seeds
        wrong.append(("seed", f"seed is {recipe.seed}"))
    if not recipe.lk_loss >= 0:
        wrong.append(("lk_loss", f"lk_loss is {recipe.lk_loss}"))
    if recipe.lk_loss and recipe.kernel != "sdpa":
        wrong.append(("lk_loss", "lk_loss is not 0, but it needs kernel sdpa: eager computes ModelOpt's own loss"))
    if recipe.seq < recipe.ttt_steps + 2:
        wrong.append(("seq", f"{recipe.seq} tokens are too few for {recipe.ttt_steps} draft steps"))
    if not recipe.captured or list(recipe.captured) != sorted(set(recipe.captured)) or recipe.captured[0] < 0:
        wrong.append(("captured", f"captured is {list(recipe.captured)}, not a list of ascending layers"))
    if recipe.pack and recipe.kernel != "sdpa":
        wrong.append(("pack", "pack is true, but it needs kernel sdpa, whose masks keep documents apart"))
    if recipe.decoder_layer == "stock" and isinstance(recipe.attention, Mla):
        reason = "ModelOpt downloads its own from the Hub, and transformers 5 cannot import it"
        wrong.append(("decoder_layer", f"decoder_layer is stock, but the attention is MLA: {reason}"))
    if isinstance(recipe.attention, Gqa) and recipe.attention.bias:
        wrong.append(("attention", "attention.bias is true, but engines drop the bias of o_proj"))
    if wrong:
        raise RecipeInvalid(
            f"the recipe is invalid: {'; '.join(what for _, what in wrong)}",
            where=where(wrong[0][:1]),
            fix="Correct these values.",
        )


def check_fit(recipe: EagleRecipe, layers: int, vocab: int, where: Where = lambda _: "") -> None:
    """Raise RecipeInvalid for a recipe that does not fit a target."""
    if recipe.captured[-1] >= layers:
        raise RecipeInvalid(
            f"the recipe captures layer {recipe.captured[-1]}, but the target's layers are 0 to {layers - 1}",
            where=where(("captured",)),
            fix="Use 0-based layer outputs.",
        )
    if recipe.draft_vocab is not None and not 0 < recipe.draft_vocab < vocab:
        raise RecipeInvalid(
            f"draft_vocab is {recipe.draft_vocab}, but the target's vocabulary has {vocab} tokens",
            where=where(("draft_vocab",)),
            fix="Use fewer tokens than the target has, or null for all of them.",
        )


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


NAMES = ("eagle3-mla", "eagle3-gqa")
DECODERS = ("mla", "gqa")
# The keys that a head to continue from decides.
OF_THE_HEAD = ("attention", "intermediate", "captured", "rope", "eps", "draft_vocab")
# The keys of a file or --set: the recipe's own, and the two that `complete` resolves.
KEYS = ("decoder", "passes", *(field.name for field in fields(EagleRecipe)))

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
        close = get_close_matches(name, NAMES, n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        missing = RecipeInvalid(f"there is no recipe and no file {name!r}", fix=fix + meant)
        text = read_bounded(Path(name), RecipeInvalid, limit=MAX_YAML, fix=fix, missing=missing)
    values = parse_yaml(text, RecipeInvalid, where=name, what="recipe", fix=fix)
    if not isinstance(values, dict):
        raise RecipeInvalid(
            f"{name} is not a mapping of keys to values",
            where=name,
            fix="Write KEY: VALUE lines, as in eagle3-mla.yaml.",
        )
    return Stated(values, name, text)


def check_keys(values: Mapping[str, Any]) -> None:
    """Raise RecipeInvalid for unknown keys and for values of a wrong type; this needs only the values."""
    unknown = [str(key) for key in values if key not in KEYS]
    if unknown:
        near = [OTHER_KEYS[unknown[0]]] if unknown[0] in OTHER_KEYS else get_close_matches(unknown[0], KEYS, n=1)
        raise RecipeInvalid(
            f"no recipe has a key {', '.join(map(repr, unknown))}" + (f"; did you mean {near[0]}?" if near else ""),
            where=_where(values)(unknown[:1]),
            fix=f"The keys are {', '.join(KEYS)}.",
        )
    passes = values.get("passes", 1)
    if not isinstance(passes, int) or passes < 1:
        raise RecipeInvalid(
            f"passes is {passes!r}",
            where=_where(values)(("passes",)),
            fix="Set passes to the number of passes through the data: 1 or more.",
        )
    try:
        _CHECK.validate_python({key: value for key, value in values.items() if key not in ("decoder", "passes")})
    except ValidationError as fault:
        # The target, or the head to continue from, states what a recipe leaves out.
        wrong = [one for one in fault.errors() if one["type"] != "missing" or len(one["loc"]) > 1]
        if wrong:
            raise _wrong(wrong, _where(values)) from fault


def complete(
    values: Mapping[str, Any], target: TargetConfig, rows: int, init_from: HeadSpec | None = None
) -> EagleRecipe:
    """Return a complete recipe: keys missing in a file come from the head to continue, or from the target.

    `decoder` ("mla" or "gqa") stands for an attention with the target's dims, and `passes` for the steps of that many
    passes through the data.

    Raises:
        RecipeInvalid: a key does not exist, a value is invalid or contradicts the head, or the head or a value does not
            fit the target.
    """
    check_keys(values)
    where, values = _where(values), dict(values)
    decoder, passes = values.pop("decoder", None), values.pop("passes", 1)
    stated = dict(values)
    defaults = _of_head(init_from, target) if init_from else _of_target(target, decoder, values, where)
    values = defaults | values
    values.setdefault("batches", rows // _count(values, "batch"))
    values.setdefault("steps", max(1, _count(values, "batches") * passes // _count(values, "accumulate")))
    recipe = parse_recipe(values, where)
    check_fit(recipe, target.layers, target.vocab, where)
    if init_from:
        whole = parse_recipe(values | _of_head(init_from, target), where)
        wrong = [key for key in OF_THE_HEAD if key in stated and getattr(whole, key) != getattr(recipe, key)]
        if decoder and decoder != ("mla" if init_from.kind == "mla" else "gqa"):
            wrong.append("decoder")
        if wrong:
            raise RecipeInvalid(
                f"the recipe's {', '.join(wrong)} differs from the --init-from head",
                where=where(wrong[:1]),
                fix="Remove these keys. The head decides them.",
            )
    if recipe.batches * recipe.batch > rows:
        raise RecipeInvalid(
            f"the recipe needs {recipe.batches:,} batches of {recipe.batch}, but the data has {rows:,} rows",
            where=where(("batches",)),
            fix="Lower batches or batch, or use more data.",
        )
    return replace(recipe, warmup=min(recipe.warmup, recipe.steps // 10)) if "warmup" not in stated else recipe


def _count(values: Mapping[str, Any], key: str) -> int:
    """Return a count for arithmetic; if it is invalid, `parse_recipe` reports the error."""
    count = values.get(key, EagleRecipe.__dataclass_fields__[key].default)
    return count if isinstance(count, int) and count > 0 else 1


def _of_head(spec: HeadSpec, target: TargetConfig) -> dict[str, Any]:
    if (spec.target_hidden, spec.vocab) != (target.hidden, target.vocab):
        raise RecipeInvalid(
            f"the --init-from head needs states of width {spec.target_hidden} and {spec.vocab:,} tokens, but the "
            f"target has {target.hidden} and {target.vocab:,}",
            fix="Start from a head of this target.",
        )
    unlike = {
        "layers": spec.layers != 1,
        "norms": spec.norms != Norms(),
        "biases": spec.mlp_bias or spec.fc_bias,
        "a different width": spec.hidden != spec.target_hidden,
    }
    if any(unlike.values()):
        raise RecipeInvalid(
            f"ModelOpt cannot continue this head: it has {', '.join(what for what, has in unlike.items() if has)}",
            fix="Continue with the trainer that made the head.",
        )
    return {
        "attention": asdict(spec.attention),
        "intermediate": spec.intermediate,
        "captured": list(spec.captured),
        "rope": asdict(spec.rope),
        "eps": spec.eps,
        "draft_vocab": spec.draft_vocab if spec.draft_vocab != spec.vocab else None,
    }


def _of_target(target: TargetConfig, decoder: str | None, stated: dict[str, Any], where: Where) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "intermediate": target.text.get("intermediate_size"),
        "eps": target.text.get("rms_norm_eps", 1e-5),
        "captured": list(default_outputs(target.layers)),
    }
    if "attention" in stated:
        return defaults | ({} if "rope" in stated else {"rope": asdict(read_rope(target.rope))})
    if decoder not in DECODERS:
        raise RecipeInvalid(
            f"the recipe's decoder is {decoder!r}, and no attention dims are given",
            where=where(("decoder",)),
            fix=f"Write decoder: {' or '.join(DECODERS)}, or state the attention's dims.",
        )
    if decoder == "gqa":
        # Without the target's scaling: engines differ in how they scale a Llama layer's softmax under YaRN.
        attention = {"heads": target.heads, "kv_heads": _kv_heads(target.heads), "head_dim": 128, "bias": False}
        return defaults | {"attention": attention, "rope": {"theta": _theta(target)}}
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


def _theta(target: TargetConfig) -> float:
    """Return the base of a target's RoPE, even if its scaling is one that no head can have."""
    parameters = target.rope.get("rope_parameters")
    nested = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    return read_rope({"rope_theta": target.rope.get("rope_theta", nested)}).theta


def _kv_heads(heads: int) -> int:
    return next(count for count in (8, 4, 2, 1) if heads % count == 0)
