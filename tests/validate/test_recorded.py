"""A folder against the manifest that kconv left in it: what was changed since is an error, without a source too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fuzzing import bounded
from support.heads import MLA, random_slots, write_head
from support.quantized_targets import make_form
from support.validated import validate

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.source import Folder
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import by_name
from kconv.quantize.calibration import data_free
from kconv.quantize.plan import plan_quantize
from kconv.quantize.recipe import load_recipe
from kconv.quantize.run import quantize
from kconv.targets.config import parse_target_config
from kconv.validate.files import check_manifest
from kconv.validate.options import ValidateOptions
from kconv.validate.report import digests


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """Return a head that kconv converted."""
    source = write_head(tmp_path / "source", by_name("trtllm"), MLA, random_slots(MLA))
    execute(plan(read_head(open_checkpoint(source)), by_name("vllm")), tmp_path / "head")
    return tmp_path / "head"


def broken(folder: Path, **options) -> list[str]:
    """Return where the manifest is found not to hold."""
    report = validate(Folder(folder), ValidateOptions(**options))
    found = [finding for finding in report.findings if finding.rule == "K301"]
    assert all(finding.severity == "error" and finding.message and finding.fix for finding in found)
    return [finding.where for finding in found]


def change_tensors(file: Path, change) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def reverse_fc(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].flip(0).contiguous()


def test_a_folder_as_it_was_written_has_nothing_broken(converted):
    assert broken(converted) == []


def test_weights_that_no_other_rule_can_tell_from_good_ones_are_found(converted):
    change_tensors(converted / "model.safetensors", reverse_fc)
    report = validate(Folder(converted))
    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert [(finding.rule, finding.where) for finding in errors] == [("K301", "model.safetensors")]


def test_a_config_that_was_changed_is_said_with_what_it_makes_of_the_head(converted):
    file = converted / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config))  # other bytes, the same head
    assert broken(converted) == ["config.json"]
    file.write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}))
    assert broken(converted) == ["config.json", "kconv.json"]
    report = validate(Folder(converted))
    assert any(finding.rule == "K301" and "the head has [0, 2, 4]" in finding.message for finding in report.findings)


def test_a_head_that_cannot_be_read_is_held_against_its_manifest_too(converted):
    config = json.loads((converted / "config.json").read_text())
    (converted / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0}))
    assert broken(converted) == ["config.json"]


def test_a_file_that_engines_read_and_the_manifest_does_not_know_is_found(converted):
    save_file({"midlayer.extra": torch.ones(1)}, converted / "more.safetensors")
    (converted / "pytorch_model.bin").write_bytes(b"weights")
    (converted / "README.md").write_text("A card, which no engine reads.")
    assert broken(converted) == ["more.safetensors", "pytorch_model.bin"]


def test_a_recorded_file_that_is_gone_is_found_in_a_folder_and_not_in_a_download(converted):
    (converted / "serve-vllm.sh").unlink()
    assert broken(converted) == ["serve-vllm.sh"]
    checkpoint = open_checkpoint(converted)
    assert list(check_manifest(checkpoint, digests(checkpoint), whole=False)) == []


def test_a_file_of_another_size_is_not_hashed(converted):
    """10 TB of zeros, which take no room on the disk, would be hashed for hours."""
    with (converted / "serve-vllm.sh").open("ab") as file:
        file.truncate(10 << 40)
    with bounded(cpu=10):
        assert broken(converted) == ["serve-vllm.sh"]


@pytest.mark.parametrize("text", ["{}", "not JSON"])
def test_a_manifest_that_cannot_be_read_is_found(converted, text):
    (converted / "kconv.json").write_text(text)
    assert broken(converted) == ["kconv.json"]


def test_a_record_of_a_file_elsewhere_is_found(converted):
    manifest = json.loads((converted / "kconv.json").read_text())
    manifest["files"].append({"name": "../source/config.json", "size": 0, "sha256": "0" * 64})
    (converted / "kconv.json").write_text(json.dumps(manifest))
    assert broken(converted) == ["kconv.json"]


def test_a_folder_that_kconv_did_not_make_is_not_asked_for_a_manifest(converted):
    (converted / "kconv.json").unlink()
    change_tensors(converted / "model.safetensors", reverse_fc)
    assert broken(converted) == []


def test_headers_alone_say_nothing_of_the_weights_but_of_the_config(converted):
    change_tensors(converted / "model.safetensors", reverse_fc)
    assert broken(converted, headers_only=True) == []
    config = json.loads((converted / "config.json").read_text())
    (converted / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}))
    assert broken(converted, headers_only=True) == ["config.json", "kconv.json"]


def test_a_quantized_target_is_held_against_its_manifest(tiny_target, tmp_path):
    source = open_checkpoint(make_form(tiny_target, tmp_path / "source", "bf16"))
    made = plan_quantize(source, parse_target_config(source.config), load_recipe("nvfp4-experts"), data_free())
    out = tmp_path / "out"
    quantize(made, out)
    assert broken(out) == []
    [file] = open_checkpoint(out).files

    def double(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith(".input_scale"))
        tensors[name] = tensors[name] * 2

    change_tensors(file, double)
    assert broken(out) == [file.name]
