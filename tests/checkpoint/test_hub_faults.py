"""Each way in which the Hub, the network, the token or the cache fails, by its own name and with its fix."""

import io
import logging

import pytest
from support.hub import SECRET, head, offline
from support.hub_routes import Reply, refusal

from kconv.checkpoint.hub import fetch_dataset_file
from kconv.checkpoint.source import resolve
from kconv.errors import HubRefused, HubUnreachable, NotACheckpoint, OutputFailed


@pytest.fixture
def logged(monkeypatch) -> io.StringIO:
    """Return what the client's libraries log."""
    text = io.StringIO()
    for name in ("", "huggingface_hub", "httpx", "httpcore"):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, logging.StreamHandler(text)])
        logger.warning("heard %s", name)
        assert f"heard {name}" in text.getvalue()
    return text


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


def test_a_token_that_is_not_known_is_named_and_not_shown(hub, monkeypatch, logged):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    hub.commit("org/head", head())
    with pytest.raises(HubRefused, match="does not accept the token") as raised:
        resolve("org/head")
    assert "HF_TOKEN" in raised.value.fix
    assert SECRET not in str(raised.value) + logged.getvalue()


@pytest.mark.parametrize("garbled", [SECRET + "\x01", SECRET + "é"])
def test_a_garbled_token_is_named_and_not_shown(hub, monkeypatch, logged, garbled):
    hub.commit("org/head", head())
    resolve("org/head")
    monkeypatch.setenv("HF_TOKEN", garbled)
    with pytest.raises(HubRefused, match="contains invalid characters") as raised:
        resolve("org/head")
    assert SECRET not in str(raised.value) + logged.getvalue()


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
        (Reply(429), HubUnreachable, "is rate-limiting requests", "Wait"),
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


def test_a_file_that_is_not_there_is_named(hub):
    sha = hub.commit("org/head", head())
    hub.fail("model.safetensors", refusal(404, "EntryNotFound", "Entry not found"))
    with pytest.raises(NotACheckpoint, match=rf"org/head@{sha} has no model\.safetensors"):
        resolve("org/head").open_headers()


def test_a_data_set_without_the_file_says_which_and_where_it_was_looked_for(hub):
    hub.commit("datasets/org/prompts", {"README.md": b"# none"})
    with pytest.raises(HubRefused, match=r"org/prompts@main has no question\.jsonl") as raised:
        fetch_dataset_file("org/prompts", "question.jsonl", "main")
    assert raised.value.where == f"{hub.url}/datasets/org/prompts/tree/main"
    assert raised.value.fix.endswith(f"{hub.url}/datasets/org/prompts/commits/main")


@pytest.mark.parametrize("file", ["question.jsonl", "qualitative/test.parquet"])
def test_offline_a_branch_of_a_data_set_is_what_the_cache_last_saw(hub, monkeypatch, file):
    sha = hub.commit("datasets/org/prompts", {file: b"{}"})
    fetched = fetch_dataset_file("org/prompts", file, "main")
    assert fetched[1] == sha and fetched[0].read_bytes() == b"{}"
    assert fetch_dataset_file("org/prompts", file, sha) == fetched
    offline(monkeypatch)
    hub.served.clear()
    assert fetch_dataset_file("org/prompts", file, "main") == fetched
    with pytest.raises(HubUnreachable, match="HF_HUB_OFFLINE is set") as raised:
        fetch_dataset_file("org/prompts", "other.jsonl", "main")
    assert raised.value.fix.endswith("hf download org/prompts --revision main --repo-type dataset")
    assert hub.served == []


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
    with pytest.raises(HubUnreachable, match="does not answer like the Hub"):
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
    with pytest.raises(NotACheckpoint, match="org/head links to gone, which does not exist"):
        resolve("org/head").open_headers()
    assert hub.served == []


@pytest.mark.parametrize("repo", ["org/head..git", "o" * 300 + "/head"])
def test_an_id_that_the_hub_allows_to_nobody_is_no_checkpoint(hub, repo):
    with pytest.raises(NotACheckpoint, match="neither a folder nor a hub id"):
        resolve(repo)
    assert hub.served == []
