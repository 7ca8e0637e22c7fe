"""The card of a quantized target: its origin, the quantization, its cost, and how to serve it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..checkpoint.formats import NVFP4_PACKED
from ..checkpoint.manifest import Manifest
from ..checkpoint.source import HUB_ID
from ..engines.base import Deployment
from ..engines.registry import engines
from ..escape import command
from ..measure.figures import MAX_GROWTH, AccuracyFigures
from ..validate.numbers import accuracy
from ..validate.report import Report
from .evidence import Evidence

TARGET = "target"
TAGS = ("nvfp4", "quantized")
# The parts of a card about manifest and report that are always the same.
REPEATED = ("target_made.jinja", "target_measured.jinja")
TEMPLATE = "target.md.jinja"
# Bytes of files that one GPU of 80 GB serves, with room for a KV cache.
ONE_GPU = 60 * 10**9
# How much the accuracy on a task may fall before publishing needs a reason, or two of its standard errors if these are
# more.
MAX_FALL = 0.01


def is_target(manifest: Manifest | None) -> bool:
    """Return whether a manifest is of a quantized target, not a head."""
    return manifest is not None and manifest.spec.get("kind") == TARGET


def packed(manifest: Manifest | None) -> bool:
    """Return whether a target is in compressed-tensors' form of NVFP4."""
    return manifest is not None and manifest.layout == NVFP4_PACKED.form


def base_model(evidence: Evidence) -> str:
    """Return the hub id of the target before quantization; "" if unknown."""
    if evidence.facts.base_model:
        return evidence.facts.base_model
    found = HUB_ID.fullmatch(evidence.manifest.source) if evidence.manifest else None
    return found["repo"] if found and found["revision"] else ""


def figures(evidence: Evidence) -> dict[str, Any]:
    """Return the values of a target's manifest and report, for the templates."""
    manifest = evidence.manifest
    spec = manifest.spec if manifest else {}
    recipe = spec.get("recipe", {})
    return {
        "manifest": manifest,
        "copied": "",
        "base": base_model(evidence),
        "recipe": recipe.get("name", ""),
        "about": recipe.get("about", ""),
        "patterns": recipe.get("quantize", ()),
        "rounded": recipe.get("fp8", ()),
        "scales": spec.get("weight_scales", ""),
        "activations": "unquantized" if recipe.get("weight_only") else "NVFP4, rounded by input_scale",
        "input_scale": spec.get("input_scale", ""),
        "mtp": spec.get("mtp", {}),
        "modules": f"{spec.get('quantized_modules', 0):,}",
        "parameters": f"{manifest.parameters:,}" if manifest else "",
        "rows": _rows(evidence.report),
        "harness": found[0].harness if (found := _accuracy(evidence.report)) else "",
        "tasks": [accuracy(row) for row in found],
        "commands": list(commands(evidence)),
    }


def commands(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield the title of each engine that kconv can name a command of, and that command."""
    manifest = evidence.manifest
    is_large = manifest is not None and sum(file.size for file in manifest.files) > ONE_GPU
    for engine in engines():
        if (launch := engine.launch) and launch.spread and (launch.packed or not packed(manifest)):
            spread = launch.spread if is_large else ()
            served = Deployment(evidence.name, None, None, evidence.own_code, spread)
            yield engine.title, command(launch.words(served))


def _rows(report: Report | None) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    noise = report.figures.noise if report is not None else None
    if noise:
        found.append(("tensors in NVFP4", f"{noise.tensors:,}"))
    if noise and noise.exact:
        found.append(("cast, without noise", f"{noise.exact:,}"))
    if noise and noise.median is not None:
        found += [
            ("signal over noise, median", f"{noise.median:.1f} dB"),
            ("signal over noise, at worst", f"{noise.worst:.1f} dB ({noise.worst_tensor})"),
        ]
    text = report.figures.perplexity if report is not None else None
    if text:
        error = "" if text.log_ratio_se is None else f" ± {text.log_ratio_se:.2%}"
        found += [
            ("perplexity on held-out text", f"{text.output:.4f}, the source's {text.source:.4f}"),
            ("difference", f"{math.expm1(text.log_ratio):+.2%}{error}"),
            ("same most likely token", f"{text.top1:.2%} of {text.tokens:,} positions in {text.prompts} texts"),
        ]
    return found


def _accuracy(report: Report | None) -> Sequence[AccuracyFigures]:
    return report.figures.accuracy if report is not None else ()


def lost(report: Report) -> list[str]:
    """Return what a report on a target leaves open about its difference from the source, or finds too large."""
    noise, text = report.figures.noise, report.figures.perplexity
    if noise is None or not noise.tensors or (noise.median is None and noise.exact < noise.tensors):
        return ["the weights differ from the source's, and their noise was not measured"]
    if text is None:
        return ["its perplexity was not compared with the source's"]
    if text.is_larger:
        return [f"its perplexity is {text.growth:+.2%} above the source's, but at most {MAX_GROWTH:.0%} is allowed"]
    return [
        f"{row.task}: {row.metric} is {row.output:.2%}, the source's {row.source:.2%}, but it may fall by at most "
        f"{MAX_FALL:.0%}, or by two standard errors"
        for row in report.figures.accuracy
        if not row.source - row.output <= max(MAX_FALL, 2 * (row.error or 0.0))
    ]
