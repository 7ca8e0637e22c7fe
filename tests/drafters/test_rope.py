"""Rotary embedding against transformers, and against the written rule where transformers and vLLM differ."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kconv.drafters.rope import (
    cos_sin,
    inverse_frequencies,
    partial_factor,
    rotary_dims,
    rotate_halves,
    rotate_pairs,
)
from kconv.drafters.spec import Gqa, Linear, Llama3, Mla, Rope, Yarn
from kconv.drafters.yarn import cos_sin_factor, softmax_scale
from kconv.errors import ConfigUnsupported

MLA = Mla(heads=4, q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=16, v_head_dim=6)

thetas = st.sampled_from([100.0, 1e4, 5e4, 5e5])
factors = st.sampled_from([0.5, 1.0, 1.3, 4.0, 32.0, 64.0])
mscales = st.sampled_from([None, 0.0, 0.707, 1.0, 1.7])
yarns = st.builds(
    Yarn,
    factor=factors,
    original_max_positions=st.sampled_from([64, 2048, 4096]),
    beta_fast=st.sampled_from([1.0, 8.0, 32.0]),
    beta_slow=st.just(1.0),
    mscale=mscales,
    mscale_all_dim=mscales,
    attention_factor=st.sampled_from([None, 1.0, 1.25]),
)
llama3s = st.builds(
    Llama3,
    factor=factors,
    low_freq_factor=st.sampled_from([1.0, 2.0]),
    high_freq_factor=st.sampled_from([4.0, 8.0]),
    original_max_positions=st.sampled_from([64, 8192]),
)


def as_parameters(rope: Rope) -> dict:
    """Write a rope the way transformers reads it."""
    scaling, parameters = rope.scaling, {"rope_theta": rope.theta, "rope_type": "default"}
    if rope.partial_rotary_factor != 1.0:
        parameters["partial_rotary_factor"] = rope.partial_rotary_factor
    if isinstance(scaling, Linear):
        parameters |= {"rope_type": "linear", "factor": scaling.factor}
    elif scaling is not None:
        named = {k: v for k, v in vars(scaling).items() if v is not None}
        named["original_max_position_embeddings"] = named.pop("original_max_positions")
        parameters |= named | {"rope_type": "yarn" if isinstance(scaling, Yarn) else "llama3"}
    return parameters


@given(
    theta=thetas,
    scaling=st.one_of(yarns, llama3s, st.builds(Linear, factor=factors)),
    head_dim=st.sampled_from([8, 16, 64]),
    partial=st.sampled_from([1.0, 0.5, 0.25]),
)
@settings(deadline=None, max_examples=200)
def test_gqa_frequencies_and_factor_are_those_of_transformers(theta, scaling, head_dim, partial):
    rope, gqa = Rope(theta, scaling, partial), Gqa(heads=2, kv_heads=2, head_dim=head_dim)
    parameters = as_parameters(rope)
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, head_dim=head_dim, rope_parameters=parameters)
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    torch.testing.assert_close(inverse_frequencies(rope, rotary_dims(gqa, rope)), frequencies, rtol=2e-6, atol=0)
    assert cos_sin_factor(rope, gqa) == pytest.approx(factor, rel=1e-12)


def test_plain_cos_and_sin_are_those_of_transformers():
    rope, gqa = Rope(1e4), Gqa(heads=2, kv_heads=1, head_dim=16)
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, head_dim=16, rope_parameters=as_parameters(rope))
    positions = torch.tensor([[0, 1, 7, 300], [5, 5, 2, 9000]])
    want_cos, want_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    cos, sin = cos_sin(rope, gqa, positions)
    torch.testing.assert_close(torch.cat([cos, cos], -1), want_cos, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([sin, sin], -1), want_sin, rtol=1e-5, atol=1e-5)


@given(factor=factors, mscale=mscales, mscale_all_dim=mscales)
@settings(deadline=None)
def test_mla_scales_follow_deepseek(factor, mscale, mscale_all_dim):
    """cos and sin by m(mscale) / m(mscale_all_dim), softmax by m(mscale_all_dim) squared; absent: 1 and 0."""

    def m(s):
        return 1.0 if factor <= 1 else 0.1 * s * math.log(factor) + 1.0

    rope = Rope(1e4, Yarn(factor, 64, mscale=mscale, mscale_all_dim=mscale_all_dim))
    all_dim = mscale_all_dim or 0.0
    assert cos_sin_factor(rope, MLA) == pytest.approx(m(1.0 if mscale is None else mscale) / m(all_dim))
    assert softmax_scale(rope, MLA) == pytest.approx(24**-0.5 * m(all_dim) ** 2)


@given(
    factor=factors,
    mscale=st.sampled_from([0.707, 1.0, 1.7]),
    both=st.booleans(),
    attention_factor=st.sampled_from([None, 1.0, 1.25]),
)
@settings(deadline=None)
def test_mla_agrees_with_transformers_where_both_or_neither_mscale_is_set(factor, mscale, both, attention_factor):
    pair = {"mscale": mscale, "mscale_all_dim": 1.0} if both else {}
    rope = Rope(1e4, Yarn(factor, 64, attention_factor=attention_factor, **pair))
    config = DeepseekV3Config(
        hidden_size=24,
        num_attention_heads=MLA.heads,
        num_key_value_heads=MLA.heads,
        q_lora_rank=MLA.q_lora_rank,
        kv_lora_rank=MLA.kv_lora_rank,
        qk_nope_head_dim=MLA.qk_nope_head_dim,
        qk_rope_head_dim=MLA.qk_rope_head_dim,
        v_head_dim=MLA.v_head_dim,
        rope_parameters=as_parameters(rope),
    )
    _, want = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert cos_sin_factor(rope, MLA) == pytest.approx(want)
    assert softmax_scale(rope, MLA) == pytest.approx(DeepseekV3Attention(config, 0).scaling)


def test_rotations_are_those_of_transformers():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, 3, 5, 16, generator=generator)
    cos, sin = cos_sin(Rope(100.0), Gqa(3, 3, 16), torch.arange(5))
    doubled = torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]

    want_query, want_key = apply_rotary_pos_emb(query, key, *doubled)
    torch.testing.assert_close(rotate_halves(query, cos, sin), want_query)
    torch.testing.assert_close(rotate_halves(key, cos, sin), want_key)

    want_query, want_key = apply_rotary_pos_emb_interleave(query, key, *doubled)
    # transformers returns the pairs de-interleaved.
    pairs = torch.arange(16).view(2, 8).T.flatten()
    torch.testing.assert_close(rotate_pairs(query, cos, sin), want_query[..., pairs])
    torch.testing.assert_close(rotate_pairs(key, cos, sin), want_key[..., pairs])


def test_partial_rotation_leaves_the_rest_alone():
    gqa, rope = Gqa(heads=1, kv_heads=1, head_dim=16), Rope(100.0, partial_rotary_factor=0.25)
    x = torch.randn(1, 1, 6, 16, generator=torch.Generator().manual_seed(1))
    cos, sin = cos_sin(rope, gqa, torch.arange(6))
    turned = rotate_halves(x, cos, sin)
    torch.testing.assert_close(turned[..., 4:], x[..., 4:], rtol=0, atol=0)
    torch.testing.assert_close(
        turned[..., :4], rotate_halves(x[..., :4], *cos_sin(Rope(100.0), Gqa(1, 1, 4), torch.arange(6)))
    )


@pytest.mark.parametrize("rotary", [2, 30, 64, 128])
def test_the_factor_turns_as_many_dims_as_were_meant(rotary):
    for head_dim in range(rotary, 1025):
        factor = partial_factor(rotary, head_dim)
        # vLLM's own line: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/__init__.py#L72
        assert int(head_dim * factor) == rotary, head_dim
        assert 0.0 < factor <= 1.0 and factor == pytest.approx(rotary / head_dim, rel=1e-15)


def test_the_quotient_itself_would_turn_a_dim_less():
    assert int(392 * (64 / 392)) == 63
    assert rotary_dims(Gqa(2, 2, 392), Rope(1e4, partial_rotary_factor=partial_factor(64, 392))) == 64


def test_a_factor_that_needs_no_rounding_is_the_quotient():
    assert [partial_factor(64, head_dim) for head_dim in (64, 128, 192, 256)] == [1.0, 0.5, 64 / 192, 0.25]


@given(shift=st.integers(0, 500), distance=st.integers(0, 50), scaling=st.one_of(st.none(), yarns, llama3s))
@settings(deadline=None)
def test_a_score_depends_on_the_distance_alone(shift, distance, scaling):
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(2))
    for rotate, attention in ((rotate_halves, Gqa(1, 1, 16)), (rotate_pairs, MLA)):

        def score(start, rotate=rotate, attention=attention):
            cos, sin = cos_sin(Rope(1e4, scaling), attention, torch.tensor([start, start + distance]))
            return rotate(key[None], cos[:1], sin[:1]) @ rotate(query[None], cos[1:], sin[1:]).T

        torch.testing.assert_close(score(shift), score(0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("attention", [Gqa(1, 1, 7), Gqa(1, 1, 1)])
def test_an_odd_number_of_rotary_dims_is_refused(attention):
    with pytest.raises(ConfigUnsupported, match="rotates pairs"):
        rotary_dims(attention, Rope(1e4))


def test_a_partial_factor_on_mla_is_refused():
    with pytest.raises(ConfigUnsupported, match="partial_rotary_factor"):
        rotary_dims(MLA, Rope(1e4, partial_rotary_factor=0.5))


def test_a_rope_is_shown_without_python():
    spec = Rope(50000.0, Yarn(64.0, 4096, mscale=1.0), 0.5)
    assert str(spec) == (
        "theta 50000.0, YaRN scaling, factor 64.0, original_max_positions 4096, beta_fast 32.0, beta_slow 1.0,"
        " mscale 1.0, partial_rotary_factor 0.5"
    )
    assert str(Rope(283461213.0)) == "theta 283461213.0, no scaling"
