"""What goes wrong while a head is published: it is named, and nothing unproven is left under the tag."""

from __future__ import annotations

import json

import httpx
import pytest
from support.hub_routes import Reply, refusal
from support.releases import REPO, TAG, TOKEN, dry, holds, publish, write_release, writes

from kconv.cards.publish import remote
from kconv.errors import HubMoved, HubRefused, HubUnreachable, KconvError, PublishRefused, ReadBackFailed

pytestmark = pytest.mark.usefixtures("waits")


def test_an_expected_parent_that_is_not_there_is_refused(hub, folder):
    sha = hub.commit(REPO, {".gitattributes": b"", "x": b""})
    for call in (publish, dry):
        with pytest.raises(HubMoved, match=sha[:10]):
            call(folder, expect_parent="0" * 40)
    assert writes(hub) == []
    assert publish(folder, expect_parent=sha).uploaded
    assert publish(folder, expect_parent=sha).done == ()  # it is there: no parent is needed any more


def test_a_branch_that_moves_amid_the_upload_is_refused(hub, folder):
    hub.commit(REPO, {".gitattributes": b"", "x": b""})

    def move(call):
        if call.path.endswith("/commit/main"):
            hub.commit(REPO, {".gitattributes": b"", "x": b"by somebody else"})

    hub.before = move
    with pytest.raises(HubMoved, match="moved on"):
        publish(folder)
    assert hub.repos[REPO].tags == {}
    assert hub.repos[REPO].commits[hub.repos[REPO].branches["main"]]["x"] == b"by somebody else"


def test_a_tag_with_other_files_is_never_moved(hub, folder, tmp_path):
    first = publish(folder)
    before = len(writes(hub))
    for call in (publish, dry):
        with pytest.raises(HubMoved, match="never moved"):
            call(write_release(tmp_path / call.__name__, seed=1))
    assert hub.repos[REPO].tags == {TAG: first.commit} and len(writes(hub)) == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "README.md"])
def test_a_flipped_byte_in_the_stored_file_is_found_and_nothing_is_tagged(hub, folder, name):
    data = (folder / name).read_bytes()
    hub.garble = lambda stored: bytes([stored[0] ^ 1]) + stored[1:] if stored == data else stored
    with pytest.raises(ReadBackFailed, match=name):
        publish(folder, public=True)
    assert hub.repos[REPO].tags == {} and hub.repos[REPO].private
    hub.garble = lambda stored: stored
    publish(folder, public=True)
    assert holds(hub, folder) and not hub.repos[REPO].private


def test_a_file_that_comes_back_short_is_found(hub, folder):
    data = (folder / "model.safetensors").read_bytes()
    hub.garble = lambda stored: stored[:-1] if stored == data else stored
    with pytest.raises(ReadBackFailed):
        publish(folder)
    assert hub.repos[REPO].tags == {}


def test_a_connection_that_drops_amid_the_upload_is_tried_again(hub, folder):
    hub.drop_upload("PUT /lfs/", times=2)
    publish(folder)
    assert holds(hub, folder)


def test_a_connection_that_keeps_dropping_is_named_and_the_next_call_goes_on(hub, folder):
    hub.drop_upload("PUT /lfs/")
    with pytest.raises(HubUnreachable, match="connection"):
        publish(folder)
    assert hub.repos[REPO].tags == {} and len(hub.repos[REPO].commits) == 1
    hub.faults.clear()
    publish(folder)
    assert holds(hub, folder)


def test_what_was_uploaded_is_not_uploaded_again(hub, folder):
    hub.fail("POST .*/commit/", Reply(403))
    with pytest.raises(HubRefused, match="may not write"):
        publish(folder)
    assert sum(call.startswith("PUT /lfs/") for call in writes(hub)) == 1
    hub.faults.clear()
    publish(folder)
    assert sum(call.startswith("PUT /lfs/") for call in writes(hub)) == 1 and holds(hub, folder)


@pytest.mark.parametrize("times", [1, 2])
def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub, folder, times):
    hub.fail("POST .*/commit/main", None, times=times)
    made = publish(folder)
    assert sum("/commit/" in call for call in writes(hub)) == 1
    assert holds(hub, folder) and made.commit == hub.repos[REPO].tags[TAG]


def test_a_pull_request_whose_answer_is_lost_is_not_opened_twice(hub, folder):
    hub.fail("POST .*/commit/main", None, times=1)
    assert publish(folder, tag="", create_pr=True).commit == "refs/pr/1"
    assert hub.repos[REPO].pulls.keys() == {1}


