"""`kconv bench`: what it writes and prints, and its exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.heads import MLA, random_slots, write_head
from support.loopback import speculating

from kconv.bench.acceptance import read_acceptance
from kconv.cli import main
from kconv.engines import by_name
from kconv.serving import client as bench_server
from kconv.targets.config import read_target_config


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """The stand-in counts before it answers."""
    for name, seconds in {"POLL_SECONDS": 0.001, "REST_SECONDS": 0.002, "LATE_SECONDS": 0.02}.items():
        monkeypatch.setattr(bench_server, name, seconds)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"question_id": f"{category}{i}", "category": category, "turns": [f"{category} {i}?", "Shorter."]}
        for category in ("math", "coding")
        for i in range(3)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def test_a_server_is_measured_and_the_key_is_whole(suite, tmp_path):
    head = write_head(tmp_path / "head", by_name("vllm"), MLA, random_slots(MLA))
    out = tmp_path / "out" / "acceptance.json"
    with speculating("vllm") as server:
        result = run(
            "--url", server.url + "/v1", "--head", head, "--suite", suite, "--out", out, "--precision", "NVFP4",
            "--target-name", "moonshotai/Kimi-K2.6", "--reasoning", "off", "--max-tokens", 200,
            "--extra", '{"top_p": 1}',
        )  # fmt: skip
        assert all(body["top_p"] == 1 for body in server.asked)
    assert result.exit_code == 0, result.output
    found = read_acceptance(out)
    assert found.head == str(head) and set(found.weights) == {"model.safetensors"}
    assert found.config == sha256((head / "config.json").read_bytes()).hexdigest() and found.is_whole("prompts.jsonl")
    row = found.rows[0]
    assert (row.target, row.precision, row.reasoning) == ("moonshotai/Kimi-K2.6", "NVFP4", "off")
    assert (row.dataset, row.max_tokens, row.engine) == ("prompts.jsonl", 200, "vllm")
    assert row.revision is not None and row.revision.startswith("sha256:")
    for said in ("math", "coding", "all", "steps", "requests", "distinct 4-grams", row.shown):
        assert said in " ".join(result.stdout.split())


def test_what_is_printed_as_json_is_the_file(suite, tmp_path):
    out = tmp_path / "acceptance.json"
    with speculating("sglang") as server:
        result = run("--url", server.url, "--head", tmp_path, "--suite", suite, "--out", out, "--categories", "math",
                     "--json")  # fmt: skip
    assert result.stdout == out.read_text()
    assert {row.category for row in read_acceptance(out).rows} == {"math", ""}
    assert not read_acceptance(out).is_whole("prompts.jsonl")


def test_a_head_is_measured_without_a_server(tiny_target, suite, tmp_path):
    config = read_target_config(tiny_target)
    spec = replace(MLA, hidden=config.hidden, target_hidden=config.hidden, vocab=config.vocab, draft_vocab=config.vocab)
    head = write_head(tmp_path / "head", by_name("vllm"), spec, random_slots(spec))
    out = tmp_path / "acceptance.json"
    result = run(
        "--head", head, "--target", tiny_target, "--suite", suite, "--out", out, "--max-tokens", 8, "--limit", 1,
        "--draft-tokens", 2,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = read_acceptance(out)
    assert found.config == sha256((head / "config.json").read_bytes()).hexdigest()
    assert found.measured and not found.is_whole("prompts.jsonl")
    row = found.rows[0]
    assert (row.engine, row.draft_tokens, row.precision, row.category) == ("kconv", 2, "float32", "math")
    assert row.target == tiny_target.name and row.prompts == 1


def test_a_fault_leaves_no_file(suite, tmp_path):
    out = tmp_path / "acceptance.json"
    with speculating(None) as server:
        result = run("--url", server.url, "--head", tmp_path, "--suite", suite, "--out", out)
    assert result.exit_code == 1 and "does not count" in result.stderr
    assert not out.exists()


def test_a_missing_category_is_named(suite, tmp_path):
    result = run("--url", "http://127.0.0.1:9", "--head", tmp_path, "--suite", suite, "--categories", "math,stem",
                 "--out", tmp_path / "a.json")  # fmt: skip
    assert result.exit_code == 1 and "no prompt of the category stem" in result.stderr


def test_an_output_that_is_there_is_kept(suite, tmp_path):
    result = run("--url", "http://127.0.0.1:9", "--head", tmp_path, "--suite", suite, "--out", suite)
    assert result.exit_code == 1 and "already exists" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [(), ("--url", "http://x"), ("--head", "h"), ("--url", "http://x", "--head", "h", "--extra", "[1]")],
    ids=["nothing", "no head", "neither server nor target", "extra is no object"],
)
def test_misuse_is_exit_2(suite, tmp_path, arguments):
    result = run(*arguments, "--suite", suite, "--out", tmp_path / "a.json")
    assert result.exit_code == 2 and "Usage:" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--target", "t", "--precision", "NVFP4", "--concurrency", 4), "--concurrency, --precision: only with --url"),
        (("--target", "t", "--baseline-url", "http://x"), "--baseline-url: only with --url"),
        (("--url", "http://x", "--target", "t"), "--target: only without --url"),
        (("--url", "http://x", "--from", "vllm", "--captured", "1,3"), "--from, --captured: only without --url"),
    ],
    ids=str,
)
def test_an_option_that_would_be_passed_over_is_wrong_usage(suite, tmp_path, arguments, said):
    (tmp_path / "t").mkdir()
    given = [tmp_path / "t" if argument == "t" else argument for argument in arguments]
    result = run("--head", tmp_path, *given, "--suite", suite, "--out", tmp_path / "a.json")
    assert result.exit_code == 2 and said in " ".join(result.stderr.replace("│", "").split())
