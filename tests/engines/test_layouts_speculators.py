"""The speculators library's heads: a nested config, and silence that readers take in two ways."""

from dataclasses import replace

import pytest
from support.heads import MODELOPT_LLAMA, cut, random_slots, read_bytes, write_head
from support.published import EMBED, GQA, GQA_PARTS, LLAMA, LM_HEAD, OUTSIDE, fill, layer, maps, without, write

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints
from kconv.convert.execute import execute
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import read_head
from kconv.convert.shared import SharedTensors
from kconv.drafters.spec import Norms
from kconv.engines import BY_NAME
from kconv.errors import ConfigInvalid, LayoutCannot, TensorUnknown

SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 40,
    "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
    "norm_before_fc": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["KimiK25ForConditionalGeneration"], "name_or_path": "org/target"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformer_layer_config": without(LLAMA, "tie_word_embeddings", "draft_vocab_size", "architectures"),
    "transformers_version": "4.57.1",
}
SPECULATORS_SHAPES = layer("layers.0", GQA_PARTS) | OUTSIDE | EMBED | {"lm_head.weight": (40, 48)}


def test_speculators_nested_config(tmp_path):
    head = read_head(write(tmp_path / "head", SPECULATORS, fill(SPECULATORS_SHAPES) | maps()))
    assert head.layout.name == "speculators"
    expected = replace(GQA, draft_vocab=40, max_positions=1024, norms=Norms(before_residual=True))
    assert replace(head.spec, tokens=GQA.tokens) == expected
    config = plan(head, BY_NAME["vllm"]).config
    assert config["norm_before_residual"] is True and config["vocab_size"] == 64
    assert not {"transformer_layer_config", "speculators_model_type", "speculators_config"} & config.keys()
    assert {"speculators_config", "speculators_model_type", "auto_map"} <= set(head.read.dropped)
    with pytest.raises(LayoutCannot, match="residual"):
        plan(head, BY_NAME["portable"])


def test_speculators_silence_about_the_residual_is_refused_until_told(tmp_path):
    checkpoint = write(
        tmp_path / "head", without(SPECULATORS, "norm_before_residual"), fill(SPECULATORS_SHAPES) | maps()
    )
    with pytest.raises(ConfigInvalid, match="norm_before_residual") as caught:
        read_head(checkpoint)
    assert "--norm-before-residual" in caught.value.fix
    for told in (True, False):
        assert read_head(checkpoint, hints=Hints(norm_before_residual=told)).spec.norms.before_residual is told


@pytest.mark.parametrize("silence", [{}, {"norm_before_residual": None}], ids=["absent", "null"])
def test_where_readers_agree_on_silence_the_residual_is_not_told_otherwise(tmp_path, silence):
    shapes = layer("layers.0", GQA_PARTS) | OUTSIDE | LM_HEAD
    checkpoint = write(tmp_path / "head", cut(MODELOPT_LLAMA, GQA) | silence, fill(shapes))
    with pytest.raises(ConfigInvalid, match="norm_before_residual is not in the config") as caught:
        read_head(checkpoint, hints=Hints(norm_before_residual=True))
    assert "add it there" in caught.value.fix
    assert not read_head(checkpoint, hints=Hints(norm_before_residual=False)).spec.norms.before_residual


FAULTS = {
    "told against the config": (SPECULATORS, Hints(norm_before_residual=False), ConfigInvalid),
    "a nested config that is none": (SPECULATORS | {"transformer_layer_config": [1]}, Hints(), ConfigInvalid),
    "two depths": (SPECULATORS | {"num_hidden_layers": 2}, Hints(), ConfigInvalid),
}


@pytest.mark.parametrize("config, hints, fault", FAULTS.values(), ids=FAULTS)
def test_speculators_contradictions(tmp_path, config, hints, fault):
    with pytest.raises(fault) as caught:
        read_head(write(tmp_path / "head", config, fill(SPECULATORS_SHAPES) | maps()), hints=hints)
    assert caught.value.where and caught.value.fix


