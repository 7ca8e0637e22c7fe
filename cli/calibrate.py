"""`kconv calibrate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from ..checkpoint.source import Source
from .options import FOLDER, PATH_OR_ID
from .prompting import prompting, read_sequences


@click.command(short_help="Find what a target's activations reach, for kconv quantize.")
@click.argument("target", type=PATH_OR_ID)
@click.argument("out", type=FOLDER)
@click.option("--prompts", required=True, type=FOLDER, help="Prompts (JSONL, MT-Bench's form among others).")
@click.option("--dtype", type=click.Choice(["F32", "BF16", "F16"]), help="What to compute in.  [default: the target's]")
@prompting
def calibrate(
    target: Source, out: Path, prompts: Path, dtype: str | None, tokens: int, chat: bool, trust_remote_code: bool
) -> None:
    """Run TARGET over prompts, and write what each linear module's input reaches into the new file OUT (JSON).

    The target is run layer by layer from its disk with only one layer in memory, quantized ones dequantized. A run
    that was interrupted goes on behind its last layer when the same command is given again.

    \b
    Example:
      kconv calibrate my-target calibration.json --prompts calibration.jsonl --chat
      kconv quantize my-target my-target-nvfp4 --recipe nvfp4-mlp --input-scale calibration.json
    """
    from ..checkpoint.staging import refuse_existing, writing

    refuse_existing(out)
    sequences, said = read_sequences(target, prompts, tokens=tokens, chat=chat, trust_remote_code=trust_remote_code)

    from ..checkpoint.folder import open_checkpoint
    from ..checkpoint.tensors import TORCH
    from ..quantize.calibrate import calibrate as run
    from ..quantize.calibrate import find, keep, partial_of
    from ..quantize.calibration import write_calibration
    from ..targets.config import read_target_config
    from .output import status

    folder = target.fetch_model()
    config = read_target_config(folder)
    checkpoint, chosen = open_checkpoint(folder, source=target.name), TORCH[dtype or config.dtype or "BF16"]
    place = partial_of(out, checkpoint, sequences, chosen)
    before = find(place, config.layers)
    if before:
        click.echo(f"{before.layers} of {config.layers} layers are done already", err=True)
    with writing(out), status("calibrating") as say:
        out.parent.mkdir(parents=True, exist_ok=True)
        found = run(
            checkpoint,
            config,
            sequences,
            said,
            dtype=chosen,
            resume=before,
            keep=partial(keep, place),
            advance=lambda done, total: say(f"{done} of {total} layers"),
        )
        temporary = out.with_name(f".{out.name}.partial")
        write_calibration(temporary, found)
        temporary.replace(out)
        place.unlink()
    click.echo(
        f"{out}: {len(found.input_amax):,} modules, {found.prompts.tokens:,} tokens of {found.prompts.count} prompts"
    )
