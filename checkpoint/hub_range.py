"""A part of a file on the Hub."""

from __future__ import annotations

from dataclasses import dataclass

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from ..errors import HubUnreachable
from .hub_faults import named

RETRIES = 3


@dataclass
class RangeReader:
    """A file on the Hub, read from its start on by range requests, and never whole.

    Attributes:
        repo, commit, file: which file.
        size: its bytes, as the Hub lists them; nothing is asked for beyond.
        at: where the next read begins.
    """

    repo: str
    commit: str
    file: str
    size: int
    at: int = 0

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes, or fewer where the file ends.

        Raises:
            HubRefused: the file is not given to this account.
            HubUnreachable: the connection broke, or the server sends whole files only.
        """
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
        # Not tried again once bytes flow: http_stream_backoff would yield a second time, as its own caller knows.
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
                    f"{constants.ENDPOINT} sends whole files only, and {self.file} is {self.size:,} bytes",
                    where=url,
                    fix=f"Download it first: hf download {self.repo} --revision {self.commit} --local-dir DIR",
                )
            data = bytearray()
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) >= end - begin:  # a server may send more than it was asked for
                    break
        return bytes(data[: end - begin])
