"""Where a head comes from: the record in its manifest, and which of its weights are the target's."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from ..checkpoint.bytes import digest, file_digest, read_integers
from ..checkpoint.manifest import (
    MANIFEST,
    ConversionRecord,
    Manifest,
    Parameters,
    TensorRecord,
    Unverified,
    read_manifest,
)
from ..checkpoint.schema import parse_json
from ..checkpoint.source import Source
from ..drafters.base import Spec
from ..drafters.slots import needs
from ..errors import KconvError, ManifestMismatch, TargetInvalid
from .plan import Plan, Step
from .read import Head
from .shared import SLOTS, SharedTensors, count_copies


@dataclass(frozen=True)
class Provenance:
    """How a head was trained, and how its attention was converted, according to its kconv.json.

    Attributes:
        file: the kconv.json, which need not exist.
        manifest: its contents; None if there is none.
    """

    file: Path
    manifest: Manifest | None

    @property
    def training(self) -> Mapping[str, Any] | None:
        return self.manifest.training if self.manifest else None

    @property
    def unverified(self) -> tuple[Unverified, ...]:
        """The facts that rested on the user's word or on a default."""
        return self.manifest.unverified if self.manifest else ()

    def left_to_target(self, slots: Collection[str]) -> dict[str, TensorRecord]:
        """Return what was left to the target's equal tensors, except for the slots that the output has."""
        records = self.manifest.left_to_target if self.manifest else {}
        return {slot: record for slot, record in records.items() if slot not in slots}

    @property
    def altered(self) -> bool:
        """Whether the head differs from the draft that it started from."""
        return self.manifest is not None and not self.manifest.as_it_ships

    def conversion(self, now: ConversionRecord | None, *, exact: bool) -> ConversionRecord | None:
        """Return the record of the output's attention: an exact conversion keeps the old one, another refers to it.

        `now` is None if this conversion approximates nothing. If it is not `exact`, the weights change their values,
        and the old fingerprint describes another head.
        """
        before = self.manifest.conversion if self.manifest else None
        if before is not None and not exact:
            before = before.model_copy(update={"fingerprint": ()})
        if now is None or before is None:
            return now or before
        prompts = tuple(sorted({*before.prompts, *now.prompts}))
        return now.model_copy(update={"prompts": prompts, "before": before})

    def check_config(self, spec: Spec) -> None:
        """Raise ManifestMismatch if the manifest is of another config.json, or says of the head what that does not."""
        if self.manifest is None:
            return
        for record in self.manifest.files:
            if record.name == "config.json" and record.sha256 != file_digest(self.file.with_name(record.name)):
                raise self._apart(record.name)
        if claimed_otherwise(self.manifest, spec) is not None:
            raise self._apart("config.json")

    def check(self, sources: Iterable[TensorRecord]) -> None:
        """Raise ManifestMismatch if the manifest was written of other tensors than these."""
        if self.manifest is None:
            return
        known = {step.output.name: step.output.blake3 for step in self.manifest.tensors}
        for record in sources:
            if known.get(record.name) != record.blake3:
                raise self._apart(record.name)

    def _apart(self, name: str) -> ManifestMismatch:
        return ManifestMismatch(
            f"{name} differs from {MANIFEST}, which records what kconv wrote",
            where=self.file,
            fix=f"Pass the head as kconv wrote it. If you changed it on purpose, remove {MANIFEST}.",
        )

    def left_to_others(self, target: SharedTensors) -> Iterator[str]:
        """Yield the slots that were left to a target's tensor which is not this one's; in another dtype it may be."""
        for slot, record in self.left_to_target(()).items():
            theirs = target.tensors.get(slot)
            if theirs is not None and theirs.dtype == record.dtype and digest(theirs) != record.blake3:
                yield slot

    def check_target(self, target: SharedTensors) -> None:
        """Raise TargetInvalid for a target whose tensor is not the one that was left to it."""
        for slot in self.left_to_others(target):
            raise TargetInvalid(
                f"the {slot} of {target.name} is not the one that the head left to its target",
                where=self.file,
                fix="Pass the target that the head was converted with.",
            )


