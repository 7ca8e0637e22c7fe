"""What a user names: a folder or a hub id, pinned; headers by range, weights by download, faults by name."""

import json
import shutil
import struct
import subprocess
import sys

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import save, save_file
from support.hub_repos import Reply, refusal

from kconv.checkpoint.bytes import digest
from kconv.checkpoint.folder import INDEX, open_checkpoint
from kconv.checkpoint.source import Folder, resolve
from kconv.errors import (
    CorruptHeader,
    CorruptIndex,
    HubRefused,
    HubUnreachable,
    NotACheckpoint,
    OutputFailed,
)

SECRET = "hf_aVerySecretToken"
FILES = r"GET /(org/head/resolve|storage/org/head)/"


def weights(fill=1.0):
    return {"fc.weight": torch.full((512, 512), fill), "norm.weight": torch.ones(512, dtype=torch.bfloat16)}


def head(fill=1.0):
    """The files of a repository, in one safetensors of a megabyte, with some that kconv has no use for."""
    return {
        "config.json": b'{"hidden_size": 512}',
        "model.safetensors": save(weights(fill)),
        "README.md": b"# a head\n",
        "optimizer.pt": b"a pickle, as far as anybody knows",
        "checkpoint-1/model.safetensors": save(weights(9.0)),
    }


@pytest.fixture
def folder(tmp_path):
    """A folder of two shards and an index, as safetensors itself writes them."""
    folder = tmp_path / "local"
    folder.mkdir()
    shards = {"one.safetensors": {"a": torch.rand(256, 512)}, "two.safetensors": {"b": torch.rand(64, 512)}}
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    placed = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (folder / "config.json").write_text('{"hidden_size": 512}')
    return folder


def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


# --- which of the two a name is ---


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
    with pytest.raises(NotACheckpoint, match="is not a folder"):
        resolve(name).open_headers()
    assert hub.served == []


