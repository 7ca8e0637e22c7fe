"""`--attention` of `kconv to-*`: its options, and what they make of a head."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import click

from ..checkpoint.source import Source
from .options import FOLDER, open_head

if TYPE_CHECKING:
    from ..convert.attention.calibration import Batch, Calibration, Part
    from ..head.spec import HeadSpec
    from ..target.prompts import Prompt
    from ..target.stored_states import StoredStates

# Sequences side by side: enough for a step of healing, and their logits fit into memory.
ROWS = 8


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
        click.option(
            "--keep",
            metavar="SHARE",
            default=0.97,
            show_default=True,
            type=click.FloatRange(0, 1),
            help="Refuse what keeps less of the acceptance length on held-out text.",
        ),
    ):
        command = option(command)
    return command


def take_attention(hints: dict[str, Any]) -> Attention | None:
    """Take these options out of a command's; None where no other attention is asked for."""
    names = ("attention", "states", "prompts", "context", "steps", "head_dim", "keep")
    kind, states, prompts, context, steps, head_dim, keep = (hints.pop(name) for name in names)
    if kind is None:
        if states or prompts or steps is not None or head_dim != "auto":
            raise click.UsageError("--states, --prompts, --heal and --head-dim go with --attention")
        return None
    if (states is None) == (prompts is None):
        raise click.UsageError("--attention needs --states or --prompts, to calibrate on")
    if kind == "mla" and head_dim != "auto":
        raise click.UsageError("--head-dim is of MHA")
    return Attention(kind, states, prompts, context, steps, None if head_dim == "auto" else int(head_dim), keep)


def convert(
    head: Source, out: Path, layout: str, wanted: Attention, target: Source, hints: dict[str, Any], *, as_json: bool
) -> None:
    """Give a head another attention, and write it in a layout."""
    import torch

    from ..checkpoint.staging import refuse_existing
    from ..checkpoint.tensors import read_tensor
    from ..convert.attention.convert import HEAL_STEPS, convert_attention, outline
    from ..convert.attention.plan import check_layout, plan_converted
    from ..convert.execute import execute
    from ..convert.layouts import by_name
    from ..convert.read import read_weights
    from ..convert.shared import SLOTS, Shared
    from ..head.forward import DraftHead
    from ..target.config import read_target_config
    from .head_output import print_manifest
    from .output import progress

    refuse_existing(out)
    read, table = open_head(head, **hints), by_name(layout)
    check_layout(read.spec, outline(read.spec, wanted.kind, wanted.head_dim), table, read.places)
    config = read_target_config(target.fetch_config())
    names = dict(zip(SLOTS, (config.lm_head, config.embed_tokens), strict=True))
    tensors = target.open_tensors(names.values())
    shared = Shared(target.name, {slot: tensors[name] for slot, name in names.items() if name in tensors})
    weights = read_weights(read)
    for slot in SLOTS:
        if slot not in weights:
            weights[slot] = read_tensor(shared.lend(slot, read.spec))
    original = DraftHead(read.spec, {n: w.float() if w.is_floating_point() else w for n, w in weights.items()})
    click.echo("gathering states", err=True)
    lm_head = read_tensor(tensors[config.lm_head]).float()
    calibration = _calibration(wanted, read.spec, target, lm_head)
    steps = HEAL_STEPS if wanted.steps is None else wanted.steps
    with progress("healing", steps) as advance:
        converted = convert_attention(
            original,
            wanted.kind,
            calibration,
            dtype=read.spec.dtype,
            head_dim=wanted.head_dim,
            steps=steps,
            keep=wanted.keep,
            say=lambda line: click.echo(line, err=True),
            progress=lambda *_: advance(1),
        )
    with torch.no_grad():
        manifest = execute(plan_converted(read, table, converted, calibration, shared), out)
    print_manifest(manifest, out, as_json=as_json)
    if not as_json:
        figures = converted.held_out
        click.echo(
            f"approximate: keeps {figures.kept:.2%} ± {figures.kept_error:.2%} of the acceptance length "
            f"({figures.before:.3f} to {figures.after:.3f}, K={figures.steps}, sampled, bonus included) on "
            f"{figures.sequences} held-out sequences of up to {figures.context} tokens"
        )


def _calibration(wanted: Attention, spec: HeadSpec, target: Source, lm_head: Any) -> Calibration:
    from ..convert.attention.calibration import Calibration
    from ..target.prompts import read_prompts

    if wanted.states is not None:
        from ..target.config import read_target_config
        from ..target.stored_states import open_states

        config = read_target_config(target.fetch_config())
        states = open_states(wanted.states, config=config, captured=spec.captured)
        digests = tuple(sequence.digest for sequence in states.sequences)
        batches = StoredBatches(states)
        return Calibration(batches, lm_head, wanted.states.name, digests, batches.parts)
    assert wanted.prompts is not None
    prompts = read_prompts(wanted.prompts)
    batches = _run_target(wanted.prompts, prompts, wanted.context, spec, target)
    return Calibration(batches, lm_head, wanted.prompts.name, tuple(prompt.digest for prompt in prompts))


class StoredBatches(Sequence["Batch"]):
    """Stored states as batches of one length, read when they are asked for.

    Attributes:
        parts: of each batch. All sequences of a prompt are in one: its text and its answers begin alike.
    """

    def __init__(self, states: StoredStates) -> None:
        from ..convert.attention.calibration import part_of

        self._states = states
        prompts = sorted({sequence.digest for sequence in states.sequences})
        parts: dict[str, Part] = {digest: part_of(place) for place, digest in enumerate(prompts)}
        alike: dict[tuple[Part, int], list[int]] = defaultdict(list)
        for index, sequence in enumerate(states.sequences):
            alike[parts[sequence.digest], sequence.length].append(index)
        groups = [same[begin : begin + ROWS] for same in alike.values() for begin in range(0, len(same), ROWS)]
        self._groups = sorted(groups)
        self.parts: list[Part] = [parts[states.sequences[group[0]].digest] for group in self._groups]

    def __len__(self) -> int:
        return len(self._groups)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        import torch

        from ..convert.attention.calibration import Batch

        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        stored = [self._states.read(i) for i in self._groups[index]]
        return Batch(
            torch.stack([one.tokens.long() for one in stored]),
            torch.stack([one.captured.float() for one in stored]),
            torch.stack([one.hidden.float() for one in stored]),
        )


def _run_target(file: Path, prompts: Sequence[Prompt], context: int, spec: HeadSpec, target: Source) -> list[Batch]:
    """Run a target over prompts, joined and cut into texts of one length."""
    import torch

    from ..convert.attention.calibration import Batch
    from ..errors import CalibrationInvalid
    from ..target.model import load_target
    from ..target.states import run_target
    from ..target.tokenizer import load_tokenizer

    folder = target.open_weights().folder
    tokenizer = load_tokenizer(folder)
    ids = [i for prompt in prompts for turn in prompt.turns for i in tokenizer.encode(turn)]
    count = len(ids) // context
    if not count:
        raise CalibrationInvalid(
            f"{file.name} holds {len(ids):,} tokens, and a text has {context:,}",
            where=file,
            fix="Give more prompts, or a shorter --context.",
        )
    model = load_target(folder, torch.float32)
    found = []
    for tokens in torch.tensor(ids[: count * context]).view(count, context).split(ROWS):
        states = run_target(model, tokens, spec.captured)
        found.append(Batch(tokens, states.captured, states.hidden))
    return found
