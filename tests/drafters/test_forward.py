"""The forward of a head against formulas written out in the test, and against transformers' decoder layer."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from kconv.drafters.attention import CausalContext
from kconv.drafters.chain import draft_logits
from kconv.drafters.forward import DraftHead
from kconv.drafters.slots import needs
from kconv.drafters.spec import Gqa, Mla, Norms, Rope, Yarn
from kconv.errors import TensorMissing, TensorShape, TensorUnknown, TensorValue

FLAGS = [Norms(*flags) for flags in itertools.product([False, True], repeat=4)]
ATTENTIONS = [Gqa(6, 2, 8, bias=True), Gqa(3, 3, 4), Mla(3, 12, 16, 8, 4, 6)]


def single_entry(spec, weights, captured, token):
    """Fuse and run one step on one entry, in numpy: with one key, attention returns its value."""
    w = {name: tensor.double().numpy() for name, tensor in weights.items()}

    def norm(x, name):
        return x / np.sqrt((x * x).mean() + spec.eps) * w[name]

    def linear(x, name):
        return w[name] @ x + w.get(f"{name}.bias", 0.0)

    if spec.norms.before_fc:
        captured = norm(captured, "input_norm")
    if spec.norms.fc:
        states = captured.reshape(len(spec.captured), -1)
        captured = np.concatenate([norm(state, f"fc_norm.{a}") for a, state in enumerate(states)])
    hidden = fused = linear(captured, "fc")
    for i in range(spec.layers):
        if i == 0:
            residual = norm(hidden, "0.hidden_norm") if spec.norms.before_residual else hidden
            embedding = w["embed_tokens"][token]
            x = np.concatenate([norm(embedding, "0.input_layernorm"), norm(hidden, "0.hidden_norm")])
        else:
            residual, x = hidden, norm(hidden, f"{i}.input_layernorm")
        attention = spec.attention
        if isinstance(attention, Gqa):
            value = linear(x, f"{i}.v_proj").reshape(attention.kv_heads, attention.head_dim)
            value = np.repeat(value, attention.heads // attention.kv_heads, axis=0)
        else:
            latent = norm(linear(x, f"{i}.kv_a_proj_with_mqa")[: attention.kv_lora_rank], f"{i}.kv_a_layernorm")
            value = linear(latent, f"{i}.kv_b_proj").reshape(attention.heads, -1)[:, attention.qk_nope_head_dim :]
        after = linear(value.flatten(), f"{i}.o_proj") + residual
        x = norm(after, f"{i}.post_attention_layernorm")
        gate = linear(x, f"{i}.gate_proj")
        hidden = after + linear(gate / (1 + np.exp(-gate)) * linear(x, f"{i}.up_proj"), f"{i}.down_proj")
    normed = norm(hidden, "norm")
    return fused, (normed if spec.norms.output else hidden), w["lm_head"] @ normed


@pytest.mark.parametrize("norms", FLAGS, ids=str)
@pytest.mark.parametrize("attention", ATTENTIONS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("layers", [1, 2])
def test_norm_flags_follow_the_formula(make_spec, make_weights, norms, attention, layers):
    biased = layers == 2
    spec = make_spec(attention=attention, norms=norms, layers=layers, eps=1e-2, mlp_bias=biased, fc_bias=biased)
    weights = make_weights(spec, 3)
    head = DraftHead(spec, weights)
    captured = torch.randn(1, 1, 60, generator=torch.Generator().manual_seed(4))

    want = single_entry(spec, weights, captured.flatten().double().numpy(), token=7)
    fused = head.fuse(captured)
    returned, logits = head.step(torch.tensor([[7]]), fused, torch.tensor([12]), CausalContext())
    for got, expected in zip((fused, returned, logits), want, strict=True):
        np.testing.assert_allclose(got.flatten().numpy(), expected, rtol=1e-4, atol=1e-5)


@given(captured=st.integers(1, 4), target_hidden=st.sampled_from([3, 16]), norms=st.sampled_from(FLAGS))
@settings(deadline=None, max_examples=30)
def test_fuse_takes_any_number_of_captured_states(make_spec, make_weights, captured, target_hidden, norms):
    spec = make_spec(captured=tuple(range(captured)), target_hidden=target_hidden, norms=norms)
    weights = make_weights(spec, 1)
    states = torch.randn(2, 3, captured * target_hidden, generator=torch.Generator().manual_seed(2))
    fused = DraftHead(spec, weights).fuse(states)
    assert fused.shape == (2, 3, spec.hidden)
    want, _, _ = single_entry(spec, weights, states[1, 2].double().numpy(), token=0)
    np.testing.assert_allclose(fused[1, 2].numpy(), want, rtol=1e-4, atol=1e-5)


def test_a_later_layer_is_a_llama_decoder_layer(make_spec, make_weights):
    """Two layers are one layer, then transformers' decoder layer on what it returns."""
    spec = make_spec(layers=2)
    weights = make_weights(spec, 8)
    one = DraftHead(make_spec(layers=1), {name: w for name, w in weights.items() if not name.startswith("1.")})
    config = LlamaConfig(
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_attention_heads=spec.attention.heads,
        num_key_value_heads=spec.attention.kv_heads,
        head_dim=spec.attention.head_dim,
        rms_norm_eps=spec.eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        attn_implementation="eager",
    )
    layer = LlamaDecoderLayer(config, 0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(weights[f"1.{name.removesuffix('.weight').rpartition('.')[2]}"])
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(spec.vocab, (2, 6), generator=generator)
    hidden = torch.randn(2, 6, spec.hidden, generator=generator)
    positions = torch.arange(6)

    first, _ = one.step(tokens, hidden, positions, CausalContext())
    mask = torch.full((6, 6), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        want = layer(
            first, attention_mask=mask, position_embeddings=LlamaRotaryEmbedding(config)(first, positions[None])
        )
    got, _ = DraftHead(spec, weights).step(tokens, hidden, positions, CausalContext())
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("attention", ATTENTIONS, ids=lambda a: type(a).__name__)
def test_bf16_weights_compute_in_bf16_and_near_fp32(make_spec, make_weights, attention):
    spec = make_spec(attention=attention)
    weights = make_weights(spec, 0)
    rounded = {name: w.bfloat16() for name, w in weights.items()}
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(spec.vocab, (1, 5), generator=generator)
    captured = torch.randn(1, 5, 60, generator=generator)

    def run(head):
        return head.step(tokens, head.fuse(captured), torch.arange(5), CausalContext())[1]

    low = run(DraftHead(spec, rounded))
    high = run(DraftHead(spec, {name: w.float() for name, w in rounded.items()}))
    assert low.dtype == torch.bfloat16
    assert (low.float() - high).norm() / high.norm() < 0.03


def test_a_kimi_k2_head_runs_on_the_device_of_its_weights(make_spec):
    """Shapes at the real dims, without memory: any tensor left on the CPU would not mix with `meta`."""
    spec = make_spec(
        attention=Mla(64, 1536, 512, 128, 64, 128),
        hidden=7168,
        target_hidden=7168,
        intermediate=18432,
        vocab=163840,
        draft_vocab=163840,
        rope=Rope(5e4, Yarn(64.0, 4096, 1.0, 1.0, 1.0, 1.0)),
    )
    weights = {name: torch.empty(need.shape, dtype=torch.bfloat16, device="meta") for name, need in needs(spec).items()}
    head = DraftHead(spec, weights)
    tokens = torch.zeros(2, 9, dtype=torch.long, device="meta")
    captured = torch.empty(2, 9, 3 * 7168, device="meta")
    logits = draft_logits(head, tokens, captured, 3)
    assert (logits.shape, logits.dtype, logits.device.type) == ((3, 2, 5, 163840), torch.bfloat16, "meta")


def test_weights_are_cast_to_the_dtype_of_fc(make_spec, make_weights):
    spec = make_spec()
    weights = make_weights(spec, 0)
    bf16_table = weights["embed_tokens"].bfloat16()
    tokens, hidden = torch.tensor([[1, 2]]), torch.ones(1, 2, spec.hidden)
    got = DraftHead(spec, weights | {"embed_tokens": bf16_table}).attention_input(tokens, hidden)
    want = DraftHead(spec, weights | {"embed_tokens": bf16_table.float()}).attention_input(tokens, hidden)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_gradients_reach_every_weight(make_spec, make_weights):
    spec = make_spec(layers=2, norms=Norms(before_fc=True, fc=True))
    weights = {name: w.requires_grad_() for name, w in make_weights(spec, 0).items()}
    head = DraftHead(spec, weights)
    captured = torch.randn(1, 3, 60, generator=torch.Generator().manual_seed(0))
    _, logits = head.step(torch.tensor([[1, 2, 3]]), head.fuse(captured), torch.arange(3), CausalContext())
    logits.logsumexp(-1).sum().backward()
    assert [name for name, w in weights.items() if w.grad is None or not w.grad.abs().sum()] == []


def test_d2t_leads_to_the_targets_ids(make_spec, make_weights):
    spec = make_spec(draft_vocab=3)
    weights = make_weights(spec, 0) | {"d2t": torch.tensor([4, 1, 8], dtype=torch.int32)}
    assert DraftHead(spec, weights).target_ids.tolist() == [4, 2, 10]
    full = make_spec()
    assert DraftHead(full, make_weights(full, 0)).target_ids.tolist() == list(range(11))


def test_t2d_may_be_there_or_not(make_spec, make_weights):
    spec = make_spec(draft_vocab=3)
    weights = make_weights(spec, 0)
    kept = DraftHead(spec, weights).target_ids
    t2d = torch.zeros(spec.vocab, dtype=torch.bool).index_fill(0, kept, True)
    assert DraftHead(spec, weights | {"t2d": t2d}).target_ids.tolist() == kept.tolist()


@pytest.mark.parametrize("name", ["fc", "0.hidden_norm", "lm_head", "embed_tokens", "d2t", "1.q_proj.bias"])
def test_a_missing_tensor_is_refused(make_spec, make_weights, name):
    spec = make_spec(attention=ATTENTIONS[0], layers=2, draft_vocab=5)
    weights = make_weights(spec, 0)
    del weights[name]
    with pytest.raises(TensorMissing, match=name):
        DraftHead(spec, weights)


@pytest.mark.parametrize("name", ["input_norm", "0.q_proj.bias", "1.hidden_norm", "d2t"])
def test_a_tensor_the_spec_has_no_place_for_is_refused(make_spec, make_weights, name):
    spec = make_spec(layers=2)
    with pytest.raises(TensorUnknown, match=name):
        DraftHead(spec, make_weights(spec, 0) | {name: torch.ones(4)})


def test_a_wrong_shape_is_refused(make_spec, make_weights):
    spec = make_spec()
    weights = make_weights(spec, 0)
    with pytest.raises(TensorShape, match="fc is"):
        DraftHead(spec, weights | {"fc": weights["fc"].T})


def test_a_map_outside_the_vocabulary_is_refused(make_spec, make_weights):
    spec = make_spec(draft_vocab=3)
    with pytest.raises(TensorValue):
        DraftHead(spec, make_weights(spec, 0) | {"d2t": torch.tensor([0, 0, 9])})
