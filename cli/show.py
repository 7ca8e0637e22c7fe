"""What commands print: results on stdout, as tables or as one JSON object. Nothing is decided here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape
from rich.table import Column, Table

from ..escape import command
from ..operations.base import Operation
from .progress import duration
from .terminal import VERBOSE, echo, make_console

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.acceptance import AcceptanceFile, AcceptanceRow, SpeedFigure
    from ..bench.compare import Comparison
    from ..convert.plan import Plan
    from ..operations.bench import Compared, Written
    from ..operations.card import CardWritten
    from ..operations.convert import Converted
    from ..operations.env import Environment
    from ..operations.generate import Generated
    from ..operations.inspect import Inspected
    from ..operations.publish import PublishResult
    from ..operations.quantize import Calibrated, Quantized
    from ..operations.states import StatesWritten
    from ..operations.train import Trained
    from ..operations.verify import Verified
    from ..operations.vocab import VocabChanged, VocabExamined
    from ..quantize.plan import QuantizePlan
    from ..rule import Rule
    from ..train.plan import TrainPlan
    from ..validate.report import Report, Verdict

# Line width for files and pipes; longer than any of kconv's lines.
UNFOLDED = 400
# Colors of severities, worst first.
SEVERITIES = {"error": "red", "undecided": "yellow", "warning": "yellow", "note": "blue"}
# Number of readings of a head to show; report.json has all.
READINGS = 8
# Kinds of means, as table headings.
WAYS = {
    "micro_steps": "steps",
    "macro_request": "requests",
    "macro_category": "categories",
    "micro_positions": "positions",
}


def show(request: Operation, result: Any, *, as_json: bool) -> None:
    """Print an operation's result."""
    if as_json:
        print_json(_plain(request, result))
        return
    SHOWN[type(request).__name__](request, result)


def show_plan(request: Operation, plan: Any, *, as_json: bool) -> None:
    """Print an operation's preview."""
    text, plain = PLANNED[type(request).__name__]
    if as_json:
        print_json(plain(request, plan))
        return
    text(request, plan)


def print_json(value: Any) -> None:
    """Print one JSON object on stdout."""
    echo(value if isinstance(value, str) else json.dumps(value, indent=2), nl=not str(value).endswith("\n"))


def print_next(*words: str | Path) -> None:
    """Print the next kconv command, quoted for a shell."""
    echo(f"next: kconv {command([click.format_filename(word) for word in words])}")


def wide_console() -> Console:
    """Return a console on stdout that does not fold lines without a terminal, so that grep finds names."""
    console = make_console()
    return console if console.is_terminal else make_console(width=UNFOLDED)


def _plain(request: Operation, result: Any) -> Any:
    """Return a result as plain values, or as the text of its JSON."""
    name = type(request).__name__
    if name == "Verify":
        counts = {"tensors": len(result.manifest.tensors), "files": len(result.manifest.files)}
        return {"out": result.out, "matches": True, "source_compared": result.with_source} | counts
    if name == "Quantize":
        return _quantized_facts(result.plan, _weight_files(result)) | {"out": result.out}
    return result.to_json()


# Heads


def _show_head(_: Operation, found: Inspected) -> None:
    reading, console = found.reading, wide_console()
    infos = list(reading.checkpoint.tensors.values())
    grid = Table.grid(Column(), _name(""), padding=(0, 2))
    for name, fact in _head_facts(found).items():
        grid.add_row(f"[bold]{name}", fact)
    tensors = Table(_name("tensor"), "dtype", "shape", "bytes", box=None, header_style="bold")
    for info in infos:
        tensors.add_row(escape(info.name), info.dtype, " x ".join(map(str, info.shape)), f"{info.size:,}")
    console.print(grid, "", tensors)
    shown = {one.what for one in reading.undecided}
    for problem in reading.problems:
        if problem.what not in shown:
            said = escape(f"{problem.where}: {problem.what}")
            console.print(f"[bold]{problem.severity} {problem.code}[/] {said}", highlight=False)
            console.print(f"  fix: {escape(problem.fix)}", highlight=False)


