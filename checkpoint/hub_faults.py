"""The Hub's faults by kconv's names.

No text of an exception is repeated: one about a header holds the token, and a redirect's url is signed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, is_offline_mode
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
from huggingface_hub.utils import httpx

from ..errors import HubRefused, HubUnreachable, KconvError, NotACheckpoint, OutputFailed

# What the library raises: over HTTP, on disk, in hf_xet (RuntimeError), and about ids and JSON (ValueError).
RAISED = (httpx.HTTPError, OSError, OIDCError, RevisionResolutionError, RuntimeError, ValueError)
LOGIN = "hf auth login"


@contextmanager
def named(repo: str, revision: str | None, file: str = "config.json", *, dataset: bool = False) -> Iterator[None]:
    """Raise what huggingface_hub raises inside as a fault of kconv's.

    Args:
        repo, revision: what was asked for; the default branch if None.
        file: of the repository, which was asked for.
        dataset: whether the repository is a data set, and no model.

    Raises:
        HubRefused: the repository or the revision is not there, is gated, or not this account's to read, or a data
            set has no such file.
        HubUnreachable: offline and not in the cache, no connection, or an answer that is not the Hub's.
        NotACheckpoint: a model's repository has no such file, or its name cannot be one.
        OutputFailed: the local cache cannot be written.
    """
    try:
        yield
    except RAISED as fault:
        raise _name(fault, repo, revision, file, dataset) from fault


def not_cached(repo: str, revision: str | None, *, dataset: bool = False) -> HubUnreachable:
    """Return the fault of a repository that is asked for offline, and was never downloaded whole."""
    at, option = (f"{repo}@{revision}", f" --revision {revision}") if revision else (repo, "")
    kind = " --repo-type dataset" if dataset else ""
    return HubUnreachable(
        f"there is no folder {repo} here, HF_HUB_OFFLINE is set, and {at} is not whole in the local cache",
        where=constants.HF_HUB_CACHE,
        fix=f"Unset HF_HUB_OFFLINE, or first, with a network, run: hf download {repo}{option}{kind}",
    )


def _name(fault: Exception, repo: str, revision: str | None, file: str, dataset: bool) -> KconvError:
    # The library wraps what went wrong where a cached copy could have helped.
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
                fix="A checkpoint is config.json and *.safetensors; check the id.",
            )
        # To who shows no token the Hub does not say whether a repository exists.
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
                "HF_OIDC_RESOURCE is set, and no token was given for it",
                where=page,
                fix="Check the repository's trusted publishers and the job's id-token permission, or unset it.",
            )
        case ValueError():
            return HubUnreachable(
                f"{constants.ENDPOINT} does not answer as the Hub does",
                where=page,
                fix="Check HF_ENDPOINT, and whether the network asks for a login of its own.",
            )
    return HubUnreachable(
        f"the connection to the Hub failed: {type(cause).__name__}",
        where=page,
        fix="Check the network, HTTPS_PROXY and HF_ENDPOINT; HF_HUB_OFFLINE=1 reads the local cache alone.",
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
            fix=f"Give the token read access to the repository, or run with another: {LOGIN}",
        )
    if status == 429:
        return HubUnreachable(
            "the Hub has had too many requests from here", where=page, fix=f"Wait some minutes, or run: {LOGIN}"
        )
    return HubUnreachable(
        f"the Hub answered {status} for {at}",
        where=page,
        fix="Run the command again in some minutes; HF_HUB_OFFLINE=1 reads the local cache alone.",
    )