def test_qwens_norms_of_queries_and_keys_are_read_of_a_qwen3_config_alone(tmp_path):
    """vLLM's reader chooses the class that has them by the inner model_type."""
    norms = {f"layers.0.self_attn.{part}_norm.weight": (16,) for part in "qk"}
    inner = SPECULATORS["transformer_layer_config"] | {"model_type": "qwen3"}
    tensors = fill(SPECULATORS_SHAPES | norms) | maps()
    head = read_head(write(tmp_path / "head", SPECULATORS | {"transformer_layer_config": inner}, tensors))
    assert head.spec.norms.qk and plan(head, BY_NAME["vllm"]).config["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    with pytest.raises(TensorUnknown, match="_norm"):
        read_head(write(tmp_path / "llama", SPECULATORS, tensors))


# The fields of `Eagle3SpeculatorConfig` of speculators 0.9, and of what it is made of:
# https://github.com/vllm-project/speculators/blob/v0.9.0/src/speculators/models/eagle3/config.py
# https://github.com/vllm-project/speculators/blob/v0.9.0/src/speculators/config.py
FIELDS = {
    "architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "embed_requires_grad", "fc_norm",
    "norm_before_fc", "norm_before_residual", "norm_output", "speculators_config", "speculators_model_type",
    "speculators_version", "target_hidden_size", "transformer_layer_config",
}  # fmt: skip
GREEDY = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_it_is_written_as_speculators_0_9_has_it_and_read_back(tmp_path, kind):
    norms = Norms(before_fc=True, output=True, before_residual=True, qk=kind == "qwen3")
    spec = replace(GQA, captured=(1, 7, 23), draft_vocab=40, norms=norms, target_hidden=GQA.hidden)
    source = write_head(tmp_path / "head", BY_NAME["vllm"], spec, random_slots(spec))
    target = SharedTensors("org/target", {}, layers=32, model_type=kind, architecture="SomeForCausalLM")
    execute(plan(read_head(open_checkpoint(source)), BY_NAME["speculators"], WriteOptions(target)), tmp_path / "out")
    written = open_checkpoint(tmp_path / "out")
    config = dict(written.config)
    assert config.keys() >= FIELDS and config.keys() - FIELDS <= {"aux_hidden_state_layer_ids_are", "torch_dtype"}
    # The library takes its layers' class by this key, and counts layer inputs.
    assert config["transformer_layer_config"]["model_type"] == kind
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 8, 24]
    stated = config["speculators_config"]
    assert stated["verifier"] == {"architectures": ["SomeForCausalLM"], "name_or_path": "org/target"}
    assert stated["proposal_methods"] == [GREEDY] and stated["algorithm"] == "eagle3"
    with pytest.raises(LayoutCannot, match="a head's config names"):
        plan(read_head(open_checkpoint(source)), BY_NAME["speculators"])
    again = read_head(written)
    assert again.layout.name == "speculators" and again.spec == spec


def test_a_p_eagle_head_is_written_as_its_own_class_and_comes_back_byte_for_byte(tmp_path):
    spec = replace(GQA, captured=(1, 7, 23), mask=5, layers=2)
    source = write_head(tmp_path / "head", BY_NAME["vllm"], spec, random_slots(spec))
    target = SharedTensors("org/target", {}, layers=32, model_type="llama", architecture="SomeForCausalLM")
    execute(plan(read_head(open_checkpoint(source)), BY_NAME["speculators"], WriteOptions(target)), tmp_path / "there")
    config = open_checkpoint(tmp_path / "there").config
    # https://github.com/vllm-project/speculators/blob/v0.9.0/src/speculators/models/peagle/config.py
    assert (config["speculators_model_type"], config["architectures"]) == ("peagle", ["PEagleSpeculator"])
    assert (config["mask_token_id"], config["speculators_config"]["algorithm"]) == (5, "peagle")
    assert "mask_token_id" not in config["transformer_layer_config"]
    there = read_head(open_checkpoint(tmp_path / "there"))
    assert there.layout.name == "speculators" and there.spec == spec
    execute(plan(there, BY_NAME["vllm"]), tmp_path / "back")
    assert read_bytes(tmp_path / "back") == read_bytes(source)