def _head_facts(found: Inspected) -> dict[str, str]:
    """Return the lines that describe a checkpoint, with markup; undecided facts are marked in their line."""
    reading, spec, config = found.reading, found.reading.spec, found.reading.config
    known = reading.layout.drafter.facts if reading.layout else {}
    opened = {one.fact: one for one in reading.undecided}
    facts = {"source": reading.checkpoint.source, "what": found.kind}
    if reading.kind is not None:
        facts["what"] += f": {reading.kind.what}"
    if reading.layout is not None:
        facts["layout"] = f"{reading.layout.name} ({reading.layout.engine})"
    if spec is not None and reading.layout is not None:
        facts |= {
            "attention": f"{spec.kind.upper()} {_dims(spec.attention)}" if reading.layout.drafter.attention else "none",
            "hidden": f"{spec.hidden} (target {spec.target_hidden}){_mlp(spec)}, {spec.layers} layer(s)",
            "vocabulary": f"{spec.draft_vocab} of {spec.vocab}",
            "rope": f"theta {spec.rope.theta!r}, {_dims(spec.rope.scaling) if spec.rope.scaling else 'no scaling'}",
            "captured": f"outputs of layers {list(spec.captured)}: {reading.captured.how}" if reading.captured else "",
        } | reading.layout.drafter.lines(spec)
    else:
        stated = {key: config.get(key) for key in STATED if config.get(key) is not None}
        facts["config"] = ", ".join(f"{key} {value}" for key, value in stated.items()) or "states no dims"
        if reading.captured:
            facts["captured"] = f"outputs of layers {list(reading.captured.ids)}: {reading.captured.how}"
    dtype = f", {spec.dtype}" if spec else ""
    facts["weights"] = f"{len(reading.checkpoint.tensors)} tensors, {found.parameters:,} parameters{dtype}"
    if found.targets:
        facts["target"] = (
            f"{', '.join(found.targets)}, named in its files; --target {found.targets[0]} reads its config"
        )
    shown = {name: escape(fact) for name, fact in facts.items()}
    for name, fact in known.items():
        if (one := opened.get(name)) is not None:
            candidates = "".join(f"\n- {escape(candidate)}" for candidate in one.phrases)
            shown[fact.line] = f"[bold yellow]UNDECIDED[/]: {escape(one.what)}{candidates}\n{escape(one.decide)}"
    for one in reading.read.unverified if reading.read else ():
        against = f"; {escape(one.against)}" if one.against else ""
        shown[known[one.fact].line] += f" [yellow](by {escape(one.word)}, not verified{against})[/]"
    return shown


def _mlp(spec: Any) -> str:
    return f", MLP {spec.intermediate}" if hasattr(spec, "intermediate") else ""


# What `kconv inspect` shows of a config that it cannot read.
STATED = (
    "architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "vocab_size", "draft_vocab_size", "rope_theta", "max_position_embeddings",
)  # fmt: skip


def _plan_of_head(_: Operation, plan: Plan | None) -> None:
    if plan is None:
        echo("no plan for --attention: the head is fitted, measured, and written if it retains enough")
        return
    table = Table(_name("from"), _name("to"), "action", box=None, header_style="bold")
    for step in plan.steps:
        made = f": {step.computed.reason}" if step.computed else ""
        table.add_row(escape(", ".join(s.info.name for s in step.sources)), step.name, escape(step.action + made))
    for name, why in plan.dropped.items():
        table.add_row(escape(name), "", escape(f"dropped: {why}"))
    wide_console().print(table)
    echo(f"captured layers: {plan.source.read.captured.how}")
    echo("dry run: nothing was written")


def _plan_of_head_json(_: Operation, plan: Plan | None) -> Any:
    if plan is None:
        return {"layout": None, "steps": None, "dropped": None, "config": None}
    steps = [{"tensor": s.name, "action": s.action, "from": [x.info.name for x in s.sources]} for s in plan.steps]
    return {"layout": plan.layout.name, "steps": steps, "dropped": plan.dropped, "config": plan.config}


def _show_converted(_: Operation, result: Converted) -> None:
    manifest, out = result.manifest, result.out
    actions = [step.action for step in manifest.tensors]
    counts = ", ".join(f"{actions.count(action)} {action}" for action in dict.fromkeys(actions))
    shown = click.format_filename(out)
    echo(f"{shown}: {manifest.source_layout} -> {manifest.layout}, {len(actions)} tensors ({counts})")
    _show_changes(manifest)
    if manifest.config_copied:
        echo(f"config keys copied unchanged: {', '.join(manifest.config_copied)}")
    echo(f"captured layers: {manifest.captured_by}")
    _show_unverified(manifest)
    owners = "the source" + (" and, where added, to the target" if "added" in actions else "")
    echo("weights: " + (f"byte-identical to {owners}" if manifest.exact else "differ from the source, see above"))
    print_next("validate", out, "--source", manifest.source)


