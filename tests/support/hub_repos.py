"""What the Hub's stand-in keeps and says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LFS_SUFFIXES = (".safetensors", ".bin", ".pt")


@dataclass
class Repo:
    """A repository: commits by sha, the branches and tags that point at them, and its pull requests' titles."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pulls: dict[int, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def find(self, revision: str) -> str | None:
        """Return the sha that a branch, a tag or a sha stands for."""
        refs = self.branches | self.tags | {sha: sha for sha in self.commits}
        return refs.get(revision)


@dataclass(frozen=True)
class Call:
    """What a client asked for.

    Attributes:
        method, path: of the request; the path is unquoted, without its query.
        query: its parameters, the last value of each.
        headers: by lower-case name.
        body: what it sent.
    """

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def token(self) -> str:
        """The bearer token, empty if there is none."""
        return self.headers.get("authorization", "").removeprefix("Bearer ")


@dataclass(frozen=True)
class Reply:
    """What is answered."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class Refused(Exception):
    """A call that is answered with an error.

    Attributes:
        reply: the error.
    """

    def __init__(self, reply: Reply) -> None:
        self.reply = reply


def refusal(status: int, code: str = "", message: str = "") -> Reply:
    """Return an error as the Hub words it: in its headers."""
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    return Reply(status, b"{}", {name: value for name, value in headers.items() if value})


def as_json(value: Any) -> Reply:
    """Return a value as the API's answer."""
    return Reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def blob_id(data: bytes) -> str:
    """Return git's id of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry_of(name: str, data: bytes) -> dict[str, Any]:
    """Return a file as listings show it."""
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": blob_id(data)}
    if name.endswith(LFS_SUFFIXES):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry
