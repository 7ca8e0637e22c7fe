"""Tensors as bytes: what kconv writes, the safetensors library reads, and the other way round."""

import hashlib
import os
import tracemalloc
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kconv.checkpoint.bytes import Entry, Look, Wanted, digest, file_digest, read_floats, stream, write_safetensors
from kconv.checkpoint.header import read_header
from kconv.checkpoint.tensors import TORCH, entry, read_tensor
from kconv.errors import ConfigUnsupported, CorruptHeader, NotACheckpoint

TENSORS = {
    "bf16": torch.randn(3, 5).bfloat16(),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([[-(2**62), 7], [0, 1]]),
    "scalar": torch.tensor(1.5),
    "scalar bool": torch.tensor(True),
    "empty": torch.empty(0, 3),
    "empty inside": torch.empty(2, 0, 4, dtype=torch.bfloat16),
    "NaN": torch.tensor([float("nan"), float("inf"), -0.0]),
    "fp8": torch.randn(4).to(torch.float8_e4m3fn),
    "a view": torch.randn(4, 6).T,
    "a slice": torch.randn(8)[3:7],
    "Ünicode.名": torch.arange(3, dtype=torch.int32),
}


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes, by torch's own storage rather than kconv's."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_the_library_reads_what_kconv_writes(tmp_path):
    file = tmp_path / "m.safetensors"
    written = write_safetensors(file, [entry(name, tensor) for name, tensor in TENSORS.items()])
    loaded = load_file(file)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert raw(loaded[name]) == raw(tensor)
        assert written.digests[name] == blake3(raw(tensor)).hexdigest()
    content = file.read_bytes()
    assert (written.file, written.size) == (file.name, len(content))
    assert written.sha256 == file_digest(file) == hashlib.sha256(content).hexdigest()
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_kconv_reads_what_the_library_writes(tmp_path):
    file = tmp_path / "m.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, file)
    infos = read_header(file)
    assert infos.keys() == TENSORS.keys()
    for name, info in infos.items():
        read = read_tensor(info)
        assert (read.dtype, read.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
        assert raw(read) == raw(TENSORS[name])
        assert digest(info) == blake3(raw(TENSORS[name])).hexdigest()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(TORCH)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=5,
    ),
    st.randoms(use_true_random=False),
)
def test_any_tensors_come_back_from_the_library(tmp_path, shapes, random):
    (tmp_path / "m.safetensors").unlink(missing_ok=True)
    tensors = {}
    for name, (dtype, shape) in shapes.items():
        size = torch.empty(shape, dtype=TORCH[dtype]).numel() * TORCH[dtype].itemsize
        values = random.randbytes(size) if dtype != "BOOL" else bytes(random.choices((0, 1), k=size))
        flat = torch.frombuffer(bytearray(values), dtype=TORCH[dtype]) if size else torch.empty(0, dtype=TORCH[dtype])
        tensors[name] = flat.reshape(shape)
    write_safetensors(tmp_path / "m.safetensors", [entry(name, tensor) for name, tensor in tensors.items()])
    loaded = load_file(tmp_path / "m.safetensors")
    assert {n: (t.dtype, t.shape, raw(t)) for n, t in loaded.items()} == {
        n: (t.dtype, t.shape, raw(t)) for n, t in tensors.items()
    }
    for info in read_header(tmp_path / "m.safetensors").values():
        assert info.begin % TORCH[info.dtype].itemsize == 0, "engines map the file and need it aligned"


@pytest.mark.parametrize("chunk", [1, 3, 64, 10_000])
def test_a_stream_is_the_bytes_whatever_its_chunks(tmp_path, chunk):
    save_file({"x": torch.arange(100, dtype=torch.int16)}, tmp_path / "m.safetensors")
    (info,) = read_header(tmp_path / "m.safetensors").values()
    parts = [bytes(part) for part in stream(info, chunk)]
    assert b"".join(parts) == raw(torch.arange(100, dtype=torch.int16))
    assert max(map(len, parts)) <= chunk


def test_streaming_takes_the_memory_of_a_chunk(tmp_path):
    file = tmp_path / "m.safetensors"
    save_file({"x": torch.zeros(1, dtype=torch.uint8)}, file)
    count = 64 << 20
    head = file.read_bytes()[8:-1].replace(b"[1]", b"[%d]" % count).replace(b"[0,1]", b"[0,%d]" % count).rstrip()
    file.write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(file, 8 + len(head) + count)  # zeros that take no disk
    (info,) = read_header(file).values()
    tracemalloc.start()
    copied = write_safetensors(tmp_path / "copy.safetensors", [Entry("x", "U8", (count,), lambda: stream(info))])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert copied.size > count and peak < 8 << 20