def _show_unverified(manifest: Any) -> None:
    """Print facts about a head that rest on the user's word or on a default, loudly if its files contradict them."""
    from ..drafters.facts import phrase

    console = wide_console()
    for one in manifest.unverified:
        said = escape(f"{one.fact}: {phrase(one.fact, one.value)} ({one.word})")
        console.print(f"[yellow]not verified:[/] {said}", highlight=False, soft_wrap=True)
        if one.against:
            said = escape(f"{one.against}. Measure it: kconv validate OUT --target TARGET --prompts PROMPTS")
            console.print(f"[bold red]WARNING[/] {said}", highlight=False, soft_wrap=True)


def _show_quantized_head(request: Operation, result: Converted) -> None:
    _show_converted(request, result)
    files = [file for file in result.manifest.files if file.name in result.manifest.weight_files]
    echo(f"bytes: {sum(file.size for file in files):,}")
    _show_kept(result)


def _show_conversion(request: Operation, result: Converted) -> None:
    _show_converted(request, result)
    _show_kept(result)


def _show_kept(result: Converted) -> None:
    """Print how much of the acceptance length an approximation retains."""
    if (figures := result.retention) is None:
        return
    echo(
        f"approximate: retains {figures.kept:.2%} ± {figures.kept_error:.2%} of the acceptance length "
        f"({figures.before:.3f} to {figures.after:.3f}, K={figures.steps}, sampled, bonus included) on "
        f"{figures.sequences} held-out sequences of up to {figures.context} tokens"
    )


def _show_changes(manifest: Any) -> None:
    for step in manifest.tensors:
        if step.reason:
            echo(f"{step.output.name} {step.action}: {step.reason}")
    for record in manifest.dropped:
        echo(f"{record.name} dropped: {record.reason}")


def _show_verified(_: Operation, result: Verified) -> None:
    sides = "source and output" if result.with_source else "output"
    shown, manifest = click.format_filename(result.out), result.manifest
    echo(f"{shown}: {len(manifest.tensors)} tensors and {len(manifest.files)} files match the manifest ({sides})")


def _show_vocab(_: Operation, result: VocabChanged | VocabExamined) -> None:
    from ..operations.vocab import VocabExamined

    if isinstance(result, VocabExamined):
        echo("\n".join(_vocab_lines(result.report)))
        return
    shown = click.format_filename(result.out)
    echo(f"{shown}: {result.draft_vocab} of {result.vocab} tokens, {len(result.manifest.tensors)} tensors")
    _show_changes(result.manifest)
    exact = result.manifest.exact
    echo("weights: " + ("byte-identical to the source" if exact else "lm_head differs from the source"))
    print_next("vocab", result.out)


def _vocab_lines(report: Any) -> list[str]:
    coverage, copies = report.coverage, report.copies
    own = "shared with the target" if report.lm_head_rows is None else f"{report.lm_head_rows} rows"
    facts = {
        "map": report.kind + (f", {report.order}" if report.order else ""),
        "tokens": f"{report.draft_vocab} of {report.vocab}",
        "ids": f"{report.duplicates} duplicates, {report.outside} out of range",
        "t2d": report.t2d,
        "lm_head": own,
        "special tokens": f"{len(report.kept)} kept, {len(report.lost)} lost",
    }
    if copies is not None:
        facts["target's rows"] = f"{copies.by_offset} of {copies.rows} rows equal the target's" + (
            f"; {copies.by_id} if d2t holds absolute ids" if copies.by_id != copies.by_offset else ""
        )
    if coverage is not None:
        facts["coverage"] = (
            f"{coverage.share:.2%} of {coverage.tokens} tokens, "
            f"{coverage.distinct_covered} of {coverage.distinct} distinct ones"
        )
    lines = [f"{name:<15} {fact}" for name, fact in facts.items()]
    for fault in report.faults:
        lines += [f"error {fault.where}: {fault.what}", f"  fix: {fault.fix}"]
    return lines + [f"warning {warning}" for warning in report.warnings]


def _name(title: str) -> Column:
    """Return a column of names, which a narrow terminal folds but never cuts."""
    return Column(title, overflow="fold")


def _dims(value: Any) -> str:
    return " ".join(f"{name}={v}" for name, v in vars(value).items() if v is not None)


