"""Packers, and weights whose blocks cover what one can meet."""

import torch

from kconv.quantize import pack as packing
from kconv.quantize.pack import NativePacker, pack, pack_plain


def compiled(weight, weight_scale_2, scales="max"):
    library = packing.load_native("pack.c")
    return (NativePacker(library) if library else pack_plain)(weight, weight_scale_2, scales)


PACKERS = {"compiled": compiled, "torch": pack_plain, "chosen": pack}


def random(*shape, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape[0], 1, generator=generator).mul(spread).exp()
    return torch.randn(*shape, generator=generator) * rows


def with_zero_blocks():
    weight = random(8, 64)
    weight[::2, 16:32] = 0.0
    return weight


def ties():
    """Return each bound of e2m1, both signs, in blocks whose scale is a power of two: every one is a tie."""
    bounds = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    block = torch.cat([bounds, -bounds])
    block[0] = 6.0
    return torch.stack([block * 2.0**i for i in range(-8, 9)])


def around_ties():
    """Return each bound and the two floats beside it."""
    at = ties()[:, 1:8]
    inf = torch.full_like(at, torch.inf)
    values = torch.stack([at, torch.nextafter(at, inf), torch.nextafter(at, -inf)]).flatten(1)
    rows = torch.nn.functional.pad(values, (0, -values.shape[1] % 15)).view(-1, 15)
    return torch.cat([torch.full((len(rows), 1), 6.0 * 2.0**8), rows], dim=1)


BLOCKS = {
    "random": random(64, 256),
    "even": random(64, 256, spread=0.0),
    "spread so far that scales are cut off": random(256, 64, spread=12.0),
    "constant": torch.full((4, 32), 0.37),
    "constant and negative": torch.full((4, 32), -0.37),
    "zero blocks among others": with_zero_blocks(),
    "negative zeros": with_zero_blocks().mul(-1.0),
    "one number in each block": torch.eye(16).repeat(2, 3),
    "denormal": random(16, 64, spread=1.0) * 1e-39,
    "the smallest denormals beside one": torch.full((32, 32), 1e-45) + torch.eye(32),
    "huge": random(16, 64, spread=0.0).mul(3e37).clamp(-3e38, 3e38),
    "from tiny to huge": torch.linspace(-120, 120, 16 * 32).exp2().view(16, 32),
    "ties": ties(),
    "beside ties": around_ties(),
    "one block": random(1, 16),
    "an odd count of blocks": random(7, 16 * 13),
}  # fmt: skip
