"""A card's sections: the values from the evidence, and their templates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..bench.acceptance import AcceptanceFile, AcceptanceRow, suite_name
from ..bench.tables import NOT_STATED, table_of
from ..checkpoint.manifest import DRAFTS, MANIFEST, ConversionRecord, Manifest
from ..drafters.facts import phrase
from ..engines.registry import describe, engines_of
from ..escape import block, code
from ..measure.figures import AcceptanceFigures
from ..validate.report import Report, called
from . import target_card
from .evidence import Evidence, Said, cell
from .facts import NOT_OURS, SUBCARDS
from .licenses import attribution_in, shown_in

CHART = "acceptance.png"
SUBCARD_TITLES = {
    "explainability": "Explainability", "bias": "Bias", "safety": "Safety & Security", "privacy": "Privacy",
}  # fmt: skip
# Readable names of the drafters.
DRAFTERS = {"output": "this head", "source": "the head it came from"}
# The parts about manifest, report and acceptance.json that are the same in every style.
REPEATED = ("made.jinja", "measured.jinja", "performance.jinja")


def known(manifest: Manifest | None) -> dict[str, str]:
    """Return a manifest's values for a facts file, by the facts' dotted names."""
    if manifest is None or target_card.is_target(manifest):
        return {}
    found = {
        "architecture.attention": f"{manifest.spec['kind'].upper()}",
        "architecture.tensor_type": manifest.spec["dtype"],
        "runtime.engines": ", ".join(engine.title for engine in engines_of(manifest.layout)),
    }
    training = manifest.training or {}
    recipe = training.get("recipe", {})
    if libraries := training.get("libraries"):
        found["training.framework"] = ", ".join(f"{name} {version}" for name, version in libraries.items())
    if tokens := training.get("tokens", {}).get("counted"):
        found["training.tokens"] = f"{tokens:,}"
    if start := training.get("started_from"):
        found["training.initialized_from"] = start
    if {"steps", "lr", "schedule", "seq"} <= recipe.keys():
        found["training.iterations"] = f"{recipe['steps']:,}"
        found["training.learning_rate"] = f"{recipe['lr']!r}, {recipe['schedule']}"
        found["training.context"] = f"{recipe['seq']} tokens"
    return found


def conversion(manifest: Manifest | None) -> dict[str, Any]:
    """Return a manifest's values for the templates."""
    if manifest is None:
        empty = dict.fromkeys(("kind", "dtype", "engine", "exactness", "ships", "copied", "approximation"), "")
        return empty | {"captured": (), "parameters": ""}
    origin = manifest.parameters_by_origin
    parts = {
        "trained": origin.trained,
        "copied from the target": origin.copied_from_target,
        "trained or copied from the target, not known which": origin.unknown,
    }
    return {
        "kind": f"{manifest.spec['kind'].upper()} attention",
        "parameters": f"{manifest.parameters:,}, all trained"
        if origin.trained == manifest.parameters
        else f"{manifest.parameters:,} ({'; '.join(f'{n:,} {what}' for what, n in parts.items() if n)})",
        "copied": f"{origin.copied_from_target:,}" if origin.copied_from_target else "",
        "dtype": manifest.spec["dtype"],
        "engine": describe(manifest.layout),
        "captured": manifest.spec["captured"],
        "exactness": _exactness(manifest),
        # Where every weight is the source's, the row of the weights says so.
        "ships": "" if manifest.as_it_ships and not _changes(manifest) else ships(manifest),
        "approximation": _approximation(manifest.conversion) if manifest.conversion else "",
    }


def measured(report: Report | None) -> dict[str, Any]:
    """Return a validation report's values for the templates."""
    if report is None:
        return {"verified": "", "texts": (), "rows": (), "steps": 0, "precision": ""}
    figures = report.figures
    whole = [row for row in figures.acceptance if not row.category]
    # If the bytes are the same, so are the figures, and one row says so.
    shown = [row for row in whole if not (figures.identical and row.drafter == "source")]
    titles = DRAFTERS | ({"output": "this head, and the one it came from"} if len(shown) < len(whole) else {})
    return {
        "verified": {None: "", True: "identical, bit by bit", False: "NOT identical"}[figures.identical],
        "texts": figures.texts,
        "rows": _rows(shown, titles),
        "steps": whole[0].steps if whole else 0,
        "precision": report.provenance.get("dtype", NOT_STATED),
    }


