"""What the Hub holds against what was meant.

A listing repeats what was announced; what is stored is known from the bytes alone, and these are read in a stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from time import sleep

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff, httpx

from ...errors import ReadBackFailed
from .release import Upload
from .remote import WAITS, Stored

# The Hub's own, which tells git what is large.
NOT_OURS = (".gitattributes",)


def differing(files: Iterable[Upload], listed: Mapping[str, Stored]) -> list[str]:
    """Return the names of files that a listing lacks, or shows with another size or hash."""
    return [file.name for file in files if not _is(file, listed.get(file.name))]


def surplus(files: Iterable[Upload], listed: Mapping[str, Stored]) -> list[str]:
    """Return the names that a listing holds and a release does not."""
    return sorted(listed.keys() - {file.name for file in files} - set(NOT_OURS))


def same(files: tuple[Upload, ...], listed: Mapping[str, Stored]) -> bool:
    """Say whether a listing is of these very files."""
    return not differing(files, listed) and not surplus(files, listed)


def read_back(repo: str, commit: str, files: Iterable[Upload], say: Callable[[str], None]) -> None:
    """Download every file of a release and compare it, without keeping any.

    Raises:
        ReadBackFailed: a file's bytes are not the ones that were uploaded.
    """
    for file in files:
        say(f"reading back {file.name}")
        size, sha256 = _digest(repo, commit, file.name)
        if (size, sha256) != (file.size, file.sha256):
            raise ReadBackFailed(
                f"the Hub gives back {file.name} with other bytes than were uploaded: "
                f"sha256 {sha256[:16]} in place of {file.sha256[:16]}, {size:,} bytes of {file.size:,}",
                where=f"{repo}@{commit}",
                fix="Nothing was tagged. Delete the file on the Hub with its stored object, then run this again.",
            )


def _is(file: Upload, stored: Stored | None) -> bool:
    if stored is None or stored.size != file.size:
        return False
    return stored.sha256 == file.sha256 if stored.sha256 else stored.blob_id == file.blob_id


def _digest(repo: str, commit: str, name: str) -> tuple[int, str]:
    """Return the size and sha256 of what the Hub gives for a file."""
    for wait in WAITS:
        try:
            return _stream(repo, commit, name)
        except httpx.TransportError:
            sleep(wait)
    return _stream(repo, commit, name)


def _stream(repo: str, commit: str, name: str) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    with http_stream_backoff(
        "GET",
        hf_hub_url(repo, name, revision=commit),
        headers=headers,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        # Not tried again once bytes flow, as for headers (see checkpoint.hub_range); the caller does so.
        retry_on_exceptions=(),
    ) as response:
        hf_raise_for_status(response)
        for chunk in response.iter_bytes():
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()
