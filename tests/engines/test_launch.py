"""Launch snippets: what they say is what the engine is to be told, in its own convention."""

import json
import shlex
from dataclasses import replace

import pytest
import yaml
from support.block_drafters import DFLASH, DSPARK
from support.commands import NAMES, ran
from support.heads import GQA, MLA

from kconv.engines.base import Deployment, needs_code
from kconv.engines.registry import launch_files


@pytest.mark.parametrize("spec", [MLA, replace(GQA, captured=(1, 29, 57))])
def test_tensorrt_llm_is_told_the_layer_outputs(spec):
    ((name, text),) = launch_files(spec, "trtllm").items()
    options = yaml.safe_load(text)["speculative_config"]
    assert name.endswith(".yaml") and name in text
    assert options["decoding_type"] == "Eagle3"
    assert options["eagle3_layers_to_capture"] == list(spec.captured)


def test_vllm_is_told_the_method_as_it_guesses_otherwise():
    ((_, text),) = launch_files(MLA, "vllm").items()
    words = shlex.split(text)
    assert words[:2] == ["vllm", "serve"]
    options = json.loads(words[words.index("--speculative-config") + 1])
    assert options["method"] == "eagle3" and options["num_speculative_tokens"] >= 1


@pytest.mark.parametrize(
    ("spec", "method", "places"), [(DFLASH, "dflash", 3), (DSPARK, "dspark", 4)], ids=["DFlash", "DSpark"]
)
def test_a_block_drafter_is_launched_by_its_own_method_and_drafts_all_that_its_block_holds(spec, method, places):
    words = shlex.split(launch_files(spec, "dflash-vllm")["serve-vllm.sh"])
    options = json.loads(words[words.index("--speculative-config") + 1])
    assert (options["method"], options["num_speculative_tokens"]) == (method, places)
    words = shlex.split(launch_files(spec, "dflash-sglang")["serve-sglang.sh"], comments=True)
    assert words[words.index("--speculative-algorithm") + 1] == method.upper()
    assert words[words.index("--speculative-num-draft-tokens") + 1] == str(places + 1)
    # Those are of a chain that is drafted step by step.
    assert not {"--speculative-num-steps", "--speculative-eagle-topk"} & set(words)


def test_tensorrt_llm_counts_drafts_once_the_two_lines_are_uncommented():
    ((_, text),) = launch_files(MLA, "trtllm").items()
    last = text.splitlines()[-2:]
    assert "return_perf_metrics" not in yaml.safe_load(text)
    on = yaml.safe_load("\n".join([*text.splitlines()[:-2], *(line.removeprefix("# ") for line in last)]))
    assert on["return_perf_metrics"] is on["enable_iter_perf_stats"] is True
    assert on["speculative_config"] == yaml.safe_load(text)["speculative_config"]


@pytest.mark.parametrize("name", NAMES)
def test_a_launch_file_names_a_head_and_a_target_of_any_name(name, tmp_path):
    served = Deployment(name, name, own_code=True)
    files = launch_files(MLA, "portable", served)
    ((vllm, serve, target, trust, option, speculative),) = ran(files["serve-vllm.sh"], tmp_path)
    assert (vllm, serve, target, trust, option) == (
        "vllm", "serve", name, "--trust-remote-code", "--speculative-config",
    )  # fmt: skip
    assert json.loads(speculative)["model"] == name
    ((*start, target, trust, option, head, algorithm, _), *_) = [
        call[:10] for call in ran(files["serve-sglang.sh"], tmp_path)
    ]
    assert start == ["python", "-m", "sglang.launch_server", "--model-path"]
    assert (target, trust, option, head, algorithm) == (
        name, "--trust-remote-code", "--speculative-draft-model-path", name, "--speculative-algorithm",
    )  # fmt: skip
    text = files["serve-trtllm.yaml"]
    assert yaml.safe_load(text)["speculative_config"]["speculative_model"] == name
    # Its command is a comment, of as many lines as the name has.
    lines = text.splitlines()[: 1 + name.count("\n")]
    shown = "\n".join(line.removeprefix("# ") for line in lines)
    assert ran(shown, tmp_path) == [
        ["trtllm-serve", name, "--backend", "pytorch", "--trust_remote_code", "--config", "serve-trtllm.yaml"]
    ]


CODE = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}


@pytest.mark.parametrize(
    ("target", "head", "name", "needs"),
    [
        (CODE, {"model_type": "llama"}, "", True),
        ({"model_type": "llama"}, {"model_type": "kimi_k2"}, "", False),
        ({"model_type": "llama"}, {"model_type": "llama"}, "moonshotai/Kimi-K2.6", False),
        (None, {"model_type": "kimi_k2"}, "", True),
        (None, {"model_type": "llama"}, "", False),
        (None, {"model_type": "llama"}, "moonshotai/Kimi-K2.6", True),
        (None, {"model_type": "llama"}, "kimi-k2/Llama-3.1-8B", False),
        (None, {"model_type": ["kimi_k2"]}, "", False),
    ],
)
def test_only_a_target_with_code_of_its_own_is_trusted(target, head, name, needs):
    assert needs_code(target, head, name) == needs
    text = launch_files(MLA, "portable", Deployment(own_code=needs))
    assert ["--trust-remote-code" in text[name] for name in ("serve-vllm.sh", "serve-sglang.sh")] == [needs] * 2
    assert ("--trust_remote_code" in text["serve-trtllm.yaml"]) == needs
