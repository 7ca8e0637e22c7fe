"""A data set on the Hugging Face Hub. What belongs here: pinning a revision, and fetching one file at it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download

from .hub_faults import named


def fetch_dataset_file(repo: str, file: str, revision: str) -> tuple[Path, str]:
    """Download a file of a data set, or find it in the local cache.

    Args:
        repo: org/name of the data set.
        file: its path in the repository.
        revision: a commit of 40 hex digits, or a branch or tag, which is resolved first.

    Returns:
        The file, and the commit that it is of.

    Raises:
        HubRefused, HubUnreachable, OutputFailed, NotACheckpoint: see `hub_faults`.
    """
    with named(repo, revision):
        commit = revision
        if len(revision) != 40 or set(revision) - set("0123456789abcdef"):
            commit = str(HfApi().dataset_info(repo, revision=revision).sha)
        return Path(hf_hub_download(repo, file, repo_type="dataset", revision=commit)), commit
