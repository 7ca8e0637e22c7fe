"""Acceptance figures from other programs' result files, as rows with their origin.

A row has what its file and the user state; what neither states is missing, and keeps the figure from being compared.
Nothing in a file is overruled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..checkpoint.bytes import file_digest
from ..checkpoint.schema import find_wrong, parse_json, read_text
from ..errors import AcceptanceInvalid, DefinitionsMixed
from .acceptance import AcceptanceFile, AcceptanceRow
from .golden import CODING, SPEED_BENCH, read_curve

LARGEST = 64 << 20  # bytes; with --save-detailed a result holds all answers
Fields = dict[str, Any]
FIX = "Pass a result of vllm bench serve, AIPerf or sglang.bench_serving with speculation, or a golden curve."


@dataclass(frozen=True)
class Format:
    """The form of a program's results.

    Attributes:
        title: the program.
        marks: keys that all of its results have.
        read: returns the fields of a row from a result.
    """

    title: str
    marks: tuple[str, ...]
    read: Callable[[Mapping[str, Any], object], Fields]


def quote(file: Path, head: str | None, url: str | None, said: Mapping[str, Any]) -> AcceptanceFile:
    """Return another program's figures as figures of a head.

    Args:
        file: its result, or a golden curve.
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
    rows, titles = [], []
    for result in found:
        form = next((form for form in FORMATS if isinstance(result, dict) and result.keys() >= set(form.marks)), None)
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


def _vllm(result: Mapping[str, Any], where: object) -> Fields:
    """https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/benchmarks/serve.py#L1335-L1345"""
    drafts, accepted = result.get("spec_decode_num_drafts"), result.get("spec_decode_accepted_tokens")
    rates = result.get("spec_decode_per_position_acceptance_rates") or None
    if not drafts or accepted is None:
        raise _no_drafts(where, "Run it against a server that speculates and shows its counters.")
    if result.get("failed"):
        raise AcceptanceInvalid(f"{result['failed']} requests failed", where=where, fix="Measure again.")
    date = str(result["date"])
    return {
        "metric": "al_incl_bonus", "averaging": "micro_steps", "value": round(1 + accepted / drafts, 6),
        "drafts": drafts, "rates": rates, "draft_tokens": len(rates) if rates else None, "engine": "vllm",
        "target": result["model_id"], "prompts": result["completed"], "date": f"{date[:4]}-{date[4:6]}-{date[6:8]}",
        "published_as": "spec_decode_acceptance_length",
        "note": "from the server's counters, which include any other use of it",
    }  # fmt: skip


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
        raise _no_drafts(where, "Start vLLM with --per-request-spec-decode-metrics, which AIPerf reads.")
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


def _sglang(result: Mapping[str, Any], where: object) -> Fields:
    """https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/benchmark/serving.py#L1649-L1656"""
    if not result["accept_length"]:
        raise _no_drafts(where, "Run it against a server that speculates.")
    server = result.get("server_info") or {}
    topk, nodes = server.get("speculative_eagle_topk"), server.get("speculative_num_draft_tokens")
    simulated = [name for name in server if "simulate_acc" in name.lower() and server[name]]
    if simulated:
        raise AcceptanceInvalid(
            f"the server forged its acceptance: {simulated[0]} was set", where=where, fix="Measure without it."
        )
    return {
        "metric": "al_incl_bonus", "averaging": "micro_steps", "value": round(float(result["accept_length"]), 6),
        "draft_tokens": server.get("speculative_num_steps"), "engine": "sglang",
        "engine_version": server.get("version"), "target": server.get("model_path"), "dataset": result["dataset_name"],
        "tree": None if topk is None else "chain" if topk == 1 else f"topk={topk},nodes={nodes}",
        "published_as": "accept_length",
        "note": "a mean over everything the server did since it started, up to its last log line",
    }  # fmt: skip


def _no_drafts(where: object, fix: str) -> AcceptanceInvalid:
    return AcceptanceInvalid("the result has no draft figures", where=where, fix=fix)


FORMATS = (
    Format("AIPerf", ("aiperf_version", "request_count"), _aiperf),
    Format("sglang.bench_serving", ("accept_length", "backend"), _sglang),
    Format("vllm bench serve", ("model_id", "num_prompts", "completed", "date"), _vllm),
)
