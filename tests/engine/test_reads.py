"""What the rules say that vLLM reads out of a config, held against vLLM's own code; no model is loaded."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest
from modelopt.torch.quantization.utils import quantizer_attr_names

from kconv.checkpoint.formats import NVFP4
from kconv.drafters.spec import Gqa, Mla, Rope, Yarn
from kconv.engines.config import write_rope
from kconv.engines.vllm import ENGINE, ENVIRONMENT

pytestmark = [pytest.mark.slow, pytest.mark.engine]

READER = Path(__file__).parent.parent / "support" / "vllm_reads.py"
CLASSES = ENGINE.architectures
MODULES = {Gqa: "vllm.model_executor.models.llama_eagle3", Mla: "vllm.model_executor.models.deepseek_eagle3"}
# Of GQA heads with norms of queries and keys.
QWEN3 = {"Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM"}
# The first two stand in vLLM's registry, and it puts Eagle3 before them; the third, speculators', does not stand there.
NOT_FOUND = ("PEagleDraftModel", "PeagleLlamaForCausalLM", "Eagle3DraftModel")
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
SCALE = f"gate_up_proj_{NVFP4.scale}"
YARNS = (Yarn(32.0, 2048), Yarn(64.0, 4096, mscale=1.0, mscale_all_dim=1.0), Yarn(512 / 48, 48))
LENGTHS = (4096, 262144)


@pytest.fixture(scope="module")
def read(engine_python: Path, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("reads")
    ropes = [write_rope(Rope(5e4, scaling))["rope_parameters"] for scaling in (None, *YARNS)]
    # vLLM's MLA asks for DeepSeek's class by this name.
    ropes += [rope | {"rope_type": "deepseek_yarn"} for rope in ropes if rope["rope_type"] == "yarn"]
    request = {
        "names": [*itertools.chain(*CLASSES.values()), *NOT_FOUND],
        "gpt_oss": [f"{EXPERTS}{end}" for end in ("_blocks", "_scales", "", f"_{NVFP4.scale}")],
        "angles": [{"rows": length, "rope": rope} for length in LENGTHS for rope in ropes],
    }
    (folder / "request.json").write_text(json.dumps(request))
    command = [engine_python, READER, folder / "request.json", folder / "answer.json"]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "answer.json").read_text())


@pytest.mark.parametrize("attention", CLASSES)
def test_vllm_builds_the_class_of_the_heads_attention(read: dict, attention: type):
    for name in CLASSES[attention]:
        module = "vllm.model_executor.models.qwen3_eagle3" if name in QWEN3 else MODULES[attention]
        assert read["classes"][name] and read["classes"][name][0] == module, name


def test_vllm_finds_no_class_of_a_name_that_the_rule_does_not_know(read: dict):
    assert {name: read["classes"][name] for name in NOT_FOUND} == dict.fromkeys(NOT_FOUND)


def test_vllms_table_of_angles_is_as_long_as_asked_and_under_yarn_as_yarn_reaches(read: dict):
    reaches = [yarn.reach for yarn in YARNS]
    assert read["rows"] == [rows for length in LENGTHS for rows in (length, *reaches, *reaches)]


def test_vllm_has_no_parameter_for_the_scales_of_gpt_oss_in_modelopts_nvfp4(read: dict):
    found = list(read["gpt_oss"].values())
    assert [name.rpartition(".")[2] for name in found] == ["w13_weight", "w13_weight_scale", "w13_weight", SCALE]
    assert quantizer_attr_names("gate_up_proj").weight_scale == SCALE
