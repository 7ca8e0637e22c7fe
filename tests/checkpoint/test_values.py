"""NaN, Inf and zero told from bits: torch's isfinite is the judge, on every pattern of the narrow formats."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kconv.checkpoint.values import Scan, Values, cast_floats
from kconv.drafters.contract import FLOATS

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NARROW = [name for name, dtype in DTYPES.items() if dtype.itemsize <= 2]


def scan(dtype: str, *chunks: bytes) -> Values:
    scanned = Scan(dtype)
    for chunk in chunks:
        scanned.update(chunk)
    return scanned.result()


def finite(dtype: str, content: bytes) -> torch.Tensor:
    """Return which values torch holds for finite; it has no isfinite for all formats, but widens them all."""
    return torch.frombuffer(bytearray(content), dtype=DTYPES[dtype]).double().isfinite()


@pytest.mark.parametrize("dtype", NARROW)
def test_every_pattern_of_a_narrow_format_is_told_as_torch_tells_it(dtype):
    width = DTYPES[dtype].itemsize
    patterns = np.arange(1 << 8 * width, dtype=f"<u{width}")
    whole = finite(dtype, patterns.tobytes()).numpy()
    assert whole.any() and not whole.all()
    assert scan(dtype, patterns[whole].tobytes()) == Values(0, False)
    for wrong in patterns[~whole]:
        assert scan(dtype, wrong.tobytes()).not_finite == 1
    assert scan(dtype, patterns.tobytes()).not_finite == (~whole).sum()


@pytest.mark.parametrize("dtype, width", [("F32", 4), ("F64", 8)])
@given(st.data())
def test_any_patterns_of_a_wide_format_are_told_as_torch_tells_them(dtype, width, data):
    sign, inf = 1 << (8 * width - 1), {4: 0x7F80_0000, 8: 0x7FF0_0000_0000_0000}[width]
    near = st.sampled_from([inf - 1, inf, inf + 1, sign | inf - 1, sign | inf, sign | inf + 1, sign - 1, 2 * sign - 1])
    patterns = data.draw(st.lists(near | st.integers(0, 2 * sign - 1), max_size=9))
    content = b"".join(p.to_bytes(width, "little") for p in patterns)
    expected = int((~finite(dtype, content)).sum()) if patterns else 0
    assert scan(dtype, content).not_finite == expected


@given(st.lists(st.floats(width=32), max_size=20), st.integers(1, 7))
@example([0.0, -0.0], 1)
@example([], 1)
@example([1e-45], 1)
def test_zero_and_counts_do_not_depend_on_the_chunks(values, step):
    parts = [struct.pack(f"<{len(part)}f", *part) for part in (values[i : i + step] for i in range(0, 20, step))]
    expected = Values(int((~np.isfinite(values)).sum()), bool(values) and not any(values))
    assert scan("F32", *parts) == scan("F32", b"".join(parts)) == expected


def test_values_beyond_the_first_slice_count():
    values = torch.zeros(1_000_000, dtype=torch.bfloat16)
    values[[70_000, 999_999]] = torch.tensor([float("nan"), float("-inf")], dtype=torch.bfloat16)
    assert scan("BF16", values.view(torch.uint8).numpy().data).not_finite == 2


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 5), st.randoms())
def test_rows_of_zeros_are_counted_however_the_chunks_fall(rows, columns, step, random):
    matrix = np.array([[random.choice([0, 0, -0.0, 1e-40]) for _ in range(columns)] for _ in range(rows)], np.float32)
    scanned, flat = Scan("F32", matrix.shape), matrix.reshape(-1)
    for begin in range(0, flat.size, step):
        scanned.update(flat[begin : begin + step].tobytes())
    assert scanned.result() == Values(0, not matrix.any(), int((matrix == 0).all(1).sum()))


@pytest.mark.parametrize("dtype", ["I64", "U8", "BOOL", "F4"])
def test_what_is_no_float_format_is_not_looked_at(dtype):
    assert scan(dtype, b"\xff" * 16) == scan(dtype, b"\0" * 16) == Values(0, False)


@pytest.mark.parametrize("own", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_cast_is_torchs(own, dtype):
    width = 2 if own != "F32" else 4
    bits = torch.arange(-(2**15), 2**15) if width == 2 else torch.randint(-(2**31), 2**31, (1 << 16,))
    values = bits.to({2: torch.int16, 4: torch.int32}[width]).view(DTYPES[own])
    if width == 4:
        # Patterns of a narrower format, and what lies halfway between two of them.
        near = torch.arange(-(2**15), 2**15).to(torch.int16).view(DTYPES[dtype]).float() if dtype != own else values
        values = torch.cat([values, near, (near + near.roll(-1)) / 2])
    found, beyond = cast_floats(values.view(torch.uint8).numpy().tobytes(), own, dtype)
    wanted = values.to(DTYPES[dtype])
    back = torch.frombuffer(bytearray(found.tobytes()), dtype=DTYPES[dtype])
    assert torch.equal(back.nan_to_num(7), wanted.nan_to_num(7))
    assert beyond == int((wanted.isinf() & ~values.isinf()).sum())
