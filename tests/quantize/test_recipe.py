"""Recipes: what each takes, and that a wrong one is named."""

import pytest

from kconv.errors import RecipeInvalid
from kconv.quantize.recipe import builtin_recipes, load_recipe, parse_recipe

EXPERT = "model.layers.3.mlp.experts.17.gate_proj"
SHARED = "model.layers.3.mlp.shared_experts.down_proj"
DENSE = "model.layers.0.mlp.up_proj"
ATTENTION = "model.layers.3.self_attn.o_proj"
LATENT = "model.layers.3.self_attn.kv_a_proj_with_mqa"
KV_B = "model.layers.3.self_attn.kv_b_proj"
MLP = {"gate_proj", "up_proj", "down_proj"}
INDEXER = tuple(f"model.layers.3.self_attn.indexer.{part}" for part in ("weights_proj", "wk", "wq_b"))
NEVER = ("lm_head", "model.embed_tokens", "model.layers.3.mlp.gate", "model.layers.61.eh_proj", *INDEXER)

TAKES = {
    "nvfp4-experts": {EXPERT},
    "nvfp4-experts-fp8-attention": {EXPERT},
    "nvfp4-experts-mse": {EXPERT},
    "nvfp4-experts-four-over-six": {EXPERT},
    "nvfp4-mlp": {EXPERT, SHARED, DENSE},
    "nvfp4": {EXPERT, SHARED, DENSE, ATTENTION, LATENT},
    "nvfp4-weight-only": {EXPERT},
}


def test_the_package_has_these_recipes_each_under_its_own_name():
    assert builtin_recipes().keys() == TAKES.keys()
    assert all(load_recipe(name).name == name and load_recipe(name).about for name in TAKES)


def test_the_widest_recipe_takes_a_target_without_mla_whole(forms, plan):
    modules = [module.name for module in plan(forms("llama"), "nvfp4").modules]
    assert {name.rpartition(".")[2] for name in modules} == {f"{part}_proj" for part in "qkvo"} | MLP
    assert len(modules) % 7 == 0


@pytest.mark.parametrize("name", TAKES)
def test_a_recipe_takes_what_its_published_model_has_in_nvfp4(name):
    recipe = load_recipe(name)
    asked = {EXPERT, SHARED, DENSE, ATTENTION, LATENT, KV_B, *NEVER}
    assert {module for module in asked if recipe.takes(module)} == TAKES[name]
    assert {module for module in asked if recipe.rounds(module)} == (
        {ATTENTION, LATENT} if name == "nvfp4-experts-fp8-attention" else set()
    )
    assert recipe.weight_only == (name == "nvfp4-weight-only")
    assert recipe.weight_scales == {"nvfp4-experts-mse": "mse", "nvfp4-experts-four-over-six": "four-over-six"}.get(
        name, "max"
    )


def test_a_file_is_a_recipe_too_and_no_pattern_reaches_the_router(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nquantize: ['*']\nkeep: ['*.o_proj']\n")
    recipe = load_recipe(str(file))
    assert recipe.takes(KV_B) and recipe.takes(EXPERT)
    assert not any(map(recipe.takes, (ATTENTION, *NEVER)))


WRONG = {
    "an unknown key": ("name: x\nquantise: [a]\nquantize: [b]\n", "wrong: quantise"),
    "no patterns": ("name: x\nquantize: []\n", "wrong at quantize"),
    "no name": ("quantize: [a]\n", "wrong: the key name is missing"),
    "a KV cache": ("name: x\nquantize: [a]\nkv_cache: fp8\n", "kv_cache is not a known key"),
    "scales that no search finds": ("name: x\nquantize: [a]\nweight_scales: min\n", "weight_scales"),
    "a list": ("- name: x\n", "wrong at its top"),
    "no YAML": ("name: [x\n", "not valid YAML: line 2"),
}


@pytest.mark.parametrize("text, phrase", WRONG.values(), ids=WRONG)
def test_a_wrong_recipe_is_named(text, phrase):
    with pytest.raises(RecipeInvalid, match=phrase):
        parse_recipe(text)


def test_a_recipe_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(RecipeInvalid, match=r"no recipe .* file 'nvfp5'") as fault:
        load_recipe("nvfp5")
    assert "nvfp4-experts" in fault.value.fix
