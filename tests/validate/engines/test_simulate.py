"""Which layers an engine read, where its counts are not the head's: told by the chain itself, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.faults import write_target
from support.good_heads import GOOD
from support.heads import TARGET
from support.validated import validate

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.source import Folder
from kconv.convert.read import Head, read_head
from kconv.drafters.chain import Acceptance
from kconv.measure.figures import EngineFigures
from kconv.measure.held_out import HeldOut
from kconv.validate import parity
from kconv.validate.engines import check
from kconv.validate.engines.check import EngineFound
from kconv.validate.engines.judge import COUNTS, judge
from kconv.validate.engines.simulate import find_reading
from kconv.validate.options import ValidateOptions
from kconv.validate.parity import ParityFound

FIGURES = EngineFigures(
    engine="vllm", url="", prompts=4, new_tokens=8, steps=3, same_output=4, reference="", drafts=20, accepted=14,
    per_position=(8, 4, 2), length=1.7, expected_drafts=20, expected_per_position=(8, 5, 2), expected_length=1.75,
)  # fmt: skip


@pytest.fixture
def head(tmp_path: Path) -> Head:
    return read_head(open_checkpoint(GOOD["gqa, trtllm"].write(tmp_path / "head")))


def chain(one: Head) -> Acceptance:
    """Accept less of a head that reads earlier layers."""
    return Acceptance(3, 20, (8.0, float(sum(one.spec.captured)), 2.0), "")


def test_the_layers_that_give_the_engines_counts_are_found(head):
    assert head.spec.captured == (1, 3, 5)
    assert find_reading(head, chain, (20, 8, 6, 2), [(2, 4, 6), (0, 2, 4)], layers=7) == (0, 2, 4)
    assert find_reading(head, chain, (20, 8, 6, 2), [(2, 4, 6)], layers=7) is None


def test_what_cannot_be_layers_of_this_target_is_passed_over(head):
    """Layer input 0, a list of another length, a layer that the target lacks, and one that stands twice."""
    # Each has the sum that the counts are of, so that it is the list itself that is no reading.
    unfit = [(-1, 2, 5), (2, 4), (-2, 1, 7), (0, 3, 3)]
    assert find_reading(head, chain, (20, 8, 6, 2), unfit, layers=7) is None
    assert find_reading(head, chain, (20, 8, 6, 2), [*unfit, (0, 1, 5)], layers=7) == (0, 1, 5)
    assert find_reading(head, chain, (20, 8, 8, 2), [(0, 1, 7)], layers=7) is None
    assert find_reading(head, chain, (20, 8, 8, 2), [(0, 1, 7)], layers=8) == (0, 1, 7)


def test_then_the_finding_says_which_and_what_to_run():
    [plain], [told] = (judge(FIGURES, strict=True, read_as=ids) for ids in (None, (0, 2, 4)))
    assert plain.rule == told.rule == COUNTS
    assert "[0, 2, 4]" in told.message and "kconv to-vllm" in told.fix
    assert "layers [" not in plain.message and "kconv to-vllm" not in plain.fix


@pytest.mark.parametrize(
    ("name", "readings"), [("gqa, trtllm", [(0, 2, 4)]), ("mla, sglang", [(0, 2, 4)]), ("mla, vllm", [])]
)
def test_who_serves_a_head_is_whom_it_is_checked_for(name, readings, tmp_path, monkeypatch):
    """So that a folder of another engine's layout is told of by a rule too, whatever the counts say."""
    asked = []

    def stand_in(*_, readings=()) -> EngineFound:
        asked.append(list(readings))
        return EngineFound((), FIGURES, {})

    monkeypatch.setattr(check, "check_engine", stand_in)
    monkeypatch.setattr(parity, "measure_parity", lambda *_: ParityFound((), {}))
    folder, target = Folder(GOOD[name].write(tmp_path / "head")), write_target(tmp_path / "target", TARGET)
    held_out = HeldOut("held-out.jsonl", "", (), ())
    options = ValidateOptions(engine="vllm", engine_python="python", prompts=held_out.file)
    report = validate(folder, options, target=target, prompts=held_out)
    assert {"vllm-v1", "vllm-v2"} <= set(report.provenance["for"])
    assert asked == [readings]
    assert bool([f for f in report.findings if f.rule == "K140"]) is bool(readings)