# Reports


def _show_report(_: Operation, report: Report) -> None:
    from ..validate.report import counted

    console, figures = wide_console(), report.figures
    context = click.get_current_context(silent=True)
    verbose = context is not None and context.meta.get(VERBOSE, False)
    for finding in report.findings:
        if finding.severity == "note" and not verbose:
            continue
        said = escape(f"{finding.where}: {finding.message}")
        color = SEVERITIES[finding.severity]
        console.print(f"[bold {color}]{finding.severity} {finding.rule}[/] {said}", highlight=False)
        console.print(f"  fix: {escape(finding.fix)}", highlight=False)
    counts = {severity: sum(f.severity == severity for f in report.findings) for severity in SEVERITIES}
    if counts["note"] and not verbose:
        console.print(f"[dim]{counted(counts['note'], 'note')}; -v shows them[/]", highlight=False)
    if figures.acceptance:
        console.print(acceptance_table(report), "")
    for line in _measured(figures):
        console.print(line, highlight=False)
    if figures.readings and any(f.rule in ("K312", "K313", "K314") for f in report.findings):
        console.print(_readings_table(figures.readings), "")
    if figures.identical is not None:
        console.print("weights: " + ("identical to the source" if figures.identical else "NOT identical to the source"))
    if engines := report.provenance.get("for"):
        console.print(
            f"checked for {', '.join(engines)} ({report.provenance.get('for_by', 'every engine')})", highlight=False
        )
    told = [counted(counts["error"], "error") if counts["error"] else "no errors"]
    told += [counted(counts[what], what) for what in ("undecided", "warning") if counts[what]]
    console.print(escape(f"{report.subject}: {', '.join(told)}"), highlight=False)
    if judged := report.verdicts:
        dot = " · " if console.encoding.startswith("utf") else " | "
        console.print(dot.join(_verdict(one) for one in judged), highlight=False)


def _verdict(one: Verdict) -> str:
    """Return an engine's verdict, e.g. "FAIL SGLang (1)" with the number of its errors."""
    from ..validate.report import counted

    title = escape(one.engine)
    if one.outcome == "pass":
        return f"[bold green]PASS[/] {title}"
    if one.outcome == "undecided":
        return f"[bold yellow]UNDECIDED[/] {title}: needs {escape(' and '.join(one.needs))}"
    counts = {"undecided": one.undecided, "warning": one.warnings}
    why = ", ".join(counted(count, what) for what, count in counts.items() if count)
    return f"[bold red]FAIL[/] {title} ({one.errors or f'strict: {why}'})"


def _readings_table(rows: Any) -> Table:
    """Return the acceptance length of each reading of a head, and its distance from the best."""
    from ..drafters.facts import phrase

    first = rows[0]
    title = (
        f"readings of the head: acceptance length, K={first.steps}, {first.sequences} sequences of {first.text} text"
    )
    table = Table(*first.facts, "length", "behind", "", title=title, box=None)
    for row in sorted(rows, key=lambda row: row.behind_best)[:READINGS]:
        error = f" ± {row.behind_best_se:.3f}" if row.behind_best_se is not None else ""
        behind = f"{row.behind_best:.3f}{error}" if row.behind_best else "best"
        table.add_row(
            *(phrase(name, value) for name, value in row.facts.items()), f"{row.length:.3f}", behind,
            "current reading" if row.taken else "",
        )  # fmt: skip
    return table


def _measured(figures: Any) -> list[str]:
    """Return a line for each measurement."""
    lines = [
        f"{parity.text}: logits differ by {parity.rms_error:.1e} (worst {parity.relative_error:.1e}), "
        f"KL {parity.kl:.1e}, top-1 agreement {parity.top1:.2%}, acceptance {parity.length_difference:+.4f}"
        for parity in figures.parity
    ]
    if by := figures.engine:
        lines.append(
            f"{by.engine}: {by.same_output} of {by.prompts} outputs equal, {by.drafts} drafts, acceptance length "
            f"{by.length:.4f}; kconv's chain gives {by.expected_drafts} drafts and {by.expected_length:.4f}"
        )
    noise = figures.noise
    if noise is not None and noise.median is not None:
        lines.append(
            f"{noise.tensors:,} tensors in NVFP4: median signal-to-noise ratio {noise.median:.1f} dB, "
            f"worst {noise.worst:.1f} dB ({noise.worst_tensor})"
        )
    if (text := figures.perplexity) is not None:
        lines.append(
            f"perplexity {text.output:.4f}, source {text.source:.4f} ({math.expm1(text.log_ratio):+.2%}); top-1 "
            f"agreement {text.top1:.2%} of {text.tokens:,} tokens"
        )
    return [escape(line) for line in lines]


