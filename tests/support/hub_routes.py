"""What the Hub's stand-in keeps and answers: to readers of models and of data sets, and to writers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import yaml

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


if TYPE_CHECKING:
    from support.hub import Hub


def _dataset_file(hub: Hub, call: Call, repo: str, rev: str, file: str) -> Reply:
    return _file(hub, call, f"datasets/{repo}", rev, file)


DATASETS: list[tuple[str, str, Callable[..., Reply]]] = [
    ("GET", f"/datasets/{REPO}/resolve/{REV}/(?P<file>.+)", _dataset_file),
]


if TYPE_CHECKING:
    from support.hub import Hub

GIT_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
LFS_ABOVE = 10 << 20


def sha_of(repo: str, files: dict[str, bytes], parent: str | None) -> str:
    """Return a commit's sha, which follows from what is in it and before it."""
    tree = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in files.items())
    return hashlib.sha1(json.dumps([repo, parent, tree]).encode()).hexdigest()


def _writer(hub: Hub, call: Call) -> None:
    if call.token not in hub.tokens:
        raise Refused(refusal(401, message="Invalid credentials in Authorization header"))
    if call.token in hub.readers:
        raise Refused(refusal(403, message="Forbidden: you must use a write token"))


def _open(hub: Hub, call: Call, repo: str) -> Repo:
    _writer(hub, call)
    if repo not in hub.repos:
        raise Refused(refusal(404, "RepoNotFound", "Repository not found"))
    return hub.repos[repo]


def _find(held: Repo, rev: str) -> str:
    sha = held.find(rev)
    if sha is None:
        raise Refused(refusal(404, "RevisionNotFound", f"Invalid rev id: {rev}"))
    return sha


def _create(hub: Hub, call: Call) -> Reply:
    _writer(hub, call)
    asked = json.loads(call.body)
    repo = f"{asked['organization']}/{asked['name']}"
    if call.token in hub.bound:  # as a trusted publisher's, which is for one repository that exists
        raise Refused(refusal(403, message="Forbidden: this token cannot create repositories"))
    if repo in hub.repos:
        raise Refused(refusal(409, message="You already created this model repo"))
    private = asked["visibility"] == "private" if "visibility" in asked else bool(asked.get("private"))
    held = hub.repos[repo] = Repo(private=private)
    _commit_files(repo, held, "main", {".gitattributes": GIT_ATTRIBUTES}, None)
    return as_json({"url": f"{hub.url}/{repo}", "name": repo, "id": "0"})


def _settings(hub: Hub, call: Call, repo: str) -> Reply:
    held, asked = _open(hub, call, repo), json.loads(call.body)
    if "visibility" in asked:
        held.private = asked["visibility"] == "private"
    if "private" in asked:
        held.private = asked["private"]
    return as_json({})


def _validate_yaml(hub: Hub, call: Call) -> Reply:
    content = json.loads(call.body)["content"]
    try:
        held = yaml.safe_load(content.split("---")[1]) if content.startswith("---") else {}
    except yaml.YAMLError as fault:
        return Reply(400, json.dumps({"errors": [{"message": str(fault)}], "warnings": []}).encode())
    assert isinstance(held, dict)
    return as_json({"errors": [], "warnings": []})


def _preupload(hub: Hub, call: Call, repo: str, rev: str) -> Reply:
    held = _open(hub, call, repo)
    files = held.commits[_find(held, rev)]

    def plan(asked: dict[str, Any]) -> dict[str, Any]:
        name = asked["path"]
        by_lfs = name.endswith(LFS_SUFFIXES) or asked["size"] > LFS_ABOVE
        oid = (hashlib.sha256(files[name]).hexdigest() if by_lfs else blob_id(files[name])) if name in files else None
        return {"path": name, "uploadMode": "lfs" if by_lfs else "regular", "shouldIgnore": False, "oid": oid}

    return as_json({"files": [plan(asked) for asked in json.loads(call.body)["files"]]})


