"""`kconv quantize`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..checkpoint.source import Source
from .options import FOLDER, PATH_OR_ID

DATA_FREE = "data-free"


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
@click.option("--dry-run", is_flag=True, help="Print what becomes what, sizes, disk and time; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan, or what was done, as JSON.")
def quantize(
    target: Source,
    out: Path,
    recipe_name: str,
    input_scale: str | None,
    kv_cache: str | None,
    jobs: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write TARGET in NVFP4 into the new folder OUT, with kconv.json beside it.

    TARGET is stored in bf16, INT4 (Kimi-K2-Thinking, K2.5, K2.6) or FP8 blocks (Kimi-K2-Instruct, DeepSeek-V3).
    One tensor at a time is in memory. What is not quantized keeps its bytes. A run that was interrupted goes on
    where it stopped when the same command is given again. Under torchrun the ranks share the work.

    Recipes: nvfp4-experts (the routed experts), nvfp4-mlp (shared experts and dense layers too), nvfp4 (attention
    too), nvfp4-weight-only (activations stay bf16), or a YAML file.

    \b
    Example:
      kconv quantize moonshotai/Kimi-K2.5 Kimi-K2.5-NVFP4 --recipe nvfp4-experts --input-scale data-free --dry-run
      kconv quantize my-target my-target-nvfp4 --recipe nvfp4-mlp --input-scale calibration.json --jobs 8
      torchrun --nproc-per-node 4 --no-python kconv quantize my-target out --recipe nvfp4 --input-scale data-free
    """
    from ..checkpoint.staging import refuse_existing
    from ..quantize.recipe import load_recipe
    from ..quantize.world import read_world

    recipe = load_recipe(recipe_name)
    if kv_cache:
        recipe = recipe.model_copy(update={"kv_cache": kv_cache})
    if recipe.weight_only and input_scale:
        raise click.UsageError(f"--input-scale has no use: {recipe.name} leaves activations as they are")
    if not recipe.weight_only and not input_scale:
        raise click.UsageError(f"--input-scale must be said: a calibration file, or {DATA_FREE}")
    world = read_world()
    if not world.rank:
        refuse_existing(out)

    from ..quantize.inputs import data_free, from_calibration
    from ..quantize.plan import plan_quantize
    from ..quantize.run import quantize as run
    from ..target.config import parse_target_config
    from .quantize_output import meter, print_done, print_quantize_plan

    source = target.open_headers() if dry_run else target.open_weights()
    config = parse_target_config(source.config, where=source.folder / "config.json")
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


def _cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
