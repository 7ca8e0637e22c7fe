"""What kconv makes of an input of a quantized linear is what vLLM's own reference makes of it, value for value."""

from __future__ import annotations

import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from kconv.quantize.head.formats import NVFP4

pytestmark = [pytest.mark.slow, pytest.mark.engine]

# vLLM takes the reciprocal of the scale that is stored.
VLLM = """
import sys, torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant_dequant
given = load_file(sys.argv[1])
rounded = ref_nvfp4_quant_dequant(given["x"], (1.0 / given["scale"]).to(torch.float32), 16)
save_file({"rounded": rounded.contiguous()}, sys.argv[2])
"""


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_nvfp4_inputs_are_rounded_as_vllm_rounds_them(engine_python, tmp_path, size):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(4)) * size
    scale = NVFP4.scale(float(x.abs().max()) * 0.8)  # some are beyond it, and cut off
    save_file({"x": x, "scale": scale}, tmp_path / "given.safetensors")
    command = [str(engine_python), "-c", VLLM, str(tmp_path / "given.safetensors"), str(tmp_path / "found.safetensors")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    theirs, ours = load_file(tmp_path / "found.safetensors")["rounded"], NVFP4.round(x, scale)
    # vLLM multiplies by a reciprocal where ModelOpt divides: the last bits differ, and a value in the middle of two may
    # go the other way.
    assert ((ours - theirs).abs() > 1e-6 * theirs.abs()).float().mean() < 0.002
    assert ((ours - theirs).norm() / theirs.norm()) < 0.01
