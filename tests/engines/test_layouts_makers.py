"""Heads under the very names and keys of their makers: which layout tells, and what the head is read as."""

from dataclasses import replace

import pytest
import torch
from support.heads import MODELOPT_KIMIK2, MODELOPT_LLAMA, TORCHSPEC_MHA, TORCHSPEC_MLA, cut
from support.published import (
    EMBED,
    GQA,
    GQA_PARTS,
    LLAMA,
    LM_HEAD,
    MHA,
    MHA_PARTS,
    MLA,
    MLA_PARTS,
    NVIDIA,
    OUTSIDE,
    SPEC_FORGE,
    TORCHSPEC,
    fill,
    layer,
    maps,
    without,
    write,
)  # fmt: skip

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints
from kconv.convert.execute import execute
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import read_head
from kconv.drafters.spec import Gqa, Norms
from kconv.engines import BY_NAME
from kconv.errors import (
    CapturedUndecided,
    ConfigUnsupported,
    LayoutCannot,
    TensorMissing,
    TensorUnknown,
    UnknownLayout,
)


def test_lightseeks_mla_head_of_17_tensors(tmp_path):
    assert len(TORCHSPEC) == 17
    checkpoint = write(tmp_path / "head", cut(TORCHSPEC_MLA, MLA), fill(TORCHSPEC))
    head = read_head(checkpoint, hints=Hints(max_positions=MLA.max_positions))
    assert head.layout.name == "torchspec"
    assert replace(head.spec, tokens=MLA.tokens) == MLA
    assert head.places["0.kv_b_proj"][1].name == "midlayer.self_attn.kv_b_proj.weight"


def test_the_published_list_of_that_head_is_refused_until_told(tmp_path):
    config = cut(TORCHSPEC_MLA, replace(MLA, captured=(2, 30, 58)))
    checkpoint = write(tmp_path / "head", config, fill(TORCHSPEC))
    with pytest.raises(CapturedUndecided):
        read_head(checkpoint)
    assert read_head(checkpoint, hints=Hints(captured_are="inputs")).spec.captured == (1, 29, 57)


def test_nvidias_mla_head_of_16_tensors_in_bf16(tmp_path):
    assert len(NVIDIA) == 16
    head = read_head(write(tmp_path / "head", cut(MODELOPT_KIMIK2, MLA), fill(NVIDIA)))
    assert head.layout.name == "modelopt"
    assert replace(head.spec, tokens=MLA.tokens) == MLA
    assert "embed_tokens" not in head.places


def test_its_older_revision_in_fp32_without_lm_head(tmp_path):
    shapes = without(NVIDIA, "lm_head.weight")
    head = read_head(write(tmp_path / "head", cut(MODELOPT_KIMIK2, MLA), fill(shapes, torch.float32)))
    assert len(shapes) == 15 and head.spec.dtype == "F32"
    rounded = WriteOptions(dtype="BF16")
    assert plan(head, BY_NAME["vllm"]).steps and plan(head, BY_NAME["trtllm"], rounded).steps
    for name in ("sglang", "portable"):
        with pytest.raises(LayoutCannot, match="lm_head") as caught:
            plan(head, BY_NAME[name], rounded)
        assert "--target" in caught.value.fix


def test_modelopts_mla_head_with_a_vocabulary_that_its_config_forgets(tmp_path):
    shapes = NVIDIA | {"lm_head.weight": (40, 48)}
    tensors = fill(shapes) | {"d2t": maps()["d2t"]}
    head = read_head(write(tmp_path / "head", cut(MODELOPT_KIMIK2, MLA), tensors))
    assert head.spec.draft_vocab == 40
    with pytest.raises(LayoutCannot, match="reduced vocabulary"):
        plan(head, BY_NAME["trtllm"])
    with pytest.raises(TensorMissing, match="lm_head"):
        read_head(write(tmp_path / "bare", cut(MODELOPT_KIMIK2, MLA), without(tensors, "lm_head.weight")))


