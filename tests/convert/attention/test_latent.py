"""The shared latent: the best factor of its rank, a gauge that makes the norm harmless, zeros that change nothing."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.convert.attention.latents import factorize, fit_gauge, whiten
from kconv.convert.attention.moments import Moments, factor, root
from kconv.convert.attention.swap import Shape, attention_of, with_attention
from kconv.convert.attention.to_mha import Latent, gather, linearize
from kconv.convert.attention.to_mla import pad_mla
from kconv.drafters.attention import CausalContext
from kconv.drafters.spec import Mla, Rope, Yarn


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=20)
@given(blocks=st.integers(1, 3), dim=st.integers(1, 4), width=st.integers(2, 9), rank=st.integers(1, 9))
def test_no_factor_of_this_rank_is_nearer(blocks, dim, width, rank):
    rank = min(rank, blocks * dim, width)
    rows, mixed = random(blocks, dim, width), random(width, width, seed=1)
    spread = random(blocks, dim, dim, seed=2)
    square, inverse = root(spread @ spread.mT + torch.eye(dim, dtype=torch.float64))
    cholesky = factor(mixed @ mixed.T)
    found = factorize(rows, square, inverse, cholesky, rank)
    assert (found.down.shape, found.up.shape) == ((rank, width), (blocks * dim, rank))
    rest = (rows.flatten(0, 1) - found.up @ found.down).unflatten(0, (blocks, dim))
    lost = (square @ rest @ cholesky).square().sum()
    whole = torch.linalg.svdvals((square @ rows @ cholesky).flatten(0, 1)).square()
    assert float(lost) == pytest.approx(float(whole[rank:].sum()), rel=1e-6, abs=1e-9 * float(whole.sum()))


@pytest.mark.parametrize("shared", [0, 1, 1e3, 1e5])
def test_large_factors_are_as_near_as_whole_ones(monkeypatch, shared):
    """However much all tokens have in common: most of the passes are in fp32."""
    rows = random(8, 6, 40) * torch.linspace(1, 0.01, 40).double()
    eye = torch.eye(6, dtype=torch.float64).expand(8, 6, 6)
    mean = shared * random(40, seed=1)
    cholesky = factor(torch.eye(40, dtype=torch.float64) + mean.outer(mean))
    exact = factorize(rows, eye, eye, cholesky, 5)
    monkeypatch.setattr("kconv.convert.attention.latents.WHOLE", 0)
    near = factorize(rows, eye, eye, cholesky, 5)
    left = [(rows.flatten(0, 1) - one.up @ one.down) @ cholesky for one in (near, exact)]
    # Rounding of fp64 is relative to the largest direction.
    torch.testing.assert_close(*(one.square().sum() for one in left), rtol=1e-6, atol=1e-12 * (1 + shared**2))


def test_a_gauge_that_exists_is_found():
    """Latents that lie on an ellipsoid: one basis makes all of them equally long, and whitening does not find it."""
    directions = F.normalize(random(20000, 6) * torch.tensor([4.0, 2, 1, 1, 1, 1]).double(), dim=-1)
    latents = directions @ torch.diag(torch.tensor([5.0, 3, 1, 0.5, 2, 1]).double()) @ random(6, 6, seed=5)
    fitted, unseen = latents[:15000], latents[15000:]
    white = fit_gauge(fitted, unseen, ("white",))
    sphere = fit_gauge(fitted, unseen)
    assert white.variation > 0.1 > 0.03 > sphere.variation
    assert sphere.before > 0.3
    size = F.linear(fitted, sphere.matrix).square().mean()
    assert float(size) == pytest.approx(1.0)
    # The basis is free: what is behind it undoes it.
    assert torch.linalg.cond(sphere.matrix) < 1e4


def test_a_wide_gauge_is_as_good_as_one_in_fp64(monkeypatch):
    directions = F.normalize(random(12000, 16) * torch.linspace(4, 1, 16).double(), dim=-1)
    latents = directions @ random(16, 16, seed=5)
    fitted, unseen = latents[:8000], latents[8000:]
    exact = fit_gauge(fitted, unseen)
    monkeypatch.setattr("kconv.convert.attention.latents.WIDE", 0)
    wide = fit_gauge(fitted, unseen)
    assert wide.matrix.dtype == torch.float64
    assert wide.before == exact.before > 10 * exact.variation
    assert wide.variation == pytest.approx(exact.variation, rel=1e-3)


def test_what_bf16_rounds_off_a_latent_stays_as_small_behind_its_gauge():
    """Directions that few tokens have much of are made small by the gauge, and large again behind it."""
    latents = random(20000, 16)
    latents[:, :4] *= torch.exp(2.5 * random(20000, 4, seed=1))
    latents = latents @ random(16, 16, seed=5)
    gauge, white = fit_gauge(latents[:15000], latents[15000:]), whiten(latents)

    def lost(matrix: torch.Tensor) -> float:
        stored = F.linear(latents, matrix)
        apart = F.linear(stored.bfloat16().double() - stored, torch.linalg.inv(matrix))
        return float(F.linear(apart, white).norm() / F.linear(latents, white).norm())

    # bf16 rounds by 2^-9 at the most. The same gauge in another rotation gives the same lengths, and loses more.
    assert lost(gauge.matrix) < 2**-9
    rotation = torch.linalg.qr(random(16, 16, seed=9)).Q
    assert lost(rotation @ gauge.matrix) > 2 * lost(gauge.matrix)


def test_whitening_makes_normal_latents_as_even_as_theory_says():
    """The length of r independent normal entries varies by 1 / sqrt(2 r)."""
    latents = random(40000, 32) @ random(32, 32, seed=6)
    lengths = F.linear(latents, whiten(latents)).norm(dim=-1)
    assert float(lengths.std() / lengths.mean()) == pytest.approx(1 / 8, rel=0.05)


@settings(max_examples=15)
@given(latent=st.integers(1, 7), pairs=st.integers(1, 3), scaling=st.sampled_from([None, Yarn(8.0, 64, 8.0)]))
def test_zeros_up_to_an_engines_dims_change_nothing(make_head, mla_spec, latent, pairs, scaling):
    dims = Mla(2, 5, latent, 3, 2 * pairs, 4)
    head = make_head(replace(mla_spec, attention=dims, rope=Rope(50.0, scaling)))
    # Small enough for the norm's epsilon to matter.
    head.weights["0.kv_a_proj_with_mqa"][:latent] *= 1e-3
    padded = with_attention(head, pad_mla(attention_of(head), Shape(kv_lora_rank=16, qk_rope_head_dim=8)))
    assert padded.spec.attention == replace(dims, kv_lora_rank=16, qk_rope_head_dim=8)
    x, positions = random(1, 9, 2 * head.spec.hidden, seed=7), torch.arange(9) * 3
    torch.testing.assert_close(
        padded.attend(0, x, positions, CausalContext()), head.attend(0, x, positions, CausalContext()),
        rtol=2e-4, atol=2e-4,
    )  # fmt: skip


def test_moments_in_parts_are_least_squares():
    x, y = random(200, 5), random(200, 3, seed=1)
    moments = Moments(5, 3)
    for rows, wanted in zip(x.split(30), y.split(30), strict=True):
        moments.add(rows.float().double(), wanted)
    expected = torch.linalg.lstsq(x, y).solution.T
    zero = torch.zeros(3, 5, dtype=torch.float64)
    torch.testing.assert_close(moments.solve(zero, 0.0), expected, rtol=1e-4, atol=1e-5)
    prior = random(3, 5, seed=2)
    torch.testing.assert_close(moments.solve(prior, 1e9), prior, rtol=1e-6, atol=1e-6)
    assert moments.rows == 200


def test_moments_of_rows_that_share_a_mean_are_solved_to_the_last_ridge():
    """As of a wide attention's inputs: one direction holds nearly all. In fp32 their sum has no Cholesky factor."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 400, generator=generator) * torch.logspace(0, -5, 400) + 100.0
    moments = Moments(400, 2)
    for rows in x.split(64):
        moments.add(rows, rows[:, :2] - 100.0)
    single = (x.T @ x) / len(x)
    assert torch.linalg.cholesky_ex(single + 1e-7 * single.diagonal().mean() * torch.eye(400)).info > 0
    mean = moments.mean()
    lower = factor(mean, floor=1e-12)
    torch.testing.assert_close(lower @ lower.T, x.double().T @ x.double() / len(x), rtol=1e-9, atol=1e-7)


