"""Heads read for their target: by their headers alone, or whole."""

from __future__ import annotations

from dataclasses import replace

from ..checkpoint.folder import Checkpoint
from ..checkpoint.source import Source
from ..engines.layout import Layout
from ..errors import KconvError, Problem, TargetInvalid
from ..head.spec import HeadSpec
from ..targets.config import TargetConfig, read_target_config
from .captured import Hints
from .provenance import Origin, how_source_was_read
from .read import Head, claim_tensors, read_head


def open_head(checkpoint: Checkpoint, layout: Layout | None, hints: Hints, target: Source | None) -> Head:
    """Read a head for its target, by its headers alone where the checkpoint is of these.

    Args:
        checkpoint: the head.
        layout: the layout that it is in, None to go by its marks.
        hints: what is said where its config is silent; a target's depth stands for `target_layers`.
        target: the target that it is for, None where that is not known.

    Raises:
        TargetInvalid: the head reads other hidden states, or another vocabulary, than the target's.
        KconvError: it cannot be read; see `convert.read`.
    """
    config = _config(target)
    head = _read(checkpoint, layout, hints, config)
    if target and config:
        _check_fit(head.spec, config, target.name)
    return head


def open_origin(checkpoint: Checkpoint, output: Source, target: Source | None) -> Origin:
    """Read the head that an output was made of: by itself, and as its conversion read it.

    Args:
        checkpoint: the head that the output was made of.
        output: what was made of it; its kconv.json records the options, see `how_source_was_read`.
        target: whose depth decides default captures, None for what kconv.json says of it.

    Raises:
        KconvError: it cannot be read; see `convert.read`.
    """
    layout, hints = how_source_was_read(output, checkpoint)
    config = _config(target)
    recorded = _read(checkpoint, layout, hints, config)
    if layout is None:
        return Origin(recorded, recorded)
    try:
        return Origin(recorded, _read(checkpoint, None, Hints(), config))
    except KconvError:
        return Origin(recorded, recorded)


def _config(target: Source | None) -> TargetConfig | None:
    return read_target_config(target.fetch_config()) if target else None


def _read(checkpoint: Checkpoint, layout: Layout | None, hints: Hints, target: TargetConfig | None) -> Head:
    read = claim_tensors if checkpoint.headers_only else read_head
    hints = replace(hints, target_layers=target.layers) if target else hints
    try:
        return read(checkpoint, layout=layout, hints=hints)
    except KconvError as error:
        # What reads a config does not know whose it is, and a command may have two.
        if error.where == "config.json":
            error.where = f"{checkpoint.source}/config.json"
        raise


def _check_fit(spec: HeadSpec, target: TargetConfig, name: str) -> None:
    if (problem := find_misfit(spec, target, name)) is not None:
        raise problem.error()


def find_misfit(spec: HeadSpec, target: TargetConfig, name: str) -> Problem | None:
    """Return what shows a target to be another than the head's; None where nothing does."""
    if (spec.target_hidden, spec.vocab) == (target.hidden, target.vocab):
        return None
    return TargetInvalid(
        f"the head needs hidden states of width {spec.target_hidden} and a vocabulary of {spec.vocab:,}, but the "
        f"target has {target.hidden} and {target.vocab:,}",
        where=name,
        fix="Give the target that the head was trained on, or state target_hidden_size in the head's config.",
    ).problem()
