"""A checkpoint folder: config.json and safetensors. What belongs here: opening one, without reading a value."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigInvalid, CorruptIndex, NotACheckpoint
from .header import TensorInfo, read_header
from .staging import is_partial

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors, with every header read and no value.

    Attributes:
        folder: where it is.
        config: its config.json.
        tensors: what its files hold, by tensor name.
        source: how the user named it: a path, or a hub id with its resolved revision.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo] = field(repr=False)
    source: str = ""

    @property
    def files(self) -> list[Path]:
        """The weight files, sorted by name."""
        return sorted({info.file for info in self.tensors.values()})


def open_checkpoint(folder: Path, *, source: str = "") -> Checkpoint:
    """Read a folder's config and headers.

    Args:
        folder: a folder with config.json and either an index or *.safetensors.
        source: how the user named it, for messages and the manifest; the folder's path if empty.

    Raises:
        NotACheckpoint: no such folder, or no config or safetensors in it.
        ConfigInvalid: config.json is not a JSON object.
        CorruptIndex: the index names a missing file or tensor, or a path outside the folder.
        CorruptHeader: a file's header lies.
    """
    if not folder.is_dir():
        raise NotACheckpoint(f"{folder} is not a folder", fix="Give a checkpoint folder or a hub id org/name.")
    if is_partial(folder):
        raise NotACheckpoint(
            f"{folder.name} is what an interrupted kconv run left behind",
            where=folder,
            fix="Delete it and run the command again.",
        )
    config = read_json(folder / "config.json")
    index = folder / INDEX
    tensors = _from_index(folder, index) if index.exists() else _from_files(folder)
    return Checkpoint(folder, config, tensors, source or str(folder))


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        NotACheckpoint: the file is missing.
        ConfigInvalid: it holds something else than one JSON object.
    """
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError as fault:
        raise NotACheckpoint(
            f"{file.parent.name} has no {file.name}",
            where=file.parent,
            fix="A checkpoint is a folder with config.json and *.safetensors; check the path.",
        ) from fault
    except OSError as fault:
        raise NotACheckpoint(f"{file.name} cannot be read: {fault.strerror}", where=file) from fault
    except (ValueError, RecursionError) as fault:
        raise ConfigInvalid(f"{file.name} is not JSON: {fault}", where=file, fix="Export it again.") from fault
    if not isinstance(value, dict):
        raise ConfigInvalid(f"{file.name} is not a JSON object", where=file, fix="Export it again.")
    return value


def _from_files(folder: Path) -> dict[str, TensorInfo]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth"})
        fix = (
            f"kconv reads no pickles; save {pickles[0]} as safetensors first."
            if pickles
            else "Check the path; a download may be incomplete."
        )
        raise NotACheckpoint(f"{folder.name} holds no *.safetensors", where=folder, fix=fix)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        header = read_header(file)
        for name in header.keys() & tensors.keys():
            raise CorruptIndex(
                f"{name} stands in {tensors[name].file.name} and in {file.name}",
                where=folder,
                fix=f"Remove the file that does not belong, or add {INDEX} to say which one counts.",
            )
        tensors |= header
    return tensors


def _from_index(folder: Path, index: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CorruptIndex("the index has no weight_map of file names", where=index, fix="Export it again.")
    headers: dict[str, dict[str, TensorInfo]] = {}
    for name in sorted(set(weight_map.values())):
        # A hub cache links its files out of the folder; a *name* that leaves it is never right.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CorruptIndex(
                f"the index names {name!r}, which is no *.safetensors file of its own folder",
                where=index,
                fix="Do not use this checkpoint before you know who wrote its index.",
            )
        if not (folder / name).exists():
            raise CorruptIndex(
                f"the index names {name}, which is not there", where=index, fix="Fetch the missing shard."
            )
        headers[name] = read_header(folder / name)
    for tensor, file in weight_map.items():
        if tensor not in headers[file]:
            raise CorruptIndex(f"{file} does not hold {tensor}", where=index, fix="Fetch the shard again.")
    held = Counter(name for header in headers.values() for name in header)
    stray = [name for name in held if name not in weight_map or held[name] > 1]
    if stray:
        raise CorruptIndex(
            f"the shards hold {len(stray)} tensors that the index does not place, among them {stray[0]}",
            where=index,
            fix="Export the checkpoint again; index and shards are of different runs.",
        )
    return {tensor: headers[file][tensor] for tensor, file in weight_map.items()}
