"""Folders that are ready to be published, small, with random weights; their evidence is made up but consistent."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from support.heads import MLA, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import read_manifest
from kconv.convert.execute import execute
from kconv.convert.layouts import by_name
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.validate.figures import AcceptanceFigures, Figures, ParityFigures, TextFigures
from kconv.validate.report import Report

FRONT = {
    "license": "mit",
    "base_model": ["org/target"],
    "library_name": "kconv",
    "pipeline_tag": "text-generation",
}
# As much of a licence's wording as tells which it is.
LICENCE = """Copyright (c) 2026 A Test

Permission is hereby granted, free of charge; this notice goes into all substantial portions of the Software.
"""
LENGTH = 2.5
FLOOR = {"metric": "al_incl_bonus", "suite": "sampled", "at_least": 2.4, "max_loss": 0.01}


def write_release(folder: Path, *, seed: int = 0, front: dict[str, Any] | None = None) -> Path:
    """Convert a head and put a card, a licence, a clean report and a recipe with a floor beside it."""
    source = write_head(folder.parent / f"{folder.name}-source", by_name("trtllm"), MLA, random_slots(MLA, seed))
    execute(plan(read_head(open_checkpoint(source, source="source")), by_name("vllm")), folder)
    write_report(folder)
    write_card(folder, FRONT | (front or {}))
    (folder / "LICENSE").write_text(LICENCE)
    (folder / "release.yaml").write_text(yaml.safe_dump({"name": "test", "min_acceptance": FLOOR}))
    return folder


def write_card(folder: Path, front: dict[str, Any]) -> None:
    """Write a card of these metadata, which says how the head was made."""
    made = f"Converted from source by kconv {version('kconv')}; kconv.json has the tensors."
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n\n# A head\n\n{made}\n")


def write_report(
    folder: Path, *, findings=(), identical: bool | None = True, loss: float = 0.0, weights: Any = None
) -> None:
    """Write a report about a folder's own weights, of a head that loses a share of its source's acceptance."""

    def row(drafter: str, length: float) -> AcceptanceFigures:
        return AcceptanceFigures(
            drafter=drafter, text="sampled", steps=3, drafts=100, length=length, standard_error=0.02,
            rates=(0.8, 0.5, 0.2), note="n",
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
        provenance={"dtype": "float32"},
    )
    (folder / "report.json").write_text(report.to_json())


def write_acceptance(folder: Path, **changed: Any) -> None:
    """Write an acceptance.json about a folder's own weights."""
    weights = {f.name: f.sha256 for f in read_manifest(folder).files if f.name.endswith(".safetensors")}
    row = {
        "metric": "al_incl_bonus", "value": 2.61, "draft_tokens": 3, "tree": "chain", "averaging": "macro_request",
        "engine": "vllm", "engine_version": "0.99", "dataset": "MT-Bench", "prompts": 80, "date": "2026-01-01",
        "measured_by": "self",
    }  # fmt: skip
    row |= {name: value for name, value in changed.items() if name != "weights"}
    held = {"schema": 1, "head": "a-head", "weights": changed.get("weights", weights), "rows": [row]}
    (folder / "acceptance.json").write_text(json.dumps(held))


def make_inexact(folder: Path) -> None:
    """Have the manifest say that the weights are not the source's."""
    manifest = folder / "kconv.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"exact": False}))
