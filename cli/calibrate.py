"""`kconv calibrate`."""

from __future__ import annotations

from pathlib import Path

import click

from ..checkpoint.source import Source
from .options import FOLDER, PATH_OR_ID

POSITIVE = click.IntRange(min=1)


@click.command(short_help="Find what a target's activations reach, for kconv quantize.")
@click.argument("target", type=PATH_OR_ID)
@click.argument("out", type=FOLDER)
@click.option("--prompts", required=True, type=FOLDER, help="Prompts (JSONL, MT-Bench's form among others).")
@click.option(
    "--tokens", default=512, show_default=True, type=POSITIVE, metavar="N", help="Cut each prompt to N tokens."
)
@click.option("--chat", is_flag=True, help="Put prompts through the target's chat template.")
@click.option("--dtype", type=click.Choice(["F32", "BF16", "F16"]), help="What to compute in.  [default: the target's]")
@click.option("--trust-remote-code", is_flag=True, help="Run the tokenizer's own Python; TARGET must be pinned.")
def calibrate(
    target: Source, out: Path, prompts: Path, tokens: int, chat: bool, dtype: str | None, trust_remote_code: bool
) -> None:
    """Run TARGET over prompts, and write what each linear module's input reaches into the new file OUT (JSON).

    The target is run layer by layer from its disk with only one layer in memory, quantized ones dequantized.

    \b
    Example:
      kconv calibrate my-target calibration.json --prompts calibration.jsonl --chat
      kconv quantize my-target my-target-nvfp4 --recipe nvfp4-mlp --input-scale calibration.json
    """
    if trust_remote_code and not target.pinned:
        raise click.UsageError(f"--trust-remote-code runs code of one commit only; name it: {target.name}")
    from ..checkpoint.staging import refuse_existing, writing

    refuse_existing(out)
    import torch

    from ..checkpoint.bytes import file_digest
    from ..checkpoint.folder import open_checkpoint
    from ..checkpoint.tensors import TORCH
    from ..quantize.calibrate import calibrate as run
    from ..quantize.calibration import Prompts, write_calibration
    from ..target.config import read_target_config
    from ..target.prompts import read_prompts
    from ..target.tokenizer import load_tokenizer
    from .output import status

    given = read_prompts(prompts)
    folder = target.fetch_model()
    config = read_target_config(folder)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    encoded = [
        tokenizer.encode_chat(one.turns[:1]) if chat else tokenizer.encode("\n\n".join(one.turns)) for one in given
    ]
    sequences = [torch.tensor(ids[:tokens]) for ids in encoded]
    with status("calibrating") as say:
        found = run(
            open_checkpoint(folder, source=target.name),
            config,
            sequences,
            Prompts(sha256=file_digest(prompts), count=len(given), tokens=sum(map(len, sequences))),
            dtype=TORCH[dtype or config.dtype or "BF16"],
            advance=lambda done, total: say(f"{done} of {total} layers"),
        )
    temporary = out.with_name(f".{out.name}.partial")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_calibration(temporary, found)
        temporary.replace(out)
    click.echo(
        f"{out}: {len(found.input_amax):,} modules, {found.prompts.tokens:,} tokens of {found.prompts.count} prompts"
    )
