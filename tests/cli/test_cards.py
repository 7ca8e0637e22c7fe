"""`kconv card`: what it writes, what it lists, what it checks, and its exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import ModelCard
from support.heads import MLA, random_slots, write_head
from support.releases import APACHE, KIMI, MIT

from kconv.checkpoint.folder import open_checkpoint
from kconv.cli import main
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import by_name

APACHE_FILE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
FIGURE = {
    "metric": "al_incl_bonus", "value": 2.5, "draft_tokens": 3, "tree": "chain", "averaging": "macro_request",
    "engine": "vllm", "engine_version": "0.32.0", "dataset": "MT-Bench", "prompts": 80, "date": "2026-11-21",
    "measured_by": "self",
}  # fmt: skip


@pytest.fixture
def head(tmp_path: Path) -> Path:
    source = write_head(tmp_path / "source", by_name("trtllm"), MLA, random_slots(MLA))
    execute(plan(read_head(open_checkpoint(source)), by_name("portable")), tmp_path / "head")
    return tmp_path / "head"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["card", *map(str, arguments)])


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def acceptance(tmp_path: Path, **changes) -> Path:
    return write(tmp_path / "acceptance.json", json.dumps({"head": "h", "rows": [FIGURE]} | changes))


def test_a_card_of_every_kind_of_evidence(head, tmp_path):
    facts = write(tmp_path / "facts.yaml", "name: org/head\nsummary: A head.\nlicense: {id: apache-2.0}\n")
    license = write(tmp_path / "text", "Apache License\nVersion 2.0, January 2004\n")
    result = run(
        head, "--style", "nvidia", "--facts", facts, "--acceptance", acceptance(tmp_path), "--license-file", license,
        "--base-model", "moonshotai/Kimi-K2.6", "--model-index",
    )  # fmt: skip
    assert (result.exit_code, result.stdout) == (0, f"{head / 'README.md'}\n"), result.output
    # What the checks still find is told, and not on stdout.
    assert "warning L3 LICENSE-TARGET" in result.stderr
    card = ModelCard.load(head / "README.md")
    assert (card.data.license, card.data.base_model) == ("apache-2.0", ["moonshotai/Kimi-K2.6"])
    [figure] = card.data.eval_results
    assert (figure.metric_type, figure.metric_value, figure.dataset_name) == ("acceptance_length", 2.5, "MT-Bench")
    assert "| all | MT-Bench | 80 | 2.500 |" in card.text and "![Acceptance" in card.text
    assert {"LICENSE", "NOTICE", "acceptance.png"} < {file.name for file in head.iterdir()}
    assert CliRunner().invoke(main, ["verify", str(head)]).exit_code == 0


@pytest.mark.parametrize("engine", ["vllm serve", "trtllm-serve", "sglang.launch_server"])
def test_the_quick_start_is_the_launch_files(head, tmp_path, engine):
    run(head, "--style", "compact", "--facts", write(tmp_path / "facts.yaml", "name: org/head\n"))
    text = (head / "README.md").read_text()
    assert engine in text and "org/head" in text
    written = (head / "serve-trtllm.yaml").read_text().replace("PATH_OR_ID_OF_THIS_HEAD", "org/head")
    assert "\n".join(line for line in written.splitlines() if not line.startswith("#")) in text


def test_what_is_missing_is_listed_and_nothing_written(head):
    result = run(head, "--style", "nvidia", "--missing")
    assert result.exit_code == 1
    assert "summary: what it is, in your own words" in result.stdout.splitlines()
    assert "facts; kconv card --init writes a file to state them" in result.stderr
    assert not (head / "README.md").exists()


def test_a_facts_file_is_started_with_what_the_manifest_knows(head, tmp_path):
    file = tmp_path / "facts.yaml"
    result = run(head, "--init", file, "--base-model", "org/target")
    assert (result.exit_code, result.stdout) == (0, f"{file}\n") and not (head / "README.md").exists()
    assert "base_model: org/target" in file.read_text() and "known: MLA" in file.read_text()
    run(head, "--facts", file, "--style", "nvidia")
    assert "base_model:\n- org/target" in (head / "README.md").read_text()
    assert run(head, "--init", file).exit_code == 1
    assert run(head, "--init", file, "--check").exit_code == 2


def test_a_written_card_says_how_much_it_lacks_and_is_written_again_with_force(head):
    result = run(head, "--style", "nvidia")
    assert "facts; kconv card --missing lists what to state" in result.stderr
    assert "already" in run(head, "--style", "nvidia").stderr
    assert (head / "README.md").write_text("mine") and run(head, "--force").stdout == f"{head / 'README.md'}\n"
    assert "mine" not in (head / "README.md").read_text()


def test_a_head_that_kconv_did_not_make_has_a_card_where_facts_name_it(tmp_path):
    (tmp_path / "head").mkdir()
    assert run(tmp_path / "head").exit_code == 1
    facts = write(tmp_path / "facts.yaml", "name: nvidia/Kimi-K2.6-Eagle3\n")
    run(tmp_path / "head", "--facts", facts, "--style", "nvidia")
    assert "nvidia/Kimi-K2.6-Eagle3" in (tmp_path / "head" / "README.md").read_text()


def test_checks_say_what_is_owed_and_write_nothing(head, tmp_path):
    before = sorted(head.iterdir())
    result = run(head, "--check")
    assert result.exit_code == 1 and "error L2 README.md" in result.stdout and sorted(head.iterdir()) == before
    license = write(tmp_path / "text", "Apache License\nVersion 2.0, January 2004\n")
    arguments = (head, "--license", "apache-2.0", "--base-model", "org/target", "--no-chart")
    assert run(*arguments, "--license-file", license).exit_code == 0
    result = run(*arguments, "--check")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, f"{head}: license checks passed")
    assert result.stdout.startswith("note L3 NOTICE: the license of org/target is not stated")


def test_a_card_under_apache_needs_no_file_and_names_the_head_as_it_is_told(head):
    result = run(head, "--name", "org/head", "--base-model", "org/target", "--license", "Apache-2.0")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (0, f"{head}: license checks passed"), result.stderr
    # The file at https://www.apache.org/licenses/LICENSE-2.0.txt, as the Hub's models have it.
    assert sha256((head / "LICENSE").read_bytes()).hexdigest() == APACHE_FILE
    card = (head / "README.md").read_text()
    assert "\n# org/head\n" in card and "[LICENSE](LICENSE)" in card


def test_a_card_that_lacks_what_is_owed_is_written_and_no_success(head):
    result = run(head, "--base-model", "org/target")
    assert (result.exit_code, result.stdout) == (1, f"{head / 'README.md'}\n")
    assert "error L2 README.md: its front matter states no license\n  fix: " in result.stderr


@pytest.mark.parametrize("name", ["MODMIT", "LICENSE-TARGET"])
def test_the_targets_text_is_used_and_what_the_findings_ask_for_settles_them(head, tmp_path, name):
    """The findings' own commands, with DIR and FILE filled in: none is what was just done."""
    own, theirs = write(tmp_path / "LICENSE", MIT), write(tmp_path / name, KIMI)
    words = ("--base-model", "moonshotai/Kimi-K2-Instruct", "--license", "MIT", "--force", "--style", "compact")
    result = run(head, *words)
    assert result.exit_code == 1
    assert {line.split()[1] for line in result.stderr.splitlines() if line.startswith(("error", "warning"))} == {
        "L3",
        "L5",
    }
    assert "--license-file FILE --license mit" in result.stderr and "--license-file LICENSE-TARGET" in result.stderr
    result = run(head, *words, "--license-file", own, "--license-file", theirs)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (0, f"{head}: license checks passed"), result.stderr
    assert (head / "LICENSE").read_text() == MIT and (head / "LICENSE-TARGET").read_text() == KIMI
    assert '"Kimi K2.6"' in (head / "NOTICE").read_text()
    assert "licensed under the Modified MIT License" in (head / "README.md").read_text()


