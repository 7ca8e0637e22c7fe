"""Everything that can be measured about a head, an engine or a quantized target."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from ..checkpoint.manifest import FactValue
from ..strict import StrictModel

TextKind = Literal["held-out", "sampled", "greedy"]


class TextFigures(StrictModel):
    """A text that was used for measuring.

    Attributes:
        kind: "held-out" (the prompts' own text), or the target's "sampled" (temperature 1) or "greedy"
            continuation of the prompts.
        sequences, tokens: its size.
        distinct_4grams: share of its 4-grams that are distinct; low in repetitive text, which inflates acceptance.
    """

    kind: TextKind
    sequences: int
    tokens: int
    distinct_4grams: float


# How far a rate may be from its figure, rounded to whole percents.
ROUNDED = 0.005


class AcceptanceFigures(StrictModel):
    """Acceptance of one drafter on one text.

    Attributes:
        drafter: "source", "output", "bigram", "prompt lookup", or a name.
        text: the text's kind.
        steps: drafted tokens per verify step (K).
        drafts: the number of verify steps (greedy) or positions (sampled).
        length: acceptance length, 1 to K + 1, bonus token included.
        standard_error: of the length, over sequences; None for a single sequence.
        rates: share of drafts accepted up to each position.
        note: how it was measured.
        category: the prompts' category; "" for all prompts.
        sequences: number of sequences.
        rate_errors: the rates' standard errors, over sequences.
    """

    drafter: str
    text: TextKind
    steps: int
    drafts: int
    length: float = Field(ge=1)
    standard_error: float | None
    rates: tuple[float, ...]
    note: str
    category: str = ""
    sequences: int = 0
    rate_errors: tuple[float | None, ...] = ()

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        counted = 1 + sum(self.rates)
        if self.rates and not abs(counted - self.length) <= ROUNDED * len(self.rates):
            raise ValueError(
                f"{self.drafter} on {self.text}: the rates give {counted:.3f} tokens, not {self.length:.3f}"
            )
        return self


class StepFigures(StrictModel):
    """The difference between output and source at one draft step; fields as in `ParityFigures`.

    Attributes:
        step: from 1.
        rate_difference: acceptance rate up to this position, the output's minus the source's.
        rate_difference_se: its paired standard error, over sequences.
    """

    step: int
    relative_error: float
    rms_error: float
    kl: float
    top1: float
    rate_difference: float
    rate_difference_se: float | None


class ParityFigures(StrictModel):
    """How much the output's logits differ from the source's, over all draft steps of one text.

    Attributes:
        text: the text's kind.
        steps: draft steps compared.
        relative_error: largest absolute difference over the source's largest absolute logit.
        rms_error: root mean square of the differences over that of the source's logits.
        kl: mean KL divergence of the output's distribution from the source's, nats.
        top1: share of positions where both have the same most likely token.
        length_difference: acceptance length of the output minus the source's, paired.
        length_difference_se: its paired standard error, over sequences; None for a single sequence.
        category: the prompts' category; "" for all prompts.
        by_step: the same at each draft step.
        kept: share of the source's acceptance length that the output retains.
        kept_se: its paired standard error, over sequences; None for a single sequence.
    """

    text: TextKind
    steps: int
    relative_error: float
    rms_error: float
    kl: float
    top1: float
    length_difference: float = Field(allow_inf_nan=False)
    length_difference_se: float | None
    category: str = ""
    by_step: tuple[StepFigures, ...] = ()
    kept: float | None = None
    kept_se: float | None = None


class PartFigures(StrictModel):
    """How far a part of the output's first draft step differs from the source's, on the source's own inputs.

    Attributes:
        part: "fc", "norms", "attention", "mlp" or "lm_head".
        text: the text's kind.
        relative_error, rms_error: of the part's output, as in `ParityFigures`.
    """

    part: str
    text: TextKind
    relative_error: float
    rms_error: float


class ReadingFigures(StrictModel):
    """Acceptance of a head under one reading, compared with the best; see `validate.readings`.

    Attributes:
        facts: the reading: the value of each measurable fact, by its name in `drafters.facts`.
        taken: whether this is the reading in use.
        text: the kind of the text.
        steps: drafted tokens per verify step (K).
        sequences: number of sequences.
        length: acceptance length, bonus token included.
        behind_best: the best reading's length minus this one's.
        behind_best_se: its paired standard error, over sequences; None for a single sequence.
    """

    facts: dict[str, FactValue]
    taken: bool
    text: TextKind
    steps: int
    sequences: int
    length: float
    behind_best: float
    behind_best_se: float | None


class ReadingsDecided(StrictModel):
    """What the measured readings of a head decide.

    Attributes:
        winner: which of `Figures.readings` is right: the best one, or the one that ties with it and changes fewer facts
            of the reading in use, if that is beaten.
        beaten: the facts whose value in the reading in use the winner's beats.
        confirmed: the open facts for which the winner's value beats every other.
        undecided: the open facts that the measurement cannot decide.
    """

    winner: int
    beaten: tuple[str, ...] = ()
    confirmed: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()


class EngineFigures(StrictModel):
    """An engine's results with a head, and what kconv expects.

    Attributes:
        engine: "vllm", "sglang" or "trtllm".
        url: the running server; "" if kconv started one.
        prompts: how many prompts it continued.
        new_tokens: tokens of each continuation.
        steps: drafted tokens per verify step (K).
        same_output: how many continuations equal the reference, token for token.
        reference: the source of those: "the same engine without speculation", or "kconv's forward".
        drafts: verify steps, as the engine counted them.
        accepted: drafted tokens that it accepted; None if it does not report them.
        per_position: drafts accepted up to each position; None if it does not count positions.
        length: acceptance length, including the bonus token.
        expected_drafts, expected_per_position, expected_length: what kconv's chain gives on the reference.
        expected_accepted: the part of it that an engine counts if it omits tokens past an answer's limit; None if it
            counts all.
        unreached: the head's parameters that no tensor filled, by the engine's names; None if not checked.
    """

    engine: str
    url: str
    prompts: int
    new_tokens: int
    steps: int
    same_output: int
    reference: str
    drafts: int
    accepted: int
    per_position: tuple[int, ...] | None
    length: float
    expected_drafts: int
    expected_per_position: tuple[int, ...]
    expected_length: float
    expected_accepted: int | None = None
    unreached: tuple[str, ...] | None = None


class NoiseFigures(StrictModel):
    """The difference between a quantized target's weights and its source's, over the tensors that became NVFP4.

    Attributes:
        tensors: their number.
        exact: how many of them have no noise, since they were cast.
        median, worst: signal over noise of the others, dB; None if there are none.
        worst_tensor: the name of the worst.
        by_tensor: for each tensor, dB.
    """

    tensors: int
    exact: int = 0
    median: float | None = None
    worst: float | None = None
    worst_tensor: str = ""
    by_tensor: dict[str, float] = Field(default={})


# What quantization may cost, beyond two standard errors, before publishing needs a reason.
MAX_GROWTH = 0.01


class PerplexityFigures(StrictModel):
    """A quantized target compared with its source on held-out text, both in fp32 on dequantized weights.

    Inputs of NVFP4 linear layers with an input_scale are rounded as an engine rounds them.

    Attributes:
        prompts, tokens: number of texts, and of their tokens after the first.
        source, output: perplexity of each.
        log_ratio: mean loss of the output minus the source's, nats per token: the logarithm of their perplexities'
            ratio.
        log_ratio_se: its paired standard error, over texts; None for a single text.
        top1: share of tokens for which both predict the same most likely token.
    """

    prompts: int
    tokens: int
    source: float
    output: float
    log_ratio: float
    log_ratio_se: float | None
    top1: float

    @property
    def growth(self) -> float:
        """By which share the output's perplexity is above the source's."""
        return math.expm1(self.log_ratio)

    @property
    def is_larger(self) -> bool:
        """Whether it grew by more than `MAX_GROWTH` and two standard errors together; NaN did."""
        return not self.growth - 2 * (self.log_ratio_se or 0.0) <= MAX_GROWTH


class AccuracyFigures(StrictModel):
    """A quantized target's accuracy on a task beside its source's, as a harness measured both in the same way.

    Attributes:
        task: or a group of tasks, as the harness names it.
        metric: with the filter of answers, e.g. "exact_match, strict-match".
        shots: examples in each prompt.
        questions: their number.
        harness: its name and version.
        output, source: the accuracy of each, from 0 to 1.
        output_error, source_error: their standard errors; None if the harness states none.
    """

    task: str
    metric: str
    shots: str
    questions: int
    harness: str
    output: float
    output_error: float | None
    source: float
    source_error: float | None

    @property
    def error(self) -> float | None:
        """The standard error of the difference, as if the questions were not the same ones: too large, if anything."""
        if self.output_error is None or self.source_error is None:
            return None
        return math.hypot(self.output_error, self.source_error)

    @property
    def is_lower(self) -> bool:
        """Whether the output's is lower by more than two standard errors."""
        return self.source - self.output > 2 * (self.error or 0.0)


class Figures(StrictModel):
    """All measurements of a report.

    Attributes:
        identical: whether every weight of the output is byte-identical to the source; None without a source.
        texts, acceptance, parity: one entry per text, per drafter and text, per text.
        acceptance_by_category, parity_by_category: the same by the prompts' category, if there are several.
        parts: one entry per part of a head and text.
        readings: one entry per measured reading of the head, the one in use first.
        decided: what the readings decide; None if none was measured.
        engine: an engine's results; None if no engine was queried.
        noise: of a quantized target against its source; None for anything else.
        perplexity: of both on held-out text; None without held-out text.
        accuracy: one entry per task and metric that a harness measured of both.
    """

    identical: bool | None = None
    texts: tuple[TextFigures, ...] = ()
    acceptance: tuple[AcceptanceFigures, ...] = ()
    parity: tuple[ParityFigures, ...] = ()
    acceptance_by_category: tuple[AcceptanceFigures, ...] = ()
    parity_by_category: tuple[ParityFigures, ...] = ()
    parts: tuple[PartFigures, ...] = ()
    readings: tuple[ReadingFigures, ...] = ()
    decided: ReadingsDecided | None = None
    engine: EngineFigures | None = None
    noise: NoiseFigures | None = None
    perplexity: PerplexityFigures | None = None
    accuracy: tuple[AccuracyFigures, ...] = ()
