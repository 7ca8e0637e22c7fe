"""A small release for tests: a head of random weights, converted, checked, carded and published, without training."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from support.heads import MLA, random_slots, write_head
from support.releases import FLOOR, LICENSE, SUITE

from kconv.engines import by_name
from kconv.pipeline.preview import Preview, preview_release
from kconv.pipeline.recipe import parse_release
from kconv.pipeline.run import Outcome, Selection, run_release

SPEC = replace(MLA, dtype="F32")
TOKEN, REPO = "hf_aVerySecretTokenOfNobody", "org/head"


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


def carry_out(values: dict[str, Any], root: Path, **selection: Any) -> dict[str, Outcome]:
    """Carry out a recipe, and return what became of each step; a fault is raised."""
    outcomes: list[Outcome] = []
    text = yaml.safe_dump(values, sort_keys=False)
    run_release(parse_release(text), text, root, Selection(**selection), lambda _: None, outcomes.append)
    return {outcome.name: outcome for outcome in outcomes}


def ran(outcomes: dict[str, Outcome]) -> list[str]:
    """Return the steps that were made, not found."""
    return [name for name, one in outcomes.items() if one.status == "made"]


def planned(values: dict[str, Any], root: Path, **selection: Any) -> Preview:
    """Return what a recipe would do."""
    text = yaml.safe_dump(values, sort_keys=False)
    return preview_release(parse_release(text), text, root, Selection(**selection))
