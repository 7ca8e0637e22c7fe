"""config.json to spec and back: the configs of makers, and what other readers see in the ones that are written."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from support.heads import (
    GQA,
    KIMI_MHA,
    KIMI_MLA,
    MLA,
    MODELOPT_KIMIK2,
    MODELOPT_LLAMA,
    PORTABLE,
    TORCHSPEC_MHA,
    TORCHSPEC_MLA,
    read,
)
from support.strategies import portable_specs
from transformers import DeepseekV3Config, LlamaConfig

from kconv.checkpoint.header import TensorInfo
from kconv.drafters.spec import Gqa, Rope, Tokens, Yarn
from kconv.engines import BY_NAME
from kconv.errors import CapturedUndecided

WRITABLE = [BY_NAME["vllm"], BY_NAME["trtllm"]]
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def test_torchspecs_mla_config_is_kimis_head():
    kimi = replace(KIMI_MLA, tokens=Tokens(163584, 163585, 0))
    assert read(TORCHSPEC_MLA).spec == kimi
    assert kimi.max_positions == 64 * 4096, "the config has no max_position_embeddings; YaRN's reach stands in"
    assert (kimi.kind, read(TORCHSPEC_MLA).carried) == ("mla", {})


def test_torchspecs_mha_config_says_no_layers_until_told():
    with pytest.raises(CapturedUndecided):
        read(TORCHSPEC_MHA)
    told = read(TORCHSPEC_MHA, target_layers=61)
    assert told.spec == replace(KIMI_MHA, tokens=Tokens(163584, 163585))
    assert told.spec.kind == "mha"


def test_modelopts_kimik2_config_is_kimis_head():
    found = read(MODELOPT_KIMIK2)
    assert found.spec == replace(KIMI_MLA, tokens=Tokens(163584, 163585, 0))
    assert found.carried == {}
    assert {"n_routed_experts", "attention_bias", "transformers_version", "id2label"} <= set(found.dropped)


def test_modelopts_llama_config():
    spec = read(MODELOPT_LLAMA).spec
    assert spec.attention == Gqa(32, 8, 128) and spec.kind == "gqa"
    assert spec.rope == Rope(10000.0, Yarn(32.0, 2048))
    assert (spec.captured, spec.draft_vocab, spec.intermediate) == ((1, 29, 57), 163840, 14336)


def test_the_vocabulary_that_modelopts_kimik2_config_forgets_is_d2ts():
    d2t = TensorInfo("d2t", "I64", (32000,), None, 0, 256000)  # type: ignore[arg-type]
    assert read(MODELOPT_KIMIK2, tensors={"d2t": d2t}).spec.draft_vocab == 32000
    assert read(MODELOPT_KIMIK2).spec.draft_vocab == 163840
    assert read(MODELOPT_KIMIK2 | {"draft_vocab_size": None}, tensors={"d2t": d2t}).spec.draft_vocab == 32000
    assert read(TORCHSPEC_MLA, tensors={"d2t": d2t}).spec.draft_vocab == 163840, "a key that is there is believed"


@pytest.mark.parametrize("layout", WRITABLE, ids=lambda layout: layout.name)
@pytest.mark.parametrize("spec", PORTABLE.values(), ids=PORTABLE)
def test_transformers_reads_the_same_head_from_what_is_written(layout, spec):
    written = json.loads(json.dumps(layout.write_config(spec)))
    theirs = (DeepseekV3Config if spec.kind == "mla" else LlamaConfig)(**written)
    assert (theirs.hidden_size, theirs.intermediate_size, theirs.num_hidden_layers) == (
        spec.hidden,
        spec.intermediate,
        spec.layers,
    )
    assert (theirs.vocab_size, theirs.rms_norm_eps, theirs.hidden_act) == (spec.vocab, spec.eps, "silu")
    assert theirs.max_position_embeddings == spec.max_positions
    assert theirs.tie_word_embeddings is False
    assert str(theirs.dtype).removeprefix("torch.") == DTYPES[spec.dtype]
    assert theirs.num_attention_heads == spec.attention.heads
    assert (theirs.bos_token_id, theirs.pad_token_id) == (spec.tokens.bos, spec.tokens.pad) or spec.tokens == Tokens()
    if spec.kind == "mla":
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            assert getattr(theirs, name) == getattr(spec.attention, name)
    else:
        assert (theirs.num_key_value_heads, theirs.head_dim) == (spec.attention.kv_heads, spec.attention.head_dim)
        assert (theirs.attention_bias, theirs.mlp_bias) == (spec.attention.bias, spec.mlp_bias)


@settings(max_examples=100, deadline=None)
@given(portable_specs())
def test_what_is_written_is_read_back(spec):
    for layout in WRITABLE:
        written = json.loads(json.dumps(layout.write_config(spec)))
        found = read(written, dtype=spec.dtype)
        assert found.spec == spec
        assert (found.carried, found.dropped) == ({}, ())


def test_each_engine_finds_its_captured_layers_where_it_looks():
    vllm, trtllm = (layout.write_config(replace(MLA, captured=(1, 29, 57))) for layout in WRITABLE)
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58] and vllm["num_aux_hidden_states"] == 3
    assert "eagle_aux_hidden_state_layer_ids" not in vllm["eagle_config"]
    assert trtllm["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 29, 57]
    assert "eagle_aux_hidden_state_layer_ids" not in trtllm


def test_identity_is_one_that_every_engine_takes():
    for layout in WRITABLE:
        mla, gqa = layout.write_config(MLA), layout.write_config(GQA)
        assert (mla["architectures"], mla["model_type"]) == (["Eagle3DeepseekV2ForCausalLM"], "kimi_k2")
        assert (gqa["architectures"], gqa["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
        assert "kv_lora_rank" not in gqa, "TensorRT-LLM would build MLA"
        assert mla["num_key_value_heads"] == mla["num_attention_heads"]