def show_rule(rule: Rule) -> None:
    """Print a rule."""
    echo(f"{rule.id} {rule.name} ({rule.severity})")
    echo(f"  {rule.sentence}")
    facts = {
        "fix": rule.fix,
        "engines": ", ".join(rule.engines) or "all",
        "releases": rule.versions,
        "seen in": rule.seen_in,
    }
    for name, fact in facts.items():
        if fact:
            echo(f"  {name}: {fact}")


def show_rules(rules: Mapping[str, Rule]) -> None:
    """Print every rule on one line."""
    table = Table("rule", "name", "severity", "engines", "what goes wrong", box=None, header_style="bold")
    for rule in rules.values():
        table.add_row(rule.id, rule.name, rule.severity, ", ".join(rule.engines) or "all", escape(rule.sentence))
    wide_console().print(table)


def acceptance_table(report: Report, title: str = "") -> Table:
    """Return acceptance lengths by drafter and text, with standard errors if available."""
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


def _length(row: Any) -> str:
    error = f" ± {row.standard_error:.3f}" if row.standard_error is not None else ""
    return f"{row.length:.3f}{error}"


def _show_acceptance(_: Operation, acceptance: AcceptanceFile) -> None:
    """Print a line for each K and category, a column for each kind of mean."""
    rows, console = acceptance.rows, make_console()
    ways = list(dict.fromkeys(row.averaging or "" for row in rows))
    lengths = list(dict.fromkeys(row.draft_tokens for row in rows))
    of_k = f", K={lengths[0]}" if len(lengths) == 1 else ""
    by = f", by {rows[0].engine}" if rows[0].engine else ""
    console.print(f"acceptance length{of_k}, bonus token included{by}; mean over", highlight=False)
    table = Table(*([] if of_k else ["K"]), "", "N", *(WAYS.get(way, way) for way in ways), box=None,
                  header_style="bold")  # fmt: skip
    for k, category in dict.fromkeys((row.draft_tokens, row.category) for row in rows):
        own = {row.averaging or "": row for row in rows if (row.draft_tokens, row.category) == (k, category)}
        some = next(iter(own.values()))
        figures = [_figure(own[way]) if way in own else "" for way in ways]
        first = [] if of_k else [str(k or "not stated")]
        table.add_row(*first, escape(category or "all"), str(some.prompts or ""), *figures)
    console.print(table)
    for row in rows:
        if row.category == rows[-1].category and row.sanity:
            said = f"answers: {row.sanity.mean_tokens:.0f} tokens, {row.sanity.distinct_4grams:.0%} distinct 4-grams"
            console.print(said + (f"; speed-up {row.speed.speedup:.2f}" if row.speed else ""), highlight=False)
            break
    if acceptance.speeds:
        _show_speeds(acceptance)


def _show_speeds(acceptance: AcceptanceFile) -> None:
    """Print a line for each concurrency; a speed-up applies to one concurrency."""
    table = Table("K", "side by side", "tokens/s", "first token, ms", "further token, ms", "tokens/s without draft",
                  "speed-up", box=None, header_style="bold")  # fmt: skip
    for speed in acceptance.speeds:
        figures = ((speed.tokens_per_second, 1, 1), (speed.ttft, 1000, 1), (speed.tpot, 1000, 2),
                   (speed.baseline_tokens_per_second, 1, 1), (speed.speedup, 1, 2))  # fmt: skip
        cells = (_spread(figure, factor, decimals) if figure else "" for figure, factor, decimals in figures)
        table.add_row(str(speed.draft_tokens), str(speed.concurrency), *cells)
    make_console().print(table)


def _spread(figure: SpeedFigure, factor: float, decimals: int) -> str:
    ends = (figure.interval.low, figure.interval.high) if figure.interval else ()
    said = ", ".join(f"{factor * end:.{decimals}f}" for end in ends)
    return f"{factor * figure.value:.{decimals}f}" + (f" \\[{said}]" if said else "")


def _show_curve(_: Operation, result: Written) -> None:
    echo(result.text, nl=False)


