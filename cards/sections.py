"""A card's sections: what the evidence says, and the templates that say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..bench.acceptance import AcceptanceRow
from ..bench.tables import NOT_STATED, table_of
from ..checkpoint.manifest import DRAFTS, MANIFEST, ConversionRecord, Manifest
from ..engines.registry import describe, engines_of
from ..escape import code
from ..validate.figures import AcceptanceFigures
from ..validate.report import Report
from . import target_card
from .evidence import Evidence, Said, cell
from .facts import NOT_OURS, SUBCARDS
from .licenses import attribution_in

CHART = "acceptance.png"
SUBCARD_TITLES = {
    "explainability": "Explainability", "bias": "Bias", "safety": "Safety & Security", "privacy": "Privacy",
}  # fmt: skip
# Who drafted, as a reader would say it.
DRAFTERS = {"output": "this head", "source": "the head it came from"}
# What every style says of manifest, report and acceptance.json, in these very words.
REPEATED = ("made.jinja", "measured.jinja", "performance.jinja")


def known(manifest: Manifest | None) -> dict[str, str]:
    """Return what a manifest says that a facts file would, by the facts' dotted names."""
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
        found["training.learning_rate"] = f"{recipe['lr']:g}, {recipe['schedule']}"
        found["training.context"] = f"{recipe['seq']} tokens"
    return found


def conversion(manifest: Manifest | None) -> dict[str, Any]:
    """Return what a manifest says, for the templates."""
    if manifest is None:
        empty = dict.fromkeys(("kind", "dtype", "engine", "exactness", "ships", "copied", "approximation"), "")
        return empty | {"captured": (), "parameters": ""}
    origin = manifest.parameters_by_origin
    parts = {
        "trained": origin.trained,
        "copied from the target": origin.copied_from_target,
        "of unknown origin": origin.unknown,
    }
    return {
        "kind": f"{manifest.spec['kind'].upper()} attention",
        "parameters": f"{manifest.parameters:,} ({'; '.join(f'{n:,} {what}' for what, n in parts.items() if n)})",
        "copied": f"{origin.copied_from_target:,}" if origin.copied_from_target else "",
        "dtype": manifest.spec["dtype"],
        "engine": describe(manifest.layout),
        "captured": manifest.spec["captured"],
        "exactness": _exactness(manifest),
        "ships": ships(manifest),
        "approximation": _approximation(manifest.conversion) if manifest.conversion else "",
    }


def measured(report: Report | None) -> dict[str, Any]:
    """Return what a validation report says, for the templates."""
    if report is None:
        return {"verified": "", "texts": (), "rows": (), "steps": 0, "precision": ""}
    figures = report.figures
    whole = [row for row in figures.acceptance if not row.category]
    # Of the same bytes the figures are the same, and one row says so.
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
    """Say how an attention was turned into the other kind, and what it measured on texts that were held out."""
    numbers = {name: value for name, value in record.held_out.items() if isinstance(value, int | float)}
    figures = ", ".join(f"{name.replace('_', ' ')} {value:.6g}" for name, value in numbers.items())
    healed = f", healed for {record.heal_steps} steps" if record.heal_steps else ""
    said = f"**approximate**: {record.method} (calibrated on {record.calibration}{healed}); held out: {figures}"
    return f"{said}; made from a head that was {_approximation(record.before)}" if record.before else said


def _exactness(manifest: Manifest) -> str:
    """Say what became of the weights' bytes: kept, but for the tensors that were added or computed."""
    changes = [f"{step.output.name} {step.action}" for step in manifest.tensors if step.reason]
    if not changes:
        return "exact: every weight has the source's bytes"
    return f"{'exact' if manifest.exact else '**not exact**'}; all have the source's bytes but {', '.join(changes)}"


def ships(manifest: Manifest) -> str:
    """Say whether a head is the draft that it came from, or another one."""
    return DRAFTS[manifest.as_it_ships].replace("another draft", "**another draft**")