def test_a_text_of_neither_is_refused_by_its_name(head, tmp_path):
    own, other = write(tmp_path / "LICENSE", APACHE), write(tmp_path / "OTHER", MIT)
    words = ("--base-model", "org/target", "--license", "apache-2.0", "--style", "compact", "--license-file", own,
             "--license-file")  # fmt: skip
    refused = run(head, *words, other)
    assert refused.exit_code == 1 and "OTHER is the text of the MIT License" in refused.stderr
    assert not (head / "README.md").exists()
    # As its fix says: a file of the name that the target's text has in a folder.
    assert run(head, *words, other.rename(tmp_path / "LICENSE-TARGET")).exit_code == 0
    assert (head / "LICENSE").read_text() == APACHE and "MIT License" in (head / "README.md").read_text()


def test_licenses_are_fetched_from_the_hub(head, tmp_path, hub):
    kimi = "Modified MIT License\nCopyright (c) 2025 Moonshot AI\nPermission is hereby granted, free of charge ... "
    kimi += 'prominently display "Kimi K9" on the user interface'
    apache = "Apache License\nVersion 2.0, January 2004\n"
    for repo, text in {"moonshotai/Kimi": kimi, "org/source": apache}.items():
        hub.commit(repo, {"LICENSE": text.encode(), "config.json": b"{}", "model.safetensors": b""})
    names = ("--target", "moonshotai/Kimi", "--base-model", "moonshotai/Kimi", "--source", "org/source")
    result = run(head, *names, "--license", "apache-2.0")
    assert result.exit_code == 0, result.output
    assert (head / "LICENSE").read_text().startswith("Apache") and "Kimi K9" in (head / "LICENSE-TARGET").read_text()
    assert '"Kimi K9"' in (head / "NOTICE").read_text()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--license", "llama3.1.1"), "no license 'llama3.1.1'; did you mean llama3.1"),
        (("--facts", "nowhere.yaml"), "there is no facts file nowhere.yaml"),
        (("--acceptance", "nowhere.json"), "there is no nowhere.json"),
        (("--license-file", "nowhere"), "there is no file nowhere"),
    ],
)
def test_bad_input_is_named_and_nothing_written(head, arguments, what):
    result = run(head, *arguments)
    assert result.exit_code == 1 and what in result.stderr and "Traceback" not in result.output
    assert not (head / "README.md").exists() and not (head / "NOTICE").exists()


