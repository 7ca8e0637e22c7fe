"""pack.c ready to call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from .formats import GROUP_SIZE
from .native import load_native
from .pack_plain import Packed, pack_plain

Packer = Callable[[torch.Tensor, float], Packed]


class NativePacker:
    """The loops of pack.c, which let other threads run meanwhile.

    Args:
        library: pack.c, compiled.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._loops = {torch.bfloat16: library.nvfp4_pack_bf16, torch.float32: library.nvfp4_pack_f32}
        for loop in self._loops.values():
            loop.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p]
            loop.restype = None

    def __call__(self, weight: torch.Tensor, weight_scale_2: float) -> Packed:
        """Pack a weight; see `pack.pack` for the arguments."""
        # float16 and float64 become float32, in which ModelOpt divides too; of float64 it keeps more.
        weight = (weight if weight.dtype in self._loops else weight.float()).contiguous()
        rows, columns = weight.shape
        nibbles = torch.empty(rows, columns // 2, dtype=torch.uint8)
        scales = torch.empty(rows, columns // GROUP_SIZE, dtype=torch.uint8)
        self._loops[weight.dtype](
            weight.data_ptr(), scales.numel(), weight_scale_2, nibbles.data_ptr(), scales.data_ptr()
        )
        return Packed(nibbles, scales.view(torch.float8_e4m3fn))


@cache
def fastest() -> Packer:
    """Return pack.c's loops, if there is a compiler and they agree with torch; else torch's arithmetic."""
    library = load_native("pack.c")
    if library is None:
        return pack_plain
    native = NativePacker(library)
    return native if all(_agree(native, *case) for case in _trials()) else pack_plain


def _agree(packer: Packer, weight: torch.Tensor, weight_scale_2: float) -> bool:
    one, other = packer(weight, weight_scale_2), pack_plain(weight, weight_scale_2)
    return torch.equal(one.weight, other.weight) and torch.equal(
        one.weight_scale.view(torch.uint8), other.weight_scale.view(torch.uint8)
    )


def _trials() -> list[tuple[torch.Tensor, float]]:
    """Return weights that meet every branch: each e4m3 scale, ties, zeros, what underflows and what is cut off."""
    generator = torch.Generator().manual_seed(0)
    # The blocks' sizes run from below 2^-9 of the largest to beyond 448.
    sizes = torch.linspace(-12, 10, 320).exp2().unsqueeze(-1)
    random = torch.randn(320, 5 * GROUP_SIZE, generator=generator) * sizes
    random[::7, ::3] = 0.0
    random[::11, :GROUP_SIZE] = -0.0
    ties = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(2) * torch.tensor([1.0, -1.0]).repeat(8)
    ties = torch.cat([ties.roll(i).index_put((torch.tensor([i]),), torch.tensor(6.0)) for i in range(16)]).view(1, -1)
    weights = [random, random.bfloat16(), ties, ties.bfloat16()]
    return [(weight, scale) for weight in weights for scale in (1.0, 2.0**-9 / 3, 2.0**-140)]
