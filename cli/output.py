"""What commands print: results on stdout, progress on stderr."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from ..validate.figures import AcceptanceFigures
from ..validate.report import Report

if TYPE_CHECKING:
    from ..head.vocab import Coverage
    from ..pipeline.demo import Made
    from ..targets.states import StatesRecord
    from ..train.recipe import EagleRecipe
    from ..validate.rules.rule import Rule


# Columns of a line that goes to a file or a pipe; longer than any of kconv's.
UNFOLDED = 400


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar over bytes on stderr; the yielded function advances it."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, advance=count)


def print_json(value: Any) -> None:
    """Print one JSON object on stdout."""
    click.echo(json.dumps(value, indent=2))


def print_next(*words: str | Path) -> None:
    """Print the kconv command to go on with, quoted for a shell."""
    click.echo(f"next: kconv {shlex.join(click.format_filename(word) for word in words)}")


def print_states(record: StatesRecord, out: Path, *, as_json: bool) -> None:
    """Print what states were written."""
    if as_json:
        click.echo(record.to_json(), nl=False)
        return
    kinds = [sequence.kind for sequence in record.sequences]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    size = sum(shard.size for shard in record.shards) / 1e6
    click.echo(f"{out}: {len(kinds)} sequences ({counts}), {record.rows:,} tokens, {size:,.1f} MB {record.dtype}")
    click.echo(f"captured: outputs of layers {list(record.captured)} of {record.target.source}")


def wide_console() -> Console:
    """Return a console on stdout whose lines are not folded where no terminal limits them, so that grep finds names."""
    console = Console()
    return console if console.is_terminal else Console(width=UNFOLDED)


@contextmanager
def steps_bar(title: str) -> Iterator[Callable[[int, int, float], None]]:
    """Show a bar over training steps on stderr; the yielded function takes steps done, steps in all, and the loss."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=None, note="")
        yield lambda done, steps, loss: bars.update(task, completed=done, total=steps, note=f"loss {loss:.3f}")


@contextmanager
def status(title: str) -> Iterator[Callable[[str], None]]:
    """Show what is going on, on stderr; the yielded function says it."""
    with Console(stderr=True).status(title) as shown:
        yield lambda text: shown.update(f"{title}: {text}")


def print_report(report: Report, *, as_json: bool) -> None:
    """Print a validation report."""
    if as_json:
        click.echo(report.to_json(), nl=False)
        return
    console, figures = wide_console(), report.figures
    for finding in report.findings:
        said = escape(f"{finding.where}: {finding.message}")
        console.print(f"[bold]{finding.severity} {finding.rule}[/] {said}", highlight=False)
        console.print(f"  fix: {escape(finding.fix)}", highlight=False)
    if figures.acceptance:
        console.print(acceptance_table(report), "")
    for parity in figures.parity:
        console.print(
            f"{parity.text}: logits {parity.rms_error:.1e} from the source's (worst {parity.relative_error:.1e}), "
            f"KL {parity.kl:.1e}, "
            f"top-1 agreement {parity.top1:.2%}, acceptance {parity.length_difference:+.4f}",
            highlight=False,
        )
    if figures.engine:
        by = figures.engine
        console.print(
            f"{by.engine}: {by.same_output} of {by.prompts} outputs equal, {by.drafts} drafts, acceptance length "
            f"{by.length:.4f}; kconv's chain gives {by.expected_drafts} drafts and {by.expected_length:.4f}",
            highlight=False,
        )
    if figures.noise is not None and figures.noise.median is not None:
        noise = figures.noise
        console.print(
            f"{noise.tensors:,} tensors in NVFP4: signal over noise {noise.median:.1f} dB in the middle, "
            f"{noise.worst:.1f} dB at worst ({noise.worst_tensor})",
            highlight=False,
        )
    if figures.perplexity is not None:
        text = figures.perplexity
        console.print(
            f"perplexity {text.output:.4f}, the source's {text.source:.4f} ({math.expm1(text.log_ratio):+.2%}), the "
            f"same likeliest token at {text.top1:.2%} of {text.tokens:,} places",
            highlight=False,
        )
    if figures.identical is not None:
        console.print("weights: " + ("identical to the source's" if figures.identical else "NOT the source's"))
    if engines := report.provenance.get("for"):
        console.print(f"checked for {', '.join(engines)} ({report.provenance.get('for_by', 'asked')})", highlight=False)
    errors, warnings = (sum(f.severity == s for f in report.findings) for s in ("error", "warning"))
    verdict = ("no errors" if report.clean else f"{errors} error(s)") + (f", {warnings} warning(s)" if warnings else "")
    console.print(escape(f"{report.subject}: {verdict}"), highlight=False)


