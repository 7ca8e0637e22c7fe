"""pytorch_model.bin, for heads published in no other format: where its tensors' bytes are.

`torch.save` writes a zip archive of uncompressed members: a pickle that describes the tensors, and each storage's
bytes in one piece. A pickle is a program, so kconv does not run it: it follows the few steps that torch.save writes for
tensors, dicts and plain values, and refuses any other step or name before it does anything. torch's own
`weights_only=True` would not do: it also calls bytearray, with whatever number the file says. The bytes are then
streamed from the file like those of a safetensors file:
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/serialization.py
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..errors import CorruptHeader, NotACheckpoint
from .header import BITS, MAX_DIMS, TensorInfo

# Limits on the pickle's bytes and steps; a tensor takes about 300 and 50. A step of one byte makes an object of up to
# 130 bytes.
MAX_PICKLE, MAX_STEPS = 8 << 20, 1 << 19
# Limit on the archive's list of members, which Python reads at once; a member takes about 100 bytes, and 700 in memory.
MAX_DIRECTORY = 1 << 20
# The file names that transformers and engines look for.
PICKLE = "pytorch_model*.bin"
BY_HAND = (
    "If you trust it, save it as safetensors in Python: d = torch.load('{0}', weights_only=True);"
    " safetensors.torch.save_file({{k: v.clone().contiguous() for k, v in d.items()}}, 'model.safetensors')"
)
# The dtype of a storage by its class, and of a tensor by the name of its dtype, where no storage class has it.
STORAGES = {
    "FloatStorage": "F32", "DoubleStorage": "F64", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64",
}  # fmt: skip
DTYPES = {
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "uint16": "U16",
    "uint32": "U32", "uint64": "U64",
}  # fmt: skip
# Opcodes that put a value on the stack, and those that put a constant there.
VALUES = frozenset("BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE".split())
CONSTANTS: Mapping[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
LOCAL_HEADER = struct.Struct("<4s22xHH")


class Refused(ValueError):
    """A step or a name that torch.save does not write for tensors."""


class _Bounded(io.BufferedReader):
    """A file of which `zipfile` reads no more than `most` bytes at once, whatever sizes it states."""

    most = MAX_DIRECTORY

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > self.most:
            raise Refused("its archive's directory is too large")
        return super().read(size)


class Storage(NamedTuple):
    """A member of the archive: its dtype ("" if only its tensors have one), its first byte, and its size in bytes."""

    dtype: str
    begin: int
    size: int


class Stored(NamedTuple):
    """A tensor as the pickle describes it; whether it lies in its storage is checked by `_info`."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


# What a pickle may hold.
Pickled = dict[Any, Any] | list[Any] | tuple[Any, ...] | Storage | Stored | str | float | None


