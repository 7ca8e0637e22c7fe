"""A repository on the Hub: write to it, turn its errors into kconv's, and read it back.

huggingface_hub retries uploads itself; the calls that it makes only once (looking, committing, tagging, settings) are
retried here. Its own warnings are suppressed, since they contain signed addresses.

`library_faults` has its own messages for reading, including connections and disks.

A listing only repeats what was announced; the stored bytes prove what is there, and these are read as a stream.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_token,
    hf_hub_url,
    is_offline_mode,
)
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff, httpx

from ...checkpoint.hub import LOGIN, library_faults, refuse_garbled, shaped
from ...errors import HubMoved, HubRefused, HubUnreachable, KconvError, PublishRefused, ReadBackFailed
from .options import MAIN
from .release import Upload

Got = TypeVar("Got")
# Seconds to wait before each retry, if the Hub does not say.
WAITS = (1.0, 2.0, 4.0, 8.0)
TRANSIENT = (408, 429, 500, 502, 503, 504)
# The maximum wait for a busy Hub; CI jobs have a time limit too.
LONGEST_WAIT = 600.0
# The Hub's own file, which tells git which files are large.
NOT_OURS = (".gitattributes",)


@dataclass(frozen=True)
class RepositoryState:
    """A repository's state.

    Attributes:
        private: whether only its owners see it.
        heads: the commit of each branch.
        tags: the commit of each tag.
    """

    private: bool
    heads: dict[str, str]
    tags: dict[str, str]


@dataclass(frozen=True)
class ListedFile:
    """A file as the Hub lists it.

    Attributes:
        size: bytes.
        blob_id: git's id, of the file or of the pointer that represents it.
        sha256: of its bytes, if it is a large file.
    """

    size: int
    blob_id: str
    sha256: str | None


class Remote:
    """A repository of the Hub; `repo` is org/name."""

    def __init__(self, repo: str, say: Callable[[str], None]) -> None:
        self.repo = repo
        self._api = HfApi()
        self._say = say

    def look(self) -> RepositoryState | None:
        """Return the repository's state; None if it does not exist, or this account cannot see it."""

        def fetch() -> RepositoryState:
            info = self._api.model_info(self.repo)
            refs = self._api.list_repo_refs(self.repo)
            heads = {branch.name: branch.target_commit for branch in refs.branches}
            tags = {tag.name: tag.target_commit for tag in refs.tags}
            if not isinstance(info.private, bool) or MAIN not in heads:
                raise TypeError("the repository has no visibility or no main branch")
            return RepositoryState(info.private, heads, tags)

        try:
            return self._try(fetch)
        except RepositoryNotFoundError:
            return None
        except HfHubHTTPError as fault:
            # Without a token the Hub does not say whether a repository exists.
            if fault.response.status_code == 401 and "authorization" not in fault.response.request.headers:
                return None
            raise

    def list(self, revision: str) -> dict[str, ListedFile]:
        """Return the files of a revision by path."""

        def fetch() -> dict[str, ListedFile]:
            tree = self._api.list_repo_tree(self.repo, recursive=True, revision=revision)
            files = [entry for entry in tree if isinstance(entry, RepoFile)]
            if not all(isinstance(file.path, str) for file in files):
                raise TypeError("the listing has no names")
            return {f.path: ListedFile(f.size, f.blob_id, f.lfs.sha256 if f.lfs else None) for f in files}

        return self._try(fetch)

    def create(self) -> None:
        """Create the repository, private."""
        self._try(lambda: self._api.create_repo(self.repo, private=True, exist_ok=True))

    def create_branch(self, branch: str, at: str) -> None:
        self._try(lambda: self._api.create_branch(self.repo, branch=branch, revision=at, exist_ok=True))

    def make_public(self) -> None:
        self._try(lambda: self._api.update_repo_settings(self.repo, private=False))

    def tag(self, tag: str, commit: str, message: str) -> None:
        """Tag a commit; an existing tag with that name stays where it is."""
        make = self._api.create_tag
        self._try(lambda: make(self.repo, tag=tag, revision=commit, tag_message=message, exist_ok=True))

    def find_pull(self, title: str) -> str | None:
        """Return the ref of the open pull request with a title."""

        def fetch() -> str | None:
            listed = self._api.get_repo_discussions(self.repo, discussion_type="pull_request", discussion_status="open")
            return next((f"refs/pr/{d.num}" for d in listed if d.title == title and d.is_pull_request), None)

        return self._try(fetch)

    def commit(
        self,
        files: Sequence[Upload],
        delete: Sequence[str],
        *,
        title: str,
        branch: str,
        parent: str,
        pull: bool,
        landed: Callable[[], str | None],
    ) -> str:
        """Upload files and commit them.

        If the answer to a commit is lost, the commit is searched for before another one is made.

        Args:
            parent: the commit that the branch must be on.
            pull: whether to open a pull request against `branch` instead of moving it.
            landed: returns the commit, or the pull request's ref, if it exists after all.
        """
        operations = [*map(_addition, files), *(CommitOperationDelete(name) for name in delete)]
        lost = False

        def send() -> str:
            nonlocal lost
            if lost and (found := landed()):
                return found
            lost = True
            made = self._api.create_commit(
                self.repo,
                operations,
                commit_message=title,
                revision=branch,
                parent_commit=parent,
                create_pr=pull,
            )
            return f"refs/pr/{made.pr_num}" if pull else made.oid

        try:
            return self._try(send)
        except HfHubHTTPError as fault:
            if fault.response.status_code != 412:
                raise
            raise HubMoved(
                f"{self.repo} has moved on from {parent[:10]} since it was checked",
                where=branch,
                fix="Check what was committed in the meantime, then run the command again.",
            ) from fault

    def _try(self, call: Callable[[], Got]) -> Got:
        # Inside the retries: a bug in kconv is not an answer of the Hub.
        with shaped():
            return _retry(call, self._say)


