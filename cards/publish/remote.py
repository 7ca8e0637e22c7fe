"""A repository on the Hub, to be written to.

huggingface_hub tries uploads again by itself; the calls that it makes once (looking, committing, tagging, settings)
are tried again here. Its own warnings are held back, as they repeat addresses that are signed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import httpx

from ...errors import HubMoved
from .faults import written
from .release import Upload

Got = TypeVar("Got")
# Seconds to wait before each further try, where the Hub does not say.
WAITS = (1.0, 2.0, 4.0, 8.0)
TRANSIENT = (408, 429, 500, 502, 503, 504)
# What one waits at most for a Hub that asks for patience; CI jobs end at some time too.
LONGEST_WAIT = 600.0


@dataclass(frozen=True)
class Seen:
    """What a repository is like.

    Attributes:
        private: whether only its owners see it.
        heads: the commit of each branch.
        tags: the commit of each tag.
    """

    private: bool
    heads: dict[str, str]
    tags: dict[str, str]


@dataclass(frozen=True)
class Stored:
    """A file as the Hub lists it.

    Attributes:
        size: bytes.
        blob_id: git's id, of the file or of the pointer that stands for it.
        sha256: of its bytes, where it is a large file.
    """

    size: int
    blob_id: str
    sha256: str | None


class Remote:
    """A repository of the Hub.

    Args:
        repo: org/name.
        say: told what is waited for.
    """

    def __init__(self, repo: str, say: Callable[[str], None]) -> None:
        self.repo = repo
        self._api = HfApi()
        self._say = say

    def look(self) -> Seen | None:
        """Return what the repository is like; None where there is none, or this account is not shown it."""
        try:
            info = self._try(lambda: self._api.model_info(self.repo))
            refs = self._try(lambda: self._api.list_repo_refs(self.repo))
        except RepositoryNotFoundError:
            return None
        except HfHubHTTPError as fault:
            # To who shows no token the Hub does not say whether a repository exists.
            if fault.response.status_code == 401 and "authorization" not in fault.response.request.headers:
                return None
            raise
        heads = {branch.name: branch.target_commit for branch in refs.branches}
        return Seen(bool(info.private), heads, {tag.name: tag.target_commit for tag in refs.tags})

    def list(self, revision: str) -> dict[str, Stored]:
        """Return the files of a revision by path."""

        def fetch() -> dict[str, Stored]:
            tree = self._api.list_repo_tree(self.repo, recursive=True, revision=revision)
            files = (entry for entry in tree if isinstance(entry, RepoFile))
            return {f.path: Stored(f.size, f.blob_id, f.lfs.sha256 if f.lfs else None) for f in files}

        return self._try(fetch)

    def create(self) -> None:
        """Make the repository, private."""
        self._try(lambda: self._api.create_repo(self.repo, private=True, exist_ok=True))

    def create_branch(self, branch: str, at: str) -> None:
        """Make a branch that starts at a commit."""
        self._try(lambda: self._api.create_branch(self.repo, branch=branch, revision=at, exist_ok=True))

    def make_public(self) -> None:
        """Show the repository to everybody."""
        self._try(lambda: self._api.update_repo_settings(self.repo, private=False))

    def tag(self, tag: str, commit: str, message: str) -> None:
        """Give a commit a tag; a tag of that name that is there already stays where it is."""
        make = self._api.create_tag
        self._try(lambda: make(self.repo, tag=tag, revision=commit, tag_message=message, exist_ok=True))

    def find_pull(self, title: str) -> str | None:
        """Return the ref of the open pull request of a title."""

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
        """Upload files and make one commit of them.

        A commit whose answer was lost on its way is looked for before it is made a second time.

        Args:
            files, delete: what the commit adds and takes away.
            title: its message.
            branch: what it goes on.
            parent: the commit that the branch must be on.
            pull: whether to open a pull request against `branch` in place of moving it.
            landed: returns the commit, or the pull request's ref, if it is there after all.

        Returns:
            The commit's sha.

        Raises:
            HubMoved: the branch is on another commit than `parent` by now.
        """
        operations = [
            *(CommitOperationAdd(f.name, f.content) for f in files),  # pyright: ignore[reportArgumentType]
            *(CommitOperationDelete(name) for name in delete),
        ]
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
                f"{self.repo} has moved on from {parent[:10]} since it was looked at",
                where=branch,
                fix="See what was committed meanwhile, then run the command again.",
            ) from fault

    def _try(self, call: Callable[[], Got]) -> Got:
        """Call, and again where the Hub is busy or the connection broke."""
        for wait in WAITS:
            try:
                return call()
            except HfHubHTTPError as fault:
                if fault.response.status_code not in TRANSIENT:
                    raise
                pause = _asked_wait(fault.response.headers.get("retry-after", ""), wait)
                if pause > LONGEST_WAIT:
                    raise
                self._say(f"the Hub answered {fault.response.status_code}; trying again in {pause:g} s")
            except httpx.TransportError:
                pause = wait
                self._say(f"the connection broke; trying again in {pause:g} s")
            time.sleep(pause)
        return call()


@contextmanager
def writing(repo: str, say: Callable[[str], None]) -> Iterator[Remote]:
    """Give a repository to write to, whose faults have kconv's names.

    Raises:
        HubRefused: the token is missing, expired or may not write, or the repository is not to be created by it.
        HubUnreachable: no connection, or a Hub that stays busy.
        PublishRefused: the Hub refuses what the card says.
    """
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with written(repo):
            yield Remote(repo, say)
    finally:
        logger.setLevel(before)


def _asked_wait(header: str, otherwise: float) -> float:
    return float(header) if header.isdecimal() else otherwise
