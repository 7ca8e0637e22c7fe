"""`kconv vocab`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..checkpoint.source import Source
from .options import FOLDER, PATH_OR_ID, check_trusted, reading

if TYPE_CHECKING:
    from ..checkpoint.folder import Checkpoint
    from ..convert.plan import Plan
    from ..convert.vocab_report import VocabReport
    from ..engines.layout import Layout
    from ..targets.tokenizer import Vocabulary

OPERATIONS = ("rebuild_t2d", "absolute", "expand", "prune")


@click.command(short_help="Examine a head's draft vocabulary, or write the head with another.")
@click.argument("head", type=PATH_OR_ID)
@click.argument("out", type=FOLDER, required=False)
@click.option("--text", type=FOLDER, help="Text, or prompts (.jsonl), for the coverage and for --prune.")
@click.option("--rebuild-t2d", is_flag=True, help="Write OUT with a t2d that follows from d2t.")
@click.option("--absolute", is_flag=True, help="d2t holds absolute ids: write OUT with offsets.")
@click.option("--expand", is_flag=True, help="Write OUT with the full vocabulary; the new rows never win.")
@click.option("--prune", type=click.IntRange(min=1), metavar="N", help="Write OUT with the N most frequent tokens.")
@click.option("--trust-remote-code", is_flag=True, help="Run the target's own tokenizer code, as Kimi-K2 needs.")
@reading
@click.option("--json", "as_json", is_flag=True, help="Print the report, or the manifest, as JSON.")
def vocab(
    head: Source, out: Path | None, text: Path | None, trust_remote_code: bool, as_json: bool, **options: Any
) -> None:
    """Examine HEAD's draft vocabulary, exit 1 if anything is wrong with it; or write OUT with another.

    Says whether d2t holds offsets or absolute ids, in which order and with which faults, and whether t2d
    agrees; with --target also which special tokens are lost and whether the rows are the target's (of a hub
    id only its tokenizer and lm_head are downloaded); with --text the share of the text's tokens that the
    head can draft.

    \b
    Example:
      kconv vocab my-head --target my-target --text prompts.jsonl
      kconv vocab my-head --rebuild-t2d my-head-marked
      kconv vocab my-head --absolute my-head-offsets
      kconv vocab my-head --expand my-head-full
      kconv vocab my-head --prune 32000 --text prompts.jsonl --target my-target my-head-32k
    """
    asked = {name: value for name in OPERATIONS if (value := options.pop(name))}
    target, name = options.pop("target"), options.pop("layout")
    _check_usage(asked, out, text, target, trust=trust_remote_code)
    from ..checkpoint.staging import refuse_existing
    from ..engines import by_name
    from .output import print_json, status

    layout = by_name(name) if name else None
    if out is not None:
        refuse_existing(out)
        with status("planning the vocabulary"):
            known = _read_target(target, trust=trust_remote_code)
            plan = _plan(asked, head.open_weights(), layout, known, text, options)
        _write(plan, out, as_json=as_json)
        return
    with status("examining the vocabulary"):
        known = _read_target(target, trust=trust_remote_code)
        report = _examine(head.open_weights(), layout, known, text)
    if as_json:
        print_json(_plain(report))
    else:
        click.echo("\n".join(_lines(report)))
    sys.exit(1 if report.faults else 0)


def _check_usage(
    asked: dict[str, Any], out: Path | None, text: Path | None, target: Source | None, *, trust: bool
) -> None:
    if len(asked) > 1:
        raise click.UsageError("one operation at a time, not " + " and ".join(map(_flag, asked)))
    if asked and out is None:
        raise click.UsageError(f"{_flag(*asked)} needs OUT, the folder to write")
    if out is not None and not asked:
        raise click.UsageError("OUT needs one of " + ", ".join(map(_flag, OPERATIONS)))
    if text and asked and "prune" not in asked:
        raise click.UsageError(f"--text says nothing to {_flag(*asked)}")
    if "prune" in asked and not text:
        raise click.UsageError("--prune needs --text, whose most frequent tokens are kept")
    if text and not target:
        raise click.UsageError("--text needs --target, for its tokenizer")
    check_trusted(trust, target)


def _flag(operation: str) -> str:
    return "--" + operation.replace("_", "-")


def _read_target(target: Source | None, *, trust: bool) -> Vocabulary | None:
    if target is None:
        return None
    # Here, as it imports transformers, which takes seconds.
    from ..targets.tokenizer import read_vocabulary

    return read_vocabulary(target, trust_remote_code=trust)


def _examine(checkpoint: Checkpoint, layout: Layout | None, known: Vocabulary | None, text: Path | None) -> VocabReport:
    from ..convert.vocab_report import examine

    if known is None:
        return examine(checkpoint, layout=layout)
    counts = known.count_tokens(text) if text else None
    return examine(checkpoint, layout=layout, reference=known.lm_head, specials=known.specials, counts=counts)


def _plan(
    asked: dict[str, Any],
    checkpoint: Checkpoint,
    layout: Layout | None,
    known: Vocabulary | None,
    text: Path | None,
    options: dict[str, Any],
) -> Plan:
    from ..checkpoint.bytes import file_digest
    from ..convert.captured import Hints
    from ..convert.expand import expand
    from ..convert.vocab import Text, prune, rebuild_t2d, write_offsets

    hints = Hints(target_layers=known.layers if known else None, **options)
    if "rebuild_t2d" in asked:
        return rebuild_t2d(checkpoint, layout, hints)
    if "absolute" in asked:
        return write_offsets(checkpoint, layout, hints, known.lm_head if known else None)
    if "expand" in asked:
        return expand(checkpoint, layout, hints)
    assert known is not None and text is not None  # held by _check_usage
    chosen_by = Text(known.count_tokens(text), f"{text.name} (sha256 {file_digest(text)})")
    return prune(checkpoint, layout, hints, asked["prune"], chosen_by, known.specials)


def _write(plan: Plan, out: Path, *, as_json: bool) -> None:
    from ..convert.execute import execute
    from .output import print_next, progress

    with progress("writing", sum(step.size for step in plan.steps)) as advance:
        manifest = execute(plan, out, advance)
    if as_json:
        click.echo(manifest.model_dump_json(indent=2, by_alias=True))
        return
    shown = click.format_filename(out)
    click.echo(f"{shown}: {plan.spec.draft_vocab} of {plan.spec.vocab} tokens, {len(manifest.tensors)} tensors")
    for step in manifest.tensors:
        if step.reason:
            click.echo(f"{step.output.name} {step.action}: {step.reason}")
    for record in manifest.dropped:
        click.echo(f"{record.name} dropped: {record.reason}")
    click.echo("weights: " + ("the source's, byte for byte" if manifest.exact else "lm_head is not the source's"))
    print_next("vocab", out)


def _lines(report: VocabReport) -> list[str]:
    coverage, copies = report.coverage, report.copies
    own = "shares the target's" if report.lm_head_rows is None else f"{report.lm_head_rows} rows"
    facts = {
        "map": report.kind + (f", {report.order}" if report.order else ""),
        "tokens": f"{report.draft_vocab} of {report.vocab}",
        "ids": f"{report.duplicates} duplicates, {report.outside} out of range",
        "t2d": report.t2d,
        "lm_head": own,
        "special tokens": f"{len(report.kept)} kept, {len(report.lost)} lost",
    }
    if copies is not None:
        facts["target's rows"] = f"{copies.by_offset} of {copies.rows} rows are the target's" + (
            f"; {copies.by_id} are, if d2t holds absolute ids" if copies.by_id != copies.by_offset else ""
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


def _plain(report: VocabReport) -> dict[str, Any]:
    faults = [{"where": fault.where, "what": fault.what, "fix": fault.fix} for fault in report.faults]
    coverage = asdict(report.coverage) | {"share": report.coverage.share} if report.coverage else None
    copies = asdict(report.copies) if report.copies else None
    return vars(report) | {"copies": copies, "coverage": coverage, "faults": faults}
