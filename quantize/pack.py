"""Pack a weight as NVFP4, bit for bit with the arithmetic of ModelOpt's NVFP4QTensor.

A block's scale follows from its largest magnitude, or is searched for: `mse` takes of all e4m3 numbers the one with the
least squared error, `four-over-six` the better of the two that make the largest magnitude 6 or 4. Both are ModelOpt's,
https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/quantization/calib/mse.py

The loops are pack.c's if there is a compiler, otherwise torch's. Compiled code is used only after its results agreed
with torch's.
https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/quantization/qtensor/nvfp4_tensor.py
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch

from ..checkpoint.formats import E2M1_MAX, E4M3_MAX, NVFP4, Int4
from ..checkpoint.staging import cache_root
from .recipe import WeightScales


def amax(weight: torch.Tensor) -> float:
    """Return the largest magnitude; NaN if there is a NaN."""
    return float(torch.stack(torch.aminmax(weight)).abs().max())


# The largest block scale before the search of four-over-six, which multiplies it by 1.5 or leaves it.
FOUR_OVER_SIX_MAX = 256.0


def scale_2(largest: float, scales: WeightScales = "max") -> torch.Tensor:
    """Return the weight_scale_2, float32 [], for a largest magnitude."""
    whole = E2M1_MAX * FOUR_OVER_SIX_MAX if scales == "four-over-six" else NVFP4.largest
    return torch.tensor(largest, dtype=torch.float32) / whole


def pack(weight: torch.Tensor, weight_scale_2: float, scales: WeightScales = "max") -> Packed:
    """Pack a weight [out, in], finite and with a multiple of sixteen columns, on its device.

    `weight_scale_2` is above 0, and from `scale_2` with the same `scales`. On a GPU ModelOpt's own operations do the
    work, with the block scales that torch finds if they are searched for.
    """
    if weight.is_cuda:
        return _pack_with_modelopt(weight, weight_scale_2, scales)
    return fastest()(weight, weight_scale_2, scales)


def unpack(packed: Packed, weight_scale_2: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a packed weight, [out, in], computed in float32 and rounded once."""
    return NVFP4.unpack(packed.stored(torch.tensor(weight_scale_2, dtype=torch.float32))).to(dtype)


def _pack_with_modelopt(weight: torch.Tensor, weight_scale_2: float, scales: WeightScales) -> Packed:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    shared = torch.tensor(weight_scale_2, dtype=torch.float32, device=weight.device)
    blocks = weight.float().unflatten(-1, (-1, NVFP4.group))
    found = None if scales == "max" else SCALES[scales](blocks, shared)
    made: Any = NVFP4QTensor.quantize(weight, NVFP4.group, found, shared, try_tensorrt=False)
    return Packed(made[0]._quantized_data, made[1])


# The smallest e4m3; a block scale that rounds to zero would make its block infinite.
SMALLEST = 2.0**-9
# Numbers packed at a time: the intermediate values stay in a core's cache.
PART = 1 << 17