def _figure(row: AcceptanceRow) -> str:
    interval = f" [{row.interval.low:.2f}, {row.interval.high:.2f}]" if row.interval else ""
    return row.shown + interval.replace("[", "\\[")


def _show_comparison(_: Operation, result: Compared) -> None:
    """Print tables of comparable figures, then the others with the reason."""
    comparison: Comparison = result.comparison
    console = make_console()
    for shared in comparison.tables:
        console.print(shared.method, highlight=False)
        table = Table("", *comparison.heads, box=None, header_style="bold")
        for about, rows in shared.lines:
            table.add_row(about, *(_figure(row) if row else "" for row in rows))
        console.print(table, "")
    if comparison.apart:
        table = Table("head", "figure of", "", "not comparable because", box=None, header_style="bold")
        for apart in comparison.apart:
            table.add_row(apart.head, apart.about, apart.figure, apart.reason)
        console.print(table)
    if not comparison.tables:
        console.print("nothing is comparable")


# Making


def _show_states(_: Operation, result: StatesWritten) -> None:
    record = result.record
    counts = ", ".join(f"{count} {kind}" for kind, count in record.sequences.items())
    size = record.size / 1e6
    echo(f"{result.out}: {record.count} sequences ({counts}), {record.tokens:,} tokens, {size:,.1f} MB {record.dtype}")
    echo(f"captured: outputs of layers {list(record.captured)} of {record.target.source}")


def _show_generated(_: Operation, result: Generated) -> None:
    counts = ", ".join(f"{count} {what}" for what, count in result.counts.items())
    echo(f"{result.out}: {counts} of {result.prompts} prompts")


def _show_trained(_: Operation, result: Trained) -> None:
    training = result.training
    if result.coverage is not None:
        echo(result.coverage_line)
    if not training:
        return
    before, after, steps = training["untrained"], training["trained"], training["recipe"]["ttt_steps"]
    table = Table("held out", "untrained", "trained", box=None, header_style="bold")
    for key, name in (("loss", "loss, nats"), ("acceptance", f"acceptance length, sampled, K={steps}")):
        table.add_row(name, f"{before[key]:.3f}", f"{after[key]:.3f}")
    make_console().print(table)
    echo()
    print_next(
        *(("validate", result.out) if result.layout == "vllm" else ("to-vllm", result.out, f"{result.out}-vllm"))
    )


def _plan_of_training(request: Operation, plan: TrainPlan) -> None:
    """Print the estimate of a training run."""
    facts = {
        "parameters": f"{plan.parameters:,}",
        "steps": f"{plan.steps:,} of {plan.tokens // plan.steps:,} tokens on {plan.processes} processes",
        "states": f"{plan.states / 1e9:,.3f} GB of the text's",
        "checkpoints": f"{plan.checkpoints / 1e9:,.3f} GB",
        "output": f"{plan.output / 1e9:,.3f} GB",
    }
    if plan.memory:
        facts["memory"] = f"{sum(plan.memory.values()) / 1e9:,.3f} GB of each process" + "".join(
            f"\n- {what}: {size / 1e9:,.3f} GB" for what, size in plan.memory.items()
        )
    else:
        facts["memory"] = "not estimated: with kernel eager it grows with the square of a row's tokens"
    if plan.nodes:
        facts["files"] = f"{', '.join(str(len(files)) for files in plan.nodes)} on each node; --json lists them"
    facts["time"] = "unknown: pass --rate" if plan.hours is None else f"about {duration(plan.hours * 3600)}"
    table = Table(box=None, show_header=False)
    for name, fact in facts.items():
        table.add_row(name, escape(fact))
    make_console().print(table)
    echo("nothing was trained; remove --dry-run to train")


def _show_calibrated(_: Operation, result: Calibrated) -> None:
    found = result.calibration
    echo(
        f"{result.out}: {len(found.input_amax):,} modules, {found.prompts.tokens:,} tokens of "
        f"{found.prompts.count} prompts"
    )


def _show_quantized(_: Operation, result: Quantized) -> None:
    if not result.written:
        return
    plan = result.plan
    echo(
        f"{result.out}: {len(plan.modules):,} modules in NVFP4 ({plan.recipe.name}), "
        f"{plan.bytes_in / 1e9:.3f} GB -> {plan.bytes_out / 1e9:.3f} GB in {_weight_files(result)} files"
    )
    echo(f"input_scale: {_scales(plan)}; KV cache: {plan.recipe.kv_cache}")
    print_next("validate", result.out, "--source", plan.source.source)


