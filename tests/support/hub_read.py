"""What the Hub's stand-in answers to a reader: information, listings, files and ranges of them.

Weights are served as the Hub serves them: by a redirect to another host, which must not be sent the token.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from support.hub_repos import LFS_SUFFIXES, Call, Refused, Reply, Repo, as_json, blob_id, entry_of, refusal

if TYPE_CHECKING:
    from support.hub import Hub


def open_repo(hub: Hub, call: Call, repo: str, rev: str) -> tuple[Repo, str]:
    """Return the repository and the sha that are asked for.

    Raises:
        Refused: there are none, or not for this token.
    """
    if call.token and call.token not in hub.tokens:
        raise Refused(refusal(401, message="Invalid credentials in Authorization header"))
    held = hub.repos.get(repo)
    if held is None or (held.private and not call.token):
        # Without a token the Hub does not say whether a repository exists.
        raise Refused(refusal(404, "RepoNotFound", "Repository not found") if call.token else refusal(401))
    sha = held.find(rev)
    if sha is None:
        raise Refused(refusal(404, "RevisionNotFound", f"Invalid rev id: {rev}"))
    return held, sha


def _info(hub: Hub, call: Call, repo: str, rev: str = "main") -> Reply:
    held, sha = open_repo(hub, call, repo, rev)
    siblings = [{"rfilename": name} for name in sorted(held.commits[sha])]
    return as_json(
        {
            "_id": "0",
            "id": repo,
            "sha": sha,
            "private": held.private,
            "gated": held.gated,
            "tags": [],
            "siblings": siblings,
        }
    )


def _refs(hub: Hub, call: Call, repo: str) -> Reply:
    held, _ = open_repo(hub, call, repo, "main")
    branches = {name: sha for name, sha in held.branches.items() if not name.startswith("refs/")}
    kinds = {"branches": ("heads", branches), "tags": ("tags", held.tags)}
    listed = {
        kind: [{"name": name, "ref": f"refs/{where}/{name}", "targetCommit": sha} for name, sha in refs.items()]
        for kind, (where, refs) in kinds.items()
    }
    return as_json(listed | {"converts": []})


def _tree(hub: Hub, call: Call, repo: str, rev: str, under: str | None = None) -> Reply:
    held, sha = open_repo(hub, call, repo, rev)
    files, prefix = held.commits[sha], f"{under}/" if under else ""
    inside = {name: data for name, data in files.items() if name.startswith(prefix)}
    if call.query.get("recursive", "false").lower() == "true":
        return as_json([entry_of(name, data) for name, data in sorted(inside.items())])
    direct = [entry_of(name, data) for name, data in sorted(inside.items()) if "/" not in name[len(prefix) :]]
    folders = sorted({name[len(prefix) :].split("/")[0] for name in inside if "/" in name[len(prefix) :]})
    return as_json([*({"type": "directory", "path": prefix + name, "oid": "0" * 40} for name in folders), *direct])


def _paths_info(hub: Hub, call: Call, repo: str, rev: str) -> Reply:
    held, sha = open_repo(hub, call, repo, rev)
    files = held.commits[sha]
    asked = parse_qs(call.body.decode())["paths"]
    return as_json([entry_of(name, files[name]) for name in asked if name in files])


def _file(hub: Hub, call: Call, repo: str, rev: str, file: str) -> Reply:
    held, sha = open_repo(hub, call, repo, rev)
    commit = {"X-Repo-Commit": sha}
    if held.gated:
        return refusal(403 if call.token else 401, "GatedRepo", f"Access to model {repo} is restricted")
    data = held.commits[sha].get(file)
    if data is None:
        missing = refusal(404, "EntryNotFound", "Entry not found")
        return Reply(missing.status, missing.body, dict(missing.headers) | commit)
    if not file.endswith(LFS_SUFFIXES):
        return _ranged(hub, call, data, commit | {"ETag": f'"{blob_id(data)}"'})
    digest = hashlib.sha256(data).hexdigest()
    linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{digest}"'}
    # Another host name, as the Hub's storage is another host than the Hub.
    location = f"http://localhost:{hub.port}/storage/{repo}/{digest}?Signature=signed"
    return Reply(302, b"", commit | linked | {"Location": location})


def _stored(hub: Hub, call: Call, repo: str, digest: str) -> Reply:
    for files in hub.repos[repo].commits.values():
        for data in files.values():
            if hashlib.sha256(data).hexdigest() == digest:
                return _ranged(hub, call, data, {"ETag": f'"{digest}"'})
    return Reply(404)


def _ranged(hub: Hub, call: Call, data: bytes, headers: dict[str, str]) -> Reply:
    data = hub.garble(data)
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", call.headers.get("range", ""))
    if not asked or not hub.serves_ranges:
        return Reply(200, data, headers)
    begin, last = int(asked[1]), int(asked[2] or len(data) - 1)
    if begin >= len(data):
        return Reply(416, b"", {"Content-Range": f"bytes */{len(data)}"})
    part = data[begin : last + 1]
    span = f"bytes {begin}-{begin + len(part) - 1}/{len(data)}"
    return Reply(206, part, headers | {"Content-Range": span})


REPO, REV = r"(?P<repo>[^/]+/[^/]+)", r"(?P<rev>refs/\w+/\w+|[^/]+)"
# HEAD is answered as GET, without its body.
READ: list[tuple[str, str, Callable[..., Reply]]] = [
    ("GET", f"/api/models/{REPO}", _info),
    ("GET", f"/api/models/{REPO}/revision/{REV}", _info),
    ("GET", f"/api/models/{REPO}/refs", _refs),
    ("GET", f"/api/models/{REPO}/tree/{REV}(?:/(?P<under>.+))?", _tree),
    ("POST", f"/api/models/{REPO}/paths-info/{REV}", _paths_info),
    ("GET", f"/{REPO}/resolve/{REV}/(?P<file>.+)", _file),
    ("GET", f"/storage/{REPO}/(?P<digest>[0-9a-f]+)", _stored),
]
