"""Writing in one pass: the digests are of the very bytes, whoever is slow; faults stop it; the disk keeps up."""

import errno
import hashlib
import io
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from kconv.checkpoint import bytes as module
from kconv.checkpoint.bytes import CHUNK, Entry, stream, write_safetensors
from kconv.checkpoint.header import read_header
from kconv.checkpoint.tensors import entry
from kconv.checkpoint.values import Values

# More chunks than are under way at once, and a last one that is not whole.
LARGE = {
    "a": torch.randn(7 * CHUNK // 2 + 11).bfloat16(),
    "b": torch.randint(0, 255, (9 * CHUNK + 3,), dtype=torch.uint8),
    "c": torch.randn(5),
}


@pytest.fixture
def source(tmp_path):
    save_file(LARGE, tmp_path / "source.safetensors")
    return read_header(tmp_path / "source.safetensors")


def copies(source) -> list[Entry]:
    return [Entry(name, i.dtype, i.shape, lambda i=i: stream(i)) for name, i in source.items()]


class SlowHash:
    """A sha256 that lets the other thread run ahead as far as it is let."""

    def __init__(self, data: bytes = b"") -> None:
        self._sha = hashlib.sha256(data)
        self.hexdigest = self._sha.hexdigest

    def update(self, chunk: bytes) -> None:
        time.sleep(0.004)
        self._sha.update(chunk)


class SlowFile(io.FileIO):
    """A file on a disk that takes its time, and only a part of what it is given."""

    def write(self, data, /):
        time.sleep(0.002)
        return super().write(memoryview(data)[:700_001])


@pytest.mark.parametrize("slow", ["the hash", "the disk", "neither"])
def test_a_copy_is_the_source_whichever_side_is_slow(tmp_path, monkeypatch, source, slow):
    if slow == "the hash":
        monkeypatch.setattr(module, "hashlib", SimpleNamespace(sha256=SlowHash))
    if slow == "the disk":
        monkeypatch.setattr(Path, "open", opening(SlowFile))
    written = write_safetensors(tmp_path / "copy.safetensors", copies(source))
    monkeypatch.undo()
    for name, tensor in load_file(tmp_path / "copy.safetensors").items():
        assert torch.equal(tensor, LARGE[name])
        assert written.digests[name] == blake3(LARGE[name].view(torch.uint8).numpy().data).hexdigest()
    content = (tmp_path / "copy.safetensors").read_bytes()
    assert (written.sha256, written.size) == (hashlib.sha256(content).hexdigest(), len(content))


def opening(kind):
    """Return a Path.open that makes new files of a kind."""
    real = Path.open

    def open_(path, mode="r", *args, **options):
        return kind(path, "xb") if mode == "xb" else real(path, mode, *args, **options)

    return open_


def test_a_computed_tensor_larger_than_a_chunk_is_written_whole(tmp_path):
    written = write_safetensors(tmp_path / "m.safetensors", [entry(name, tensor) for name, tensor in LARGE.items()])
    for name, tensor in load_file(tmp_path / "m.safetensors").items():
        assert torch.equal(tensor, LARGE[name])
    assert written.sha256 == hashlib.sha256((tmp_path / "m.safetensors").read_bytes()).hexdigest()


def test_what_values_are_like_is_remembered_and_told(tmp_path):
    tensors = {
        "good": torch.ones(3),
        "zero": torch.tensor([0.0, -0.0]),
        "empty": torch.empty(0),
        "ids": torch.zeros(2, dtype=torch.int64),
        "wrong": torch.tensor([1.0, float("nan"), float("-inf")]).half(),
        "fp8": torch.tensor([float("nan"), 0.0]).to(torch.float8_e4m3fn),
    }
    told = {}
    entries = [entry(name, tensor) for name, tensor in tensors.items()]
    written = write_safetensors(tmp_path / "m.safetensors", entries, check=told.__setitem__)
    assert told == written.values
    assert {name: look.not_finite for name, look in told.items() if look.not_finite} == {"wrong": 2, "fp8": 1}
    assert {name for name, look in told.items() if look.zero} == {"zero"}
    assert told["ids"] == Values(0, False)


def test_a_check_that_raises_stops_before_the_next_tensor(tmp_path):
    asked = []

    def chunks(name):
        asked.append(name)
        return [b"\0" * 4]

    def check(name, values):
        if name == "b":
            raise LookupError(name)

    entries = [Entry(name, "F32", (1,), lambda name=name: chunks(name)) for name in "abc"]
    with pytest.raises(LookupError, match="b"):
        write_safetensors(tmp_path / "m.safetensors", entries, check=check)
    assert asked == ["a", "b"]


def test_progress_is_told_on_the_way(tmp_path, source):
    seen = []
    write_safetensors(tmp_path / "copy.safetensors", copies(source), advance=seen.append)
    assert sum(seen) == sum(info.size for info in source.values()) and max(seen) <= CHUNK


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_on_the_way_is_reported_at_once(tmp_path, monkeypatch, source, number):
    class Failing(io.FileIO):
        def write(self, data, /):
            if self.tell() > 3 * CHUNK:
                raise OSError(number, os.strerror(number))
            return super().write(data)

    monkeypatch.setattr(Path, "open", opening(Failing))
    with pytest.raises(OSError) as caught:
        write_safetensors(tmp_path / "copy.safetensors", copies(source))
    assert caught.value.errno == number
    assert (tmp_path / "copy.safetensors").stat().st_size < 5 * CHUNK
