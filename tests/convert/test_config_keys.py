"""The keys of a config one by one: what silence means, what is refused, carried or dropped."""

from contextlib import suppress
from dataclasses import replace

import pytest
from support.heads import GQA, MLA, MODELOPT_KIMIK2, MODELOPT_LLAMA, TORCHSPEC_MLA, read, written

from kconv.convert.config import carry
from kconv.drafters.spec import Gqa, Norms
from kconv.errors import CapturedUndecided, ConfigInvalid, ConfigUnsupported

REQUIRED = ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "rms_norm_eps"]
REQUIRED_MLA = ["q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]


@pytest.mark.parametrize("key", REQUIRED + REQUIRED_MLA)
@pytest.mark.parametrize("value", [..., None])
def test_a_missing_key_is_named(key, value):
    with pytest.raises(ConfigInvalid, match=f"no {key}"):
        read(written(MLA, **{key: value}))


COUNT_FAULTS = [0, -1, 48.0, "48", True, [48], {}, 2**31]


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "draft_vocab_size", "q_lora_rank", "num_hidden_layers"])
@pytest.mark.parametrize("value", COUNT_FAULTS, ids=repr)
def test_a_count_that_is_none_is_named(key, value):
    with pytest.raises(ConfigInvalid, match=key) as caught:
        read(written(MLA, **{key: value}))
    assert caught.value.where and caught.value.fix


