"""A card's words, from its templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from .evidence import Evidence, cell
from .sections import conversion, measured, sanity
from .tables import table_of

CHART = "acceptance.png"
# What every style says of manifest, report and acceptance.json, in these very words.
REPEATED = ("made.jinja", "measured.jinja", "performance.jinja")


def render(template: str, values: Mapping[str, Any]) -> str:
    """Return a template's text."""
    environment = Environment(
        loader=PackageLoader("kconv.cards", "templates"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["cell"] = cell
    return environment.get_template(template).render(values)


def figures(evidence: Evidence, *, chart: bool) -> dict[str, Any]:
    """Return what manifest, report and acceptance.json say, for the templates.

    Args:
        evidence: about the head.
        chart: whether a chart goes with the figures.
    """
    table = table_of(evidence.acceptance, evidence.facts.expected)
    return {
        "manifest": evidence.manifest,
        "table": table,
        "chart": CHART if chart and table and table.bars else "",
        "sane": [line for file in evidence.acceptance for line in sanity(file.rows)],
        **conversion(evidence.manifest),
        **measured(evidence.report),
    }


def not_repeated(evidence: Evidence, card: str) -> list[str]:
    """Return what a card should repeat of its evidence and does not: of each part, the first line that differs.

    Args:
        evidence: what it was made from.
        card: README.md's text.
    """
    held, values = _lines(card), figures(evidence, chart=f"]({CHART})" in card)
    lost = []
    for part in REPEATED:
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
