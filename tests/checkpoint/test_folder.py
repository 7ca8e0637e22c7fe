"""Opening a folder: one file, shards with an index, and everything that is wrong with either."""

import json
import os

import pytest
from support.heads import entry, write_raw

from kconv.checkpoint.folder import INDEX, open_checkpoint
from kconv.checkpoint.staging import cache_root
from kconv.errors import ConfigInvalid, CorruptHeader, CorruptIndex, NotACheckpoint, OutputFailed


def shard(file, **tensors):
    """Write bytes tensors, one byte each."""
    header = {name: entry("U8", [1], i, i + 1) for i, name in enumerate(tensors)}
    return write_raw(file, header, bytes(tensors.values()))


@pytest.fixture
def folder(tmp_path):
    """A sound folder of two shards and an index."""
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    shard(folder / "one.safetensors", a=1, b=2)
    shard(folder / "two.safetensors", c=3)
    index(folder, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    return folder


def index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 3}, "weight_map": weight_map}))


def test_a_sharded_folder_is_opened(folder):
    opened = open_checkpoint(folder)
    assert opened.config == {"hidden_size": 8}
    assert {n: i.file.name for n, i in opened.tensors.items()} == {
        "a": "one.safetensors",
        "b": "one.safetensors",
        "c": "two.safetensors",
    }
    assert [file.name for file in opened.files] == ["one.safetensors", "two.safetensors"]
    assert opened.source == str(folder)


def test_a_folder_of_exports_names_them(folder, tmp_path):
    with pytest.raises(NotACheckpoint, match=r"these subfolders have one: head") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.fix.endswith(str(tmp_path / "head"))


def test_without_an_index_every_safetensors_file_counts(folder):
    (folder / INDEX).unlink()
    assert set(open_checkpoint(folder).tensors) == {"a", "b", "c"}


@pytest.mark.parametrize("name, tensors", [("model.safetensors", {"a": 1, "c": 3}), ("x.safetensors", {"c": 4})])
def test_a_file_beside_the_index_may_not_hold_what_the_index_places(folder, name, tensors):
    """TensorRT-LLM reads every file, transformers model.safetensors first, and vLLM what the index names."""
    shard(folder / name, **tensors)
    with pytest.raises(CorruptIndex, match=name) as caught:
        open_checkpoint(folder)
    assert caught.value.where.endswith(INDEX) and name in caught.value.fix
    (folder / name).unlink()
    assert set(open_checkpoint(folder).tensors) == {"a", "b", "c"}


def test_tensors_of_another_name_and_a_consolidated_copy_are_left_alone(folder):
    shard(folder / "mtp.safetensors", d=5)
    shard(folder / "consolidated.safetensors", a=9)
    assert set(open_checkpoint(folder).tensors) == {"a", "b", "c"}


def test_a_whole_checkpoint_that_the_index_names_is_opened(folder):
    for name in ("one.safetensors", "two.safetensors"):
        (folder / name).unlink()
    shard(folder / "model.safetensors", a=1, b=2, c=3)
    index(folder, dict.fromkeys("abc", "model.safetensors"))
    assert set(open_checkpoint(folder).tensors) == {"a", "b", "c"}


def test_a_hub_cache_of_links_is_opened(folder, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(i))
        file.symlink_to(blobs / str(i))
    assert set(open_checkpoint(folder).tensors) == {"a", "b", "c"}


