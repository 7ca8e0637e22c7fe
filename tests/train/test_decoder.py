import pytest
import torch
import torch.nn.functional as F
from modelopt.torch.speculative.plugins import hf_eagle
from modelopt.torch.speculative.plugins.modeling_eagle import EagleModule
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from kconv.train.decoder import GqaLayer, MlaLayer, served_decoders

HIDDEN = 24
TEXT = 7


def make_config(decoder: str, eps: float = 1e-6) -> DeepseekV3Config:
    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        rms_norm_eps=eps,
        max_position_embeddings=256,
    )
    config.mlp_bias = False
    config.update({
        "eagle_decoder_type": decoder,
        "use_aux_hidden_state": True,
        "use_last_layernorm": True,
        "has_lm_head": False,
        "draft_vocab_size": 64,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    })  # fmt: skip
    config._attn_implementation = "eager"
    return config


def randomize(module: torch.nn.Module) -> torch.nn.Module:
    """Give norms gains that are far from 1, which they are initialised to."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        random = torch.rand(parameter.shape, generator=generator)
        parameter.data = random * 3 if "norm" in name else (random - 0.5) * 0.6
    return module


def causal_mask() -> torch.Tensor:
    return torch.full((TEXT, TEXT), torch.finfo(torch.float32).min).triu(1)[None, None]


def rms_norm(x: torch.Tensor, norm: torch.nn.Module, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, eps)


def first_attention_input(layer_class: type, decoder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ModelOpt's module feeds its first attention, and what engines feed theirs."""
    module = randomize(EagleModule(make_config(decoder), layer_class))
    module._maybe_init_rope()
    first = module.layers[0]
    seen = []
    projection = first.self_attn.q_proj if decoder == "llama" else first.self_attn.q_a_proj
    projection.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    hidden, embedding = torch.randn(2, 2, TEXT, HIDDEN, generator=torch.Generator().manual_seed(1))
    module(hidden, embedding, attention_mask=causal_mask())
    norms = rms_norm(embedding, first.input_layernorm, 1e-6), rms_norm(hidden, first.hidden_norm, 1e-6)
    return seen[0], torch.cat(norms, dim=-1)


@pytest.mark.parametrize(("layer_class", "decoder"), [(GqaLayer, "llama"), (MlaLayer, "kimik2")])
def test_the_first_attention_is_fed_what_engines_feed_it(layer_class, decoder):
    fed, served = first_attention_input(layer_class, decoder)
    torch.testing.assert_close(fed, served)


def test_modelopt_alone_norms_the_hidden_state_twice():
    """If this fails, ModelOpt has been mended, and `_ServedOrder` can go."""
    fed, served = first_attention_input(LlamaDecoderLayer, "llama")
    torch.testing.assert_close(fed[..., :HIDDEN], served[..., :HIDDEN])
    assert (fed[..., HIDDEN:] - served[..., HIDDEN:]).abs().max() > 0.1


def test_a_gqa_layer_without_the_hook_is_transformers_own():
    config = make_config("llama")
    ours, theirs = GqaLayer(config, 0), LlamaDecoderLayer(config, 0)
    theirs.load_state_dict(randomize(ours).state_dict())
    x, positions = torch.randn(2, TEXT, HIDDEN), torch.arange(TEXT)[None]
    inputs = {
        "attention_mask": causal_mask(),
        "position_ids": positions,
        "position_embeddings": LlamaRotaryEmbedding(config)(x, positions),
    }
    torch.testing.assert_close(ours(x, **inputs), theirs(x, **inputs))


def test_an_mla_layer_without_the_hook_is_transformers_own():
    config = make_config("kimik2", eps=1e-6)
    ours, theirs = MlaLayer(config, 0), DeepseekV3DecoderLayer(config, 0)
    theirs.load_state_dict(randomize(ours).state_dict())
    x, positions = torch.randn(2, TEXT, HIDDEN), torch.arange(3, TEXT + 3)[None]
    mask = causal_mask()
    expected = theirs(
        x,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=DeepseekV3RotaryEmbedding(config)(x, positions),
    )
    actual = ours(x, attention_mask=mask, position_ids=positions, position_embeddings=None)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.3])
def test_latent_norms_take_the_configs_eps(eps):
    layer = randomize(MlaLayer(make_config("kimik2", eps), 0))
    for norm, rank in ((layer.self_attn.q_a_layernorm, 12), (layer.self_attn.kv_a_layernorm, 16)):
        x = torch.randn(3, rank) * 1e-2
        torch.testing.assert_close(norm(x), rms_norm(x, norm, eps))


def test_frequencies_stay_exact_when_the_head_is_cast_or_moved():
    """Engines turn by float32 frequencies; in bf16 these would be off by radians within the context."""
    config = make_config("kimik2")
    layer = MlaLayer(config, 0).to(torch.bfloat16)
    exact = DeepseekV3RotaryEmbedding(config)
    assert layer.mlp.gate_proj.weight.dtype == torch.bfloat16
    assert not torch.equal(exact.inv_freq.bfloat16().float(), exact.inv_freq)  # else nothing is shown
    assert torch.equal(layer.rotary_emb.inv_freq, exact.inv_freq)
    x, positions = torch.zeros(1, 3, HIDDEN), torch.tensor([[0, 5, 200]])
    for ours, theirs in zip(layer.rotary_emb(x, positions), exact(x, positions), strict=True):
        assert torch.equal(ours, theirs)
    assert layer.to("meta").rotary_emb.inv_freq.device.type == "meta"


def test_the_patch_is_taken_back():
    before = hf_eagle._setup_kimi_k2_decoder, hf_eagle.LlamaDecoderLayer
    with served_decoders():
        assert hf_eagle._setup_kimi_k2_decoder() is MlaLayer
        assert hf_eagle.LlamaDecoderLayer is GqaLayer
    assert (hf_eagle._setup_kimi_k2_decoder, hf_eagle.LlamaDecoderLayer) == before


def test_the_patch_is_taken_back_after_a_fault():
    before = hf_eagle._setup_kimi_k2_decoder, hf_eagle.LlamaDecoderLayer
    with pytest.raises(RuntimeError, match="in between"), served_decoders():
        raise RuntimeError("in between")
    assert (hf_eagle._setup_kimi_k2_decoder, hf_eagle.LlamaDecoderLayer) == before