def test_moments_are_solved_where_they_are():
    """A device that only knows shapes: anything made elsewhere could not be added to it."""
    moments = Moments(5, 3, device="meta")
    moments.add(torch.empty(7, 5, device="meta"), torch.empty(7, 3, device="meta"))
    assert moments.solve(torch.empty(3, 5, device="meta"), 0.1).device.type == "meta"
    assert factor(moments.mean()).shape == (5, 5)


def test_a_norm_of_constant_length_is_found_whole():
    down, gain = random(4, 9), 1.0 + 0.2 * random(4, seed=1)
    c = 2.0 * F.normalize(random(500, 4, seed=2), dim=-1)
    x = c @ torch.linalg.pinv(down).T
    latent = Latent(down, gain, 1e-6)
    [moments] = gather(x[:400].split(64), [latent])
    found = linearize(latent, moments, [x[400:]])
    assert found.error < 1e-3 and found.constant == pytest.approx(1.0, rel=1e-3)


def test_least_squares_takes_up_what_the_constant_cannot():
    """A latent whose length goes with one input: s * g * W cannot follow it, a linear map partly can."""
    down, gain = random(6, 12), torch.ones(6, dtype=torch.float64)
    down[0, :] = 0.0
    down[0, 0] = 3.0
    x = random(4000, 12, seed=3)
    x[:, 0] = 2.0 + 0.8 * x[:, 0]
    latent = Latent(down, gain, 1e-6)
    [moments] = gather(x[:3000].split(500), [latent])
    constant = linearize(latent, moments, [x[3000:]], ridges=())
    fitted = linearize(latent, moments, [x[3000:]])
    assert constant.error == constant.constant_error
    assert fitted.error < 0.92 * constant.error
