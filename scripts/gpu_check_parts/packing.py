"""NVFP4 packing on the card, against the packer of the CPU."""

from __future__ import annotations

from typing import Any

import torch

from .bench import Bench


def check_packing(bench: Bench) -> dict[str, Any]:
    """NVFP4 packing on the card against the packer of the CPU, bit for bit; and its share of the bandwidth."""
    from kconv.quantize.pack import amax, pack, scale_2, unpack

    generator = torch.Generator().manual_seed(0)
    rows, columns = bench.size.packed
    figures: dict[str, Any] = {"weight": [rows, columns]}
    # Blocks from below the least block scale to beyond the greatest, with zeros of both signs.
    spread = torch.linspace(-12, 10, 512).exp2()[:, None] * torch.randn(512, 160, generator=generator)
    spread[::7, ::3], spread[::11, :16] = 0.0, -0.0
    plain = torch.randn(rows, columns, generator=generator) * 0.02
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for what, weight in (("spread", spread.to(dtype)), ("plain", plain.to(dtype))):
            shared = float(scale_2(amax(weight)))
            there, here = pack(weight.to(bench.device), shared), pack(weight, shared)
            same = torch.equal(there.weight.cpu(), here.weight) and torch.equal(
                there.weight_scale.view(torch.uint8).cpu(), here.weight_scale.view(torch.uint8)
            )
            assert same, f"the bits of the {what} {name} weight are not those of the CPU's packer"
            back = torch.equal(unpack(there, shared, dtype).cpu(), unpack(here, shared, dtype))
            assert back, f"the {what} {name} weight unpacks to other numbers than on the CPU"
        weight = plain.to(bench.device, dtype)
        shared = float(scale_2(amax(weight)))
        spent = bench.seconds(lambda weight=weight, shared=shared: pack(weight, shared), runs=5)
        moved = weight.numel() * (weight.element_size() + 0.5 + 1 / 16)
        figures[name] = {
            "elements_per_second": round(weight.numel() / spent),
            "share_of_bandwidth": round(moved / spent / bench.bandwidth, 4),
        }
    return figures | {"bits": "equal", "peak_gib": bench.peak()}
