"""Where each engine looks for what a config says, by its own rules: all of them find the same head in one folder."""

import json
import shlex
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from support.heads import GQA, MLA, PORTABLE, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.read import read_head
from kconv.drafters.spec import Norms
from kconv.engines import BY_NAME
from kconv.engines.registry import launch_files

KEY = "eagle_aux_hidden_state_layer_ids"
CAPTURED = st.sets(st.integers(1, 60), min_size=2, max_size=5).map(lambda ids: tuple(sorted(ids)))


def vllm_v1(config):
    """Return the 0-based layers whose inputs vLLM's V1 runner captures."""
    return config.get(KEY) or config.get("eagle_config", {}).get(KEY)


def vllm_v2(config):
    """Return the same of the V2 runner, which looks for another key in eagle_config."""
    return config.get(KEY) or config.get("eagle_config", {}).get("layer_ids")


def sglang(config):
    """Return the 0-based layers whose inputs SGLang captures of a DeepSeek or Kimi target."""
    ids = config["eagle_config"][KEY]
    return [i + 1 for i in ids] if ids[0] == 1 else ids


def trtllm(spec, layout):
    """Return the 0-based layers whose outputs TensorRT-LLM captures."""
    return yaml.safe_load(launch_files(spec, layout)["serve-trtllm.yaml"])["speculative_config"][
        "eagle3_layers_to_capture"
    ]


@given(CAPTURED, st.sampled_from([MLA, GQA]))
def test_every_engine_captures_the_same_states_from_a_portable_folder(captured, kind):
    spec = replace(kind, captured=captured)
    config = json.loads(json.dumps(BY_NAME["portable"].write_config(spec)))
    inputs = [i + 1 for i in captured]
    assert vllm_v1(config) == vllm_v2(config) == sglang(config) == inputs
    assert trtllm(spec, "portable") == list(captured)
    assert config["num_aux_hidden_states"] == len(captured) == len(config["eagle_config"][KEY])


@given(CAPTURED)
def test_sglangs_own_layout_captures_them_too(captured):
    config = BY_NAME["sglang"].write_config(replace(MLA, captured=captured))
    assert sglang(config) == [i + 1 for i in captured]
    assert KEY not in config


@given(CAPTURED)
def test_what_eagle_config_states_of_its_list_is_true(captured):
    assume(captured[0] > 0)
    for name in ("portable", "sglang", "trtllm"):
        nested = BY_NAME[name].write_config(replace(MLA, captured=captured))["eagle_config"]
        shift = {"layer_outputs": 0, "layer_inputs": 1}[nested["aux_hidden_state_layer_ids_are"]]
        assert tuple(i - shift for i in nested[KEY]) == captured


SPECS = {
    name: spec for name, spec in PORTABLE.items() if not any(x.applies(spec, ()) for x in BY_NAME["portable"].limits)
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_portable_config_says_what_each_engine_asks_for(spec):
    config = BY_NAME["portable"].write_config(spec)
    assert config["draft_vocab_size"] == spec.draft_vocab, "SGLang's Llama head fails without the key"
    assert config["tie_word_embeddings"] is False and config["norm_before_residual"] is False
    assert (config["model_type"], config["architectures"]) == {
        "mla": ("kimi_k2", ["Eagle3DeepseekV2ForCausalLM"]),
    }.get(spec.kind, ("llama", ["LlamaForCausalLMEagle3"]))
    assert bool(config.get("kv_lora_rank")) == (spec.kind == "mla"), "by which TensorRT-LLM takes a head for MLA"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == spec.rope.theta


def test_there_are_portable_heads_of_every_kind():
    assert {spec.kind for spec in SPECS.values()} == {"mla", "mha", "gqa"}
    assert any(spec.norms == Norms(fc=True, output=True) for spec in SPECS.values())


@pytest.mark.parametrize("name", ["vllm", "trtllm", "sglang", "modelopt"])
def test_a_portable_folder_reads_as_any_engines(tmp_path, name):
    """Whoever takes it for an engine's own, by --from, reads the same head."""
    spec = replace(GQA, layers=2, captured=(7, 23, 51))
    folder = write_head(tmp_path / "head", BY_NAME["portable"], spec, random_slots(spec))
    assert read_head(open_checkpoint(folder), layout=BY_NAME[name]).spec == spec


def test_a_portable_folder_shows_how_each_engine_serves_it():
    files = launch_files(MLA, "portable")
    assert files.keys() == {"serve-trtllm.yaml", "serve-vllm.sh", "serve-sglang.sh"}
    for name, alone in (("trtllm", "serve-trtllm.yaml"), ("vllm", "serve-vllm.sh"), ("sglang", "serve-sglang.sh")):
        assert launch_files(MLA, name) == {alone: files[alone]}


def test_sglang_is_told_a_chain():
    words = shlex.split(launch_files(MLA, "sglang")["serve-sglang.sh"].splitlines()[-1])
    options = dict(pairwise(words))
    assert options["--speculative-algorithm"] == "EAGLE3", "as EAGLE, SGLang skips fc"
    assert options["--speculative-eagle-topk"] == "1"
    assert int(options["--speculative-num-draft-tokens"]) == int(options["--speculative-num-steps"]) + 1
    assert "--speculative-draft-model-path" in options and "--model-path" in options


def test_a_gqa_head_beside_a_latent_target_needs_a_backend_of_its_own():
    assert "--speculative-draft-attention-backend" in launch_files(GQA, "sglang")["serve-sglang.sh"]
    assert "--speculative-draft-attention-backend" not in launch_files(MLA, "sglang")["serve-sglang.sh"]


def test_the_note_on_an_mla_head_leaves_tensorrt_llms_yaml_as_it_is():
    text = launch_files(MLA, "trtllm")["serve-trtllm.yaml"]
    assert "eagle3_one_model" in text and "eagle3_one_model" not in yaml.safe_load(text)["speculative_config"]
