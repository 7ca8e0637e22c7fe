"""How to measure acceptance: the options that `kconv bench` and what measures share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ..checkpoint.schema import parse_json
from ..options import Count, Url, option
from ..strict import StrictModel


def _counts(value: Any) -> Any:
    """Read whole numbers, from a list or from "1,4,16"."""
    return value.split(",") if isinstance(value, str) else (value,) if isinstance(value, int) else value


def _object(value: Any) -> Any:
    """Read a JSON object, from a mapping or from its text."""
    if isinstance(value, Mapping):
        return value
    try:
        found = parse_json(value) if isinstance(value, str) else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"""{value!r} is not a JSON object, such as '{{"top_p": 0.9}}'""")
    return found


class MeasureOptions(StrictModel):
    """How to measure, and facts that a server cannot report."""

    tree: str = option(
        "chain", "Shape of drafts: topk=4,nodes=8 is 4 branches and 8 verified tokens, the last accepted one included.",
        metavar="TREE",
    )  # fmt: skip
    speed_at: Annotated[tuple[Count, ...], BeforeValidator(_counts)] = option(
        (), "Measure speed too, at these concurrencies.", kind="list", metavar="N,N"
    )
    concurrency: Count = option(1, "Requests in flight.", metavar="N")
    max_tokens: Count = option(1024, "Maximum tokens per answer.", metavar="N")
    temperature: Annotated[float, Field(ge=0)] = option(0.0, "0 is greedy.", metavar="T")
    reasoning: str | None = option(None, "The target's reasoning mode, e.g. medium.")
    target_name: str | None = option(None, "Hub id of the target; by default the server's name.")
    precision: str | None = option(None, "Number format of the target, e.g. NVFP4.")
    model: str | None = option(None, "The server's name for the target.")
    engine_version: str | None = option(None, "The engine's version, if not reported.")
    draft_sample_method: str | None = option(None, "How drafts were sampled, e.g. greedy, if not reported.")
    rejection_sample_method: str | None = option(None, "How drafts were rejected, e.g. standard, if not reported.")
    baseline_url: Url | None = option(None, "The same target without speculation, for the speed-up.")
    extra: Annotated[dict[str, Any], BeforeValidator(_object)] = option(
        {}, "Extra fields for each request.", kind="json", metavar="JSON"
    )
    trust_remote_code: bool = option(False, "Run the tokenizer's own Python code; the target must be pinned.")
