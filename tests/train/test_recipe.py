import dataclasses
import json

import pytest

from kconv.errors import RecipeInvalid
from kconv.train import recipe as recipes
from kconv.train.recipe import parse_recipe

ALL = [name for name in vars(recipes) if name.startswith(("TINY_", "TEST_"))]


def plain(name: str = "TINY_MLA") -> dict:
    return json.loads(json.dumps(dataclasses.asdict(getattr(recipes, name))))


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_survives_json(name):
    assert parse_recipe(plain(name)) == getattr(recipes, name)


def test_the_decoder_follows_from_the_attention():
    assert parse_recipe(plain("TINY_MLA")).decoder == "kimik2"
    assert parse_recipe(plain("TINY_GQA")).decoder == "llama"


@pytest.mark.parametrize("place", [(), ("attention",), ("rope",), ("rope", "scaling")])
def test_an_unknown_key_is_refused_at_any_depth(place):
    values = plain()
    inner = values
    for part in place:
        inner = inner[part]
    inner["learning_rate"] = 1e-3
    with pytest.raises(RecipeInvalid, match="learning_rate"):
        parse_recipe(values)


@pytest.mark.parametrize("key", ["attention", "rope", "captured"])
def test_a_missing_key_is_refused(key):
    values = plain()
    del values[key]
    with pytest.raises(RecipeInvalid, match=key):
        parse_recipe(values)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", 0.0),
        ("lr", "fast"),
        ("steps", 0),
        ("batches", -1),
        ("warmup", -1),
        ("seed", -1),
        ("seed", 2**32),
        ("seq", 4),
        ("captured", []),
        ("captured", [3, 1, 5]),
        ("captured", [1, 1, 5]),
        ("captured", [-1, 1]),
        ("schedule", "sawtooth"),
        ("dtype", "F16"),
        ("lr", float("nan")),
    ],
)
def test_a_value_that_cannot_be_is_refused(key, value):
    with pytest.raises(RecipeInvalid, match=key if key != "seq" else "4 tokens are too few"):
        parse_recipe(plain() | {key: value})


def test_a_biased_attention_is_refused():
    values = plain("TINY_GQA")
    values["attention"]["bias"] = True
    with pytest.raises(RecipeInvalid, match="bias"):
        parse_recipe(values)
