"""`kconv validate`: its exit codes, its report in three forms, and `--explain`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save, save_file
from support.changes import P, drop, edit, nest, one_nan, put
from support.faults import GQA_VLLM, MLA_VLLM, MODELOPT_GQA, REDUCED, Fault
from support.good_heads import GOOD, trained_slots
from support.heads import GQA, TARGET
from support.published import CAPTURED, EAGLE3, MASK, RESIDUAL, THETA

from kconv.cli import main
from kconv.validate.report import Report, portable
from kconv.validate.rules.table import all_rules


def kconv(*arguments: object):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return MLA_VLLM.write(tmp_path / "good")


def broken(folder: Path, base, change) -> Path:
    return Fault("", "", base, change).write(folder)


def test_a_good_head_is_exit_0_and_says_for_whom(good):
    shown = kconv("validate", good)
    assert (shown.exit_code, "no errors" in shown.stdout) == (0, True)
    assert "checked for vllm-v1, vllm-v2 (the engines that the layout is written for)" in shown.stdout
    assert "checked for sglang (as requested)" in kconv("validate", good, "--for", "sglang").stdout


def test_a_broken_head_is_exit_1_with_its_rule_and_a_fix(tmp_path):
    folder = broken(tmp_path / "head", MLA_VLLM, drop("fc.weight"))
    shown = kconv("validate", folder)
    assert shown.exit_code == 1
    assert "error K104 fc.weight" in shown.stdout and "fix: " in shown.stdout and "1 error" in shown.stdout


UNREADABLE = {
    "K001": lambda folder: (folder / "config.json").unlink(),
    "K002": lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 100),
    "K008": lambda folder: (folder / "config.json").write_text("[]"),
    "K010": lambda folder: (folder / "config.json").write_text(
        json.dumps({k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k != "hidden_size"})
    ),
}


@pytest.mark.parametrize("rule, spoil", UNREADABLE.items(), ids=UNREADABLE)
@pytest.mark.parametrize("flags", [[], ["--headers-only"], ["--for", "all"]])
def test_a_head_that_cannot_be_read_has_a_report_all_the_same(good, tmp_path, rule, spoil, flags):
    spoil(good)
    out = tmp_path / "out"
    shown = kconv("validate", good, "--json", "--out", out, *flags)
    assert (shown.exit_code, shown.stderr) == (1, "")
    report = Report.model_validate_json(shown.stdout)
    assert portable(report) == Report.model_validate_json((out / "report.json").read_text())
    assert rule in {finding.rule for finding in report.findings} and rule in (out / "report.md").read_text()


def test_what_cannot_be_compared_with_its_source_says_so(good, tmp_path):
    other = broken(tmp_path / "broken", MLA_VLLM, drop("fc.weight"))
    report = json.loads(kconv("validate", other, "--source", good, "--json").stdout)
    assert report["provenance"]["not_measured"] and report["figures"]["identical"] is None


def test_a_warning_is_exit_0_unless_strict(tmp_path):
    folder = broken(tmp_path / "head", GQA_VLLM, put(rope_scaling=None))
    warned = broken(tmp_path / "warned", MODELOPT_GQA, nest())
    assert kconv("validate", folder, "--strict").exit_code == 0
    assert kconv("validate", warned, "--for", "vllm-v2").exit_code == 0
    shown = kconv("validate", warned, "--for", "vllm-v2", "--strict")
    assert shown.exit_code == 1 and "warning K143" in shown.stdout and "1 warning" in shown.stdout


LLAMA = EAGLE3["SafeAILab, a pickle"]  # yuhuili's, whose README names the target
NAMED = "--target meta-llama/Llama-3.1-8B-Instruct"
SAID = f"UNDECIDED vLLM: needs {NAMED}\n"
# How a head must be read decides what an engine makes of these; a wrong number of layers is wrong however it is read.
OPEN = {CAPTURED: "K006", THETA: "K162", RESIDUAL: "K015", MASK: "K025"}


def test_a_fact_left_open_is_undecided_and_has_an_exit_code_of_its_own(tmp_path):
    head, target = LLAMA.write(tmp_path / "head"), LLAMA.write_target(tmp_path / "target")
    shown = kconv("validate", head, "--for", "vllm", "--headers-only")
    assert shown.exit_code == 3 and shown.stdout.endswith(SAID)
    assert "FAIL" not in shown.stdout and "error" not in shown.stdout.replace("no errors", "")
    for decided in (("--target-layers", 32), ("--target", target)):
        shown = kconv("validate", head, "--for", "vllm", "--headers-only", *decided)
        assert shown.exit_code == 0 and "\nPASS vLLM\n" in shown.stdout and "K143" not in shown.stdout
    # This number is not of the target that the three layers are the default of.
    shown = kconv("validate", head, "--for", "vllm", "--headers-only", "--captured", "1,15,28")
    assert shown.exit_code == 0 and shown.stdout.count("warning K143") == 1 and ": vLLM finds no list" in shown.stdout
    shown = kconv("validate", head, "--for", "vllm", "--headers-only", "--captured", "1,15,28", "--target-layers", 36)
    assert shown.exit_code == 1 and shown.stdout.count("error K142") == 1


def test_strict_fails_in_words_too(tmp_path):
    head = LLAMA.write(tmp_path / "head")
    shown = kconv("validate", head, "--for", "vllm", "--headers-only", "--strict")
    assert shown.exit_code == 1 and shown.stdout.endswith("FAIL vLLM (strict: 1 undecided, 1 warning)\n")
    warned = broken(tmp_path / "warned", MODELOPT_GQA, nest())
    shown = kconv("validate", warned, "--for", "vllm-v2", "--for", "sglang", "--strict", "--out", tmp_path / "out")
    # Of SGLang there is nothing to warn.
    assert shown.exit_code == 1 and "FAIL vLLM (strict: 1 warning)" in shown.stdout and "PASS SGLang" in shown.stdout
    found = json.loads((tmp_path / "out" / "report.json").read_text())["verdicts"]
    assert [(one["outcome"], one["errors"]) for one in found] == [("fail", 0), ("pass", 0)]
    assert "FAIL (strict): 1 warning" in (tmp_path / "out" / "report.md").read_text()


def test_an_error_beside_what_is_open_fails(tmp_path):
    head = LLAMA.write(tmp_path / "head")
    shown = kconv("validate", head, "--for", "vllm", "--for", "sglang", "--headers-only", "--json")
    assert shown.exit_code == 1
    found = {one["engine"]: one for one in json.loads(shown.stdout)["verdicts"]}
    assert {name: one["outcome"] for name, one in found.items()} == {"vLLM": "undecided", "SGLang": "fail"}
    assert found["vLLM"]["runners"] == ["vllm-v1", "vllm-v2"] and found["vLLM"]["undecided"] == 1
    assert found["vLLM"]["needs"] == found["SGLang"]["needs"] == [NAMED]
    assert (found["SGLang"]["errors"], found["vLLM"]["errors"]) == (1, 0)


def test_what_is_undecided_stands_in_each_form_of_the_report(tmp_path):
    out = tmp_path / "out"
    head = LLAMA.write(tmp_path / "head")
    assert kconv("validate", head, "--for", "vllm", "--headers-only", "--out", out).exit_code == 3
    for name in ("report.md", "report.html"):
        text = (out / name).read_text()
        assert f"UNDECIDED: needs {NAMED}, 1 warning" in text.replace("\\", "") and "Do not serve it" not in text, name
    assert '<li class="undecided"><b>vLLM</b>' in text
    report = Report.model_validate_json((out / "report.json").read_text())
    assert report.outcome == "undecided" and not report.clean
    # A verdict follows from the findings, whatever a file says.
    held = json.loads((out / "report.json").read_text())
    held["verdicts"][0]["outcome"] = "pass"
    assert Report.model_validate(held) == report and report.verdicts[0].outcome == "undecided"


@pytest.mark.parametrize("form", EAGLE3.values(), ids=EAGLE3)
def test_what_inspect_leaves_open_validate_leaves_open_and_names_an_option_that_decides_it(form, tmp_path):
    head = form.write(tmp_path / "head")
    found = json.loads(kconv("validate", head, "--for", "all", "--headers-only", "--json").stdout)["findings"]
    left = {one["rule"]: one["needs"].split()[0] for one in found if one["severity"] == "undecided"}
    assert left.keys() == {OPEN[fact] for fact in form.leaves_open if fact in OPEN}
    assert all(needs for needs in left.values())
    assert not any(one["needs"] for one in found if one["severity"] != "undecided")
    known = {option for param in main.get_command(None, "validate").params for option in param.opts}  # pyright: ignore
    assert known >= set(left.values())


def test_what_stops_a_conversion_names_the_target_too(hub, tmp_path):
    head = LLAMA.write(tmp_path / "head")
    hub.commit("org/head", head)
    for name in (head, "org/head"):
        shown = kconv("to-vllm", name, tmp_path / "out")
        assert shown.exit_code == 1 and NAMED in shown.stderr and not (tmp_path / "out").exists()
    shown = kconv("validate", "org/head", "--for", "vllm", "--headers-only")
    assert shown.exit_code == 3 and shown.stdout.endswith(SAID)


def test_headers_only_reads_no_value(tmp_path):
    folder = broken(tmp_path / "head", REDUCED, edit("lm_head.weight", one_nan))
    assert kconv("validate", folder).exit_code == 1
    assert kconv("validate", folder, "--headers-only").exit_code == 0


@pytest.mark.parametrize("more", [["--prompts", "p.jsonl", "--target", "."], ["--source", "."]])
def test_headers_only_and_what_is_about_values_is_misuse(good, more):
    shown = kconv("validate", good, "--headers-only", *more)
    assert shown.exit_code == 2 and "reads no weights" in shown.stderr


def test_the_same_report_in_three_forms(tmp_path):
    folder = broken(tmp_path / "head", MLA_VLLM, drop("fc.weight", f"{P}hidden_norm.weight"))
    out = tmp_path / "a" / "report"
    shown = kconv("validate", folder, "--json", "--out", out)
    report = Report.model_validate_json((out / "report.json").read_text())
    assert report == portable(Report.model_validate_json(shown.stdout)) and report.subject == "head"
    text = (out / "report.md").read_text()
    assert "2 errors, 0 warnings" in text and "Do not serve it" in text
    for finding in report.findings:
        assert finding.rule in text and finding.message.replace("|", "\\|") in text


@pytest.mark.parametrize("name", ["report.json", "report.md", "report.html"])
def test_a_report_that_is_there_is_not_written_over(good, tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert kconv("validate", good, "--out", out).exit_code == 0
    for other in {"report.json", "report.md", "report.html"} - {name}:
        (out / other).unlink()
    (out / name).write_text("mine")
    shown = kconv("validate", good, "--out", out)
    assert shown.exit_code == 1 and f"{name} already exists" in shown.stderr
    assert sorted(file.name for file in out.iterdir()) == sorted(["notes.txt", name])
    assert (out / name).read_text() == "mine"


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_read(good, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.delattr("kconv.validate.files.open_subject")
    shown = kconv("validate", good, "--out", tmp_path / "file" / "report")
    assert shown.exit_code == 1 and "could not be written" in shown.stderr


@pytest.mark.parametrize("command", ["validate", "card", "publish"])
@pytest.mark.parametrize("rule", ["P113", "l3"])
def test_a_check_of_a_release_is_explained_too(command, rule):
    shown = kconv(command, "--explain", rule).stdout
    assert shown.startswith(f"{rule.upper()} ") and "fix: " in shown and "engines" not in shown


def test_a_rule_is_explained():
    shown = kconv("validate", "--explain", "K133")
    assert shown.exit_code == 0
    for phrase in ("K133 lm-head-random (error)", "SGLang", "fix: ", "engines: sglang", "https://github.com/"):
        assert phrase in shown.stdout
    assert kconv("validate", "--explain", "lm-head-random").stdout == shown.stdout


def test_all_rules_are_listed():
    shown = kconv("validate", "--explain", "all")
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert len(lines) > 100 and any(line.split()[:2] == ["K133", "lm-head-random"] for line in lines)


@pytest.mark.parametrize("words", [("--explain", "K133", "--json"), ("--json", "--explain", "lm-head-random")])
def test_a_rule_is_one_json_object(words):
    rule = all_rules()["K133"]
    shown = kconv("validate", *words)
    assert shown.exit_code == 0 and shown.stderr == ""
    assert json.loads(shown.stdout) == {
        "rule": "K133",
        "name": "lm-head-random",
        "severity": "error",
        "sentence": rule.sentence,
        "fix": rule.fix,
        "engines": ["sglang"],
        "versions": rule.versions,
        "seen_in": rule.seen_in,
    }


def test_every_rule_is_in_one_json_object():
    told = json.loads(kconv("validate", "--json", "--explain", "all").stdout)
    assert [rule["rule"] for rule in told["rules"]] == list(all_rules())


def test_a_rule_that_does_not_exist_is_a_named_fault():
    shown = kconv("validate", "--explain", "K999")
    assert shown.exit_code == 1 and "--explain all" in shown.stderr and shown.stdout == ""


def test_an_engine_that_does_not_exist_is_misuse(good):
    assert kconv("validate", good, "--for", "ollama").exit_code == 2


def test_a_head_on_the_hub_is_checked_by_its_headers_alone(hub, tmp_path):
    spec = replace(REDUCED.spec, vocab=20_000, draft_vocab=15_000)
    folder = replace(REDUCED, spec=spec).write(tmp_path / "head")
    size = (folder / "model.safetensors").stat().st_size
    sha = hub.commit("org/head", folder)
    shown = kconv("validate", "org/head", "--headers-only", "--json")
    assert shown.exit_code == 0 and json.loads(shown.stdout)["subject"] == f"org/head@{sha}"
    assert sum(served.sent for served in hub.served) < size / 10


@pytest.mark.parametrize("asked, code", [("sglang", 1), ("trtllm", 1), ("vllm", 0)])
def test_an_embedding_that_is_not_the_targets_is_found_where_it_is_not_served(tmp_path, asked, code):
    good, own = GOOD["gqa, portable"], trained_slots(GQA)
    head, target = good.write(tmp_path / "head"), tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGET))
    save_file({"model.embed_tokens.weight": own["embed_tokens"]}, target / "model.safetensors")
    assert kconv("validate", head, "--for", asked, "--target", target).exit_code == 0
    save_file({"model.embed_tokens.weight": torch.randn_like(own["embed_tokens"])}, target / "model.safetensors")
    shown = kconv("validate", head, "--for", asked, "--target", target)
    assert shown.exit_code == code and ("K213 embed_tokens.weight" in shown.stdout) is bool(code)
    assert "K214" not in shown.stdout


@pytest.mark.parametrize("slot, name", [("lm_head", "lm_head.weight"), ("embed_tokens", "model.embed_tokens.weight")])
def test_rows_that_are_another_tokens_are_found_beside_the_target(tmp_path, slot, name):
    good, own = GOOD["gqa, portable"], trained_slots(GQA)
    head, target = good.write(tmp_path / "head"), tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGET))
    save_file({name: own[slot]}, target / "model.safetensors")
    assert kconv("validate", head, "--for", "vllm", "--target", target).exit_code == 0
    moved = torch.cat([own[slot][:20], own[slot][20:].roll(1, 0)])
    save_file({name: moved}, target / "model.safetensors")
    # A source that has the same rows does not excuse them.
    source = shutil.copytree(head, tmp_path / "source")
    for beside in ((), ("--source", source)):
        shown = kconv("validate", head, "--for", "vllm", "--target", target, *beside)
        assert shown.exit_code == 1
        assert f"K217 {slot}.weight" in shown.stdout and "from row 20 on" in " ".join(shown.stdout.split())


@pytest.mark.parametrize("asked, said", [("all", True), ("sglang", True), ("trtllm", True), ("vllm", False)])
def test_an_embedding_that_was_not_compared_is_said_where_it_is_not_served(hub, tmp_path, asked, said):
    head, target = GOOD["gqa, portable"].write(tmp_path / "head"), tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGET))
    hub.commit("org/target", {"config.json": json.dumps(TARGET).encode()})
    for options in ([], ["--target", "org/target"], ["--target", target]):
        shown = kconv("validate", head, "-v", "--for", asked, *options)
        assert shown.exit_code == 0 and ("note K214 embed_tokens.weight" in shown.stdout) is said


@pytest.mark.parametrize("asked, code", [("sglang", 1), ("vllm", 0)])
def test_of_a_hubs_target_the_file_with_the_embedding_is_fetched_where_it_is_served(hub, tmp_path, asked, code):
    head, own = GOOD["gqa, portable"].write(tmp_path / "head"), trained_slots(GQA)
    shards = {
        "model-1.safetensors": save({"model.embed_tokens.weight": own["embed_tokens"].flip(0)}),
        "model-2.safetensors": save({"lm_head.weight": own["lm_head"]}),
    }
    placed = {"model.embed_tokens.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}
    index = {"model.safetensors.index.json": json.dumps({"weight_map": placed}).encode()}
    hub.commit("org/target", {"config.json": json.dumps(TARGET).encode()} | index | shards)
    shown = kconv("validate", head, "--for", asked, "--target", "org/target")
    assert shown.exit_code == code and ("K213 embed_tokens.weight" in shown.stdout) is bool(code)
    first, second = (sha256(data).hexdigest() for data in shards.values())
    assert bool(hub.sent(first)) is bool(code) and not hub.sent(second)
    headers = kconv("validate", head, "--for", asked, "--target", "org/target", "--headers-only")
    assert headers.exit_code == 0 and "K213" not in headers.stdout


def test_a_target_that_is_not_whole_is_asked_for_its_embedding_alone(tmp_path):
    whole, lean = GOOD["gqa, portable"].write(tmp_path / "whole"), tmp_path / "lean"
    Fault("", "", GOOD["gqa, portable"], drop("embed_tokens.weight")).write(lean)
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGET))
    placed = {"model.embed_tokens.weight": "model-1.safetensors"}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    for missing in (None, b"version https://git-lfs.github.com/spec/v1\n"):
        if missing:
            (target / "model-1.safetensors").write_bytes(missing)
        assert kconv("validate", whole, "--for", "vllm", "--target", target).exit_code == 0
        assert kconv("validate", lean, "--for", "sglang", "--target", target).exit_code == 0
        refused = kconv("validate", whole, "--for", "sglang", "--target", target)
        assert refused.exit_code == 1 and "model-1.safetensors" in refused.stderr


@pytest.mark.parametrize(
    "given, said",
    [
        ((), ""),
        (("--seed", "1"), "--seed: only with --prompts"),
        (("--draft-tokens", "2"), "--draft-tokens: only with --prompts or --states"),
        (("--calibrated-on", "."), "--calibrated-on: only with --prompts or --states"),
        (("--trust-remote-code",), "--trust-remote-code: only with --prompts"),
        (("--states", ".", "--new-tokens", "5"), "--new-tokens: only with --prompts"),
        (("--states", ".", "--prompt-tokens", "5"), "--prompt-tokens: only with --prompts"),
        (("--states", ".", "--seed", "0"), "--seed: only with --prompts"),
        (("--prompts", "p.jsonl", "--allow-pickle"), "--allow-pickle: only with --states"),
    ],
    ids=str,
)
def test_an_option_that_would_be_passed_over_is_wrong_usage(good, tmp_path, given, said):
    shown = kconv("validate", good, "--target", tmp_path / "target", *given)
    assert (shown.exit_code == 2 and said in shown.output) if said else "goes with" not in shown.output


def test_a_target_that_does_not_fit_into_memory_is_measured_on_its_states(good, tiny_target, tmp_path, monkeypatch):
    (tmp_path / "texts.jsonl").write_text('{"prompt": "A text that is long enough to draft for."}\n')
    for name, values in (("virtual_memory", {"available": 0}), ("swap_memory", {"free": 0})):
        monkeypatch.setattr(psutil, name, lambda values=values: type("Memory", (), values))
    shown = kconv("validate", good, "--target", tiny_target, "--prompts", tmp_path / "texts.jsonl")
    assert shown.exit_code == 1
    assert "the target needs" in shown.output and "pass them with --states" in shown.output
