"""pytorch_model.bin: the tensors of torch's own reader, byte for byte, and nothing that a stranger put in is run."""

import json
import os
import resource
import struct
import tracemalloc
import zipfile
from collections import OrderedDict

import pytest
import torch

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.pickles import MAX_PICKLE, read_pickle_header
from kconv.checkpoint.tensors import read_tensor
from kconv.errors import CorruptHeader, NotACheckpoint

TENSORS = {
    "a": torch.arange(12.0).reshape(3, 4).bfloat16(),
    "b": torch.arange(7),
    "part": torch.arange(10.0)[3:6],
    "marks": torch.tensor([True, False]),
    "none": torch.empty(0, 4),
    "of a dtype without a storage class": torch.arange(6.0).reshape(2, 3).to(torch.float8_e4m3fn),
    "a parameter": torch.nn.Parameter(torch.arange(4.0)),
    "one row": torch.arange(6.0).reshape(3, 2).T[:1, :1],
}


def save(folder, value, **options):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({}))
    torch.save(value, folder / "pytorch_model.bin", **options)
    return folder


def test_the_tensors_are_torchs_own(tmp_path):
    opened = open_checkpoint(save(tmp_path / "head", TENSORS))
    expected = torch.load(tmp_path / "head" / "pytorch_model.bin", weights_only=True, mmap=True)
    assert opened.tensors.keys() == expected.keys()
    for name, info in opened.tensors.items():
        assert torch.equal(read_tensor(info), expected[name]) and info.size == expected[name].nbytes


def test_safetensors_win(tmp_path):
    from safetensors.torch import save_file

    folder = save(tmp_path / "head", TENSORS)
    save_file({"other": torch.ones(2)}, folder / "model.safetensors")
    assert open_checkpoint(folder).tensors.keys() == {"other"}


def test_a_modules_own_weights_are_read(tmp_path):
    module = torch.nn.Linear(3, 2)
    opened = open_checkpoint(save(tmp_path / "head", module.state_dict()))
    assert torch.equal(read_tensor(opened.tensors["weight"]), module.weight)


class Runs:
    def __reduce__(self):
        return (print, ("run",))


UNREADABLE = {
    "a transposed tensor": lambda folder: save(folder, {"a": torch.ones(2, 3).T}),
    "a list": lambda folder: save(folder, [torch.ones(2)]),
    "an optimizer's state": lambda folder: save(folder, {"step": 7}),
    "the format before torch 1.6": lambda folder: save(folder, TENSORS, _use_new_zipfile_serialization=False),
    "code": lambda folder: save(folder, {"a": Runs()}),
}


@pytest.mark.parametrize("write", UNREADABLE.values(), ids=UNREADABLE)
def test_what_holds_no_plain_tensors_is_refused(write, tmp_path, capsys):
    with pytest.raises(NotACheckpoint) as caught:
        open_checkpoint(write(tmp_path / "head"))
    assert "pytorch_model.bin" in caught.value.what and "weights_only=True" in caught.value.fix
    assert capsys.readouterr().out == ""


def test_a_file_that_is_cut_off_is_to_be_fetched_again(tmp_path):
    folder = save(tmp_path / "head", TENSORS)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(NotACheckpoint) as caught:
        open_checkpoint(folder)
    assert caught.value.fix == "Fetch it again: it is cut off."


class Calls:
    """Pickled as a call, whatever torch's own reader lets through."""

    def __init__(self, called, *given):
        self.call = called, given

    def __reduce__(self):
        return self.call


PAIRS = [(str(number), number) for number in range(20_000)]
GROWS = {
    "a bytearray of a stated size": lambda: {"a": Calls(bytearray, 1 << 29)},
    "a list copied into many dicts": lambda: {str(number): Calls(OrderedDict, PAIRS) for number in range(300)},
    "a storage of a stated size": lambda: {"a": Calls(torch.UntypedStorage, 1 << 29)},
}