def _tensor_v2(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Stored:
    return _tensor_v3(storage, offset, shape, stride, None, None, storage.dtype)


def _tensor_v3(
    storage: Pickled, offset: Any, shape: Pickled, stride: Pickled, _: Any, __: Any, dtype: Pickled
) -> Stored:
    if not (
        isinstance(storage, Storage)
        and isinstance(dtype, str)
        and isinstance(shape, tuple)
        and isinstance(stride, tuple)
        and len(shape) == len(stride) <= MAX_DIMS
        and all(type(one) is int and 0 <= one < 2**63 for one in (offset, *shape, *stride))
    ):
        raise Refused("it describes a tensor by something other than numbers")
    return Stored(storage, dtype, offset, shape, stride)


def _empty() -> dict[str, Any]:
    # Without arguments: each call with a long list would copy it.
    return {}


def _parameter(tensor: Any, *_: Any) -> Any:
    return tensor


# What a pickle may name, and what it stands for here. https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_utils.py
NAMES: Mapping[str, Any] = {
    "collections OrderedDict": _empty,
    "torch._utils _rebuild_tensor_v2": _tensor_v2,
    "torch._utils _rebuild_tensor_v3": _tensor_v3,
    "torch._utils _rebuild_parameter": _parameter,
    "torch.storage UntypedStorage": "",
    **{f"torch {name}": dtype for name, dtype in (STORAGES | DTYPES).items()},
}


def read_pickle_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a torch.save file; reads no tensor bytes and runs none of its code."""
    loaded: Pickled = read_pickle(file)
    if not isinstance(loaded, dict):
        raise NotACheckpoint(
            f"{file.name} holds a {type(loaded).__name__} instead of named tensors",
            where=file,
            fix=BY_HAND.format(file.name),
        )
    return {name: _info(name, tensor, file) for name, tensor in loaded.items()}


def read_pickle(file: Path) -> Any:
    """Return what a torch.save file holds: dicts by text, lists, tuples, plain values, and `Stored` tensors.

    Raises:
        NotACheckpoint: it is not a torch.save archive, or its pickle does or names anything else.
        CorruptHeader: its archive is compressed.
    """
    # Opening a pipe would block forever.
    if not file.is_file():
        raise NotACheckpoint(f"{file.name} is not a regular file", where=file, fix="Check the path and its links.")
    try:
        with _Bounded(io.FileIO(file)) as bounded, zipfile.ZipFile(bounded) as archive, file.open("rb") as opened:
            bounded.most = MAX_PICKLE
            # Checked before reading: compressed data may grow a thousandfold.
            members = {member.filename: member for member in archive.infolist()}
            [pickled] = [name for name in members if name.endswith("/data.pkl")]
            prefix = pickled.removesuffix("data.pkl")
            order = members.get(f"{prefix}byteorder")
            small = all(one.file_size <= MAX_PICKLE for one in (members[pickled], order) if one)
            stored = small and all(member.compress_type == zipfile.ZIP_STORED for member in members.values())
            if stored and (order is None or archive.read(order) == b"little"):

                def find(key: str) -> tuple[int, int]:
                    member = members[f"{prefix}data/{key}"]
                    opened.seek(member.header_offset)
                    mark, name, extra = LOCAL_HEADER.unpack(opened.read(LOCAL_HEADER.size))
                    if mark != b"PK\x03\x04":
                        raise ValueError("a member is not where the archive says")
                    return opened.tell() + name + extra, member.file_size

                if len(members) < len(archive.infolist()):
                    raise ValueError("two members have one name")
                return _follow(archive.read(pickled), find)
    except Exception as fault:  # an untrusted archive and pickle: anything may be missing or of another type
        why = str(fault) if isinstance(fault, Refused) else type(fault).__name__
        raise NotACheckpoint(
            f"{file.name} cannot be read as plain tensors: {why}",
            where=file,
            fix="Fetch it again: it is cut off."
            if isinstance(fault, zipfile.BadZipFile) and _is_archive(file)
            else f"Ask its publisher for safetensors. {BY_HAND.format(file.name)}",
        ) from fault
    raise CorruptHeader(
        f"{file.name} is compressed or big-endian, or its pickle is too large; torch.save writes none of these",
        where=file,
        fix="Fetch it again.",
    )


def _is_archive(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(4) == b"PK\x03\x04"


def _follow(data: bytes, find: Callable[[str], tuple[int, int]]) -> Any:
    """Return the value that a pickle describes; `find` returns where a storage is by its key."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    # Reads nothing beyond `data`, whatever lengths it states.
    for count, (code, argument, _) in enumerate(pickletools.genops(data)):
        if count == MAX_STEPS:
            raise Refused(f"it has more than {MAX_STEPS:,} steps")
        step, value = code.name, cast(Any, argument)
        if step in VALUES:
            stack.append(value)
        elif step in CONSTANTS:
            stack.append(CONSTANTS[step])
        elif step in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if step == "EMPTY_DICT" else [])
        elif step in ("BINPUT", "LONG_BINPUT"):
            memo[value] = stack[-1]
        elif step in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value])
        elif step == "MARK":
            marks.append(len(stack))
        elif step == "TUPLE" or step in TUPLES:
            at = marks.pop() if step == "TUPLE" else len(stack) - TUPLES[step]
            stack[at:] = [tuple(stack[at:])]
        elif step in ("SETITEM", "SETITEMS", "APPEND", "APPENDS"):
            at = marks.pop() if step.endswith("S") else len(stack) - (2 if step == "SETITEM" else 1)
            _fill(stack[at - 1], stack[at:])
            del stack[at:]
        elif step == "GLOBAL":
            if value not in NAMES:
                raise Refused(f"it names {value.replace(' ', '.')}")
            stack.append(NAMES[value])
        elif step == "BINPERSID":
            _, dtype, key, _, _ = stack.pop()
            if not isinstance(key, str):
                raise Refused("it names a storage by something other than text")
            stack.append(Storage(dtype, *find(key)))
        elif step == "REDUCE":
            given = stack.pop()
            stack[-1] = stack[-1](*given)
        elif step == "BUILD":
            stack.pop()  # what torch adds to a dict of weights about its modules
        elif step == "STOP":
            return stack.pop()
        elif step != "PROTO":
            raise Refused(f"it does {step}")
    raise ValueError("the pickle has no end")


def _fill(into: Pickled, items: list[Any]) -> None:
    if isinstance(into, list):
        into += items
        return
    # Deep tuples as keys would overflow the stack when they are hashed.
    if not isinstance(into, dict) or not all(isinstance(key, str | int) for key in items[::2]):
        raise Refused("it fills something other than a dict or a list")
    into.update(zip(items[::2], items[1::2], strict=True))


def _info(name: object, tensor: Any, file: Path) -> TensorInfo:
    if not (isinstance(name, str) and isinstance(tensor, Stored) and tensor.dtype in BITS):
        raise NotACheckpoint(
            f"{name} in {file.name} is not a plain tensor of a known dtype",
            where=file,
            fix=BY_HAND.format(file.name),
        )
    width = BITS[tensor.dtype] // 8
    # Each dim's stride in a tensor without gaps; that of a dim of one has no effect.
    strides = [prod(tensor.shape[at + 1 :]) for at in range(len(tensor.shape))]
    dims = zip(tensor.shape, tensor.stride, strides, strict=True)
    if 0 not in tensor.shape and any(size > 1 and stride != wanted for size, stride, wanted in dims):
        raise NotACheckpoint(
            f"{name} in {file.name} is stored with its dimensions in another order",
            where=file,
            fix=BY_HAND.format(file.name),
        )
    count = prod(tensor.shape)
    begin = tensor.storage.begin + tensor.offset * width
    if (tensor.offset + count) * width > tensor.storage.size:
        raise CorruptHeader(f"{name} lies outside {file.name}", where=file, fix="Fetch the file again.")
    return TensorInfo(name, tensor.dtype, tensor.shape, file, begin, count * width)
