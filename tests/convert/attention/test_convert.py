"""Both directions from end to end on small random heads, with their measures, healing and refusals."""

from dataclasses import replace

import pytest
import torch

from kconv.convert.attention.assemble_mla import Shape
from kconv.convert.attention.convert import convert_attention, outline
from kconv.convert.attention.heal import ATTENTION, REST, distance, heal
from kconv.convert.attention.held_out import check_kept, compare
from kconv.convert.attention.plan import as_stored
from kconv.convert.attention.swap import attention_of, with_attention
from kconv.convert.attention.to_mha import convert_to_mha
from kconv.convert.attention.to_mla import Choices, attention_error, convert_to_mla
from kconv.convert.attention.trace import run_both, trace
from kconv.convert.attention.white import FLOOR, from_white, measure_spread, to_white
from kconv.errors import CalibrationInvalid, ConversionInaccurate, LayoutCannot
from kconv.head.chain import draft_logits, sampled_acceptance
from kconv.head.spec import Gqa, Mla, Rope, Yarn

WIDE = Shape(latent=32, rotary=8, q_lora_rank=32, kv_lora_rank=40, qk_rope_head_dim=16)


@pytest.fixture(autouse=True, scope="module")
def short_gauges():
    """A few entries need no 400 steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kconv.convert.attention.latent.GAUGE_STEPS", 40)
        patch.setattr("kconv.convert.attention.latent.GAUGE_BATCH", 512)
        yield


@pytest.fixture(scope="module")
def gqa(make_head, gqa_spec):
    return make_head(gqa_spec)


@pytest.fixture(scope="module")
def mla(make_head, mla_spec):
    return make_head(mla_spec)


@pytest.fixture(scope="module")
def states(make_calibration, gqa_spec):
    return make_calibration(gqa_spec)


def test_each_step_of_mla_to_mha_comes_nearer(mla, states):
    def error(**options):
        attention, linear = convert_to_mha(mla, states, **options)
        return attention_error(mla, with_attention(mla, attention), states, "held-out"), linear

    constant, fits = error(ridges=(), refit=False)
    refitted, _ = error(ridges=())
    squares, better = error(refit=False)
    whole, _ = error()
    assert constant > squares >= whole and constant > refitted
    assert all(better[name].error < fits[name].error for name in ("q", "kv"))


def test_gqa_with_room_for_all_of_it_is_kept_but_for_the_norms(gqa, states):
    """Latents as wide as the input lose nothing but what the norms and the one rotary key cost."""
    attention, found = convert_to_mla(gqa, states, WIDE)
    error = attention_error(gqa, with_attention(gqa, attention), states, "held-out")
    assert found.ladder == "high"
    assert error < found.ladder_errors["high"] + found.kv_gauge.variation + found.query_gauge.variation
    assert attention.dims == Mla(4, 32, 32, 8, 8, 8)


def test_less_room_costs_more(gqa, states):
    errors = [
        attention_error(
            gqa, with_attention(gqa, convert_to_mla(gqa, states, replace(WIDE, latent=r))[0]), states, "fit"
        )
        for r in (2, 8, 24)
    ]
    assert errors[0] > errors[1] > errors[2]


def test_each_refinement_of_gqa_to_mla_can_be_left_out(gqa, states):
    small = replace(WIDE, latent=12, rotary=4)

    def error(**changes):
        attention, _ = convert_to_mla(gqa, states, small, Choices(**changes))
        return attention_error(gqa, with_attention(gqa, attention), states, "fit")

    whole = error()
    assert error(refit_output=False) > whole
    assert error(refit_output=False, refit_latents=False) > error(refit_output=False)
    assert error(gauges=("none",), refit_latents=False, refit_output=False) > error(
        gauges=("white",), refit_latents=False, refit_output=False
    )


def test_both_ladders_are_tried_and_the_nearer_kept(make_head, make_calibration, gqa_spec):
    """A head that hardly turns its keys but in its slow pairs is served best by the ladder that has slow ones."""
    head = make_head(replace(gqa_spec, attention=Gqa(4, 1, 8), rope=Rope(3.0)))
    for name in ("0.q_proj", "0.k_proj"):
        rows = head.weights[name].unflatten(0, (-1, 8))
        rows[:, [0, 1, 3, 4, 5, 7]] *= 0.01
        rows[:, [2, 6]] *= 6.0
    states = make_calibration(head.spec)
    _, found = convert_to_mla(head, states, replace(WIDE, rotary=4))
    assert set(found.ladder_errors) == {"high", "stride"}
    assert found.ladder == min(found.ladder_errors, key=lambda name: found.ladder_errors[name]) == "stride"


def test_what_is_watched_is_what_the_head_computes(gqa, states):
    """The pairs that o_proj is fitted on: heads' outputs through o_proj are the attention's output."""
    for pair in run_both(gqa, gqa, states.part("held-out")):
        torch.testing.assert_close(pair.original, pair.output)
        torch.testing.assert_close(pair.heads @ gqa.weights["0.o_proj"].T, pair.output)


def test_healing_comes_nearer_and_moves_only_what_it_is_told(gqa, states):
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
    with torch.no_grad():
        off = [
            sum(float(distance(gqa, head, batch)) for batch in states.part("held-out")) for head in (start, alone, more)
        ]
    assert off[0] > off[1] > off[2]
    assert len(losses) == 30
    assert heal(gqa, start, states, 0) is start


def test_healing_does_not_undo_a_start_that_is_whole(gqa, states):
    with torch.no_grad():
        assert float(distance(gqa, gqa, states.batches[0])) == pytest.approx(0.0, abs=1e-12)
    healed = heal(gqa, gqa, states, 5)
    assert compare(gqa, healed, states).kept == pytest.approx(1.0, abs=1e-3)


def test_healing_that_leads_away_gives_the_start_back_and_is_not_recorded(gqa, states, monkeypatch):
    gqa = as_stored(gqa, "F32")
    attention, _ = convert_to_mla(gqa, states, WIDE)
    start = with_attention(gqa, attention)
    assert heal(gqa, start, states, 3, rate=100.0) is start
    monkeypatch.setattr("kconv.convert.attention.convert.heal", lambda head, start, *_, **__: start)
    said = []
    made = convert_attention(gqa, "mla", states, dtype="F32", shape=WIDE, steps=3, keep=0.5, say=said.append)
    assert made.heal_steps == 0 and "no healing" in made.method
    assert not made.slots & {"fc", "norm"}
    assert any("did not come nearer" in line for line in said)


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
    healed = heal(mla, with_attention(mla, attention), states, 3)
    value = healed.weights["0.v_proj"].unflatten(0, (4, 20))
    assert value[:, :7].abs().min() > 0
    assert torch.equal(value[:, 7:], torch.zeros_like(value[:, 7:]))


def test_the_figures_are_those_of_the_chain(gqa, states):
    attention, _ = convert_to_mla(gqa, states, replace(WIDE, latent=4))
    other = with_attention(gqa, attention)
    figures = compare(gqa, other, states)
    lengths = []
    for head in (gqa, other):
        found = [
            sampled_acceptance(
                draft_logits(head, batch.tokens, batch.captured, 3), states.logits(batch), head.target_ids
            )[1]
            for batch in states.part("held-out")
        ]
        lengths.append(float(torch.cat(found).mean()))
    assert (figures.before, figures.after) == (pytest.approx(lengths[0]), pytest.approx(lengths[1]))
    assert figures.kept == pytest.approx(lengths[1] / lengths[0])
    assert figures.sequences == 8 and figures.positions == 8 * 20 and figures.context == 24
    assert 0 < figures.kept_error < 0.1 and all(kl > 0 for kl in figures.kl)
    same = compare(gqa, gqa, states)
    assert (same.kept, same.kept_error, same.attention_error) == (1.0, 0.0, 0.0)


def test_a_loss_above_the_guard_is_refused_with_the_figure(gqa, states):
    figures = compare(gqa, gqa, states)
    check_kept(figures, 1.0, 0)
    with pytest.raises(ConversionInaccurate, match=r"keeps 90\.00% .* and 97\.00% was asked for") as fault:
        check_kept(replace(figures, kept=0.9), 0.97, 50)
    assert "--heal 250" in fault.value.fix
    with pytest.raises(ConversionInaccurate):
        check_kept(replace(figures, kept=float("nan")), 0.97, 50)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_end_to_end_in_both_directions(mla, gqa, states, dtype):
    mla, gqa = as_stored(mla, dtype), as_stored(gqa, dtype)
    there = convert_attention(gqa, "mla", states, dtype=dtype, shape=replace(WIDE, rotary=4), steps=3, keep=0.5)
    dims = there.head.spec.attention
    assert isinstance(dims, Mla) and (dims.kv_lora_rank, dims.qk_rope_head_dim) == (40, 16)
    assert {"0.q_b_proj", "fc", "0.o_proj"} <= there.slots and not {"lm_head", "embed_tokens"} & there.slots
    back = convert_attention(mla, "mha", states, dtype=dtype, head_dim=20, steps=0, keep=0.5)
    assert back.head.spec.attention == Gqa(4, 4, 20)
    assert back.details["latent_norms"]["kv"]["error"] < 1
    assert back.slots == {"0.q_proj", "0.k_proj", "0.v_proj", "0.o_proj"}
    weight = back.head.weights["0.q_proj"]
    assert torch.equal(weight, weight.to(torch.bfloat16 if dtype == "BF16" else torch.float32).to(weight.dtype))


def test_what_has_no_place_is_refused_at_once(gqa_spec, mla_spec, make_head, states):
    assert outline(mla_spec, "mha", 20).attention == Gqa(4, 4, 20)
    with pytest.raises(LayoutCannot, match="is GQA already"):
        outline(gqa_spec, "mha")
    with pytest.raises(LayoutCannot, match="is MLA already"):
        outline(mla_spec, "mla")
    with pytest.raises(LayoutCannot, match="has 2 layers"):
        outline(replace(gqa_spec, layers=2), "mla")
    with pytest.raises(LayoutCannot, match="biases"):
        outline(replace(gqa_spec, attention=Gqa(4, 2, 8, bias=True)), "mla")
    with pytest.raises(CalibrationInvalid):
        convert_attention(
            make_head(gqa_spec), "mla", replace(states, batches=states.batches[:3]), dtype="F32", shape=WIDE
        )


def test_yarn_in_both_directions(make_head, mla_spec, gqa_spec, states):
    """The softmax's scale and that of cos and sin differ between the two; with room for all, scores are kept."""
    yarn = Yarn(8.0, 16, beta_fast=8.0, beta_slow=1.0, mscale=0.5, mscale_all_dim=1.0)
    head = make_head(replace(gqa_spec, attention=Gqa(2, 1, 8), rope=Rope(100.0, yarn)))
    attention, found = convert_to_mla(head, states, WIDE)
    assert found.ladder_errors["high"] < 1e-4
    plain = replace(attention, rope=Rope(attention.rope.theta))
    errors = [attention_error(head, with_attention(head, one), states, "fit") for one in (attention, plain)]
    assert errors[0] < found.kv_gauge.variation + found.query_gauge.variation
    assert errors[1] > 1.5 * errors[0]
    assert attention_of(head).rope.scaling == attention.rope.scaling
