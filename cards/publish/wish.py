"""How a folder is to be published."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ...checkpoint.manifest import MANIFEST
from ...errors import HubMoved, PublishRefused
from .remote import Seen

MAIN = "main"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx")


@dataclass(frozen=True)
class Wish:
    """How a folder is to be published.

    Attributes:
        repo: org/name.
        tag: what to call this release; no tag if empty.
        revision: the branch to commit to.
        private: whether the repository must not be public.
        public: whether to make it public once everything was read back; as it is if neither is asked for.
        create_pr: whether to open a pull request in place of moving the branch.
        expect_parent: the commit that the branch must be on; any if empty.
    """

    repo: str
    tag: str = ""
    revision: str = MAIN
    private: bool = False
    public: bool = False
    create_pr: bool = False
    expect_parent: str = ""


def refuse_contradictions(wish: Wish) -> None:
    """Raise PublishRefused for a wish that cannot be, whatever the folder and the repository are."""
    if not _is_repository(wish.repo):
        raise PublishRefused(
            f"no repository of the Hub can be called {wish.repo!r}",
            fix="Name it org/name, of letters, digits, '-', '_' and '.'; a branch is given with --revision.",
        )
    if wish.create_pr and (wish.tag or wish.revision != MAIN or wish.public):
        raise PublishRefused(
            "a pull request is against the main branch, and is neither tagged nor made public before it is merged",
            fix="Leave out the tag, the revision and --public; publish with the tag once it is merged.",
        )
    if wish.private and wish.public:
        raise PublishRefused("a repository cannot be both private and public", fix="Choose one of the two.")


def _is_repository(repo: str) -> bool:
    """Say whether the Hub takes a name; it takes some without an owner too, of which it makes the account's own."""
    try:
        validate_repo_id(repo)
    except HFValidationError:
        return False
    return "/" in repo


def refuse_public(wish: Wish, seen: Seen) -> None:
    """Raise PublishRefused where the repository is public and must not be."""
    if wish.private and not seen.private:
        raise PublishRefused(
            f"{wish.repo} is public, and a private repository was asked for",
            fix="Make it private in its settings, or leave out --private.",
        )


def refuse_replacing(wish: Wish, parent: str, listed: Collection[str]) -> None:
    """Raise PublishRefused where a release would take the place of weights that kconv did not publish.

    One commit holds exactly a release's files, so a repository's name that was mistyped would lose all that it shows.

    Args:
        wish: how to publish.
        parent: the commit that the branch is on.
        listed: the files in it.
    """
    weights = sorted(name for name in listed if name.endswith(WEIGHTS))
    if weights and MANIFEST not in listed and wish.expect_parent != parent:
        raise PublishRefused(
            f"{wish.repo} holds weights that kconv did not publish, {weights[0]} among them; they would be replaced",
            where=f"{wish.repo}@{parent}",
            fix=f"Check the name of the repository; if it is the right one, give --expect-parent {parent}.",
        )


def refuse_moved(wish: Wish, parent: str) -> None:
    """Raise HubMoved where the branch is not on the commit that the wish expects."""
    if wish.expect_parent and parent != wish.expect_parent:
        raise HubMoved(
            f"{wish.repo} is on {parent[:10]}, not on {wish.expect_parent[:10]}",
            where=wish.revision,
            fix="See what was committed meanwhile, then expect the new parent.",
        )
