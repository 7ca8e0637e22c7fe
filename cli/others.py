"""`kconv demo`, `kconv run` and `kconv completion`, which are not single operations."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from ..errors import MissingExtra
from ..lines import Styled, Table, Words, megabytes, next_command
from .group import Folder
from .terminal import echo, make_console

if TYPE_CHECKING:
    from ..pipeline.demo import Made
    from ..pipeline.preview import Preview
    from ..pipeline.run import Outcome

FOLDER = Folder()
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command(short_help="Train a tiny Kimi-K2 and two heads, convert them, and compare both sides.")
@click.argument("out", type=FOLDER, default="demo")
@click.option("--real", is_flag=True, help="Use a real model, SmolLM2-135M-Instruct; only in a clone of kconv.")
@as_json_option
def demo(out: Path, real: bool, as_json: bool) -> None:
    """Make a tiny Kimi-K2 and two Eagle3 heads in the new folder OUT, convert them, and compare both sides.

    The target is trained on Python's documentation, the heads with ModelOpt. This takes a few minutes on two cores,
    once: the results are kept in $KCONV_CACHE or ~/.cache/kconv. Then kconv converts the heads from ModelOpt's layout
    to vLLM's and TensorRT-LLM's, and compares ModelOpt's own module with its own forward over the converted files.

    --real runs scripts/real --quick: it fetches a real model, lets it answer prompts, trains a head on the answers,
    measures it (in vLLM and SGLang, if scripts/engine-env made them) and quantizes the model. This takes about seven
    minutes on two cores. The same command resumes a stopped run.

    \b
    Examples:
      kconv demo my-demo
      kconv demo my-real-demo --real
    """
    if real:
        run_real(out, as_json=as_json)
        return
    from ..checkpoint.staging import refuse_existing
    from ..operations.base import extras

    refuse_existing(out)
    from .progress import Terminal

    with extras():
        with Terminal().waiting("demo: loading"):
            from transformers.utils import logging

            from ..pipeline.demo import run_demo
            from ..tiny.recipe import cache_root

        logging.disable_progress_bar()  # it would mix with the demo's own bars
        with _bars() as stage:
            made = run_demo(out, cache_root(), stage)
    _show_demo(out, made, as_json=as_json)


# In a clone it is next to the package; an installed package has none.
REAL = Path(__file__).parent.parent / "scripts" / "real"


def run_real(out: Path, *, as_json: bool) -> None:
    """Run the quick form of scripts/real, and exit like it.

    Raises:
        click.UsageError: JSON is requested.
        MissingExtra: this is not a clone.
    """
    if as_json:
        raise click.UsageError("--json does not apply to --real, which prints each command's own output")
    if not REAL.exists():
        raise MissingExtra(
            "the real demo is a script of kconv's repository, which an installed kconv does not have",
            where=REAL,
            fix="Run it in a clone: scripts/setup, then .venv/bin/kconv demo OUT --real.",
        )
    raise SystemExit(subprocess.run([sys.executable, REAL, "--quick", "--work", out]).returncode)


@contextmanager
def _bars() -> Iterator[Callable]:
    """Show one bar for each stage on stderr."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<36}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=make_console(stderr=True)) as bars:

        @contextmanager
        def stage(title: str) -> Iterator[Callable[[int, int, float], None]]:
            if not bars.console.is_terminal:
                # In a log, a bar appears only when all is over.
                echo(title, err=True)
            task = bars.add_task(title, total=None, note="")

            def advance(done: int, steps: int, loss: float) -> None:
                bars.update(task, completed=done, total=steps, note=f"loss {loss:.2f}")

            yield advance
            total = bars.tasks[task].total or 1
            bars.update(task, total=total, completed=total)

        yield stage


def _show_demo(out: Path, made: Sequence[Made], *, as_json: bool) -> None:
    from .show import print_json, show_lines

    if as_json:
        heads = [
            {"name": head.name, "folder": str(head.folder), "report": head.report.model_dump(mode="json"),
             "rounded": head.rounded}
            for head in made
        ]  # fmt: skip
        print_json({"out": str(out), "heads": heads})
        return
    rows: list[tuple[Words, ...]] = [("target", _size(out / "target"), "", "", "")]
    for head in made:
        parity = head.report.figures.parity
        apart = max(p.rms_error for p in parity)
        agreed = min(p.top1 for p in parity)
        rows.append(
            (
                f"{head.name}/vllm",
                _size(out / head.name / "vllm"),
                f"logits {apart:.0e}, top-1 {agreed:.1%}",
                "identical" if head.report.figures.identical else (Styled("NOT identical", "red"),),
                "in bfloat16" if head.rounded else (Styled("NOT in bfloat16", "red"),),
            )
        )
    lengths = [part for head in made for part in (head.report.acceptance_table(f"{head.name} head"), "")]
    columns = (f"in {out}", "size", "parity with ModelOpt's module", "weights", "trtllm's weights")
    shown = next_command("inspect", out / made[0].name / "vllm")
    show_lines([*lengths, Table(columns, rows), "", shown], folds=True)


