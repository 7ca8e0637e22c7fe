"""Heads with norms of queries and keys, as speculators' `--draft-arch qwen3` and vLLM's `qwen3_eagle3` have them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.heads import QK, random_slots, read_bytes, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import verify
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.drafters.spec import Norms
from kconv.engines import BY_NAME
from kconv.errors import LayoutCannot, TensorMissing, TensorUnknown

FIVE = replace(QK, captured=(1, 9, 17, 25, 33), norms=Norms(before_fc=True, before_residual=True, qk=True))
Q, K = "layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight"


def write(folder, spec=FIVE, **changes):
    config = BY_NAME["vllm"].write_config(spec) | changes
    return write_head(folder, BY_NAME["vllm"], spec, random_slots(spec), config)


@pytest.mark.parametrize(
    "names",
    [
        {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"},
        {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3"},
        {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "qwen3"},
    ],
    ids=["vLLM's class", "DeepSpec's class", "by its model_type alone"],
)
def test_it_is_read_and_written_for_vllm(tmp_path, names):
    head = read_head(open_checkpoint(write(tmp_path / "head", **names)))
    assert head.spec == FIVE
    manifest = execute(plan(head, BY_NAME["vllm"]), tmp_path / "out")
    verify(tmp_path / "out", head.checkpoint)
    assert manifest.exact and read_bytes(tmp_path / "out") == read_bytes(tmp_path / "head")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/registry.py#L665
    assert config["architectures"] == ["Eagle3Qwen3ForCausalLM"] and config["num_aux_hidden_states"] == 5


@pytest.mark.parametrize("name", ["sglang", "trtllm", "portable"])
def test_engines_that_skip_the_norms_are_refused(tmp_path, name):
    head = read_head(open_checkpoint(write(tmp_path / "head", replace(QK, captured=(1, 3, 5)))))
    with pytest.raises(LayoutCannot, match="query and key norms") as caught:
        plan(head, BY_NAME[name])
    assert "vLLM" in caught.value.fix


def test_a_target_of_qwen3_alone_asks_for_no_norms(tmp_path):
    plain = replace(QK, norms=Norms())
    folder = write(tmp_path / "head", plain, model_type="qwen3")
    assert read_head(open_checkpoint(folder)).spec == plain


def test_one_of_the_norms_missing_is_an_error(tmp_path):
    slots = random_slots(FIVE)
    del slots["0.k_norm"]
    folder = write_head(tmp_path / "head", BY_NAME["vllm"], FIVE, slots)
    with pytest.raises(TensorMissing, match=K):
        read_head(open_checkpoint(folder))


def test_nobody_is_told_to_remove_a_norm(tmp_path):
    folder = write(tmp_path / "head", model_type="llama", architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(TensorUnknown, match="has no") as caught:
        read_head(open_checkpoint(folder))
    assert "remove" not in caught.value.fix.lower() and "Eagle3Qwen3ForCausalLM" in caught.value.fix
