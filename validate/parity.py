"""Parity on held-out prompts: logits and acceptance of a head and its source.

The target is in memory, or its states are on disk (`kconv states`) and only its embedding and lm_head are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ..checkpoint.bytes import digest
from ..checkpoint.folder import Checkpoint, open_checkpoint
from ..checkpoint.manifest import Action, read_manifest
from ..checkpoint.source import Source
from ..checkpoint.tensors import read_tensor
from ..convert.read import Head, read_weights
from ..drafters.base import RunningDrafter
from ..drafters.eagle3 import EAGLE3
from ..drafters.fingerprint import difference, fingerprint
from ..drafters.forward import DraftHead
from ..drafters.rope_keys import read_rope
from ..errors import KconvError, ManifestMismatch, NotACheckpoint, PromptsInvalid, TargetInvalid
from ..measure.drafting import Measured, Proposer, count_halves, head_drafter, measure_states
from ..measure.held_out import HeldOut, refuse_overlap
from ..measure.parts import Parts
from ..measure.texts import Batch, Text, make_texts, stored_texts
from ..quantize.head.served import RoundedHead, read_served
from ..targets.config import TargetConfig, read_target_config
from ..targets.forward import States, run_target
from ..targets.model import load_target
from ..targets.modelopt_states import open_modelopt_states
from ..targets.states import RECORD, StatesFolder, StoredStates, open_states, read_record
from .options import ValidateOptions
from .readings import (
    Gain,
    Reading,
    ReadingsMeasured,
    TargetsOwn,
    choose_text,
    find_layers,
    find_readings,
    measure_mistakes,
    measure_readings,
)
from .report import Finding
from .verdict import Claim, judge_baselines, judge_fingerprint, judge_retention


def load_head(
    head: Head, target: Checkpoint, config: TargetConfig, dtype: torch.dtype = torch.float32
) -> RunningDrafter:
    """Load a head for kconv's own forward; a quantized head's inputs are rounded as engines round them.

    Args:
        head: the head on disk.
        target: the target that it drafts for; provides embed_tokens and lm_head if the head has none of its own.
        config: the target's config.
        dtype: the dtype to compute in.

    Raises:
        TargetInvalid: the target's dims do not fit the head, or it lacks the layers that the head reads.
    """
    spec = head.spec
    for what, ours, theirs in (
        ("target_hidden_size", spec.target_hidden, config.hidden),
        ("vocab_size", spec.vocab, config.vocab),
    ):
        if ours != theirs:
            raise TargetInvalid(
                f"the head needs a target with {what} {ours}, but this one has {theirs}",
                where=target.folder,
                fix="Pass the target that the head was trained on.",
            )
    if spec.captured[-1] >= config.layers:
        raise TargetInvalid(
            f"the head reads layer {spec.captured[-1]}, but the target has {config.layers} layers",
            where=target.folder,
            fix="Pass the target that the head was trained on, or correct the captured layers (--captured-are).",
        )
    rounded = head.is_quantized and head.drafter is EAGLE3
    weights, inputs = read_served(head) if rounded else (read_weights(head), {})
    shared = {"embed_tokens": config.embed_tokens, "lm_head": config.lm_head}
    for slot in shared.keys() - weights.keys():
        if shared[slot] not in target.tensors:
            raise TargetInvalid(f"the target has no {shared[slot]}", where=target.folder, fix="Check the target.")
        weights[slot] = read_tensor(target.tensors[shared[slot]])
    floats = {n: w.to(dtype) if w.is_floating_point() else w for n, w in weights.items()}
    return RoundedHead(spec, floats, inputs) if inputs else head.drafter.load(spec, floats)


Say = Callable[[str], None]
# A manifest's actions for tensors whose values are close to their source's but not equal.
APPROXIMATE: tuple[Action, ...] = ("converted", "quantized")


@dataclass(frozen=True)
class ParityFound:
    """The measurements of a head.

    Attributes:
        measured: one entry per text.
        provenance: how they were made.
        readings: of its other readings.
        gains: from undoing known mistakes.
        findings: about the head in its own reading.
    """

    measured: tuple[Measured, ...]
    provenance: dict[str, object]
    readings: ReadingsMeasured | None = None
    gains: tuple[Gain, ...] = ()
    findings: tuple[Finding, ...] = ()


def measure_parity(
    output: Head,
    source: Head | None,
    options: ValidateOptions,
    target: Source,
    prompts: HeldOut | None,
    say: Say,
    still_open: Collection[str] = (),
) -> ParityFound:
    """Measure a head, and its source if given, on held-out prompts.

    Args:
        output: the head.
        source: what it was made from.
        options: how to measure.
        target: the target.
        prompts: held-out prompts as the target reads them; None to measure on the options' states.
        say: called with progress messages.
        still_open: facts that its files leave open, or that rest on the user's word; see `validate.readings`.

    Raises:
        PromptsInvalid: a prompt was used in the calibration, or no text is long enough for a draft.
        StatesInvalid: the states cannot be read, or come from another target or other layers.
        TargetInvalid: the target cannot be read, or is not this head's target.
    """
    if prompts is None:
        return _from_states(output, source, options, target, say, still_open)
    return _from_target(output, source, options, target, prompts, say, still_open)


def _from_target(
    output: Head,
    source: Head | None,
    options: ValidateOptions,
    target: Source,
    held_out: HeldOut,
    say: Say,
    still_open: Collection[str],
) -> ParityFound:
    if options.new_tokens <= (steps := options.steps(output.spec)):
        raise PromptsInvalid(
            f"continuations of {options.new_tokens} tokens are too short to measure {steps} draft tokens per step",
            where="--new-tokens",
            fix=f"Pass --new-tokens {steps + 1} or more.",
        )
    refuse_overlap((p.digest for p in held_out.prompts), output.checkpoint.folder, map(Path, options.calibrated_on))
    say("loading the target")
    folder = target.fetch_model()
    checkpoint, config = open_checkpoint(folder, source=target.name), read_target_config(folder)
    heads = _load_heads(output, source, checkpoint, config)
    model = load_target(folder, torch.float32)
    named = [(row, p.category) for row, p in zip(held_out.tokens, held_out.prompts, strict=True) if row]
    say("continuing the prompts")
    texts = make_texts(
        model,
        [row for row, _ in named],
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        steps=steps,
        seed=options.seed,
        categories=[category for _, category in named],
    )
    readings = find_readings(output, config, still_open)
    layers = _layers(output, source, readings, range(config.layers))

    def run(batch: Batch) -> States:
        return run_target(model, batch.tokens, layers)

    bench = _Bench(output, heads, texts, run, layers, config, readings)
    lengths = {"prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens}
    about = _common_provenance(target) | {"prompts": held_out.describe() | lengths, "seed": options.seed}
    return _measure(bench, options, about, say)


def _from_states(
    output: Head, source: Head | None, options: ValidateOptions, target: Source, say: Say, still_open: Collection[str]
) -> ParityFound:
    folder, config = Path(options.states or ""), read_target_config(target.fetch_config())
    # ModelOpt's dump has no record, and holds the layers that the head was trained with.
    stored = read_record(folder).captured if (folder / RECORD).exists() else _captured(output, source)
    readings = find_readings(output, config, still_open, stored)
    own = _captured(output, source)
    # Of states that lack one of the head's layers, the error names the head's alone.
    captured = _layers(output, source, readings, stored) if {*own} <= {*stored} else own
    states = _open_states(folder, captured, config, target, allow_pickle=options.allow_pickle)
    refuse_overlap((s.digest for s in states.sequences), output.checkpoint.folder, map(Path, options.calibrated_on))
    say("reading the target's embedding and lm_head")
    ends = target.open_tensors({config.embed_tokens, config.lm_head})
    checkpoint = Checkpoint(Path(target.name), config.raw, ends, target.name)
    heads = _load_heads(output, source, checkpoint, config)
    lm_head = read_tensor(ends[config.lm_head]).float()

    def run(batch: Batch) -> States:
        rows = [states.read(place) for place in batch.places]
        hidden = torch.stack([row.hidden for row in rows]).float()
        return States(torch.stack([row.captured for row in rows]).float(), hidden, F.linear(hidden, lm_head))

    texts = stored_texts(states, steps=options.steps(output.spec), vocab=config.vocab)
    bench = _Bench(output, heads, texts, run, captured, config, readings)
    return _measure(bench, options, _common_provenance(target) | _describe_states(states), say)


@dataclass(frozen=True)
class _Bench:
    """Everything for measuring a head, whatever the origin of the target's states.

    Attributes:
        output: the head on disk.
        heads: "output", and "source" if there is one.
        texts: the texts to draft on.
        run: returns the target's states for a batch.
        layers: the layers whose outputs they hold.
        config: the target's.
        readings: the readings of the head to compare.
    """

    output: Head
    heads: dict[str, RunningDrafter]
    texts: tuple[Text, ...]
    run: Callable[[Batch], States]
    layers: tuple[int, ...]
    config: TargetConfig
    readings: tuple[Reading, ...]


def _measure(bench: _Bench, options: ValidateOptions, about: dict[str, object], say: Say) -> ParityFound:
    heads, steps = bench.heads, options.steps(bench.output.spec)
    drafters = _drafters(heads, steps, bench.layers)
    measured = []
    for text in bench.texts:
        say(f"measuring on {text.kind} text")
        measured.append(
            measure_states(
                text,
                bench.run,
                steps,
                drafters,
                compare=_pair(heads),
                parts=_parts(heads, bench.layers),
                bigram=count_halves(text, bench.config.vocab),
            )
        )
    findings = list(judge_baselines([row for one in measured for row in one.acceptance]))
    output, gains = heads["output"], []
    if "source" in heads:
        findings += _judge_approximation(bench, options.min_retention, measured)
    # With a source too: it shows that nothing was lost, but not that it was right. Only Eagle3's mistakes are known.
    if isinstance(output, DraftHead):
        say("measuring the head with known mistakes undone")
        known = [one.spec for one in bench.readings]
        gains = measure_mistakes(output, bench.texts, bench.run, bench.layers, steps, targets_own(bench.config), known)
        about = about | {"readings": len(gains)}
    say("measuring other readings of the head")
    told = measure_readings(choose_text(bench.texts), bench.run, bench.layers, steps, heads["output"], bench.readings)
    return ParityFound(tuple(measured), about, told, tuple(gains), tuple(findings))


def targets_own(config: TargetConfig) -> TargetsOwn:
    """Return the settings in a target's config that its heads often share."""
    eps = config.text.get("rms_norm_eps")
    try:
        rope = read_rope(config.rope)
    except KconvError:  # a kind that no head has
        rope = None
    return TargetsOwn(rope, float(eps) if isinstance(eps, float) else None, "kv_lora_rank" in config.text)


