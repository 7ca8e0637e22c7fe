"""What a conversion is calibrated on: parts that do not overlap, and refusals that name the figure."""

from dataclasses import replace

import pytest
import torch

from kconv.errors import CalibrationInvalid
from kconv.measure.batches import STEPS, check_amount, check_calibration, check_windows, digest_rows
from kconv.measure.trace import trace


def test_no_batch_is_in_two_parts_and_each_is_in_one(make_calibration, gqa_spec):
    calibration = make_calibration(gqa_spec, batches=23)
    parts = [calibration.indices(part) for part in ("fit", "choose", "held-out")]
    assert sorted(i for part in parts for i in part) == list(range(23))
    assert [len(part) for part in parts] == [19, 2, 2]


def test_rows_are_those_that_are_traced(make_head, make_calibration, gqa_spec):
    head, calibration = make_head(gqa_spec), make_calibration(gqa_spec, batches=12)
    traced = list(trace(head, calibration.part("fit")))
    assert check_calibration(calibration, gqa_spec) == sum(len(step.rows) for step in traced)
    assert [step.is_first for step in traced] == [True, False, False] * 10
    assert [int(step.positions[0]) for step in traced[:3]] == [0, 1, 2]


def test_too_few_rows_are_refused_with_what_would_do(make_calibration, gqa_spec):
    with pytest.raises(
        CalibrationInvalid, match=r"48 rows are too few to fit 32 attention inputs; 128 are needed"
    ) as fault:
        check_calibration(make_calibration(gqa_spec, batches=10, rows=1, length=6), gqa_spec)
    assert "54 tokens" in fault.value.fix


def test_enough_rows_in_too_few_batches_leave_nothing_to_measure_on(make_calibration, gqa_spec):
    with pytest.raises(CalibrationInvalid, match="which gives 0 and 0 texts"):
        check_calibration(make_calibration(gqa_spec, batches=4, rows=8), gqa_spec)


@pytest.mark.parametrize("other", [{"target_hidden": 14}, {"captured": (1, 3)}, {"vocab": 29, "draft_vocab": 29}])
def test_states_of_another_target_are_refused(make_calibration, gqa_spec, other):
    calibration = make_calibration(replace(gqa_spec, **other))
    with pytest.raises(CalibrationInvalid, match=r"the head reads 3 layers of 12, 36 in all"):
        check_calibration(calibration, gqa_spec)


@pytest.mark.parametrize("which", ["captured", "hidden"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_no_numbers_are_refused_wherever_they_stand(make_calibration, gqa_spec, which, value):
    calibration = make_calibration(gqa_spec)
    getattr(calibration.batches[9], which)[2, 5, 7] = value
    with pytest.raises(CalibrationInvalid, match="NaN or Inf") as fault:
        check_calibration(calibration, gqa_spec)
    assert fault.value.where == "random states, batch 9"


def test_text_in_other_tokens_is_refused(make_calibration, gqa_spec):
    calibration = make_calibration(gqa_spec)
    calibration.batches[12].tokens[1, 3] = gqa_spec.vocab
    with pytest.raises(CalibrationInvalid, match="token ids from 0 to 23, but the head's vocabulary has 23"):
        check_calibration(calibration, gqa_spec)


def test_a_text_without_a_draft_is_refused(make_calibration, gqa_spec):
    calibration = make_calibration(gqa_spec)
    short = make_calibration(gqa_spec, batches=1, length=STEPS + 1).batches[0]
    batches = [*calibration.batches, short]
    with pytest.raises(CalibrationInvalid, match="4 texts of 4 tokens are too short for 3 draft steps"):
        check_calibration(replace(calibration, batches=batches), gqa_spec)


def test_what_leaves_nothing_to_choose_or_measure_on_is_refused_by_its_sizes(gqa_spec):
    shapes = [(8, 64)] * 3
    assert check_amount(shapes, ("fit", "choose", "held-out"), gqa_spec, "text") == 8 * 60 * 3
    for parts in (("fit", "choose", "choose"), ("fit", "held-out", "held-out")):
        with pytest.raises(CalibrationInvalid, match="too little text to keep a part of it"):
            check_amount(shapes, parts, gqa_spec, "text")
    with pytest.raises(CalibrationInvalid, match="gives 8 and 1 texts; 1 and 2 are needed"):
        check_amount([(8, 64), (8, 64), (1, 64)], ("fit", "choose", "held-out"), gqa_spec, "text")


@pytest.mark.parametrize(
    ("tokens", "prompts", "fix"),
    [
        ({"fit": 900}, 5, "Pass more prompts, 20 or more."),
        (
            {"choose": 160, "held-out": 160},
            10,
            "Pass more prompts, about 70, or texts of 80 tokens or fewer (--context).",
        ),
        (
            {"choose": 320, "held-out": 300},
            20,
            "Pass more prompts, about 70, or texts of 150 tokens or fewer (--context).",
        ),
        ({"fit": 900, "held-out": 9000}, 1000, "Pass longer prompts."),
        ({"choose": 1, "held-out": 2}, 10, "Pass longer prompts."),
    ],
)
def test_too_little_text_says_what_is_enough(tokens, prompts, fix):
    with pytest.raises(CalibrationInvalid, match="but need 512 and 1,024") as fault:
        check_windows(tokens, prompts, 512, "prompts.jsonl")
    assert fault.value.fix == fix


def test_batches_come_to_where_lm_head_lies(make_calibration, gqa_spec):
    """A device that only knows shapes."""
    calibration = make_calibration(gqa_spec)
    moved = replace(calibration, lm_head=calibration.lm_head.to("meta"))
    for part in ("fit", "choose", "held-out"):
        for batch in moved.part(part):
            assert {batch.tokens.device.type, batch.captured.device.type, batch.hidden.device.type} == {"meta"}
    assert calibration.batches[0].to(torch.device("cpu")).tokens is calibration.batches[0].tokens


def test_the_digest_is_of_the_tokens_in_their_order(make_calibration, gqa_spec):
    one, other = make_calibration(gqa_spec), make_calibration(gqa_spec)
    assert digest_rows(one) == digest_rows(other)
    turned = replace(other, batches=list(reversed(other.batches)))
    assert digest_rows(turned) != digest_rows(one)
    other.batches[3].tokens[0, 0] += 1
    assert digest_rows(other) != digest_rows(one)
    assert len(bytes.fromhex(digest_rows(one))) == 32


def test_the_targets_logits_are_those_of_its_lm_head(make_calibration, gqa_spec):
    calibration = make_calibration(gqa_spec)
    batch = calibration.batches[0]
    expected = batch.hidden[1, 2] @ calibration.lm_head[5]
    torch.testing.assert_close(calibration.logits(batch)[1, 2, 5], expected)
