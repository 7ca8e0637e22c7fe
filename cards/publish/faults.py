"""What goes wrong in writing to the Hub, by kconv's names.

Reading has its own words for the same answers, in `checkpoint.hub_faults`; connections and disks are named there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_token, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError

from ...checkpoint.hub import LOGIN, named
from ...errors import HubMoved, HubRefused, HubUnreachable, KconvError, PublishRefused


@contextmanager
def written(repo: str) -> Iterator[None]:
    """Raise what huggingface_hub raises inside as a fault of kconv's; no text of an exception is repeated."""
    if is_offline_mode():
        raise HubUnreachable(
            f"HF_HUB_OFFLINE is set, and publishing {repo} takes the Hub", fix="Unset it, and run the command again."
        )
    with named(repo, None):
        try:
            _refuse_garbled(get_token())
            yield
        except HfHubHTTPError as fault:
            raise _name(fault, repo) from None
        except ValueError as fault:
            # https://github.com/huggingface/huggingface_hub/blob/v1.33.0/src/huggingface_hub/hf_api.py (_validate_yaml)
            if not str(fault).startswith("Invalid metadata in README.md"):
                raise
            raise PublishRefused(
                f"the Hub refuses the card: {' '.join(str(fault).split())}",
                where="README.md",
                fix="Put the card's metadata right (kconv card), and run the command again.",
            ) from None


def _refuse_garbled(token: str | None) -> None:
    # The HTTP library would say so too, and repeat the token.
    if token and not (token.isascii() and token.isprintable()):
        raise HubRefused(
            "the token holds characters that no token has", where="HF_TOKEN, or the token's file", fix=f"Run: {LOGIN}"
        )


def _name(fault: HfHubHTTPError, repo: str) -> KconvError:
    status, page = fault.response.status_code, f"{constants.ENDPOINT}/{repo}"
    shown = "authorization" in fault.response.request.headers
    match status:
        case 401 if not shown:
            return HubRefused(
                f"{repo} cannot be written to without a token", where=page, fix=f"Set HF_TOKEN, or run: {LOGIN}"
            )
        case 401:
            return HubRefused(
                "the Hub does not accept the token; it may have expired",
                where=page,
                fix=f"Set HF_TOKEN to a new one, or run: {LOGIN}; then run the command again, which goes on.",
            )
        case 403:
            return HubRefused(
                f"the token may not write to {repo}, or not create it",
                where=page,
                fix="Give it write access there. A trusted publisher's token cannot create a repository: do that once.",
            )
        case 404:
            return HubRefused(
                f"the Hub shows no {repo}, or not this revision of it", where=page, fix="Check the spelling."
            )
        case 409:
            return HubMoved(
                f"something else is being done to {repo} at this moment", where=page, fix="Run the command again."
            )
        case 429:
            return HubUnreachable(
                "the Hub has had too many requests from here", where=page, fix="Wait, then run the command again."
            )
    return HubUnreachable(
        f"the Hub answered {status} for {repo}", where=page, fix="Run the command again in some minutes; it goes on."
    )
