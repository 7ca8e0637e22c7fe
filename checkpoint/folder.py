"""A checkpoint folder: config.json, safetensors, and license files."""

from __future__ import annotations

import fnmatch
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import ConfigInvalid, CorruptIndex, NotACheckpoint
from .header import IMPOSTORS, MAX_HEADER_BYTES, TensorInfo, read_header
from .pickles import PICKLE, read_pickle_header
from .schema import Json, parse_object, read_bounded
from .staging import is_partial

INDEX = "model.safetensors.index.json"
# The only weight file of a checkpoint that is not sharded.
WHOLE = "model.safetensors"
# File name endings of what kconv cannot read as a checkpoint: what it is, and what to do.
OTHERS = {
    ".gguf": ("a GGUF file, llama.cpp's format", "Give the checkpoint that it was made from."),
    **dict.fromkeys((".gz", ".tgz", ".tar", ".zip"), ("an archive", "Unpack it, and give the checkpoint's folder.")),
    "adapter_config.json": (
        "a LoRA adapter, not a draft head", "Merge it into its base model; that may then be a --target."
    ),
}  # fmt: skip
ReadHeader = Callable[[Path], dict[str, TensorInfo]]


@dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors, with its headers read but not its weights.

    Attributes:
        source: how the user named it: a path, or a hub id with its resolved revision.
        headers_only: the weights are on the Hub; `folder` and the tensors' files are names there, not paths.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo] = field(repr=False)
    source: str = ""
    headers_only: bool = False

    @property
    def files(self) -> list[Path]:
        """The weight files, sorted by name."""
        return sorted(self.by_file())

    def by_file(self) -> dict[Path, list[TensorInfo]]:
        found: dict[Path, list[TensorInfo]] = {}
        for info in self.tensors.values():
            found.setdefault(info.file, []).append(info)
        return found


def open_checkpoint(folder: Path, *, source: str = "") -> Checkpoint:
    """Read a folder's config and headers.

    Args:
        folder: a folder with config.json and either an index or *.safetensors; pytorch_model*.bin where it has none.
        source: how the user named it, for messages and the manifest; the folder's path if empty.

    Raises:
        NotACheckpoint: no such folder, or no config or safetensors in it.
        ConfigInvalid: config.json is not a JSON object.
        CorruptIndex: the index names a missing file or tensor, or a path outside the folder; or two files hold the
            same tensor.
        CorruptHeader: a file's header contradicts its data.
    """
    names = list_names(folder)
    if is_partial(folder):
        raise NotACheckpoint(
            f"{folder.name} was left behind by an interrupted kconv run",
            where=folder,
            fix="Delete it and run the command again.",
        )
    if "config.json" not in names:
        raise _without_config(folder)
    config = read_json(folder / "config.json")
    tensors = gather(folder, names, read_json(folder / INDEX) if INDEX in names else None)
    # A path may be other than UTF-8; the manifest must be UTF-8.
    return Checkpoint(folder, config, tensors, source or os.fsencode(folder).decode(errors="replace"))


