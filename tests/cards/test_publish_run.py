"""Publishing to the Hub's stand-in with the real client: what is there afterwards."""

from __future__ import annotations

import hashlib

import pytest
from support.releases import REPO, TAG, dry, holds, publish, write_release, writes

from kconv.cards.publish.options import PublishOptions
from kconv.cards.publish.run import approve
from kconv.errors import HubMoved, PublishRefused

pytestmark = pytest.mark.usefixtures("waits")


def test_a_folder_is_published_in_one_commit_and_tagged(hub, folder):
    made = publish(folder)
    assert holds(hub, folder)
    assert made.commit == hub.repos[REPO].tags[TAG] == hub.repos[REPO].branches["main"]
    assert hub.repos[REPO].private and made.private
    assert len(hub.repos[REPO].commits) == 2  # the Hub's own first, and ours
    assert sum("/commit/" in call for call in writes(hub)) == 1
    assert made.files["model.safetensors"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_tag_comes_after_everything_was_read_back(hub, folder):
    publish(folder, public=True)
    order = [f"{s.call.method} {s.call.path}" for s in hub.served]
    tag = order.index(f"POST /api/models/{REPO}/tag/{hub.repos[REPO].tags[TAG]}")
    read = [n for n, call in enumerate(order) if call.startswith("GET") and "/resolve/" in call]
    assert len(read) == len(list(folder.iterdir())) and max(read) < tag
    assert tag < order.index(f"PUT /api/models/{REPO}/settings")
    assert not hub.repos[REPO].private


def test_a_second_call_does_nothing(hub, folder):
    first = publish(folder, public=True)
    before = len(writes(hub)), hub.sent("/resolve/|/storage/")
    again = publish(folder, public=True)
    assert (len(writes(hub)), hub.sent("/resolve/|/storage/")) == before
    assert (again.done, again.uploaded, again.commit) == ((), (), first.commit)


def test_without_a_tag_a_second_call_commits_nothing(hub, folder):
    first = publish(folder, tag="")
    before = len(writes(hub))
    again = publish(folder, tag="")
    assert (len(writes(hub)), again.done, again.commit) == (before, (), first.commit)


def test_a_later_release_leaves_the_earlier_tag_and_no_stale_file(hub, folder, tmp_path):
    stale = {"kconv.json": b"{}", "old.safetensors": b"stale", "sub/x.bin": b"x", "config.json": b"{}"}
    hub.commit(REPO, {".gitattributes": b""} | stale)
    first = publish(folder)
    assert set(first.deleted) == {"old.safetensors", "sub/x.bin"} and holds(hub, folder)
    later = write_release(tmp_path / "later", seed=1)
    second = publish(later, tag="v2")
    assert second.deleted == () and "model.safetensors" in second.uploaded and "LICENSE" not in second.uploaded
    assert holds(hub, folder, "v1") and holds(hub, later, "v2") and holds(hub, later, "main")


@pytest.mark.parametrize("held", ["model.safetensors", "pytorch_model.bin", "gguf/head.gguf"])
def test_weights_that_kconv_did_not_publish_are_replaced_only_by_who_names_their_commit(hub, folder, held):
    there = hub.commit(REPO, {".gitattributes": b"", held: b"somebody's", "config.json": b"{}"})
    for attempt in (publish, dry):
        with pytest.raises(PublishRefused, match=f"did not publish and would replace, {held} among them") as refused:
            attempt(folder)
        assert f"--expect-parent {there}" in refused.value.fix
    with pytest.raises(HubMoved):
        publish(folder, expect_parent="0" * 40)
    assert writes(hub) == []
    publish(folder, expect_parent=there)
    assert holds(hub, folder)


def test_a_dry_run_changes_nothing_and_says_what_would_be(hub, folder):
    assert set(dry(folder).uploaded) == {path.name for path in folder.iterdir()}
    assert hub.repos == {}
    hub.commit(REPO, {".gitattributes": b"", "LICENSE": (folder / "LICENSE").read_bytes(), "x": b""})
    seen = dry(folder)
    assert "LICENSE" not in seen.uploaded and seen.deleted == ("x",)
    assert writes(hub) == []
    publish(folder)
    assert dry(folder).uploaded == () and dry(folder).commit == hub.repos[REPO].tags[TAG]


def test_another_branch_and_a_pull_request(hub, folder):
    publish(folder, revision="next")
    assert holds(hub, folder, "next") and not holds(hub, folder, "main")
    made = publish(folder, tag="", create_pr=True)
    assert made.commit == "refs/pr/1" and holds(hub, folder, "refs/pr/1") and not holds(hub, folder, "main")
    before = len(writes(hub))
    assert publish(folder, tag="", create_pr=True).commit == "refs/pr/1"
    assert len(writes(hub)) == before


CONTRADICTIONS = {
    "a tag on a pull request": {"create_pr": True},
    "private and public": {"private": True, "public": True},
    "a pull request on a branch": {"tag": "", "create_pr": True, "revision": "next"},
}


@pytest.mark.parametrize("wish", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_what_cannot_be_wished_is_refused_before_anything(hub, folder, wish):
    with pytest.raises(PublishRefused):
        approve(folder, PublishOptions(**{"repo": REPO, "tag": TAG} | wish))
    assert hub.served == []


def test_a_public_repository_is_refused_where_a_private_one_is_asked_for(hub, folder):
    hub.commit(REPO, {"x": b""})
    with pytest.raises(PublishRefused, match="is public"):
        publish(folder, private=True)
    assert writes(hub) == []