def test_modelopts_llama_head(tmp_path):
    config = cut(MODELOPT_LLAMA, GQA)
    head = read_head(write(tmp_path / "head", config, fill(layer("layers.0", GQA_PARTS) | OUTSIDE | LM_HEAD)))
    assert (head.layout.name, head.spec.attention) == ("modelopt", Gqa(4, 2, 16))


def test_torchspecs_mha_head_says_neither_layers_nor_vocabulary(tmp_path):
    shapes = layer("midlayer", MHA_PARTS) | OUTSIDE | LM_HEAD
    checkpoint = write(tmp_path / "head", cut(TORCHSPEC_MHA, MHA), fill(shapes))
    with pytest.raises(CapturedUndecided):
        read_head(checkpoint)
    head = read_head(checkpoint, hints=Hints(target_layers=61))
    assert (head.layout.name, head.spec.draft_vocab, head.spec.captured) == ("torchspec", 64, (1, 29, 57))


def test_torchspecs_config_for_vllm_has_shifted_a_list_of_its_own(tmp_path):
    """Its exporter renames the layer, and adds 1 to a kimi_k2 head's list: no mark is left to tell."""
    config = cut(TORCHSPEC_MLA, replace(MLA, captured=(7, 23, 51)))
    renamed = layer("layers.0", MLA_PARTS) | OUTSIDE | LM_HEAD | EMBED
    with pytest.raises(CapturedUndecided):
        read_head(write(tmp_path / "vllm", config, fill(renamed)))
    own = read_head(write(tmp_path / "own", config, fill(TORCHSPEC)))
    assert own.spec.captured == (7, 23, 51) and "own tensor names" in own.read.captured.how


def test_torchspecs_exporter_leaves_a_mark_that_is_read_with_the_head(tmp_path):
    listed = {"eagle_aux_hidden_state_layer_ids": [7, 23, 51], "_torchspec_version": "0.1.0"}
    renamed = fill(layer("layers.0", MHA_PARTS) | OUTSIDE | LM_HEAD)
    checkpoint = write(tmp_path / "head", cut(TORCHSPEC_MHA, MHA) | listed, renamed)
    with pytest.raises(CapturedUndecided, match="from TorchSpec"):
        read_head(checkpoint)
    assert read_head(checkpoint, hints=Hints(captured_are="outputs")).spec.captured == (7, 23, 51)


def test_a_top_level_list_beside_the_trainers_names_may_be_the_trainers(tmp_path):
    config = without(cut(TORCHSPEC_MLA, MLA), "eagle_config") | {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}
    checkpoint = write(tmp_path / "head", config, fill(TORCHSPEC))
    with pytest.raises(CapturedUndecided, match="default as layer outputs"):
        read_head(checkpoint)
    assert read_head(checkpoint, hints=Hints(captured_are="outputs")).spec.captured == (1, 29, 57)


def test_eagle_3_1(tmp_path):
    config = without(cut(TORCHSPEC_MLA, MLA), "eagle_config") | {
        "eagle_aux_hidden_state_layer_ids": [2, 30, 58], "num_aux_hidden_states": 3, "target_hidden_size": 48,
        "fc_norm": True, "norm_output": True,
    }  # fmt: skip
    shapes = layer("layers.0", MLA_PARTS) | OUTSIDE | LM_HEAD | {f"fc_norm.{i}.weight": (48,) for i in range(3)}
    head = read_head(write(tmp_path / "head", config, fill(shapes)))
    assert head.layout.name == "vllm"
    assert (head.spec.norms, head.spec.captured) == (Norms(fc=True, output=True), (1, 29, 57))


def test_sglangs_older_names_of_eagle_3_1(tmp_path):
    config = cut(TORCHSPEC_MLA, MLA) | {"use_aux_norm": True, "norm_output": True}
    norms = {f"aux_norm_{level}.weight": (48,) for level in ("low", "mid", "high")}
    tensors = fill(TORCHSPEC | norms)
    head = read_head(write(tmp_path / "head", config, tensors))
    assert head.layout.name == "sglang" and head.spec.norms == Norms(fc=True, output=True)
    assert [head.places[f"fc_norm.{i}"][1].name for i in range(3)] == list(norms)
    names = {step.name: step.sources[0].info.name for step in plan(head, BY_NAME["sglang"]).steps}
    assert names["fc_norm.1.weight"] == "aux_norm_mid.weight"
    assert "use_aux_norm" not in plan(head, BY_NAME["sglang"]).config


