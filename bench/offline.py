"""Measure acceptance without a server.

The target continues each dialogue slightly beyond the answer's end, since an engine's last drafts look there too; so
greedy figures equal those of an engine's counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from ..checkpoint.folder import open_checkpoint
from ..convert.read import Head
from ..errors import PromptsInvalid, TargetInvalid
from ..installed import version
from ..measure.drafting import Proposer, head_drafter, measure
from ..measure.figures import TextKind
from ..measure.held_out import refuse_overlap
from ..measure.texts import Batch, Text
from ..targets.config import read_target_config
from ..targets.forward import generate_greedy, generate_sampled
from ..targets.model import load_target
from ..targets.prompts import Prompt, digest_prompts
from ..targets.suites import Suite
from ..targets.tokenizer import Tokenizer, load_tokenizer
from ..validate.parity import load_head
from ..validate.report import called, config_digest, digests
from .acceptance import OVERALL, AcceptanceFile, AcceptanceRow, Averaging, SuiteRecord
from .options import MeasureOptions
from .stats import Counts, make_rows, mean_of_categories

Say = Callable[[str], None]
# A sampled text is not measured as a mean over verify steps: every position counts.
KINDS: dict[float, tuple[TextKind, Averaging]] = {
    0.0: ("greedy", "micro_steps"),
    1.0: ("sampled", "micro_positions"),
}


def measure_head(
    head: Head,
    target: Path,
    suite: Suite,
    lengths: Sequence[int],
    options: MeasureOptions,
    *,
    say: Say = lambda _: None,
) -> AcceptanceFile:
    """Measure a head on a suite with kconv's own forward.

    Args:
        lengths: each K; an answer is generated once for all of them.
        options: how to measure; temperature 0 simulates greedy decoding, 1 gives the probability that sampling accepts.

    Raises:
        TargetInvalid: the target cannot be read, or has no chat template.
        PromptsInvalid: a dialogue does not fit the target, the head was trained on one, or another temperature is
            requested.
    """
    if options.temperature not in KINDS:
        raise PromptsInvalid(
            f"acceptance at temperature {options.temperature:g} is not simulated",
            fix="Use 0 or 1, or measure on a server.",
        )
    refuse_overlap((prompt.digest for prompt in suite.prompts), head.checkpoint.folder)
    kind, averaging = KINDS[options.temperature]
    say("loading the target")
    tokenizer = load_tokenizer(target, trust_remote_code=options.trust_remote_code)
    if not tokenizer.inner.chat_template:
        raise TargetInvalid(
            "a suite's prompts are turns of a dialogue, but the target's tokenizer has no chat template",
            where=target,
            fix="Add the publisher's chat_template.jinja to the target's folder. If there is none, measure on plain"
            " text: kconv validate HEAD --target TARGET --prompts FILE.",
        )
    model = load_target(target, torch.float32)
    drafting = load_head(head, open_checkpoint(target), read_target_config(target))
    drafters = {steps: head_drafter(drafting, steps) for steps in lengths}
    shared = {
        "metric": "al_incl_bonus", "tree": "chain", "engine": "kconv",
        "engine_version": version("kconv"), "target": options.target_name or called(target.name),
        "precision": "float32",
        "temperature": options.temperature, "reasoning": options.reasoning,
        "dataset": suite.dataset, "revision": suite.revision, "max_tokens": options.max_tokens,
        "date": datetime.now(UTC).date().isoformat(), "measured_by": "self",
    }  # fmt: skip
    counted: dict[int, dict[str, list[Counts]]] = {steps: {} for steps in lengths}
    answers: dict[str, list[tuple[str, int, bool]]] = {}
    for category, prompts in suite.groups:
        answers[category] = []
        for number, prompt in enumerate(prompts):
            say(f"{category or suite.dataset} {number}/{len(prompts)}")
            found, said = _dialogue(prompt, model, tokenizer, drafters, head, kind, options)
            answers[category] += said
            for steps, counts in found.items():
                counted[steps].setdefault(category, []).append(counts)
    rows = [
        row
        for steps, own in counted.items()
        for row in _of_length(suite, own, answers, averaging, shared | {"draft_tokens": steps})
    ]
    return AcceptanceFile(
        head=head.checkpoint.source,
        weights=digests(head.checkpoint),
        config=config_digest(head.checkpoint),
        suites=(SuiteRecord(dataset=suite.dataset, categories=tuple(answers), whole=suite.whole),),
        rows=tuple(rows),
        kconv=version("kconv"),
        provenance={"torch": torch.__version__},
    )


def _of_length(
    suite: Suite,
    counted: Mapping[str, Sequence[Counts]],
    answers: Mapping[str, Sequence[tuple[str, int, bool]]],
    averaging: Averaging,
    shared: Mapping[str, object],
) -> list[AcceptanceRow]:
    """Return the rows of one K: for each category, for all, and the mean of the categories."""
    rows: list[AcceptanceRow] = []
    for category, prompts in suite.groups:
        own = {**shared, "category": category}
        rows += _rows(counted[category], answers[category], averaging, own, prompts)
    if list(counted) != [OVERALL]:
        everything = [counts for groups in counted.values() for counts in groups]
        said = [answer for group in answers.values() for answer in group]
        mean = mean_of_categories([row for row in rows if row.averaging == averaging], counted)
        shared = {**shared, "category": OVERALL}
        rows += _rows(everything, said, averaging, shared, suite.prompts)
        whole = {"averaging": "macro_category", "value": round(mean, 6), "prompts": len(suite.prompts)}
        rows.append(AcceptanceRow.model_validate(shared | whole | {"prompts_sha256": suite.digest}))
    return rows


def _rows(
    counts: Sequence[Counts],
    answers: Sequence[tuple[str, int, bool]],
    averaging: Averaging,
    shared: Mapping[str, object],
    prompts: Sequence[Prompt],
) -> Iterator[AcceptanceRow]:
    # An answer of one token leaves nothing to draft: it has no length to average.
    counts = [group for group in counts if group.drafts]
    if not counts:
        raise PromptsInvalid(
            "nothing is drafted, because no answer has more than one token",
            where=shared["category"] or shared["dataset"],
            fix="Raise --max-tokens, or remove the category.",
        )
    digest = {"prompts_sha256": digest_prompts(tuple(prompts))}
    return make_rows(counts, answers, dict(shared) | digest, averaging=averaging)


def _dialogue(
    prompt: Prompt,
    model,
    tokenizer: Tokenizer,
    drafters: Mapping[int, Proposer],
    head: Head,
    kind: TextKind,
    options: MeasureOptions,
) -> tuple[dict[int, Counts], list[tuple[str, int, bool]]]:
    """Return what each K accepts of one dialogue, and its answers, which do not depend on K."""
    turns: list[str] = []
    accepted = {steps: [0.0] * steps for steps in drafters}
    drafts = dict.fromkeys(drafters, 0.0)
    said: list[tuple[str, int, bool]] = []
    ends, limit = _ends(model), options.max_tokens
    for turn in prompt.turns:
        turns.append(turn)
        start = tokenizer.encode_chat(turns)
        length = limit + max(drafters) - 1
        if options.temperature:
            [tokens] = generate_sampled(model, [start], length, temperature=options.temperature, seed=len(said))
        else:
            [tokens] = generate_greedy(model, [start], length)
        answer = next((i + 1 for i, token in enumerate(tokens[:limit]) if token in ends), limit)
        for steps, drafter in drafters.items() if answer > 1 else ():  # the first token is the prefill's own
            text = Text(kind, (Batch(torch.tensor([start + tokens[: answer + steps - 1]]), len(start)),))
            [figures] = measure(text, model, head.spec.captured, steps, {"head": drafter}).acceptance
            drafts[steps] += figures.drafts
            rates = zip(accepted[steps], figures.rates, strict=True)
            accepted[steps] = [have + rate * figures.drafts for have, rate in rates]
        words = str(tokenizer.inner.decode(tokens[:answer], skip_special_tokens=True))
        turns.append(words)
        said.append((words, answer, answer == limit and tokens[answer - 1] not in ends))
    return {k: Counts(drafts[k], sum(accepted[k]), tuple(accepted[k])) for k in drafters}, said


def _ends(model) -> set[int]:
    end = model.config.eos_token_id
    return set(end if isinstance(end, list | tuple) else [] if end is None else [end])
