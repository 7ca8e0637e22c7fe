"""Healing: it makes the loss smaller, or gives the start back; the coordinates it moves in, and the zeros it leaves."""

from dataclasses import replace

import pytest
import torch

from kconv.convert.attention.convert import as_stored, fit_attention
from kconv.convert.attention.heal import (
    ATTENTION,
    FLOOR,
    RATE,
    REST,
    descend,
    from_white,
    heal,
    in_order,
    loss_by_piece,
    measure_spread,
    take_tokens,
    to_white,
    train_alike,
)
from kconv.convert.attention.swap import Shape, with_attention
from kconv.convert.attention.to_mha import convert_to_mha
from kconv.convert.attention.to_mla import convert_to_mla
from kconv.errors import ConversionInaccurate
from kconv.measure.batches import Calibration
from kconv.measure.trace import trace

pytestmark = pytest.mark.usefixtures("short_gauges")
WIDE = Shape(latent=32, rotary=8, q_lora_rank=32, kv_lora_rank=40, qk_rope_head_dim=16)


@torch.no_grad()
def loss_on(original, head, calibration, part, kind="total") -> float:
    found = [
        sum(float(getattr(one, kind)) for one in loss_by_piece(original, head, calibration, batch))
        for batch in calibration.part(part)
    ]
    return sum(found) / len(found)


def test_healing_makes_the_loss_smaller_and_moves_only_what_it_is_told(gqa, states):
    attention, _ = convert_to_mla(gqa, states, replace(WIDE, latent=4))
    start = with_attention(gqa, attention)
    losses = []
    alone = heal(gqa, start, states, 30, slots=ATTENTION, progress=lambda done, of, loss: losses.append(loss))
    more = heal(gqa, start, states, 30)
    moved = {name for name in start.weights if not torch.equal(alone.weights[name], start.weights[name])}
    assert moved and moved <= set(ATTENTION)
    assert (
        {"fc", "norm", "0.gate_proj"}
        <= {name for name in start.weights if not torch.equal(more.weights[name], start.weights[name])}
        <= {*ATTENTION, *REST}
    )
    off = [loss_on(gqa, head, states, "held-out") for head in (start, alone, more)]
    assert off[0] > off[1] > off[2]
    for kind in ("apart", "refused"):
        assert loss_on(gqa, more, states, "held-out", kind) < loss_on(gqa, start, states, "held-out", kind)
    assert len(losses) == 30
    assert heal(gqa, start, states, 0) is start


def test_the_original_is_trained_by_the_steps_that_heal_its_conversion(gqa, states):
    start = with_attention(gqa, convert_to_mla(gqa, states, replace(WIDE, latent=4))[0])
    trained = train_alike(gqa, start, states, 10)
    assert trained.spec == gqa.spec
    assert loss_on(gqa, trained, states, "choose", "refused") <= loss_on(gqa, gqa, states, "choose", "refused")
    # Without a distance to heal the rate is zero, and the original stays as it is.
    same = train_alike(gqa, gqa, states, 2)
    for name, weight in same.weights.items():
        torch.testing.assert_close(weight, gqa.weights[name])


def test_healing_does_not_undo_a_start_that_is_whole(gqa, states):
    assert loss_on(gqa, gqa, states, "fit", "apart") == pytest.approx(0.0, abs=1e-12)
    assert heal(gqa, gqa, states, 5) is gqa
    # At the full rate, which is for a start at a distance of 1, it stays near; at ten times that it would not.
    ended = [descend(gqa, gqa, states, 5, (*ATTENTION, *REST), rate) for rate in (RATE, 10 * RATE)]
    near, far = (loss_on(gqa, head, states, "choose", "apart") for head in ended)
    assert 0 < near < 0.05 < far


