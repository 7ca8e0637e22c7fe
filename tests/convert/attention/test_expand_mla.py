"""MLA as MHA is exact where the two norms are linear: there, the outputs of the two attentions are the same."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.convert.attention.convert import outline
from kconv.convert.attention.swap import attention_of, with_attention
from kconv.convert.attention.to_mha import assemble_mha
from kconv.drafters.attention import CausalContext
from kconv.drafters.rope import rotary_dims
from kconv.drafters.spec import Mla, Rope, Yarn
from kconv.drafters.yarn import cos_sin_factor
from kconv.errors import LayoutCannot

KIMI = Yarn(64.0, 4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)


def linear_inputs(head, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs `[1, rows, attn_in]` whose two latents all have one length each, and the maps that then hold."""
    dims, weights = head.spec.attention, head.weights
    downs = [weights["0.q_a_proj"], weights["0.kv_a_proj_with_mqa"][: dims.kv_lora_rank]]
    gains = [weights["0.q_a_layernorm"], weights["0.kv_a_layernorm"]]
    generator = torch.Generator().manual_seed(1)
    latents = [torch.randn(rows, len(down), generator=generator, dtype=torch.float64) for down in downs]
    latents = [3.0 * c / c.norm(dim=-1, keepdim=True) for c in latents]
    x = torch.cat(latents, dim=-1) @ torch.linalg.pinv(torch.cat(downs)).T
    rms = [(9.0 / len(down) + head.spec.eps) ** 0.5 for down in downs]
    maps = [gain[:, None] * down / size for gain, down, size in zip(gains, downs, rms, strict=True)]
    return x[None], *maps


def check_same(head, head_dim: int | None, positions: torch.Tensor) -> None:
    x, query_map, kv_map = linear_inputs(head, len(positions))
    mha = with_attention(head, assemble_mha(attention_of(head), query_map, kv_map, head_dim))
    assert mha.spec.kind == "mha"
    # cos and sin are computed in fp32, whatever the weights are in.
    expected = head.attend(0, x, positions, CausalContext())
    torch.testing.assert_close(mha.attend(0, x, positions, CausalContext()), expected, rtol=2e-4, atol=2e-4)


@settings(max_examples=25)
@given(
    heads=st.integers(1, 4),
    ranks=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    nope=st.integers(1, 6),
    rope=st.integers(1, 4).map(lambda pairs: 2 * pairs),
    v=st.integers(1, 9),
    more=st.integers(0, 5),
    yarn=st.sampled_from([
        None, KIMI, replace(KIMI, mscale=0.7, mscale_all_dim=1.2), replace(KIMI, mscale=None, mscale_all_dim=None),
        replace(KIMI, mscale=0.7, mscale_all_dim=None),
    ]),
)  # fmt: skip
def test_any_dims_and_scaling(make_head, mla_spec, heads, ranks, nope, rope, v, more, yarn):
    dims = Mla(heads, ranks[0], ranks[1], nope, rope, v)
    head = make_head(replace(mla_spec, attention=dims, rope=Rope(50000.0, yarn)))
    least = max(nope + rope, v)
    check_same(head, least + more, torch.tensor([0, 1, 2, 70, 71, 4000, 19999]))


@pytest.mark.parametrize("head_dim", [None, 192, 256, 392])  # 64 / 392 * 392 is less than 64 in floating point
def test_kimis_head_dims(make_head, mla_spec, head_dim):
    dims = Mla(2, 12, 16, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    head = make_head(replace(mla_spec, attention=dims, rope=Rope(50000.0, KIMI)))
    check_same(head, head_dim, torch.tensor([0, 1, 5, 500, 19999]))
    _, query_map, kv_map = linear_inputs(head, 3)
    mha = assemble_mha(attention_of(head), query_map, kv_map, head_dim)
    assert mha.dims.head_dim == (head_dim or 192)
    assert rotary_dims(mha.dims, mha.rope) == 64
    outlined = outline(head.spec, "mha", head_dim)
    assert (outlined.attention, outlined.rope) == (mha.dims, mha.rope)


def test_kimis_softmax_scale_goes_into_the_queries(make_head, mla_spec):
    """1.8133 is m(1) ** 2 at a factor of 32, (0.1 ln 32 + 1) ** 2; without mscale keys cos and sin would grow too."""
    yarn = replace(KIMI, factor=32.0)
    head = make_head(replace(mla_spec, attention=Mla(1, 3, 3, 4, 2, 4), rope=Rope(50000.0, yarn)))
    plain = make_head(replace(head.spec, rope=Rope(50000.0)))
    _, query_map, kv_map = linear_inputs(head, 1)
    scaled, unscaled = (assemble_mha(attention_of(one), query_map, kv_map) for one in (head, plain))
    quotient = scaled.weights["0.q_proj"] / unscaled.weights["0.q_proj"]
    assert quotient.min() == pytest.approx(1.8133, abs=1e-4) and quotient.max() == pytest.approx(1.8133, abs=1e-4)
    assert cos_sin_factor(scaled.rope, scaled.dims) == 1.0


def test_a_head_dim_that_is_too_small_is_refused(make_head, mla_spec):
    head = make_head(mla_spec)
    _, query_map, kv_map = linear_inputs(head, 1)
    with pytest.raises(LayoutCannot, match=r"8 \+ 6 dims"):
        assemble_mha(attention_of(head), query_map, kv_map, 13)
