"""One rotary key: exact where it can be, the best there is where it cannot, and on one scale."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kconv.convert.attention.moments import factor
from kconv.convert.attention.rotary import Options, find_ladders, lengthen, split_rotary
from kconv.convert.attention.swap import attention_of, with_attention
from kconv.convert.attention.to_mha import assemble_mha
from kconv.convert.attention.to_mla import as_gqa
from kconv.drafters.attention import CausalContext
from kconv.drafters.rope import inverse_frequencies
from kconv.drafters.spec import Gqa, Linear, Rope, Yarn
from kconv.errors import LayoutCannot

YARN = Yarn(8.0, 64, beta_fast=8.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=0.5)


def inputs(head, rows: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1, rows, 2 * head.spec.hidden, generator=generator, dtype=torch.float64)


def covariance(head) -> torch.Tensor:
    size = 2 * head.spec.hidden
    mixed = torch.randn(size, size, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return factor(mixed @ mixed.T / size)


def even(head, length: int = 12) -> torch.Tensor:
    return torch.ones(head.spec.attention.heads, length, dtype=torch.float64)


def attend(head, x):
    return head.attend(0, x, torch.arange(x.shape[1]), CausalContext())


def through(head, ladder, options=None):
    """Return the head with one rotary key, its rank not cut."""
    dims, gqa = head.spec.attention, attention_of(head)
    split = split_rotary(gqa, ladder, covariance(head), even(head), options)
    value = gqa.weights["0.v_proj"].unflatten(0, (dims.kv_heads, dims.head_dim))
    output = gqa.weights["0.o_proj"].unflatten(1, (dims.heads, dims.head_dim))
    return split, with_attention(head, as_gqa(split, value, output, ladder))


@settings(max_examples=20)
@given(
    heads=st.integers(1, 4),
    pairs=st.integers(1, 4),
    more=st.integers(0, 3),
    rest=st.integers(0, 3),
    scaling=st.sampled_from([None, YARN]),
)
def test_exact_for_one_kv_head_and_all_its_pairs(make_head, gqa_spec, heads, pairs, more, rest, scaling):
    head_dim = 2 * pairs + rest
    rope = Rope(50.0, scaling, 2 * pairs / head_dim)
    head = make_head(replace(gqa_spec, attention=Gqa(heads, 1, head_dim), rope=rope))
    for ladder in find_ladders(rope, pairs, pairs + more):
        x = inputs(head)
        torch.testing.assert_close(attend(through(head, ladder)[1], x), attend(head, x), rtol=2e-4, atol=2e-4)


def test_exact_for_keys_that_differ_by_a_complex_factor_per_frequency(make_head, gqa_spec):
    dims = Gqa(4, 2, 8)
    head = make_head(replace(gqa_spec, attention=dims))
    key = head.weights["0.k_proj"].unflatten(0, (2, 8))
    turn = torch.polar(torch.tensor([0.5, 1.0, 2.0, 3.0]), torch.tensor([0.3, 1.0, 2.0, -1.0])).to(torch.complex128)
    turned = torch.complex(key[0, :4], key[0, 4:]) * turn[:, None]
    head.weights["0.k_proj"] = torch.cat([key[0], turned.real, turned.imag])
    [ladder] = find_ladders(head.spec.rope, 4, 4)
    split, other = through(head, ladder)
    x = inputs(head)
    torch.testing.assert_close(attend(other, x), attend(head, x), rtol=2e-4, atol=2e-4)
    assert split.key_nope.abs().max() < 1e-9 * split.key_rope.abs().max()
    # A real PCA cannot take back the turn.
    assert through(head, ladder, Options(is_complex=False))[0].key_nope.abs().max() > 0.01


def test_the_shared_key_is_the_best_of_rank_one(make_head, gqa_spec):
    """Eckart and Young: what the scores lose at one frequency is the tail of the weighted keys' singular values."""
    dims = Gqa(6, 3, 2)
    head = make_head(replace(gqa_spec, attention=dims))
    gqa, cholesky = attention_of(head), covariance(head)
    [ladder] = find_ladders(head.spec.rope, 1, 1)
    split = split_rotary(gqa, ladder, cholesky, even(head), Options(phases=False))

    def spread(rows):
        rows = rows.unflatten(0, (-1, 2)) @ cholesky
        return torch.complex(rows[:, 0], rows[:, 1])

    key, query = spread(gqa.weights["0.k_proj"]), spread(gqa.weights["0.q_proj"]) * 2**-0.5
    asked = query.abs().square().sum(-1).unflatten(0, (3, 2)).sum(1).sqrt()
    weighted = asked[:, None] * key
    rest = torch.complex(split.key_nope[:, 0] @ cholesky, split.key_nope[:, 1] @ cholesky)
    lost = (asked[:, None] * rest).abs().square().sum()
    assert float(lost) == pytest.approx(float(torch.linalg.svdvals(weighted)[1:].square().sum()), rel=1e-6)


