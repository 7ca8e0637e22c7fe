"""Golden curves: what InferenceX's reader takes, and what its files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from support.releases import FULL

from kconv.bench.acceptance import AcceptanceFile, AcceptanceRow, read_acceptance
from kconv.bench.golden import write_curve
from kconv.cli import main
from kconv.errors import AcceptanceInvalid, DefinitionsMixed

CODING = {"dataset": "SPEED-Bench", "category": "coding", "averaging": "micro_steps", "prompts": 80}


def row(k: int, value: float, reasoning: str | None = "on", **more) -> AcceptanceRow:
    return AcceptanceRow.model_validate(
        FULL | CODING | {"draft_tokens": k, "value": value, "reasoning": reasoning} | more
    )


def acceptance(*rows: AcceptanceRow, head: str = "org/my-head") -> AcceptanceFile:
    return AcceptanceFile(head=head, weights={"model.safetensors": "0" * 64}, rows=rows)


def curve(files: list[AcceptanceFile]) -> str:
    return write_curve({f"{number}.json": file for number, file in enumerate(files)})


def as_inferencex_reads(text: str, thinking: str, tokens: int) -> float:
    """https://github.com/SemiAnalysisAI/InferenceX, infx/golden_al_distribution: one model, modes, K as a number."""
    data = yaml.safe_load(text)
    assert isinstance(data, dict) and len(data) == 1
    [modes] = data.values()
    value = float(modes[thinking][tokens])
    assert 1 <= value <= tokens + 1
    return value


def test_a_curve_is_what_inferencex_reads():
    on = acceptance(row(1, 1.794), row(2, 2.386), row(10, 3.2))
    off = acceptance(row(1, 1.83, "off", temperature=0.6), row(2, 2.46, "off", temperature=0.6))
    text = curve([on, off])
    assert as_inferencex_reads(text, "thinking_on", 1) == 1.79
    assert as_inferencex_reads(text, "thinking_on", 2) == 2.39
    assert as_inferencex_reads(text, "thinking_off", 2) == 2.46
    assert list(yaml.safe_load(text)) == ["kimi-k2.6"]
    assert text.index("\n    2:") < text.index("\n    10:")


def test_the_written_curve_says_again_what_it_was_measured_with(tmp_path):
    methods = {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}
    own = acceptance(
        *(row(k, 1.5 + k / 10, **methods) for k in (1, 2)), row(1, 1.25, "off", temperature=0.6, **methods)
    )
    (tmp_path / "curve.yaml").write_text(curve([own]))
    ran = CliRunner().invoke(main, ["quote", str(tmp_path / "curve.yaml"), "--out", str(tmp_path / "a.json")])
    assert ran.exit_code == 0, ran.output
    found = read_acceptance(tmp_path / "a.json")
    assert found.head == "org/my-head"
    names = ("draft_tokens", "reasoning", "dataset", "category", "temperature", "max_tokens", "engine", *methods)
    assert [[one[name] for name in names] for one in found.rows] == [[one[name] for name in names] for one in own.rows]


