import dataclasses
import json

import pytest
import torch
from modelopt.torch.export.plugins.hf_spec_export import KIMIK2_EAGLE_SINGLE_LAYER, LLAMA_EAGLE_SINGLE_LAYER
from modelopt.torch.speculative import utils as modelopt_utils
from safetensors import safe_open
from safetensors.torch import load_file

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints
from kconv.convert.read import read_head
from kconv.drafters.spec import Mla
from kconv.engines import BY_NAME
from kconv.engines.layout import stored
from kconv.errors import NotACheckpoint, RecipeInvalid
from kconv.targets.model import load_target
from kconv.train.module import build_module, load_module
from kconv.train.recipe import TEST_GQA, TEST_MLA

KEYS = {"kimik2": KIMIK2_EAGLE_SINGLE_LAYER, "llama": LLAMA_EAGLE_SINGLE_LAYER}


def test_modelopt_exports_the_tensors_that_it_requires(trained):
    """ModelOpt's own lists of an Eagle3 head's modules."""
    keys = KEYS[trained.recipe.decoder]
    exported = {name.removesuffix(".weight") for name in load_file(trained.folder / "model.safetensors")}
    assert keys["required"] <= exported <= keys["required"] | keys["optional"]
    assert ("d2t" in exported) == (trained.recipe.draft_vocab is not None)


def test_the_exported_shapes_are_those_of_kconvs_formulas(trained):
    head = read_head(open_checkpoint(trained.folder), hints=Hints())
    rows = stored(BY_NAME["modelopt"], head.spec)
    with safe_open(trained.folder / "model.safetensors", "pt") as file:
        exported = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    wanted = {name: row.expected.shape for name, row in rows.items() if name in exported}
    assert exported == wanted


def test_the_exported_config_says_how_the_head_was_trained(trained, target):
    spec, recipe = read_head(open_checkpoint(trained.folder), hints=Hints()).spec, trained.recipe
    assert spec.attention == recipe.attention
    assert spec.rope == recipe.rope
    assert spec.captured == recipe.captured
    assert spec.eps == recipe.eps
    assert spec.intermediate == recipe.intermediate
    assert spec.draft_vocab == (recipe.draft_vocab or target.config.vocab_size)
    assert (spec.tokens.bos, spec.tokens.eos, spec.tokens.pad) == (1, 2, 0)
    assert spec.dtype == "F32"
    assert json.loads((trained.folder / "config.json").read_text())["torch_dtype"] == "float32"


def test_no_rope_scaling_is_claimed_that_was_not_trained(train_few):
    config = json.loads((train_few("gqa").folder / "config.json").read_text())
    assert config["rope_scaling"]["rope_type"] == "default"


def test_the_export_is_modelopts_two_files(trained):
    assert {path.name for path in trained.folder.iterdir() if path.is_file()} == {"model.safetensors", "config.json"}


def test_the_kept_module_is_the_exported_head(trained, tiny_target):
    module = load_module(trained.folder / "modelopt", tiny_target).eagle_module
    exported = load_file(trained.folder / "model.safetensors")
    lm_head = exported.pop("lm_head.weight")
    for name, tensor in module.state_dict().items():
        wanted = lm_head if name == "lm_head.weight" else exported.pop(name)
        assert torch.equal(tensor, wanted), name
    assert not exported


def test_without_a_head_of_its_own_the_export_holds_the_targets(train_few, target):
    exported = load_file(train_few("mla").folder / "model.safetensors")
    assert torch.equal(exported["lm_head.weight"], target.lm_head.weight)


def test_a_module_of_another_recipe_is_refused(train_few, tiny_target, tmp_path):
    kept = train_few("gqa").folder / "modelopt"
    (tmp_path / "eagle_module.safetensors").write_bytes((kept / "eagle_module.safetensors").read_bytes())
    recipe = json.loads((kept / "recipe.json").read_text()) | {"intermediate": 96}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    with pytest.raises(NotACheckpoint, match="do not match the recipe"):
        load_module(tmp_path, tiny_target)


def test_a_module_whose_recipe_is_gone_is_refused(tiny_target, tmp_path):
    with pytest.raises(NotACheckpoint, match=r"recipe\.json"):
        load_module(tmp_path, tiny_target)


def test_no_decoder_is_downloaded(tiny_target, monkeypatch):
    def download(*_args, **_kwargs):
        raise AssertionError("ModelOpt asked the hub for a decoder")

    monkeypatch.setattr(modelopt_utils, "snapshot_download", download)
    model = build_module(load_target(tiny_target, torch.float32), TEST_MLA)
    assert isinstance(TEST_MLA.attention, Mla)
    assert model.eagle_module.layers[0].self_attn.kv_lora_rank == TEST_MLA.attention.kv_lora_rank


def test_nothing_is_said_on_stdout(tiny_target, capsys):
    build_module(load_target(tiny_target, torch.float32), TEST_GQA)
    assert capsys.readouterr().out == ""


def test_the_seed_decides_the_weights(tiny_target):
    def first_weights(seed: int) -> torch.Tensor:
        recipe = dataclasses.replace(TEST_GQA, seed=seed)
        return build_module(load_target(tiny_target, torch.float32), recipe).eagle_module.fc.weight

    assert torch.equal(first_weights(3), first_weights(3))
    assert not torch.equal(first_weights(3), first_weights(4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"captured": (1, 3, 7)}, "layers are 0 to 6"),
        ({"draft_vocab": 512}, "draft_vocab is 512"),
        ({"draft_vocab": 0}, "draft_vocab is 0"),
    ],
)
def test_a_recipe_that_does_not_fit_the_target_is_refused(tiny_target, changes, message):
    recipe = dataclasses.replace(TEST_GQA, **changes)
    with pytest.raises(RecipeInvalid, match=message):
        build_module(load_target(tiny_target, torch.float32), recipe)