def gather(
    folder: Path,
    names: set[str],
    index: Mapping[str, Any] | None,
    read: ReadHeader = read_header,
) -> dict[str, TensorInfo]:
    """Gather the tensors of a folder's safetensors files; with an index, only those that it names."""
    return _from_files(folder, names, read) if index is None else _from_index(folder, names, index, read)


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        NotACheckpoint: the file is missing, or not a regular file.
        ConfigInvalid: it is too large for a config or an index, or is not exactly one JSON object.
    """
    missing = NotACheckpoint(
        f"{file.parent} has no {file.name}",
        where=file.parent,
        fix="A checkpoint is a folder with config.json and *.safetensors; check the path.",
    )
    try:
        text = read_bounded(
            file,
            NotACheckpoint,
            limit=MAX_HEADER_BYTES,
            fix="Check the path and its links.",
            missing=missing,
            large=ConfigInvalid,
        )
    except NotACheckpoint as error:
        if error is missing:
            list_names(file.parent)  # without a folder, that is the error
        raise
    for mark, (what, fix) in IMPOSTORS.items():
        if text.startswith(mark):
            raise ConfigInvalid(f"{file.name} is {what}", where=file, fix=fix)
    try:
        return parse_object(text)
    except UnicodeDecodeError as fault:
        fix = "Save it as UTF-8 (Windows may have saved it as UTF-16), or export it again."
        raise ConfigInvalid(f"{file.name} is not text in UTF-8", where=file, fix=fix) from fault
    except ValueError as fault:
        why = fault if text.strip() else "it is empty"
        raise ConfigInvalid(
            f"{file.name} cannot be read: {why}", where=file, fix="Correct it there, or export it again."
        ) from fault


def list_names(folder: Path) -> set[str]:
    try:
        return {entry.name for entry in folder.iterdir()}
    except OSError as fault:
        raise no_folder(folder, fault) from fault


def no_folder(path: Path, fault: OSError) -> NotACheckpoint:
    """Return the error for a path that is no folder, with the most similar folder beside it."""
    if isinstance(fault, NotADirectoryError) and path.is_file():
        for mark, (what, fix) in OTHERS.items():
            if path.name.endswith(mark):
                return NotACheckpoint(f"{path} is {what}", fix=fix)
        known = f": {path.parent}" if (path.parent / "config.json").exists() else "."
        return NotACheckpoint(f"{path} is a file", fix=f"Give the checkpoint's folder{known}")
    beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, beside, n=1)
    meant = f" Did you mean {path.parent / close[0]}?" if close else ""
    if not isinstance(fault, FileNotFoundError):
        what = f"{path} is not a folder: {fault.strerror}"
    elif os.path.islink(path):  # noqa: PTH114 -- pathlib raises for a name that is too long
        what = f"{path} links to {path.readlink()}, which does not exist"
    else:
        what = f"there is no folder {path}"
    return NotACheckpoint(
        what,
        fix=f"Give a checkpoint folder; a Hub id is org/name, with a revision org/name@REVISION.{meant}",
    )


def _without_config(folder: Path) -> NotACheckpoint:
    """Return the error for a folder without a config; it may hold something else, or checkpoints in subfolders."""
    held = {file.name for file in folder.iterdir()}
    for mark, (what, fix) in OTHERS.items():
        if any(name.endswith(mark) for name in held):
            return NotACheckpoint(f"{folder.name} holds {what}, but no config.json", where=folder, fix=fix)
    # Including the snapshots of a folder in the Hub's cache.
    found = [*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")]
    inner = sorted(str(file.parent.relative_to(folder)) for file in found)
    what, fix = "", "A checkpoint is a folder with config.json and *.safetensors; check the path."
    if inner:
        what = f", but these subfolders have one: {', '.join(inner[:5])}"
        fix = f"Give one of them, e.g. {folder / inner[0]}"
    elif (folder.parent / "config.json").exists():
        what, fix = ", but the folder around it has one", f"Give that: {folder.parent}"
    return NotACheckpoint(f"{folder} has no config.json{what}", where=folder, fix=fix)


def _from_files(folder: Path, names: set[str], read: ReadHeader) -> dict[str, TensorInfo]:
    files = [folder / name for name in sorted(names) if name.endswith(".safetensors")]
    if not files and read is read_header and (pickled := fnmatch.filter(sorted(names), PICKLE)):
        files, read = [folder / name for name in pickled], read_pickle_header
    if not files:
        for mark, (what, fix) in OTHERS.items():
            if any(name.endswith(mark) for name in names):
                raise NotACheckpoint(f"{folder.name} holds {what}, but no *.safetensors", where=folder, fix=fix)
        pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
        fix = (
            f"Save the tensors of {pickles[0]} with safetensors.torch.save_file; kconv does not read this pickle."
            if pickles
            else "Check the path; a download may be incomplete."
        )
        raise NotACheckpoint(f"{folder.name} holds no *.safetensors", where=folder, fix=fix)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        header = read(file)
        for name in sorted(header.keys() & tensors.keys()):
            raise CorruptIndex(
                f"{name} is in both {tensors[name].file.name} and {file.name}",
                where=folder,
                fix="Remove the wrong file. Engines would use either one.",
            )
        tensors |= header
    return tensors


def _from_index(
    folder: Path, names: set[str], held_by_index: Mapping[str, Any], read: ReadHeader
) -> dict[str, TensorInfo]:
    index = folder / INDEX
    weight_map: Json = held_by_index.get("weight_map")
    if not isinstance(weight_map, dict) or not {str}.issuperset(map(type, weight_map.values())):
        raise CorruptIndex("the index has no weight_map of file names", where=index, fix="Export it again.")
    headers: dict[str, dict[str, TensorInfo]] = {}
    for name in sorted(set(weight_map.values())):
        # A hub cache links its files out of the folder; a *name* that leaves it is never right.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CorruptIndex(
                f"the index names {name!r}, which is not a *.safetensors file in its folder",
                where=index,
                fix="Do not use this checkpoint unless you trust the author of its index.",
            )
        if name not in names:
            fix = "Fetch the missing shard."
            if WHOLE in names:
                fix = f"Fetch the missing shard; or, if {WHOLE} holds all weights, delete the index."
            raise CorruptIndex(f"the index names {name}, which is missing", where=index, fix=fix)
        headers[name] = read(folder / name)
    try:
        placed = {tensor: headers[file][tensor] for tensor, file in weight_map.items()}
    except KeyError as absent:
        tensor = absent.args[0]
        what = f"{weight_map[tensor]} does not hold {tensor}"
        raise CorruptIndex(what, where=index, fix="Fetch the shard again.") from absent
    # Every indexed tensor is where the index says, so extra ones are duplicates in another file, or not indexed.
    if sum(map(len, headers.values())) > len(placed):
        held = Counter(chain.from_iterable(headers.values()))
        stray = [name for name in held if name not in weight_map or held[name] > 1]
        raise CorruptIndex(
            f"the shards hold {len(stray)} tensors that the index does not place, among them {stray[0]}",
            where=index,
            fix="Export the checkpoint again. Index and shards come from different runs.",
        )
    for name in sorted(names - headers.keys()):
        # A whole copy in Mistral's format, which TensorRT-LLM skips by its name (`beside_index` links the lines).
        if name.endswith(".safetensors") and "consolidated" not in name and read(folder / name).keys() & placed.keys():
            raise beside_index(name, index)
    return placed


def beside_index(name: str, index: Path | str) -> CorruptIndex:
    """Return the error for a file that holds tensors which the index places elsewhere, so that readers disagree.

    transformers prefers model.safetensors to any index, vLLM reads what the index names, and TensorRT-LLM reads every
    file and keeps the last of two tensors with one name:
    https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/modeling_utils.py#L612-L628
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/model_loader/weight_utils.py#L585-L611
    https://github.com/NVIDIA/TensorRT-LLM/blob/02086d89ee95f725414743a33a436473604202e9/tensorrt_llm/_torch/models/checkpoints/hf/weight_loader.py#L66-L75
    """
    return CorruptIndex(
        f"{name} holds tensors that the index places in other files: TensorRT-LLM reads all files,"
        f" transformers reads {WHOLE} first, vLLM reads only what the index names",
        where=index,
        fix=f"Find out which one is right, and remove {name}, or the index and its shards.",
    )


def locate(
    wanted: Iterable[str],
    files: Iterable[str],
    fetch: Callable[[str], Path],
    read: Callable[[str], dict[str, TensorInfo]] | None = None,
) -> dict[str, TensorInfo]:
    """Find some tensors of a checkpoint; those that it lacks are left out.

    Args:
        fetch: returns the path of a file, and may download it.
        read: returns a file's header without downloading the file; None to fetch the file instead.
    """
    wanted, files = set(wanted), set(files)
    shards = {name for name in files if name.endswith(".safetensors")}
    if INDEX in files:
        placed: Json = read_json(fetch(INDEX)).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
            raise CorruptIndex("the index has no weight_map of file names", where=INDEX, fix="Fetch it again.")
        named = {placed[name] for name in wanted & placed.keys()}
        # A name outside the listing could lead out of the folder.
        if not named <= shards:
            raise CorruptIndex(
                f"the index names {', '.join(sorted(named - shards))}, which is missing",
                where=INDEX,
                fix="Fetch the missing shard.",
            )
        # By its name: on the Hub, looking inside would mean downloading the whole file.
        if WHOLE in shards and WHOLE not in placed.values():
            raise beside_index(WHOLE, INDEX)
        shards = named
    found: dict[str, TensorInfo] = {}
    for shard in sorted(shards):
        header = read(shard) if read else read_header(fetch(shard))
        for name in sorted(wanted & header.keys() & found.keys()):
            raise CorruptIndex(
                f"{name} is in both {found[name].file.name} and {shard}",
                where=shard,
                fix="Remove the wrong file. Engines would use either one.",
            )
        found |= {name: header[name] for name in wanted & header.keys()}
    return found


# Licenses and notices next to the weights.
#
# Publishers use upper and lower case; GitHub's own finder accepts both:
# https://github.com/licensee/licensee/blob/v10.1.0/lib/licensee/project_files/license_file.rb#L23-L27

# Files that may hold a license's text.
LICENSE_TEXTS = ("LICENSE*", "LICENCE*", "COPYING*")
# Files that a card must repeat, or a release must include.
LICENSE_FILES = (*LICENSE_TEXTS, "NOTICE*", "THIRD_PARTY*")


def in_any_case(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return glob patterns that take letters of either case, e.g. "[Mm][Ii][Tt]*" for "MIT*".

    huggingface_hub and, before Python 3.12, `Path.glob` are case-sensitive, with no option to change that.
    """
    return tuple(
        "".join(f"[{letter.upper()}{letter.lower()}]" if letter.isalpha() else letter for letter in pattern)
        for pattern in patterns
    )
