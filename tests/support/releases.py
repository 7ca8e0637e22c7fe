"""Releases that are ready, their evidence and license texts, made up but consistent; and how tests publish them."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from support.heads import MLA, random_slots, write_head
from support.hub import Hub

from kconv.bench.acceptance import AcceptanceRow, read_acceptance
from kconv.cards.card import make_card
from kconv.cards.evidence import Evidence
from kconv.cards.facts import Facts
from kconv.cards.publish.floor import read_floor
from kconv.cards.publish.options import PublishOptions
from kconv.cards.publish.release import open_candidate
from kconv.cards.publish.run import Published, prepare, preview
from kconv.cards.publish.run import publish as run
from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import read_manifest
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import by_name
from kconv.measure.figures import (
    AcceptanceFigures,
    EngineFigures,
    Figures,
    ParityFigures,
    PartFigures,
    StepFigures,
    TextFigures,
)
from kconv.pipeline.prepare import PreparedRelease, Selection
from kconv.pipeline.prepare import prepare as prepare_release
from kconv.pipeline.preview import Preview, preview_release
from kconv.pipeline.recipe import parse_release
from kconv.pipeline.run import Outcome, run_release
from kconv.validate.report import Report, read_report

FRONT = {
    "license": "mit",
    "base_model": ["org/target"],
    "library_name": "kconv",
    "pipeline_tag": "text-generation",
}
# As much of a license's wording as tells which it is.
LICENSE = """Copyright (c) 2026 A Test

Permission is hereby granted, free of charge; this notice goes into all substantial portions of the Software.
"""
LENGTH = 2.5
FLOOR = {
    "metric": "al_incl_bonus", "suite": "sampled", "draft_tokens": 3, "prompts": 4, "at_least": 2.4, "max_loss": 0.01,
}  # fmt: skip
# What a floor on a suite says more, and what is measured there.
SUITE = {"suite": "MT-Bench", "target": "org/target@main", "temperature": 0.0}


def write_release(folder: Path, *, seed: int = 0, front: dict[str, Any] | None = None) -> Path:
    """Convert a head and put a card, a license, a clean report and a recipe with a floor beside it."""
    source = write_head(folder.parent / f"{folder.name}-source", by_name("trtllm"), MLA, random_slots(MLA, seed))
    execute(plan(read_head(open_checkpoint(source, source="source")), by_name("vllm")), folder)
    write_report(folder)
    write_card(folder, FRONT | (front or {}))
    (folder / "LICENSE").write_text(LICENSE)
    (folder / "release.yaml").write_text(yaml.safe_dump({"name": "test", "min_acceptance": FLOOR}))
    return folder


def write_card(folder: Path, front: dict[str, Any]) -> None:
    """Write the card of what lies in a folder, whatever that is, with these metadata."""
    report = folder / "report.json"
    acceptance = tuple(read_acceptance(file) for file in sorted(folder.glob("acceptance*.json"), reverse=True))
    evidence = Evidence(
        folder, Facts(name=REPO, base_model="org/target"), manifest=read_manifest(folder), acceptance=acceptance,
        report=read_report(report) if report.exists() else None,
    )  # fmt: skip
    text = make_card(evidence, chart=False).text.split("---\n", 2)[2]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n{text}")


def write_report(
    folder: Path, *, findings=(), identical: bool | None = True, loss: float = 0.0, weights: Any = None
) -> None:
    """Write a report about a folder's own weights, of a head that loses a share of its source's acceptance."""

    def row(drafter: str, length: float) -> AcceptanceFigures:
        rates = tuple(rate * (length - 1) / 1.5 for rate in (0.8, 0.5, 0.2))
        return AcceptanceFigures(
            drafter=drafter, text="sampled", steps=3, drafts=100, length=length, standard_error=0.02,
            rates=rates, note="n", sequences=4,
        )  # fmt: skip

    figures = Figures(
        identical=identical,
        texts=(TextFigures(kind="sampled", sequences=4, tokens=128, distinct_4grams=0.97),),
        acceptance=(row("source", LENGTH), row("output", LENGTH * (1 - loss))),
        parity=(
            ParityFigures(
                text="sampled", steps=3, relative_error=0.0, rms_error=0.0, kl=0.0, top1=1.0,
                length_difference=-LENGTH * loss, length_difference_se=0.0,
            ),
        ),
    )  # fmt: skip
    own = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}
    report = Report(
        subject="a-head",
        weights=own if weights is None else weights,
        config=hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        findings=tuple(findings),
        figures=figures,
        provenance={"dtype": "float32", "for": ["vllm-v1", "vllm-v2"]},
    )
    (folder / "report.json").write_text(report.to_json())
    _renew_card(folder)


def write_acceptance(
    folder: Path, *, name: str = "acceptance.json", weights: Any = None, config: str | None = None, whole: bool = True,
    **changed: Any,
) -> None:  # fmt: skip
    """Write an acceptance.json about a folder's own weights and config."""
    own = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()}
    row = {
        "metric": "al_incl_bonus", "value": 2.61, "draft_tokens": 3, "tree": "chain", "averaging": "macro_request",
        "engine": "vllm", "engine_version": "0.99", "dataset": "MT-Bench", "prompts": 80, "date": "2026-01-01",
        "measured_by": "self", "target": SUITE["target"], "temperature": SUITE["temperature"],
    }  # fmt: skip
    row |= changed
    held = {
        "schema": 1, "head": "a-head", "rows": [row],
        "weights": {n: d for n, d in own.items() if n.endswith(".safetensors")} if weights is None else weights,
        "config": own["config.json"] if config is None else config,
        "suites": [{"dataset": row["dataset"], "categories": [""], "whole": whole}],
    }  # fmt: skip
    (folder / name).write_text(json.dumps(held))
    _renew_card(folder)


