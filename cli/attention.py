"""`--attention` of `kconv to-*`: its options, and what they make of a head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ..checkpoint.source import Source
from .options import FOLDER, check_trusted, keeping, open_head, told

if TYPE_CHECKING:
    from ..head.spec import HeadSpec
    from .attention_states import Texts


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

    from ..checkpoint.staging import refuse_existing
    from ..checkpoint.tensors import read_tensor
    from ..convert.attention.calibration import Calibration
    from ..convert.attention.convert import HEAL_STEPS, convert_attention, outline
    from ..convert.attention.plan import check_layout, plan_converted
    from ..convert.beside import refuse_target
    from ..convert.config import refuse_unstated
    from ..convert.execute import execute
    from ..convert.read import read_weights
    from ..convert.shared import SLOTS
    from ..engines import by_name
    from ..head.forward import DraftHead
    from ..pipeline.making import find_shared
    from .head_output import print_kept, print_manifest
    from .output import steps_bar

    check_trusted(wanted.trust_remote_code, target)
    refuse_existing(out)
    if wanted.device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch finds no CUDA device here")
    read, table = open_head(head, **hints), by_name(layout)
    refuse_unstated(read.read)
    spec = read.spec
    check_layout(spec, outline(spec, wanted.kind, wanted.head_dim), table, read.places)
    texts = _open_texts(wanted, spec, target)
    shared = find_shared(target, SLOTS)
    refuse_target(read, table, shared)
    weights = read_weights(read)
    for slot in SLOTS:
        if slot not in weights:
            weights[slot] = read_tensor(shared.lend(slot, spec))
    moved = {n: w.to(wanted.device, torch.float32 if w.is_floating_point() else None) for n, w in weights.items()}
    original = DraftHead(spec, moved)
    click.echo("gathering states", err=True)
    lm_head = read_tensor(shared.lm_head).to(wanted.device, torch.float32)
    calibration = Calibration(texts.gather(), lm_head, texts.name, texts.prompts, texts.parts)
    with steps_bar("healing") as healed:
        converted = convert_attention(
            original,
            wanted.kind,
            calibration,
            dtype=spec.dtype,
            head_dim=wanted.head_dim,
            steps=HEAL_STEPS if wanted.steps is None else wanted.steps,
            keep=wanted.keep,
            say=lambda line: click.echo(line, err=True),
            progress=healed,
        )
    with torch.no_grad():
        manifest = execute(plan_converted(read, table, converted, calibration, shared), out)
    print_manifest(manifest, out, as_json=as_json)
    if not as_json:
        print_kept(converted.held_out)


def _open_texts(wanted: Attention, spec: HeadSpec, target: Source) -> Texts:
    from ..targets.config import read_target_config
    from .attention_states import prompted_texts, stored_texts

    if wanted.states is not None:
        return stored_texts(wanted.states, spec, read_target_config(target.fetch_config()))
    assert wanted.prompts is not None
    return prompted_texts(wanted.prompts, wanted.context, spec, target, trust_remote_code=wanted.trust_remote_code)
