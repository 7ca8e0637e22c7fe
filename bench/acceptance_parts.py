"""What a figure of acceptance.json has beside its value."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Interval(_Part):
    """A bootstrap confidence interval.

    Attributes:
        low, high: its ends, in the figure's unit.
        level: e.g. 0.95.
        over: what was drawn again and again: "prompts", or "groups of N prompts" where N ran side by side.
        units: how many of them there are.
    """

    low: float
    high: float
    level: float = 0.95
    over: str
    units: int


class Sanity(_Part):
    """What the target answered, as looping text flatters every drafter.

    Attributes:
        distinct_4grams: share of distinct 4-grams of words within an answer, mean over answers.
        mean_tokens: tokens of an answer.
        cut: share of answers that ended at `max_tokens`.
    """

    distinct_4grams: float
    mean_tokens: float
    cut: float


class Speed(_Part):
    """Output tokens per second of wall clock, with and without speculation, on the same prompts.

    Attributes:
        tokens_per_second, baseline_tokens_per_second: of all requests together.
        speedup: the first over the second.
        same_answers: share of the answers that were the same text; greedy decoding should give nearly all.
    """

    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float
    same_answers: float
