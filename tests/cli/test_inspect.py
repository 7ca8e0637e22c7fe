"""`inspect` and `verify`: what a head is, and whether an output is still what was written."""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from support.heads import MLA, random_slots, read_bytes, write_head
from support.published import OTHERS

from kconv.cli import main
from kconv.engines import BY_NAME

VLLM = BY_NAME["vllm"]


def kconv(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def head(tmp_path):
    return write_head(tmp_path / "head", VLLM, MLA, random_slots(MLA))


def test_inspect_says_what_a_head_is(head):
    shown = kconv("inspect", head)
    assert (shown.exit_code, shown.stderr) == (0, "")
    for phrase in ("vllm", "MLA", "kv_lora_rank=32", "theta 50000", "[1, 3, 5]", "layers.0.self_attn.kv_b_proj.weight"):
        assert phrase in shown.stdout


def test_inspect_as_json_is_one_object(head):
    shown = kconv("inspect", head, "--json")
    found = json.loads(shown.stdout)
    assert shown.stderr == ""
    assert found["spec"]["captured"] == [1, 3, 5] and found["spec"]["kind"] == "mla" and found["layout"] == "vllm"
    tensors = read_bytes(head)
    assert {t["name"]: (tuple(t["shape"]), t["bytes"]) for t in found["tensors"]} == {
        name: (shape, len(content)) for name, (_, shape, content) in tensors.items()
    }
    assert found["parameters"] == sum(len(content) // 2 for _, _, content in tensors.values())


def test_inspect_names_the_source(head):
    assert f"source      {head}" in kconv("inspect", head).stdout


def test_a_target_in_a_heads_place_is_told_where_it_goes(tmp_path):
    target = OTHERS["a whole Qwen3"].write(tmp_path / "target")
    shown = kconv("inspect", target)
    assert (shown.exit_code, shown.stderr) == (0, "") and "a whole model" in shown.stdout and "--target" in shown.stdout
    refused = kconv("to-vllm", target, tmp_path / "out")
    assert refused.exit_code == 1 and "a whole model" in refused.stderr and not (tmp_path / "out").exists()


def test_a_targets_tensors_are_counted_by_kind_and_all_named_as_json(tmp_path):
    target = OTHERS["a whole Qwen3"].write(tmp_path / "target")
    experts = {
        f"model.layers.{i}.mlp.experts.{j}.up_proj.weight": torch.zeros(2, 3) for i in range(4) for j in range(64)
    }
    held = {"model.norm.weight": torch.zeros(4, dtype=torch.bfloat16)} | experts
    save_file(held, target / "model.safetensors")
    rows = [line.split() for line in kconv("inspect", target).stdout.splitlines()]
    assert ["model.layers.*.mlp.experts.*.up_proj.weight", "256", "F32", "2", "x", "3", "6,144"] in rows
    assert ["model.norm.weight", "1", "BF16", "4", "8"] in rows
    named = [one["name"] for one in json.loads(kconv("inspect", target, "--json").stdout)["tensors"]]
    assert sorted(named) == sorted(held)


def test_verify_finds_a_changed_output(head, tmp_path):
    kconv("to-trtllm", head, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    found = kconv("verify", tmp_path / "out")
    assert (found.exit_code, found.stdout) == (1, "") and "model.safetensors" in found.stderr


def test_verify_against_another_source_says_which_one_it_wants(head, tmp_path):
    other = write_head(tmp_path / "other", VLLM, MLA, random_slots(MLA, seed=1))
    assert kconv("to-trtllm", head, tmp_path / "out").exit_code == 0
    found = kconv("verify", tmp_path / "out", other)
    assert found.exit_code == 1 and f"Pass {head} as it was" in found.stderr