@dataclass(frozen=True)
class Packed:
    """A weight [out, in] in NVFP4: two nibbles to a byte, U8 [out, in/2], and block scales, e4m3 [out, in/16]."""

    weight: torch.Tensor
    weight_scale: torch.Tensor

    def stored(self, scale_2: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors from which the weight is read, by suffix."""
        return {NVFP4.values: self.weight, NVFP4.scale: self.weight_scale, NVFP4.scale_2: scale_2}


def pack_plain(weight: torch.Tensor, weight_scale_2: float, search: WeightScales = "max") -> Packed:
    """Pack a weight in torch; arguments as in `pack`."""
    rows, columns = weight.shape
    nibbles = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(rows, columns // NVFP4.group, dtype=torch.float8_e4m3fn)
    shared = torch.tensor(weight_scale_2, dtype=torch.float32)
    step = max(PART // columns, 1)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        # In float32, whatever the weight's dtype.
        blocks = weight[part].float().unflatten(-1, (-1, NVFP4.group))
        scales[part] = SCALES[search](blocks, shared)
        nibbles[part] = _nibbles((blocks / (scales[part].float() * shared).unsqueeze(-1)).flatten(-2))
    return Packed(nibbles, scales)


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    largest = blocks.abs()
    for half in (8, 4, 2, 1):  # several times as fast as a reduction over a short dim
        largest = torch.maximum(largest[..., :half], largest[..., half:])
    return largest.squeeze(-1)


def _e4m3(scale: torch.Tensor) -> torch.Tensor:
    return scale.clamp_(min=SMALLEST, max=E4M3_MAX).to(torch.float8_e4m3fn)


def _scales(blocks: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    scale = _largest(blocks) / (E2M1_MAX * shared)
    scale[scale == 0] = 1.0
    return _e4m3(scale)


def _scales_mse(blocks: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Return the scale of the least loss among all e4m3 numbers, the smaller of equal ones.

    pack.c says which numbers need no trial. Where squares are beyond float32, it is the largest magnitude's scale.
    """
    largest = _largest(blocks)
    first = _e4m3(largest / (E2M1_MAX * shared)).view(torch.uint8).int()
    best, found = first.clone(), torch.full_like(largest, torch.inf)
    for step in range(-16, 16):
        code = first + step
        divisors = code.clamp(1, 126).to(torch.uint8).view(torch.float8_e4m3fn).float() * shared
        losses = _losses(blocks, divisors)
        better = (code >= 1) & (code <= 126) & ((code < 16) | (divisors * 3.5 < largest)) & (losses < found)
        best, found = torch.where(better, code, best), torch.where(better, losses, found)
    return best.to(torch.uint8).view(torch.float8_e4m3fn)


def _scales_four_over_six(blocks: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Return the scale that makes the largest magnitude 6, or the one that makes it 4 if that loses less."""
    largest = _largest(blocks)
    # The weight's amax / 6. ModelOpt has it; (x / 3) * 3 is x in binary arithmetic, so it is exactly that here.
    whole = shared * (E2M1_MAX * FOUR_OVER_SIX_MAX) / E2M1_MAX

    def scale(amaxes: torch.Tensor) -> torch.Tensor:
        found = amaxes / E2M1_MAX
        found[found == 0] = 1.0
        return _e4m3(found * FOUR_OVER_SIX_MAX / whole)

    six, four = scale(largest), scale(largest * 1.5)
    better = _losses(blocks, four.float() * shared) < _losses(blocks, six.float() * shared)
    return torch.where(better, four.view(torch.uint8), six.view(torch.uint8)).view(torch.float8_e4m3fn)


SCALES = {"max": _scales, "mse": _scales_mse, "four-over-six": _scales_four_over_six}


def _losses(blocks: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squared errors of each block."""
    sizes = blocks.abs()
    scaled = sizes * (1.0 / divisors).unsqueeze(-1)
    scaled = torch.where(scaled < E2M1_MAX, scaled, E2M1_MAX)  # NaN too: 0 / 0, where a divisor underflows
    coarse = torch.where(scaled < 4, scaled.round(), (scaled / 2).round() * 2)
    errors = sizes - torch.where(scaled < 2, (scaled * 2).round() / 2, coarse) * divisors.unsqueeze(-1)
    errors.mul_(errors)
    total = torch.zeros_like(divisors)
    for column in range(NVFP4.group):  # one after the other, as in pack.c: another order gives other sums
        total += errors[..., column]
    return total


def _nibbles(scaled: torch.Tensor) -> torch.Tensor:
    """Round numbers [rows, in] to e2m1, two to a byte.

    The codes 0 to 7 mean 0, 0.5, 1, 1.5, 2, 3, 4, 6: steps of 0.5 up to 2, of 1 up to 4, then of 2. So a magnitude's
    code is the smallest of the codes that each of these step sizes gives, and a tie goes to the even code.
    """
    negative = (scaled < 0).view(torch.uint8)
    sizes = scaled.abs_()
    codes, ones, twos = (sizes * 2).round_(), sizes.round().add_(2), sizes.mul_(0.5).round_().add_(4)
    torch.minimum(torch.minimum(codes, ones, out=codes), twos, out=codes)
    # NaN (0 / 0, when a block scale times the shared one underflows) is above all bounds in ModelOpt too.
    bytes_ = codes.nan_to_num_(7.0).clamp_(max=7.0).to(torch.uint8).add_(negative, alpha=8)
    pairs = bytes_.view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8)


Packer = Callable[[torch.Tensor, float, WeightScales], Packed]
# The numbers of pack.c's searches.
SEARCHES = {"max": 0, "mse": 1, "four-over-six": 2}


class NativePacker:
    """The loops of pack.c, which let other threads run meanwhile."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._loops = {torch.bfloat16: library.nvfp4_pack_bf16, torch.float32: library.nvfp4_pack_f32}
        for loop in self._loops.values():
            loop.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float, ctypes.c_int, *[ctypes.c_void_p] * 2]
            loop.restype = None
        self._int4 = library.nvfp4_pack_int4
        self._int4.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_size_t] * 2, *self._loops[torch.float32].argtypes[2:]]
        self._int4.restype = None

    def __call__(self, weight: torch.Tensor, weight_scale_2: float, scales: WeightScales = "max") -> Packed:
        # float16 and float64 become float32, in which ModelOpt also divides; of float64 it keeps more precision.
        weight = (weight if weight.dtype in self._loops else weight.float()).contiguous()
        rows, columns = weight.shape
        nibbles = torch.empty(rows, columns // 2, dtype=torch.uint8)
        made = torch.empty(rows, columns // NVFP4.group, dtype=torch.uint8)
        self._loops[weight.dtype](
            weight.data_ptr(), made.numel(), weight_scale_2, SEARCHES[scales], nibbles.data_ptr(), made.data_ptr()
        )
        return Packed(nibbles, made.view(torch.float8_e4m3fn))

    def pack_int4(
        self, packed: torch.Tensor, scale: torch.Tensor, weight_scale_2: float, scales: WeightScales
    ) -> Packed:
        """Pack rows of an INT4 weight as if they were dequantized.

        Args:
            packed: I32 [rows, in/8], as stored.
            scale: bf16 [rows, in/group], all finite; the group is a multiple of sixteen.
        """
        packed, scale, rows = packed.contiguous(), scale.contiguous(), packed.shape[0]
        nibbles = torch.empty(rows, packed.shape[1] * 4, dtype=torch.uint8)
        made = torch.empty(rows, packed.shape[1] * 8 // NVFP4.group, dtype=torch.uint8)
        self._int4(
            packed.data_ptr(), scale.data_ptr(), made.numel(), made.numel() // scale.numel(), weight_scale_2,
            SEARCHES[scales], nibbles.data_ptr(), made.data_ptr(),
        )  # fmt: skip
        return Packed(nibbles, made.view(torch.float8_e4m3fn))


@cache
def fastest() -> Packer:
    """Return pack.c's loops if there is a compiler and they agree with torch; otherwise torch's arithmetic."""
    library = load_native("pack.c")
    if library is None:
        return pack_plain
    native = NativePacker(library)
    return native if all(_agree(native, *case) for case in _trials()) and _agree_in_int4(native) else pack_plain


def _agree(packer: Packer, weight: torch.Tensor, weight_scale_2: float, scales: WeightScales) -> bool:
    return _equal(packer(weight, weight_scale_2, scales), pack_plain(weight, weight_scale_2, scales))


def _equal(one: Packed, other: Packed) -> bool:
    scales = (packed.weight_scale.view(torch.uint8) for packed in (one, other))
    return torch.equal(one.weight, other.weight) and torch.equal(*scales)


def _agree_in_int4(native: NativePacker) -> bool:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-(2**31), 2**31, (33, 20), generator=generator).int()
    scale = torch.randn(33, 5, generator=generator).exp().mul(0.01).bfloat16()
    plain = Int4().unpack({Int4.values: packed, Int4.scale: scale})
    every: tuple[WeightScales, ...] = get_args(WeightScales)
    return all(_equal(native.pack_int4(packed, scale, 1e-4, one), pack_plain(plain, 1e-4, one)) for one in every)


def _trials() -> list[tuple[torch.Tensor, float, WeightScales]]:
    """Return weights that cover every branch: each e4m3 scale, ties, zeros, underflow and clipping."""
    generator = torch.Generator().manual_seed(0)
    # The blocks' sizes range from below 2^-9 of the largest to beyond 448.
    sizes = torch.linspace(-12, 10, 320).exp2().unsqueeze(-1)
    random = torch.randn(320, 5 * NVFP4.group, generator=generator) * sizes
    random[::7, ::3] = 0.0
    random[::11, : NVFP4.group] = -0.0
    ties = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(2) * torch.tensor([1.0, -1.0]).repeat(8)
    ties = torch.cat([ties.roll(i).index_put((torch.tensor([i]),), torch.tensor(6.0)) for i in range(16)]).view(1, -1)
    weights = [random, random.bfloat16(), ties, ties.bfloat16()]
    shared = (1.0, 2.0**-9 / 3, 2.0**-140)
    return [(weight, scale, scales) for weight in weights for scale in shared for scales in get_args(WeightScales)]


FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=gnu11", "-shared", "-fPIC")
SECONDS = 120


def load_native(source: str) -> ctypes.CDLL | None:
    """Return a C source of this package as a library, compiled on first use on this kind of machine.

    It is None if there is no compiler, the cache cannot be written, or KCONV_NATIVE=0. A cache that others can write to
    is not used; the library is then compiled for this process only.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or ""]
    if not compiler[0] or os.environ.get("KCONV_NATIVE") == "0":
        return None
    text = (Path(__file__).parent / source).read_text(encoding="utf-8")
    stamp = hashlib.sha256("\0".join([text, *compiler, *FLAGS, _machine()]).encode()).hexdigest()[:16]
    library = _cache() / f"{source.removesuffix('.c')}-{stamp}.so"
    try:
        folder = library.parent
        folder.mkdir(parents=True, exist_ok=True)
        if not _own(folder) or (library.exists() and not _own(library)):
            return _load_private(compiler, text)
        if not library.exists():
            _compile(compiler, text, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError):
        return None


def _own(path: Path) -> bool:
    """Return whether only this user and root can have written a file that will run as this user."""
    return all(_safe(one.lstat()) for one in (path.absolute(), *path.resolve().parents, path.resolve()))


def _safe(found: os.stat_result) -> bool:
    # In a folder with the sticky bit, like /tmp, nobody can replace another user's files.
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(found.st_mode)
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    return found.st_uid in (0, os.geteuid()) and (not writable or bool(sticky))


def _load_private(compiler: list[str], text: str) -> ctypes.CDLL:
    """Compile into a folder that only this user may enter, and load it; the folder is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="kconv-native-") as folder:
        library = Path(folder) / "made.so"
        _compile(compiler, text, library)
        return ctypes.CDLL(str(library))


def _compile(compiler: list[str], text: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, made = Path(folder, "source.c"), Path(folder, "made.so")
        source.write_text(text, encoding="utf-8")
        subprocess.run(
            [*compiler, *FLAGS, "-o", str(made), str(source)], check=True, capture_output=True, timeout=SECONDS
        )
        made.replace(library)  # atomic, since another process may do the same


def _cache() -> Path:
    return cache_root() / "native"


def _machine() -> str:
    """Identify the processor: code built with -march=native must not run on another one that shares the cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {flags}"