def test_specforges_norm_output_is_not_the_engines(tmp_path):
    """SpecForge calls the final norm before lm_head so, which every Eagle3 head has."""
    config = LLAMA | {"draft_vocab_size": 40, "norm_output": True}
    checkpoint = write(tmp_path / "head", config, fill(SPEC_FORGE) | maps())
    head = read_head(checkpoint, hints=Hints(target_layers=61))
    assert head.layout.name == "specforge"
    assert head.spec.norms == Norms() and "norm_output" in head.read.dropped
    assert plan(head, BY_NAME["vllm"]).config["norm_output"] is False
    told = read_head(checkpoint, layout=BY_NAME["sglang"], hints=Hints(target_layers=61))
    assert told.spec.norms == Norms(output=True), "who names the engine's layout means the engine's key"


def test_specforges_head_without_a_final_norm_is_refused(tmp_path):
    config = LLAMA | {"draft_vocab_size": 40, "norm_output": False}
    with pytest.raises(ConfigUnsupported, match="norm_output"):
        read_head(write(tmp_path / "head", config, fill(SPEC_FORGE) | maps()), hints=Hints(target_layers=61))


def test_the_key_without_specforges_marks_is_no_layouts(tmp_path):
    shapes = layer("midlayer", GQA_PARTS) | OUTSIDE | LM_HEAD
    with pytest.raises(UnknownLayout) as caught:
        read_head(write(tmp_path / "head", LLAMA | {"norm_output": True}, fill(shapes)))
    assert "specforge" in caught.value.fix and "sglang" in caught.value.fix


def test_specforges_maps_of_a_full_vocabulary_are_left_behind(tmp_path):
    config = LLAMA | {"draft_vocab_size": 64}
    tensors = fill(SPEC_FORGE | LM_HEAD) | maps(kept=64)
    head = read_head(write(tmp_path / "head", config, tensors), hints=Hints(target_layers=61))
    manifest = execute(plan(head, BY_NAME["vllm"]), tmp_path / "out")
    assert {record.name for record in manifest.dropped} == {"d2t", "t2d"} and manifest.exact
    assert not {"d2t", "t2d"} & open_checkpoint(tmp_path / "out").tensors.keys()
    tensors["t2d"][3] = False
    with pytest.raises(TensorUnknown, match="t2d"):
        read_head(write(tmp_path / "other", config, tensors), hints=Hints(target_layers=61))


def test_safeailabs_head(tmp_path):
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 40}
    checkpoint = write(tmp_path / "head", config, fill(SPEC_FORGE) | maps())
    head = read_head(checkpoint, hints=Hints(captured=(1, 29, 57)))
    assert head.layout.name == "safeailab"
    assert head.spec == replace(GQA, draft_vocab=40, max_positions=1024, tokens=head.spec.tokens)


def test_safeailabs_trainer_turns_by_10000_and_its_config_does_not_say_so(tmp_path):
    config = without(LLAMA, "rope_theta") | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 40}
    tensors, hints = fill(SPEC_FORGE) | maps(), Hints(captured=(1, 29, 57))
    head = read_head(write(tmp_path / "head", config, tensors), hints=hints)
    assert head.layout.name == "safeailab" and plan(head, BY_NAME["vllm"]).config["rope_theta"] == 10000.0
    stated = config | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    head = read_head(write(tmp_path / "stated", stated, tensors), hints=hints)
    assert plan(head, BY_NAME["vllm"]).config["rope_theta"] == 5e5


def test_inverse_frequencies_are_dropped_with_a_reason(tmp_path):
    tensors = fill(TORCHSPEC) | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    head = read_head(write(tmp_path / "head", cut(TORCHSPEC_MLA, MLA), tensors))
    manifest = execute(plan(head, BY_NAME["portable"]), tmp_path / "out")
    reasons = {record.name: record.reason for record in manifest.dropped}
    assert "RoPE" in reasons["midlayer.self_attn.rotary_emb.inv_freq"] and manifest.exact
