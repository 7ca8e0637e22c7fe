"""A checkpoint on the Hugging Face Hub.

This, `hub_range` and `hub_faults` alone import huggingface_hub, 1.31 and up or 2.x; `checkpoint.source` imports them
when a name turns out to be a hub id. Downloads are `snapshot_download`'s and `hf_hub_download`'s own, over plain HTTP
or through hf_xet where that is installed; of the two only plain HTTP is tested, as the stand-in does not speak Xet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi, get_token, hf_hub_download, is_offline_mode, snapshot_download
from huggingface_hub.hf_api import RepoFile

from ..errors import HubRefused
from .folder import INDEX, Checkpoint, gather, open_checkpoint, read_json
from .header import TensorInfo, parse_header
from .hub_faults import LOGIN, named, not_cached
from .hub_range import RangeReader
from .licenses import LICENSE_FILES, in_any_case
from .locate import locate

LICENSES = in_any_case(LICENSE_FILES)
# What kconv's own outputs record beside the weights: how to serve them.
LAUNCH_FILES = ("serve-*.sh", "serve-*.yaml")
CHECKPOINT_FILES = ("*.safetensors", "*.json", *LAUNCH_FILES, *LICENSES)
# Kimi's tokenizer is a tiktoken.model with Python beside it, which is run only where the user trusts it.
TOKENIZER_FILES = ("*.jinja", "*.model", "*.txt", "*.py")
# An engine reads the root alone; what lies deeper is other exports or a trainer's states.
SUBFOLDERS = "*/*"


@dataclass(frozen=True)
class HubRepo:
    """A repository of the Hub at one commit; a branch that moves on is not followed.

    Attributes:
        repo: org/name.
        commit: 40 hex digits.
        pinned: whether the user named the commit itself, and no branch that led to it.
    """

    repo: str
    commit: str
    pinned: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        """org/name@<40 hex digits>."""
        return f"{self.repo}@{self.commit}"

    def open_headers(self) -> Checkpoint:
        """Read the config and the headers over the network; offline, the local cache.

        The weights are nowhere on this machine: each tensor's `file` is a name and no path.

        Raises:
            HubRefused, HubUnreachable, OutputFailed: see `hub_faults`.
            NotACheckpoint, ConfigInvalid, CorruptIndex, CorruptHeader: see `open_checkpoint`.
        """
        if is_offline_mode():
            return self.open_weights()
        config = read_json(self._fetch("config.json"))
        sizes = self._list()
        index = read_json(self._fetch(INDEX)) if INDEX in sizes else None
        root = Path(self.name)

        def read(file: Path) -> dict[str, TensorInfo]:
            size = sizes[file.name]
            return parse_header(RangeReader(self.repo, self.commit, file.name, size), file, size)

        return Checkpoint(root, config, gather(root, set(sizes), index, read), self.name, headers_only=True)

    def open_weights(self) -> Checkpoint:
        """Download the config and the weights, or find them in the local cache, and open them.

        Raises:
            HubRefused, HubUnreachable, OutputFailed: see `hub_faults`.
            NotACheckpoint, ConfigInvalid, CorruptIndex, CorruptHeader: see `open_checkpoint`.
        """
        return open_checkpoint(self._download(CHECKPOINT_FILES), source=self.name)

    def open_tensors(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Download the files that hold some of its tensors, or find them in the local cache, and open those.

        Raises:
            HubRefused, HubUnreachable, OutputFailed: see `hub_faults`.
            ConfigInvalid, CorruptIndex, CorruptHeader: see `locate`.
        """
        if is_offline_mode():
            folder = self.fetch_config()
            return locate(names, (file.name for file in folder.iterdir()), folder.joinpath)
        return locate(names, self._list(), self._fetch)

    def fetch_config(self) -> Path:
        """Download config.json, or find it in the local cache, and return its folder.

        Raises:
            HubRefused, HubUnreachable, OutputFailed: see `hub_faults`.
            NotACheckpoint: the repository has none.
        """
        return self._fetch("config.json").parent

    def fetch_tokenizer(self) -> Path:
        """Download config and tokenizer, or find them in the local cache, and return their folder.

        Raises:
            HubRefused, HubUnreachable, OutputFailed: see `hub_faults`.
            NotACheckpoint: the repository has no config.
        """
        self.fetch_config()
        return self._snapshot(("*.json", *TOKENIZER_FILES))

    def fetch_license(self) -> Path:
        """Download license texts and notices, or find them in the local cache, and return their folder.

        Raises:
            HubRefused, HubUnreachable, OutputFailed: see `hub_faults`.
            NotACheckpoint: the repository has no config.
        """
        self.fetch_config()
        return self._snapshot(LICENSES)

    def fetch_model(self) -> Path:
        """Download config, weights and tokenizer, or find them in the local cache, and return their folder.

        Raises:
            HubRefused, HubUnreachable, OutputFailed: see `hub_faults`.
        """
        return self._download(CHECKPOINT_FILES + TOKENIZER_FILES)

    def _fetch(self, file: str) -> Path:
        with named(self.repo, self.commit, file):
            return Path(hf_hub_download(self.repo, file, revision=self.commit))

    def _snapshot(self, patterns: tuple[str, ...]) -> Path:
        with named(self.repo, self.commit):
            return Path(
                snapshot_download(
                    self.repo,
                    revision=self.commit,
                    allow_patterns=list(patterns),
                    ignore_patterns=SUBFOLDERS,
                    local_files_only=is_offline_mode(),
                )
            )

    def _download(self, patterns: tuple[str, ...]) -> Path:
        folder = self._snapshot(patterns)
        # The config alone, once fetched, passes for a whole snapshot where the cache holds no listing.
        if is_offline_mode() and not any(folder.glob("*.safetensors")):
            raise not_cached(self.repo, self.commit)
        return folder

    def _list(self) -> dict[str, int]:
        """Return the sizes in bytes of the files in the root, by name."""
        with named(self.repo, self.commit):
            tree = HfApi().list_repo_tree(self.repo, revision=self.commit)
            return {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}


def resolve_repo(repo: str, revision: str | None) -> HubRepo:
    """Pin a repository to the commit that a revision is on now.

    Args:
        repo: org/name.
        revision: a branch, a tag, a pull request's ref or a commit; the default branch if None. One that is
            40 hex digits is taken as it is, without asking.

    Raises:
        HubRefused, HubUnreachable: see `hub_faults`.
    """
    with named(repo, revision):
        refuse_garbled(get_token())
        commit = HfApi().resolve_revision(repo, revision=revision).resolved
        return HubRepo(repo, commit, pinned=revision == commit)


def refuse_garbled(token: str | None) -> None:
    """Refuse a token that no header can hold: the HTTP library would say so too, and repeat it, and so would logs."""
    if token and not (token.isascii() and token.isprintable()):
        raise HubRefused(
            "the token holds characters that no token has", where="HF_TOKEN, or the token's file", fix=f"Run: {LOGIN}"
        )
