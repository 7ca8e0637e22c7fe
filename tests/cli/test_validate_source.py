"""`kconv validate --source`: the source is read as it was read when the output was made of it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.commands import NAMES, ran
from support.heads import GQA, MLA, MODELOPT_LLAMA, TARGET, TORCHSPEC_MLA, cut, random_slots, write_head

from kconv.checkpoint.bytes import file_digest
from kconv.checkpoint.manifest import Hints, read_manifest
from kconv.cli import main
from kconv.engines import BY_NAME
from kconv.lines import next_command


def kconv(*arguments: object):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def lightseek(folder: Path) -> Path:
    """A head that lists [2, 30, 58], which may mean both."""
    return write_head(folder, BY_NAME["modelopt"], MLA, random_slots(MLA), _lightseek())


def _lightseek() -> dict:
    return cut(TORCHSPEC_MLA, replace(MLA, captured=(2, 30, 58)))


def silent(folder: Path) -> Path:
    """A head that lists no layers."""
    config = cut(MODELOPT_LLAMA, GQA) | {"eagle_config": {"use_aux_hidden_state": True}}
    return write_head(folder, BY_NAME["modelopt"], GQA, random_slots(GQA), config)


def speculators(folder: Path) -> Path:
    """A head whose config does not say whether the residual is normed."""
    config = BY_NAME["vllm"].write_config(GQA)
    del config["norm_before_residual"]
    config |= {"speculators_model_type": "eagle3", "transformer_layer_config": {}}
    return write_head(folder, BY_NAME["speculators"], GQA, random_slots(GQA), config)


def boundless(folder: Path) -> Path:
    """A head that does not say how long a context may be."""
    config = {k: v for k, v in BY_NAME["vllm"].write_config(GQA).items() if k != "max_position_embeddings"}
    return write_head(folder, BY_NAME["vllm"], GQA, random_slots(GQA), config)


def bounded(folder: Path) -> Path:
    """A head that says it, 1024, and is to be served with another length."""
    return write_head(folder, BY_NAME["vllm"], GQA, random_slots(GQA))


TOLD = {
    "inputs": (lightseek, ["--captured-are", "inputs"], {"captured_are": "inputs"}),
    "outputs": (lightseek, ["--captured-are", "outputs"], {"captured_are": "outputs"}),
    "layers": (silent, ["--captured", "2,4,7"], {"captured": (2, 4, 7)}),
    "the residual": (speculators, ["--norm-before-residual", "yes"], {"norm_before_residual": True}),
    "a length that is not stated": (boundless, ["--max-positions", "4096"], {"max_positions": 4096}),
    "another length": (bounded, ["--max-positions", "4096"], {"max_positions": 4096}),
}


@pytest.mark.parametrize("write, options, hints", TOLD.values(), ids=TOLD)
def test_what_was_said_of_a_source_need_not_be_said_again(tmp_path, write, options, hints):
    source, out = write(tmp_path / "source"), tmp_path / "out"
    assert kconv("to-vllm", source, out, *options).exit_code == 0
    assert read_manifest(out).hints == Hints(**hints)
    shown = kconv("validate", out, "--source", source)
    assert (shown.exit_code, "weights: identical to the source" in shown.stdout) == (0, True), shown.output


def test_the_targets_depth_need_not_be_said_again(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(TARGET))
    source, out = silent(tmp_path / "source"), tmp_path / "out"
    assert kconv("to-vllm", source, out, "--target", tmp_path / "target").exit_code == 0
    assert read_manifest(out).hints.target_layers == 9
    assert kconv("validate", out, "--source", source).exit_code == 0


def test_what_was_said_of_one_config_says_nothing_of_another(tmp_path):
    source, out = lightseek(tmp_path / "source"), tmp_path / "out"
    assert kconv("to-vllm", source, out, "--captured-are", "inputs").exit_code == 0
    (source / "config.json").write_text(json.dumps(_lightseek() | {"transformers_version": "9"}))
    refused = kconv("validate", out, "--source", source)
    assert refused.exit_code == 1 and "out was made from another config.json" in refused.stderr


def test_the_output_is_held_against_the_source_and_not_against_itself(tmp_path):
    """Other layers in the output's config are another head, whatever was said of the source."""
    source, out = lightseek(tmp_path / "source"), tmp_path / "out"
    assert kconv("to-trtllm", source, out, "--captured-are", "inputs").exit_code == 0
    config = json.loads((out / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 30, 58]
    (out / "config.json").write_text(json.dumps(config))
    report = json.loads(kconv("validate", out, "--source", source, "--json").stdout)
    assert {"K301", "K303"} <= {finding["rule"] for finding in report["findings"]}


def test_a_config_that_differs_is_not_said_of_the_weights(tmp_path):
    source = bounded(tmp_path / "source")
    other = bounded(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    shown = kconv("validate", other, "--source", source)
    assert shown.exit_code == 1 and "max_positions differ" in shown.stdout
    assert "weights: identical to the source" in shown.stdout


def overruled(folder: Path) -> Path:
    """A head of ModelOpt's, whose list its own marks tell to be outputs."""
    return write_head(folder, BY_NAME["modelopt"], GQA, random_slots(GQA), cut(MODELOPT_LLAMA, GQA))


def test_a_word_that_contradicts_the_source_is_found(tmp_path):
    """Layers captured one too early pass every comparison with a source that is read as wrongly."""
    source, out = overruled(tmp_path / "source"), tmp_path / "out"
    assert kconv("validate", source).exit_code == 0
    assert kconv("to-vllm", source, out, "--captured-are", "inputs").exit_code == 0
    shown = kconv("validate", out, "--source", source, "--json")
    assert "K307" in {finding["rule"] for finding in json.loads(shown.stdout)["findings"]}
    assert kconv("validate", out, "--source", source, "--strict").exit_code == 1


def test_a_forged_word_beside_an_edited_config_is_found(tmp_path):
    source, out = overruled(tmp_path / "source"), tmp_path / "out"
    assert kconv("to-vllm", source, out).exit_code == 0
    config = json.loads((out / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in config["eagle_aux_hidden_state_layer_ids"]]
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    manifest = json.loads((out / "kconv.json").read_text())
    manifest["hints"]["captured_are"] = "inputs"
    (record,) = [file for file in manifest["files"] if file["name"] == "config.json"]
    record |= {"size": (out / "config.json").stat().st_size, "sha256": file_digest(out / "config.json")}
    (out / "kconv.json").write_text(json.dumps(manifest))
    assert "captured [1, 3, 5]" in kconv("verify", out, source).stderr
    assert kconv("validate", out, "--source", source, "--strict").exit_code == 1


UNTOLD = {
    "no manifest": ("K302", lambda out: (out / "kconv.json").unlink()),
    "a broken manifest": ("K301", lambda out: (out / "kconv.json").write_text("{")),
    "a broken output": ("K002", lambda out: (out / "model.safetensors").write_bytes(b"{")),
}


@pytest.mark.parametrize("rule, spoil", UNTOLD.values(), ids=UNTOLD)
def test_an_output_that_tells_nothing_leaves_the_source_to_its_marks(tmp_path, rule, spoil):
    source, out = bounded(tmp_path / "source"), tmp_path / "out"
    assert kconv("to-vllm", source, out).exit_code == 0
    spoil(out)
    report = json.loads(kconv("validate", out, "--source", source, "--json").stdout)
    assert rule in {finding["rule"] for finding in report["findings"]}


@pytest.mark.parametrize("name", NAMES)
def test_the_next_command_names_a_folder_of_any_name(name, tmp_path):
    said = str(next_command("validate", name, "--source", name).words).removeprefix("next: ")
    assert ran(said, tmp_path) == [["kconv", "validate", name, "--source", name]]


def test_the_next_command_runs_as_it_stands(tmp_path):
    source, out = lightseek(tmp_path / "a b"), tmp_path / "it's; c"
    done = kconv("to-trtllm", source, out, "--captured-are", "inputs")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("next: ")]
    program, *words = shlex.split(line.removeprefix("next: "))
    assert (program, words) == ("kconv", ["validate", str(out), "--source", str(source)])
    assert kconv(*words).exit_code == 0
