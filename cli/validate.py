"""`kconv validate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ..checkpoint.source import Source
from .options import FOLDER, PATH_OR_ID, open_head, reading


@click.command(short_help="Check a head: against its config, its source and its target.")
@click.argument("head", type=PATH_OR_ID)
@click.option("--source", type=PATH_OR_ID, help="What HEAD was converted from: every bit is compared.")
@click.option("--prompts", type=FOLDER, help="Held-out prompts (JSONL); with --target, logits and acceptance.")
@click.option("--steps", default=3, show_default=True, type=click.IntRange(1, 16), help="Drafted tokens per step (K).")
@click.option("--out", type=FOLDER, help="Write report.json into this folder.")
@reading
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def validate(
    head: Source, source: Source | None, prompts: Path | None, steps: int, out: Path | None, as_json: bool, **hints: Any
) -> None:
    """Check HEAD; exit 1 if anything is wrong with it.

    Names, shapes, config and every value always; with --source, that no bit was lost; with --target and
    --prompts, logits, top-1 agreement and acceptance length on the prompts' own text and on the target's
    sampled and greedy continuations.

    \b
    Example:
      kconv validate my-head-vllm --source my-head --target my-target --prompts held-out.jsonl --out report
    """
    target: Source | None = hints["target"]
    if prompts and not target:
        raise click.UsageError("--prompts needs --target")
    from ..validate.run import Parity
    from ..validate.run import validate as run
    from .output import print_report, status

    output = open_head(head, **hints)
    # The layout and the convention that the user named are the output's; the source has its own marks.
    original = open_head(source, target=target) if source else None
    parity = Parity(target.fetch_model(), prompts, steps) if target and prompts else None
    with status("validating") as say:
        report = run(output, source=original, parity=parity, say=say)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(report.to_json())
    print_report(report, as_json=as_json)
    sys.exit(0 if report.clean else 1)
