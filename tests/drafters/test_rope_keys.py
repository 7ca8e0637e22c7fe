"""RoPE in a config: both spellings mean one thing, what is written is read back, and contradictions are refused."""

import json

import pytest
from hypothesis import given, settings
from support.strategies import partial_ropes
from transformers import LlamaConfig

from kconv.drafters.rope_keys import read_rope
from kconv.drafters.spec import Linear, Llama3, Rope, Yarn
from kconv.engines.config import write_rope
from kconv.errors import ConfigInvalid, ConfigUnsupported

YARN = {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0}
KIMI = Rope(50000.0, Yarn(64.0, 4096, 1.0, 1.0, 1.0, 1.0))
FULL = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}

SPELLINGS = {
    "DeepSeek": ({"rope_theta": 50000.0, "rope_scaling": {"type": "yarn", **FULL}}, KIMI),
    "transformers 4": ({"rope_theta": 50000.0, "rope_scaling": {"rope_type": "yarn", **FULL}}, KIMI),
    "transformers 5": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, **FULL}}, KIMI),
    "ModelOpt: theta inside and outside": (
        {"rope_theta": 50000.0, "rope_scaling": {"type": "yarn", "rope_type": "yarn", "rope_theta": 50000.0, **FULL}},
        KIMI,
    ),
    "all of them": (
        {
            "rope_theta": 50000,
            "rope_scaling": {"type": "yarn", **FULL},
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, **FULL, "factor": 64},
        },
        KIMI,
    ),
    "DeepSeek's name for YaRN": ({"rope_theta": 5e4, "rope_scaling": {"rope_type": "deepseek_yarn", **FULL}}, KIMI),
    "two names for YaRN": (
        {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "rope_type": "deepseek_yarn", **FULL}},
        KIMI,
    ),
    "nulls say nothing": (
        {
            "rope_theta": 5e4,
            "rope_scaling": {"type": None, "rope_type": "yarn", **FULL, "attention_factor": None},
            "rope_parameters": None,
        },
        KIMI,
    ),
    "truncate as it is by default": (
        {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **FULL, "truncate": True}},
        KIMI,
    ),
    "YaRN with the common defaults": (
        {
            "rope_theta": 1e4,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048},
        },
        Rope(1e4, Yarn(32.0, 2048, 32.0, 1.0)),
    ),
    "an attention factor": (
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.2}},
        Rope(1e4, Yarn(64.0, 4096, 1.0, 1.0, attention_factor=1.2)),
    ),
    "mscale of nought": (
        {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **YARN, "mscale": 1, "mscale_all_dim": 0}},
        Rope(1e4, Yarn(64.0, 4096, 1.0, 1.0, 1.0, 0.0)),
    ),
    "Llama 3": (
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        Rope(5e5, Llama3(8.0, 1.0, 4.0, 8192)),
    ),
    "linear": ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4}}, Rope(1e4, Linear(4.0))),
    "plain": ({"rope_theta": 1e6, "rope_scaling": None}, Rope(1e6)),
    "plain, by name": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, Rope(1e6)),
    "an empty object": ({"rope_theta": 1e6, "rope_scaling": {}}, Rope(1e6)),
    "nothing at all": ({}, Rope(10000.0)),
    "half of each head": ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, Rope(1e4, None, 0.5)),
    "half of each head, in transformers 5": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        Rope(1e4, None, 0.5),
    ),
}


@pytest.mark.parametrize("config, rope", SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(config, rope):
    assert read_rope(config) == rope


# transformers 5 unifies every spelling itself; it must see in a config what kconv sees in it.
@pytest.mark.parametrize("name", sorted(SPELLINGS.keys() - {"DeepSeek's name for YaRN", "two names for YaRN"}))
def test_transformers_reads_the_same(name):
    config, rope = SPELLINGS[name]
    theirs = LlamaConfig(**json.loads(json.dumps(config)), max_position_embeddings=262144).rope_parameters
    assert read_rope({"rope_parameters": theirs}) == rope


@pytest.mark.parametrize("rope", [rope for _, rope in SPELLINGS.values()], ids=SPELLINGS)
def test_transformers_reads_what_is_written(rope):
    theirs = LlamaConfig(**write_rope(rope), max_position_embeddings=262144).rope_parameters
    assert theirs is not None and theirs["rope_theta"] == rope.theta
    assert theirs.get("partial_rotary_factor", 1.0) == rope.partial_rotary_factor
    if rope.scaling is None:
        assert theirs["rope_type"] == "default"
        return
    names = {"original_max_positions": "original_max_position_embeddings"}
    for field, value in vars(rope.scaling).items():
        assert theirs.get(names.get(field, field)) == value


@settings(max_examples=150, deadline=None)
@given(partial_ropes)
def test_what_is_written_is_read_back_and_each_spelling_says_all_of_it(rope):
    keys = json.loads(json.dumps(write_rope(rope)))
    assert read_rope(keys) == rope
    newer = {"rope_parameters": keys["rope_parameters"]}
    older = {key: value for key, value in keys.items() if key != "rope_parameters"}
    assert read_rope(newer) == read_rope(older) == rope


def test_no_value_is_left_to_an_engines_default():
    written = write_rope(Rope(1e4, Yarn(4.0, 1024)))["rope_scaling"]
    assert written["beta_fast"] == 32.0 and written["beta_slow"] == 1.0 and written["rope_theta"] == 1e4
    assert written["type"] == written["rope_type"] == "yarn"


CONTRADICTIONS = {
    "theta": {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e4}},
    "theta within the scaling": {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **FULL, "rope_theta": 5e4}},
    "type": {"rope_scaling": {"type": "yarn", "rope_type": "linear", **FULL}},
    "a default type": {"rope_scaling": {"type": "default", "rope_type": "yarn", **FULL}},
    "type between spellings": {
        "rope_scaling": {"type": "linear", "factor": 2},
        "rope_parameters": {"rope_type": "default"},
    },
    "factor": {
        "rope_scaling": {"type": "yarn", **FULL},
        "rope_parameters": {"rope_type": "yarn", **FULL, "factor": 32},
    },
    "beta_fast": {"rope_scaling": {"type": "yarn", **FULL}, "rope_parameters": {**FULL, "beta_fast": 32}},
    "partial": {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}},
    "lists": {"rope_scaling": {"type": "longrope", "short_factor": [1]}, "rope_parameters": {"short_factor": [2]}},
}


