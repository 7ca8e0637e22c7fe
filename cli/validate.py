"""`kconv validate`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..checkpoint.source import Source
from .measuring import Measuring, measuring
from .options import FOLDER, PATH_OR_ID, read_options, reading

# As `validate.rules.rule.ASKED`, which --help must not import; a test holds the two together.
FOR = ("vllm", "vllm-v1", "vllm-v2", "sglang", "trtllm", "all")


def _explain(context: click.Context, _: click.Parameter, wanted: str | None) -> None:
    if wanted is None or context.resilient_parsing:
        return
    from ..validate.rules.table import all_rules, find_rule
    from .output import print_rule, print_rules

    print_rules(all_rules()) if wanted == "all" else print_rule(find_rule(wanted))
    context.exit()


@click.command(short_help="Check a head or a target before it is served: files, config, values, engines.")
@click.argument("head", type=PATH_OR_ID)
@click.option("--for", "asked", type=click.Choice(FOR), help="Who will serve it.  [default: its layout's engines]")
@click.option("--source", type=PATH_OR_ID, help="What HEAD was made from: bits are compared, or noise.")
@click.option("--headers-only", is_flag=True, help="Read no weight, and download none: names, shapes, config.")
@click.option("--strict", is_flag=True, help="Exit 1 on a warning too.")
@measuring
@click.option("--out", type=FOLDER, help="Write report.json and report.md into this folder.")
@reading
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--explain",
    metavar="RULE",
    callback=_explain,
    is_eager=True,
    expose_value=False,
    help="Say what a rule is about, e.g. K101, and exit; all lists them.",
)
def validate(
    head: Source,
    asked: str | None,
    source: Source | None,
    headers_only: bool,
    strict: bool,
    measuring: Measuring,
    out: Path | None,
    as_json: bool,
    **hints: Any,
) -> None:
    """Check HEAD; exit 1 if an engine would fail on it or serve wrong numbers.

    Names, shapes, config, what each engine is known to get wrong, and every value; with --source, that no bit was
    lost; with --target and --prompts, logits, top-1 agreement and acceptance length on the prompts' own text and on
    the target's sampled and greedy continuations. A target's folder is checked too, for its quantization: with
    --source, the noise of every tensor, and with --prompts the perplexity of both.

    \b
    Examples:
      kconv validate my-head --for all
      kconv validate org/head --for sglang --headers-only --strict
      kconv validate my-head-vllm --source my-head --target my-target --prompts held-out.jsonl --out report
      kconv validate my-head --source old-head --target my-target --states my-states
      kconv validate my-target-nvfp4 --source my-target --prompts held-out.jsonl --out report
      kconv validate my-head --engine vllm --engine-python env/bin/python --target my-target --prompts held-out.jsonl
      kconv validate my-head --explain K101
    """
    target: Source | None = hints["target"]
    measuring.check(target or source)
    if headers_only and (measuring.wanted or source):
        raise click.UsageError("--headers-only reads no value, and --source and all that measures are about values")
    from ..convert.opening import open_origin
    from ..convert.shared import find_shared
    from ..validate.kinds import is_target
    from ..validate.markdown import write_report
    from ..validate.rules.rule import ASKED
    from ..validate.run import Wish
    from ..validate.run import validate as run
    from .output import print_report, status

    layout, read_hints, target_config = read_options(**hints)
    lent = partial(find_shared, target) if target and not headers_only else None
    wish = Wish(ASKED[asked] if asked else None, layout, read_hints, target_config, headers_only, lent)
    # The layout and the convention that the user named are the output's; the source's are those of its conversion.
    # Its headers tell which it is, so that wrong usage is named before its weights are downloaded.
    of_target = source is not None and is_target(source.open_headers())
    if not of_target:
        measuring.check(target)
    held_out = measuring.held_out(source) if source and of_target else None
    parity = measuring.parity(target)
    quantized_from = source.open_weights() if source and of_target else None
    original = open_origin(source.open_weights(), head, target) if source and not of_target else None
    with status("validating") as say:
        report = run(
            head,
            wish,
            source=original,
            quantized_from=quantized_from,
            parity=parity,
            engined=measuring.engined(target),
            held_out=held_out,
            say=say,
        )
    if out:
        from ..validate.sections import illustrate

        write_report(report, out, more=illustrate(report, out))
    print_report(report, as_json=as_json)
    sys.exit(0 if report.clean and not (strict and report.warned) else 1)
