"""A quantized target's card and its publication: from the manifest and the report, and refused without the figures."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from support.commands import NAMES, ran
from support.quantized_targets import make_form

from kconv.cards.card import gather, make_card
from kconv.cards.facts import Facts
from kconv.cards.publish.gate import checks_of, judge
from kconv.cards.publish.release import open_candidate
from kconv.cards.target_card import lost
from kconv.checkpoint.manifest import FileRecord
from kconv.cli import main
from kconv.measure.figures import Figures, NoiseFigures, PerplexityFigures
from kconv.validate.report import Report, read_report


def run(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def made(tiny_target, tmp_path_factory) -> Path:
    """Return a folder with a target, its NVFP4 form and a report on that."""
    root = tmp_path_factory.mktemp("target")
    make_form(tiny_target, root / "source", "bf16")
    # How the tiny target was trained: no file of a release, and the gate would say so (P115).
    (root / "source" / "training.json").unlink(missing_ok=True)
    run("quantize", root / "source", root / "nvfp4", "--recipe", "nvfp4-experts-mse", "--input-scale", "data-free")
    (root / "prompts.jsonl").write_text(json.dumps({"prompt": "Return the sum of two numbers, and no more."}) + "\n")
    run("validate", root / "nvfp4", "--source", root / "source", "--prompts", root / "prompts.jsonl", "--out",
        root / "report")  # fmt: skip
    return root


@pytest.fixture(scope="module")
def release(made) -> Path:
    out = made / "release"
    CliRunner().invoke(
        main,
        [
            str(w)
            for w in ("card", made / "nvfp4", "--report", made / "report", "--base-model", "org/target", "--out", out)
        ],
    )
    return out


def test_the_card_says_what_it_was_made_from_how_and_what_that_cost(made, release):
    card, report = (release / "README.md").read_text(), read_report(made / "report")
    data = ModelCard(card).data
    assert (data.base_model, data.base_model_relation) == ("org/target", "quantized") or data.base_model == [
        "org/target"
    ]
    assert "nvfp4" in data.tags and "eagle3" not in data.tags
    assert "nvfp4-experts-mse: routed experts in NVFP4" in card and "`model.layers.*.mlp.experts.*_proj`" in card
    assert "| block scales | by mse |" in card
    noise, text = report.figures.noise, report.figures.perplexity
    assert noise is not None and text is not None
    assert f"{noise.median:.1f} dB" in card and noise.worst_tensor in card
    assert f"{text.output:.4f}, the source's {text.source:.4f}" in card
    for command in ("vllm serve", "sglang.launch_server", "trtllm-serve"):
        assert command in card


def gate(folder: Path) -> set[str]:
    candidate = open_candidate(folder, None, (), None)
    return {finding.rule for finding in judge(candidate) if finding.severity == "error"}


def test_the_gate_asks_for_noise_and_perplexity_and_for_no_acceptance(release):
    found = gate(release)
    asked = {check.id for check in checks_of(open_candidate(release, None, (), None))}
    assert {"P101", "P107"} <= asked and not asked & {"P108", "P109", "P110", "P111", "P112"}
    # One prompt has no standard error, and a license was not named: what is left to say is the license's.
    assert not found & {"P101", "P102", "P103", "P104", "P105", "P106", "P108", "P109", "P110", "P113", "P114", "P115"}


def test_its_serve_lines_name_the_repository(made):
    out = made / "named"
    name = ("--name", "org/target-nvfp4", "--base-model", "org/target")
    CliRunner().invoke(main, ["card", *map(str, (made / "nvfp4", "--report", made / "report", *name, "--out", out))])
    for repo, fails in {"org/target-nvfp4": False, "org/another": True}.items():
        rules = {finding.rule for finding in judge(open_candidate(out, None, (), None, repo=repo))}
        assert ("P116" in rules) == fails, repo


def test_a_figure_put_in_by_hand_is_found(release, made):
    card = release / "README.md"
    text = card.read_text()
    perplexity = read_report(made / "report").figures.perplexity
    assert perplexity is not None
    card.write_text(text.replace(f"{perplexity.output:.4f}", "1.0000"))
    try:
        assert "P113" in gate(release)
    finally:
        card.write_text(text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("own_code", [True, False])
def test_its_commands_name_a_target_of_any_name(made, tmp_path, name, own_code):
    evidence = replace(gather(made / "nvfp4", None, Facts(name=name, base_model=name)), own_code=own_code)
    blocks = [t.content for t in MarkdownIt().parse(make_card(evidence).text) if t.type == "fence"]
    trusted = ["--trust-remote-code"] if own_code else []
    assert [call for command in blocks for call in ran(command, tmp_path)] == [
        ["vllm", "serve", name, *trusted],
        ["python", "-m", "sglang.launch_server", "--model-path", name, *trusted],
        ["trtllm-serve", name, "--backend", "pytorch", *(["--trust_remote_code"] * own_code)],
    ]


def test_what_one_gpu_cannot_hold_is_served_on_eight(made, tmp_path):
    evidence = gather(made / "nvfp4", None, Facts(name="t"))
    large = FileRecord(name="model.safetensors", size=61 * 10**9, sha256="0" * 64)
    evidence = replace(evidence, manifest=evidence.manifest.model_copy(update={"files": [large]}))
    blocks = [t.content for t in MarkdownIt().parse(make_card(evidence).text) if t.type == "fence"]
    assert [call for command in blocks for call in ran(command, tmp_path)] == [
        ["vllm", "serve", "t", "--tensor-parallel-size", "8"],
        ["python", "-m", "sglang.launch_server", "--model-path", "t", "--tp-size", "8"],
        ["trtllm-serve", "t", "--tp_size", "8", "--backend", "pytorch"],
    ]


def test_its_publisher_may_say_what_a_task_is(made):
    facts = Facts(name="t", notes={"performance": ("The task `own` is of our texts.",)})
    assert "The task `own` is of our texts." in make_card(gather(made / "nvfp4", None, facts)).text


def test_a_card_of_compressed_tensors_form_says_so_and_names_the_engines_that_read_it(made, tmp_path):
    shutil.copytree(made / "nvfp4", tmp_path / "target")
    manifest = json.loads((tmp_path / "target" / "kconv.json").read_text())
    (tmp_path / "target" / "kconv.json").write_text(json.dumps(manifest | {"layout": "nvfp4-pack-quantized"}))
    before, after = (make_card(gather(folder, None, Facts())).text for folder in (made / "nvfp4", tmp_path / "target"))
    assert "trtllm-serve" in before and "modelopt" in ModelCard(before).data.tags
    assert "trtllm-serve" not in after and "vllm serve" in after and "sglang.launch_server" in after
    assert {"compressed-tensors", "nvfp4"} <= set(ModelCard(after).data.tags)


def test_a_quantized_target_is_trusted_with_code_of_its_own_alone(made, tmp_path):
    shutil.copytree(made / "nvfp4", tmp_path / "target")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    for code in ({}, {"AutoConfig": "own.Own"}):
        (tmp_path / "target" / "config.json").write_text(json.dumps(config | {"auto_map": code}))
        assert ("--trust-remote-code" in make_card(gather(tmp_path / "target", None, Facts())).text) == bool(code)


NOISE = NoiseFigures(tensors=72, median=20.4, worst=20.3, worst_tensor="x")


def perplexity(growth: float, error: float | None = 0.001) -> PerplexityFigures:
    return PerplexityFigures(
        prompts=9, tokens=900, source=10.0, output=10 * (1 + growth), log_ratio=growth, log_ratio_se=error, top1=0.98
    )


@pytest.mark.parametrize(
    "figures, said",
    [
        (Figures(), "noise was not measured"),
        (Figures(noise=NoiseFigures(tensors=0), perplexity=perplexity(0.0)), "noise was not measured"),
        (Figures(noise=NoiseFigures(tensors=72, exact=71)), "noise was not measured"),
        (Figures(noise=NoiseFigures(tensors=72, exact=72)), "perplexity was not compared with the source's"),
        (Figures(noise=NoiseFigures(tensors=72, exact=72), perplexity=perplexity(0.0)), ""),
        (Figures(noise=NOISE), "perplexity was not compared with the source's"),
        (Figures(noise=NOISE, perplexity=perplexity(0.05)), "above the source's, but at most 1% is allowed"),
        (Figures(noise=NOISE, perplexity=perplexity(float("nan"))), "above the source's"),
        (Figures(noise=NOISE, perplexity=perplexity(0.006)), ""),
        (Figures(noise=NOISE, perplexity=perplexity(0.02, 0.01)), ""),
    ],
)
def test_what_a_target_may_lose(figures, said):
    found = lost(Report(subject="x", figures=figures))
    assert [said in one for one in found] == ([True] if said else [])
