"""The model card of a converted head. What belongs here: README.md from the manifest and a validation report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from ..checkpoint.manifest import Manifest, read_manifest
from ..checkpoint.staging import refuse_existing
from ..convert.launch import serve_command
from ..errors import LayoutCannot, ReportInvalid
from ..validate.report import AcceptanceFigures, Report

CARD = "README.md"
ENGINES = {
    "vllm": "vLLM's layout",
    "trtllm": "TensorRT-LLM's layout",
    "sglang": "SGLang's layout",
    "portable": "a layout that TensorRT-LLM, vLLM and SGLang all load",
}
TAGS = ["eagle3", "speculative-decoding", "draft-model"]


@dataclass(frozen=True)
class CardFacts:
    """What no file of a converted head says.

    Attributes:
        base_model: hub id of the target; the card names none if empty.
        license: hub licence identifier; "unknown" where the user does not say, as a licence is never guessed.
    """

    base_model: str = ""
    license: str = "unknown"


def write_card(folder: Path, report: Report | None, facts: CardFacts) -> Path:
    """Write a head's README.md.

    Args:
        folder: an output of kconv.
        report: its validation report; acceptance is stated from it alone.
        facts: what the user adds.

    Returns:
        The file written.

    Raises:
        OutputExists: the folder has a README.md already.
        LayoutCannot: the head is in a trainer's layout, which no engine serves.
        ReportInvalid: the report is of other bytes than the folder's, or not clean.
    """
    manifest = read_manifest(folder)
    refuse_existing(folder / CARD)
    if manifest.layout not in ENGINES:
        raise LayoutCannot(
            f"the head is in {manifest.layout}'s layout, which no engine serves",
            where=folder,
            fix="Convert it first (kconv to-portable, to-vllm, to-trtllm, to-sglang), then write that folder's card.",
        )
    if report is not None:
        _refuse_foreign(report, manifest)
    environment = Environment(
        loader=PackageLoader("kconv.cards", "."), undefined=StrictUndefined, keep_trailing_newline=True
    )
    text = environment.get_template("card.md.jinja").render(_facts(folder, manifest, report, facts))
    (folder / CARD).write_text(text)
    return folder / CARD


def _facts(folder: Path, manifest: Manifest, report: Report | None, facts: CardFacts) -> dict[str, Any]:
    figures = report.figures if report else None
    front: dict[str, Any] = {"license": facts.license, "library_name": "kconv", "pipeline_tag": "text-generation"}
    if facts.base_model:
        front |= {"base_model": [facts.base_model], "base_model_relation": "finetune"}
    identical = figures.identical if figures else None
    return {
        "front_matter": yaml.safe_dump(front | {"tags": TAGS}, sort_keys=False),
        "name": folder.resolve().name,
        "kind": manifest.spec["kind"].upper(),
        "parameters": f"{manifest.parameters:,}",
        "dtype": manifest.spec["dtype"],
        "engine": ENGINES[manifest.layout],
        "base_model": facts.base_model,
        "command": serve_command(manifest.layout),
        "captured": manifest.spec["captured"],
        "captured_by": manifest.captured_by,
        "source": manifest.source,
        "source_layout": manifest.source_layout,
        "kconv": manifest.kconv,
        "exactness": _exactness(manifest),
        "verified": None if identical is None else ("identical, bit by bit" if identical else "NOT identical"),
        "texts": figures.texts if figures else (),
        "rows": _rows(figures.acceptance) if figures else [],
        "steps": figures.acceptance[0].steps if figures and figures.acceptance else 0,
        "precision": report.provenance.get("dtype", "") if report else "",
    }


def _exactness(manifest: Manifest) -> str:
    """Say what became of the weights' bytes: kept, but for the tensors that were added or computed."""
    changes = [f"{step.output.name} {step.action}" for step in manifest.tensors if step.reason]
    if not changes:
        return "exact: every weight has the source's bytes"
    return f"{'exact' if manifest.exact else '**not exact**'}; all have the source's bytes but {', '.join(changes)}"


def _rows(acceptance: tuple[AcceptanceFigures, ...]) -> list[tuple[str, list[str]]]:
    rows: dict[str, list[str]] = {}
    for figure in acceptance:
        error = f" ± {figure.standard_error:.3f}" if figure.standard_error is not None else ""
        rows.setdefault(figure.drafter, []).append(f"{figure.length:.3f}{error}")
    return list(rows.items())


def _refuse_foreign(report: Report, manifest: Manifest) -> None:
    ours = {file.name: file.sha256 for file in manifest.files if file.name in report.weights}
    if ours != report.weights:
        raise ReportInvalid(
            "the report is of other weights than this folder's",
            where=report.subject,
            fix="Run kconv validate on this folder and give its report.",
        )
    if not report.clean:
        raise ReportInvalid(
            "the report holds errors", where=report.subject, fix="Mend what kconv validate found, then write the card."
        )
