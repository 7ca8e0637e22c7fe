"""`kconv train`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..checkpoint.source import Source
from .options import FOLDER, PATH_OR_ID, check_trusted, open_head

if TYPE_CHECKING:
    from ..train.job import Pace, TrainJob

POSITIVE = click.IntRange(min=1)


class Setting(click.ParamType):
    """A recipe's key and its value, e.g. lr=1e-4; the value is JSON, or else a word."""

    name = "KEY=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        key, found, text = str(value).partition("=")
        if not found or not key:
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        try:
            return key, json.loads(text)
        except ValueError:
            return key, text


@click.command(short_help="Train an Eagle3 head with ModelOpt, or train one on.")
@click.argument("target", type=PATH_OR_ID)
@click.argument("out", type=FOLDER)
@click.option("--recipe", required=True, metavar="NAME|FILE", help="eagle3-mla, eagle3-gqa, or a YAML file.")
@click.option("--set", "settings", type=Setting(), multiple=True, help="A key of the recipe; may be repeated.")
@click.option("--data", metavar="FILE|ID", help="Dialogues or texts: a JSONL file, or a dataset's id on the Hub.")
@click.option("--split", help="Of a dataset; by default train.")
@click.option("--revision", help="Of a dataset.")
@click.option("--held-out", metavar="FILE|ID", help="What is only looked at; by default one sample in fifty of --data.")
@click.option("--states", type=FOLDER, help="States that kconv states wrote, instead of --data: TARGET is not run.")
@click.option("--from", "start", type=PATH_OR_ID, help="A head to train on, in any layout.")
@click.option("--save-every", default=200, show_default=True, type=POSITIVE, metavar="STEPS", help="Checkpoints.")
@click.option("--look-every", default=200, show_default=True, type=POSITIVE, metavar="STEPS", help="Held-out figures.")
@click.option("--shard", is_flag=True, help="Under torchrun: spread the head over the processes (FSDP2).")
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard's event files.")
@click.option("--trust-remote-code", is_flag=True, help="Run the tokenizer's own Python; TARGET must be pinned.")
def train(target: Source, out: Path, recipe: str, data: str | None, states: Path | None, **options: Any) -> None:
    """Train an Eagle3 head for TARGET into the new folder OUT, with ModelOpt's Eagle3 module and loss.

    With --data the target is run while it trains, whole in each process; with --states it is not, and only its
    embedding, final norm and output matrix are loaded. Under torchrun the processes share each batch, whose rows
    their number has to divide.

    A run that was stopped goes on from its last checkpoint, in .NAME.training beside OUT, when the same command is
    given again, with as many processes; it ends with the same weights. OUT is the head in TensorRT-LLM's layout, ready
    for kconv to-vllm; an MLA head of a reduced vocabulary, which TensorRT-LLM cannot load, is in vLLM's. Its kconv.json
    says what it was trained on and how; its modelopt folder has the head as ModelOpt's module, and the curves.

    \b
    Examples:
      kconv train my-target my-head --recipe eagle3-mla --data dialogues.jsonl --set lr=1e-4
      kconv train my-target my-better-head --recipe eagle3-mla --data more.jsonl --from my-head
      torchrun --nproc-per-node 8 --no-python kconv train my-target my-head --recipe eagle3-mla --states my-states
    """
    if (data is None) == (states is None):
        raise click.UsageError("give either --data or --states")
    of_data = [name for name in ("held_out", "split", "revision") if options[name]]
    if states and of_data:
        raise click.UsageError(f"--{of_data[0].replace('_', '-')} is of --data; stored states have their own prompts")
    check_trusted(options["trust_remote_code"], target)
    from ..checkpoint.manifest import read_manifest
    from ..checkpoint.staging import refuse_existing

    refuse_existing(out)
    from ..train.job import Pace, draft_coverage
    from ..train.run import train as run
    from .output import print_coverage, print_trained, steps_bar

    pace = Pace(options["save_every"], options["look_every"], options["shard"], options["tensorboard"])
    job = _job(target, recipe, data, states, pace, options)
    if int(os.environ.get("RANK", "0")):
        # Another process of the run shows how it goes.
        run(job, out, pace)
        return
    if coverage := draft_coverage(job):
        # Before the hours that a vocabulary which leaves out too much would cost.
        print_coverage(coverage, job.recipe)
    with steps_bar("training") as advance:
        run(job, out, pace, advance)
    manifest = read_manifest(out)
    print_trained(manifest.training or {}, manifest.layout, out)


def _job(
    target: Source, recipe: str, data: str | None, states: Path | None, pace: Pace, options: dict[str, Any]
) -> TrainJob:
    from ..train.job import Data, prepare_job
    from ..train.recipe import check_keys, read_recipe_file

    values = read_recipe_file(recipe) | dict(options["settings"])
    # The head may be downloaded for hours.
    check_keys(values)
    head = open_head(options["start"], target=target) if options["start"] else None
    given = Data(data, options["held_out"], options["split"] or Data.split, options["revision"]) if data else None
    return prepare_job(
        target,
        values,
        data=given,
        states=states,
        init_from=head,
        pace=pace,
        trust_remote_code=options["trust_remote_code"],
    )
