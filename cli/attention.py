"""`--attention` of `kconv to-*`: its options, and what they make of a head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from ..checkpoint.source import Source
from .options import FOLDER, check_trusted, keeping, open_head, told


@dataclass(frozen=True)
class Attention:
    """What a user asks for."""

    kind: Literal["mha", "mla"]
    states: Path | None
    prompts: Path | None
    context: int
    steps: int | None
    head_dim: int | None
    keep: float
    device: Literal["cpu", "cuda"]
    trust_remote_code: bool


def converting(command: Callable) -> Callable:
    """Add the options of a conversion of the attention."""
    for option in (
        click.option("--attention", type=click.Choice(["mha", "mla"]), help="Give the head this attention; not exact."),
        click.option("--states", type=FOLDER, help="What kconv states wrote, to calibrate --attention on."),
        click.option("--prompts", type=FOLDER, help="Or prompts (JSONL) to run --target over."),
        click.option(
            "--context",
            metavar="N",
            default=512,
            show_default=True,
            type=click.IntRange(min=16),
            help="Tokens of the texts cut from --prompts; as long as what is served.",
        ),
        click.option(
            "--heal",
            "steps",
            metavar="STEPS",
            type=click.IntRange(min=0),
            help="Steps of gradient descent towards HEAD; 200 if not said.",
        ),
        click.option(
            "--head-dim",
            type=click.Choice(["auto", "192", "256"]),
            default="auto",
            show_default=True,
            help="Of MHA; vLLM's FlashInfer takes 256 and not 192.",
        ),
        keeping,
        click.option(
            "--device",
            type=click.Choice(["cpu", "cuda"]),
            default="cpu",
            show_default=True,
            help="Where to convert, heal and measure; --prompts runs the target on the CPU all the same.",
        ),
        click.option(
            "--trust-remote-code",
            is_flag=True,
            help="Run the tokenizer's own Python for --prompts; --target must be pinned.",
        ),
    ):
        command = option(command)
    return command


def take_attention(hints: dict[str, Any]) -> Attention | None:
    """Take these options out of a command's; None where no other attention is asked for."""
    names = ("attention", "states", "prompts", "context", "steps", "head_dim", "keep", "device", "trust_remote_code")
    kind, states, prompts, context, steps, head_dim, keep, device, trusted = (hints.pop(name) for name in names)
    if kind is None:
        if told(*names):
            raise click.UsageError(
                "--states, --prompts, --context, --heal, --head-dim, --keep, --device and --trust-remote-code go with"
                " --attention"
            )
        return None
    if (states is None) == (prompts is None):
        raise click.UsageError("--attention needs --states or --prompts, to calibrate on")
    if states and (idle := told("context", "trust_remote_code")):
        raise click.UsageError(f"{', '.join(idle)}: only with --prompts; stored states are what they are")
    if kind == "mla" and head_dim != "auto":
        raise click.UsageError("--head-dim is of MHA")
    dims = None if head_dim == "auto" else int(head_dim)
    return Attention(kind, states, prompts, context, steps, dims, keep, device, trusted)


def convert(
    head: Source, out: Path, layout: str, wanted: Attention, target: Source, hints: dict[str, Any], *, as_json: bool
) -> None:
    """Give a head another attention, and write it in a layout."""
    import torch

    from ..calibrate.texts import TextOptions
    from ..checkpoint.staging import refuse_existing
    from ..convert.attention.convert import HEAL_STEPS, AttentionOptions, convert_attention
    from ..engines import by_name
    from .head_output import print_kept, print_manifest
    from .output import steps_bar

    check_trusted(wanted.trust_remote_code, target)
    refuse_existing(out)
    if wanted.device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch finds no CUDA device here")
    texts = TextOptions(wanted.states, wanted.prompts, wanted.context, wanted.trust_remote_code)
    steps = HEAL_STEPS if wanted.steps is None else wanted.steps
    options = AttentionOptions(wanted.kind, texts, wanted.head_dim, steps, wanted.keep, wanted.device)
    with steps_bar("healing") as healed:
        manifest, held_out = convert_attention(
            open_head(head, **hints),
            by_name(layout),
            out,
            options,
            target,
            say=lambda line: click.echo(line, err=True),
            progress=healed,
        )
    print_manifest(manifest, out, as_json=as_json)
    if not as_json:
        print_kept(held_out)