def plain_spec(spec: Spec) -> dict[str, Any]:
    """Return what a manifest says of a head, as in JSON, where tuples are lists."""
    return parse_json(json.dumps(asdict(spec) | {"kind": spec.kind}))


def claimed_otherwise(manifest: Manifest, spec: Spec) -> tuple[str, str] | None:
    """Return a field of a head that its manifest states otherwise than its config, and both; None if there is none."""
    own, stated = plain_spec(spec), parse_json(json.dumps(manifest.spec))
    for name in sorted(own.keys() & stated.keys()):
        if stated[name] != own[name]:
            unit = " (layers' outputs from 0, however its config counts)" if name == "captured" else ""
            return f"{name} {_words(stated[name], own[name])}", f"the head has {_words(own[name], stated[name])}{unit}"
    missing = sorted(own.keys() - stated.keys())
    return ("nothing about the head's " + ", ".join(missing), "every kconv output records this") if missing else None


def _words(value: Any, other: Any) -> str:
    """Return a value; of a mapping only what differs from the other's."""
    if not (isinstance(value, dict) and isinstance(other, dict)):
        return str(cast(object, value))
    own, others = cast("dict[str, Any]", value), cast("dict[str, Any]", other)
    return ", ".join(f"{key} {one}" for key, one in own.items() if key not in others or others[key] != one)


def read_provenance(folder: Path) -> Provenance:
    """Read the history of a head from its manifest.

    Raises:
        ManifestMismatch: it does not match the schema.
    """
    file = folder / MANIFEST
    return Provenance(file, read_manifest(folder) if file.is_file() else None)


@dataclass(frozen=True)
class Origin:
    """A head that another one was made from.

    Attributes:
        recorded: as the conversion read it, with the options that its kconv.json records.
        alone: as read without options; same as `recorded` if it cannot be read without them.
    """

    recorded: Head
    alone: Head

    @property
    def overruled(self) -> list[str]:
        """The fields of the spec that the user's options read differently from what the head's own files say.

        --max-positions sets a limit for serving, and is no other reading.
        """
        alone: Spec = self.alone.spec
        changed = [name for name, value in vars(alone).items() if getattr(self.recorded.spec, name) != value]
        return [name for name in changed if name != "max_positions"]


def made_from(output: Source) -> Manifest | None:
    """Return the manifest of an output, which says how its source was read; None if there is none to be read.

    Checking the output reports that.
    """
    try:
        return read_manifest(output.open_weights().folder)
    except KconvError:
        return None


def count_parameters(plan: Plan) -> Parameters:
    """Count an output's weights by origin; scales of quantized linear layers do not count.

    The embedding and lm_head count as the target's if their rows are bit-identical to it; without a target this is
    unknown.
    """
    known, counted = needs(plan.spec), set[str]()
    trained = copied = unknown = 0
    for step in plan.steps:
        for slot in step.row.slots:
            if slot in counted or slot not in known or known[slot].slot.dtype:
                continue
            counted.add(slot)
            size = prod(known[slot].shape)
            share = _share(plan, step, slot) if slot in SLOTS else 0.0
            if share is None:
                unknown += size
            else:
                copied += round(share * size)
                trained += size - round(share * size)
    return Parameters(trained=trained, copied_from_target=copied, unknown=unknown)


def _share(plan: Plan, step: Step, slot: str) -> float | None:
    """Return which part of a tensor's rows is the target's; None if unknown."""
    if step.action == "added":
        return 1.0
    reference = plan.target.tensors.get(slot) if plan.target else None
    if reference is None or slot not in plan.source.places:
        return None
    places = plan.source.places
    ids = read_integers(places["d2t"][1]) if slot == "lm_head" and "d2t" in places else None
    copies = count_copies(places[slot][1], reference, ids)
    return copies.by_offset / copies.rows if copies else None