def _plan_of_target(_: Operation, planned: Quantized) -> None:
    """Print what a quantization would do: tensors by part, sizes, disk and time."""
    from ..checkpoint.staging import free_bytes
    from ..quantize.output import bytes_needed, copied_files
    from ..quantize.stream import estimate

    plan, out, processes = planned.plan, Path(planned.out), planned.processes
    needed, free = bytes_needed(plan), free_bytes(out)
    table = Table("part", "becomes", "modules", "before", "after", box=None, header_style="bold")
    for (part, action), (count, before, after) in _parts(plan).items():
        table.add_row(part, action, f"{count:,}", f"{before / 1e9:.3f} GB", f"{after / 1e9:.3f} GB")
    table.add_row("all", "", "", f"{plan.bytes_in / 1e9:.3f} GB", f"{plan.bytes_out / 1e9:.3f} GB")
    console = make_console()
    console.print(table)
    console.print(f"input_scale: {_scales(plan)}; KV cache: {plan.recipe.kv_cache}", highlight=False)
    weights = "ModelOpt's" if processes is None else len(plan.units)
    console.print(f"files: {weights}, and {len(copied_files(plan.source.folder))} copied", highlight=False)
    enough = "" if free >= needed else " [red]NOT enough[/]"
    console.print(f"disk: {needed / 1e9:.3f} GB needed, {free / 1e9:.1f} GB free{enough}", highlight=False)
    if not plan.source.headers_only and processes is not None:
        taken = estimate(plan, processes)
        console.print(
            f"time: about {duration(taken.seconds)} on {processes} processes, estimated from a packed sample "
            f"({taken.rate / 1e6:.0f} MB/s each); a slow disk takes longer",
            highlight=False,
        )


def _plan_of_target_json(_: Operation, planned: Quantized) -> dict[str, Any]:
    from ..checkpoint.staging import free_bytes
    from ..quantize.output import bytes_needed
    from ..quantize.stream import estimate

    plan, processes = planned.plan, planned.processes
    taken = None if plan.source.headers_only or processes is None else estimate(plan, processes)
    return _quantized_facts(plan, None if processes is None else len(plan.units)) | {
        "becomes": [
            {"part": part, "action": action, "tensors": count, "bytes_in": before, "bytes_out": after}
            for (part, action), (count, before, after) in _parts(plan).items()
        ],
        "disk": {"needed": bytes_needed(plan), "free": free_bytes(Path(planned.out))},
        "estimate": {"processes": processes, "bytes_per_second": taken.rate, "seconds": taken.seconds}
        if taken
        else None,
    }


def _weight_files(result: Quantized) -> int:
    return len(list(Path(result.out).glob("*.safetensors")))


def _quantized_facts(plan: QuantizePlan, files: int | None) -> dict[str, Any]:
    return {
        "source": plan.source.source,
        "form": plan.form,
        "recipe": plan.recipe.model_dump(mode="json"),
        "input_scale": _scales(plan),
        "modules": len(plan.modules),
        "files": files,
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.bytes_out,
    }


def _scales(plan: QuantizePlan) -> str:
    return "none, activations are not quantized" if plan.recipe.weight_only else plan.inputs.description


# Parts of a model, by parts of their tensors' names.
PARTS = {
    ".mlp.experts.": "routed experts",
    ".mlp.shared_experts.": "shared experts",
    ".mlp.gate.": "routers",
    ".mlp.": "dense MLP",
    ".self_attn.": "attention",
    "norm": "norms",
    "embed_tokens": "embedding",
    "lm_head": "lm_head",
    "vision_tower": "vision",
    "mm_projector": "vision",
}