def _size(folder: Path) -> str:
    return f"{sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()) / 1e6:.1f} MB"


@click.command(short_help="Run a recipe, from training to the Hub; resumes where it stopped.")
@click.argument("recipe", metavar="RELEASE.yaml", type=FOLDER)
@click.option("--out", type=FOLDER, help="The release's folder; by default the recipe's name.")
@click.option("--start-at", "first", default="", metavar="STEP", help="Start at this step; earlier outputs stay.")
@click.option("--only", default="", metavar="STEP", help="Run only this step.")
@click.option("--without", multiple=True, metavar="STEP|KIND", help="Skip a step, or all steps of a kind; repeatable.")
@click.option("--dry-run", is_flag=True, help="Print the steps that would run, sizes, disk and license findings.")
@as_json_option
def run(
    recipe: Path, out: Path | None, first: str, only: str, without: tuple[str, ...], dry_run: bool, as_json: bool
) -> None:
    """Run the steps of RELEASE.yaml: train, quantize, convert, validate, bench, card, publish, or any other operation.

    A step is skipped if its inputs and options have not changed. A failed step stops the run, and the next run resumes
    there. The recipe's paths start at its folder. The release's folder holds the recipe, run.json (the current state)
    and run.jsonl (the history).

    \b
    Example:
      kconv run examples/tiny-release.yaml --without publish
      kconv run release.yaml --dry-run
    """
    from .progress import Terminal

    with Terminal().waiting("run: looking at each step"):
        from ..pipeline.prepare import Selection, prepare
        from ..pipeline.preview import check_disk, preview_release
        from ..pipeline.recipe import read_release
        from ..pipeline.run import run_release

        release, text = read_release(recipe)
        root = out or Path(release.name)
        prepared = prepare(release, text, root, Selection(first, only, without), recipe)
        planned = preview_release(prepared)
    if dry_run:
        _show_preview(planned, root, as_json=as_json)
        return
    check_disk(planned, root)
    outcomes: list[Outcome] = []
    try:
        with Terminal().status("running") as say:
            run_release(prepared, say, outcomes.append)
    finally:
        _show_outcomes(outcomes, root, as_json=as_json)


def _show_preview(preview: Preview, root: Path, *, as_json: bool) -> None:
    from .show import print_json, show_lines

    if as_json:
        findings = [finding.model_dump(mode="json") for finding in preview.findings]
        print_json(asdict(preview) | {"out": str(root), "heavy": preview.heavy, "findings": findings})
        return
    rows = []
    for step in preview.steps:
        runs = {True: "runs", False: "up to date", None: "may run"}[step.runs]
        size = "not known yet" if step.size is None else megabytes(step.size) if step.size else ""
        rows.append((step.name, step.do, runs, size, step.why))
    least = "" if preview.whole else "at least "
    disk = f"{megabytes(preview.needed)} needed, {megabytes(preview.free)} free in {root.absolute().parent}"
    found = [f"{one.severity} {one.rule} {one.where}: {one.message}" for one in preview.findings]
    table = Table(("step", "kind", "", "size", "why"), rows)
    show_lines([table, f"disk: {least}{disk}", *found, "dry run: nothing was done"])


def _show_outcomes(outcomes: Sequence[Outcome], root: Path, *, as_json: bool) -> None:
    from .show import print_json, show_lines

    if as_json:
        print_json({"out": str(root), "steps": [asdict(outcome) for outcome in outcomes]})
        return
    rows = []
    for one in outcomes:
        seconds = f"{one.seconds:.1f}" if one.status == "made" else ""
        rows.append((one.name, one.do, one.status, seconds, megabytes(one.size) if one.size else "", one.why))
    counts = [f"{sum(o.status == s for o in outcomes)} {s}" for s in dict.fromkeys(o.status for o in outcomes)]
    table = Table(("step", "kind", "", "seconds", "size", "why"), rows)
    show_lines([table, f"{root}: {', '.join(counts)}"] if outcomes else [table])


@click.command(short_help="Print a script for shell completion.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@as_json_option
@click.pass_context
def completion(ctx: click.Context, shell: str, as_json: bool) -> None:
    """Print a script for SHELL that completes kconv's commands, options and paths.

    \b
    Example:
      kconv completion bash >> ~/.bashrc
      kconv completion zsh >> ~/.zshrc
      kconv completion fish > ~/.config/fish/completions/kconv.fish
    """
    from .show import print_json

    made = get_completion_class(shell)
    if made is None:
        raise click.UsageError(f"click has no completion for {shell}")
    script = made(ctx.find_root().command, {}, "kconv", "_KCONV_COMPLETE").source()
    if as_json:
        print_json({"shell": shell, "script": script})
    else:
        echo(script)
