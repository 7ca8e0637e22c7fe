"""Publishing in tests: to one repository, and what is there afterwards."""

from __future__ import annotations

from pathlib import Path

from support.hub import Hub

from kconv.cards.publish.floor import read_floor
from kconv.cards.publish.options import PublishOptions
from kconv.cards.publish.release import open_candidate
from kconv.cards.publish.run import Published, prepare, preview
from kconv.cards.publish.run import publish as run

TOKEN, REPO, TAG = "hf_aVerySecretTokenOfNobody", "org/head", "v1"


def publish(folder: Path, tag: str = TAG, **wish) -> Published:
    candidate = open_candidate(folder, None, (), read_floor(folder))
    return run(prepare(candidate), PublishOptions(repo=REPO, tag=tag, **wish), lambda _: None)


def dry(folder: Path, **wish) -> Published:
    candidate = open_candidate(folder, None, (), read_floor(folder))
    return preview(prepare(candidate), PublishOptions(repo=REPO, tag=TAG, **wish), lambda _: None)


def holds(hub: Hub, folder: Path, revision: str = TAG) -> bool:
    """Say whether a revision holds the folder's files, byte for byte, and nothing else."""
    held = hub.repos[REPO]
    sha = held.find(revision)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return sha is not None and held.commits[sha] == files | {".gitattributes": held.commits[sha][".gitattributes"]}


def writes(hub: Hub) -> list[str]:
    return [f"{s.call.method} {s.call.path}" for s in hub.served if s.call.method not in ("GET", "HEAD")]
