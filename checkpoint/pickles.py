"""pytorch_model.bin, for heads published in no other format: where its tensors' bytes are.

`torch.save` writes a zip archive of uncompressed members: a pickle that describes the tensors, and each storage's
bytes in one piece. `torch.load(weights_only=True, map_location="meta")` unpickles tensors, dicts and numbers and
nothing that could run, reads no storage, and notes where each begins. The bytes are then streamed from the file like
those of a safetensors file:
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/serialization.py
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CorruptHeader, NotACheckpoint
from .header import TensorInfo

# Limit on the unpickled bytes; a tensor takes about 300.
MAX_PICKLE = 8 << 20
# The file names that transformers and engines look for.
PICKLE = "pytorch_model*.bin"
BY_HAND = (
    "If you trust it, save it as safetensors in Python: d = torch.load('{0}', weights_only=True);"
    " safetensors.torch.save_file({{k: v.clone().contiguous() for k, v in d.items()}}, 'model.safetensors')"
)


def read_pickle_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a torch.save file; reads no tensor bytes and runs none of its code.

    Args:
        file: a .bin file.

    Raises:
        NotACheckpoint: it is not a torch.save archive, or holds something other than tensors by name.
        CorruptHeader: its archive is compressed, or its tensors are not where it says.
    """
    import torch

    from .tensors import NAMES

    # Opening a pipe would block forever.
    if not file.is_file():
        raise NotACheckpoint(f"{file.name} is not a regular file", where=file, fix="Check the path and its links.")
    try:
        with zipfile.ZipFile(file) as archive:
            # Checked before reading: compressed data may grow a thousandfold.
            members = archive.infolist()
            order = next((m for m in members if m.filename.endswith("/byteorder")), None)
            small = all(m.file_size <= MAX_PICKLE for m in members if m.filename.endswith(("/data.pkl", "/byteorder")))
            stored = small and all(member.compress_type == zipfile.ZIP_STORED for member in members)
            little = stored and (order is None or archive.read(order) == b"little")
        loaded = {} if not little else torch.load(file, weights_only=True, map_location="meta")
    except Exception as fault:  # an untrusted pickle: torch may raise anything
        raise NotACheckpoint(
            f"{file.name} cannot be read as plain tensors: {type(fault).__name__}",
            where=file,
            fix=f"Ask its publisher for safetensors. {BY_HAND.format(file.name)}",
        ) from fault
    if not little:
        raise CorruptHeader(
            f"{file.name} is compressed or big-endian, or its pickle is too large; torch.save writes none of these",
            where=file,
            fix="Fetch it again.",
        )
    if not isinstance(loaded, Mapping) or not all(isinstance(name, str) for name in loaded):
        raise NotACheckpoint(
            f"{file.name} holds a {type(loaded).__name__} instead of named tensors",
            where=file,
            fix=BY_HAND.format(file.name),
        )
    size = file.stat().st_size
    return {name: _info(name, tensor, file, size, NAMES) for name, tensor in loaded.items()}


def _info(name: str, tensor: Any, file: Path, size: int, names: Mapping[Any, str]) -> TensorInfo:
    import torch

    begin = None
    if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.dtype in names:
        begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if begin is None:
        raise NotACheckpoint(
            f"{name} in {file.name} is not a plain tensor of a known dtype, or the file is older than torch 1.6",
            where=file,
            fix=BY_HAND.format(file.name),
        )
    if not tensor.is_contiguous():
        raise NotACheckpoint(
            f"{name} in {file.name} is stored with its dimensions in another order",
            where=file,
            fix=BY_HAND.format(file.name),
        )
    begin += tensor.storage_offset() * tensor.element_size()
    count = tensor.numel() * tensor.element_size()
    if begin < 0 or begin + count > size:
        raise CorruptHeader(f"{name} lies outside {file.name}", where=file, fix="Fetch the file again.")
    return TensorInfo(name, names[tensor.dtype], tuple(tensor.shape), file, begin, count)