def _judge_approximation(bench: _Bench, min_retention: float, measured: list[Measured]) -> Iterator[Finding]:
    """Compare an approximate head with its manifest; an exact one is compared by its bits."""
    try:
        manifest = read_manifest(bench.output.checkpoint.folder)
    except (NotACheckpoint, ManifestMismatch):  # reported as a separate finding
        return
    record = manifest.conversion
    # A head that was only renamed since retains all of its source's acceptance; a pruned one makes no claim.
    if any(step.action in APPROXIMATE for step in manifest.tensors):
        yield from judge_retention(measured, Claim.of(record), min_retention)
    output = bench.heads["output"]
    if record and record.fingerprint and isinstance(output, DraftHead):
        yield from judge_fingerprint(difference(record.fingerprint, fingerprint(output)))


def _layers(output: Head, source: Head | None, readings: Sequence[Reading], stored: Collection[int]) -> tuple[int, ...]:
    """Return the available layers to measure with: the head's, its readings', and their neighbors, which a head that
    captures too early or too late should have read."""
    own, near = _captured(output, source), find_layers(output.spec.captured, stored)
    return tuple(sorted({*own, *near, *(layer for one in readings for layer in one.spec.captured)}))


def _captured(output: Head, source: Head | None) -> tuple[int, ...]:
    """Return the layers that the two heads read; they differ if the conversion used other options than the source."""
    return tuple(sorted({*output.spec.captured, *(source.spec.captured if source else ())}))


