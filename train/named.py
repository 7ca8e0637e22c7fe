"""Recipes by name or file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from ..convert.captured import default_outputs
from ..convert.rope import read_rope
from ..errors import RecipeInvalid
from ..head.spec import HeadSpec, Norms
from ..targets.config import TargetConfig
from .recipe import EagleRecipe, check_fit, parse_recipe

NAMES = ("eagle3-mla", "eagle3-gqa")
DECODERS = ("mla", "gqa")
# What a head that training goes on from decides.
OF_THE_HEAD = ("attention", "intermediate", "captured", "rope", "eps", "draft_vocab")
# Of a file, or of --set: the recipe's own, and the two that `complete` resolves.
KEYS = ("decoder", "passes", *(field.name for field in fields(EagleRecipe)))


def read_recipe_file(name: str) -> dict[str, Any]:
    """Read a recipe that kconv brings, or a YAML file.

    Raises:
        RecipeInvalid: there is no such recipe, or the file is no YAML mapping.
    """
    inside = files("kconv.train") / "recipes" / f"{name}.yaml"
    try:
        text = inside.read_text() if name in NAMES else Path(name).read_text()
        values = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as fault:
        raise RecipeInvalid(
            f"there is no recipe {name!r} that can be read: {fault}",
            fix=f"Name one of {', '.join(NAMES)}, or a YAML file.",
        ) from fault
    if not isinstance(values, dict):
        raise RecipeInvalid(
            f"{name} is no mapping of keys to values", where=name, fix="Write KEY: VALUE lines, as eagle3-mla.yaml has."
        )
    return values


def check_keys(values: Mapping[str, Any]) -> None:
    """Raise RecipeInvalid for keys that no recipe has; nothing but the values is needed for that."""
    unknown = [key for key in values if key not in KEYS]
    if unknown:
        raise RecipeInvalid(
            f"no recipe has a key {', '.join(map(repr, unknown))}", fix=f"The keys are {', '.join(KEYS)}."
        )


def complete(values: Mapping[str, Any], target: TargetConfig, rows: int, start: HeadSpec | None = None) -> EagleRecipe:
    """Return a whole recipe: what a file does not say is the head's to go on from, or else the target's.

    Args:
        values: as the file has them; `decoder` ("mla" or "gqa") stands for an attention of the target's dims, and
            `passes` for as many steps as take the data through so often.
        target: the target's config.
        rows: rows of training data.
        start: the head that training goes on from.

    Raises:
        RecipeInvalid: a key does not exist, a value cannot be or contradicts the head, or the head or a value is of
            another target.
    """
    check_keys(values)
    values = dict(values)
    decoder, passes = values.pop("decoder", None), values.pop("passes", 1)
    stated = dict(values)
    defaults = _of_head(start, target) if start else _of_target(target, decoder, values)
    values = defaults | values
    if not isinstance(passes, int) or passes < 1:
        raise RecipeInvalid(f"passes is {passes!r}", fix="Give how often the data is gone through: 1 or more.")
    values.setdefault("batches", rows // _count(values, "batch"))
    values.setdefault("steps", max(1, _count(values, "batches") * passes // _count(values, "accumulate")))
    recipe = parse_recipe(values)
    check_fit(recipe, target.layers, target.vocab)
    if start:
        whole = parse_recipe(values | _of_head(start, target))
        wrong = [key for key in OF_THE_HEAD if key in stated and getattr(whole, key) != getattr(recipe, key)]
        if decoder and decoder != ("mla" if start.kind == "mla" else "gqa"):
            wrong.append("decoder")
        if wrong:
            raise RecipeInvalid(
                f"the recipe states another {', '.join(wrong)} than the head that training goes on from",
                fix="Leave these keys out: they are the head's.",
            )
    if recipe.batches * recipe.batch > rows:
        raise RecipeInvalid(
            f"the recipe asks for {recipe.batches:,} batches of {recipe.batch}, and the data holds {rows:,} rows",
            fix="Lower batches or batch, or give more data.",
        )
    return replace(recipe, warmup=min(recipe.warmup, recipe.steps // 10)) if "warmup" not in stated else recipe


def _count(values: Mapping[str, Any], key: str) -> int:
    """Return a count to reckon with; of one that cannot be, `parse_recipe` says what is wrong."""
    count = values.get(key, EagleRecipe.__dataclass_fields__[key].default)
    return count if isinstance(count, int) and count > 0 else 1


def _of_head(spec: HeadSpec, target: TargetConfig) -> dict[str, Any]:
    if (spec.target_hidden, spec.vocab) != (target.hidden, target.vocab):
        raise RecipeInvalid(
            f"the head to go on from reads states {spec.target_hidden} wide and knows {spec.vocab:,} tokens, and the "
            f"target has {target.hidden} and {target.vocab:,}",
            fix="Go on from a head of this target.",
        )
    unlike = {
        "layers": spec.layers != 1,
        "norms": spec.norms != Norms(),
        "biases": spec.mlp_bias or spec.fc_bias,
        "a width of its own": spec.hidden != spec.target_hidden,
    }
    if any(unlike.values()):
        raise RecipeInvalid(
            f"ModelOpt cannot train this head on: it has {', '.join(what for what, has in unlike.items() if has)}",
            fix="Train it on with the trainer that made it.",
        )
    return {
        "attention": asdict(spec.attention),
        "intermediate": spec.intermediate,
        "captured": list(spec.captured),
        "rope": asdict(spec.rope),
        "eps": spec.eps,
        "draft_vocab": spec.draft_vocab if spec.draft_vocab != spec.vocab else None,
    }


def _of_target(target: TargetConfig, decoder: str | None, stated: dict[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "intermediate": target.text.get("intermediate_size"),
        "eps": target.text.get("rms_norm_eps", 1e-5),
        "captured": list(default_outputs(target.layers)),
    }
    rope = read_rope(target.rope)
    if "attention" in stated:
        return defaults | {"rope": asdict(rope)}
    if decoder not in DECODERS:
        raise RecipeInvalid(
            f"the recipe's decoder is {decoder!r}, and it states no attention",
            fix=f"Say decoder: {' or '.join(DECODERS)}, or give the attention's dims.",
        )
    if decoder == "gqa":
        # Without the target's scaling: engines differ in how they scale a Llama layer's softmax under YaRN.
        attention = {"heads": target.heads, "kv_heads": _kv_heads(target.heads), "head_dim": 128, "bias": False}
        return defaults | {"attention": attention, "rope": {"theta": rope.theta}}
    dims = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    absent = [key for key in dims if not target.text.get(key)]
    if absent:
        raise RecipeInvalid(
            f"the target states no {', '.join(absent)} for an MLA head to take over",
            fix="Give the attention's dims in the recipe, or train a GQA head.",
        )
    return defaults | {
        "attention": {"heads": target.heads} | {key: target.text[key] for key in dims},
        "rope": asdict(rope),
    }


def _kv_heads(heads: int) -> int:
    return next(count for count in (8, 4, 2, 1) if heads % count == 0)
