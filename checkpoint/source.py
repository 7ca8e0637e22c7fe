"""What a user names: a folder or a hub id."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .folder import Checkpoint, locate, open_checkpoint
from .header import TensorInfo

# A segment starts with a letter or a digit, so that ./head and ../head are paths.
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>\S+))?", re.ASCII)

# What people paste: the page of a repository, of its files at a revision, or of one file; and hf://.
HUB_URL = re.compile(
    r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)(?P<repo>[^/?#@]+/[^/?#@]+)"
    r"(?:@(?P<at>[^/?#]+)|/(?:tree|blob|resolve|raw|commit)/(?P<revision>[^/?#]+))?(?:[/?#].*)?",
    re.ASCII,
)


class Source(Protocol):
    """A checkpoint as the user named it; a hub id is pinned to one commit for as long as this lives."""

    @property
    def name(self) -> str:
        """What the manifest records: the path as it was given, or org/name@<40 hex digits>."""
        ...

    @property
    def pinned(self) -> bool:
        """Whether the user named what is read, byte for byte: a folder, or a repository's commit."""
        ...

    def open_headers(self) -> Checkpoint:
        """Open it for its config and headers; no weight is downloaded, and none may be there to be read."""
        ...

    def open_weights(self) -> Checkpoint:
        """Open it for its weights too, which are downloaded first if need be."""
        ...

    def open_tensors(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Find some of its tensors, of which only the files that hold them are downloaded."""
        ...

    def fetch_tensors(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Find some of its tensors, of whose files nothing but headers and these tensors' bytes is downloaded."""
        ...

    def fetch_config(self) -> Path:
        """Return a folder that holds its config.json, and maybe nothing else."""
        ...

    def fetch_tokenizer(self) -> Path:
        """Return a folder that holds its config and its tokenizer, and maybe nothing else."""
        ...

    def fetch_license(self) -> Path:
        """Return a folder that holds its license texts and notices, if it has any, and maybe nothing else."""
        ...

    def fetch_readme(self) -> Path:
        """Return a folder that holds its README.md, if it has one, and maybe nothing else."""
        ...

    def fetch_model(self) -> Path:
        """Return a folder that holds all it takes to run it: config, weights and tokenizer."""
        ...


@dataclass(frozen=True)
class Folder:
    """A checkpoint folder on this machine; everything is there already."""

    path: Path

    @property
    def name(self) -> str:
        """The path as it was given; it need not be UTF-8, and what is written or printed must be."""
        return os.fsencode(self.path).decode(errors="replace")

    @property
    def pinned(self) -> bool:
        """True: what is in the folder is what the user named."""
        return True

    def open_headers(self) -> Checkpoint:
        """Open the folder; see `open_checkpoint` for its faults."""
        return open_checkpoint(self.path)

    def open_weights(self) -> Checkpoint:
        """Open the folder; see `open_checkpoint` for its faults."""
        return open_checkpoint(self.path)

    def open_tensors(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Find some tensors of the folder; see `locate` for its faults."""
        return locate(names, (file.name for file in self.path.iterdir()), lambda name: self.path / name)

    def fetch_tensors(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Find some tensors of the folder; see `locate` for its faults."""
        return self.open_tensors(names)

    def fetch_config(self) -> Path:
        """Return the folder."""
        return self.path

    def fetch_tokenizer(self) -> Path:
        """Return the folder."""
        return self.path

    def fetch_license(self) -> Path:
        """Return the folder."""
        return self.path

    def fetch_readme(self) -> Path:
        """Return the folder."""
        return self.path

    def fetch_model(self) -> Path:
        """Return the folder."""
        return self.path


def hub_id_of(name: str) -> str:
    """Return the hub id that a URL of the Hub means; any other name as it is."""
    found = HUB_URL.fullmatch(name)
    if found is None:
        return name
    revision = found["at"] or found["revision"]
    return f"{found['repo']}@{revision}" if revision else found["repo"]


def resolve(name: str) -> Source:
    """Find out what a user's name means, and pin it.

    Args:
        name: a path, or a hub id org/name or org/name@revision, also as the URL of its page; a path that exists wins.

    Returns:
        A folder, or a repository at the commit that the revision is on now. A name that is neither an existing
        path nor formed like a hub id is a folder, whose opening says that it is not there.

    Raises:
        HubRefused: the Hub has no such repository or revision, or does not show it to this account.
        HubUnreachable: the Hub cannot be reached, and its local cache does not know the revision either.
    """
    hub_id = HUB_ID.fullmatch(name if os.path.lexists(name) else hub_id_of(name))
    if hub_id is None or os.path.lexists(name):
        return Folder(Path(name))
    # Here, as importing huggingface_hub takes some tenths of a second, which a local path must not pay.
    from .hub import resolve_repo

    return resolve_repo(hub_id["repo"], hub_id["revision"])
