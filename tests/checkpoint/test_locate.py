"""A few tensors of a large checkpoint: found without its other files, here and on the Hub."""

import json

import pytest
import torch
from safetensors.torch import load, save, save_file

from kconv.checkpoint.folder import INDEX, locate
from kconv.checkpoint.source import Folder, resolve
from kconv.checkpoint.tensors import read_tensor
from kconv.errors import ConfigInvalid, CorruptHeader, CorruptIndex

SHARDS = {
    "one.safetensors": {"embed": torch.rand(64, 16)},
    "two.safetensors": {"layer": torch.rand(512, 512)},
    "three.safetensors": {"head": torch.rand(64, 16), "norm": torch.ones(16)},
}
PLACED = {tensor: name for name, tensors in SHARDS.items() for tensor in tensors}


def files(placed=PLACED):
    return {name: save(tensors) for name, tensors in SHARDS.items()} | {
        "config.json": b"{}",
        INDEX: json.dumps({"weight_map": placed}).encode(),
    }


@pytest.fixture
def folder(tmp_path):
    for name, data in files().items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def check(found):
    assert found.keys() == {"embed", "head"}
    for name, info in found.items():
        assert torch.equal(read_tensor(info), SHARDS[PLACED[name]][name])


def test_found_in_a_folder_that_lacks_the_other_shards(folder):
    (folder / "two.safetensors").unlink()
    check(Folder(folder).open_tensors(["embed", "head"]))


def test_only_the_files_that_hold_them_are_fetched(folder):
    fetched = []

    def fetch(name):
        fetched.append(name)
        return folder / name

    check(locate(["embed", "head"], files(), fetch))
    assert sorted(fetched) == sorted([INDEX, "one.safetensors", "three.safetensors"])


def test_a_checkpoint_without_an_index_is_searched(tmp_path):
    save_file(SHARDS["three.safetensors"], tmp_path / "model.safetensors")
    assert Folder(tmp_path).open_tensors(["head", "embed"]).keys() == {"head"}


def test_a_whole_checkpoint_beside_an_index_of_others_is_refused(folder):
    save_file({"embed": torch.rand(64, 16)}, folder / "model.safetensors")
    with pytest.raises(CorruptIndex, match=r"model\.safetensors holds tensors that the index places"):
        Folder(folder).open_tensors(["embed"])


def test_a_tensor_in_two_files_without_an_index_is_refused(folder):
    (folder / INDEX).unlink()
    save_file({"embed": torch.rand(64, 16)}, folder / "two.safetensors")
    assert Folder(folder).open_tensors(["head"]).keys() == {"head"}
    with pytest.raises(CorruptIndex, match=r"embed is in both one\.safetensors and two\.safetensors"):
        Folder(folder).open_tensors(["embed"])


def test_what_is_not_there_is_not_found(folder):
    assert Folder(folder).open_tensors(["lm_head.weight"]) == {}


def test_only_their_files_are_downloaded(hub):
    hub.commit("org/target", files())
    check(resolve("org/target").open_tensors(["embed", "head"]))
    asked = {served.call.path.rsplit("/", 1)[-1] for served in hub.served if "/resolve/" in served.call.path}
    assert asked == {INDEX, "one.safetensors", "three.safetensors"}
    assert hub.sent() < len(files()["two.safetensors"]) / 10


def test_offline_the_cache_answers_with_what_it_holds(hub, monkeypatch):
    hub.commit("org/target", files())
    source = resolve("org/target")
    source.fetch_config()
    source.open_tensors(["embed", "head"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    check(source.open_tensors(["embed", "head"]))
    with pytest.raises(CorruptIndex, match=r"two\.safetensors"):
        source.open_tensors(["layer"])


LIES = {
    "a way out of the folder": ({"embed": "../one.safetensors"}, CorruptIndex),
    "a missing shard": ({"embed": "four.safetensors"}, CorruptIndex),
    "a file that is no name": ({"embed": 4}, CorruptIndex),
    "a list of files": ({"embed": ["one.safetensors"]}, CorruptIndex),
    "another kind of file": ({"embed": "config.json"}, CorruptIndex),
    "no map": (None, CorruptIndex),
}


@pytest.mark.parametrize("placed, fault", LIES.values(), ids=LIES)
def test_an_index_that_lies_is_refused(folder, placed, fault):
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(fault) as caught:
        Folder(folder).open_tensors(["embed"])
    assert caught.value.where and caught.value.fix


def test_a_broken_index_or_shard_is_refused(folder):
    (folder / "one.safetensors").write_bytes(files()["one.safetensors"][:20])
    with pytest.raises(CorruptHeader):
        Folder(folder).open_tensors(["embed"])
    assert load(files()["three.safetensors"]).keys() == Folder(folder).open_tensors(["head", "norm"]).keys()
    (folder / INDEX).write_text("{")
    with pytest.raises(ConfigInvalid):
        Folder(folder).open_tensors(["embed"])
