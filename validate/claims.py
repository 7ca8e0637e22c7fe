"""What a manifest says of a head beside its bytes, derived again from the head itself.

`checkpoint.manifest.verify` holds bytes and what follows from the manifest alone. What the head is, which layers it
captures and how many weights it has, a manifest might say of any bytes; here they are read anew.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from math import prod

from ..checkpoint.folder import Checkpoint
from ..checkpoint.manifest import MANIFEST, Manifest, mismatch
from ..checkpoint.schema import parse_json
from ..convert.captured import Hints
from ..convert.read import Head, read
from ..engines import by_name
from ..errors import ManifestMismatch
from ..head.slots import needs

AGAIN = "Fetch the folder again, or convert the head again with kconv."


def check_claims(checkpoint: Checkpoint, manifest: Manifest, source: Checkpoint | None = None) -> None:
    """Hold what a manifest says of a head against the head, and how its source was read against the source.

    Of a target nothing is derived: its manifest speaks of a recipe.

    Args:
        checkpoint: the folder that the manifest lies in, whose bytes match it.
        manifest: what it says.
        source: what the head was made of, where it is at hand.

    Raises:
        ManifestMismatch: one of these is said otherwise than it is.
        KconvError: the head cannot be read.
    """
    if manifest.spec.get("kind") == "target":
        return
    head = read(checkpoint, layout=by_name(manifest.layout)).sound_head()
    # As JSON has it: tuples are lists there.
    spec = parse_json(json.dumps(asdict(head.spec) | {"kind": head.spec.kind}))
    stated = parse_json(json.dumps(manifest.spec))
    for name in sorted(spec.keys() | stated.keys()):
        if name in spec and name in stated and stated[name] != spec[name]:
            raise _says(f"{name} {stated[name]}", f"the head has {spec[name]}")
    missing = sorted(spec.keys() - stated.keys())
    if missing:
        raise _says("nothing of the head's " + ", ".join(missing), "every output's manifest does")
    counted = _count(head)
    if manifest.parameters != counted:
        raise _says(f"{manifest.parameters:,} parameters", f"the head has {counted:,}")
    if source is None:
        return
    read_by = read(source, layout=by_name(manifest.source_layout), hints=Hints(**manifest.hints.model_dump()))
    if read_by.captured is not None and read_by.captured.how != manifest.captured_by:
        raise _says(f"the captured layers were decided so: {manifest.captured_by}", f"it is {read_by.captured.how}")


def _count(head: Head) -> int:
    """Count a head's weights, as `convert.provenance.count_parameters` does: scales and maps are none."""
    known = needs(head.spec)
    return sum(prod(known[slot].shape) for slot in head.places if slot in known and not known[slot].slot.dtype)


def _says(what: str, instead: str) -> ManifestMismatch:
    return mismatch(MANIFEST, f"it says {what}, and {instead}", AGAIN)