def _renew_card(folder: Path) -> None:
    if (folder / "README.md").exists():
        write_card(folder, FRONT)


def make_inexact(folder: Path) -> None:
    """Have the manifest say that the weights are not the source's."""
    manifest = folder / "kconv.json"
    stated = json.loads(manifest.read_text()) | {"exact": False}
    next(step for step in stated["tensors"] if step["output"]["dtype"] == "BF16")["action"] = "converted"
    manifest.write_text(json.dumps(stated))


SPEC = replace(MLA, dtype="F32")


def write_inputs(folder: Path) -> dict[str, Any]:
    """Write what a release starts from, and return its recipe as plain values."""
    source = write_head(folder / "source", by_name("trtllm"), SPEC, random_slots(SPEC))
    (source / "LICENSE").write_text(LICENSE)
    # Measured later; a recipe's files have to be there before anything is computed.
    (folder / "acceptance.json").write_text("{}")
    return {
        "name": "a-release",
        "min_acceptance": FLOOR | SUITE | {"prompts": 80, "at_least": 2.5},
        "facts": {"base_model": "org/target", "license": {"id": "mit"}},
        "steps": {
            "vllm": {"do": "convert", "head": str(source), "to": "vllm"},
            "trtllm": {"do": "convert", "head": "$vllm", "to": "trtllm", "dtype": "bfloat16"},
            "sglang": {"do": "convert", "head": "$vllm", "to": "sglang"},
            "report": {"do": "validate", "head": "$vllm", "source": str(source)},
            "card": {
                "do": "card", "head": "$vllm", "report": "$report/report.json", "source": str(source),
                "acceptance": [str(folder / "acceptance.json")], "chart": False,
            },
            "publish": {"do": "publish", "folder": "$card", "repo": REPO, "tag": "v1"},
        },
    }  # fmt: skip


def changed(values: dict[str, Any], step: str, **parameters: Any) -> dict[str, Any]:
    """Return a recipe with other parameters of one step."""
    values = copy.deepcopy(values)
    values["steps"][step] |= parameters
    return values


def prepared(values: dict[str, Any], root: Path, **selection: Any) -> PreparedRelease:
    """Return a recipe whose names were checked."""
    text = yaml.safe_dump(values, sort_keys=False)
    return prepare_release(parse_release(text), text, root, Selection(**selection))


def carry_out(values: dict[str, Any], root: Path, **selection: Any) -> dict[str, Outcome]:
    """Carry out a recipe, and return what became of each step; a fault is raised."""
    outcomes: list[Outcome] = []
    run_release(prepared(values, root, **selection), lambda _: None, outcomes.append)
    return {outcome.name: outcome for outcome in outcomes}


def ran(outcomes: dict[str, Outcome]) -> list[str]:
    """Return the steps that were made, not found."""
    return [name for name, one in outcomes.items() if one.status == "made"]


def planned(values: dict[str, Any], root: Path, **selection: Any) -> Preview:
    """Return what a recipe would do."""
    return preview_release(prepared(values, root, **selection))


TOKEN, REPO, TAG = "hf_aVerySecretTokenOfNobody", "org/head", "v1"


def publish(folder: Path, tag: str = TAG, **wish) -> Published:
    candidate = open_candidate(folder, None, (), read_floor(folder))
    return run(prepare(candidate), PublishOptions(repo=REPO, tag=tag, **wish), lambda _: None)