def _addition(file: Upload) -> CommitOperationAdd:
    """Return the operation that adds a file, which must still be the one that was checked.

    For a file on disk huggingface_hub computes the sha256 here, and stores exactly that content on the Hub.
    """
    made = CommitOperationAdd(file.name, file.content)  # pyright: ignore[reportArgumentType]
    if (made.upload_info.size, made.upload_info.sha256.hex()) != (file.size, file.sha256):
        raise PublishRefused(
            f"{file.name} was changed after it was checked",
            where=file.name,
            fix="Nothing was uploaded. Find out what writes to the folder, then run the command again.",
        )
    return made


def _retry(call: Callable[[], Got], say: Callable[[str], None], statuses: Collection[int] = TRANSIENT) -> Got:
    """Call, and retry if the connection broke or the Hub answers with certain statuses."""
    for wait in WAITS:
        try:
            return call()
        except HfHubHTTPError as fault:
            if fault.response.status_code not in statuses:
                raise
            asked = fault.response.headers.get("retry-after", "")
            pause = float(asked) if asked.isdecimal() else wait
            if pause > LONGEST_WAIT:
                raise
            say(f"the Hub answered {fault.response.status_code}; trying again in {pause:g} s")
        except httpx.TransportError:
            pause = wait
            say(f"the connection broke; trying again in {pause:g} s")
        time.sleep(pause)
    return call()