@pytest.mark.parametrize("config", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictions_are_refused(config):
    with pytest.raises(ConfigInvalid, match="twice") as caught:
        read_rope(config)
    assert caught.value.where and caught.value.fix


INVALID = {
    "no object": {"rope_scaling": "yarn"},
    "a list": {"rope_parameters": [1]},
    "a type that is no name": {"rope_theta": 1e4, "rope_scaling": {"factor": 64.0}},
    "parameters without a type": {"rope_parameters": {"rope_theta": 1e4, **YARN}},
    "one RoPE per kind of layer": {"rope_parameters": {"full_attention": {"rope_type": "yarn", **FULL}}},
    "a default with a factor": {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
    "no factor": {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096}},
    "no original length": {"rope_scaling": {"type": "yarn", "factor": 64}},
    "Llama 3 without a low factor": {
        "rope_scaling": {"type": "llama3", "factor": 8, "high_freq_factor": 4, "original_max_position_embeddings": 1}
    },
    "a factor that is a text": {"rope_scaling": {"type": "yarn", **FULL, "factor": "64"}},
    "a factor that is a bool": {"rope_scaling": {"type": "linear", "factor": True}},
    "a factor of nought": {"rope_scaling": {"type": "linear", "factor": 0}},
    "a negative factor": {"rope_scaling": {"type": "linear", "factor": -2}},
    "an infinite theta": {"rope_theta": float("inf")},
    "a theta that is not a number": {"rope_theta": float("nan")},
    "a theta beyond any float": {"rope_theta": 10**400},
    "a theta of nought": {"rope_theta": 0},
    "half a token": {"rope_scaling": {"type": "yarn", **FULL, "original_max_position_embeddings": 4096.5}},
    "no tokens": {"rope_scaling": {"type": "yarn", **FULL, "original_max_position_embeddings": 0}},
    "tokens of 301 digits": {"rope_scaling": {"type": "yarn", **FULL, "original_max_position_embeddings": 1e300}},
    "one token too many": {"rope_scaling": {"type": "yarn", **FULL, "original_max_position_embeddings": 2**31}},
    "a theta of 7": {"rope_theta": 7.0},
    "a factor of 1e308": {"rope_scaling": {"type": "yarn", **FULL, "factor": 1e308}},
    "an mscale of 1.8e19": {"rope_scaling": {"type": "yarn", **FULL, "mscale": 1.8e19}},
    "beta_slow above beta_fast": {"rope_scaling": {"type": "yarn", **FULL, "beta_fast": 1.0, "beta_slow": 32.0}},
    "a part above the whole": {"rope_theta": 1e4, "partial_rotary_factor": 1.5},
    "a part of nought": {"partial_rotary_factor": 0},
}


@pytest.mark.parametrize("config", INVALID.values(), ids=INVALID)
def test_invalid(config):
    with pytest.raises(ConfigInvalid) as caught:
        read_rope(config)
    assert caught.value.where and caught.value.fix


def test_the_largest_count_of_tokens_is_written_and_read():
    config = {"rope_scaling": {"type": "yarn", **FULL, "original_max_position_embeddings": 2.0**31 - 1}}
    rope = read_rope(config)
    assert isinstance(rope.scaling, Yarn) and rope.scaling.original_max_positions == 2**31 - 1
    assert read_rope(json.loads(json.dumps(write_rope(rope)))) == rope


def test_only_what_is_missing_is_said_to_be():
    with pytest.raises(ConfigInvalid, match=r"lacks low_freq_factor\n"):
        read_rope(INVALID["Llama 3 without a low factor"])


UNSUPPORTED = {
    "longrope": {"rope_scaling": {"type": "longrope", "factor": 4}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4}},
    "a type that is a list": {"rope_scaling": {"rope_type": ["yarn"], **FULL}},
    "YaRN untruncated": {"rope_scaling": {"rope_type": "yarn", **FULL, "truncate": False}},
    "an unknown parameter": {"rope_scaling": {"rope_type": "yarn", **FULL, "mscale_bonus": 2}},
}


@pytest.mark.parametrize("config", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported(config):
    with pytest.raises(ConfigUnsupported) as caught:
        read_rope(config)
    assert caught.value.where and caught.value.fix
