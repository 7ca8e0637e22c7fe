"""A data set on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download

from .hub_faults import named


def fetch_dataset_file(repo: str, file: str, revision: str) -> tuple[Path, str]:
    """Download a file of a data set, or find it in the local cache.

    Args:
        repo: org/name of the data set.
        file: its path in the repository.
        revision: a commit of 40 hex digits, or a branch or tag, which is resolved first; offline, to what the cache
            last saw it at.

    Returns:
        The file, and the commit that it is of.

    Raises:
        HubRefused, HubUnreachable, OutputFailed, NotACheckpoint: see `hub_faults`.
    """
    with named(repo, revision, file, dataset=True):
        path = Path(hf_hub_download(repo, file, repo_type="dataset", revision=revision))
    # The cache keeps a file under snapshots/<commit>/.
    return path, path.parents[file.count("/")].name