def dry(folder: Path, **wish) -> Published:
    candidate = open_candidate(folder, None, (), read_floor(folder))
    return preview(prepare(candidate), PublishOptions(repo=REPO, tag=TAG, **wish), lambda _: None)


def holds(hub: Hub, folder: Path, revision: str = TAG) -> bool:
    """Say whether a revision holds the folder's files, byte for byte, and nothing else."""
    held = hub.repos[REPO]
    sha = held.find(revision)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return sha is not None and held.commits[sha] == files | {".gitattributes": held.commits[sha][".gitattributes"]}


def writes(hub: Hub) -> list[str]:
    return [f"{s.call.method} {s.call.path}" for s in hub.served if s.call.method not in ("GET", "HEAD")]


KINDS = ("held-out", "sampled", "greedy")


def acceptance(kind, drafter: str, category: str = "") -> AcceptanceFigures:
    rates = (0.6, 0.3, 0.1) if drafter == "source" else (0.5, 0.2, 0.05)
    return AcceptanceFigures(
        drafter=drafter, text=kind, steps=3, drafts=100, length=1 + sum(rates), standard_error=0.05, rates=rates,
        note="", category=category, sequences=8, rate_errors=(0.02, 0.02, None),
    )  # fmt: skip


def parity(kind, category: str = "") -> ParityFigures:
    shared = {"relative_error": 0.1, "rms_error": 0.02, "kl": 0.003, "top1": 0.97}
    steps = tuple(StepFigures(step=n, **shared, rate_difference=-0.1 / n, rate_difference_se=0.01) for n in (1, 2, 3))
    return ParityFigures(
        text=kind, steps=3, **shared, length_difference=-0.25, length_difference_se=0.03, category=category,
        by_step=steps,
    )  # fmt: skip


ENGINE = EngineFigures(
    engine="vllm", url="", prompts=8, new_tokens=24, steps=3, same_output=7, reference="the same engine", drafts=90,
    accepted=120, per_position=(70, 40, 10), length=2.3333, expected_drafts=91, expected_per_position=(70, 39, 10),
    expected_length=2.3077,
)  # fmt: skip


def report(part_error: float = 0.01, **figures) -> Report:
    drafters = ("source", "output")
    full = {
        "acceptance": tuple(acceptance(kind, d) for kind in KINDS for d in drafters),
        "acceptance_by_category": tuple(
            acceptance(kind, d, c) for kind in KINDS for c in ("writing", "math") for d in drafters
        ),
        "parity": tuple(parity(kind) for kind in KINDS),
        "parity_by_category": tuple(parity(kind, c) for kind in KINDS for c in ("writing", "math")),
        "parts": tuple(
            PartFigures(part=part, text=kind, relative_error=error, rms_error=error)
            for kind in KINDS
            for part, error in (("fc", 0.0), ("attention", part_error), ("mlp", part_error / 10))
        ),
        "engine": ENGINE,
    }
    return Report(subject="head", figures=Figures(**(full | figures)))


FULL = {
    "metric": "al_incl_bonus", "value": 2.5, "draft_tokens": 3, "tree": "chain", "averaging": "macro_request",
    "engine": "vllm", "engine_version": "0.32.0", "target": "moonshotai/Kimi-K2.6", "precision": "NVFP4",
    "temperature": 0.0, "dataset": "MT-Bench", "revision": "a" * 40, "category": "math", "prompts": 10,
    "max_tokens": 1024, "date": "2026-11-21", "measured_by": "self",
}  # fmt: skip


def row(**changes) -> AcceptanceRow:
    return AcceptanceRow.model_validate(FULL | changes)


NVIDIA = "NVIDIA Open Model License Agreement\nof a Derivative Model, and so on.\n"
MIT = (
    "MIT License\n\nCopyright (c) 2025 Someone\n\nPermission is hereby granted, free of charge, ...\n"
    "all copies or substantial portions of the Software.\n"
)
KIMI = (
    "Modified MIT License\n\nCopyright (c) 2025 Moonshot AI\n\nPermission is hereby granted, free of\ncharge, ... "
    "substantial portions of the Software ... you shall prominently\n"
    "display “Kimi K2.6” on the user\ninterface of it.\n"
)
APACHE = "Apache License\n  Version 2.0, January 2004\n"
TEXTS = {"nvidia-open-model-license": NVIDIA, "modified-mit": KIMI, "mit": MIT, "apache-2.0": APACHE}
