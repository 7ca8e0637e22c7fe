"""Serve by vLLM on a CPU what is in NVFP4: run by its python, another program of Python's, to which NVFP4 is known.

    python vllm_nvfp4.py program.py argument ...

vLLM has an emulation of NVFP4 matrices in plain PyTorch, which its CPU build does not consider until it is told to:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/kernels/linear/nvfp4/emulation.py#L14
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path


def main() -> None:
    from vllm.model_executor.kernels.linear import register_linear_kernel  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.kernels.linear.nvfp4.emulation import (  # pyright: ignore[reportMissingImports]
        EmulationNvFp4LinearKernel,
    )
    from vllm.platforms import PlatformEnum  # pyright: ignore[reportMissingImports]

    register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    sys.argv.pop(0)
    # The server's processes are forked, and so have the kernel too.
    runpy.run_path(sys.argv[0], run_name="__main__")


@contextmanager
def serve_nvfp4(python: Path, folder: Path, *, max_model_len: int) -> Iterator[str]:
    """Serve a target, in NVFP4 or not, by vLLM in bfloat16 on a CPU, and give its address."""
    from kconv.engines.base import Serving
    from kconv.engines.vllm import ENGINE
    from kconv.serving.start import serve

    assert ENGINE.starter is not None
    own = ENGINE.starter.command
    starter = replace(ENGINE.starter, command=lambda serving, port: [str(python), __file__, *own(serving, port)[1:]])
    serving = Serving(python, folder, dtype="bfloat16", max_model_len=max_model_len)
    with serve(serving, replace(ENGINE, starter=starter)) as served:
        yield served.client.url


if __name__ == "__main__":
    main()