def test_a_local_path_does_not_import_the_hubs_client(folder):
    code = (
        "import sys; from kconv.checkpoint.source import resolve; resolve(sys.argv[1]).open_weights(); "
        "print('huggingface_hub' in sys.modules, 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]


# --- pinned ---


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


# --- headers ---


def test_headers_are_those_of_the_folder_without_its_bytes(hub, folder):
    sha = hub.commit("org/head", folder)
    opened, local = resolve("org/head").open_headers(), open_checkpoint(folder)
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
        (without_weights, NotACheckpoint, "no pickles; save optimizer.pt"),
        (without_config, NotACheckpoint, "no config.json"),
        (without_shard, CorruptIndex, "gone.safetensors, which is not there"),
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
    with pytest.raises(HubUnreachable, match="whole files only") as raised:
        resolve("org/head").open_headers()
    assert "hf download org/head" in raised.value.fix


# --- weights ---


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


def test_a_folder_gives_itself(folder):
    source = resolve(str(folder))
    assert (source.fetch_config(), source.fetch_model(), source.name) == (folder, folder, str(folder))


# --- offline ---


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
    with pytest.raises(HubUnreachable, match="not whole in the local cache"):
        resolve("org/head").open_weights()


def test_without_a_network_what_was_downloaded_is_found(hub):
    sha = hub.commit("org/head", head())
    resolve("org/head").open_weights()
    hub.fail(".*", Reply(503))
    assert resolve("org/head").open_weights().source == f"org/head@{sha}"


# --- faults ---


def test_what_is_neither_here_nor_on_the_hub_says_both(hub, monkeypatch):
    for token in ("", SECRET):
        hub.tokens = {token}
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(HubRefused, match="no folder org/head here, and the Hub shows no such") as raised:
            resolve("org/head")
        assert "hf auth login" in raised.value.fix
        assert raised.value.where == f"{hub.url}/org/head"


def test_a_private_repository_needs_its_token(hub, monkeypatch):
    sha = hub.commit("org/head", head())
    hub.repos["org/head"].private = True
    with pytest.raises(HubRefused, match="no such repository"):
        resolve("org/head")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    hub.tokens = {SECRET}
    assert resolve("org/head").name == f"org/head@{sha}"


@pytest.mark.parametrize("revision", ["v9", "f" * 40])
def test_a_revision_that_is_not_there_is_named(hub, revision):
    hub.commit("org/head", head())
    with pytest.raises(HubRefused, match=f"org/head has no revision {revision}"):
        resolve(f"org/head@{revision}").open_headers()


@pytest.mark.parametrize("token", ["", SECRET])
@pytest.mark.parametrize("open_", ["open_headers", "open_weights", "fetch_config", "fetch_model"])
def test_a_gated_repository_says_where_its_terms_are(hub, monkeypatch, open_, token):
    monkeypatch.setenv("HF_TOKEN", token)
    hub.tokens = {token}
    hub.commit("org/head", head())
    hub.repos["org/head"].gated = True
    with pytest.raises(HubRefused, match="org/head is gated") as raised:
        getattr(resolve("org/head"), open_)()
    assert raised.value.where == f"{hub.url}/org/head"
    assert "hf auth login" in raised.value.fix


def test_a_token_that_is_not_known_is_named_and_not_shown(hub, monkeypatch, caplog):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    hub.commit("org/head", head())
    with pytest.raises(HubRefused, match="does not accept the token") as raised:
        resolve("org/head")
    assert "HF_TOKEN" in raised.value.fix
    assert SECRET not in str(raised.value) + caplog.text


@pytest.mark.parametrize("garbled", [SECRET + "\x01", SECRET + "é"])
def test_a_garbled_token_is_named_and_not_shown(hub, monkeypatch, caplog, garbled):
    hub.commit("org/head", head())
    resolve("org/head")
    monkeypatch.setenv("HF_TOKEN", garbled)
    with pytest.raises(HubRefused, match="no token has") as raised:
        resolve("org/head")
    assert SECRET not in str(raised.value) + caplog.text


def test_a_token_exchange_that_fails_is_named(hub, monkeypatch):
    hub.commit("org/head", head())
    monkeypatch.setenv("HF_OIDC_RESOURCE", "org/head")
    with pytest.raises(HubRefused, match="HF_OIDC_RESOURCE"):
        resolve("org/head")


@pytest.mark.parametrize("where", [r"/api/models/org/head", r"/tree/", r"HEAD .*config\.json", r"GET /storage/"])
@pytest.mark.parametrize(
    ("reply", "fault", "says", "fix"),
    [
        (refusal(403, message="Forbidden"), HubRefused, "let this token read", "read access"),
        (Reply(429), HubUnreachable, "too many requests", "Wait"),
        (Reply(500), HubUnreachable, "500|connection", "again|network"),
    ],
)
def test_what_the_hub_refuses_is_named_wherever_it_does(hub, monkeypatch, where, reply, fault, says, fix):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.commit("org/head", head())
    hub.fail(where, reply)
    with pytest.raises(fault, match=says) as raised:
        resolve("org/head").open_headers()
    assert any(word in raised.value.fix for word in fix.split("|"))


@pytest.mark.parametrize("where", [r"/api/models/org/head", r"/tree/", r"GET .*config\.json", r"GET /storage/"])
def test_a_connection_that_drops_is_named(hub, monkeypatch, where):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.commit("org/head", head())
    hub.fail(where)
    with pytest.raises(HubUnreachable, match="the connection to the Hub failed") as raised:
        resolve("org/head").open_headers()
    assert "HF_ENDPOINT" in raised.value.fix


def test_a_busy_hub_is_asked_again_for_a_header(hub, monkeypatch):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    hub.commit("org/head", head())
    hub.fail(r"GET /storage/", Reply(503), times=2)
    assert len(resolve("org/head").open_headers().tensors) == 2
    assert len(waited) == 2


def test_a_hub_that_is_not_there_is_named(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnreachable, match="the connection to the Hub failed"):
        resolve("org/head")


def test_a_network_that_asks_for_a_login_is_not_taken_for_the_hub(hub):
    hub.fail(".*", Reply(200, b"<html>Please log in", {"Content-Type": "text/html"}))
    with pytest.raises(HubUnreachable, match="does not answer as the Hub does"):
        resolve("org/head")


def test_offline_what_is_not_in_the_cache_is_named_with_the_command_that_fetches_it(hub, monkeypatch):
    sha = hub.commit("org/head", head())
    offline(monkeypatch)
    for name, revision in (("org/head", ""), (f"org/head@{sha}", f" --revision {sha}")):
        with pytest.raises(HubUnreachable, match="HF_HUB_OFFLINE is set") as raised:
            resolve(name).open_headers()
        assert raised.value.fix.endswith(f"hf download org/head{revision}")
    assert hub.served == []


def test_a_cache_that_cannot_be_written_is_named(hub, monkeypatch, tmp_path):
    (tmp_path / "occupied").write_text("a file where the cache should be")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "occupied" / "hub"))
    hub.commit("org/head", head())
    with pytest.raises(OutputFailed, match="could not be stored") as raised:
        resolve("org/head").open_weights()
    assert "HF_HOME" in raised.value.fix


def test_a_link_that_leads_nowhere_is_a_missing_folder(hub, tmp_path, monkeypatch):
    hub.commit("org/head", head())
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "head").symlink_to("gone")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotACheckpoint, match="is not a folder"):
        resolve("org/head").open_headers()
    assert hub.served == []


@pytest.mark.parametrize("repo", ["org/head..git", "o" * 300 + "/head"])
def test_an_id_that_the_hub_allows_to_nobody_is_no_checkpoint(hub, repo):
    with pytest.raises(NotACheckpoint, match="neither a folder nor a hub id"):
        resolve(repo)
    assert hub.served == []
