"""Both attention kinds against transformers' own modules, with the same weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from kconv.drafters.attention import CausalContext
from kconv.drafters.spec import Gqa, Llama3, Mla, Norms, Rope, Yarn

ENTRIES = 7
YARN = Yarn(8.0, 16, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.8)
KIMI = Yarn(64.0, 4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)
PARAMETERS = {
    "plain": (None, {"rope_type": "default"}),
    "yarn": (
        YARN,
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    ),
    "kimi": (
        KIMI,
        {
            "rope_type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "bare yarn": (
        Yarn(8.0, 16),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
    ),
    "llama3": (
        Llama3(8.0, 1.0, 4.0, 32),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
}


def run_module(attention: nn.Module, rotary: nn.Module, weights, layer: int, out: int, x, positions):
    """Run a transformers attention whose output projection leads to `out` dims, with our weights."""
    prefix = f"{layer}."
    o_bias = f"{prefix}o_proj.bias" in weights
    attention.o_proj = nn.Linear(weights[f"{prefix}o_proj"].shape[1], out, bias=o_bias)
    named = dict(attention.named_parameters())
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(weights[prefix + name.removesuffix(".weight")])
    length = x.shape[1]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        return attention(x, position_embeddings=rotary(x, positions[None]), attention_mask=mask)[0]


@given(
    heads=st.sampled_from([1, 2, 5]),
    q_lora_rank=st.sampled_from([6, 16]),
    kv_lora_rank=st.sampled_from([4, 18]),
    nope=st.sampled_from([4, 10]),
    rope_dim=st.sampled_from([2, 8]),
    v_head_dim=st.sampled_from([3, 12]),
    scaling=st.sampled_from(["plain", "yarn", "kimi", "bare yarn"]),
    layer=st.integers(0, 1),
    eps=st.sampled_from([1e-6, 1e-2]),
    start=st.integers(0, 200),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_mla_is_deepseek_v3_attention(
    make_spec,
    make_head,
    heads,
    q_lora_rank,
    kv_lora_rank,
    nope,
    rope_dim,
    v_head_dim,
    scaling,
    layer,
    eps,
    start,
    seed,
):
    yarn, parameters = PARAMETERS[scaling]
    mla = Mla(heads, q_lora_rank, kv_lora_rank, nope, rope_dim, v_head_dim)
    spec = make_spec(attention=mla, layers=2, eps=eps, rope=Rope(5e4, yarn))
    head = make_head(spec, seed)
    width = spec.hidden * (2 if layer == 0 else 1)
    config = DeepseekV3Config(
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=v_head_dim,
        max_position_embeddings=4096 * 64,
        rope_parameters=parameters | {"rope_theta": 5e4},
        rope_interleave=True,
        attn_implementation="eager",
    )
    module = DeepseekV3Attention(config, 0)
    # transformers has 1e-6 here whatever the config says; engines have the config's.
    module.q_a_layernorm.variance_epsilon = module.kv_a_layernorm.variance_epsilon = eps
    x = torch.randn(2, ENTRIES, width, generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(start, start + ENTRIES)

    want = run_module(module, DeepseekV3RotaryEmbedding(config), head.weights, layer, spec.hidden, x, positions)
    got = head.attend(layer, x, positions, CausalContext())
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@given(
    kv_heads=st.sampled_from([1, 2, 3]),
    groups=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([2, 8, 20]),
    bias=st.booleans(),
    scaling=st.sampled_from(list(PARAMETERS)),
    layer=st.integers(0, 1),
    start=st.integers(0, 200),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_gqa_is_llama_attention(make_spec, make_head, kv_heads, groups, head_dim, bias, scaling, layer, start, seed):
    yarn, parameters = PARAMETERS[scaling]
    gqa = Gqa(kv_heads * groups, kv_heads, head_dim, bias)
    spec = make_spec(attention=gqa, layers=2, rope=Rope(1e4, yarn))
    head = make_head(spec, seed)
    width = spec.hidden * (2 if layer == 0 else 1)
    config = LlamaConfig(
        hidden_size=width,
        num_attention_heads=gqa.heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        attention_bias=bias,
        max_position_embeddings=4096 * 64,
        rope_parameters=parameters | {"rope_theta": 1e4},
        attn_implementation="eager",
    )
    x = torch.randn(2, ENTRIES, width, generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(start, start + ENTRIES)
    module = LlamaAttention(config, 0)
    want = run_module(module, LlamaRotaryEmbedding(config), head.weights, layer, spec.hidden, x, positions)
    got = head.attend(layer, x, positions, CausalContext())
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("attention", [Gqa(6, 2, 8), Mla(3, 12, 16, 8, 4, 6)])
@pytest.mark.parametrize("cut", [1, 3, 6])
def test_a_cache_filled_in_two_calls_sees_what_one_call_sees(make_spec, make_head, attention, cut):
    head = make_head(make_spec(attention=attention))
    x = torch.randn(2, ENTRIES, 48, generator=torch.Generator().manual_seed(5))
    positions = torch.arange(ENTRIES)
    whole = head.attend(0, x, positions, CausalContext())
    context = CausalContext()
    parts = [head.attend(0, x[:, s], positions[s], context) for s in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)


def test_positions_may_differ_by_row(make_spec, make_head):
    head = make_head(make_spec())
    x = torch.randn(2, ENTRIES, 48, generator=torch.Generator().manual_seed(6))
    positions = torch.stack([torch.arange(ENTRIES), torch.tensor([0, 2, 3, 9, 10, 20, 21])])
    both = head.attend(0, x, positions, CausalContext())
    for row in range(2):
        alone = head.attend(0, x[row : row + 1], positions[row], CausalContext())
        torch.testing.assert_close(both[row : row + 1], alone, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(both[1], head.attend(0, x, positions[0], CausalContext())[1], atol=1e-3)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_norms_of_queries_and_keys_are_qwen3s(make_spec, make_head, layer, eps, kv_heads):
    spec = make_spec(attention=Gqa(4, kv_heads, 16), layers=2, eps=eps, rope=Rope(1e6), norms=Norms(qk=True))
    head = make_head(spec, 3)
    width = spec.hidden * (2 if layer == 0 else 1)
    config = Qwen3Config(
        hidden_size=width, num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=16, rms_norm_eps=eps,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, attn_implementation="eager",
    )  # fmt: skip
    x, positions = torch.randn(2, ENTRIES, width), torch.arange(5, 5 + ENTRIES)
    module = Qwen3Attention(config, 0)
    want = run_module(module, Qwen3RotaryEmbedding(config), head.weights, layer, spec.hidden, x, positions)
    torch.testing.assert_close(head.attend(layer, x, positions, CausalContext()), want)