CALLS = {
    "looking": "GET /api/models/org/head$",
    "creating": "POST /api/repos/create",
    "planning": "POST .*/preupload/",
    "announcing": "POST .*/objects/batch",
    "storing": "PUT /lfs/",
    "checking": "POST .*/verify",
    "committing": "POST .*/commit/",
    "listing": "GET .*/tree/",
    "reading back": "GET /org/head/resolve/",
    "tagging": "POST .*/tag/",
    "showing": "PUT .*/settings",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_burst_of_server_errors_is_waited_out(hub, folder, waits, call):
    hub.fail(call, Reply(503), times=2)
    hub.fail(call, Reply(500), times=1)
    publish(folder, public=True)
    assert holds(hub, folder) and not hub.repos[REPO].private
    assert 3 <= len(waits) < 8


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_hub_that_asks_for_patience_gets_it(hub, folder, waits, call):
    hub.fail(call, Reply(429, b"", {"Retry-After": "7"}), times=1)
    publish(folder, public=True)
    assert holds(hub, folder)
    assert any(7 <= wait <= 8 for wait in waits)


def test_a_hub_that_asks_for_too_much_patience_is_named(hub, folder, waits):
    hub.fail("POST .*/tag/", Reply(429, b"", {"Retry-After": "86400"}))
    with pytest.raises(HubUnreachable, match="is rate-limiting requests"):
        publish(folder)
    assert max(waits, default=0) <= remote.LONGEST_WAIT


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("status", [401, 403, 500])
def test_what_lasts_is_named_and_leaves_nothing_unproven_under_the_tag(hub, folder, call, status):
    """An expired token, a token without the right, a broken Hub; at each call, and then the way on."""
    reply = refusal(status, message="Invalid credentials in Authorization header" if status == 401 else "Forbidden")
    hub.fail(call, reply)
    with pytest.raises(KconvError) as caught:
        publish(folder, public=True)
    assert TOKEN not in str(caught.value) and "signed" not in str(caught.value)
    held = hub.repos.get(REPO)
    assert held is None or not held.tags or (holds(hub, folder) and held.private)
    assert held is None or held.private
    hub.faults.clear()
    publish(folder, public=True)
    assert holds(hub, folder) and not hub.repos[REPO].private


@pytest.mark.parametrize("status, fault", [(400, HubUnreachable), (404, HubRefused), (409, HubMoved), (412, HubMoved)])
def test_a_commit_that_the_hub_does_not_take_is_named(hub, folder, status, fault):
    hub.fail("POST .*/commit/", refusal(status))
    with pytest.raises(fault):
        publish(folder)
    assert hub.repos[REPO].tags == {} and len(hub.repos[REPO].commits) == 1


def test_an_expired_token_is_named(hub, folder):
    hub.tokens = set()
    with pytest.raises(HubRefused, match="may have expired"):
        publish(folder)


def test_offline_nothing_is_tried_and_nothing_is_to_be_downloaded(hub, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachable, match="HF_HUB_OFFLINE is set") as offline:
        publish(folder)
    assert "download" not in str(offline.value) and hub.served == []


def test_no_token_is_named(hub, folder, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubRefused, match="without a token"):
        publish(folder)


def test_a_token_that_may_only_read_is_named(hub, folder):
    hub.readers = {TOKEN}
    with pytest.raises(HubRefused, match="may not write"):
        publish(folder)


def test_a_tag_that_somebody_else_takes_meanwhile_is_refused(hub, folder):
    other = hub.commit(REPO, {".gitattributes": b"", "x": b""})

    def take(call):
        if "/tag/" in call.path:
            hub.repos[REPO].tags[TAG] = other

    hub.before = take
    with pytest.raises(HubMoved, match="given to another commit"):
        publish(folder)


def test_a_card_that_the_hub_refuses_is_named(hub, folder):
    answer = {"errors": [{"message": '"license" must be one of the known'}], "warnings": []}
    hub.fail("POST /api/validate-yaml", Reply(400, json.dumps(answer).encode()))
    with pytest.raises(PublishRefused, match="must be one of the known"):
        publish(folder)
    assert hub.repos[REPO].tags == {}


def test_a_stand_in_refuses_bytes_of_another_hash(hub, folder):
    """The stand-in itself: what is stored is checked against what was announced."""
    publish(folder)
    at = f"{hub.url}/lfs/{REPO}/{'0' * 64}?X-Amz-Signature=signed"
    assert httpx.put(at, content=b"other bytes").status_code == 400
    line = json.dumps({"key": "lfsFile", "value": {"path": "x.bin", "algo": "sha256", "oid": "0" * 64, "size": 11}})
    body = json.dumps({"key": "header", "value": {"summary": "s"}}) + "\n" + line
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert httpx.post(f"{hub.url}/api/models/{REPO}/commit/main", content=body, headers=bearer).status_code == 400
