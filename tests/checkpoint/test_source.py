"""What a user names: a folder or a hub id, pinned to a commit; headers read by range."""

import json
import struct
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from support.hub import head, weights

from kconv.checkpoint.bytes import digest
from kconv.checkpoint.folder import INDEX, open_checkpoint
from kconv.checkpoint.source import Folder, hub_id_of, resolve
from kconv.errors import CorruptHeader, CorruptIndex, HubUnreachable, NotACheckpoint


def test_a_path_that_exists_wins_over_a_hub_id(hub, tmp_path, monkeypatch):
    hub.commit("org/head", head())
    (tmp_path / "org" / "head").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert isinstance(resolve("org/head"), Folder)
    assert hub.served == []


@pytest.mark.parametrize(
    "name", ["./head", "../head", "/head", "a/b/c", "out/head/", "head", "~/head", "-/head", "n" * 300]
)
def test_what_is_not_formed_like_an_id_is_a_missing_folder(hub, tmp_path, monkeypatch, name):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(NotACheckpoint, match=r"there is no folder|is not a folder: File name too long"):
        resolve(name).open_headers()
    assert hub.served == []


def test_a_hub_id_with_a_slash_at_its_end_is_told_without_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotACheckpoint) as caught:
        resolve("org/name/")
    assert "write it without the / at its end" in caught.value.fix


def test_a_local_path_does_not_import_the_hubs_client(two_shards):
    code = (
        "import sys; from kconv.checkpoint.source import resolve; resolve(sys.argv[1]).open_weights(); "
        "print('huggingface_hub' in sys.modules, 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(two_shards)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]


def test_branches_tags_and_commits_are_pinned_to_their_commit(hub):
    old = hub.commit("org/head", head(1.0))
    hub.repos["org/head"].tags["v1"] = old
    new = hub.commit("org/head", head(2.0))
    other = hub.commit("org/head", head(3.0), branch="dev")
    names = ["org/head", "org/head@main", "org/head@dev", "org/head@v1", f"org/head@{old}"]
    assert [resolve(name).name for name in names] == [f"org/head@{sha}" for sha in (new, new, other, old, old)]


def test_a_branch_that_moves_after_it_was_resolved_is_not_followed(hub):
    old = hub.commit("org/head", head(1.0))
    source = resolve("org/head@main")
    hub.commit("org/head", head(2.0))
    opened = source.open_weights()
    assert opened.source == f"org/head@{old}"
    with safe_open(opened.tensors["fc.weight"].file, "pt") as file:
        assert torch.equal(file.get_tensor("fc.weight"), weights(1.0)["fc.weight"])


def test_headers_are_those_of_the_folder_without_its_bytes(hub, two_shards):
    sha = hub.commit("org/head", two_shards)
    opened, local = resolve("org/head").open_headers(), open_checkpoint(two_shards)
    assert opened.headers_only
    assert opened.source == f"org/head@{sha}"
    assert opened.config == local.config

    def places(checkpoint):
        return {n: (i.name, i.dtype, i.shape, i.begin, i.size, i.file.name) for n, i in checkpoint.tensors.items()}

    assert places(opened) == places(local)
    assert not any(info.file.exists() for info in opened.tensors.values())


def test_headers_cost_a_hundredth_of_the_file(hub):
    files = head()
    hub.commit("org/head", files)
    assert len(resolve("org/head").open_headers().tensors) == 2
    (header,) = struct.unpack("<Q", files["model.safetensors"][:8])
    assert hub.sent(r"GET /storage/") == 8 + header
    assert hub.sent() < len(files["model.safetensors"]) / 100


def test_the_weights_of_a_headers_only_checkpoint_are_not_there_to_be_read(hub):
    hub.commit("org/head", head())
    with pytest.raises(NotACheckpoint):
        digest(resolve("org/head").open_headers().tensors["fc.weight"])


def truncated(files):
    return files | {"model.safetensors": files["model.safetensors"][:-4]}


def overrun(files):
    return files | {"model.safetensors": struct.pack("<Q", 1 << 40) + files["model.safetensors"][8:]}


def without_weights(files):
    return {name: data for name, data in files.items() if name != "model.safetensors"}


def without_config(files):
    return {name: data for name, data in files.items() if name != "config.json"}


def without_shard(files):
    index = {"weight_map": {"fc.weight": "model.safetensors", "norm.weight": "gone.safetensors"}}
    return files | {INDEX: json.dumps(index).encode()}


@pytest.mark.parametrize(
    ("spoil", "fault", "says"),
    [
        (truncated, CorruptHeader, "model.safetensors"),
        (overrun, CorruptHeader, "claims"),
        (lambda files: files | {"model.safetensors": b"short"}, CorruptHeader, "5 are there"),
        (lambda files: files | {"model.safetensors": b""}, CorruptHeader, "0 are there"),
        (without_weights, NotACheckpoint, "Save the tensors of optimizer.pt"),
        (without_config, NotACheckpoint, "no config.json"),
        (without_shard, CorruptIndex, "gone.safetensors, which is missing"),
    ],
)
def test_a_spoiled_repository_is_refused_by_its_headers(hub, spoil, fault, says):
    sha = hub.commit("org/head", spoil(head()))
    with pytest.raises(fault, match=says) as raised:
        resolve("org/head").open_headers()
    assert sha in raised.value.where
    assert hub.sent() < 50_000


def test_a_server_without_ranges_is_not_read_whole(hub):
    hub.commit("org/head", head())
    hub.serves_ranges = False
    with pytest.raises(HubUnreachable, match="only whole files") as raised:
        resolve("org/head").open_headers()
    assert "hf download org/head" in raised.value.fix


@pytest.mark.parametrize(
    "url",
    [
        "https://huggingface.co/org/head",
        "https://huggingface.co/org/head/",
        "https://huggingface.co/org/head/tree/main",
        "https://huggingface.co/org/head/blob/main/config.json",
        "http://hf.co/org/head?library=transformers",
        "hf://org/head",
        "hf://org/head@main",
    ],
)
def test_a_pasted_url_is_the_repository_that_it_shows(hub, url):
    commit = hub.commit("org/head", head())
    assert resolve(url).name == f"org/head@{commit}"


@pytest.mark.parametrize("tail", ["refs/pr/1", "refs%2Fpr%2F1", "refs%2Fpr%2F1/config.json"])
def test_the_page_of_a_pull_request_is_its_revision(tail):
    assert hub_id_of(f"https://huggingface.co/org/head/tree/{tail}") == "org/head@refs/pr/1"


@pytest.mark.parametrize("url", ["https://example.com/org/head", "https://huggingface.co/org", "hf://../../etc"])
def test_another_url_is_a_missing_folder(hub, url):
    with pytest.raises(NotACheckpoint):
        resolve(url).open_headers()
    assert hub.served == []
