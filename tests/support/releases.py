"""Folders that are ready to be published, small, with random weights; their evidence is made up but consistent."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml
from support.heads import MLA, random_slots, write_head

from kconv.bench.acceptance import read_acceptance
from kconv.cards.card import make_card
from kconv.cards.evidence import Evidence
from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import read_manifest
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import by_name
from kconv.measure.figures import AcceptanceFigures, Figures, ParityFigures, TextFigures
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
        folder, manifest=read_manifest(folder), report=read_report(report) if report.exists() else None,
        acceptance=acceptance,
    )  # fmt: skip
    text = make_card(evidence, chart=False).text.split("---\n", 2)[2]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n{text}")


def write_report(
    folder: Path, *, findings=(), identical: bool | None = True, loss: float = 0.0, weights: Any = None
) -> None:
    """Write a report about a folder's own weights, of a head that loses a share of its source's acceptance."""

    def row(drafter: str, length: float) -> AcceptanceFigures:
        return AcceptanceFigures(
            drafter=drafter, text="sampled", steps=3, drafts=100, length=length, standard_error=0.02,
            rates=(0.8, 0.5, 0.2), note="n", sequences=4,
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