def _parts(plan: QuantizePlan) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Return, by part of the model and action: its tensors, bytes before, bytes after."""
    from ..checkpoint.header import byte_size

    found: dict[tuple[str, str], list[int]] = {}

    def add(name: str, action: str, before: int, after: int) -> None:
        part = next((part for mark, part in PARTS.items() if mark in name), "other")
        row = found.setdefault((part, action), [0, 0, 0])
        for place, count in enumerate((1, before, after)):
            row[place] += count

    for unit in plan.units:
        for module in unit.modules:
            size = sum(byte_size(*kind) for kind in module.outputs.values())
            add(module.name, f"NVFP4 from {module.weight.form}", sum(i.size for i in module.weight.infos), size)
        for weight in unit.dequantized:
            before, after = sum(i.size for i in weight.infos), byte_size(weight.dtype, weight.shape)
            add(weight.name, f"{weight.dtype} from {weight.form}", before, after)
        for info in unit.carried:
            add(info.name, "unchanged", info.size, info.size)
    return {key: (row[0], row[1], row[2]) for key, row in sorted(found.items())}


# Releasing


def _show_environment(_: Operation, found: Environment) -> None:
    grid = Table.grid(Column(), Column(), padding=(0, 2))
    machine = found.machine
    facts = {"kconv": found.kconv, "python": found.python}
    facts |= {name: number or "not installed" for name, number in found.libraries.items()}
    facts |= {"engines": ", ".join(f"{name} {number}" for name, number in found.engines.items()) or "none found"}
    facts |= {"processor": f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB of memory"}
    facts |= {"GPUs": "; ".join(machine["gpus"]) or "none that torch sees"}
    facts |= {"C compiler": "yes" if found.compiler else "no", "variables set": ", ".join(found.variables) or "none"}
    for name, fact in facts.items():
        grid.add_row(f"[bold]{name}", escape(fact))
    wide_console().print(grid, highlight=False)


def _show_card(_: Operation, result: CardWritten) -> None:
    if result.missing is not None:
        for name, asked in result.missing.items():
            echo(f"{name}: {asked}" if asked else name)
        if result.missing:
            echo(f"{len(result.missing)} facts are missing; kconv card --init writes a file for them", err=True)
        return
    if result.file is not None:
        echo(result.file)
    if result.started:
        return
    if result.unsaid:
        echo(f"{result.unsaid} facts are missing; kconv card --missing lists them", err=True)
    err = not result.checked
    for finding in result.findings:
        echo(f"{finding.severity} {finding.rule} {finding.where}: {finding.message}\n  fix: {finding.fix}", err=err)
    count = len(result.findings)
    found = f"{count} finding{'s' * (count != 1)} about licenses and origins" if count else "license checks passed"
    echo(f"{result.folder}: {found}", err=err)


def _show_published(_: Operation, result: PublishResult) -> None:
    release, made = result.release, result.made
    for finding, allowance in release.passed:
        echo(f"allowed {finding.rule} {finding.where}: {finding.message} ({allowance.why})")
    sizes = {file.name: file.size for file in release.files}
    table = Table("file", "bytes", "sha256", "", box=None, header_style="bold")
    for name, size in sizes.items():
        table.add_row(escape(name), f"{size:,}", made.files[name][:16], "new" if name in made.uploaded else "unchanged")
    for name in made.deleted:
        table.add_row(escape(name), "", "", "deleted")
    wide_console().print(table)
    at = f"{made.repo}@{made.tag or made.commit or made.revision}"
    if result.dry_run:
        echo(f"{at}: every check passed; dry run, nothing was changed")
    elif made.done:
        echo(f"{at}: {', '.join(made.done)}")
    else:
        echo(f"{at}: nothing to do, the same files are already there")
    echo(f"commit {made.commit or 'not made yet'}, {'private' if made.private else 'public'}")


def _show_made(_: Operation, result: Any) -> None:
    echo(result.out)


def megabytes(count: int) -> str:
    """Return a number of bytes in readable form."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


SHOWN: Mapping[str, Callable[[Any, Any], None]] = {
    "Inspect": _show_head,
    "Env": _show_environment,
    "Vocab": _show_vocab,
    "Convert": _show_conversion,
    "Verify": _show_verified,
    "Validate": _show_report,
    "Bench": _show_acceptance,
    "Compare": _show_comparison,
    "Curve": _show_curve,
    "Quote": _show_acceptance,
    "States": _show_states,
    "Generate": _show_generated,
    "Train": _show_trained,
    "Calibrate": _show_calibrated,
    "Quantize": _show_quantized,
    "QuantizeHead": _show_quantized_head,
    "Card": _show_card,
    "Publish": _show_published,
    "Tiny": _show_made,
}
PLANNED: Mapping[str, tuple[Callable[[Any, Any], None], Callable[[Any, Any], Any]]] = {
    "Convert": (_plan_of_head, _plan_of_head_json),
    "Quantize": (_plan_of_target, _plan_of_target_json),
    "Publish": (_show_published, lambda _, plan: plan.to_json()),
    "Train": (_plan_of_training, lambda _, plan: plan.to_json()),
}
