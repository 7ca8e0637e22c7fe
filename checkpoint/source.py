"""A checkpoint that the user names: a folder or a hub id."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from ..errors import NotACheckpoint, readable
from .folder import Checkpoint, list_names, locate, no_folder, open_checkpoint
from .header import TensorInfo

# A segment starts with a letter or a digit, so that ./head and ../head are paths.
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>\S+))?", re.ASCII)

# URLs that people paste: a repository's page, its files at a revision, or one file; and hf://.
HUB_URL = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)(?:models/)?(?P<repo>[^/?#@]+/[^/?#@]+)"
    r"(?:@(?P<at>refs/(?:pr|convert)/[^/?#]+|[^/?#]+)|/(?:tree|blob|resolve|raw|commit)/(?P<revision>refs/(?:pr|convert)/[^/?#]+|[^/?#]+))?(?:[/?#].*)?",
    re.ASCII,
)

# What the Hub's addresses lead to besides models; none of these words is the name of an owner there.
NO_MODELS = ("api", "blog", "collections", "datasets", "docs", "papers", "spaces")


class Source(Protocol):
    """A checkpoint as the user named it; a hub id stays pinned to one commit."""

    @property
    def name(self) -> str:
        """What the manifest records: the path as it was given, or org/name@<40 hex digits>."""
        ...

    @property
    def pinned(self) -> bool:
        """Whether the name fixes the exact bytes: a folder, or a repository at a commit."""
        ...

    @property
    def served(self) -> tuple[str, str]:
        """How engines name it: a path or org/name, and its commit if the user named a revision, else ""."""
        ...

    def open_headers(self) -> Checkpoint:
        """Open it for its config and headers, without downloading weights; the weights may not be readable."""
        ...

    def open_weights(self) -> Checkpoint:
        """Open it with its weights, downloading them first if needed."""
        ...

    def open_tensors(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Find some of its tensors, downloading only the files that hold them."""
        ...

    def fetch_tensors(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Find some of its tensors, downloading only headers and the bytes of these tensors."""
        ...

    def fetch_config(self) -> Path:
        """Return a folder with its config.json, and possibly nothing else."""
        ...

    def fetch_tokenizer(self) -> Path:
        """Return a folder with its config and tokenizer, and possibly nothing else."""
        ...

    def fetch_license(self) -> Path:
        """Return a folder with its license texts and notices, if any, and possibly nothing else."""
        ...

    def fetch_readme(self) -> Path:
        """Return a folder with its README.md, if any, and possibly nothing else."""
        ...

    def fetch_model(self) -> Path:
        """Return a folder with everything needed to run it: config, weights and tokenizer."""
        ...


@dataclass(frozen=True)
class Folder:
    """A checkpoint folder on this machine; everything is there already."""

    path: Path

    @property
    def name(self) -> str:
        """The path as given; its non-UTF-8 bytes are replaced, since written and printed text must be UTF-8."""
        return readable(self.path)

    @property
    def pinned(self) -> bool:
        """True: the user named the folder's own content."""
        return True

    @property
    def served(self) -> tuple[str, str]:
        """The path alone."""
        return str(self.path), ""

    def open_headers(self) -> Checkpoint:
        return open_checkpoint(self.path)

    def open_weights(self) -> Checkpoint:
        return open_checkpoint(self.path)

    def open_tensors(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        return locate(names, (file.name for file in self.path.iterdir()), lambda name: self.path / name)

    def fetch_tensors(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        return self.open_tensors(names)

    def fetch_config(self) -> Path:
        list_names(self.path)  # a file is no folder
        return self.path

    def fetch_tokenizer(self) -> Path:
        return self.path

    def fetch_license(self) -> Path:
        return self.path

    def fetch_readme(self) -> Path:
        return self.path

    def fetch_model(self) -> Path:
        return self.path


def hub_id_of(name: str) -> str:
    """Return the hub id that a Hub URL stands for; any other name unchanged."""
    found = HUB_URL.fullmatch(name)
    if found is None:
        return name
    revision = found["at"] or found["revision"]
    # The Hub's own links escape the slashes of refs/pr/1.
    return f"{found['repo']}@{unquote(revision)}" if revision else found["repo"]


def resolve(name: str) -> Source:
    """Resolve a name that the user gave, and pin it.

    Args:
        name: a path, or a hub id org/name or org/name@revision, also as the URL of its page; a path that exists wins.

    Returns:
        A folder, or a repository at the revision's current commit.

    Raises:
        NotACheckpoint: the name is empty, an address of something else than a model on the Hub, or neither a path
            that exists nor a hub id; or it is formed like one, but its first part is a folder here.
        HubRefused: the Hub has no such repository or revision, or does not show it to this account.
        HubUnreachable: the Hub cannot be reached, and its local cache does not know the revision either.
    """
    if os.path.lexists(name):
        return Folder(Path(name))
    hub_id = HUB_ID.fullmatch(meant := hub_id_of(name))
    if not name or "://" in meant or (meant != name and meant.partition("/")[0] in NO_MODELS):
        raise NotACheckpoint(
            f"{name} is not the address of a model on the Hub" if name else "the name of a checkpoint is empty",
            fix="Give a checkpoint folder or a Hub id org/name.",
        )
    if hub_id is None:
        error = no_folder(Path(name), FileNotFoundError())
        if HUB_ID.fullmatch(plain := name.rstrip("/")):
            error.fix = f"{error.fix} If you mean the Hub's {plain}, write it without the / at its end."
        raise error
    if meant == name and hub_id["revision"] is None and os.path.lexists(Path(name).parent):
        error = no_folder(Path(name), FileNotFoundError())
        error.fix = f"{error.fix} If you mean the Hub's {name}, write {name}@main."
        raise error
    # Imported here: huggingface_hub takes some tenths of a second, which a local path should not cost.
    from .hub import resolve_repo

    return resolve_repo(hub_id["repo"], hub_id["revision"])
