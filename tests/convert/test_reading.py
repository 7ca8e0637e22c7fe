"""One reading of a head: it goes on behind the first problem, and converting and validating see the same ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.changes import also, drop, edit, nest, put
from support.faults import FAULTS, GQA_VLLM, MLA_VLLM, REDUCED, Fault
from support.good_heads import GOOD

import kconv
from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints
from kconv.convert.read import claim_tensors, read, read_head
from kconv.drafters.keys import CONVENTION, TOP
from kconv.errors import CapturedUndecided, ConfigUnsupported, KconvError, TensorMissing, TensorValue
from kconv.validate.rules.table import all_rules

RULES = all_rules()
OPENED = [fault for fault in FAULTS if fault.rule not in ("K001", "K002", "K003") and fault.raw is None]


def write(folder: Path, base, change) -> Path:
    return Fault("", "", base, change).write(folder)


@pytest.mark.parametrize("fault", OPENED, ids=lambda fault: fault.name)
def test_what_stops_a_conversion_is_what_validation_lists(fault: Fault, tmp_path: Path):
    folder = fault.write(tmp_path / "head")
    checkpoint = open_checkpoint(folder)
    reading = read(checkpoint, hints=fault.told)
    found = fault.validate(folder).findings
    assert {problem.code for problem in reading.problems} <= {finding.rule for finding in found}
    # What an option decides stops a conversion, and leaves open what an engine would do.
    assert all(RULES[one.code].severity in (one.severity, "undecided") for one in reading.problems)
    assert all(problem.what and problem.where and problem.fix for problem in reading.problems)
    try:
        read_head(checkpoint, hints=fault.told)
    except KconvError as error:
        assert (type(error), error.code) == (reading.errors[0].kind, reading.errors[0].code)
        assert error.what.startswith(reading.errors[0].what) and error.fix == reading.errors[0].fix
    else:
        assert not reading.errors and reading.head is not None


@pytest.mark.parametrize("good", GOOD.values(), ids=GOOD)
def test_of_a_good_head_nothing_is_found(good, tmp_path: Path):
    reading = read(open_checkpoint(good.write(tmp_path / "head")))
    assert reading.problems == () and reading.captured is not None and reading.head is not None


def test_reading_goes_on_behind_the_first_problem(tmp_path: Path):
    change = also(
        put(hidden_act="gelu", sliding_window=4096, tie_word_embeddings=True, num_aux_hidden_states=2),
        drop("norm.weight"),
        edit("d2t", lambda t: t + 60),
    )
    folder = write(tmp_path / "head", REDUCED, change)
    reading = read(open_checkpoint(folder))
    assert {problem.code for problem in reading.problems} == {"K013", "K014", "K106", "K149", "K170", "K176"}
    assert reading.head is not None and "norm" not in reading.head.places
    with pytest.raises(ConfigUnsupported, match="gelu") as caught:
        read_head(open_checkpoint(folder))
    assert caught.value.where == f"{folder}/config.json: hidden_act"


MAPS = {"d2t": lambda t: t + torch.arange(40), "t2d": lambda t: t.roll(1)}


@pytest.mark.parametrize(("tensor", "code"), [("d2t", "K175"), ("t2d", "K178")])
def test_maps_that_contradict_each_other_are_not_converted(tensor: str, code: str, tmp_path: Path):
    folder = write(tmp_path / "head", REDUCED, edit(tensor, MAPS[tensor]))
    with pytest.raises(TensorValue) as caught:
        kconv.convert(folder, tmp_path / "out", to="vllm")
    assert caught.value.code == code and not (tmp_path / "out").exists()


def test_of_an_option_that_does_not_fit_the_head_nothing_follows(tmp_path: Path):
    folder = write(tmp_path / "head", GQA_VLLM, put(**{TOP: ..., CONVENTION: ...}))
    found = kconv.validate(folder, captured=(5,), for_="all").findings
    assert [finding.rule for finding in found if finding.severity != "note"] == ["K008"]


def test_options_tell_how_to_read_a_source_too_if_no_manifest_does(tmp_path: Path):
    head = write(tmp_path / "head", GQA_VLLM, put())
    source = write(tmp_path / "source", GQA_VLLM, put(**{TOP: [1, 3, 5], CONVENTION: ...}))
    with pytest.raises(CapturedUndecided):
        kconv.validate(head, source=source)
    found = kconv.validate(head, source=source, captured=(1, 3, 5), captured_are="outputs").findings
    assert [finding.rule for finding in found if finding.severity == "error"] == []


def test_every_key_that_is_wrong_is_named(tmp_path: Path):
    change = put(
        hidden_size=..., intermediate_size="40", num_key_value_heads=2, rope_theta=7.0, max_position_embeddings=0
    )
    reading = read(open_checkpoint(write(tmp_path / "head", MLA_VLLM, change)))
    assert [problem.code for problem in reading.problems] == ["K010", "K012", "K011", "K160", "K012"]
    assert reading.head is None and reading.spec is None and reading.layout is not None
    assert reading.config["vocab_size"] == 64


def test_captured_layers_that_are_not_known_leave_the_rest_known(tmp_path: Path):
    change = also(put(**{TOP: [1, 3, 5], CONVENTION: ...}), drop("norm.weight"))
    folder = write(tmp_path / "head", GQA_VLLM, change)
    reading = read(open_checkpoint(folder))
    assert [problem.code for problem in reading.problems] == ["K006", "K106"]
    assert reading.captured is None and reading.spec is not None and len(reading.spec.captured) == 3
    assert 0 not in reading.spec.captured, "an engine that cannot capture layer 0 has nothing to say of it"
    told = read(open_checkpoint(folder), hints=Hints(captured_are="outputs"))
    assert told.captured is not None and told.captured.ids == (1, 3, 5)


def test_an_error_about_tensors_says_how_many_do_not_fit(tmp_path: Path):
    folder = write(tmp_path / "head", GQA_VLLM, drop("norm.weight", "fc.weight"))
    assert len(read(open_checkpoint(folder)).misfits) == 2
    with pytest.raises(TensorMissing, match="1 more does not fit: norm"):
        claim_tensors(open_checkpoint(folder))


def test_two_lists_that_are_none_are_both_named(tmp_path: Path):
    change = also(put(**{TOP: [2, 2]}), nest(**{TOP: ["1"]}))
    reading = read(open_checkpoint(write(tmp_path / "head", GQA_VLLM, change)))
    assert [problem.where for problem in reading.problems if problem.code == "K145"] == [
        f"config.json: {TOP}",
        f"config.json: eagle_config.{TOP}",
    ]
