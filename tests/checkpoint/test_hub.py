"""What is downloaded of a repository of the Hub: byte for byte, pinned, no more than is needed, and found offline."""

import io
import shutil

import pytest
import torch
from blake3 import blake3
from support.hub import SECRET, head, offline, weights
from support.hub_routes import Reply

from kconv.checkpoint.bytes import digest
from kconv.checkpoint.source import resolve
from kconv.checkpoint.tensors import read_tensor
from kconv.errors import HubUnreachable


def test_weights_are_downloaded_byte_for_byte_and_nothing_else_is(hub):
    files = head()
    sha = hub.commit("org/head", files)
    opened = resolve("org/head").open_weights()
    assert not opened.headers_only
    assert opened.source == f"org/head@{sha}"
    assert opened.tensors["fc.weight"].file.read_bytes() == files["model.safetensors"]
    expected = blake3(weights()["fc.weight"].numpy().tobytes()).hexdigest()
    assert digest(opened.tensors["fc.weight"]) == expected
    assert sorted(path.name for path in opened.folder.iterdir()) == ["config.json", "model.safetensors"]
    asked = {s.call.path for s in hub.served if "/resolve/" in s.call.path}
    assert asked == {f"/org/head/resolve/{sha}/{name}" for name in ("config.json", "model.safetensors")}


def test_a_download_that_breaks_off_is_taken_up_again(hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    files = head()
    hub.commit("org/head", files)
    hub.fail(r"GET /storage/", times=2)
    opened = resolve("org/head").open_weights()
    assert opened.tensors["fc.weight"].file.read_bytes() == files["model.safetensors"]


def test_the_token_is_shown_to_the_hub_and_not_to_its_storage(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    hub.tokens = {SECRET}
    hub.commit("org/head", head())
    hub.repos["org/head"].private = True
    source = resolve("org/head")
    source.open_headers()
    source.open_weights()
    tokens = {"storage" in s.call.path: set() for s in hub.served}
    for served in hub.served:
        tokens["storage" in served.call.path].add(served.call.token)
    assert tokens == {False: {SECRET}, True: {""}}


def test_a_config_is_fetched_alone(hub):
    hub.commit("org/head", head())
    folder = resolve("org/head").fetch_config()
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert hub.sent(r"GET /storage/") == 0


def test_a_model_is_fetched_with_its_tokenizer(hub):
    tokenizer = ("tokenizer.json", "tiktoken.model", "tokenization_kimi.py", "chat_template.jinja")
    hub.commit("org/head", head() | dict.fromkeys(tokenizer, b"{}"))
    folder = resolve("org/head").fetch_model()
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", *tokenizer}


def test_a_tokenizer_is_fetched_without_weights(hub):
    tokenizer = ("tokenizer.json", "tokenizer_config.json", "tiktoken.model", "tokenization_kimi.py")
    hub.commit("org/head", head() | dict.fromkeys(tokenizer, b"{}"))
    folder = resolve("org/head").fetch_tokenizer()
    assert {path.name for path in folder.iterdir()} == {"config.json", *tokenizer}
    assert hub.sent(r"GET /storage/") == 0


LICENSES = ("LICENSE", "License.md", "license.txt", "COPYING", "NOTICE.txt", "Third_Party_Notices.md")


def test_a_license_is_fetched_without_weights(hub):
    hub.commit("org/head", head() | dict.fromkeys(LICENSES, b"terms"))
    folder = resolve("org/head").fetch_license()
    assert {path.name for path in folder.iterdir()} == {"config.json", *LICENSES}
    assert hub.sent(r"GET /storage/") == 0


def test_a_repository_without_a_license_gives_a_folder_without_one(hub):
    hub.commit("org/head", head())
    assert [path.name for path in resolve("org/head").fetch_license().iterdir()] == ["config.json"]


@pytest.mark.parametrize("open_", ["open_weights", "fetch_model"])
def test_licenses_come_with_the_weights(hub, open_):
    hub.commit("org/head", head() | dict.fromkeys(LICENSES, b"terms"))
    opened = getattr(resolve("org/head"), open_)()
    folder = opened.folder if open_ == "open_weights" else opened
    assert {path.name for path in folder.iterdir()} >= set(LICENSES)


@pytest.mark.parametrize("fetch", ["fetch_tokenizer", "fetch_license"])
def test_what_was_fetched_is_found_offline(hub, monkeypatch, fetch):
    hub.commit("org/head", head() | {"LICENSE": b"terms", "tokenizer.json": b"{}"})
    source = resolve("org/head")
    before = sorted(getattr(source, fetch)().iterdir())
    offline(monkeypatch)
    assert sorted(getattr(source, fetch)().iterdir()) == before


def test_a_folder_gives_itself(two_shards):
    source = resolve(str(two_shards))
    fetched = {getattr(source, name)() for name in ("fetch_config", "fetch_tokenizer", "fetch_license", "fetch_model")}
    assert (fetched, source.name) == ({two_shards}, str(two_shards))


def test_offline_the_cache_answers(hub, monkeypatch):
    sha = hub.commit("org/head", head())
    resolve("org/head").open_weights()
    hub.served.clear()
    offline(monkeypatch)
    source = resolve("org/head")
    assert source.open_headers().source == source.open_weights().source == f"org/head@{sha}"
    assert hub.served == []


def test_offline_a_cache_without_a_listing_answers_too(hub, monkeypatch):
    """Older versions of huggingface_hub kept none."""
    sha = hub.commit("org/head", head())
    folder = resolve("org/head").open_weights().folder
    shutil.rmtree(folder.parent.parent / "trees")
    offline(monkeypatch)
    assert resolve("org/head").open_weights().source == f"org/head@{sha}"


def test_offline_a_cache_that_holds_the_config_alone_is_not_whole(hub, monkeypatch):
    hub.commit("org/head", head())
    resolve("org/head").fetch_config()
    offline(monkeypatch)
    with pytest.raises(HubUnreachable, match="the local cache lacks files of"):
        resolve("org/head").open_weights()


def test_without_a_network_what_was_downloaded_is_found(hub):
    sha = hub.commit("org/head", head())
    resolve("org/head").open_weights()
    hub.fail(".*", Reply(503))
    assert resolve("org/head").open_weights().source == f"org/head@{sha}"


def test_a_repository_of_pickles_alone_is_downloaded(hub):
    saved = io.BytesIO()
    torch.save(weights(), saved)
    files = {name: content for name, content in head().items() if name != "model.safetensors"}
    hub.commit("org/old", files | {"pytorch_model.bin": saved.getvalue()})
    opened = resolve("org/old").open_headers()
    assert opened.tensors.keys() == weights().keys() and not opened.headers_only
    assert torch.equal(read_tensor(opened.tensors["fc.weight"]), weights()["fc.weight"])