@pytest.mark.parametrize("value", GROWS.values(), ids=GROWS)
def test_a_few_bytes_allocate_no_more_than_they_are(tmp_path, value):
    folder = save(tmp_path / "head", value())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(NotACheckpoint, match="cannot be read as plain tensors"):
        open_checkpoint(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "in KiB"


# Pickles that no Python object stands for, each after the protocol's mark.
BY_HAND = {
    "tuples that double": b"}X\1\0\0\0a" + b")" + b"q\0h\0\x86" * 200 + b"s.",
    "a deep key": b"}" + b")" + b"\x85" * 100_000 + b"Ns.",
    "a storage of a doubling name": b"X\7\0\0\0storageN)" + b"q\0h\0\x86" * 60 + b"NNtQ.",
    "a shape of no numbers": b"ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR.",
    "a list in a list's place": b"]]s.",
    "a call of text": b"X\1\0\0\0a)R.",
    "an opcode of another protocol": b"\x8c\1a\x8c\1b\x93.",
    "no end": b"}",
    "nothing on the stack": b"R.",
}  # fmt: skip


@pytest.mark.parametrize("steps", BY_HAND.values(), ids=BY_HAND)
def test_a_pickle_of_other_steps_is_refused(tmp_path, steps):
    folder = save(tmp_path / "head", TENSORS)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as new:
        new.writestr("archive/data.pkl", b"\x80\2" + steps)
    with pytest.raises(NotACheckpoint):
        open_checkpoint(folder)


def _dicts(folder):
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as new:
        new.writestr("archive/data.pkl", b"\x80\2]" + b"(" + b"}" * (MAX_PICKLE - 8) + b"e.")


def _members(folder):
    """300,000 members of no bytes, all in one place, in a list of 14 MiB."""
    names = [f"{number:06}".encode() for number in range(300_000)]
    listed = b"".join(struct.pack("<4s24xH16x", b"PK\1\2", len(name)) + name for name in names)
    end = struct.pack("<4s4xHHIIH", b"PK\5\6", 0, 0, len(listed), 0, 0)
    (folder / "pytorch_model.bin").write_bytes(listed + end)


@pytest.mark.parametrize(
    "write, why", [(_dicts, "more than 524,288 steps"), (_members, "directory is too large")], ids=["steps", "members"]
)
def test_what_makes_many_objects_of_few_bytes_is_refused_before_it_does(tmp_path, write, why):
    folder = save(tmp_path / "head", TENSORS)
    write(folder)
    tracemalloc.start()
    try:
        with pytest.raises(NotACheckpoint, match=why):
            open_checkpoint(folder)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_a_tensor_outside_its_storage_is_refused(tmp_path):
    folder = save(tmp_path / "head", {"a": torch.zeros(1000), "b": torch.zeros(1000)})
    with zipfile.ZipFile(folder / "pytorch_model.bin") as old:
        members = {member.filename: old.read(member) for member in old.infolist()}
    [pickled] = [name for name in members if name.endswith("/data.pkl")]
    # 1,001 in place of 1,000: as a storage's own length, as a shape, and as what a tensor begins at.
    members[pickled] = members[pickled].replace(b"M\xe8\x03", b"M\xe9\x03")
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as new:
        for name, data in members.items():
            new.writestr(name, data)
    with pytest.raises(CorruptHeader, match="lies outside"):
        open_checkpoint(folder)


def test_a_compressed_archive_is_refused(tmp_path):
    file = save(tmp_path / "head", TENSORS) / "pytorch_model.bin"
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(tmp_path / "packed.bin", "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    with pytest.raises((CorruptHeader, NotACheckpoint)):
        read_pickle_header(tmp_path / "packed.bin")


def test_a_file_cut_short_is_refused(tmp_path):
    file = save(tmp_path / "head", TENSORS) / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(NotACheckpoint):
        open_checkpoint(tmp_path / "head")


def _repack(folder, grown, count):
    """Write the archive again with `count` MiB, compressed, in one of its members."""
    file = save(folder, TENSORS) / "pytorch_model.bin"
    with zipfile.ZipFile(file) as old:
        members = [(member.filename, old.read(member)) for member in old.infolist()]
    with zipfile.ZipFile(file, "w") as new:
        for name, data in members:
            entry = zipfile.ZipInfo(name)
            if name.endswith(grown):
                entry.compress_type = zipfile.ZIP_DEFLATED
                with new.open(entry, "w", force_zip64=True) as out:
                    for _ in range(count):
                        out.write(bytes(1 << 20))
            else:
                new.writestr(entry, data)
    return folder


@pytest.mark.parametrize("grown", ["/byteorder", "/data.pkl"])
def test_what_grows_when_it_is_unpacked_takes_no_memory(tmp_path, grown):
    folder = _repack(tmp_path / "head", grown, 200)
    assert (folder / "pytorch_model.bin").stat().st_size < 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptHeader, match="compressed"):
        open_checkpoint(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "in KiB"


def test_a_pickle_of_many_mebibytes_is_not_unpickled(tmp_path, monkeypatch):
    folder = save(tmp_path / "head", {f"tensor {number}": torch.ones(1) for number in range(9)})
    monkeypatch.setattr("kconv.checkpoint.pickles.MAX_PICKLE", 100)
    with pytest.raises(CorruptHeader, match="too large"):
        open_checkpoint(folder)


@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, kind):
    folder = save(tmp_path / "head", TENSORS)
    (folder / "pytorch_model.bin").unlink()
    if kind == "a pipe":
        os.mkfifo(folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").symlink_to("/dev/zero")
    with pytest.raises(NotACheckpoint, match="not a regular file"):
        open_checkpoint(folder)
