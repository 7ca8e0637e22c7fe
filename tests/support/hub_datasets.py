"""What the Hub's stand-in answers to a reader of data sets: those of a model's reader, kept under datasets/org/name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from support.hub_read import REPO, REV, _file
from support.hub_repos import Call, Reply

if TYPE_CHECKING:
    from support.hub import Hub


def _dataset_file(hub: Hub, call: Call, repo: str, rev: str, file: str) -> Reply:
    return _file(hub, call, f"datasets/{repo}", rev, file)


DATASETS: list[tuple[str, str, Callable[..., Reply]]] = [
    ("GET", f"/datasets/{REPO}/resolve/{REV}/(?P<file>.+)", _dataset_file),
]
