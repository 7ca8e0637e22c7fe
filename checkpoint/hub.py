"""A checkpoint on the Hugging Face Hub.

Only this module imports huggingface_hub, 1.31 and up or 2.x. Downloads use `snapshot_download` and `hf_hub_download`
themselves, over plain HTTP or through hf_xet if that is installed. Only plain HTTP is tested, since the test server
does not speak Xet.

Messages never repeat the library's exception texts: one contains the token in a header, and redirect URLs are signed.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock
from huggingface_hub import (
    HfApi,
    constants,
    get_session,
    get_token,
    hf_hub_download,  # pyright: ignore[reportUnknownVariableType]
    hf_hub_url,
    is_offline_mode,
    snapshot_download,  # pyright: ignore[reportUnknownVariableType]
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    OIDCError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (
    build_hf_headers,  # pyright: ignore[reportUnknownVariableType]
    hf_raise_for_status,
    http_stream_backoff,  # pyright: ignore[reportUnknownVariableType]
    httpx,
)

from ..errors import DownloadDamaged, HubRefused, HubUnreachable, KconvError, NotACheckpoint, OutputFailed
from .bytes import Entry, file_digest, stream, write_safetensors
from .folder import INDEX, LICENSE_FILES, Checkpoint, gather, in_any_case, locate, open_checkpoint, read_json
from .header import TensorInfo, parse_header, read_header
from .pickles import PICKLE
from .schema import MAX_JSON, read_bounded, read_text
from .staging import cache_root

# The folder of tensors that were downloaded individually, and the bytes that one request asks for.
KEPT, RANGE = "kconv-tensors", 64 << 20
# The names of a large and a small file in the cache, and of a commit on the Hub.
DIGEST, COMMIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
LICENSES = in_any_case(LICENSE_FILES)
README = "README.md"
CONNECT_SECONDS = 10.0
# httpx's errors in words; its own texts may hold a token.
IN_WORDS = {
    "ConnectError": "nothing answers at this address",
    **dict.fromkeys(("ConnectTimeout", "ReadTimeout", "WriteTimeout", "PoolTimeout"), "no answer in time"),
    **dict.fromkeys(("ReadError", "WriteError", "RemoteProtocolError"), "it broke off"),
    "ProxyError": "the proxy refuses it",
    "UnsupportedProtocol": "HF_ENDPOINT has no http:// or https://",
}
# Serving settings that kconv's own outputs record next to the weights.
LAUNCH_FILES = ("serve-*.sh", "serve-*.yaml")
CHECKPOINT_FILES = ("*.safetensors", "*.json", *LAUNCH_FILES, *LICENSES)
# Kimi's tokenizer is a tiktoken.model with Python code, which runs only if the user trusts it.
TOKENIZER_FILES = ("*.jinja", "*.model", "*.txt", "*.py")
# Engines read only the root; folders below hold other exports or a trainer's states.
SUBFOLDERS = "*/*"


@dataclass(frozen=True)
class HubRepo:
    """A repository of the Hub at one commit; later commits on its branch are ignored.

    What the local cache lacks is downloaded; offline, only the cache is read. Methods raise the errors of
    `library_faults`, and those of `open_checkpoint` or `locate`.

    Attributes:
        repo: org/name.
        commit: 40 hex digits.
        revision: what the user named: a branch, a tag or the commit; None for the default branch.
    """

    repo: str
    commit: str
    revision: str | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """org/name@<40 hex digits>."""
        return f"{self.repo}@{self.commit}"

    @property
    def pinned(self) -> bool:
        """Whether the user named the commit itself rather than a branch or tag."""
        return self.revision == self.commit

    @property
    def served(self) -> tuple[str, str]:
        """org/name, and the commit if the user named a revision, else ""."""
        return self.repo, self.commit if self.revision else ""

    def open_headers(self) -> Checkpoint:
        """Read the config and the headers over the network, or offline from the local cache.

        The weights are not on this machine: each tensor's `file` is a name, not a path.
        """
        if is_offline_mode():
            return self.open_weights()
        config = read_json(self._fetch("config.json"))
        sizes = self._list()
        # A pickle describes its contents at its end, so it is downloaded whole.
        if not fnmatch.filter(sizes, "*.safetensors") and fnmatch.filter(sizes, PICKLE):
            return self.open_weights()
        index = read_json(self._fetch(INDEX)) if INDEX in sizes else None
        root = Path(self.name)

        def read(file: Path) -> dict[str, TensorInfo]:
            size = sizes[file.name]
            return parse_header(RangeReader(self.repo, self.commit, file.name, size), file, size)

        return Checkpoint(root, config, gather(root, set(sizes), index, read), self.name, headers_only=True)

    def open_weights(self) -> Checkpoint:
        """Download the config and the weights, or find them in the local cache, and open them."""
        folder = self._snapshot(CHECKPOINT_FILES)
        if not any(folder.glob("*.safetensors")):
            folder = self._snapshot((*CHECKPOINT_FILES, PICKLE))
        if is_offline_mode() and not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", PICKLE)):
            raise not_cached(self.repo, self.commit)
        return open_checkpoint(folder, source=self.name)

    def open_tensors(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Download the files that hold some of its tensors, or find them in the local cache, and open those."""
        if is_offline_mode():
            folder = self.fetch_config()
            return locate(names, (file.name for file in folder.iterdir()), folder.joinpath)
        return locate(names, self._list(), self._fetch)

    def fetch_tensors(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Download some of its tensors by range requests, or find them in the local cache, and open those.

        They are kept next to the library's own cache, in one file. Processes that want the same ones wait for the
        first.
        """
        wanted = sorted(set(names))
        folder = Path(constants.HF_HUB_CACHE) / KEPT / f"{self.repo.replace('/', '--')}@{self.commit}"
        kept = folder / f"{hashlib.sha256(chr(10).join(wanted).encode()).hexdigest()[:16]}.safetensors"
        if not kept.exists() and is_offline_mode():
            return self.open_tensors(wanted)
        with library_faults(self.repo, self.commit):
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(kept.with_suffix(".lock")):
                if not kept.exists():
                    self._download_tensors(wanted, kept)
        return read_header(kept)

    def _download_tensors(self, names: Sequence[str], kept: Path) -> None:
        sizes = self._list()

        def read(shard: str) -> dict[str, TensorInfo]:
            cached = try_to_load_from_cache(self.repo, shard, revision=self.commit)
            if isinstance(cached, str):
                check_download(Path(cached))
                return read_header(Path(cached))
            # Only a name: the file is not on this machine.
            return parse_header(RangeReader(self.repo, self.commit, shard, sizes[shard]), Path(shard), sizes[shard])

        def chunks(info: TensorInfo) -> Iterator[memoryview | bytes]:
            if info.file.is_absolute():
                yield from stream(info)
                return
            reader = RangeReader(self.repo, self.commit, info.file.name, info.begin + info.size, info.begin)
            while data := reader.read(RANGE):
                yield data

        found = locate(names, sizes, self._fetch, read)
        entries = [Entry(i.name, i.dtype, i.shape, functools.partial(chunks, i)) for i in found.values()]
        draft = kept.with_suffix(".part")
        draft.unlink(missing_ok=True)
        write_safetensors(draft, entries)
        draft.replace(kept)

    def fetch_config(self) -> Path:
        return self._fetch("config.json").parent

    def fetch_tokenizer(self) -> Path:
        self.fetch_config()
        return self._snapshot(("*.json", *TOKENIZER_FILES))

    def fetch_license(self) -> Path:
        self.fetch_config()
        return self._snapshot(LICENSES)

    def fetch_readme(self) -> Path:
        self.fetch_config()
        return self._snapshot((README,))

    def fetch_model(self) -> Path:
        return self._download(CHECKPOINT_FILES + TOKENIZER_FILES)

    def _fetch(self, file: str) -> Path:
        with named(self.repo, self.commit, file):
            found = Path(hf_hub_download(self.repo, file, revision=self.commit))
        check_download(found)
        return found

    def _snapshot(self, patterns: tuple[str, ...]) -> Path:
        with named(self.repo, self.commit):
            folder = Path(
                snapshot_download(
                    self.repo,
                    revision=self.commit,
                    allow_patterns=list(patterns),
                    ignore_patterns=SUBFOLDERS,
                    local_files_only=is_offline_mode(),
                )
            )
        if not folder.is_dir():
            # The library caches a commit's listing, and creates no folder if the listing has no such file:
            # https://github.com/huggingface/huggingface_hub/blob/v1.33.0/src/huggingface_hub/_snapshot_download.py#L393
            raise NotACheckpoint(
                f"the Hub lists no checkpoint files in {self.repo}@{self.commit}",
                where=f"{constants.ENDPOINT}/{self.repo}/tree/{self.commit}",
                fix=f"If the page shows some, delete {folder.parent.parent / 'trees'}, the cached listing.",
            )
        for file in sorted(folder.iterdir()):
            if any(fnmatch.fnmatchcase(file.name, pattern) for pattern in patterns):
                check_download(file)
        return folder

    def _download(self, patterns: tuple[str, ...]) -> Path:
        folder = self._snapshot(patterns)
        # Once the config is fetched, it alone passes for a whole snapshot if the cache holds no listing.
        if is_offline_mode() and not any(folder.glob("*.safetensors")):
            raise not_cached(self.repo, self.commit)
        return folder

    def _list(self) -> dict[str, int]:
        """Return the sizes in bytes of the files in the repository's root, by name."""
        with named(self.repo, self.commit):
            tree = HfApi().list_repo_tree(self.repo, revision=self.commit)
            # What a server may answer, whatever the library's types say.
            sizes: dict[Any, Any] = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
            if not all(isinstance(size, int) and isinstance(path, str) for path, size in sizes.items()):
                raise ValueError("the listing has no names or sizes")
            return sizes


def resolve_repo(repo: str, revision: str | None) -> HubRepo:
    """Pin a repository to a revision's current commit.

    Args:
        revision: a branch, a tag, a pull request's ref or a commit; the default branch if None. A value of 40 hex
        digits is used without asking the Hub.
    """
    with named(repo, revision):
        refuse_garbled(get_token())
        commit = HfApi().resolve_revision(repo, revision=revision).resolved
        if not COMMIT.fullmatch(commit):
            raise ValueError("the revision is not a commit")
        return HubRepo(repo, commit, revision)


def refuse_garbled(token: str | None) -> None:
    """Refuse a token that no header can hold; the HTTP library's own error would print it, and so would logs."""
    if token and not (token.isascii() and token.isprintable()):
        raise HubRefused(
            "the token contains invalid characters", where="HF_TOKEN, or the token file", fix=f"Run: {LOGIN}"
        )


def fetch_dataset_file(repo: str, file: str, revision: str) -> tuple[Path, str]:
    """Download a file of a dataset, or find it in the local cache; return it, and its commit.

    Args:
        revision: a commit of 40 hex digits, or a branch or tag, which is resolved first; offline, to the commit that
        the cache last saw.

    Raises:
        HubRefused, HubUnreachable, OutputFailed, NotACheckpoint: see `library_faults`.
    """
    with named(repo, revision, file, dataset=True):
        known = try_to_load_from_cache(repo, file, repo_type="dataset", revision=revision)
        if not is_offline_mode() and not isinstance(known, str):
            # Fails at once if nothing answers, where the download tries again for half a minute.
            get_session().head(hf_hub_url(repo, file, repo_type="dataset", revision=revision), timeout=CONNECT_SECONDS)
        path = Path(hf_hub_download(repo, file, repo_type="dataset", revision=revision))
    check_download(path)
    # The cache keeps a file under snapshots/<commit>/.
    return path, path.parents[file.count("/")].name


def check_download(file: Path) -> None:
    """Check a file of the local cache against the sha256, or git's id, that the Hub announced for it.

    The cache names each stored file by its announced digest (its etag), and the client compares only sizes:
    https://github.com/huggingface/huggingface_hub/blob/v1.33.0/src/huggingface_hub/file_download.py
    Each stored file is read once; kconv's own cache then notes its size and time as checked.
    """
    stored = file.resolve()
    name = stored.name
    if stored.parent.name != "blobs":  # a cache without links has no digest in its names
        return
    if not (DIGEST.fullmatch(name) or COMMIT.fullmatch(name)):
        raise DownloadDamaged(
            f"kconv cannot tell whether {file.name} is the Hub's file: its ETag, {name[:16]!r}, is not a digest",
            where=stored,
            fix="Ask whoever runs the mirror or the proxy to pass ETag and X-Linked-Etag on, or unset HF_ENDPOINT.",
        )
    found = stored.stat()
    seen, note = f"{found.st_size} {found.st_mtime_ns} {found.st_ino}", cache_root() / "downloads" / name
    with suppress(OSError, KconvError):
        if read_text(note, KconvError, fix="Delete it.") == seen:
            return
    if _announced(stored, found.st_size, name) != name:
        raise DownloadDamaged(
            f"{file.name} differs from the file on the Hub: its digest is not {name[:16]}",
            where=stored,
            fix="Delete it, and run the command again. If it happens again, ask whoever runs the mirror or the proxy.",
        )
    with suppress(OSError):  # without a note kconv reads it again next time
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(seen, encoding="utf-8")


def _announced(stored: Path, size: int, name: str) -> str:
    """Return a file's digest of the kind in its name: sha256 for a large file, git's id for a small one."""
    if DIGEST.fullmatch(name):
        return file_digest(stored)
    data = read_bounded(stored, DownloadDamaged, limit=MAX_JSON, fix="Delete it, and run the command again.")
    return hashlib.sha1(b"blob %d\0" % size + data).hexdigest()


RETRIES = 3


@dataclass
class RangeReader:
    """A file on the Hub, read from its start by range requests, never whole.

    Attributes:
        size: its bytes, as the Hub lists them; nothing beyond is requested.
        at: the offset of the next read.
    """

    repo: str
    commit: str
    file: str
    size: int
    at: int = 0

    def read(self, count: int) -> bytes:
        end = min(self.at + count, self.size)
        if end <= self.at:
            return b""
        with named(self.repo, self.commit, self.file):
            data = self._request(self.at, end)
        self.at += len(data)
        return data

    def _request(self, begin: int, end: int) -> bytes:
        headers = build_hf_headers() | {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        url = hf_hub_url(self.repo, self.file, revision=self.commit)
        # Not retried once bytes flow: http_stream_backoff would yield a second time, as its own caller notes.
        # https://github.com/huggingface/huggingface_hub/blob/v1.33.0/src/huggingface_hub/file_download.py#L397
        with http_stream_backoff(
            "GET",
            url,
            headers=headers,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            max_retries=RETRIES,
            retry_on_exceptions=(),
        ) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:
                raise HubUnreachable(
                    f"{constants.ENDPOINT} sends only whole files, but {self.file} has {self.size:,} bytes",
                    where=url,
                    fix=f"Download it first: hf download {self.repo} --revision {self.commit} --local-dir DIR",
                )
            data = bytearray()
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) >= end - begin:  # a server may send more than requested
                    break
        return bytes(data[: end - begin])


# Exceptions of the library: over HTTP, on disk, in hf_xet (RuntimeError), and about ids and JSON (ValueError).
RAISED = (httpx.HTTPError, OSError, OIDCError, RevisionResolutionError, RuntimeError, ValueError)
# And those for JSON answers of an unexpected shape; NameError when the library's message uses a variable that such
# an answer left unset.
MISSHAPEN = (TypeError, KeyError, AttributeError, IndexError, AssertionError, NameError)
LOGIN = "hf auth login"


@contextmanager
def library_faults(
    repo: str, revision: str | None, file: str = "config.json", *, dataset: bool = False
) -> Generator[None]:
    """Turn huggingface_hub's exceptions inside this context into kconv's errors.

    Args:
        repo, revision: what was requested; the default branch if None.

    Raises:
        HubRefused: the repository or the revision does not exist, is gated, or is closed to this account; or a dataset
        has no such file.
        HubUnreachable: offline and not in the cache, no connection, or the server does not answer like the Hub.
        NotACheckpoint: a model's repository has no such file, or the name is not a valid file name.
        OutputFailed: the local cache cannot be written.
    """
    try:
        yield
    except RAISED as fault:
        raise _name(fault, repo, revision, file, dataset) from fault


@contextmanager
def named(repo: str, revision: str | None, file: str = "config.json", *, dataset: bool = False) -> Generator[None]:
    """Like `library_faults`, but also treat exceptions over an answer's shape as the server's error.

    Only for calls into the library: it would hide such exceptions in kconv's own code.
    """
    with library_faults(repo, revision, file, dataset=dataset), shaped():
        yield


@contextmanager
def shaped() -> Generator[None]:
    """Raise ValueError if the library fails on an answer of an unexpected shape."""
    try:
        yield
    except MISSHAPEN as fault:
        raise ValueError("the answer does not have the shape of the Hub's answers") from fault


def not_cached(repo: str, revision: str | None, *, dataset: bool = False) -> HubUnreachable:
    """Return the error for a repository that was requested offline and never downloaded whole."""
    at, option = (f"{repo}@{revision}", f" --revision {revision}") if revision else (repo, "")
    kind = " --repo-type dataset" if dataset else ""
    return HubUnreachable(
        f"there is no folder {repo} here, HF_HUB_OFFLINE is set, and the local cache lacks files of {at}",
        where=constants.HF_HUB_CACHE,
        fix=f"Unset HF_HUB_OFFLINE, or run this with a network connection first: hf download {repo}{option}{kind}",
    )


def _name(fault: Exception, repo: str, revision: str | None, file: str, dataset: bool) -> KconvError:
    # The library wraps the original exception if a cached copy could have helped.
    wraps = isinstance(fault, LocalEntryNotFoundError | RevisionResolutionError)
    cause = fault.__cause__ if wraps and fault.__cause__ else fault
    page = f"{constants.ENDPOINT}/{'datasets/' if dataset else ''}{repo}"
    at = f"{repo}@{revision}" if revision else repo
    match cause:
        case GatedRepoError():
            return HubRefused(
                f"{repo} is gated, and this account has not accepted its terms",
                where=page,
                fix=f"Accept them on its page, then run: {LOGIN}",
            )
        case RepositoryNotFoundError():
            return _unseen(repo, page)
        case RevisionNotFoundError():
            return HubRefused(
                f"{repo} has no revision {revision}",
                where=page,
                fix=f"Choose one of its branches and tags: {page}/tree/main",
            )
        case RemoteEntryNotFoundError() if dataset:
            return HubRefused(
                f"{at} has no {file}",
                where=f"{page}/tree/{revision or 'main'}",
                fix=f"Choose a revision that has it: {page}/commits/main",
            )
        case RemoteEntryNotFoundError():
            return NotACheckpoint(
                f"{at} has no {file}",
                where=f"{page}/tree/{revision or 'main'}",
                fix="Check the id. A checkpoint is config.json and *.safetensors.",
            )
        # Without a token the Hub does not say whether a repository exists.
        case HfHubHTTPError() if (
            cause.response.status_code == 401 and "authorization" not in cause.response.request.headers
        ):
            return _unseen(repo, page)
        case HfHubHTTPError():
            return _refused(cause.response.status_code, at, page)
        case HFValidationError():
            return NotACheckpoint(
                f"{repo} is neither a folder nor a hub id", fix="Give a checkpoint folder or a hub id org/name."
            )
        case OfflineModeIsEnabled() | LocalEntryNotFoundError() | RevisionResolutionError() if is_offline_mode():
            return not_cached(repo, revision, dataset=dataset)
        case OSError(errno=int()) if not isinstance(cause, httpx.HTTPError | ConnectionError | TimeoutError):
            return OutputFailed(
                f"{at} could not be stored: {cause.strerror}",
                where=cause.filename or constants.HF_HUB_CACHE,
                fix="Free some space there, or set HF_HOME to a folder on another disk.",
            )
        case OIDCError():
            return HubRefused(
                "HF_OIDC_RESOURCE is set, but the Hub gave no token for it",
                where=page,
                fix="Check the repository's trusted publishers and the job's id-token permission, or unset it.",
            )
        case ValueError():
            return HubUnreachable(
                f"{constants.ENDPOINT} does not answer like the Hub",
                where=page,
                fix="Check HF_ENDPOINT, and whether the network needs its own login.",
            )
        case _:
            return HubUnreachable(
                f"the connection to the Hub failed: {IN_WORDS.get(type(cause).__name__, type(cause).__name__)}",
                where=page,
                fix=f"{f'If {repo} is a folder, it is not here. ' * (not dataset)}Check the network, HTTPS_PROXY and"
                " HF_ENDPOINT; HF_HUB_OFFLINE=1 reads only the local cache.",
            )


def _unseen(repo: str, page: str) -> KconvError:
    return HubRefused(
        f"there is no folder {repo} here, and the Hub shows no such repository",
        where=page,
        fix=f"Check the spelling; if it is private, run: {LOGIN}",
    )


def _refused(status: int, at: str, page: str) -> KconvError:
    if status == 401:
        return HubRefused(
            "the Hub does not accept the token", where=page, fix=f"Unset HF_TOKEN if it is set, and run: {LOGIN}"
        )
    if status == 403:
        return HubRefused(
            f"the Hub does not let this token read {at}",
            where=page,
            fix=f"Give the token read access to the repository, or use another token: {LOGIN}",
        )
    if status == 429:
        return HubUnreachable(
            "the Hub is rate-limiting requests from this machine",
            where=page,
            fix=f"Wait a few minutes, or run: {LOGIN}",
        )
    return HubUnreachable(
        f"the Hub answered {status} for {at}",
        where=page,
        fix="Run the command again in a few minutes; HF_HUB_OFFLINE=1 reads only the local cache.",
    )
