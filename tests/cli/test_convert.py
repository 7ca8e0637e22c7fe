"""`to-vllm` and `to-trtllm`: what they print, what they write, and how they refuse."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.heads import GQA, MLA, MODELOPT_LLAMA, TORCHSPEC_MLA, cut, random_slots, read_bytes, write_head

from kconv.checkpoint.manifest import Manifest, read_manifest, write_manifest
from kconv.cli import main
from kconv.drafters.spec import Norms
from kconv.engines import BY_NAME

VLLM, TRTLLM, MODELOPT = BY_NAME["vllm"], BY_NAME["trtllm"], BY_NAME["modelopt"]
REDUCED = replace(GQA, draft_vocab=40)


def kconv(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def head(tmp_path):
    return write_head(tmp_path / "head", VLLM, MLA, random_slots(MLA))


@pytest.mark.parametrize("command, layout", [("to-trtllm", "trtllm"), ("to-vllm", "vllm")])
def test_a_conversion_writes_the_head_and_says_what_it_did(head, tmp_path, command, layout):
    out = tmp_path / "out"
    done = kconv(command, head, out)
    assert done.exit_code == 0
    assert f"vllm -> {layout}" in done.stdout and f"{len(read_bytes(head))} tensors" in done.stdout
    assert read_bytes(out) == read_bytes(head)
    checked = kconv("verify", out, head)
    assert checked.exit_code == 0 and "source and output" in checked.stdout
    assert kconv("verify", out).exit_code == 0


def test_keys_that_kconv_does_not_know_are_carried_and_said_to_be(head, tmp_path):
    assert "config keys carried" not in kconv("to-trtllm", head, tmp_path / "plain").stdout
    config = json.loads((head / "config.json").read_text()) | {"colour": "blue", "eagle_config": {"depth_hint": 1}}
    (head / "config.json").write_text(json.dumps(config))
    done = kconv("to-trtllm", head, tmp_path / "out")
    assert "config keys copied unchanged: colour, eagle_config.depth_hint\n" in done.stdout


def test_a_conversion_as_json_is_the_manifest_and_nothing_else(head, tmp_path):
    done = kconv("to-trtllm", head, tmp_path / "out", "--json")
    assert (
        Manifest.model_validate_json(done.stdout).model_dump_json()
        == Manifest.model_validate_json((tmp_path / "out" / "kconv.json").read_bytes()).model_dump_json()
    )


@pytest.mark.parametrize("flags", [["--dry-run"], ["--dry-run", "--json"]])
def test_a_dry_run_says_the_plan_and_writes_nothing(head, tmp_path, flags):
    spec = replace(MLA, layers=2)
    head = write_head(tmp_path / "two", VLLM, spec, random_slots(spec))
    before = sorted(tmp_path.rglob("*"))
    shown = kconv("to-trtllm", head, tmp_path / "out", *flags)
    assert shown.exit_code == 0
    assert "layers.1.hidden_norm.weight" in shown.stdout and "layers.1.input_layernorm.weight" in shown.stdout
    assert sorted(tmp_path.rglob("*")) == before
    if "--json" in flags:
        found = json.loads(shown.stdout)
        steps = {step["tensor"]: step["from"] for step in found["steps"]}
        assert steps["layers.1.hidden_norm.weight"] == ["layers.1.input_layernorm.weight"]
        assert found["config"]["hidden_size"] == 48


def test_the_users_word_decides_what_the_config_leaves_open(tmp_path):
    config = cut(TORCHSPEC_MLA, replace(MLA, captured=(2, 30, 58)))
    head = write_head(tmp_path / "head", MODELOPT, MLA, random_slots(MLA), config)
    refused = kconv("to-vllm", head, tmp_path / "out")
    assert refused.exit_code == 1 and "--captured-are" in refused.stderr and not (tmp_path / "out").exists()
    assert kconv("to-vllm", head, tmp_path / "out", "--captured-are", "inputs").exit_code == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    shown = json.loads(kconv("inspect", head, "--json", "--captured", "1,29,57", "--max-positions", 77).stdout)
    assert shown["spec"]["captured"] == [1, 29, 57] and shown["spec"]["max_positions"] == 77


def test_a_targets_depth_decides_absent_layers(tmp_path):
    config = cut(MODELOPT_LLAMA, GQA) | {"eagle_config": {"use_aux_hidden_state": True}}
    head = write_head(tmp_path / "head", MODELOPT, GQA, random_slots(GQA), config)
    target = tmp_path / "target"
    target.mkdir()
    text = {"hidden_size": 48, "num_hidden_layers": 61, "vocab_size": 64, "num_attention_heads": 4}
    text |= {"max_position_embeddings": 1024, "model_type": "kimi_k2"}
    (target / "config.json").write_text(
        json.dumps({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text})
    )
    assert json.loads(kconv("inspect", head, "--json").stdout)["spec"]["captured"] is None
    shown = json.loads(kconv("inspect", head, "--json", "--target", target).stdout)
    assert shown["spec"]["captured"] == [1, 29, 57]


def _edit(head, edit):
    tensors = load_file(head / "model.safetensors")
    edit(tensors)
    save_file(tensors, head / "model.safetensors")


def _config(head, **changes):
    config = json.loads((head / "config.json").read_text()) | changes
    (head / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


FAULTS = {
    "a tensor is missing": (MLA, lambda h: _edit(h, lambda t: t.pop("fc.weight")), "fc.weight is missing"),
    "a tensor too many": (MLA, lambda h: _edit(h, lambda t: t.update(extra=torch.ones(1))), "extra"),
    "a wrong shape": (MLA, lambda h: _edit(h, lambda t: t.update({"norm.weight": torch.ones(2)})), "is [2]"),
    "a flag without weights": (MLA, lambda h: _config(h, fc_norm=True), "fc_norm.0.weight is missing"),
    "weights without a flag": (
        replace(MLA, norms=Norms(fc=True)),
        lambda h: _config(h, fc_norm=False),
        "fc_norm.0.weight",
    ),
    "a map out of range": (REDUCED, lambda h: _edit(h, lambda t: t.update(d2t=torch.full((40,), 60))), "outside"),
    "a map with duplicates": (
        REDUCED,
        lambda h: _edit(h, lambda t: t.update(d2t=torch.tensor([1] + [0] * 39))),
        "already uses",
    ),
    "no config": (MLA, lambda h: (h / "config.json").unlink(), "config.json"),
    "a config that is no JSON": (MLA, lambda h: (h / "config.json").write_text("{"), "config.json"),
    "a key that is missing": (MLA, lambda h: _config(h, rms_norm_eps=...), "rms_norm_eps"),
    "contradicting RoPE": (MLA, lambda h: _config(h, rope_theta=1.0), "rope_theta twice"),
    "an unsupported head": (MLA, lambda h: _config(h, hidden_act="gelu"), "hidden_act"),
    "a cut file": (MLA, lambda h: os.truncate(h / "model.safetensors", 5000), "model.safetensors"),
    "what the engine cannot hold": (
        replace(GQA, norms=Norms(before_residual=True)),
        lambda h: None,
        "norm_before_residual",
    ),
}  # fmt: skip


@pytest.mark.parametrize("spec, spoil, phrase", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_one_message_exit_1_and_nothing_written(tmp_path, spec, spoil, phrase):
    head = write_head(tmp_path / "head", VLLM, spec, random_slots(spec))
    spoil(head)
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    refused = kconv("to-trtllm", head, tmp_path / "out")
    assert (refused.exit_code, refused.stdout) == (1, "")
    first, *rest = refused.stderr.splitlines()
    assert first.startswith("error: ") and phrase in refused.stderr
    assert [line.split(":")[0].strip() for line in rest] in (["where", "fix"], ["where", "fix", "see"], ["fix"])
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))} == before


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_an_existing_output_is_refused_before_the_source_is_looked_at(head, tmp_path, kind):
    out = tmp_path / "out"
    match kind:
        case "folder":
            out.mkdir()
        case "file":
            out.write_text("mine")
        case "link":
            out.symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    for source in (head, tmp_path / "gone"):
        refused = kconv("to-trtllm", source, out)
        assert refused.exit_code == 1 and "already exists" in refused.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["gone", "a" * 300, "file"])
def test_what_is_no_head_is_a_named_fault(tmp_path, name):
    (tmp_path / "file").write_text("x")
    for command in (["inspect"], ["to-vllm"], ["verify"]):
        refused = kconv(*command, tmp_path / name, *([tmp_path / "out"] if command == ["to-vllm"] else []))
        assert refused.exit_code == 1 and refused.stderr.startswith("error: ")


def test_an_unknown_layout_lists_the_known_ones(head):
    refused = kconv("inspect", head, "--from", "sglong")
    assert refused.exit_code == 1 and "trtllm" in refused.stderr and "vllm" in refused.stderr


def run(*arguments, **variables):
    """Run kconv as a user does, in a process of its own."""
    command = [sys.executable, "-c", "from kconv.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)


def test_as_a_process_results_go_to_stdout_and_all_else_to_stderr(head, tmp_path):
    done = run("to-trtllm", head, tmp_path / "out", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["layout"] == "trtllm"
    assert read_bytes(tmp_path / "out") == read_bytes(head)


def test_as_a_process_a_fault_has_no_traceback(head):
    refused = run("verify", head)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("error: ") and "Traceback" not in refused.stderr


def test_a_path_that_is_not_utf8_is_converted(head, tmp_path):
    odd = head.rename(tmp_path / os.fsdecode(b"h\xff"))
    done = kconv("to-trtllm", odd, tmp_path / "out")
    assert done.exception is None and done.exit_code == 0
    odd.rename(head)
    assert read_bytes(tmp_path / "out") == read_bytes(head)


def test_an_output_whose_path_is_not_utf8_is_written_and_verified(head, tmp_path):
    """As a process: a test's own stdout would take what a terminal's refuses."""
    out = tmp_path / os.fsdecode(b"o\xff")
    for command in (["to-trtllm", head, out], ["verify", out], ["inspect", out]):
        done = run(*command)
        assert (done.returncode, done.stderr) == (0, "")
    # Under a name that the safetensors library takes.
    assert read_bytes(out.rename(tmp_path / "renamed")) == read_bytes(head)
    assert kconv("to-vllm", head, tmp_path / "next", "--target", os.fsdecode(b"gone\xff")).exit_code == 1


def test_in_a_locale_without_utf8_a_path_is_written_and_named_in_it(head, tmp_path):
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    out, report = tmp_path / "ä", tmp_path / "ö"
    for command in (["to-vllm", head, out], ["verify", out], ["validate", out, "--source", head, "--out", report]):
        done = run(*command, **plain)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert json.loads((report / "report.json").read_text(encoding="utf-8"))["subject"] == out.name
    # An error within a report too, and one that ends the command.
    (out / "gone").mkdir()
    gone = run("validate", out / "gone", "--json", **plain)
    assert gone.returncode == 1 and json.loads(gone.stdout)["subject"] == str(out / "gone")


def test_what_is_not_for_a_terminal_is_not_folded(head, tmp_path):
    """A name that is cut at the eightieth column cannot be searched for."""
    for command in (["inspect", head], ["to-trtllm", head, tmp_path / "out", "--dry-run"]):
        shown = run(*command).stdout
        assert "layers.0.self_attn.kv_a_proj_with_mqa.weight" in shown and "…" not in shown


def test_a_conversion_says_what_it_dropped_and_why(tmp_path):
    spec = replace(GQA, draft_vocab=64)
    head = write_head(tmp_path / "head", VLLM, spec, random_slots(spec))
    # A name in which a console would look for its markup.
    extra = {"[/bold].rotary_emb.inv_freq": torch.ones(4), "d2t": torch.zeros(64, dtype=torch.int64)}
    _edit(head, lambda tensors: tensors.update(extra))
    shown = kconv("to-trtllm", head, tmp_path / "out", "--dry-run")
    assert shown.exit_code == 0 and "dropped: engines compute RoPE's frequencies" in shown.stdout
    done = kconv("to-trtllm", head, tmp_path / "out")
    assert "d2t dropped: a full vocabulary needs no map" in done.stdout
    assert "[/bold].rotary_emb.inv_freq dropped: " in done.stdout and "byte-identical" in done.stdout


def test_a_conversion_that_rounds_says_so(tmp_path):
    spec = replace(GQA, dtype="F32")
    head = write_head(tmp_path / "head", VLLM, spec, random_slots(spec))
    done = kconv("to-trtllm", head, tmp_path / "out", "--dtype", "bfloat16")
    # All are rounded alike, and one line says it.
    assert "\nfc.weight and 13 more cast: F32 rounded to the nearest BF16" in done.stdout
    assert "differ from the source" in done.stdout


def _other_bytes(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors")


def _other_list(folder):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}))


def _other_list_in_both(folder):
    """Change config.json, and what kconv.json records of the file, but not what it says of the head."""
    _other_list(folder)
    text = (folder / "config.json").read_bytes()
    files = read_manifest(folder).files
    now = {"size": len(text), "sha256": sha256(text).hexdigest()}
    told = tuple(one.model_copy(update=now) if one.name == "config.json" else one for one in files)
    write_manifest(folder, read_manifest(folder).model_copy(update={"files": told}))


def test_a_manifest_that_says_something_else_of_the_head_is_found(head, tmp_path):
    assert kconv("to-vllm", head, tmp_path / "written").exit_code == 0
    assert "K301" not in kconv("validate", tmp_path / "written").stdout
    _other_list_in_both(tmp_path / "written")
    for words in (("validate",), ("validate", "--headers-only"), ("verify",)):
        found = kconv(*words, tmp_path / "written")
        assert found.exit_code == 1 and "it says captured" in found.output


@pytest.mark.parametrize(
    ("change", "named"),
    [(_other_bytes, "fc.weight"), (_other_list, "config.json"), (_other_list_in_both, "config.json")],
)
def test_what_kconv_wrote_and_somebody_changed_is_not_converted(head, tmp_path, change, named):
    assert kconv("to-vllm", head, tmp_path / "written").exit_code == 0
    change(tmp_path / "written")
    refused = kconv("to-trtllm", tmp_path / "written", tmp_path / "out")
    assert refused.exit_code == 1 and f"{named} differs from kconv.json" in refused.stderr
    assert not (tmp_path / "out").exists()
    # Without the manifest it is a head like any other, and its user's.
    (tmp_path / "written" / "kconv.json").unlink()
    assert kconv("to-trtllm", tmp_path / "written", tmp_path / "out", "--captured-are", "inputs").exit_code == 0
