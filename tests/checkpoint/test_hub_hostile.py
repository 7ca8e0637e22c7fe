"""A Hub, a mirror or a proxy that lies: bytes that are not the announced ones, and answers of another shape."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.hub import head, offline
from support.hub_routes import Reply

from kconv.checkpoint.source import resolve
from kconv.errors import DownloadDamaged, HubUnreachable, KconvError, NotACheckpoint

TOKENIZER = {"tokenizer.json": b"{}", "LICENSE": b"terms"}


def flip(data: bytes) -> bytes:
    """Return bytes of the same length, the last of them changed: a weight, and a file's end."""
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("opening", ["open_weights", "fetch_model", "open_tensors"])
def test_weights_that_were_changed_on_the_way_are_refused(hub, opening):
    files = head()
    hub.commit("org/head", files)
    hub.garble = lambda data: flip(data) if data == files["model.safetensors"] else data
    source = resolve("org/head")
    call = getattr(source, opening)
    with pytest.raises(DownloadDamaged, match=r"model\.safetensors differs from the file on the Hub") as raised:
        call(["fc.weight"]) if opening == "open_tensors" else call()
    hub.garble = lambda data: data
    Path(raised.value.where).unlink()  # as the message says
    assert source.open_weights().tensors["fc.weight"].file.read_bytes() == files["model.safetensors"]


def test_a_config_that_was_changed_on_the_way_is_refused(hub):
    files = head()
    hub.commit("org/head", files)
    hub.garble = lambda data: data.replace(b"512", b"513") if data == files["config.json"] else data
    with pytest.raises(DownloadDamaged, match=r"config\.json"):
        resolve("org/head").open_weights()


def test_what_was_read_once_is_not_read_again_unless_it_changed(hub, monkeypatch, tmp_path):
    # Notes are named by digest: in a cache that is shared, a test beside this one notes its own copy of the same file.
    monkeypatch.setenv("KCONV_CACHE", str(tmp_path / "cache"))
    files = head()
    sha = hub.commit("org/head", files)
    file = resolve("org/head").open_weights().folder / "model.safetensors"
    offline(monkeypatch)
    monkeypatch.setattr("kconv.checkpoint.hub.file_digest", lambda file: "0" * 64)
    source = resolve(f"org/head@{sha}")
    source.open_weights()
    stored = file.resolve()
    stored.write_bytes(flip(files["model.safetensors"]))
    os.utime(stored, ns=(1, 1))
    with pytest.raises(DownloadDamaged):
        source.open_weights()


SHAPES = [b"null", b"{}", b"[]", b"[1]", b'"text"', b"1", b"[" * 5000, b'{"sha": 1}', b'[{"type": "file"}]', b"[[]]"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("route", [r"GET /api/models/org/head/revision/", r"GET /api/models/org/head/tree/", r"/api/"])
def test_an_answer_of_another_shape_is_named(hub, monkeypatch, route, shape):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.commit("org/head", head())
    hub.fail(route, Reply(200, shape, {"Content-Type": "application/json"}))
    for opening in ("open_headers", "open_weights"):
        try:
            getattr(resolve("org/head"), opening)()
        except KconvError as fault:
            assert isinstance(fault, HubUnreachable) or fault.fix


def test_a_file_of_which_no_digest_is_announced_is_refused(hub, monkeypatch):
    """A proxy that drops the digest could change the weights behind it."""
    answer = hub.answer

    def drop(call):
        reply = answer(call)
        told = {name: '"-1"' if name == "X-Linked-Etag" else value for name, value in reply.headers.items()}
        return replace(reply, headers=told)

    monkeypatch.setattr(hub, "answer", drop)
    hub.commit("org/head", head())
    with pytest.raises(DownloadDamaged, match=r"model\.safetensors .* is not a digest"):
        resolve("org/head").open_weights()


def test_a_listing_without_files_is_named_and_where_it_is_kept(hub):
    hub.commit("org/head", head())
    hub.fail(r"GET /api/models/org/head/tree/", Reply(200, b"[]", {"Content-Type": "application/json"}), times=1)
    for _ in range(2):
        with pytest.raises(NotACheckpoint, match="lists no checkpoint files") as caught:
            resolve("org/head").open_weights()
    kept = Path(re.search(r"delete (\S+),", caught.value.fix)[1])
    assert any(kept.glob("*.json"))
