import dataclasses
import json

import pytest

from kconv.errors import RecipeInvalid
from kconv.targets.config import read_target_config
from kconv.train import recipe as recipes
from kconv.train.recipe import check_keys, complete, parse_recipe, read_recipe_file

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


def test_a_number_that_is_text_is_a_number():
    assert parse_recipe(plain() | {"lr": "1e-4"}).lr == 1e-4
    check_keys({"lr": "1e-4", "steps": "3"})
    with pytest.raises(RecipeInvalid, match="lr is -1, but must be above 0"):
        check_keys({"lr": "-1"})


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
        ("lk_loss", -1.0),
        ("lk_loss", float("nan")),
        ("lk_loss", 1.0),  # with kernel eager
        ("decoder_layer", "modelopt"),
        ("decoder_layer", "stock"),  # of an MLA head
    ],
)
def test_a_value_that_cannot_be_is_refused(key, value):
    with pytest.raises(RecipeInvalid, match=key if key != "seq" else "4 tokens are too few"):
        parse_recipe(plain() | {key: value})


GOOD = """\
attention:
  heads: 4
  kv_heads: 2
  head_dim: 32
rope:
  theta: 10000
  scaling:
    factor: 4.0
    original_max_positions: 128
intermediate: 128
captured: [1, 3, 5]
batches: 4
lr: 0.01
"""
# What is changed in it, the line that is named, and what is said.
WRONG = {
    "a key": ("lr: 0.01", "lrr: 0.01", 13, "no recipe has a key 'lrr'; did you mean lr"),
    "a recipe to build on": ("lr: 0.01", "extends: eagle3-gqa", 13, "extends is no key of a recipe"),
    "a key of a choice": (
        "kv_heads:",
        "kv_headz:",
        3,
        r"attention\.kv_headz is not a known key; did you mean kv_heads",
    ),
    "a key of RoPE": ("  theta:", "  thete:", 6, r"rope\.thete is not a known key; did you mean theta"),
    "a key of a scaling": ("factor:", "factr:", 8, r"rope\.scaling\.factr is not a known key; did you mean factor"),
    "a key that is missing": ("  head_dim: 32\n", "", 1, r"attention\.head_dim is missing"),
    "a text for a number": (
        "heads: 4",
        "heads: four",
        2,
        r"attention\.heads: it must be a whole number, but is 'four'",
    ),
    "no list": ("[1, 3, 5]", "all", 11, "captured: it must be a list, but is 'all'"),
    "an item": ("[1, 3, 5]", "[1, 3, x]", 11, r"captured\.2: it must be a whole number, but is 'x'"),
    "a choice": ("lr: 0.01", "dtype: F16", 13, "dtype: it must be 'F32' or 'BF16', but is 'F16'"),
    "a range": ("lr: 0.01", "lr: 0", 13, "lr is 0"),
    "the target's layers": ("[1, 3, 5]", "[1, 3, 7]", 11, "captures layer 7, but the target's layers are 0 to 6"),
}


@pytest.mark.parametrize(("old", "new", "line", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_by_its_line_its_key_and_the_nearest_right_one(tmp_path, old, new, line, said):
    assert old in GOOD
    file = tmp_path / "head.yaml"
    file.write_text(GOOD.replace(old, new, 1))
    dims = {
        "hidden_size": 64,
        "num_hidden_layers": 7,
        "vocab_size": 512,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | dims))
    target = read_target_config(tmp_path)
    with pytest.raises(RecipeInvalid, match=said) as fault:
        complete(read_recipe_file(str(file)), target, 100)
    assert fault.value.where == f"{file}:{line}"
    # In no library's words.
    assert not [
        word for word in ("Input should", "Field required", "keyword", "Gqa", "pydantic") if word in str(fault.value)
    ]


def test_a_key_of_set_is_named_as_such(tmp_path):
    (file := tmp_path / "head.yaml").write_text(GOOD)
    with pytest.raises(RecipeInvalid, match="no recipe has a key 'warmupp'; did you mean warmup") as fault:
        check_keys(read_recipe_file(str(file)) | {"warmupp": 3})
    assert fault.value.where == "--set warmupp"


def test_a_biased_attention_is_refused():
    values = plain("TINY_GQA")
    values["attention"]["bias"] = True
    with pytest.raises(RecipeInvalid, match="bias"):
        parse_recipe(values)
