"""Recipes by name, completed from Kimi-K2's dims and held to its published heads' parameter count."""

import dataclasses
from math import prod
from pathlib import Path

import pytest
from support.heads import FITTING_GQA, random_slots, write_head, written

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.read import read_head
from kconv.drafters.slots import needs
from kconv.drafters.spec import Gqa, HeadSpec, Mla, Norms
from kconv.engines import BY_NAME
from kconv.errors import ConfigInvalid, RecipeInvalid
from kconv.targets.config import TargetConfig, parse_target_config, read_target_config
from kconv.train.job import check_job
from kconv.train.recipe import NAMES, TINY_MLA, complete, read_recipe_file

ROWS = 100_000


@pytest.fixture
def kimi() -> TargetConfig:
    """Return Kimi-K2's dims, as its config.json states them."""
    yarn = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    yarn |= {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    return parse_target_config(
        {
            "model_type": "kimi_k2",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "vocab_size": 163840,
            "max_position_embeddings": 262144,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 50000.0,
            "rope_scaling": yarn,
        }
    )


def parameters(spec: HeadSpec) -> int:
    return sum(prod(need.shape) for name, need in needs(spec).items() if name != "embed_tokens")


def test_the_mla_recipe_makes_a_head_of_nvidias_published_size(kimi):
    recipe = complete(read_recipe_file("eagle3-mla"), kimi, ROWS)
    spec = recipe.spec(kimi)
    assert isinstance(spec.attention, Mla)
    assert spec.captured == (1, 29, 57)
    assert parameters(spec) == 1_841_199_104


def test_the_gqa_recipe_takes_the_targets_heads_and_no_scaling(kimi):
    recipe = complete(read_recipe_file("eagle3-gqa"), kimi, ROWS)
    assert recipe.attention == Gqa(64, kv_heads=8, head_dim=128)
    assert recipe.rope.theta == 50000.0
    assert recipe.rope.scaling is None


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_takes_the_data_through_once_unless_it_says_otherwise(kimi, name):
    values = read_recipe_file(name) | ({} if name.startswith("eagle3") else {"mask": kimi.vocab - 1})
    assert complete(values, kimi, ROWS).steps == ROWS // 8
    assert complete(values | {"passes": 3, "accumulate": 2}, kimi, ROWS).steps == 3 * ROWS // 8 // 2
    assert complete(values | {"steps": 7}, kimi, ROWS).steps == 7
    with pytest.raises(RecipeInvalid, match="a batch is 8 rows of 4,096 tokens, but the data fills only 7") as fault:
        complete(values, kimi, 7)
    assert "--set seq=" in fault.value.fix


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": "mamba"}, "decoder is 'mamba'"),
        ({"learning_rate": 1}, "learning_rate"),
        ({"batches": 99_999}, "the data has 100,000 rows"),
        ({"batch": 0}, "batch is 0, but must be above 0"),
        ({"attention": {"heads": 64}}, "attention"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"captured": [1, 29, 61]}, "captures layer 61, but the target's layers are 0 to 60"),
        ({"captured": [1, 61, 90]}, "captures layers 61, 90, but"),
        ({"draft_vocab": 163840}, "draft_vocab is 163840"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(kimi, changes, message):
    with pytest.raises(RecipeInvalid, match=message):
        complete(read_recipe_file("eagle3-mla") | changes, kimi, ROWS)


@pytest.mark.parametrize("rows", [100, 3_000, ROWS])
def test_kconvs_own_recipes_warm_up_for_a_tenth_of_a_short_run(kimi, rows):
    recipe = complete(read_recipe_file("eagle3-mla"), kimi, rows)
    assert recipe.warmup == min(500, recipe.steps // 10)
    assert complete(read_recipe_file("eagle3-mla") | {"warmup": 9}, kimi, rows).warmup == 9


def test_a_stated_warmup_that_never_ends_is_refused(kimi):
    with pytest.raises(RecipeInvalid, match="rise for 600 steps, but the run has 600") as fault:
        complete(read_recipe_file("eagle3-mla") | {"warmup": 600, "steps": 600}, kimi, ROWS)
    assert fault.value.where == "--set warmup"


def test_the_example_recipe_makes_the_demos_head_on_more_text(tiny_target):
    example = Path(__file__).parent.parent.parent / "examples" / "tiny-eagle3-mla.yaml"
    recipe = complete(read_recipe_file(str(example)), read_target_config(tiny_target), ROWS)
    assert (recipe.rope, recipe.captured, recipe.eps) == (TINY_MLA.rope, TINY_MLA.captured, TINY_MLA.eps)
    assert recipe.batches * recipe.batch > TINY_MLA.batches * TINY_MLA.batch


@pytest.mark.parametrize("passes", [0, "many", 1.5])
def test_passes_are_counted(kimi, passes):
    with pytest.raises(RecipeInvalid, match="passes is"):
        complete(read_recipe_file("eagle3-mla") | {"passes": passes}, kimi, ROWS)


@pytest.mark.parametrize("text", ["- a list", "a: [", "word"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(RecipeInvalid):
        read_recipe_file(str(file))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(RecipeInvalid) as fault:
        read_recipe_file("eagle4")
    assert all(name in fault.value.fix for name in NAMES)


def test_a_head_to_go_on_from_decides_what_it_is(kimi):
    spec = complete(read_recipe_file("eagle3-mla"), kimi, ROWS).spec(kimi)
    narrow = dataclasses.replace(spec, intermediate=1024, captured=(3, 30, 50))
    recipe = complete(read_recipe_file("eagle3-mla"), kimi, ROWS, narrow)
    assert (recipe.intermediate, recipe.captured) == (1024, (3, 30, 50))


@pytest.mark.parametrize("changes", [{"intermediate": 2048}, {"captured": [1, 2, 3]}, {"decoder": "gqa"}])
def test_a_recipe_that_contradicts_the_head_is_refused(kimi, changes):
    spec = complete(read_recipe_file("eagle3-mla"), kimi, ROWS).spec(kimi)
    with pytest.raises(RecipeInvalid, match=f"{next(iter(changes))} differs"):
        complete(read_recipe_file("eagle3-mla") | changes, kimi, ROWS, spec)


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"layers": 2}, "layers"), ({"norms": Norms(fc=True)}, "norms"), ({"fc_bias": True}, "biases")],
)
def test_a_head_that_modelopt_cannot_train_is_refused(kimi, changes, what):
    spec = complete(read_recipe_file("eagle3-mla"), kimi, ROWS).spec(kimi)
    with pytest.raises(RecipeInvalid, match=f"it has {what}"):
        complete(read_recipe_file("eagle3-mla"), kimi, ROWS, dataclasses.replace(spec, **changes))


