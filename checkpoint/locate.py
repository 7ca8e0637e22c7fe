"""A few tensors of a large checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import CorruptIndex
from .folder import INDEX, WHOLE, beside_index, read_json
from .header import TensorInfo, read_header


def locate(wanted: Iterable[str], files: Iterable[str], fetch: Callable[[str], Path]) -> dict[str, TensorInfo]:
    """Find some tensors of a checkpoint.

    Args:
        wanted: tensor names.
        files: names of the checkpoint's files.
        fetch: gives the path of one of them, which may take a download.

    Returns:
        Those of the tensors that the checkpoint holds, by name.

    Raises:
        ConfigInvalid, CorruptIndex, CorruptHeader: the index, or a file that should hold one of them, lies; or two
            files hold the same.
    """
    wanted, files = set(wanted), set(files)
    shards = {name for name in files if name.endswith(".safetensors")}
    if INDEX in files:
        placed = read_json(fetch(INDEX)).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
            raise CorruptIndex("the index has no weight_map of file names", where=INDEX, fix="Fetch it again.")
        named = {placed[name] for name in wanted & placed.keys()}
        # A name outside the listing could lead out of the folder.
        if not named <= shards:
            raise CorruptIndex(
                f"the index names {', '.join(sorted(named - shards))}, which is not there",
                where=INDEX,
                fix="Fetch the missing shard.",
            )
        # By its name: on the Hub, looking into it would take a download of all of it.
        if WHOLE in shards and WHOLE not in placed.values():
            raise beside_index(WHOLE, INDEX)
        shards = named
    found: dict[str, TensorInfo] = {}
    for shard in sorted(shards):
        header = read_header(fetch(shard))
        for name in wanted & header.keys() & found.keys():
            raise CorruptIndex(
                f"{name} stands in {found[name].file.name} and in {shard}",
                where=shard,
                fix="Remove the file that does not belong; engines would take either one's.",
            )
        found |= {name: header[name] for name in wanted & header.keys()}
    return found
