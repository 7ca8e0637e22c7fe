"""The guide to quantizing: its sizes are those of the shapes and of what is packed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from bench_parts import sizes
from docs_parts.sizes import HEADS
from support.good_heads import LATENT_QUANTIZABLE, QUANTIZABLE
from support.heads import KIMI_MHA, KIMI_MLA

from kconv.quantize.head.formats import FORMATS

ROOT = Path(__file__).parent.parent.parent


def test_the_table_is_current():
    ran = subprocess.run([ROOT / "scripts" / "docs", "sizes", "--check"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, ""), f"run scripts/docs: {ran.stdout}{ran.stderr}"


def test_the_heads_are_those_of_the_published_ones():
    for kimi, name in ((KIMI_MLA, "MLA"), (KIMI_MHA, "MHA")):
        spec = HEADS[name]
        assert (spec.attention, spec.hidden, spec.intermediate) == (kimi.attention, kimi.hidden, kimi.intermediate)


def test_a_step_reads_all_of_a_published_head_but_fc():
    # NVIDIA's head without the embedding, as in tests/convert/test_published_sizes.py.
    assert sizes.step_bytes(KIMI_MLA) == 2 * (1_841_199_104 - 7168 * 3 * 7168)


@pytest.mark.parametrize("spec", [QUANTIZABLE, LATENT_QUANTIZABLE], ids=["gqa", "mla"])
@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
def test_a_linear_takes_the_bytes_that_are_packed(spec, format_):
    packed = 0
    for rows, columns in sizes.linears(spec).values():
        tensors = format_.pack(torch.ones(rows, columns), format_.scale(1.0)) | {"input_scale": format_.scale(1.0)}
        packed += sum(tensor.nbytes for tensor in tensors.values())
    left = sizes.step_bytes(spec) - sizes.linear_bytes(spec)
    assert packed > 0 and sizes.quantized_bytes(spec, format_) == left + packed