def test_a_file_that_shrinks_after_its_header_was_read_is_named(tmp_path):
    file = tmp_path / "m.safetensors"
    save_file({"x": torch.zeros(100)}, file)
    (info,) = read_header(file).values()
    os.truncate(file, file.stat().st_size - 7)
    with pytest.raises(CorruptHeader, match="7 bytes before the end of x"):
        digest(info)
    with pytest.raises(CorruptHeader):
        read_tensor(info)
    file.unlink()
    with pytest.raises(NotACheckpoint, match=r"m\.safetensors"):
        digest(info)


@pytest.mark.parametrize("content", [b"", b"1234567", b"123456789"])
def test_an_entry_of_another_size_than_its_shape_is_refused(tmp_path, content):
    with pytest.raises(CorruptHeader, match="x yielded"):
        write_safetensors(tmp_path / "m.safetensors", [Entry("x", "F32", (2,), lambda: [content])])


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "m.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        write_safetensors(tmp_path / "m.safetensors", [])
    assert (tmp_path / "m.safetensors").read_text() == "mine"


def test_a_dtype_that_torch_lacks_is_named(tmp_path):
    write_safetensors(tmp_path / "m.safetensors", [Entry("x", "F4", (2,), lambda: [b"\1"])])
    (info,) = read_header(tmp_path / "m.safetensors").values()
    with pytest.raises(ConfigUnsupported, match="F4"):
        read_tensor(info)
    assert digest(info) == blake3(b"\1").hexdigest()


def read_so_far() -> int:
    """Return the bytes that this process has read, as Linux counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("whole", [True, False])
def test_all_that_is_wanted_of_a_file_is_found_by_one_reading(tmp_path, monkeypatch, whole):
    monkeypatch.setattr("kconv.checkpoint.bytes.SHARE", 1 << 20)
    large = torch.randn(1500, 1100)
    large[7:19], large[1499, 3] = 0, float("nan")
    tensors = TENSORS | {"large": large, "zeros": torch.zeros(4, 4)}
    file = tmp_path / "m.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    infos = read_header(file)
    rows = 400 * 1100 * 4
    part = infos["large"]._replace(begin=infos["large"].begin + rows, size=2 * rows)
    looked_at = [infos[name] for name in ("large", "zeros", "NaN")]
    before = read_so_far()
    wanted = [Wanted(file, whole, [*infos.values(), part]), Wanted(file, values=looked_at)]
    with Look(wanted) as look:
        digests = {name: look.digest(info) for name, info in infos.items()}
        values = [look.values(info) for info in looked_at]
        part_digest, sha256 = look.digest(part), look.sha256(file) if whole else ""
    assert read_so_far() - before < 1.1 * file.stat().st_size
    assert digests == {name: blake3(raw(tensor)).hexdigest() for name, tensor in tensors.items()}
    assert part_digest == blake3(raw(large[400:1200])).hexdigest()
    assert [(found.not_finite, found.zero, found.zero_rows) for found in values] == [
        (1, False, 12), (0, True, 4), (2, False, 0),
    ]  # fmt: skip
    assert not whole or sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("whole", [True, False])
def test_what_cannot_be_read_is_said_where_it_is_asked_for(tmp_path, whole):
    file = tmp_path / "m.safetensors"
    save_file({"x": torch.ones(4), "y": torch.ones(4)}, file)
    infos = list(read_header(file).values())
    os.truncate(file, file.stat().st_size - 7)
    with Look([Wanted(file, whole, infos)]) as look, pytest.raises(CorruptHeader, match="7 bytes before the end of y"):
        look.digest(infos[1])
    file.unlink()
    with Look([Wanted(file, whole, infos)]) as look, pytest.raises(NotACheckpoint, match=r"m\.safetensors"):
        look.digest(infos[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_floats_read_without_torch_are_torchs(tmp_path, dtype):
    file = tmp_path / "m.safetensors"
    matrix = torch.randn(40, 30).to(dtype)
    save_file({"x": matrix}, file)
    (info,) = read_header(file).values()
    assert (read_floats(info) == matrix.float().numpy()).all()
    assert (read_floats(info, [39, 0, 7, 7]) == matrix[[39, 0, 7, 7]].float().numpy()).all()
