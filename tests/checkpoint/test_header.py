"""Headers that lie: each ends in a named fault."""

import json
import os
import struct
import tracemalloc

import pytest
from support.heads import DATA, GOOD, entry, write_raw

from kconv.checkpoint.header import read_header
from kconv.errors import CorruptHeader, NotACheckpoint

SPACES = pytest.mark.parametrize("space", ["", " "], ids=["as libraries write it", "with spaces"])


@SPACES
def test_a_sound_file_is_read(tmp_path, space):
    file = write_raw(tmp_path / "m.safetensors", GOOD, DATA, space=space)
    infos = read_header(file)
    assert {n: (i.dtype, i.shape, i.size) for n, i in infos.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("BF16", (4,), 8),
        "empty": ("I64", (0, 7), 0),
        "scalar": ("BOOL", (), 1),
    }
    for info in infos.values():
        begin = GOOD[info.name]["data_offsets"][0]
        assert file.read_bytes()[info.begin : info.begin + info.size] == DATA[begin : begin + info.size]


ONE_BYTE = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
LIES = {
    "empty file": b"",
    "seven bytes": b"\0" * 7,
    "length of zero": struct.pack("<Q", 0),
    "length beyond the file": struct.pack("<Q", 100) + b"{}",
    "length of 2**64 - 1": b"\xff" * 8 + b"{}",
    "length within the limit, beyond the file": struct.pack("<Q", 90_000_000) + b"{}",
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_a_lying_length_is_refused_without_room_for_it(tmp_path, content):
    file = tmp_path / "m.safetensors"
    file.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CorruptHeader):
        read_header(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


HEADERS = {
    "not JSON": b"{",
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "a bomb of lists": b"[" * 200_000,
    "a bomb of objects": b'{"a":' * 50_000,
    "a name twice": b'{"a":' + ONE_BYTE + b',"a":' + ONE_BYTE + b"}",
    "metadata twice": b'{"__metadata__":{"x":"y"},"__metadata__":{"x":"y"},"a":' + ONE_BYTE + b"}",
    "metadata that is a tensor": b'{"__metadata__":' + ONE_BYTE + b"}",
    "a brace for a comma": b'{"a":' + ONE_BYTE + b'}"b":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}',
    "something behind its end": b'{"a":' + ONE_BYTE + b"}}",
    "a comma at its end": b'{"a":' + ONE_BYTE + b",}",
    "a word between tensors": b'{"a":' + ONE_BYTE + b',x"b":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}',
    "a dim that begins with zero": b'{"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}}',
    "a dim of 22 digits beside a zero": {"a": entry("U8", [10**22, 0], 0, 0), "b": entry("U8", [1], 0, 1)},
    "a control character": b'{"a\n":' + ONE_BYTE + b"}",
    "a dtype twice": b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
    "half a surrogate pair": b'{"\\ud800":' + ONE_BYTE + b"}",
    "an infinite dim": b'{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,1]}}',
    "a number of 4,300 digits": {"a": entry("U8", [10**4300 - 1], 0, 10**4300 - 1)},
    "a number of a million digits": b'{"a":{"dtype":"U8","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,1]}}',
    "a product that never ends": b'{"a":{"dtype":"U8","shape":['
    + b"9999999999," * 100_000
    + b'0],"data_offsets":[0,1]}}',
    "more dims than any library has": {"a": entry("U8", [1] * 65, 0, 1)},
    "an entry that is a number": {"a": 1},
    "no dtype": {"a": {"shape": [1], "data_offsets": [0, 1]}},
    "no shape": {"a": {"dtype": "U8", "data_offsets": [0, 1]}},
    "no offsets": {"a": {"dtype": "U8", "shape": [1]}},
    "an unknown dtype": {"a": entry("U7", [1], 0, 1)},
    "a dtype that is a list": {"a": entry(["U8"], [1], 0, 1)},
    "a shape that is a number": {"a": entry("U8", 1, 0, 1)},
    "a dim that is a bool": {"a": entry("U8", [True], 0, 1)},
    "a dim that is a text": {"a": entry("U8", ["1"], 0, 1)},
    "a dim that is a float": {"a": entry("U8", [1.0], 0, 1)},
    "negative dims with a right product": {"a": entry("U8", [-1, -1], 0, 1)},
    "a huge dim": {"a": entry("U8", [2**62], 0, 1)},
    "a product beyond 64 bits": {"a": entry("U8", [2**40, 2**40], 0, 1)},
    "three offsets": {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}},
    "an offset that is a bool": {"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}},
    "a negative offset": {"a": entry("U8", [2], -1, 1)},
    "offsets in reverse": {"a": entry("U8", [1], 1, 0)},
    "fewer bytes than the shape": {"a": entry("F32", [1], 0, 1)},
    "beyond the end": {"a": entry("U8", [2], 0, 2)},
    "short of the end": {"a": entry("U8", [0], 0, 0)},
    "no tensor for the data": {},
    "an overlap": {"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 0, 1)},
    "a hole": {"a": entry("U8", [0], 1, 1), "b": entry("U8", [0], 0, 0)},
    "half a byte": {"a": entry("F4", [1], 0, 1)},
    "metadata that is a list": {"__metadata__": [], "a": entry("U8", [1], 0, 1)},
    "metadata of numbers": {"__metadata__": {"x": 1}, "a": entry("U8", [1], 0, 1)},
}


@SPACES
@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_lying_header_is_refused(tmp_path, header, space):
    file = write_raw(tmp_path / "m.safetensors", header, b"\1", space=space)
    with pytest.raises(CorruptHeader) as caught:
        read_header(file)
    fault = caught.value
    assert "m.safetensors" in fault.what and fault.where == str(file) and fault.fix
    str(fault).encode()


def test_a_header_whose_length_looks_like_a_web_page_is_read(tmp_path):
    """60 bytes, in ASCII "<": the length of a small file's header."""
    header = {"a": entry("U8", [1], 0, 1)}
    text = json.dumps(header).encode().ljust(60)
    assert len(text) == ord("<")
    assert read_header(write_raw(tmp_path / "m.safetensors", text, b"\1")).keys() == {"a"}


def test_a_claim_of_a_terabyte_takes_no_memory(tmp_path):
    file = write_raw(tmp_path / "m.safetensors", {"a": entry("U8", [1 << 40], 0, 1 << 40)}, b"\1")
    tracemalloc.start()
    with pytest.raises(CorruptHeader):
        read_header(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize("make", ["missing", "folder", "loop", "dangling", "pipe"])
def test_what_is_no_file_is_named(tmp_path, make):
    file = tmp_path / "m.safetensors"
    if make == "folder":
        file.mkdir()
    elif make == "loop":
        file.symlink_to(file)
    elif make == "dangling":
        file.symlink_to(tmp_path / "gone")
    elif make == "pipe":
        os.mkfifo(file)
    with pytest.raises(NotACheckpoint):
        read_header(file)
