"""Launch snippets: what they say is what the engine is to be told, in its own convention."""

import json
import shlex
from dataclasses import replace

import pytest
import yaml
from support.heads import GQA, MLA

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


def test_tensorrt_llm_counts_drafts_once_the_two_lines_are_uncommented():
    ((_, text),) = launch_files(MLA, "trtllm").items()
    last = text.splitlines()[-2:]
    assert "return_perf_metrics" not in yaml.safe_load(text)
    on = yaml.safe_load("\n".join([*text.splitlines()[:-2], *(line.removeprefix("# ") for line in last)]))
    assert on["return_perf_metrics"] is on["enable_iter_perf_stats"] is True
    assert on["speculative_config"] == yaml.safe_load(text)["speculative_config"]