def _approximation(record: ConversionRecord) -> str:
    """Describe an approximation, and what it kept on held-out texts."""
    said = f"**approximate**: {record.method}, calibrated on {record.calibration}"
    found = {name: value for name, value in record.held_out.items() if isinstance(value, int | float)}
    if {"kept", "kept_error", "after", "before", "sequences"} <= found.keys():
        trained = found.get("trained")
        against = (
            f"of the {trained:.3f} that the original has after the same steps ({found['before']:.3f} before them)"
            if trained
            else f"of the original's {found['before']:.3f}"
        )
        said += (
            f". On {found['sequences']:.0f} held-out texts its sampled acceptance length is {found['after']:.3f}, "
            f"{found['kept']:.1%} ± {found['kept_error']:.1%} {against}"
        )
        greedy, off = (found.get(name, math.nan) for name in ("greedy_kept", "greedy_kept_error"))
        if not math.isnan(greedy + off):
            said += f"; greedy it keeps {greedy:.1%} ± {off:.1%}"
    return f"{said}; made from a head that was {_approximation(record.before)}" if record.before else said


def _exactness(manifest: Manifest) -> str:
    """Describe what happened to the weights' bytes: kept, except for tensors that were added or computed."""
    if not (changes := _changes(manifest)):
        return "exact: every weight is byte-identical to the source"
    return f"{'exact' if manifest.exact else '**not exact**'}; byte-identical to the source except {', '.join(changes)}"


def _changes(manifest: Manifest) -> list[str]:
    return [f"{step.output.name} {step.action}" for step in manifest.tensors if step.reason]


def ships(manifest: Manifest) -> str:
    """Return whether a head is the draft that it started from."""
    return DRAFTS[manifest.as_it_ships].replace("other weights", "**other weights**")


def changed(manifest: Manifest | None) -> str:
    """Return the statement that the files were changed, "" for a head that kconv did not write."""
    if manifest is None:
        return ""
    return (
        f"Modified: kconv {manifest.kconv} wrote these files from {called(manifest.source)} "
        f"({manifest.source_layout} layout); {MANIFEST} lists each tensor with its digests."
    )


def attribution(evidence: Evidence) -> str:
    """Return the name that the target's license requires products to show, in quotes; "" if unknown."""
    names = [attribution_in(text.text) for text in evidence.texts if text.license.attribution]
    return next((f'"{name}"' for name in (*names, evidence.facts.license.attribution) if name), "")


def shown(evidence: Evidence) -> list[str]:
    """Return what the licenses require a card to show, each once."""
    phrases = [shown_in(text.text) for text in evidence.texts]
    return list(dict.fromkeys(first for first, *_ in filter(None, phrases)))


