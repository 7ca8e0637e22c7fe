"""Commands whose head, source or target is a hub id: what is transferred, what is pinned, what comes out."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save
from support.heads import GQA, MLA, TARGET, random_slots, write_head
from support.hub_routes import Reply

from kconv.checkpoint.manifest import read_manifest
from kconv.cli import main
from kconv.engines.trtllm import TRTLLM

SPACE = Path(__file__).parents[2] / "examples" / "space" / "app.py"
# A vocabulary that makes a file of some megabytes, beside which its header is nothing.
SPEC = replace(MLA, vocab=20_000, draft_vocab=20_000)


@pytest.fixture
def folder(tmp_path):
    """A head on this machine, in TensorRT-LLM's layout."""
    return write_head(tmp_path / "local", TRTLLM, SPEC, random_slots(SPEC))


def kconv(*arguments):
    """Run a command in this process, where the stand-in is the Hub."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def succeed(*arguments):
    """Run a command that must not fail, and return what it prints."""
    ran = kconv(*arguments)
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def refuse(*arguments):
    """Run a command that must fail with a named fault, and return its message."""
    ran = kconv(*arguments)
    assert ran.exit_code == 1, ran.output
    assert ran.stdout == ""
    return ran.stderr


def test_the_target_that_a_heads_readme_names_is_offered(hub, folder):
    (folder / "README.md").write_text("---\nbase_model: org/target\n---\n# A head\n")
    hub.commit("org/head", folder)
    assert "--target org/target" in succeed("inspect", "org/head")


def test_a_head_is_inspected_where_it_is(hub, folder):
    sha = hub.commit("org/head", folder)
    there = json.loads(succeed("inspect", "org/head", "--json"))
    here = json.loads(succeed("inspect", folder, "--json"))
    assert there.pop("source") == f"org/head@{sha}"
    assert here.pop("source") == str(folder)
    assert there == here
    assert hub.sent() < (folder / "model.safetensors").stat().st_size / 100
    assert f"source      org/head@{sha}" in succeed("inspect", "org/head")


def test_a_head_of_reduced_vocabulary_is_inspected_without_its_map(hub, tmp_path):
    spec = replace(GQA, draft_vocab=40)
    hub.commit("org/head", write_head(tmp_path / "local", TRTLLM, spec, random_slots(spec)))
    told = json.loads(succeed("inspect", "org/head", "--json"))
    assert (told["spec"]["draft_vocab"], told["spec"]["vocab"]) == (40, 64)


def test_a_head_is_converted_from_its_id_as_from_its_folder(hub, folder, tmp_path):
    sha = hub.commit("org/head", folder)
    succeed("to-vllm", "org/head@main", tmp_path / "there")
    succeed("to-vllm", folder, tmp_path / "here")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    there, here = (read_manifest(tmp_path / name) for name in ("there", "here"))
    assert there.source == f"org/head@{sha}"
    assert there == here.model_copy(update={"source": there.source})


def test_an_output_is_verified_and_validated_against_the_id_that_its_manifest_names(hub, folder, tmp_path):
    hub.commit("org/head", folder)
    succeed("to-vllm", "org/head", tmp_path / "out")
    hub.commit("org/head", write_head(tmp_path / "next", TRTLLM, SPEC, random_slots(SPEC, seed=1)))
    source = read_manifest(tmp_path / "out").source
    assert "source and output" in succeed("verify", tmp_path / "out", source)
    report = json.loads(succeed("validate", tmp_path / "out", "--source", source, "--json"))
    assert report["figures"]["identical"] is True
    assert report["provenance"]["source"] == source
    assert kconv("verify", tmp_path / "out", "org/head").exit_code == 1


def test_an_output_on_the_hub_is_validated_with_its_manifest(hub, folder, tmp_path):
    succeed("to-vllm", folder, tmp_path / "out")
    sha = hub.commit("org/out", tmp_path / "out")
    report = json.loads(succeed("validate", "org/out", "--source", folder, "--json"))
    assert report["subject"] == f"org/out@{sha}"
    assert not [finding for finding in report["findings"] if finding["severity"] == "error"]


def test_a_branch_that_moves_amid_a_conversion_is_not_followed(hub, folder, tmp_path):
    sha = hub.commit("org/head", folder)
    later = write_head(tmp_path / "later", TRTLLM, SPEC, random_slots(SPEC, seed=1))

    def move(call):
        if "/resolve/" in call.path:
            hub.commit("org/head", later)

    hub.before = move
    succeed("to-vllm", "org/head", tmp_path / "out")
    assert hub.repos["org/head"].branches["main"] != sha
    assert read_manifest(tmp_path / "out").source == f"org/head@{sha}"
    written, old = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert written["lm_head.weight"].equal(old["lm_head.weight"])


def test_what_cannot_be_converted_is_refused_before_it_is_downloaded(hub, folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 41}))
    hub.commit("org/head", folder)
    assert "mlp" in refuse("to-vllm", "org/head", tmp_path / "out")
    assert hub.sent() < 50_000
    assert not (tmp_path / "out").exists()


def test_a_dry_run_downloads_nothing(hub, folder, tmp_path):
    hub.commit("org/head", folder)
    planned = json.loads(succeed("to-vllm", "org/head", tmp_path / "out", "--dry-run", "--json"))
    assert planned == json.loads(succeed("to-vllm", folder, tmp_path / "out", "--dry-run", "--json"))
    assert hub.sent() < 50_000


def test_a_target_is_asked_for_its_config_alone(hub, tmp_path):
    config = TRTLLM.write_config(MLA)
    config["eagle_config"] = {"use_aux_hidden_state": True}
    config.pop("eagle_aux_hidden_state_layer_ids", None)
    head = write_head(tmp_path / "local", TRTLLM, MLA, random_slots(MLA), config)
    weights = (head / "model.safetensors").read_bytes()
    hub.commit("org/target", {"config.json": json.dumps(TARGET).encode(), "model.safetensors": weights})
    assert "--target" in refuse("to-vllm", head, tmp_path / "out")
    told = json.loads(succeed("inspect", head, "--target", "org/target", "--json"))
    assert told["spec"]["captured"] == [1, 3, 5]
    assert {s.call.path.rsplit("/", 1)[-1] for s in hub.served if "/resolve/" in s.call.path} == {"config.json"}


def test_a_launch_file_knows_a_target_of_the_hub_by_its_id_and_no_folder_of_this_machine(hub, folder, tmp_path):
    (local := tmp_path / "my-target").mkdir()
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    (local / "config.json").write_text(json.dumps(TARGET | {"vocab_size": vocab}))
    (local / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    commit = hub.commit("org/target", local)
    named = {"hub": "org/target", "branch": "org/target@main", "pinned": f"org/target@{commit}", "folder": local}
    for name, target in named.items():
        succeed("to-vllm", folder, tmp_path / name, "--target", target)
    assert "target=org/target ;;" in (tmp_path / "hub" / "serve-vllm.sh").read_text()
    for name in ("branch", "pinned"):
        assert f"target=org/target@{commit} ;;" in (tmp_path / name / "serve-vllm.sh").read_text()
    written = (tmp_path / "folder" / "serve-vllm.sh").read_text()
    assert str(tmp_path) not in written and "usage: " in written


def test_of_a_target_the_vocabulary_alone_is_downloaded(hub, tiny_target, tmp_path):
    config = json.loads((tiny_target / "config.json").read_text())
    dims = {"vocab": config["vocab_size"], "draft_vocab": config["vocab_size"]}
    width = {"hidden": config["hidden_size"], "target_hidden": config["hidden_size"]}
    spec = replace(MLA, **dims, **width, captured=(1, 2, 3))
    head = write_head(tmp_path / "head", TRTLLM, spec, random_slots(spec))
    tensors = load_file(tiny_target / "model.safetensors")
    parts = {"head.safetensors": ["lm_head.weight"], "rest.safetensors": [n for n in tensors if n != "lm_head.weight"]}
    placed = {name: file for file, held in parts.items() for name in held}
    files = {path.name: path.read_bytes() for path in tiny_target.iterdir() if path.suffix != ".safetensors"}
    files |= {file: save({name: tensors[name] for name in held}) for file, held in parts.items()}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": placed}).encode()
    hub.commit("org/target", files)
    (tmp_path / "text.txt").write_text("Return the sum of a and b.")
    told = json.loads(succeed("vocab", head, "--target", "org/target", "--text", tmp_path / "text.txt", "--json"))
    assert told["coverage"]["share"] == 1.0 and told["copies"]["by_offset"] == 0
    asked = {served.call.path.rsplit("/", 1)[-1] for served in hub.served if "/resolve/" in served.call.path}
    assert "head.safetensors" in asked and "rest.safetensors" not in asked


def test_a_targets_own_code_is_run_of_a_named_commit_alone(hub, folder):
    sha = hub.commit("org/target", {"config.json": json.dumps(TARGET).encode()})
    ran = kconv("vocab", folder, "--target", "org/target@main", "--trust-remote-code")
    assert ran.exit_code == 2 and f"org/target@{sha}" in ran.stderr
    # By its commit it is looked at, and found to have no lm_head.
    assert "has no lm_head" in refuse("vocab", folder, "--target", f"org/target@{sha}", "--trust-remote-code")


def test_a_folder_of_the_ids_name_is_taken(hub, folder, tmp_path, monkeypatch):
    hub.commit("org/head", {"config.json": b"{}"})
    (tmp_path / "org").mkdir()
    folder.rename(tmp_path / "org" / "head")
    monkeypatch.chdir(tmp_path)
    assert json.loads(succeed("inspect", "org/head", "--json"))["source"] == "org/head"
    assert hub.served == []


@pytest.mark.parametrize("command", [["inspect"], ["to-vllm"], ["validate"], ["verify", "nowhere"], ["vocab"]])
def test_a_fault_is_one_message_with_the_next_command(hub, tmp_path, command):
    output = [tmp_path / "out"] if command == ["to-vllm"] else []
    message = refuse(*command, "org/absent", *output)
    assert message.startswith("error: there is no folder org/absent here")
    assert message.rstrip().endswith("hf auth login")
    assert not (tmp_path / "out").exists()


def test_a_target_that_is_not_there_is_named(hub, folder):
    assert "no folder org/absent here" in refuse("inspect", folder, "--target", "org/absent")


def test_a_program_of_its_own_finds_the_hub_by_its_environment(hub, folder, tmp_path):
    """As a user runs it: the client reads its environment when it is imported."""
    sha = hub.commit("org/head", folder)
    hub.tokens = {"hf_aVerySecretToken"}

    def run(*arguments, **env):
        program = [sys.executable, "-c", "from kconv.cli import main; main()", *map(str, arguments)]
        return subprocess.run(program, capture_output=True, text=True, env=os.environ | env, cwd=tmp_path)

    told = run("inspect", "org/head", "--json", HF_TOKEN="hf_aVerySecretToken")
    assert json.loads(told.stdout)["source"] == f"org/head@{sha}"
    hub.fail(".*", Reply(403))
    refused = run("inspect", "org/head", HF_TOKEN="hf_aVerySecretToken")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "does not let this token read org/head" in refused.stderr
    assert "hf_aVerySecretToken" not in refused.stderr + told.stderr
    assert "Traceback" not in refused.stderr


def test_the_space_looks_at_the_hub_and_never_at_a_folder(hub, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    look = runpy.run_path(str(SPACE))["look"]
    hub.commit("org/head", folder)
    report, facts = look("org/head")
    assert "sandbox" in report and "FAIL" in report and "vLLM" in report
    assert "Eagle3 head" in facts
    assert hub.sent() < (folder / "model.safetensors").stat().st_size / 50
    for name in (str(folder), "local", "../etc", "<b>x</b>"):
        said, nothing = look(name)
        assert "no Hub id" in said and "<b>" not in said and nothing == ""
    said, nothing = look("org/none")
    assert "no such repository" in said and nothing == ""