def test_rebalancing_puts_keys_and_queries_on_one_scale_and_changes_nothing(make_head, gqa_spec):
    head = make_head(gqa_spec)
    head.weights["0.q_proj"] *= 100.0
    ladder = find_ladders(head.spec.rope, 4, 4)[0]
    balanced, other = through(head, ladder)
    x = inputs(head)
    plain, same = through(head, ladder, Options(rebalance=False))
    torch.testing.assert_close(attend(other, x), attend(same, x), rtol=1e-6, atol=1e-6)

    def sizes(split):
        query = split.query_rope.square().sum(-1).unflatten(1, (-1, 2)).sum(-1).mean(0)
        return query / split.key_rope.square().sum(-1).unflatten(0, (-1, 2)).sum(-1)

    torch.testing.assert_close(sizes(balanced), torch.ones(4, dtype=torch.float64))
    assert sizes(plain).log().abs().min() > 1.0


def test_a_pair_that_is_not_turned_takes_the_mean_phase(make_head, gqa_spec):
    """Where each head looks at one distance only, the mean phase is the phase, and nothing is lost."""
    head = make_head(replace(gqa_spec, attention=Gqa(2, 1, 4), rope=Rope(4.0)))
    gqa, ladder = attention_of(head), find_ladders(head.spec.rope, 2, 1)[0]
    assert (ladder.name, ladder.folded) == ("high", ((0,),))
    distances = torch.zeros(2, 8, dtype=torch.float64)
    distances[0, 3] = distances[1, 5] = 1.0
    split = split_rotary(gqa, ladder, covariance(head), distances)
    x = inputs(head, 1)[0, 0]
    slow = [1, 3]
    query = gqa.weights["0.q_proj"].unflatten(0, (2, 4))[:, slow] @ x / 2
    key = gqa.weights["0.k_proj"][slow] @ x
    for h, distance in ((0, 3), (1, 5)):
        angle = float(inverse_frequencies(head.spec.rope, 4)[1]) * -distance
        turned = torch.complex(key[0], key[1]) * torch.polar(torch.tensor(1.0), torch.tensor(angle))
        wanted = (torch.complex(query[h, 0], -query[h, 1]) * turned).real
        found = (split.query_nope[h, slow] @ x) @ (split.key_nope[0, slow] @ x)
        assert float(found) == pytest.approx(float(wanted), abs=1e-5)


def test_what_came_from_mla_goes_back_with_its_rotary_key(make_head, mla_spec):
    head = make_head(mla_spec)
    mla = attention_of(head)
    maps = [mla.weights["0.q_a_proj"], mla.weights["0.kv_a_proj_with_mqa"][:8]]
    mha = with_attention(head, assemble_mha(mla, *maps, head_dim=20))
    [ladder] = find_ladders(mha.spec.rope, 3, 3)
    split, other = through(mha, ladder)
    x = inputs(mha)
    torch.testing.assert_close(attend(other, x), attend(mha, x), rtol=2e-4, atol=2e-4)
    assert split.key_nope[:, :6].abs().max() < 1e-6


@given(pairs=st.integers(4, 32), used=st.integers(1, 20), scaling=st.sampled_from([None, YARN]))
def test_the_high_ladder_has_the_fastest_frequencies(pairs, used, scaling):
    # YaRN's ramp ends at the last pair that makes one turn; a ladder too short to reach it is bent.
    assume(scaling is None or math.ceil(pairs * math.log(64 / (2 * math.pi)) / math.log(10000.0)) < 2 * used)
    rope = Rope(10000.0, scaling)
    high = find_ladders(rope, pairs, used)[0]
    count = min(pairs, used)
    found = inverse_frequencies(high.rope, 2 * used)[:count]
    torch.testing.assert_close(found, inverse_frequencies(rope, 2 * pairs)[:count], rtol=2e-4, atol=1e-9)
    longer = lengthen(high.rope, used, used + 7)
    torch.testing.assert_close(inverse_frequencies(longer, 2 * (used + 7))[:count], found, rtol=2e-4, atol=1e-9)


def test_the_stride_ladder_has_every_second_frequency():
    high, stride = find_ladders(Rope(10000.0), 64, 32)
    assert (high.rope.theta, stride.rope.theta) == (pytest.approx(100.0), 10000.0)
    torch.testing.assert_close(
        inverse_frequencies(stride.rope, 64), inverse_frequencies(Rope(10000.0), 128)[::2], rtol=1e-5, atol=0
    )
    assert stride.folded[:2] == ((0, 1), (2, 3))


def test_scalings_that_mla_cannot_have_are_refused():
    with pytest.raises(LayoutCannot, match="Linear"):
        find_ladders(Rope(10000.0, Linear(2.0)), 4, 2)
