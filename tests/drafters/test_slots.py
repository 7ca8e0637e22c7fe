"""Slots: their shapes are the ones of transformers' own modules, and each head has the slots that its spec says."""

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from support.heads import GQA, KIMI_MHA, KIMI_MLA, MHA, MLA
from support.strategies import portable_specs
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from kconv.drafters.eagle3 import SLOTS
from kconv.drafters.slots import needs
from kconv.drafters.spec import Gqa, HeadSpec, Mla, Norms


def transformers_layer(spec: HeadSpec) -> dict[str, tuple[int, ...]]:
    """Return the parameter shapes of an ordinary decoder layer with a spec's dims, as transformers builds it."""
    dims = {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_attention_heads": spec.attention.heads,
    }
    with torch.device("meta"):
        if isinstance(spec.attention, Mla):
            ranks = {name: value for name, value in vars(spec.attention).items() if name != "heads"}
            config = DeepseekV3Config(
                **dims, **ranks, num_key_value_heads=spec.attention.heads, first_k_dense_replace=1, num_hidden_layers=1
            )
            layer = DeepseekV3DecoderLayer(config, 0)
        else:
            config = LlamaConfig(
                **dims,
                num_key_value_heads=spec.attention.kv_heads,
                head_dim=spec.attention.head_dim,
                attention_bias=spec.attention.bias,
                mlp_bias=spec.mlp_bias,
            )
            layer = LlamaDecoderLayer(config, 0)
    return {
        name.removeprefix("self_attn.").removeprefix("mlp.").removesuffix(".weight"): tuple(parameter.shape)
        for name, parameter in layer.named_parameters()
    }


def own_layer(spec: HeadSpec, layer: int) -> dict[str, tuple[int, ...]]:
    return {n.removeprefix(f"{layer}."): need.shape for n, need in needs(spec).items() if n.startswith(f"{layer}.")}


BIASED = replace(GQA, attention=Gqa(6, 2, 10, bias=True), mlp_bias=True)
UNEVEN = replace(MLA, attention=Mla(3, 5, 7, 11, 6, 13), hidden=17, intermediate=19)


@pytest.mark.parametrize("spec", [MLA, GQA, MHA, BIASED, UNEVEN, KIMI_MLA, KIMI_MHA])
def test_a_later_layer_is_transformers_own(spec):
    assert own_layer(replace(spec, layers=2), 1) == transformers_layer(spec)


READS_STATES = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")


@pytest.mark.parametrize("spec", [MLA, GQA, MHA, BIASED, UNEVEN, KIMI_MLA, KIMI_MHA])
def test_the_first_layer_reads_embedding_and_state_side_by_side(spec):
    wide = {
        name: (shape[0], 2 * shape[1]) if name in READS_STATES else shape
        for name, shape in transformers_layer(spec).items()
    }
    assert own_layer(spec, 0) == wide | {"hidden_norm": (spec.hidden,)}


def parameters(spec: HeadSpec, *, without: tuple[str, ...] = ()) -> int:
    return sum(prod(need.shape) for name, need in needs(spec).items() if name not in without)


def test_sizes_are_the_published_ones():
    # 3.68 GB of nvidia/Kimi-K2.6-Eagle3 (16 tensors), 6.03 GB of lightseekorg/kimi-k2.6-eagle3-mla, in bf16.
    assert parameters(KIMI_MLA, without=("embed_tokens",)) == 1_841_199_104
    assert parameters(KIMI_MLA) == 3_015_604_224
    assert parameters(KIMI_MHA) == 3_178_262_528
    assert len(needs(KIMI_MLA)) - 1 == 16


def test_outside_the_layers_widths_are_the_targets_where_they_face_the_target():
    spec = replace(GQA, target_hidden=56, captured=(1, 3, 5, 9), draft_vocab=40, norms=Norms(fc=True, before_fc=True))
    shapes = {name: need.shape for name, need in needs(spec).items() if not name[0].isdigit()}
    assert shapes == {
        "fc": (48, 4 * 56),
        **{f"fc_norm.{a}": (56,) for a in range(4)},
        "input_norm": (4 * 56,),
        "norm": (48,),
        "lm_head": (40, 48),
        "embed_tokens": (64, 48),
        "d2t": (40,),
        "t2d": (64,),
    }


def names(spec: HeadSpec) -> set[str]:
    return set(needs(spec))


def test_optional_slots_follow_their_flags():
    assert names(replace(GQA, fc_bias=True)) - names(GQA) == {"fc.bias"}
    assert names(replace(GQA, norms=Norms(before_fc=True))) - names(GQA) == {"input_norm"}
    assert names(replace(GQA, norms=Norms(fc=True))) - names(GQA) == {"fc_norm.0", "fc_norm.1", "fc_norm.2"}
    assert names(replace(GQA, draft_vocab=63)) - names(GQA) == {"d2t", "t2d"}
    assert names(replace(GQA, mlp_bias=True)) - names(GQA) == {"0.gate_proj.bias", "0.up_proj.bias", "0.down_proj.bias"}
    assert names(replace(GQA, norms=Norms(before_residual=True, output=True))) == names(GQA)


def absent(spec: HeadSpec) -> set[str]:
    """Return the slots that a head of this spec may come without."""
    return {name for name, need in needs(spec).items() if need.slot.absent_when(spec)}


def test_what_an_engine_takes_from_the_target_may_be_absent():
    assert absent(GQA) == {"lm_head", "embed_tokens"}
    assert absent(replace(GQA, target_hidden=56)) == set(), "the target's embedding and lm_head are of another width"
    assert absent(replace(GQA, draft_vocab=40)) == {"embed_tokens", "t2d"}, "the target's lm_head has other rows"


@settings(max_examples=60, deadline=None)
@given(portable_specs())
def test_every_layer_of_any_head_has_one_attention_one_mlp_and_its_norms(spec):
    found = needs(spec)
    assert all(dim > 0 for need in found.values() for dim in need.shape)
    for i in range(spec.layers):
        layer = own_layer(spec, i)
        kinds = {"q_proj": "o_proj", "q_a_proj": "kv_b_proj"}
        assert sum(name in layer for name in kinds) == 1
        assert ("hidden_norm" in layer) == (i == 0)
        assert layer["o_proj"][0] == layer["down_proj"][0] == spec.hidden
        assert layer["gate_proj"] == layer["up_proj"] == layer["down_proj"][::-1]


def test_the_table_names_each_slot_once():
    names = [slot.name for slot in SLOTS]
    assert len(names) == len(set(names))
