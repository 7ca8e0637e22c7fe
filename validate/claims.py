"""Statements of a manifest other than digests, derived again from the head itself.

`checkpoint.manifest.verify` checks bytes and what follows from the manifest alone. A manifest could claim any captured
layers, number of weights and other facts for any bytes; here they are read again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ..checkpoint.folder import Checkpoint, read_json
from ..checkpoint.manifest import MANIFEST, Manifest, mismatch
from ..convert.provenance import claimed_otherwise, plain_spec
from ..convert.read import Head, read
from ..drafters.base import Spec
from ..drafters.slots import needs
from ..engines import by_name
from ..errors import ManifestMismatch

# Where kconv's own trainer puts its record, in the folder of ModelOpt's module.
MODULE, REPORT = "modelopt", "training.json"
AGAIN = "Fetch the folder again, or convert the head again with kconv."


def check_claims(checkpoint: Checkpoint, manifest: Manifest, source: Checkpoint | None = None) -> None:
    """Check what a manifest says about a head against the head, and how its source was read against the source.

    For a target nothing is derived: its manifest describes a recipe.

    Args:
        checkpoint: the manifest's folder, whose bytes match it.
        manifest: the manifest.
        source: what the head was made from, if available.

    Raises:
        ManifestMismatch: one of its statements is wrong.
        KconvError: the head cannot be read.
    """
    if manifest.spec.get("kind") == "target":
        return
    head = read(checkpoint, layout=by_name(manifest.layout)).sound_head()
    check_spec(manifest, head.spec)
    _check_training(checkpoint.folder, manifest, plain_spec(head.spec))
    counted = _count(head)
    if manifest.parameters != counted:
        raise _says(f"{manifest.parameters:,} parameters", f"the head has {counted:,}")
    if source is None:
        return
    read_by = read(source, layout=by_name(manifest.source_layout), hints=manifest.hints)
    # The converted head was readable then, by the hints that the user gave.
    how = read_by.captured.how if read_by.captured is not None else "not decided by the hints in the manifest"
    if how != manifest.captured_by:
        raise _says(f"the captured layers were decided this way: {manifest.captured_by}", f"they were {how}")


def check_spec(manifest: Manifest, spec: Spec) -> None:
    """Raise ManifestMismatch if a manifest says of a head what its config does not."""
    if (apart := claimed_otherwise(manifest, spec)) is not None:
        raise _says(*apart)


# The fields that a recipe and a head share, and those that an attention conversion changes in a head.
OF_RECIPE, OF_ATTENTION = ("intermediate", "captured", "eps", "attention", "rope"), ("attention", "rope")
OF_BLOCKS = ("block", "mask", "causal")
# Keys of training.json that no manifest has.
OF_REPORT = ("evaluations", "tokens_per_second")


def _check_training(folder: Path, manifest: Manifest, spec: Mapping[str, Any]) -> None:
    """Check the record of a head's training against the head, and against the trainer's own record in its folder.

    Data, rate and figures leave no mark in a head; for those, manifest and record can only agree with each other.
    """
    training = manifest.training
    if training is None:
        return
    recipe = training.get("recipe")
    if not isinstance(recipe, dict):
        raise _says("that the head was trained", "kconv always records the recipe too")
    altered = manifest.conversion is not None
    for name in (*OF_RECIPE, *(name for name in OF_BLOCKS if name in spec)):
        if not (altered and name in OF_ATTENTION) and recipe.get(name) != spec[name]:
            raise _says(f"it was trained with {name} {recipe.get(name)}", f"the head has {spec[name]}")
    own = manifest.parameters_by_origin.trained
    # A reduced lm_head belongs to the head; only a conversion with its target could count it otherwise.
    reduced = recipe.get("draft_vocab")
    either = (own, own + reduced * spec["hidden"] if isinstance(reduced, int) else own)
    packed = any(step.action == "quantized" for step in manifest.tensors)
    if not altered and not packed and training.get("parameters") not in either:
        raise _says(f"{training.get('parameters')} parameters were trained", f"the head has {either[-1]:,} of these")
    record = folder / MODULE / REPORT
    if os.path.lexists(record):
        kept = read_json(record)
        data = training.get("data")
        # Only the manifest has digests of prompts.
        told = training | (
            {"data": {k: v for k, v in data.items() if k != "prompts"}} if isinstance(data, dict) else {}
        )
        for name in sorted(kept.keys() | told.keys()):
            if name not in OF_REPORT and kept.get(name) != told.get(name):
                raise _says(f"another {name} of the training than {MODULE}/{REPORT}", "one run wrote both")


def _count(head: Head) -> int:
    """Count a head's weights, as `convert.provenance.count_parameters` does: without scales and maps."""
    known = needs(head.spec)
    return sum(prod(known[slot].shape) for slot in head.places if slot in known and not known[slot].slot.dtype)


def _says(what: str, instead: str) -> ManifestMismatch:
    return mismatch(MANIFEST, f"it says {what}, but {instead}", AGAIN)