def print_rule(rule: Rule) -> None:
    """Print what a rule is about."""
    click.echo(f"{rule.id} {rule.name} ({rule.severity})")
    click.echo(f"  {rule.sentence}")
    facts = {"fix": rule.fix, "engines": ", ".join(rule.engines) or "all", "seen in": rule.seen_in}
    for name, fact in facts.items():
        if fact:
            click.echo(f"  {name}: {fact}")


def print_rules(rules: Mapping[str, Rule]) -> None:
    """Print every rule in a line."""
    table = Table("rule", "name", "severity", "engines", "what goes wrong", box=None, header_style="bold")
    for rule in rules.values():
        table.add_row(rule.id, rule.name, rule.severity, ", ".join(rule.engines) or "all", escape(rule.sentence))
    wide_console().print(table)


def acceptance_table(report: Report, title: str = "") -> Table:
    """Return acceptance lengths by drafter and text, with standard errors where there are any."""
    rows = report.figures.acceptance
    kinds = list(dict.fromkeys(row.text for row in rows))
    steps = rows[0].steps
    caption = f"acceptance length, K={steps}, bonus token included"
    table = Table(title=f"{title}: {caption}" if title else caption, box=None, header_style="bold")
    table.add_column("drafter")
    for kind in kinds:
        distinct = next(text.distinct_4grams for text in report.figures.texts if text.kind == kind)
        table.add_column(f"{kind}\n({distinct:.0%} distinct 4-grams)", justify="right")
    for drafter in dict.fromkeys(row.drafter for row in rows):
        own = {row.text: row for row in rows if row.drafter == drafter}
        table.add_row(drafter, *(_length(own[kind]) for kind in kinds))
    return table


def _length(row: AcceptanceFigures) -> str:
    error = f" ± {row.standard_error:.3f}" if row.standard_error is not None else ""
    return f"{row.length:.3f}{error}"


def print_demo(out: Path, made: Sequence[Made]) -> None:
    """Print what the demo made, and what it proved."""
    console = Console()
    for head in made:
        console.print(acceptance_table(head.report, title=f"{head.name} head"), "")
    table = Table(f"in {out}", "size", "parity with ModelOpt's module", "weights", "there and back", box=None)
    table.add_row("target", _size(out / "target"), "", "", "")
    for head in made:
        parity = head.report.figures.parity
        apart = max(p.rms_error for p in parity)
        agreed = min(p.top1 for p in parity)
        table.add_row(
            f"{head.name}/vllm",
            _size(out / head.name / "vllm"),
            f"logits {apart:.0e}, top-1 {agreed:.1%}",
            "identical" if head.report.figures.identical else "[red]NOT identical",
            "identical" if head.round_trip else "[red]NOT identical",
        )
    console.print(table)
    click.echo()
    print_next("inspect", out / made[0].name / "vllm")


def _size(folder: Path) -> str:
    return f"{sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()) / 1e6:.1f} MB"


def print_coverage(coverage: Coverage, recipe: EagleRecipe) -> None:
    """Print how much of the training text a draft vocabulary holds."""
    click.echo(
        f"draft vocabulary of {recipe.draft_vocab:,}: {coverage.share:.2%} of {coverage.tokens:,} training tokens, "
        f"{coverage.distinct_covered:,} of {coverage.distinct:,} distinct ones"
    )


def print_trained(training: Mapping[str, Any], layout: str, out: Path) -> None:
    """Print what a training run came to."""
    before, after, steps = training["untrained"], training["trained"], training["recipe"]["ttt_steps"]
    table = Table("held out", "untrained", "trained", box=None, header_style="bold")
    for key, name in (("loss", "loss, nats"), ("acceptance", f"acceptance length, sampled, K={steps}")):
        table.add_row(name, f"{before[key]:.3f}", f"{after[key]:.3f}")
    Console().print(table)
    click.echo()
    print_next(*(("validate", out) if layout == "vllm" else ("to-vllm", out, f"{out}-vllm")))