@contextmanager
def writing(repo: str, say: Callable[[str], None]) -> Iterator[Remote]:
    """Yield a repository to write to, with its errors turned into kconv's."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with _named_faults(repo):
            yield Remote(repo, say)
    finally:
        logger.setLevel(before)


@contextmanager
def _named_faults(repo: str) -> Iterator[None]:
    """Turn huggingface_hub's exceptions into kconv's errors, without repeating their texts."""
    if is_offline_mode():
        raise HubUnreachable(
            f"HF_HUB_OFFLINE is set, but publishing {repo} needs the Hub", fix="Unset it, and run the command again."
        )
    with library_faults(repo, None):
        try:
            refuse_garbled(get_token())
            yield
        except HfHubHTTPError as fault:
            raise _name(fault, repo) from None
        except ValueError as fault:
            # https://github.com/huggingface/huggingface_hub/blob/v1.33.0/src/huggingface_hub/hf_api.py (_validate_yaml)
            if not str(fault).startswith("Invalid metadata in README.md"):
                raise
            raise PublishRefused(
                f"the Hub refuses the card: {' '.join(str(fault).split())}",
                where="README.md",
                fix="Correct the card's metadata (kconv card), and run the command again.",
            ) from None


def _name(fault: HfHubHTTPError, repo: str) -> KconvError:
    status, page = fault.response.status_code, f"{constants.ENDPOINT}/{repo}"
    shown = "authorization" in fault.response.request.headers
    match status:
        case 401 if not shown:
            return HubRefused(
                f"{repo} cannot be written to without a token", where=page, fix=f"Set HF_TOKEN, or run: {LOGIN}"
            )
        case 401:
            return HubRefused(
                "the Hub does not accept the token; it may have expired",
                where=page,
                fix=f"Set HF_TOKEN to a new one, or run: {LOGIN}; then run the command again to resume.",
            )
        case 403:
            return HubRefused(
                f"the token may not write to {repo}, or may not create it",
                where=page,
                fix="Give it write access. A trusted publisher's token cannot create a repository: create it first.",
            )
        case 404:
            return HubRefused(
                f"the Hub does not show {repo}, or not this revision of it", where=page, fix="Check the spelling."
            )
        case 409:
            return HubMoved(f"something else is changing {repo} right now", where=page, fix="Run the command again.")
        case 429:
            return HubUnreachable(
                "the Hub is rate-limiting requests from this machine",
                where=page,
                fix="Wait, then run the command again.",
            )
    return HubUnreachable(
        f"the Hub answered {status} for {repo}", where=page, fix="Run the command again in a few minutes; it resumes."
    )


def differing(files: Iterable[Upload], listed: Mapping[str, ListedFile]) -> list[str]:
    """Return the names of files that a listing lacks, or shows with another size or hash."""
    return [file.name for file in files if not _is(file, listed.get(file.name))]


def surplus(files: Iterable[Upload], listed: Mapping[str, ListedFile]) -> list[str]:
    """Return the names that a listing has and a release does not."""
    return sorted(listed.keys() - {file.name for file in files} - set(NOT_OURS))


def same(files: tuple[Upload, ...], listed: Mapping[str, ListedFile]) -> bool:
    """Return whether a listing has exactly these files."""
    return not differing(files, listed) and not surplus(files, listed)


def read_back(repo: str, commit: str, files: Iterable[Upload], say: Callable[[str], None]) -> None:
    """Download every file of a release and compare it, without keeping any."""
    for file in files:
        say(f"reading back {file.name}")
        size, sha256 = _digest(repo, commit, file.name, say)
        if (size, sha256) != (file.size, file.sha256):
            raise ReadBackFailed(
                f"the Hub returns {file.name} with other bytes than were uploaded: "
                f"sha256 {sha256[:16]} instead of {file.sha256[:16]}, {size:,} bytes instead of {file.size:,}",
                where=f"{repo}@{commit}",
                fix="Nothing was tagged. Delete the file on the Hub with its stored object, then run this again.",
            )


def _is(file: Upload, stored: ListedFile | None) -> bool:
    if stored is None or stored.size != file.size:
        return False
    return stored.sha256 == file.sha256 if stored.sha256 else stored.blob_id == file.blob_id


def _digest(repo: str, commit: str, name: str, say: Callable[[str], None]) -> tuple[int, str]:
    """Return the size and sha256 of what the Hub returns for a file."""
    # `http_stream_backoff` retries on statuses itself.
    return _retry(lambda: _stream(repo, commit, name), say, statuses=())


def _stream(repo: str, commit: str, name: str) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    with http_stream_backoff(
        "GET",
        hf_hub_url(repo, name, revision=commit),
        headers=headers,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        # Not retried once bytes flow, as for headers (see checkpoint.hub_range); the caller retries.
        retry_on_exceptions=(),
    ) as response:
        hf_raise_for_status(response)
        for chunk in response.iter_bytes():
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()
