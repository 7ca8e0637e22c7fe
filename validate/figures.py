"""What can be measured of a head, an engine or a quantized target."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

TextKind = Literal["held-out", "sampled", "greedy"]
# Of every part of a report: no other keys, and nothing is changed afterwards.
STRICT = ConfigDict(extra="forbid", frozen=True)


class _Record(BaseModel):
    model_config = STRICT


class TextFigures(_Record):
    """A text that figures were measured on.

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


class AcceptanceFigures(_Record):
    """Acceptance of one drafter on one text.

    Attributes:
        drafter: "source", "output", "bigram", "prompt lookup", or a name.
        text: the text's kind.
        steps: drafted tokens per verify step (K).
        drafts: verify steps (greedy) or positions (sampled) that the figures are over.
        length: acceptance length, 1 to K + 1, bonus token included.
        standard_error: of the length, over sequences; None where there is but one.
        rates: share of drafts that were accepted up to each place.
        note: how it was measured.
        category: the prompts' category that the figures are of; "" for all prompts.
        sequences: how many sequences they are over.
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


class StepFigures(_Record):
    """How far the output is from the source at one draft step; fields as in `ParityFigures`.

    Attributes:
        step: from 1.
        rate_difference: acceptance rate up to this place, the output's minus the source's.
        rate_difference_se: its paired standard error, over sequences.
    """

    step: int
    relative_error: float
    rms_error: float
    kl: float
    top1: float
    rate_difference: float
    rate_difference_se: float | None


class ParityFigures(_Record):
    """How much the output's logits differ from the source's, over all draft steps of one text.

    Attributes:
        text: the text's kind.
        steps: draft steps compared.
        relative_error: largest absolute difference over the source's largest absolute logit.
        rms_error: root mean square of the differences over that of the source's logits.
        kl: mean KL divergence of the output's distribution from the source's, nats.
        top1: share of places where both have the same likeliest token.
        length_difference: acceptance length of the output minus the source's, paired.
        length_difference_se: its paired standard error, over sequences; None where there is but one.
        category: the prompts' category that the figures are of; "" for all prompts.
        by_step: the same at each draft step.
        kept: share of the source's acceptance length that the output keeps.
        kept_se: its paired standard error, over sequences; None where there is but one.
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


class PartFigures(_Record):
    """How far a part of the output's first draft step is from the source's, on the source's own inputs.

    Attributes:
        part: "fc", "norms", "attention", "mlp" or "lm_head".
        text: the text's kind.
        relative_error, rms_error: of the part's output, as in `ParityFigures`.
    """

    part: str
    text: TextKind
    relative_error: float
    rms_error: float


class ReadingFigures(_Record):
    """Acceptance of a head under one way to read it, beside the best; see `validate.readings`.

    Attributes:
        captured, rope_theta, norm_before_residual: the reading, as phrases.
        taken: whether it is the one that the head is read in.
        text: the kind of the text.
        steps: drafted tokens per verify step (K).
        sequences: how many sequences it is over.
        length: acceptance length, bonus token included.
        behind_best: the best reading's length minus this one's.
        behind_best_se: its paired standard error, over sequences; None where there is but one.
    """

    captured: str
    rope_theta: str
    norm_before_residual: str
    taken: bool
    text: TextKind
    steps: int
    sequences: int
    length: float
    behind_best: float
    behind_best_se: float | None


class EngineFigures(_Record):
    """What an engine did with a head, and what kconv computes that it should do.

    Attributes:
        engine: "vllm", "sglang" or "trtllm".
        url: the server, where one was reached; "" where it was started for this.
        prompts: how many prompts it continued.
        new_tokens: tokens of each continuation.
        steps: drafted tokens per verify step (K).
        same_output: how many continuations equal the reference, token for token.
        reference: whose continuations those are: "the same engine without speculation", or "kconv's forward".
        drafts: verify steps, as the engine counted them.
        accepted: drafted tokens that it accepted; None where it does not say.
        per_position: drafts accepted up to each place; None where it does not count places.
        length: acceptance length, bonus token included.
        expected_drafts, expected_per_position, expected_length: what kconv's chain gives on the reference.
        expected_accepted: what of it an engine counts that leaves out what an answer's limit cuts off; None where it
            counts all.
        unreached: the head's parameters that no tensor reached, by the engine's names; None where that was not looked
            at.
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


class NoiseFigures(_Record):
    """How far a quantized target's weights are from its source's, over the tensors that became NVFP4.

    Attributes:
        tensors: how many there are.
        median, worst: signal over noise, dB; None where no tensor has any noise.
        worst_tensor: the name of the worst.
        by_tensor: of each tensor, dB.
    """

    tensors: int
    median: float | None = None
    worst: float | None = None
    worst_tensor: str = ""
    by_tensor: dict[str, float] = {}


class PerplexityFigures(_Record):
    """A quantized target beside its source on held-out text, both computed in fp32 on dequantized weights.

    What an NVFP4 linear with an input_scale reads is rounded as an engine rounds it.

    Attributes:
        prompts, tokens: texts, and the tokens in them that have one before them.
        source, output: perplexity of each.
        log_ratio: mean loss of the output less the source's, nats a token: the logarithm of their perplexities' ratio.
        log_ratio_se: its paired standard error, over texts; None where there is but one.
        top1: share of tokens for which both have the same likeliest one.
    """

    prompts: int
    tokens: int
    source: float
    output: float
    log_ratio: float
    log_ratio_se: float | None
    top1: float


class Figures(_Record):
    """Everything that was measured.

    Attributes:
        identical: whether every weight of the output has the source's bytes; None where no source was given.
        texts, acceptance, parity: one entry for each text, drafter and text, text.
        acceptance_by_category, parity_by_category: the same by the prompts' category, where they have several.
        parts: one entry for each part of a head and text.
        readings: one entry for each reading of the head that was measured, the one it is read in first.
        engine: what an engine did; None where none was asked.
        noise: of a quantized target against its source; None for anything else.
        perplexity: of both on held-out text; None where none was given.
    """

    identical: bool | None = None
    texts: tuple[TextFigures, ...] = ()
    acceptance: tuple[AcceptanceFigures, ...] = ()
    parity: tuple[ParityFigures, ...] = ()
    acceptance_by_category: tuple[AcceptanceFigures, ...] = ()
    parity_by_category: tuple[ParityFigures, ...] = ()
    parts: tuple[PartFigures, ...] = ()
    readings: tuple[ReadingFigures, ...] = ()
    engine: EngineFigures | None = None
    noise: NoiseFigures | None = None
    perplexity: PerplexityFigures | None = None
