"""A weight that stands twice, under two names: both must be the same bytes, and one of them is enough."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import GQA, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import verify
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import BY_NAME
from kconv.errors import TensorMissing, TensorTwins

SPEC = replace(GQA, layers=3, captured=(1, 3, 5))
INPUT, HIDDEN = "layers.{}.input_layernorm.weight", "layers.{}.hidden_norm.weight"


def portable(folder, edit=lambda tensors: tensors):
    write_head(folder, BY_NAME["portable"], SPEC, random_slots(SPEC))
    file = folder / "model.safetensors"
    tensors = edit(load_file(file))
    save_file(tensors, file)
    return open_checkpoint(folder)


def test_a_portable_folder_holds_the_later_norms_under_both_names(tmp_path):
    tensors = load_file(portable(tmp_path / "head").files[0])
    for i in (1, 2):
        assert torch.equal(tensors[INPUT.format(i)], tensors[HIDDEN.format(i)])
    assert not torch.equal(tensors[INPUT.format(0)], tensors[HIDDEN.format(0)]), "of layer 0 these are two norms"


@pytest.mark.parametrize("name, kept", [("vllm", INPUT), ("trtllm", HIDDEN), ("sglang", HIDDEN)])
def test_each_engines_layout_takes_its_own_and_says_what_became_of_the_other(tmp_path, name, kept):
    source = portable(tmp_path / "head")
    manifest = execute(plan(read_head(source), BY_NAME[name]), tmp_path / "out")
    verify(tmp_path / "out", source)
    held = open_checkpoint(tmp_path / "out").tensors.keys()
    other = HIDDEN if kept == INPUT else INPUT
    assert kept.format(1) in held and other.format(1) not in held
    # Of twins either may be read; the one that is not is accounted for.
    sources = {s.name for step in manifest.tensors for s in step.sources}
    assert sources | {record.name for record in manifest.dropped} == source.tensors.keys()
    assert all("repeats" in record.reason for record in manifest.dropped) and len(manifest.dropped) == 2


@pytest.mark.parametrize("written", ["portable", "vllm", "trtllm", "sglang"])
def test_twins_that_differ_are_refused(tmp_path, written):
    def edit(tensors):
        twin = tensors[HIDDEN.format(2)].clone()
        twin[7] = twin[7] * 2 + 1
        return tensors | {HIDDEN.format(2): twin}

    checkpoint = portable(tmp_path / "head", edit)
    config = BY_NAME[written].write_config(SPEC)
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    with pytest.raises(TensorTwins) as caught:
        read_head(open_checkpoint(tmp_path / "head"))
    assert "layers.2" in caught.value.where and checkpoint.tensors and caught.value.fix


def test_a_twin_with_another_sign_of_nought_differs(tmp_path):
    def edit(tensors):
        zero = torch.zeros(48, dtype=torch.bfloat16)
        return tensors | {INPUT.format(1): zero, HIDDEN.format(1): -zero}

    with pytest.raises(TensorTwins):
        read_head(portable(tmp_path / "head", edit))


@pytest.mark.parametrize("missing", [INPUT, HIDDEN])
def test_a_portable_folder_lacks_neither(tmp_path, missing):
    def edit(tensors):
        return {name: tensor for name, tensor in tensors.items() if name != missing.format(1)}

    with pytest.raises(TensorMissing, match=r"layers\.1"):
        read_head(portable(tmp_path / "head", edit))


@pytest.mark.parametrize("name, other", [("vllm", HIDDEN), ("trtllm", INPUT)])
def test_an_engine_does_not_make_do_with_the_others_name(tmp_path, name, other):
    """vLLM leaves input_layernorm at ones where only hidden_norm is there; TensorRT-LLM the other way round."""
    own = INPUT if other == HIDDEN else HIDDEN
    write_head(tmp_path / "head", BY_NAME[name], SPEC, random_slots(SPEC))
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    tensors[other.format(1)] = tensors.pop(own.format(1))
    save_file(tensors, file)
    with pytest.raises(TensorMissing, match=r"layers\.1"):
        read_head(open_checkpoint(tmp_path / "head"), layout=BY_NAME[name])


def test_a_part_beside_the_fused_whole_must_agree_with_it(tmp_path):
    write_head(tmp_path / "head", BY_NAME["vllm"], SPEC, random_slots(SPEC))
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    fused = torch.cat([tensors[f"layers.0.self_attn.{p}_proj.weight"] for p in "qkv"])
    del tensors["layers.0.self_attn.k_proj.weight"], tensors["layers.0.self_attn.v_proj.weight"]
    save_file(tensors | {"layers.0.self_attn.qkv_proj.weight": fused}, file)
    assert read_head(open_checkpoint(tmp_path / "head")).spec == SPEC
    save_file(tensors | {"layers.0.self_attn.qkv_proj.weight": fused + 1}, file)
    with pytest.raises(TensorTwins, match="q_proj"):
        read_head(open_checkpoint(tmp_path / "head"))