def test_a_published_curve_is_read_with_its_origin(tmp_path):
    # The comments and the first figures of minimaxm3_eagle3_gqa.yaml, and a K whose server did not start.
    (tmp_path / "m.yaml").write_text(
        "# Source GitHub Actions run: https://github.com/SemiAnalysisAI/InferenceX/actions/runs/29784780049\n"
        "# Acceptance Length (AL) reference values measured with SPEED-Bench.\n"
        "# dataset: coding | temperature: 1.0 | top_p: 0.95 | top_k: 40 | output_len: 4096\n"
        '# thinking_on chat_template_kwargs: {"thinking_mode": "enabled"}\n'
        "# Measured on minimax-m3 (B300, vLLM EAGLE3), per num_speculative_tokens.\n"
        "_metadata:\n  draft-model: Inferact/MiniMax-M3-EAGLE3-GQA\n"
        "minimax-m3:\n  thinking_on:\n    1: 1.79\n    2: 2.39\n    3: N/A\n  thinking_off:\n    1: 1.83\n"
    )
    out = tmp_path / "a.json"
    ran = CliRunner().invoke(main, ["quote", str(tmp_path / "m.yaml"), "--out", str(out), "--json"])
    assert ran.exit_code == 0, ran.output
    found = read_acceptance(out)
    assert found.head == "Inferact/MiniMax-M3-EAGLE3-GQA" and json.loads(ran.output)["head"] == found.head
    assert [(one.reasoning, one.draft_tokens, one.shown) for one in found.rows] == [
        ("on", 1, "1.79"), ("on", 2, "2.39"), ("off", 1, "1.83"),
    ]  # fmt: skip
    one = found.rows[0]
    assert (one.dataset, one.category, one.max_tokens, one.temperature) == ("SPEED-Bench", "coding", 4096, 1.0)
    assert (one.measured_by, one.engine, one.target) == ("quoted", "vllm", "minimax-m3")
    assert one.url and one.url.endswith("/29784780049") and one.precision is None


WRONG = {
    "no mode": (lambda: [acceptance(row(1, 1.5, None))], AcceptanceInvalid, "has reasoning unstated"),
    "another category": (lambda: [acceptance(row(1, 1.5, category="math"))], AcceptanceInvalid, "coding"),
    "two of one K": (lambda: [acceptance(row(1, 1.5)), acceptance(row(1, 1.6))], AcceptanceInvalid, "two figures"),
    "a length that falls with K": (lambda: [acceptance(row(1, 1.9), row(3, 1.7))], AcceptanceInvalid, "falls"),
    "two heads": (
        lambda: [acceptance(row(1, 1.5)), acceptance(row(2, 1.6), head="o/b")], DefinitionsMixed, "two heads",
    ),
    "a tree": (lambda: [acceptance(row(1, 1.5, tree="topk=4,nodes=8"))], DefinitionsMixed, "topk=4"),
    "no word of a tree": (lambda: [acceptance(row(1, 1.5, tree=None))], DefinitionsMixed, "not said to be of a"),
    "two samplers": (
        lambda: [acceptance(row(1, 1.5), row(2, 1.6, rejection_sample_method="block"))], DefinitionsMixed, "block",
    ),
    "two temperatures in a mode": (
        lambda: [acceptance(row(1, 1.5), row(2, 1.6, temperature=0.7))], DefinitionsMixed, "temperature",
    ),
}  # fmt: skip


@pytest.mark.parametrize("files, error, said", WRONG.values(), ids=WRONG)
def test_what_makes_no_curve_is_refused(files, error, said):
    with pytest.raises(error, match=said):
        curve(files())


def test_the_file_without_a_mode_is_named():
    with pytest.raises(AcceptanceInvalid) as refused:
        curve([acceptance(row(1, 1.5)), acceptance(row(2, 1.6, None))])
    assert refused.value.where == "1.json"


def test_another_suite_makes_a_curve_that_says_so():
    text = curve([acceptance(row(1, 1.5, "off", dataset="p.jsonl", category=""))])
    assert "# No golden value: those are of SPEED-Bench, coding.\n" in text
    assert "No golden value" not in curve([acceptance(row(1, 1.5))])


@pytest.mark.parametrize(
    "text", ["a: 1\n", "a: {thinking_on: {1: 1.2}}\nb: {}\n", "a: {sometimes: {1: 1.2}}\n", "- 1\n"]
)
def test_a_yaml_that_is_no_curve_is_refused(tmp_path: Path, text):
    (tmp_path / "c.yaml").write_text(text)
    ran = CliRunner().invoke(main, ["quote", str(tmp_path / "c.yaml"), "--head", "a/b", "--out", str(tmp_path / "o")])
    assert ran.exit_code == 1 and "curve" in ran.output and not (tmp_path / "o").exists()
