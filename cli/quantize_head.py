"""`kconv quantize-head`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..checkpoint.source import Source
from .options import FOLDER, PATH_OR_ID, keeping, open_head, reading


@click.command(short_help="Write a draft head's linears in FP8 or NVFP4.")
@click.argument("head", type=PATH_OR_ID)
@click.argument("out", type=FOLDER)
@click.option(
    "--format", "name", required=True, type=click.Choice(["fp8", "nvfp4"]), help="What the linears are written in."
)
@click.option("--states", type=FOLDER, required=True, help="What kconv states wrote of the target, to calibrate on.")
@keeping
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
@reading
def quantize_head(
    head: Source, out: Path, name: str, states: Path, keep: float, as_json: bool, target: Source | None, **hints: Any
) -> None:
    """Write HEAD with its linears in FP8 or NVFP4 into the new folder OUT, with kconv.json beside it.

    A GQA or MHA head's attention and MLP are quantized, an MLA head's MLP: what each engine that reads the head builds
    quantized too. fc, lm_head, the embedding and the norms keep their bytes, and so does an MLA head's attention. What
    engines fuse shares its scales. OUT is in HEAD's layout; kconv to-vllm OUT and the like carry it whole.

    The scales of what the linears read are of the states' prompts but one in ten. On these the acceptance length is
    measured, with weights and inputs rounded as an engine rounds them, before anything is written. The whole head is
    in memory, in fp32.

    \b
    Example:
      kconv states my-target my-states --prompts prompts.jsonl --captured 1,29,57
      kconv quantize-head my-head my-head-fp8 --format fp8 --states my-states --target my-target
      kconv validate my-head-fp8 --source my-head
    """
    if target is None:
        raise click.UsageError("--target must be said: the states are of it, and so is what the acceptance is against")

    import torch

    from ..checkpoint.staging import refuse_existing
    from ..checkpoint.tensors import read_tensor
    from ..convert.attention.calibration import Calibration
    from ..convert.read import read_weights
    from ..convert.shared import SLOTS
    from ..pipeline.making import find_shared
    from ..quantize.head.formats import FORMATS
    from ..quantize.head.plan import plan_plain, plan_quantized, write
    from ..quantize.head.quantize import quantize_head as run
    from ..targets.config import read_target_config
    from ..targets.states import open_states
    from .attention_states import StoredBatches
    from .head_output import print_kept, print_manifest
    from .output import status

    refuse_existing(out)
    read, format_ = open_head(head, target=target, **hints), FORMATS[name]
    shared = find_shared(target, SLOTS)
    lm_head = read_tensor(shared.lm_head).float()
    plain = plan_plain(read, format_, shared)
    stored = open_states(states, config=read_target_config(target.fetch_config()), captured=read.spec.captured)
    weights = read_weights(read)
    weights |= {slot: read_tensor(shared.lend(slot, read.spec)) for slot in SLOTS if slot not in weights}
    batches = StoredBatches(stored)
    digests = tuple(sequence.digest for sequence in stored.sequences)
    calibration = Calibration(batches, lm_head, states.name, digests, batches.parts)
    with status("quantizing") as say:
        quantized = run(read.spec, weights, format_, calibration, keep=keep, say=say)
    with torch.no_grad():
        manifest = write(plan_quantized(plain, quantized, calibration), format_, out)
    print_manifest(manifest, out, as_json=as_json)
    if not as_json:
        before = sum(info.size for info in read.checkpoint.tensors.values())
        after = sum(file.size for file in manifest.files if file.name in manifest.weight_files)
        click.echo(f"bytes: {after:,} of {before:,}")
        print_kept(quantized.held_out)
