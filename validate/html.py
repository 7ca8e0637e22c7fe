"""A report as one self-contained HTML file: no script, font or picture from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from ..engines.registry import layouts
from ..escape import terminal
from ..lines import counted
from ..measure.figures import AcceptanceFigures
from .numbers import EXACT, details, is_exact, plain, summary, verdict_line, verdict_words
from .report import SEVERITIES, UNREAD, Finding, Report, Verdict

TEMPLATE = "report.html.jinja"
# Of a chart, in its own units; the page scales it.
WIDTH, NAME, ROW, RIGHT, TOP, BOTTOM = 640, 170, 26, 70, 8, 34
# Length limit of a name, in a phone's larger letters; a longer one is cut, as it would be at the picture's edge.
LETTER, LETTERS = 9.5, 32
# Standard errors: a 95 % interval of a normal mean.
SPREAD = 1.96


@dataclass(frozen=True)
class Cell:
    """The result of a subject of checks for an engine: its words, and a severity, "good" or "none"."""

    text: str
    kind: str


@dataclass(frozen=True)
class Dot:
    """A row of a chart: a name, a value, half its interval (None if there is none), and its series."""

    name: str
    value: float
    half: float | None
    series: int


def to_html(report: Report) -> str:
    """Return report.html's text."""
    figures, judged = report.figures, report.verdicts
    return _template().render(
        report=report,
        verdict=verdict_line(report).replace("**", ""),
        verdicts=[(one, verdict_words(one)) for one in judged],
        matrix=list(_matrix(report, judged)),
        findings=[(severity, [f for f in report.findings if f.severity == severity]) for severity in SEVERITIES],
        titles=lambda finding: [one.engine for one in judged if finding.engines and finding.concerns(one.runners)],
        numbers=list(summary(figures)),
        details=list(details(figures)),
        charts=list(_charts(report, "Acceptance length", figures.acceptance)),
        by_category=list(_charts(report, "Acceptance length by category", figures.acceptance_by_category)),
        exact=EXACT if is_exact(figures) else "",
        plain=plain,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("kconv.validate", "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_shown,
    )  # fmt: skip
    return environment.get_template(TEMPLATE)


def _shown(value: object) -> object:
    """Remove characters that a browser obeys apart from HTML: control characters, and changes of text direction."""
    return value if isinstance(value, Markup) else terminal(value)


def _matrix(report: Report, judged: Sequence[Verdict]) -> Iterator[tuple[str, list[Cell]]]:
    """Yield each subject of checks with a cell for each engine."""
    from .rules.table import OF_TARGET, SUBJECTS

    measured = {rule.id for rules in SUBJECTS.values() for rule in rules if rule.values}
    ids = {title: {rule.id for rule in rules} for title, rules in SUBJECTS.items()}
    in_target = {rule.id for title in OF_TARGET for rule in SUBJECTS[title]}
    of_target = report.figures.noise is not None or any(finding.rule in in_target for finding in report.findings)
    for title, own in ids.items():
        found = [finding for finding in report.findings if finding.rule in own]
        # A note alone, such as one on an unverified fact, does not mean that anything was measured.
        if all(one.severity == "note" for one in found) and not _applies(report, title, of_target):
            continue
        # Unread parts may be wrong, so nothing found there is not a pass.
        blind = UNREAD in report.provenance or (own <= measured and not report.weights)
        yield title, [_cell([f for f in found if f.concerns(one.runners)], blind) for one in judged]


def _applies(report: Report, title: str, of_target: bool) -> bool:
    from .rules.table import OF_COMPARISON, OF_TARGET, SUBJECTS

    if title == OF_COMPARISON:
        return report.figures.identical is not None
    family = next((one.drafter.name for one in layouts() if one.name == report.provenance.get("layout")), "")
    of_family = any(not rule.drafters or family in rule.drafters for rule in SUBJECTS[title])
    return of_family and (title in OF_TARGET) == of_target


def _cell(findings: Sequence[Finding], blind: bool) -> Cell:
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES[:-1]}
    if said := [counted(count, severity) for severity, count in counts.items() if count]:
        return Cell(", ".join(said), next(severity for severity, count in counts.items() if count))
    return Cell("not checked", "none") if blind else Cell("passed", "good")


def _charts(report: Report, title: str, rows: Sequence[AcceptanceFigures]) -> Iterator[tuple[str, Markup]]:
    """Yield a caption and a drawing for each text."""
    # If the bytes are the same, the source's figures are also the output's.
    shown = [row for row in rows if not (is_exact(report.figures) and row.drafter == "source")]
    series = list(dict.fromkeys(row.drafter for row in shown))
    for kind in dict.fromkeys(row.text for row in shown):
        own = [row for row in shown if row.text == kind]
        dots = [Dot(_label(row), row.length, _half(row), series.index(row.drafter)) for row in own]
        yield f"{title} on {kind} text, K = {own[0].steps}, bonus token included", _dots(dots, own[0].steps)


def _label(row: AcceptanceFigures) -> str:
    name = terminal(f"{row.category}, {row.drafter}" if row.category else row.drafter)
    return name if len(name) <= LETTERS else f"{name[: LETTERS - 1]}…"


def _half(row: AcceptanceFigures) -> float | None:
    return None if row.standard_error is None else SPREAD * row.standard_error


def _dots(dots: Sequence[Dot], steps: int) -> Markup:
    """Draw lengths with their intervals, one below the other, on an axis over all values possible with K drafts."""
    low, high = 1.0, steps + 1.0
    height = TOP + ROW * len(dots) + BOTTOM
    names = max(NAME, *(10 + LETTER * len(dot.name) for dot in dots))

    def x(value: float) -> float:
        inside = min(max(value, low), high)
        return names + (inside - low) / (high - low) * (WIDTH - names - RIGHT)

    parts = [
        Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
            WIDTH, height, "; ".join(f"{dot.name} {dot.value:.3f}" for dot in dots)
        )
    ]
    for at in range(1, steps + 2):
        parts.append(
            Markup('<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>').format(
                x(at), TOP, height - BOTTOM
            )
            + Markup('<text class="tick" x="{:.1f}" y="{}">{}</text>').format(x(at), height - BOTTOM + 18, at)
        )
    for place, dot in enumerate(dots):
        y = TOP + ROW * (place + 0.5)
        parts.append(Markup('<text class="name" x="{}" y="{:.1f}">{}</text>').format(names - 10, y + 4, dot.name))
        if dot.half is not None:
            ends = x(dot.value - dot.half), x(dot.value + dot.half)
            parts.append(
                Markup('<line class="s{}" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>').format(
                    dot.series % 4, *ends, y, y
                )
            )
        parts.append(
            Markup('<circle class="s{}" cx="{:.1f}" cy="{:.1f}" r="5"/>').format(dot.series % 4, x(dot.value), y)
        )
        parts.append(
            Markup('<text class="value" x="{}" y="{:.1f}">{:.3f}</text>').format(WIDTH - RIGHT + 12, y + 4, dot.value)
        )
    return Markup("").join([*parts, Markup("</svg>")])
