"""What lm_eval measured of a quantized target is held against its source's, if both were measured alike."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest

from kconv.cards.target_card import MAX_FALL, lost
from kconv.errors import ComparisonUnfit, ResultsInvalid
from kconv.measure.figures import AccuracyFigures, Figures, NoiseFigures, PerplexityFigures
from kconv.validate.accuracy import compare_accuracy, judge_accuracy
from kconv.validate.report import Report

# Written by lm_eval 0.4.13 itself: --model dummy --num_fewshot 0 --limit 30, over two tasks of sums and a group of two
# more; without the machine's description and the tasks' own files.
WRITTEN = json.loads((Path(__file__).parent / "lm_eval.json").read_text())


@pytest.fixture
def write(tmp_path):
    """Return a function that writes results with values changed by their path, and returns the file."""

    def write(name: str, changes: dict[tuple[str, ...], object] | None = None) -> Path:
        results = copy.deepcopy(WRITTEN)
        for (*path, last), value in ({("model_source",): name} | (changes or {})).items():
            place = results
            for key in path:
                place = place[key]
            if value is None:
                place.pop(last)
            else:
                place[last] = value
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(results))
        return file

    return write


def test_what_lm_eval_wrote_is_read(write):
    changes = {("results", "sums_choice", "acc,none"): 0.3, ("results", "sums_choice", "acc_stderr,none"): "N/A"}
    rows = compare_accuracy([write("output", changes)], [write("source")])
    assert [(row.task, row.metric) for row in rows] == [
        ("sums_choice", "acc"), ("sums_choice", "acc_norm"), ("sums_written", "exact_match, strict-match"),
        ("sums", "acc"),
    ]  # fmt: skip
    choice, whole = rows[0], rows[3]
    assert (choice.output, choice.source, choice.questions, choice.shots) == (0.3, 14 / 30, 30, "0")
    assert choice.output_error is None and choice.error is None
    assert choice.source_error == pytest.approx(0.0926411)
    assert (whole.questions, whole.harness) == (60, "lm_eval 0.4.13")
    assert whole.error == pytest.approx(math.sqrt(2) * 0.0655072, rel=1e-5)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("versions", "sums_choice"), 2.0, "version"),
        (("versions", "sums_second"), 2.0, "version"),
        (("n-shot", "sums_choice"), 5, "few-shot is"),
        (("config", "limit"), 20, "limit is"),
        (("n-samples", "sums_choice", "effective"), 20, "questions is"),
        (("config", "gen_kwargs"), {"temperature": 1}, "gen_kwargs"),
        (("config", "fewshot_seed"), 1, "seeds"),
        (("config", "random_seed"), 1, "seeds"),
        (("max_length",), 1024, "max_length"),
        (("chat_template_sha",), "0f", "chat template"),
        (("system_instruction_sha",), "0f", "system instruction"),
        (("fewshot_as_multiturn",), True, "few-shot as turns"),
        (("lm_eval_version",), "0.4.9", "lm_eval is"),
        (("results", "sums_choice", "acc_norm,none"), None, "metrics"),
        (("results", "sums_choice"), None, "sums_choice was measured of only one"),
    ],
)
def test_what_was_measured_otherwise_is_not_compared(write, path, value, said):
    for output, source in (({path: value}, {}), ({}, {path: value})):
        with pytest.raises(ComparisonUnfit, match=said):
            compare_accuracy([write("output", output)], [write("source", source)])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({("results",): None}, "results"),
        ({("results", "sums", "acc,none"): float("nan")}, "NaN"),
        ({("higher_is_better",): {}}, "no share of which more is better"),
        ({("group_subtasks", "sums_choice"): ["sums_choice"]}, "sums_choice was measured of only one"),
    ],
)
def test_what_is_no_result_is_refused(write, changes, said):
    with pytest.raises((ResultsInvalid, ComparisonUnfit), match=said):
        compare_accuracy([write("output", changes)], [write("source")])


def test_a_file_counts_for_one_of_both_and_once(write):
    output, source = write("output"), write("source")
    with pytest.raises(ResultsInvalid, match="for HEAD and for its source"):
        compare_accuracy([output], [output])
    with pytest.raises(ResultsInvalid, match="is also in"):
        compare_accuracy([output, write("again")], [source])


def row(output: float, source: float, error: float | None) -> AccuracyFigures:
    return AccuracyFigures(
        task="gsm8k", metric="exact_match, strict-match", shots="5", questions=1319, harness="lm_eval 0.4.13",
        output=output, output_error=error, source=source, source_error=error,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("output", "error", "warned", "refused"),
    [
        (0.895, 0.001, True, False),
        (0.895, 0.008, False, False),
        (0.885, 0.001, True, True),
        (0.885, 0.02, False, False),
        (0.885, None, True, True),
        (0.92, 0.001, False, False),
    ],
)
def test_a_fall_is_a_warning_beyond_two_errors_and_is_not_published_beyond_a_point(output, error, warned, refused):
    assert MAX_FALL == 0.01
    rows = (row(output, 0.9, error),)
    findings = list(judge_accuracy(rows))
    assert [(one.rule, one.where) for one in findings] == [("K394", "accuracy: gsm8k")] * warned
    noise = NoiseFigures(tensors=1, median=20.0, worst=19.0, worst_tensor="a")
    text = PerplexityFigures(prompts=1, tokens=9, source=5.0, output=5.0, log_ratio=0.0, log_ratio_se=0.1, top1=1.0)
    figures = Figures(noise=noise, perplexity=text, accuracy=rows)
    report = Report(subject="t", weights={}, config="", findings=(), figures=figures, provenance={})
    assert [what.partition(":")[0] for what in lost(report)] == ["gsm8k"] * refused