@pytest.mark.parametrize("more", [{"model.safetensors": "0" * 64}, {"more.safetensors": "0" * 64}, {}])
def test_evidence_of_other_weights_is_refused(head, tmp_path, more):
    own = {"model.safetensors": sha256((head / "model.safetensors").read_bytes()).hexdigest()}
    figures = acceptance(tmp_path, weights=own | more)
    # A head in more files than the evidence knows is another head too.
    if not more:
        manifest = json.loads((head / "kconv.json").read_text())
        manifest["files"].append({"name": "more.safetensors", "size": 0, "sha256": "0" * 64})
        write(head / "kconv.json", json.dumps(manifest))
    result = run(head, "--acceptance", figures)
    assert result.exit_code == 1 and "other weights" in result.stderr
    assert not (head / "README.md").exists()


def digest(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def test_figures_of_this_very_head_are_taken(head, tmp_path):
    own = {"model.safetensors": digest(head / "model.safetensors")}
    figures = acceptance(tmp_path, weights=own, config=digest(head / "config.json"))
    run(head, "--acceptance", figures, "--no-chart")
    assert "2.500" in (head / "README.md").read_text()


def test_figures_of_the_same_weights_that_capture_other_layers_are_refused(tmp_path):
    """The weights are the same bytes, as only the config says which layers the target hands over."""
    folders = {}
    for captured in ((1, 29, 57), (2, 4, 6)):
        spec = replace(MLA, captured=captured)
        source = write_head(tmp_path / f"source{captured[0]}", by_name("trtllm"), spec, random_slots(spec))
        folders[captured] = tmp_path / f"head{captured[0]}"
        execute(plan(read_head(open_checkpoint(source)), by_name("portable")), folders[captured])
    right, wrong = folders.values()
    own = {"model.safetensors": digest(right / "model.safetensors")}
    assert own == {"model.safetensors": digest(wrong / "model.safetensors")}
    figures = acceptance(tmp_path, weights=own, config=digest(right / "config.json"))
    run(right, "--acceptance", figures, "--no-chart")
    assert "2.500" in (right / "README.md").read_text()
    result = run(wrong, "--acceptance", figures, "--no-chart")
    assert result.exit_code == 1 and "another config.json than this folder's" in result.stderr
    assert not (wrong / "README.md").exists()


@pytest.mark.parametrize("evidence", ["--report", "--acceptance"])
def test_another_heads_evidence_is_refused_by_a_folder_that_kconv_did_not_make_too(head, tmp_path, evidence):
    said = json.loads(CliRunner().invoke(main, ["validate", str(head), "--json"]).stdout)
    figures = acceptance(tmp_path, weights=said["weights"], config=said["config"])
    file = {"--report": write(tmp_path / "report.json", json.dumps(said)), "--acceptance": figures}[evidence]
    facts = write(tmp_path / "facts.yaml", "name: org/foreign\n")
    (head / "kconv.json").unlink()
    run(head, evidence, file, "--facts", facts, "--no-chart")
    card = (head / "README.md").read_text()
    assert "An Eagle3 draft head for speculative decoding" in card
    spec = replace(MLA, dtype="F32")
    other = write_head(tmp_path / "other", by_name("vllm"), spec, random_slots(spec))
    result = run(other, evidence, file, "--facts", facts, "--no-chart")
    assert result.exit_code == 1 and "other weights" in result.stderr and not (other / "README.md").exists()


def test_a_report_of_no_weights_is_refused(head, tmp_path):
    said = CliRunner().invoke(main, ["validate", str(head), "--headers-only", "--json"])
    result = run(head, "--report", write(tmp_path / "report.json", said.stdout))
    assert result.exit_code == 1 and "without --headers-only" in result.stderr and "other weights" not in result.stderr


def test_an_acceptance_above_k_plus_1_is_refused(head, tmp_path):
    result = run(head, "--acceptance", acceptance(tmp_path, rows=[FIGURE | {"value": 4.5}]))
    assert result.exit_code == 1 and "not from 1 to 4" in result.stderr


def test_an_unknown_style_is_misuse(head):
    assert run(head, "--style", "glossy").exit_code == 2
