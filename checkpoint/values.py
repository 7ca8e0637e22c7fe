"""Detect NaN, Inf and zero values from their bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

# Imported where needed: for work that checks no values, the import would take most of the time.
if TYPE_CHECKING:
    import numpy as np

# Elements checked in one go: few enough to stay in a core's cache between the mask and the maximum.
SLICE = 1 << 16
# What to do about a tensor with NaN or Inf.
BEFORE_IT_BROKE = "Export the head again from a checkpoint before the loss broke."


@dataclass(frozen=True)
class FloatBits:
    """A float format, viewed as unsigned integers.

    Attributes:
        unsigned: numpy's name of the unsigned integer of the same width, little-endian.
        magnitude: every bit except the sign.
        largest: the magnitude bits of the largest finite value; Inf and NaN are above it.
    """

    unsigned: str
    magnitude: int
    largest: int


# E4M3 is the variant without Inf, whose only NaN has every magnitude bit set; E8M0 has neither sign nor Inf.
# https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
FLOAT_BITS = {
    "F64": FloatBits("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FEF_FFFF_FFFF_FFFF),
    "F32": FloatBits("<u4", 0x7FFF_FFFF, 0x7F7F_FFFF),
    "F16": FloatBits("<u2", 0x7FFF, 0x7BFF),
    "BF16": FloatBits("<u2", 0x7FFF, 0x7F7F),
    "F8_E5M2": FloatBits("u1", 0x7F, 0x7B),
    "F8_E4M3": FloatBits("u1", 0x7F, 0x7E),
    "F8_E8M0": FloatBits("u1", 0xFF, 0xFE),
}


@dataclass(frozen=True)
class Values:
    """A summary of a tensor's values; for a dtype that is not a float format, nothing is counted.

    Attributes:
        zero: whether there are values, and all of them are 0.
    """

    not_finite: int = 0
    zero: bool = False
    zero_rows: int = 0


def to_floats(data: bytes | memoryview, dtype: str) -> np.ndarray:
    """Return the values of BF16, F16 or F32 bytes as float32."""
    import numpy as np

    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[dtype]).astype("<f4")


def cast_floats(data: bytes | memoryview, own: str, dtype: str) -> tuple[np.ndarray, int]:
    """Round BF16, F16 or F32 bytes to the nearest values of another of these dtypes, ties to even.

    Returns:
        Them as stored (of BF16 the bits), and how many values exceed the other dtype's range.
    """
    import numpy as np

    bits = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
    if own == dtype:
        return np.frombuffer(data, bits[dtype]), 0
    values = to_floats(data, own)
    if dtype == "BF16":
        words = values.view("<u4")
        # The sum would turn some NaN into another number.
        found = np.where(np.isnan(values), 0x7FC0, (words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype("<u2")
    else:
        with np.errstate(over="ignore"):
            found = values.astype(bits[dtype])
    return found, int((np.isinf(to_floats(found.data.cast("B"), dtype)) & ~np.isinf(values)).sum())


class Scan:
    """Checks a tensor's values chunk by chunk, the way a hash takes its input.

    A dtype without an entry in `FLOAT_BITS` is not checked; rows are checked only in a matrix.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...] = ()) -> None:
        import numpy as np

        self._bits = FLOAT_BITS.get(dtype)
        self._scratch = np.empty(SLICE, self._bits.unsigned) if self._bits else None
        self._not_finite = 0
        self._largest = -1
        self._columns = shape[1] if len(shape) == 2 else 0
        # For the current row: how many values are left, and the largest magnitude so far.
        self._left: int = self._columns
        self._row = 0
        self._zero_rows = 0

    def update(self, chunk: bytes | memoryview) -> None:
        """Check the next bytes, a whole number of elements."""
        import numpy as np

        if self._bits is None or self._scratch is None:
            return
        values = np.frombuffer(chunk, self._bits.unsigned)
        for begin in range(0, values.size, SLICE):
            part = values[begin : begin + SLICE]
            magnitudes = np.bitwise_and(part, self._bits.magnitude, out=self._scratch[: part.size])
            largest = self._by_rows(magnitudes) if self._columns else int(magnitudes.max())
            self._largest = max(self._largest, largest)
            if largest > self._bits.largest:
                self._not_finite += int(np.count_nonzero(magnitudes > self._bits.largest))

    def result(self) -> Values:
        """Return the summary of the bytes so far."""
        return Values(self._not_finite, self._largest == 0, self._zero_rows)

    def _by_rows(self, magnitudes: np.ndarray) -> int:
        """Count the all-zero rows that end within the next values; return the largest magnitude among these values."""
        import numpy as np

        begun = min(self._left, len(magnitudes))
        whole = (len(magnitudes) - begun) // self._columns
        end = begun + whole * self._columns
        found = [int(magnitudes[:begun].max(initial=0))]
        self._row, self._left = max(self._row, found[0]), self._left - begun
        if not self._left:
            self._zero_rows += self._row == 0
            rows = magnitudes[begun:end].reshape(whole, self._columns).max(axis=1)
            self._zero_rows += whole - int(np.count_nonzero(rows))
            self._row = int(magnitudes[end:].max(initial=0))
            self._left = self._columns - (len(magnitudes) - end)
            found += [int(rows.max(initial=0)), self._row]
        return max(found)
