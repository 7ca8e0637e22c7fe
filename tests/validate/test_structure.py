"""Findings of a head against itself and against its source: each fault is found by its own rule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import GQA, MLA, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.execute import execute
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import read_head
from kconv.convert.shared import SharedTensors
from kconv.engines import by_name
from kconv.validate.structure import check_source, check_values, is_identical


@pytest.fixture(params=[MLA, GQA], ids=["mla", "gqa"])
def pair(request, tmp_path: Path) -> tuple[Path, Path]:
    """Return a head in TensorRT-LLM's layout, and kconv's conversion of it to vLLM's."""
    spec = request.param
    source = write_head(tmp_path / "source", by_name("trtllm"), spec, random_slots(spec))
    output = tmp_path / "output"
    execute(plan(read_head(open_checkpoint(source)), by_name("vllm")), output)
    return source, output


def head(folder: Path):
    return read_head(open_checkpoint(folder))


def rules(findings) -> set[str]:
    return {finding.rule for finding in findings}


def rewrite(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def test_a_conversion_has_no_findings(pair):
    source, output = map(head, pair)
    assert check_values(output) == []
    assert check_source(output, source) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_no_number_is_found_where_it_is(pair, value):
    def spoil(tensors):
        tensors["fc.weight"][3, 5] = value

    rewrite(pair[1], spoil)
    (finding,) = check_values(head(pair[1]))
    assert (finding.rule, finding.where) == ("K201", "fc.weight")
    assert finding.message.startswith("1 of ")


def test_a_tensor_that_was_never_filled_is_found(pair):
    rewrite(pair[1], lambda tensors: tensors["norm.weight"].zero_())
    (finding,) = check_values(head(pair[1]))
    assert (finding.rule, finding.where) == ("K202", "norm.weight")


def test_one_changed_bit_is_found_in_the_manifest_and_in_the_slot(pair):
    def flip(tensors):
        tensors["fc.weight"].view(torch.int16)[0, 0] ^= 1

    rewrite(pair[1], flip)
    findings = check_source(head(pair[1]), head(pair[0]))
    assert rules(findings) == {"K301", "K304"}
    assert "fc.weight" in [finding.where for finding in findings if finding.rule == "K304"]


def test_negative_zero_is_not_zero(pair):
    def spoil(tensors):
        tensors["fc.weight"][0, 0] = 0.0

    def respoil(tensors):
        tensors["fc.weight"][0, 0] = -0.0

    rewrite(pair[0], spoil)
    rewrite(pair[1], respoil)
    assert "K304" in rules(check_source(head(pair[1]), head(pair[0])))


def test_another_config_is_another_head(pair):
    config = json.loads((pair[1] / "config.json").read_text())
    (pair[1] / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    findings = check_source(head(pair[1]), head(pair[0]))
    assert {"K301", "K303"} <= rules(findings)
    assert "eps" in next(f.message for f in findings if f.rule == "K303")


def test_without_a_manifest_the_bits_are_compared_all_the_same(pair):
    (pair[1] / "kconv.json").unlink()
    findings = check_source(head(pair[1]), head(pair[0]))
    assert [(f.rule, f.severity) for f in findings] == [("K302", "warning")]


def test_another_head_of_the_same_shape_is_not_the_source(tmp_path, pair):
    spec = head(pair[0]).spec
    other = write_head(tmp_path / "other", by_name("trtllm"), spec, random_slots(spec, seed=1))
    findings = check_source(head(pair[1]), head(other))
    differing = {finding.where for finding in findings if finding.rule == "K304"}
    assert differing == {info.name for _, info in head(pair[1]).places.values()}
    assert len(differing) == len(random_slots(replace(spec)))


def test_a_cast_is_asked_for_and_not_called_identical(tmp_path):
    spec = replace(MLA, dtype="F32")
    source = head(write_head(tmp_path / "source", by_name("trtllm"), spec, random_slots(spec)))
    execute(plan(source, by_name("vllm"), WriteOptions(dtype="BF16")), tmp_path / "output")
    output = head(tmp_path / "output")
    findings = check_source(output, source)
    assert findings == []
    assert not is_identical(output, findings)


def test_an_embedding_left_to_the_target_is_no_loss(tmp_path):
    slots = random_slots(MLA)
    source = head(write_head(tmp_path / "source", by_name("trtllm"), MLA, slots))
    target = SharedTensors("target", {"embed_tokens": source.places["embed_tokens"][1]})
    execute(plan(source, by_name("vllm"), WriteOptions(target=target, drop_shared=True)), tmp_path / "output")
    output = head(tmp_path / "output")
    assert "embed_tokens" not in output.places
    findings = check_source(output, source)
    assert findings == []
    assert is_identical(output, findings)
