"""The options of `kconv train` and `kconv generate`, which the requests and what they call share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..options import Count, option
from ..strict import StrictModel


class GenerateOptions(StrictModel):
    """How a server samples answers."""

    max_tokens: Count = option(4096, "Maximum tokens per answer.", metavar="N")
    temperature: Annotated[float, Field(ge=0)] = option(0.6, "0 is greedy.", metavar="T")
    concurrency: Count = option(16, "Requests in flight.", metavar="N")
    seed: int = option(0, "Random seed for sampling.")