def subcards(said: Said) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the title and the answered rows of each subcard that has any."""
    found = []
    for card, title in SUBCARD_TITLES.items():
        asked = {row: label for row, label in SUBCARDS[card].items() if row not in NOT_OURS}
        answers = {row: said.subcard(card, row) for row in asked}
        # The author of a card is not NVIDIA's quality assurance: such an answer is its publisher's.
        by = said.facts.publisher or "its publisher"
        stated = said.facts.subcards.get(card, {}).items()
        answers |= {row: cell(f"As {by} states: {answer}") for row, answer in stated if row in NOT_OURS}
        rows = [(label, answers[row]) for row, label in SUBCARDS[card].items() if answers.get(row)]
        if rows:
            found.append((title, rows))
    return found


def sanity(rows: Sequence[AcceptanceRow]) -> list[str]:
    """Describe the answers on which figures were measured."""
    for row in rows:
        if row.sanity and not row.category:
            return [
                f"Answers: {row.sanity.mean_tokens:.0f} tokens on average, {row.sanity.cut:.0%} cut at the limit, "
                f"{row.sanity.distinct_4grams:.0%} of their 4-grams distinct."
            ]
    return []


def _rows(acceptance: Sequence[AcceptanceFigures], titles: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    rows: dict[str, list[str]] = {}
    for figure in acceptance:
        error = f" ± {figure.standard_error:.3f}" if figure.standard_error is not None else ""
        rows.setdefault(titles.get(figure.drafter, figure.drafter), []).append(f"{figure.length:.3f}{error}")
    return list(rows.items())


def render(template: str, values: Mapping[str, Any]) -> str:
    return _templates().get_template(template).render(values)


@cache
def _templates() -> Environment:
    # It keeps what it compiles, which takes longer than most cards.
    environment = Environment(
        loader=PackageLoader("kconv.cards", "templates"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"cell": cell, "code": code, "block": block, "called": called}
    environment.filters["dense"] = lambda text: "\n".join(line for line in text.split("\n") if line.strip())
    return environment


def figures(evidence: Evidence, *, chart: bool) -> dict[str, Any]:
    """Return the text from manifest, report and acceptance.json, for the templates."""
    if target_card.is_target(evidence.manifest):
        return target_card.figures(evidence)
    shown, others = _by_draft_tokens(evidence)
    whole: dict[str, bool] = {}
    for suite in (suite for file in evidence.acceptance for suite in file.suites):
        name = suite_name(suite.dataset)
        whole[name] = whole.get(name, False) or suite.whole is not False
    partly = {name for name, is_whole in whole.items() if not is_whole}
    table, folded = table_of(shown, evidence.facts.expected, partly), table_of(others, {}, partly)
    return {
        "facts": evidence.facts,
        "manifest": evidence.manifest,
        "table": table,
        "folded": folded,
        "alike": bool(table and folded and table.is_like(folded)),
        "chart": CHART if chart and table and table.bars else "",
        # Greedy answers are the same at every K.
        "sane": list(dict.fromkeys(line for file in evidence.acceptance for line in sanity(file.rows))),
        **conversion(evidence.manifest),
        **measured(evidence.report),
        "unverified": unverified(evidence),
    }


def _by_draft_tokens(evidence: Evidence) -> tuple[list[AcceptanceFile], list[AcceptanceFile]]:
    """Divide the figures by K: those that the card shows, and those that it folds.

    Shown are the K of the facts, else the drafter's own; without a figure at one of these, all are.
    """
    measured = {row.draft_tokens for file in evidence.acceptance for row in file.rows} - {None}
    own = evidence.drafter.draft_tokens(evidence.spec)
    chosen = measured & set(evidence.facts.draft_tokens or (own,)) or measured

    def those(shown: bool) -> list[AcceptanceFile]:
        files = []
        for file in evidence.acceptance:
            rows = tuple(
                row
                for row in _but_means(file.rows)
                if (row.draft_tokens is None or row.draft_tokens in chosen) is shown
            )
            files.append(file.model_copy(update={"rows": rows} if shown else {"rows": rows, "suites": ()}))
        return files

    return those(True), those(False)


def _but_means(rows: Sequence[AcceptanceRow]) -> list[AcceptanceRow]:
    """Return the rows without measured means of the categories that stand beside another mean of the same prompts.

    Two figures for all prompts that hardly differ make a reader look for what is not there; acceptance.json has both.
    """
    others = {
        (suite_name(row.dataset), row.draft_tokens)
        for row in rows
        if not row.category and row.averaging != "macro_category"
    }
    return [
        row
        for row in rows
        if row.averaging != "macro_category"
        or row.measured_by != "self"
        or (suite_name(row.dataset), row.draft_tokens) not in others
    ]


def unverified(evidence: Evidence) -> list[str]:
    """Return facts that rest on the user's word or on a default, except those that the report measured."""
    records = evidence.manifest.unverified if evidence.manifest else ()
    decided = evidence.report.figures.decided if evidence.report is not None else None
    return [
        f"{one.fact}: {phrase(one.fact, one.value)}, by {one.word}" + (f" ({one.against})" if one.against else "")
        for one in records
        if decided is None or one.fact not in decided.confirmed
    ]


def not_repeated(evidence: Evidence, card: str) -> list[str]:
    """Return what a card should repeat of its evidence but does not: the first different line of each part."""
    held, values = _lines(card), figures(evidence, chart=f"]({CHART})" in card)
    lost = []
    for part in target_card.REPEATED if target_card.is_target(evidence.manifest) else REPEATED:
        wanted = _lines(render(part, values))
        places = [at for at, line in enumerate(held) if wanted and line == wanted[0]] or [0]
        # If the part begins more than once, the place with most of it counts.
        same = max(_common(wanted, held[at:]) for at in places)
        lost += wanted[same : same + 1]
    return lost


def _common(one: list[str], other: list[str]) -> int:
    """Return with how many equal lines two texts begin."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.split("\n") if line.strip()]