OUTSIDE = [
    "../one.safetensors", "/etc/one.safetensors", "sub/one.safetensors", "./one.safetensors", "..", ".", "",
    "one.safetensors/", "one.bin", "one.safetensors\0", "a" * 300 + ".safetensors", "gone.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_names_another_path_is_refused(folder, name):
    shard(folder.parent / "one.safetensors", c=3)
    index(folder, {"a": "one.safetensors", "b": "one.safetensors", "c": name})
    with pytest.raises(CorruptIndex) as caught:
        open_checkpoint(folder)
    assert caught.value.where.endswith(INDEX) and caught.value.fix
    outside = "/" in name or not name.endswith(".safetensors")
    assert ("in its folder" in caught.value.what) == outside


MAPS = {
    "none": None,
    "a list": [],
    "numbers": {"a": 1},
    "lists": {"a": ["one.safetensors"]},
    "null": {"a": None},
    "a tensor the shard lacks": {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors",
                                 "d": "two.safetensors"},
    "a tensor in the wrong shard": {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"},
    "a tensor forgotten": {"a": "one.safetensors", "c": "two.safetensors"},
}  # fmt: skip


@pytest.mark.parametrize("weight_map", MAPS.values(), ids=MAPS)
def test_an_index_that_is_not_of_its_shards_is_refused(folder, weight_map):
    index(folder, weight_map)
    with pytest.raises(CorruptIndex):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards_is_refused_with_and_without_an_index(folder):
    shard(folder / "two.safetensors", c=3, a=7)
    with pytest.raises(CorruptIndex, match="a"):
        open_checkpoint(folder)
    (folder / INDEX).unlink()
    with pytest.raises(CorruptIndex, match=r"a is in both one\.safetensors and two\.safetensors") as caught:
        open_checkpoint(folder)
    assert INDEX not in caught.value.fix, "an index would not keep TensorRT-LLM from reading both"


def _break(folder, how):
    config = folder / "config.json"
    match how:
        case "index is a loop":
            (folder / INDEX).unlink()
            (folder / INDEX).symlink_to(INDEX)
        case "index leads nowhere":
            (folder / INDEX).unlink()
            (folder / INDEX).symlink_to("gone")
        case "index is a folder":
            (folder / INDEX).unlink()
            (folder / INDEX).mkdir()
        case "index is not JSON":
            (folder / INDEX).write_text("{")
        case "shard is a loop":
            (folder / "two.safetensors").unlink()
            (folder / "two.safetensors").symlink_to("two.safetensors")
        case "shard leads nowhere":
            (folder / "two.safetensors").unlink()
            (folder / "two.safetensors").symlink_to("gone")
        case "shard is a folder":
            (folder / "two.safetensors").unlink()
            (folder / "two.safetensors").mkdir()
        case "shard is cut":
            os.truncate(folder / "two.safetensors", 20)
        case "no config":
            config.unlink()
        case "config is a loop":
            config.unlink()
            config.symlink_to("config.json")
        case "config is a folder":
            config.unlink()
            config.mkdir()
        case "config is a list":
            config.write_text("[]")
        case "config is empty":
            config.write_text("")
        case "config is binary":
            config.write_bytes(b"\x80\x04\x95")
        case "config is UTF-16":
            config.write_bytes('{"hidden_size": 1}'.encode("utf-16"))
        case "config states a key twice":
            config.write_text('{"hidden_size": 8, "hidden_size": 16}')
        case "config holds NaN":
            config.write_text('{"rms_norm_eps": NaN}')
        case "config is huge":
            with config.open("wb") as file:
                file.truncate(200_000_000)


BROKEN = {
    "index is a loop": NotACheckpoint,
    "index leads nowhere": NotACheckpoint,
    "index is a folder": NotACheckpoint,
    "index is not JSON": ConfigInvalid,
    "shard is a loop": NotACheckpoint,
    "shard leads nowhere": NotACheckpoint,
    "shard is a folder": NotACheckpoint,
    "shard is cut": CorruptHeader,
    "no config": NotACheckpoint,
    "config is a loop": NotACheckpoint,
    "config is a folder": NotACheckpoint,
    "config is a list": ConfigInvalid,
    "config is empty": ConfigInvalid,
    "config is binary": ConfigInvalid,
    "config is UTF-16": ConfigInvalid,
    "config states a key twice": ConfigInvalid,
    "config holds NaN": ConfigInvalid,
    "config is huge": ConfigInvalid,
}


@pytest.mark.parametrize("how, fault", BROKEN.items(), ids=BROKEN)
def test_a_broken_folder_is_a_named_fault(folder, how, fault):
    _break(folder, how)
    with pytest.raises(fault) as caught:
        open_checkpoint(folder)
    assert type(caught.value) is fault and caught.value.where and caught.value.fix


def test_what_is_no_folder_is_a_named_fault(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("gone", "file", "loop", "file/below", "a" * 300):
        with pytest.raises(NotACheckpoint):
            open_checkpoint(tmp_path / name)


def test_pickles_are_named_and_not_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(NotACheckpoint) as caught:
        open_checkpoint(tmp_path)
    assert "pytorch_model.bin" in caught.value.fix


def test_what_an_interrupted_run_left_is_not_taken_for_a_checkpoint(folder):
    left = folder.rename(folder.parent / ".kconv-partial-head-0123abcd")
    with pytest.raises(NotACheckpoint, match="interrupted"):
        open_checkpoint(left)


def test_a_path_that_is_not_utf8_can_be_opened_and_its_source_printed(folder):
    odd = folder.rename(folder.parent / os.fsdecode(b"h\xff"))
    opened = open_checkpoint(odd)
    assert set(opened.tensors) == {"a", "b", "c"}
    opened.source.encode()


def test_an_index_of_nothing_is_a_folder_of_nothing(folder):
    index(folder, {})
    assert open_checkpoint(folder).tensors == {}


def test_an_index_of_shards_that_were_merged_may_be_deleted(folder):
    for file in folder.glob("*.safetensors"):
        file.unlink()
    shard(folder / "model.safetensors", a=1, b=2)
    with pytest.raises(CorruptIndex, match="which is missing") as caught:
        open_checkpoint(folder)
    assert "if model.safetensors holds all weights, delete the index" in caught.value.fix
    (folder / INDEX).unlink()
    assert set(open_checkpoint(folder).tensors) == {"a", "b"}


def test_a_cache_that_is_a_file_is_named_by_its_variable(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("KCONV_CACHE", str(tmp_path / "cache"))
    with pytest.raises(OutputFailed, match=r"KCONV_CACHE is .*which is a file"):
        cache_root()