@pytest.mark.parametrize("changes", [{"hidden": 4096, "target_hidden": 4096}, {"vocab": 128256, "draft_vocab": 128256}])
def test_a_head_of_another_target_is_refused(kimi, changes):
    spec = complete(read_recipe_file("eagle3-mla"), kimi, ROWS).spec(kimi)
    with pytest.raises(RecipeInvalid, match="the target has 7168 and 163,840"):
        complete(read_recipe_file("eagle3-mla"), kimi, ROWS, dataclasses.replace(spec, **changes))


@pytest.mark.parametrize(("world", "shard", "message"), [("3", False, "3 processes"), ("2", True, "GPUs")])
def test_processes_that_cannot_share_a_run_are_told_before_any_data(kimi, monkeypatch, world, shard, message):
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(RecipeInvalid, match=message):
        check_job(read_recipe_file("eagle3-mla"), kimi, None, shard=shard)


def test_a_head_that_lost_its_theta_is_not_trained_on_with_an_engines_default(tiny_target, tmp_path):
    target, slots = read_target_config(tiny_target), random_slots(FITTING_GQA)
    lost = written(FITTING_GQA, rope_theta=..., rope_scaling=..., rope_parameters=...)
    whole, short = (
        read_head(open_checkpoint(write_head(tmp_path / name, BY_NAME["vllm"], FITTING_GQA, slots, config)))
        for name, config in (("whole", written(FITTING_GQA)), ("short", lost))
    )
    check_job({"seq": 32, "batch": 2}, target, whole)
    with pytest.raises(ConfigInvalid, match="no rope_theta"):
        check_job({"seq": 32, "batch": 2}, target, short)