def _open_states(
    folder: Path, captured: tuple[int, ...], config: TargetConfig, target: Source, *, allow_pickle: bool
) -> StatesFolder:
    if (folder / RECORD).exists() or not any(folder.rglob("*.pt")):
        states = open_states(folder, config=config, captured=captured)
        states.check_target(target, digest(target.open_tensors({config.lm_head})[config.lm_head]))
        return states
    return open_modelopt_states(folder, config=config, captured=captured, allow_pickle=allow_pickle)


def _load_heads(
    output: Head, source: Head | None, target: Checkpoint, config: TargetConfig
) -> dict[str, RunningDrafter]:
    given = {"source": source, "output": output}
    return {name: load_head(head, target, config) for name, head in given.items() if head is not None}


def _drafters(heads: dict[str, RunningDrafter], steps: int, captured: tuple[int, ...]) -> dict[str, Proposer]:
    return {name: head_drafter(head, steps, captured) for name, head in heads.items()}


def _pair(heads: dict[str, RunningDrafter]) -> tuple[str, str] | None:
    return ("source", "output") if "source" in heads else None


def _parts(heads: dict[str, RunningDrafter], layers: tuple[int, ...]) -> Parts | None:
    source, output = heads.get("source"), heads["output"]
    if not isinstance(source, DraftHead) or not isinstance(output, DraftHead):
        return None
    parts = Parts(source, output, layers)
    return parts if parts.comparable else None


def _common_provenance(target: Source) -> dict[str, object]:
    return {
        "target": target.name,
        "temperature": {"sampled": 1.0, "held-out": 1.0, "greedy": 0.0},
        "dtype": "float32",
        "standard_errors": "over sequences; linearized ratio of accepted tokens to drafts; differences paired",
    }


def _describe_states(states: StatesFolder) -> dict[str, object]:
    if isinstance(states, StoredStates):
        record = states.record
        about = record.model_dump(include={"prompts", "captured", "dtype", "seed", "new_tokens", "kconv"})
        return {"states": {"folder": str(states.folder), "target": record.target.source} | about}
    return {"states": {"folder": str(states.folder), "captured": "not in the files; assumed to be the head's"}}
