"""Acceptance figures from other programs' result files, as rows with their origin.

A row has what its file and the user state; what neither states is missing, and keeps the figure from being compared.
Nothing in a file is overruled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..checkpoint.bytes import file_digest
from ..checkpoint.schema import find_wrong, parse_json, read_text
from ..engines.base import Benchmark
from ..engines.counters import NO_DRAFTS
from ..engines.registry import engines
from ..errors import AcceptanceInvalid, DefinitionsMixed
from .acceptance import AcceptanceFile, AcceptanceRow
from .golden import CODING, SPEED_BENCH, read_curve

LARGEST = 64 << 20  # bytes; with --save-detailed a result holds all answers
Fields = dict[str, Any]
FIX = "Pass a result of vllm bench serve, AIPerf or sglang.bench_serving with speculation, or a golden curve."


def quote(file: Path, head: str | None, url: str | None, said: Mapping[str, Any]) -> AcceptanceFile:
    """Return another program's figures as figures of a head.

    Args:
        head: hub id or folder name of the head; the one in the file if None.
        url: where the file is published; if None, its name and digest, unless the file states a URL.
        said: fields of `AcceptanceRow` that the file leaves open.

    Raises:
        AcceptanceInvalid: the file cannot be read, has no acceptance, or too little is stated about it.
        DefinitionsMixed: the file contradicts `said`.
    """
    text = read_text(file, AcceptanceInvalid, limit=LARGEST, fix=FIX)
    if file.suffix in (".yaml", ".yml"):
        title, (named, source, rows) = "InferenceX's golden curve", read_curve(text, file)
    else:
        named, source = None, None
        title, rows = _results(text, file)
    origin = url or source or f"{file.name}, sha256 {file_digest(file)}"
    if not (head or named):
        raise AcceptanceInvalid("the file does not say which head it is about", where=file, fix="Pass --head.")
    if head and named and head != named:
        raise DefinitionsMixed(f"the file is about {named}, not {head}", where=file, fix=f"Pass --head {named}.")
    made = [_complete(row, said, file, origin, title) for row in rows]
    try:
        return AcceptanceFile(
            head=head or named or "",
            rows=tuple(AcceptanceRow.model_validate(row) for row in made),
            provenance={"quoted": {"file": file.name, "sha256": file_digest(file), "format": title}},
        )
    except ValidationError as fault:
        raise AcceptanceInvalid(
            f"the figures are invalid: {find_wrong(fault)}", where=file, fix="State what the file leaves open."
        ) from fault


def _complete(row: Fields, said: Mapping[str, Any], file: Path, origin: str, title: str) -> Fields:
    given = {name: value for name, value in said.items() if value is not None}
    apart = {name: value for name, value in given.items() if row.get(name) not in (None, value)}
    if apart:
        told = "; ".join(
            f"{name} is {row[name]} in the file, but {value} in the options" for name, value in apart.items()
        )
        raise DefinitionsMixed(f"the file contradicts an option: {told}", where=file, fix="Remove the option.")
    made = given | {name: value for name, value in row.items() if value is not None}
    if not made.get("dataset"):
        raise AcceptanceInvalid("the file does not state its dataset", where=file, fix="Pass --dataset.")
    note = "; ".join(filter(None, (f"from a result of {title}", made.get("note"))))
    return made | {"measured_by": "quoted", "url": origin, "note": note}


def _results(text: str, file: Path) -> tuple[str, list[Fields]]:
    try:
        found = [parse_json(text)]
    except ValueError:
        try:  # one on each line, where a program appends
            found = [parse_json(line) for line in text.splitlines() if line.strip()]
        except ValueError as fault:
            raise AcceptanceInvalid(f"{file.name} is not valid JSON", where=file, fix=FIX) from fault
    if not found:
        raise AcceptanceInvalid(f"{file.name} is empty", where=file, fix=FIX)
    known = [AIPERF, *(one.benchmark for one in engines() if one.benchmark)]
    rows, titles = [], []
    for result in found:
        form = next((form for form in known if isinstance(result, dict) and result.keys() >= set(form.marks)), None)
        if form is None and isinstance(result, dict) and {"head", "rows"} <= result.keys():
            raise AcceptanceInvalid(
                f"{file.name} is an acceptance.json already",
                where=file,
                fix="Pass it to kconv compare, curve or card as it is: it needs no quoting.",
            )
        if form is None:
            raise AcceptanceInvalid(f"{file.name} is not a result of a program that kconv knows", where=file, fix=FIX)
        titles.append(form.title)
        try:
            rows.append(form.read(result, file))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as fault:
            raise AcceptanceInvalid(
                f"{file.name} is not a result of {form.title} in a form that kconv knows", where=file, fix=FIX
            ) from fault
    return titles[0], rows


def _aiperf(result: Mapping[str, Any], where: object) -> Fields:
    """The pooled histogram of AIPerf 0.13's profile_export_aiperf.json, `JsonExportData` in
    aiperf/common/models/export_models.py of https://pypi.org/project/aiperf/0.13.0/"""
    if result.get("is_complete") is False or result.get("was_cancelled"):
        raise AcceptanceInvalid("the run was not finished", where=where, fix="Measure again.")
    pooled = result.get("pooled_spec_decode_acceptance_histogram") or {}
    histogram = {int(accepted): int(steps) for accepted, steps in pooled.items()}
    if min([*histogram, *histogram.values()], default=0) < 0:
        raise ValueError("a histogram counts steps by accepted drafts, and neither is below zero")
    # The histogram alone does not tell K: its last positions may never have been reached.
    drafts, accepted = sum(histogram.values()), sum(place * steps for place, steps in histogram.items())
    if not drafts:
        fix = "Start vLLM with --per-request-spec-decode-metrics, which AIPerf reads."
        raise AcceptanceInvalid(NO_DRAFTS, where=where, fix=fix)
    config = result.get("input_config") or {}
    names = [one.get("name") for one in (config.get("models") or {}).get("items") or ()]
    asked = [str(one.get("format") or one.get("dataset") or "") for one in config.get("datasets") or ()]
    requests = (result.get("request_count") or {}).get("avg")
    return {
        "metric": "al_incl_bonus", "averaging": "micro_steps", "value": round(1 + accepted / drafts, 6),
        "drafts": drafts, "target": names[0] if len(names) == 1 else None,
        "prompts": int(requests) if requests else None, "date": str(result.get("start_time") or "")[:10] or None,
        "published_as": "spec_decode_token_weighted_acceptance_length",
    } | _asked(asked[0] if len(asked) == 1 else "")  # fmt: skip


def _asked(selector: str) -> Fields:
    """Return dataset and category from AIPerf's name, e.g. speed_bench_coding or spec_al_mtbench."""
    if selector.startswith("speed_bench_"):
        return {"dataset": SPEED_BENCH, "category": selector.removeprefix("speed_bench_") or CODING}
    return {"dataset": selector.removeprefix("spec_al_")} if selector.startswith("spec_al_") else {}


AIPERF = Benchmark("AIPerf", ("aiperf_version", "request_count"), _aiperf)
