"""What the attention's conversion computes on the card, against fp64."""

from __future__ import annotations

import time
from typing import Any

import torch

from .bench import Bench, part


def check_attention(bench: Bench) -> dict[str, Any]:
    """The second moments that MHA to MLA is fitted on, at the head's dims, against fp64; and what is solved."""
    from kconv.convert.attention.latents import factorize
    from kconv.convert.attention.moments import Moments, factor, root

    width, rows = 2 * bench.size.config["hidden_size"], bench.size.rows
    heads, dim = bench.size.config["num_attention_heads"], bench.size.config["v_head_dim"]
    generator = torch.Generator(bench.device).manual_seed(0)
    scale = torch.linspace(1, 0.05, width, device=bench.device)
    x = torch.randn(rows, width, generator=generator, device=bench.device) * scale
    moments = Moments(width, device=bench.device)
    for block in x.split(2048):
        moments.add(block)
    strip = x[:, :16].double().T.cpu() @ x.double().cpu()
    apart = float((moments.xx[:16].cpu() - strip).abs().max() / strip.abs().max())
    assert apart < 1e-10, f"the second moments are off by {apart:.1e} of the greatest"
    again = Moments(width, device=bench.device)
    spent = bench.seconds(lambda: again.add(x[:2048]), runs=5)
    figures: dict[str, Any] = {
        "inputs": width,
        "rows": rows,
        "error": apart,
        "rows_per_second": round(min(2048, rows) / spent),
        "tflop_per_second": round(2 * min(2048, rows) * width**2 / spent / 1e12, 1),
        "dtype": str(moments.xx.dtype).removeprefix("torch."),
    }

    def solve() -> dict[str, Any]:
        begin = time.perf_counter()
        # As in a real run, there are directions that few rows have.
        cholesky = factor(moments.mean() + torch.diag(scale.square()).to(moments.xx))
        bench.wait()
        middle = time.perf_counter()
        dtype = cholesky.dtype
        spread = torch.randn(heads, 2 * dim, 2 * dim, generator=generator, device=bench.device, dtype=dtype) / dim
        square, inverse = root(spread @ spread.mT)
        weights = torch.randn(heads, 2 * dim, width, generator=generator, device=bench.device, dtype=dtype)
        found = factorize(weights * width**-0.5, square, inverse, cholesky, bench.size.latent)
        assert torch.isfinite(found.down).all() and torch.isfinite(found.up).all(), "a latent is not finite"
        bench.wait()
        end = time.perf_counter()
        return {"cholesky_seconds": round(middle - begin, 2), "latent_seconds": round(end - middle, 2)}

    return figures | {"solve": part(solve), "peak_gib": bench.peak()}
