"""Read heads for their target: from headers alone, or whole."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.bytes import file_digest
from ..checkpoint.folder import Checkpoint
from ..checkpoint.manifest import Hints, mismatch, source_beside
from ..checkpoint.source import Source
from ..drafters.base import Spec
from ..engines import by_name
from ..engines.layout import Layout
from ..errors import KconvError, Problem, TargetInvalid, Where
from ..targets.config import TargetConfig, read_target_config
from .provenance import Origin, made_from
from .read import Head, claim_tensors, read_head


def open_head(
    checkpoint: Checkpoint, layout: Layout | None, hints: Hints, target: Source | None, *, values: bool = True
) -> Head:
    """Read a head for its target; without `values`, or if the checkpoint has only headers, from its headers alone.

    The layout is detected from the head's marks if None. A target's depth replaces the hints' `target_layers`.

    Raises:
        TargetInvalid: the head needs hidden states or a vocabulary that the target does not have.
        KconvError: it cannot be read; see `read_head`.
    """
    config = _config(target)
    head = _read(checkpoint, layout, hints, config, values=values)
    if target and config:
        _check_fit(head.spec, config, target.name)
    return head


def open_origin(checkpoint: Checkpoint, output: Source, target: Source | None, hints: Hints | None = None) -> Origin:
    """Read the head that an output was made from: by itself, and with the options of its conversion.

    The output's kconv.json records the options, which hold for the same config.json alone; without one, `hints` are
    what the user says of both. The target's depth decides default captures; if there is no target, the depth in
    kconv.json.

    Raises:
        ManifestMismatch: it cannot be read by itself, and the output was made from another head.
        KconvError: it cannot be read; see `read_head`.
    """
    config, manifest = _config(target), made_from(output)
    if manifest is None or file_digest(checkpoint.folder / "config.json") != manifest.source_config:
        try:
            recorded = _read(checkpoint, None, Hints(), config)
        except KconvError as error:
            if manifest is None:
                with _of_the_source(checkpoint):
                    recorded = _read(checkpoint, None, hints or Hints(), config)
                return Origin(recorded, recorded)
            what = f"{output.name} was made from another config.json"
            named = source_beside(Path(output.name), manifest)
            fix = f"Pass {named} as it was at the conversion, or convert this head."
            raise mismatch(checkpoint.source, what, fix) from error
        return Origin(recorded, recorded)
    with _of_the_source(checkpoint):
        recorded = _read(checkpoint, by_name(manifest.source_layout), manifest.hints, config)
    try:
        return Origin(recorded, _read(checkpoint, None, Hints(), config))
    except KconvError:
        return Origin(recorded, recorded)


@contextmanager
def _of_the_source(checkpoint: Checkpoint) -> Generator[None]:
    """Say of an error that it is about the source: its tensors have the output's names."""
    try:
        yield
    except KconvError as fault:
        if not isinstance(fault.where, Where):
            fault.where = f"{checkpoint.source}{f': {fault.where}' if fault.where else ''}"
        raise


def _config(target: Source | None) -> TargetConfig | None:
    return read_target_config(target.fetch_config()) if target else None


def _read(
    checkpoint: Checkpoint, layout: Layout | None, hints: Hints, target: TargetConfig | None, *, values: bool = True
) -> Head:
    read = read_head if values and not checkpoint.headers_only else claim_tensors
    hints = hints.model_copy(update={"target_layers": target.layers}) if target else hints
    return read(checkpoint, layout=layout, hints=hints)


def _check_fit(spec: Spec, target: TargetConfig, name: str) -> None:
    if (problem := find_misfit(spec, target, name)) is not None:
        raise problem.error()


def find_misfit(spec: Spec, target: TargetConfig, name: str) -> Problem | None:
    """Return what shows that a target is not this head's; None if nothing does."""
    if (spec.target_hidden, spec.vocab) == (target.hidden, target.vocab):
        return None
    return TargetInvalid(
        f"the head needs hidden states of width {spec.target_hidden} and a vocabulary of {spec.vocab:,}, but the "
        f"target has {target.hidden} and {target.vocab:,}",
        where=name,
        fix="Pass the target that the head was trained on.",
    ).problem()