def changed(manifest: Manifest | None) -> str:
    """Say that the files were changed, "" of a head that kconv did not make."""
    if manifest is None:
        return ""
    return (
        f"Modified: kconv {manifest.kconv} wrote these files from {manifest.source} ({manifest.source_layout} layout); "
        f"{MANIFEST} lists each tensor with its digests."
    )


def attribution(evidence: Evidence) -> str:
    """Return the name that the target's license asks to show, in quotes; "" where neither text nor facts say it."""
    names = [attribution_in(text.text) for text in evidence.texts if text.license.attribution]
    return next((f'"{name}"' for name in (*names, evidence.facts.license.attribution) if name), "")


def subcards(said: Said) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the title and the answered rows of each subcard that has any."""
    found = []
    for card, title in SUBCARD_TITLES.items():
        asked = {row: label for row, label in SUBCARDS[card].items() if row not in NOT_OURS}
        answers = {row: said.subcard(card, row) for row in asked}
        if said.facts.subcards.get(card):
            # Whoever writes a card with kconv is not NVIDIA's quality assurance.
            answers |= dict.fromkeys(NOT_OURS & SUBCARDS[card].keys(), "Not evaluated by kconv")
        rows = [(label, answers[row]) for row, label in SUBCARDS[card].items() if answers.get(row)]
        if rows:
            found.append((title, rows))
    return found


def sanity(rows: Sequence[AcceptanceRow]) -> list[str]:
    """Say what the answers were like that figures were measured on."""
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
    """Return a template's text."""
    environment = Environment(
        loader=PackageLoader("kconv.cards", "templates"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"cell": cell, "code": code}
    environment.filters["dense"] = lambda text: "\n".join(line for line in text.split("\n") if line.strip())
    return environment.get_template(template).render(values)


def figures(evidence: Evidence, *, chart: bool) -> dict[str, Any]:
    """Return what manifest, report and acceptance.json say, for the templates.

    Args:
        evidence: about the head.
        chart: whether a chart goes with the figures.
    """
    if target_card.is_target(evidence.manifest):
        return target_card.figures(evidence)
    table = table_of(evidence.acceptance, evidence.facts.expected)
    return {
        "facts": evidence.facts,
        "manifest": evidence.manifest,
        "table": table,
        "chart": CHART if chart and table and table.bars else "",
        "sane": [line for file in evidence.acceptance for line in sanity(file.rows)],
        **conversion(evidence.manifest),
        **measured(evidence.report),
        "unverified": unverified(evidence),
    }


def unverified(evidence: Evidence) -> list[str]:
    """Return what the head is read as by a user's word or by a default, but for what its report measured to be so."""
    records = evidence.manifest.unverified if evidence.manifest else ()
    told = {one.where for one in evidence.report.findings if one.rule == "K313"} if evidence.report else set()
    return [
        f"{one.fact}: {one.value}, by {one.word}" + (f" ({one.against})" if one.against else "")
        for one in records
        if f"config.json: {one.fact}" not in told
    ]


def not_repeated(evidence: Evidence, card: str) -> list[str]:
    """Return what a card should repeat of its evidence and does not: of each part, the first line that differs.

    Args:
        evidence: what it was made from.
        card: README.md's text.
    """
    held, values = _lines(card), figures(evidence, chart=f"]({CHART})" in card)
    lost = []
    for part in target_card.REPEATED if target_card.is_target(evidence.manifest) else REPEATED:
        wanted = _lines(render(part, values))
        places = [at for at, line in enumerate(held) if wanted and line == wanted[0]] or [0]
        # Where the part begins more than once, the place where most of it stands.
        same = max(_common(wanted, held[at:]) for at in places)
        lost += wanted[same : same + 1]
    return lost


def _common(one: list[str], other: list[str]) -> int:
    """Return how many lines two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.split("\n") if line.strip()]