def _batch(hub: Hub, call: Call, repo: str) -> Reply:
    _open(hub, call, repo)

    def action(asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in hub.objects:
            return asked
        at = f"{hub.url}/lfs/{repo}/{asked['oid']}"
        actions = {"upload": {"href": f"{at}?X-Amz-Signature=signed"}, "verify": {"href": f"{at}/verify"}}
        return asked | {"authenticated": True, "actions": actions}

    objects = [action(asked) for asked in json.loads(call.body)["objects"]]
    return as_json({"transfer": "basic", "objects": objects})


def _store(hub: Hub, call: Call, repo: str, digest: str) -> Reply:
    # Signed by its query, as the storage's own address is; the token is not for it.
    assert call.query == {"X-Amz-Signature": "signed"} and not call.token
    if hashlib.sha256(call.body).hexdigest() != digest:
        return Reply(400, b"<Error><Code>XAmzContentSHA256Mismatch</Code></Error>")
    hub.objects[digest] = call.body
    return Reply(200)


def _verify(hub: Hub, call: Call, repo: str, digest: str) -> Reply:
    _open(hub, call, repo)
    asked = json.loads(call.body)
    held = hub.objects.get(digest)
    return Reply(200) if held is not None and asked == {"oid": digest, "size": len(held)} else Reply(404)


def _commit(hub: Hub, call: Call, repo: str, rev: str) -> Reply:
    held = _open(hub, call, repo)
    parent = _find(held, rev)
    lines = [json.loads(line) for line in call.body.splitlines()]
    header = lines[0]["value"]
    if header.get("parentCommit", parent) != parent:
        raise Refused(refusal(412, message="A commit has happened since. Please refresh and try again."))
    files = dict(held.commits[parent])
    for line in lines[1:]:
        _APPLY[line["key"]](hub, files, line["value"])
    number = len(held.pulls) + 1 if call.query.get("create_pr") == "1" else None
    branch = f"refs/pr/{number}" if number else rev
    sha = _commit_files(repo, held, branch, files, parent)
    if number:
        held.pulls[number] = header["summary"]
    url = f"{hub.url}/{repo}"
    pull = {"pullRequestUrl": f"{url}/discussions/{number}"} if number else {}
    return as_json({"success": True, "commitOid": sha, "commitUrl": f"{url}/commit/{sha}"} | pull)


def _commit_files(repo: str, held: Repo, branch: str, files: dict[str, bytes], parent: str | None) -> str:
    sha = sha_of(repo, files, parent)
    held.commits[sha] = files
    held.branches[branch] = sha
    return sha


def _add_file(hub: Hub, files: dict[str, bytes], value: dict[str, Any]) -> None:
    files[value["path"]] = base64.b64decode(value["content"], validate=True)


def _add_object(hub: Hub, files: dict[str, bytes], value: dict[str, Any]) -> None:
    held = hub.objects.get(value["oid"])
    if held is None or len(held) != value.get("size", len(held)):
        raise Refused(refusal(400, message=f"LFS pointer pointed to a file that does not exist: {value['path']}"))
    files[value["path"]] = held


def _delete_file(hub: Hub, files: dict[str, bytes], value: dict[str, Any]) -> None:
    if files.pop(value["path"], None) is None:
        raise Refused(refusal(404, "EntryNotFound", "A file with this name doesn't exist"))


_APPLY = {"file": _add_file, "lfsFile": _add_object, "deletedFile": _delete_file}


def _tag(hub: Hub, call: Call, repo: str, rev: str) -> Reply:
    held, tag = _open(hub, call, repo), json.loads(call.body)["tag"]
    if tag in held.tags:
        raise Refused(refusal(409, message=f"Tag reference exists already: {tag}"))
    held.tags[tag] = _find(held, rev)
    return as_json({})


def _branch(hub: Hub, call: Call, repo: str, branch: str) -> Reply:
    held = _open(hub, call, repo)
    if branch in held.branches:
        raise Refused(refusal(409, message=f"Reference already exists: {branch}"))
    held.branches[branch] = _find(held, json.loads(call.body).get("startingPoint", "main"))
    return as_json({})


def _discussions(hub: Hub, call: Call, repo: str) -> Reply:
    held = _open(hub, call, repo)
    listed = [
        {
            "num": number,
            "title": title,
            "status": "open",
            "isPullRequest": True,
            "createdAt": "2026-01-01T00:00:00.000Z",
            "author": {"name": "someone"},
            "repo": {"name": repo, "type": "model"},
        }
        for number, title in held.pulls.items()
    ]
    return as_json({"discussions": listed, "count": len(listed), "start": 0})


def _exchange(hub: Hub, call: Call) -> Reply:
    """Give a trusted publisher's token for a CI job's own, as RFC 8693 has it."""
    if hub.publisher is None or hub.publisher[0].encode() not in call.body:
        return Reply(400, b'{"error":"invalid_grant","error_description":"no trusted publisher matches"}')
    hub.tokens.add(hub.publisher[1])
    hub.bound.add(hub.publisher[1])
    answer = {"access_token": hub.publisher[1], "token_type": "Bearer", "expires_in": 3600}
    kind = {"issued_token_type": "urn:ietf:params:oauth:token-type:access_token"}
    return as_json(answer | kind)


DIGEST = r"(?P<digest>[0-9a-f]{64})"
WRITE: list[tuple[str, str, Callable[..., Reply]]] = [
    ("POST", "/api/repos/create", _create),
    ("POST", "/api/validate-yaml", _validate_yaml),
    ("POST", "/oauth/token", _exchange),
    ("PUT", f"/api/models/{REPO}/settings", _settings),
    ("POST", f"/api/models/{REPO}/preupload/{REV}", _preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", _batch),
    ("PUT", f"/lfs/{REPO}/{DIGEST}", _store),
    ("POST", f"/lfs/{REPO}/{DIGEST}/verify", _verify),
    ("POST", f"/api/models/{REPO}/commit/{REV}", _commit),
    ("POST", f"/api/models/{REPO}/tag/{REV}", _tag),
    ("POST", f"/api/models/{REPO}/branch/(?P<branch>.+)", _branch),
    ("GET", f"/api/models/{REPO}/discussions", _discussions),
]
