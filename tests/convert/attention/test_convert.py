"""Both directions from end to end on small random heads, with their measures and refusals."""

from dataclasses import replace

import pytest
import torch

from kconv.convert.attention.convert import as_stored, fit_attention, outline
from kconv.convert.attention.swap import Shape, attention_of, with_attention
from kconv.convert.attention.to_mha import convert_to_mha
from kconv.convert.attention.to_mla import Choices, attention_error, convert_to_mla
from kconv.drafters.chain import draft_logits, overlap
from kconv.drafters.forward import DraftHead
from kconv.drafters.spec import Gqa, Mla, Rope, Yarn
from kconv.errors import CalibrationInvalid, ConversionInaccurate, LayoutCannot, TensorValue
from kconv.measure.compare import compare
from kconv.measure.retention import check_retention
from kconv.measure.trace import run_both

pytestmark = pytest.mark.usefixtures("short_gauges")
WIDE = Shape(latent=32, rotary=8, q_lora_rank=32, kv_lora_rank=40, qk_rope_head_dim=16)


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


def test_the_figures_are_those_of_the_chain(gqa, states):
    attention, _ = convert_to_mla(gqa, states, replace(WIDE, latent=4))
    other = with_attention(gqa, attention)
    figures = compare(gqa, other, states)
    means = []
    for head in (gqa, other):
        found = [
            1
            + overlap(draft_logits(head, batch.tokens, batch.captured, 3), states.logits(batch), head.target_ids)
            .cumprod(0)
            .sum(0)
            for batch in states.part("held-out")
        ]
        means.append(float(torch.cat(found).mean()))
    assert (figures.before, figures.after) == (pytest.approx(means[0]), pytest.approx(means[1]))
    assert figures.kept == pytest.approx(means[1] / means[0])
    assert figures.sequences == 8 and figures.positions == 8 * 20 and figures.context == 24
    assert 0 < figures.kept_error < 0.1
    drafts = [
        torch.cat([draft_logits(head, b.tokens, b.captured, 3).float() for b in states.part("held-out")], dim=1)
        for head in (gqa, other)
    ]
    p, q = (logits.log_softmax(-1).double() for logits in drafts)
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean((1, 2))
    assert figures.kl == pytest.approx(expected.tolist(), rel=1e-4)
    same = compare(gqa, gqa, states)
    assert (same.kept, same.kept_error, same.attention_error) == (1.0, 0.0, 0.0)


def test_a_loss_above_the_guard_is_refused_with_the_figure(gqa, states):
    figures = compare(gqa, gqa, states)
    check_retention(figures, 1.0)
    with pytest.raises(ConversionInaccurate, match=r"retains 90\.00% .* but 97\.00% is required") as fault:
        check_retention(replace(figures, kept=0.9), 0.97, "Do this instead.")
    assert fault.value.fix.startswith("Do this instead. Calibrating") and "--min-retention 0.90" in fault.value.fix
    for lost in (float("nan"), 0.0):
        with pytest.raises(ConversionInaccurate) as fault:
            check_retention(replace(figures, kept=lost), 0.97)
        assert fault.value.fix.startswith("Calibrating") and "--min-retention" not in fault.value.fix


@pytest.mark.parametrize("error", [0.04, float("nan")])
def test_a_share_that_is_less_certain_than_the_allowed_loss_is_refused(gqa, states, error):
    figures = replace(compare(gqa, gqa, states), kept=0.99, kept_error=error)
    with pytest.raises(ConversionInaccurate, match=r"too uncertain to tell a loss of 3\.00%"):
        check_retention(figures, 0.97)
    check_retention(replace(figures, kept_error=0.029), 0.97)


def test_more_healing_is_named_where_healing_helped(gqa, states, monkeypatch):
    def refuse() -> str:
        with pytest.raises(ConversionInaccurate) as fault:
            fit_attention(gqa, "mla", states, dtype="F32", shape=replace(WIDE, rotary=4), steps=50, min_retention=1.5)
        return fault.value.fix

    monkeypatch.setattr(
        "kconv.convert.attention.convert.heal", lambda head, start, *_, **__: DraftHead(start.spec, start.weights)
    )
    monkeypatch.setattr("kconv.convert.attention.convert.train_alike", lambda head, *_, **__: head)
    assert refuse().startswith("Heal for more steps (--heal 250).")
    # As where its steps led away.
    monkeypatch.setattr("kconv.convert.attention.convert.heal", lambda head, start, *_, **__: start)
    assert "--heal" not in refuse()


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_end_to_end_in_both_directions(mla, gqa, states, dtype):
    mla, gqa = as_stored(mla, dtype), as_stored(gqa, dtype)
    there = fit_attention(gqa, "mla", states, dtype=dtype, shape=replace(WIDE, rotary=4), steps=3, min_retention=0.5)
    dims = there.head.spec.attention
    assert isinstance(dims, Mla) and (dims.kv_lora_rank, dims.qk_rope_head_dim) == (40, 16)
    assert {"0.q_b_proj", "fc", "0.o_proj"} <= there.slots and not {"lm_head", "embed_tokens"} & there.slots
    found = there.held_out
    assert there.heal_steps == 3 and found.trained is not None and found.greedy_trained is not None
    assert found.kept == pytest.approx(found.after / found.trained)
    assert found.gained == pytest.approx(found.after / found.before)
    back = fit_attention(mla, "mha", states, dtype=dtype, head_dim=20, steps=0, min_retention=0.5)
    assert back.head.spec.attention == Gqa(4, 4, 20)
    assert back.details["latent_norms"]["kv"]["error"] < 1
    assert back.held_out.trained is None and back.held_out.kept == pytest.approx(back.held_out.gained)
    assert back.slots == {"0.q_proj", "0.k_proj", "0.v_proj", "0.o_proj"}
    weight = back.head.weights["0.q_proj"]
    assert torch.equal(weight, weight.to(torch.bfloat16 if dtype == "BF16" else torch.float32).to(weight.dtype))


def test_what_has_no_place_is_refused_at_once(gqa_spec, mla_spec, make_head, states):
    assert outline(mla_spec, "mha", 20).attention == Gqa(4, 4, 20)
    with pytest.raises(LayoutCannot, match="already GQA"):
        outline(gqa_spec, "mha")
    with pytest.raises(LayoutCannot, match="already MLA"):
        outline(mla_spec, "mla")
    with pytest.raises(LayoutCannot, match="has 2 layers"):
        outline(replace(gqa_spec, layers=2), "mla")
    with pytest.raises(LayoutCannot, match="biases"):
        outline(replace(gqa_spec, attention=Gqa(4, 2, 8, bias=True)), "mla")
    # One pair of 64 has no ladder of 32 whose theta fp32 holds.
    with pytest.raises(LayoutCannot, match="theta of 1e\\+128"):
        outline(replace(gqa_spec, attention=Gqa(4, 2, 64), rope=Rope(10000.0, None, 2 / 64)), "mla")
    damaged = make_head(gqa_spec)
    damaged.weights["0.gate_proj"][3, 1] = float("nan")
    with pytest.raises(TensorValue, match=r"the head's .*gate_proj holds"):
        fit_attention(damaged, "mla", states, dtype="F32", shape=WIDE)
    with pytest.raises(CalibrationInvalid):
        fit_attention(make_head(gqa_spec), "mla", replace(states, batches=states.batches[:3]), dtype="F32", shape=WIDE)


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
