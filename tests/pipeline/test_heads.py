"""How a step opens a head: as its reading says, for the target that it names, and a source as its conversion did."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.heads import MLA, TARGET, TORCHSPEC_MLA, cut, random_slots, write_head
from support.releases import carry_out, planned, ran

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.read import read_head
from kconv.engines import BY_NAME
from kconv.errors import CapturedUndecided, TargetInvalid

SPEC = replace(MLA, captured=(2, 30, 58))


@pytest.fixture
def undecided(tmp_path: Path) -> Path:
    """A head that lists [2, 30, 58], which may be outputs and inputs."""
    config = cut(TORCHSPEC_MLA, SPEC)
    return write_head(tmp_path / "source", BY_NAME["modelopt"], SPEC, random_slots(SPEC), config)


def release(head: Path, reading: dict[str, Any], target: Path | None = None) -> dict[str, Any]:
    convert = {"do": "convert", "head": str(head), "to": "vllm"} | reading
    if target:
        convert["target"] = str(target)
    report = {"do": "validate", "head": "$vllm", "source": str(head)}
    return {"name": "a-release", "steps": {"vllm": convert, "report": report}}


@pytest.mark.parametrize("meaning, captured", [("outputs", (2, 30, 58)), ("inputs", (1, 29, 57))])
def test_what_a_conversion_was_told_of_its_source_holds_when_it_is_checked(undecided, root, meaning, captured):
    values = release(undecided, {"captured_are": meaning})
    assert ran(carry_out(values, root)) == ["vllm", "report"]
    assert read_head(open_checkpoint(root / "vllm")).spec.captured == captured
    assert json.loads((root / "report" / "report.json").read_text())["figures"]["identical"] is True


def test_a_head_of_which_nothing_was_said_is_refused(undecided, root):
    with pytest.raises(CapturedUndecided):
        carry_out(release(undecided, {}), root)


@pytest.mark.parametrize("change", [{"vocab_size": 65}, {"hidden_size": 96}], ids=str)
def test_another_models_target_is_refused_as_by_the_command(undecided, root, tmp_path, change):
    target = tmp_path / "target"
    target.mkdir()
    deep, values = TARGET | {"num_hidden_layers": 61}, release(undecided, {"captured_are": "outputs"}, target)
    (target / "config.json").write_text(json.dumps(deep | change))
    with pytest.raises(TargetInvalid, match="hidden states of width 48 and a vocabulary of 64"):
        planned(values, root)
    with pytest.raises(TargetInvalid, match="hidden states of width 48 and a vocabulary of 64"):
        carry_out(values, root)
    assert not (root / "vllm").exists()
    (target / "config.json").write_text(json.dumps(deep))
    assert ran(carry_out(values, root, only="vllm")) == ["vllm"]
