"""INT4 to NVFP4 by tables: the bits of dequantizing and packing, with the compiled loops and without."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.quantized_targets import quantize_int4

from kconv.checkpoint.formats import Int4
from kconv.checkpoint.header import read_header
from kconv.quantize.int4_to_nvfp4 import Int4Packer, NativeLoops, NumpyLoops, amax_int4, fastest
from kconv.quantize.pack import load_native, pack, scale_2
from kconv.targets.weights import Quantized


def native_loops():
    library = load_native("int4.c")
    return NativeLoops(library) if library else NumpyLoops()


LOOPS = {"compiled": native_loops, "numpy": NumpyLoops}


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 7),
    groups=st.integers(1, 6),
    group=st.sampled_from([16, 32, 64]),
    spread=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    negative=st.booleans(),
    low=st.integers(0, 15),
    high=st.integers(0, 15),
    kind=st.sampled_from(["compiled", "numpy"]),
    seed=st.integers(0, 999),
)
def test_the_bits_are_those_of_dequantizing_and_packing(rows, groups, group, spread, negative, low, high, kind, seed):
    random = np.random.default_rng(seed)
    nibbles = random.integers(min(low, high), max(low, high) + 1, (rows, groups * group)).astype(np.uint8)
    halves = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    packed = torch.from_numpy(np.ascontiguousarray(halves)).view(torch.int32)
    scale = torch.from_numpy(np.exp(random.normal(-4, spread, (rows, groups)))).bfloat16().clamp(max=1e30)
    scale = -scale if negative else scale
    plain = Int4().unpack({"weight_packed": packed, "weight_scale": scale})
    if not plain.any():
        return
    weight_scale_2 = float(scale_2(float(plain.abs().max())))
    loops = LOOPS[kind]()
    tops = loops.tops(halves.reshape(-1, 8), scale.view(torch.uint16).numpy().reshape(-1))
    values = torch.arange(9).bfloat16() * torch.from_numpy(tops).view(torch.bfloat16)
    assert float(values.max()) == float(plain.abs().max())
    ours = Int4Packer(weight_scale_2, loops).pack(packed, scale)
    theirs = pack(plain, weight_scale_2)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.weight_scale.view(torch.uint8), theirs.weight_scale.view(torch.uint8))


@pytest.mark.parametrize("loops", LOOPS.values(), ids=LOOPS)
def test_amax_is_that_of_the_dequantized_values(loops, tmp_path, monkeypatch):
    weight = int4_weight(tmp_path, torch.randn(40, 96, generator=torch.Generator().manual_seed(1)))
    monkeypatch.setattr("kconv.targets.weights.SPAN", 1000)
    assert amax_int4(weight, loops()) == float(weight.read().abs().max())


@pytest.mark.parametrize("loops", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_seen_though_its_values_are_zero(loops, value, tmp_path):
    def spoil(parts):
        parts["weight_scale"][3, 1] = value
        parts["weight_packed"][3, 4:8] = torch.tensor(-2004318072, dtype=torch.int32)  # each nibble 8, the value 0

    weight = int4_weight(tmp_path, torch.randn(8, 96), spoil)
    assert np.isnan(amax_int4(weight, loops()))


def test_without_a_compiler_numpy_does_it(monkeypatch):
    monkeypatch.setenv("KCONV_NATIVE", "0")
    fastest.cache_clear()
    try:
        assert isinstance(fastest(), NumpyLoops)
    finally:
        fastest.cache_clear()


@pytest.mark.parametrize("compiler", ["false", "/no/such/cc"])
def test_a_compiler_that_fails_is_as_good_as_none(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("KCONV_CACHE", str(tmp_path))
    assert load_native("int4.c") is None


def test_compiled_loops_that_err_are_not_trusted(monkeypatch):
    class Wrong(NativeLoops):
        def tops(self, halves, bits):
            return super().tops(halves, bits) ^ 1

    monkeypatch.setattr("kconv.quantize.int4_to_nvfp4.NativeLoops", Wrong)
    fastest.cache_clear()
    try:
        assert isinstance(fastest(), NumpyLoops)
    finally:
        monkeypatch.undo()
        fastest.cache_clear()


def int4_weight(folder, plain, spoil=lambda parts: None) -> Quantized:
    parts = quantize_int4(plain)
    spoil(parts)
    save_file({f"x.{suffix}": tensor for suffix, tensor in parts.items()}, folder / "x.safetensors")
    return Quantized(Int4(), Int4().parts("x", read_header(folder / "x.safetensors")))