WRONG = {
    "eps of nought": {"rms_norm_eps": 0},
    "eps that is nought in fp32": {"rms_norm_eps": 1e-300},
    "eps above one": {"rms_norm_eps": 1.5},
    "eps as a text": {"rms_norm_eps": "1e-5"},
    "a flag as a number": {"norm_before_residual": 1},
    "a flag as a text": {"fc_norm": "true"},
    "a token as a text": {"bos_token_id": "<s>"},
    "a token as a bool": {"bos_token_id": True},
    "tokens of texts": {"eos_token_id": [1, "2"]},
    "positions of nought": {"max_position_embeddings": 0},
    "a billion layers": {"num_hidden_layers": 1_000_000_000},
    "another count of states": {"num_aux_hidden_states": 4},
    "one flag in two places": {"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}},
    "MLA with fewer key-value heads": {"num_key_value_heads": 2},
    "an odd rotary part": {"qk_rope_head_dim": 7},
    "two names of one norm": {"norm_output": False, "eagle_config": {"return_hidden_post_norm": True}},
    "a flag of eagle_config as a text": {"eagle_config": {"return_hidden_post_norm": "yes"}, "norm_output": ...},
    "eagle_config as a text": {"eagle_config": "x"},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_invalid(changes):
    with pytest.raises(ConfigInvalid) as caught:
        read(written(MLA, **changes))
    assert caught.value.where and caught.value.fix


WRONG_GQA = {
    "3 key-value heads for 4": {"num_key_value_heads": 3},
    "8 key-value heads for 4": {"num_key_value_heads": 8},
    "an odd head": {"head_dim": 7},
    "an odd part of a head": {"head_dim": 6, "partial_rotary_factor": 0.5},
    "no length": {"max_position_embeddings": ...},
}


@pytest.mark.parametrize("changes", WRONG_GQA.values(), ids=WRONG_GQA)
def test_invalid_gqa(changes):
    with pytest.raises(ConfigInvalid):
        read(written(GQA, **changes))


UNSUPPORTED = {
    "another activation": {"hidden_act": "gelu"},
    "tied embeddings": {"tie_word_embeddings": True},
    "quantized": {"quantization_config": {"quant_method": "fp8"}},
    "scaled logits": {"logit_scale": 2.0},
    "neox MLA": {"rope_interleave": False},
    "Kimi K3's attention, which turns nothing": {"mla_use_nope": True},
    "half of each head turned, by vLLM's older name": {"rotary_pct": 0.5},
    "half of each head turned, by another name": {"rotary_emb_fraction": 0.5},
    "half of each head turned, by TensorRT-LLM's name": {"rotary_dim": 4},
    "theta by its older name": {"rotary_emb_base": 10000},
    "YaRN's length at the top": {"original_max_position_embeddings": 4096},
    "interleaved, by SGLang's name": {"rope_is_neox_style": False},
    "attention in both directions": {"is_causal": False},
    # vLLM and SGLang take null for false here.
    "attention in directions that are not said": {"is_causal": None},
    "sparse attention": {"index_topk": 2048},
    "biases of q, k and v alone": {"qkv_bias": True},
    "no captured states": {"eagle_config": {"use_aux_hidden_state": False}},
    "another first layer": {"eagle_config": {"use_input_layernorm_in_first_layer": False}},
    "no last norm": {"eagle_config": {"use_last_layernorm": False}},
    "MTP norms": {"eagle_config": {"use_mtp_layernorm": True}},
    "wide later layers": {"eagle_config": {"next_layer_regular": False}},
    "eh_proj": {"eagle_config": {"eh_proj_before_attn": True}},
    "parallel drafts": {"eagle_config": {"parallel_draft_step": 4}},
    "sliding layers": {"layer_types": ["sliding_attention"]},
    "layer types as a number": {"layer_types": 5},
    "a sliding window": {"sliding_window": 4096},
    "a part of MLA's rotary dims": {"partial_rotary_factor": 0.5, "rope_parameters": ...},
}


@pytest.mark.parametrize("changes", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported(changes):
    with pytest.raises(ConfigUnsupported) as caught:
        read(written(MLA, **changes))
    assert caught.value.where and caught.value.fix


HARMLESS = {
    "a window that is off": {"sliding_window": 4096, "use_sliding_window": False},
    "full attention by name": {"layer_types": ["full_attention"], "sliding_window": 4096},
    "nulls": {"quantization_config": None, "logit_scale": None, "sliding_window": None, "layer_types": None},
    "one logit scale": {"logit_scale": 1.0},
    "interleaved by name": {"rope_interleave": True},
    "RoPE's other names": {"mla_use_nope": False, "rotary_pct": 1.0, "rope_is_neox_style": True, "is_causal": True},
}


@pytest.mark.parametrize("changes", HARMLESS.values(), ids=HARMLESS)
def test_what_changes_nothing_is_taken(changes):
    assert read(written(MLA, **changes)).spec == MLA


def test_silence_means_what_engines_take_it_to_mean():
    quiet = written(
        GQA, norm_before_residual=..., norm_before_fc=..., fc_norm=..., norm_output=..., bias=..., mlp_bias=...,
        attention_bias=..., target_hidden_size=..., draft_vocab_size=..., eagle_config=..., head_dim=...,
        num_key_value_heads=...,
    )  # fmt: skip
    spec = read(quiet).spec
    assert spec.attention == Gqa(4, 4, 48 // 4)
    assert (spec.target_hidden, spec.draft_vocab, spec.norms) == (48, 64, Norms())
    assert not (spec.fc_bias or spec.mlp_bias)


FLAGS = {
    "norm_before_residual": ("norms", Norms(before_residual=True)),
    "norm_before_fc": ("norms", Norms(before_fc=True)),
    "fc_norm": ("norms", Norms(fc=True)),
    "norm_output": ("norms", Norms(output=True)),
    "attention_bias": ("attention", Gqa(4, 2, 16, bias=True)),
    "mlp_bias": ("mlp_bias", True),
    "bias": ("fc_bias", True),
}


@pytest.mark.parametrize("key, field, value", [(key, *change) for key, change in FLAGS.items()], ids=FLAGS)
def test_a_flag_means_what_its_engine_reads(key, field, value):
    plain = {key: value for key, value in written(GQA).items() if key != "eagle_config"}
    assert read(plain | {key: True}).spec == replace(GQA, **{field: value})


def test_a_norm_is_found_in_either_place():
    assert read(written(GQA, norm_before_fc=..., eagle_config={"norm_before_fc": True})).spec.norms.before_fc
    assert read(written(GQA, norm_before_fc=True, eagle_config=...)).spec.norms.before_fc
    older = {"eagle_config": {"return_hidden_post_norm": True}, "norm_output": ...}
    assert read(written(GQA, **older)).spec.norms.output


def test_length_is_the_users_word_before_the_configs():
    assert read(written(MLA), max_positions=99).spec.max_positions == 99
    assert read(written(MLA, max_position_embeddings=...)).spec.max_positions == 64 * 4096


def test_yarn_beyond_any_length_is_refused():
    yarn = {"type": "yarn", "factor": 1e5, "original_max_position_embeddings": 1 << 20}
    with pytest.raises(ConfigInvalid, match="max_position_embeddings"):
        read(written(MLA, max_position_embeddings=..., rope_scaling=yarn, rope_parameters=...))


def test_unknown_keys_are_carried_where_they_stood_and_known_ballast_is_dropped():
    found = read(
        written(
            MLA, colour="blue", eagle_config={"depth_hint": [1], "norm_before_fc": False}, n_routed_experts=384,
            use_cache=True, auto_map={"AutoConfig": "evil.py"}, head_dim=64, attention_bias=False,
        )
    )  # fmt: skip
    assert found.carried == {"colour": "blue", "eagle_config.depth_hint": [1]}
    assert set(found.dropped) == {"n_routed_experts", "use_cache", "auto_map", "head_dim", "attention_bias"}
    config = carry({"hidden_size": 48, "eagle_config": {"norm_before_fc": False}}, found.carried, "eagle_config")
    assert config == {
        "hidden_size": 48,
        "colour": "blue",
        "eagle_config": {"norm_before_fc": False, "depth_hint": [1]},
    }


# Identity is written anew, and the weights' own dtype goes before what a config says of it.
NOT_READ = {"architectures", "model_type", "torch_dtype"}


@pytest.mark.parametrize(
    "config", [MODELOPT_KIMIK2, MODELOPT_LLAMA, TORCHSPEC_MLA], ids=["kimik2", "llama", "torchspec"]
)
def test_no_key_is_ignored_in_silence(config):
    """Nonsense in any key is refused, or the key is said to be dropped."""
    for key in config.keys() - NOT_READ:
        with suppress(ConfigInvalid, ConfigUnsupported, CapturedUndecided):
            assert key in read(config | {key: {"non": "sense"}}).dropped, key
    for key in config["eagle_config"]:
        with pytest.raises((ConfigInvalid, ConfigUnsupported)):
            read(config | {"eagle_config": config["eagle_config"] | {key: {"non": "sense"}}})


# Well-formed, and of no head that there is.
IMPLAUSIBLE = {
    "a token id of -2": {"eos_token_id": -2},
    "a token id of 2**64": {"bos_token_id": 2**64},
    "one of several token ids": {"eos_token_id": [3, -7]},
    "an epsilon of 0.9": {"rms_norm_eps": 0.9},
    "a vocabulary of 2**31 - 1": {"vocab_size": 2**31 - 1},
    "a draft vocabulary of 2**25": {"draft_vocab_size": 2**25},
    "a context of 3 tokens": {"max_position_embeddings": 3},
}


@pytest.mark.parametrize("changes", IMPLAUSIBLE.values(), ids=IMPLAUSIBLE)
def test_a_value_that_no_head_has_is_refused(changes):
    with pytest.raises(ConfigInvalid) as caught:
        read(written(MLA, **changes))
    assert caught.value.fix
