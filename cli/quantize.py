"""`kconv quantize`."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ..checkpoint.source import Source
from .options import FOLDER, PATH_OR_ID
from .prompting import prompting, read_sequences

if TYPE_CHECKING:
    import torch

    from ..checkpoint.folder import Checkpoint
    from ..quantize.calibration import CalibrationPrompts
    from ..quantize.recipe import Recipe
    from ..quantize.run import World
    from ..targets.config import TargetConfig

DATA_FREE = "data-free"
# Where each road has the activations' scales from, and the options that it alone has.
SCALES = {"stream": f"a calibration file, or {DATA_FREE}", "modelopt": "a JSONL file"}
OPTIONS = {
    "stream": ("input_scale", "jobs"),
    "modelopt": ("prompts", "tokens", "chat", "trust_remote_code"),
}


@click.command(short_help="Write a target in NVFP4, shard by shard.")
@click.argument("target", type=PATH_OR_ID)
@click.argument("out", type=FOLDER)
@click.option("--recipe", "recipe_name", required=True, metavar="NAME|FILE", help="What is quantized; see below.")
@click.option(
    "--input-scale",
    metavar="FILE|data-free",
    help="Where the activations' scales come from: a file that kconv calibrate wrote, or 1.0 for all.",
)
@click.option("--kv-cache", type=click.Choice(["fp8", "none"]), help="What engines keep the KV cache in.")
@click.option("--jobs", type=click.IntRange(1), help="Processes; each takes about 1 GiB.  [default: one per core]")
@click.option(
    "--road",
    default="stream",
    show_default=True,
    type=click.Choice(["stream", "modelopt"]),
    help="stream: one tensor at a time, from the disk. modelopt: ModelOpt's own calibration and exporter, with the "
    "whole target in memory; it makes the same bits where the activations' scales are the same.",
)
@click.option("--prompts", type=FOLDER, help="Prompts that --road modelopt calibrates on (JSONL).")
@prompting
@click.option("--dry-run", is_flag=True, help="Print what becomes what, sizes, disk and time; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan, or what was done, as JSON.")
def quantize(
    target: Source,
    out: Path,
    recipe_name: str,
    input_scale: str | None,
    kv_cache: str | None,
    jobs: int | None,
    road: str,
    prompts: Path | None,
    tokens: int,
    chat: bool,
    trust_remote_code: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write TARGET in NVFP4 into the new folder OUT, with kconv.json beside it.

    TARGET is stored in bf16, INT4 (Kimi-K2-Thinking, K2.5, K2.6) or FP8 blocks (Kimi-K2-Instruct, DeepSeek-V3).
    What is not quantized keeps its bytes. On the streaming road one tensor at a time is in memory, ranks of torchrun
    share the work, and a run that was interrupted goes on where it stopped when the same command is given again.
    --road modelopt is one process, with the whole target in memory, and starts anew.

    Recipes: nvfp4-experts (the routed experts), nvfp4-mlp (shared experts and dense layers too), nvfp4 (attention
    too), nvfp4-weight-only (activations stay bf16), or a YAML file.

    \b
    Example:
      kconv quantize moonshotai/Kimi-K2.5 Kimi-K2.5-NVFP4 --recipe nvfp4-experts --input-scale data-free --dry-run
      kconv quantize my-target my-target-nvfp4 --recipe nvfp4-mlp --input-scale calibration.json --jobs 8
      kconv quantize my-small-target out --recipe nvfp4 --road modelopt --prompts calibration.jsonl
      torchrun --nproc-per-node 4 --no-python kconv quantize my-target out --recipe nvfp4 --input-scale data-free
    """
    from ..checkpoint.staging import refuse_existing
    from ..quantize.recipe import load_recipe
    from ..quantize.run import read_world

    recipe = load_recipe(recipe_name, kv_cache=kv_cache)  # pyright: ignore[reportArgumentType]
    _refuse_options_of_the_other_road(road)
    scaled = {"stream": input_scale, "modelopt": prompts}[road]
    option = {"stream": "--input-scale", "modelopt": "--prompts"}[road]
    if recipe.weight_only and scaled:
        raise click.UsageError(f"{option} has no use: {recipe.name} leaves activations as they are")
    if not recipe.weight_only and not scaled:
        raise click.UsageError(f"{option} must be said: {SCALES[road]}")
    world = read_world()
    if world.size > 1 and road == "modelopt":
        raise click.UsageError("--road modelopt is one process; start it without torchrun")
    if not world.rank:
        refuse_existing(out)

    from ..targets.config import parse_target_config

    # Prompts first: a fault of theirs is found before anything large is downloaded.
    sequences, said = (
        read_sequences(target, prompts, tokens=tokens, chat=chat, trust_remote_code=trust_remote_code)
        if prompts
        else ([], None)
    )
    source = target.open_headers() if dry_run else target.open_weights()
    config = parse_target_config(source.config, where=source.folder / "config.json")
    if road == "stream":
        _stream(source, config, recipe, input_scale, out, world, jobs, dry_run=dry_run, as_json=as_json)
        return
    _modelopt(source, config, recipe, sequences, said, out, dry_run=dry_run, as_json=as_json)


def _refuse_options_of_the_other_road(road: str) -> None:
    context = click.get_current_context()
    for other, names in OPTIONS.items():
        for name in names:
            if other != road and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--{name.replace('_', '-')} is of --road {other}")


def _stream(
    source: Checkpoint,
    config: TargetConfig,
    recipe: Recipe,
    input_scale: str | None,
    out: Path,
    world: World,
    jobs: int | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    from ..quantize.calibration import data_free, from_calibration
    from ..quantize.plan import plan_quantize
    from ..quantize.run import quantize as run
    from .quantize_output import meter, print_done, print_quantize_plan

    if input_scale is None or input_scale == DATA_FREE:
        inputs = data_free()
    else:
        inputs = from_calibration(Path(input_scale), source, config)
    plan = plan_quantize(source, config, recipe, inputs)
    processes = jobs or (1 if world.size > 1 else _cores())
    if dry_run:
        print_quantize_plan(plan, out, processes * world.size, as_json=as_json)
        return
    own = sum(unit.bytes_in for unit in (plan.units if world.rank == 0 else world.own(plan.units)))
    with meter("quantizing", own) as shown:
        made = run(plan, out, world=world, jobs=processes, advance=shown.advance, say=shown.say)
    if made and not world.rank:
        print_done(plan, out, as_json=as_json)


def _modelopt(
    source: Checkpoint,
    config: TargetConfig,
    recipe: Recipe,
    sequences: list[torch.Tensor],
    prompts: CalibrationPrompts | None,
    out: Path,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    from ..quantize.modelopt_backend import plan_in_memory, quantize_in_memory
    from .output import status
    from .quantize_output import print_done, print_quantize_plan

    plan = plan_in_memory(source, config, recipe, prompts)
    if dry_run:
        print_quantize_plan(plan, out, None, as_json=as_json)
        return
    # ModelOpt tells of its work on stdout, which is for results.
    with status("quantizing") as say, redirect_stdout(sys.stderr):
        quantize_in_memory(plan, out, [ids.unsqueeze(0) for ids in sequences], say=say)
    print_done(plan, out, as_json=as_json)


def _cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