def test_a_step_reads_as_many_batches_as_make_enough_tokens(gqa, states, monkeypatch):
    read = []
    batch = Calibration.batch
    monkeypatch.setattr(Calibration, "batch", lambda self, index: read.append(index) or batch(self, index))
    tokens = states.batches[0].tokens.numel()
    for wanted, batches in ((1, 1), (tokens, 1), (tokens + 1, 2), (3 * tokens, 3)):
        monkeypatch.setattr("kconv.convert.attention.heal.STEP_TOKENS", wanted)
        texts = in_order(states, torch.Generator().manual_seed(0))
        assert len(take_tokens(texts)) == batches
    # Each pass reads every fitted batch once, in an order of its own.
    read.clear()
    fitted = states.indices("fit")
    texts = in_order(states, torch.Generator().manual_seed(0))
    for _ in range(2 * len(fitted)):
        next(texts)
    first, second = read[: len(fitted)], read[len(fitted) :]
    assert sorted(first) == sorted(second) == fitted
    assert first != second


def test_healing_that_leads_away_gives_the_start_back_and_is_not_recorded(gqa, states, monkeypatch):
    gqa = as_stored(gqa, "F32")
    attention, _ = convert_to_mla(gqa, states, WIDE)
    start = with_attention(gqa, attention)
    assert heal(gqa, start, states, 3, rate=100.0) is start
    monkeypatch.setattr("kconv.convert.attention.convert.heal", lambda head, start, *_, **__: start)
    said = []
    made = fit_attention(gqa, "mla", states, dtype="F32", shape=WIDE, steps=3, min_retention=0.5, say=said.append)
    assert made.heal_steps == 0 and "no healing" in made.method
    assert not made.slots & {"fc", "norm"}
    assert any("healing gained nothing" in line for line in said)
    with pytest.raises(ConversionInaccurate) as fault:
        fit_attention(gqa, "mla", states, dtype="F32", shape=replace(WIDE, latent=2), steps=3, min_retention=1.0)
    assert "--heal" not in fault.value.fix


def test_the_spread_of_a_matrixs_inputs_is_that_of_what_the_head_puts_into_it(gqa, states):
    spread = measure_spread(gqa, ["0.k_proj", "fc"], states.batches[:3])
    rows = torch.cat([step.rows for step in trace(gqa, states.batches[:3])])
    second = rows.T @ rows / len(rows)
    floor = FLOOR * second.diagonal().mean()
    expected = second + floor * torch.eye(len(second))
    torch.testing.assert_close(spread["0.k_proj"].factor @ spread["0.k_proj"].factor.T, expected)
    weight = gqa.weights["0.k_proj"]
    white = to_white(weight, spread["0.k_proj"])
    # The length of its rows is the size of what it gives.
    given = (rows @ weight.T).square().mean(0)
    torch.testing.assert_close(white.square().sum(1), given + floor * weight.square().sum(1))
    assert spread["0.k_proj"].size == pytest.approx(float((given.mean() / weight.shape[1]).sqrt()))
    torch.testing.assert_close(from_white(white, spread["0.k_proj"]), weight)
    assert set(spread) == {"0.k_proj", "fc"}


def test_zeros_that_fill_up_a_head_stay_zeros_under_healing(mla, states):
    attention, _ = convert_to_mha(mla, states, head_dim=20)
    start = with_attention(mla, attention)
    healed = descend(mla, start, states, 3, ATTENTION, RATE)
    value, output = healed.weights["0.v_proj"].unflatten(0, (4, 20)), healed.weights["0.o_proj"].unflatten(1, (4, 20))
    moved = [
        (healed.weights[name] - start.weights[name]).unflatten(dim, (4, 20)).narrow(dim + 1, 0, 7)
        for name, dim in (("0.v_proj", 0), ("0.o_proj", 1))
    ]
    assert all(part.abs().min() > 0 for part in moved)
    assert torch.equal(value[:, 7:], torch.zeros_like(value[:, 7:]))
    assert torch.equal(output[..., 7:], torch.zeros_like(output[..., 7:]))
