"""Drafts of greedy answers without a server: by heads, a bigram table and prompt lookup."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.read import read_head
from kconv.drafters.baselines import bigram_drafts, count_bigrams, lookup_drafts
from kconv.drafters.chain import Acceptance, greedy_acceptance
from kconv.measure.drafting import head_drafter, measure_states
from kconv.measure.texts import Batch, Text
from kconv.targets.config import read_target_config
from kconv.targets.dialogues import encode_row, read_rows
from kconv.targets.forward import States, generate_greedy, run_target
from kconv.targets.model import load_target
from kconv.targets.suites import Suite
from kconv.targets.tokenizer import load_tokenizer
from kconv.validate.parity import load_head

# Prompts that are answered side by side, and written as they are done.
AT_ONCE = 16


@dataclass(frozen=True)
class Answer:
    """One greedy answer, and a little more: the last drafts of an engine look beyond its end (`kconv.bench.offline`).

    Attributes:
        prompt, category: of the suite.
        start: what the target was asked, as token ids.
        tokens: what it answered, and what would follow.
        length: tokens of the answer.
    """

    prompt: str
    category: str
    start: list[int]
    tokens: list[int]
    length: int

    def batch(self, k: int) -> Batch:
        """Return the text that K draft tokens are measured on."""
        return Batch(torch.tensor([self.start + self.tokens[: self.length + k - 1]]), len(self.start))


def answer_greedily(target: Path, suite: Suite, max_tokens: int, beyond: int, out: Path) -> list[Answer]:
    """Answer a suite in fp32, turn by turn; what `out` holds already is not asked again.

    Args:
        target: its folder.
        suite: what is asked.
        max_tokens: an answer's limit.
        beyond: the largest K.
        out: JSON lines of answers.
    """
    found = [Answer(**json.loads(line)) for line in out.read_text().splitlines()] if out.exists() else []
    left = [prompt for prompt in suite.prompts if prompt.id not in {answer.prompt for answer in found}]
    if left:
        tokenizer, config = load_tokenizer(target), read_target_config(target)
        model = load_target(target, torch.float32)
    for begin in range(0, len(left), AT_ONCE):
        some, new = left[begin : begin + AT_ONCE], []
        said: dict[str, list[str]] = {prompt.id: [] for prompt in some}
        for turn in range(max(len(prompt.turns) for prompt in some)):
            asked = [prompt for prompt in some if turn < len(prompt.turns)]
            for prompt in asked:
                said[prompt.id].append(prompt.turns[turn])
            starts = [tokenizer.encode_chat(said[prompt.id]) for prompt in asked]
            rows = generate_greedy(model, starts, max_tokens + beyond - 1)
            for prompt, start, tokens in zip(asked, starts, rows, strict=True):
                length = next((i + 1 for i, token in enumerate(tokens[:max_tokens]) if token in config.eos), max_tokens)
                said[prompt.id].append(str(tokenizer.inner.decode(tokens[:length], skip_special_tokens=True)))
                new.append(Answer(prompt.id, prompt.category, start, tokens, length))
        with out.open("a") as file:
            file.writelines(json.dumps(vars(answer)) + "\n" for answer in new)
        found += new
        print(f"{begin + len(some)} of {len(left)} prompts answered", flush=True)
    order = {prompt.id: place for place, prompt in enumerate(suite.prompts)}
    return sorted(found, key=lambda answer: (order[answer.prompt], len(answer.start)))


Counted = list[dict[str, Any]]
"""For each answer: its prompt, category, number of tokens, and for each K the verify steps and what they accept."""


def measure_head(target: Path, folder: Path, answers: Sequence[Answer], every: Sequence[int]) -> Counted:
    """Count the drafts of a head, the target's states over each answer computed once for each K."""
    config, model, checkpoint = read_target_config(target), load_target(target, torch.float32), open_checkpoint(target)
    head = load_head(read_head(open_checkpoint(folder)), checkpoint, config)
    found = []
    for answer in answers:
        states = run_target(model, answer.batch(max(every)).tokens, head.spec.captured)

        def cut(batch: Batch, states: States = states) -> States:
            length = batch.tokens.shape[1]
            return States(*(part[:, :length] for part in (states.captured, states.hidden, states.logits)))

        def count(k: int, answer: Answer = answer, cut: Callable[[Batch], States] = cut) -> list[int]:
            text = Text("greedy", (answer.batch(k),))
            [one] = measure_states(text, cut, k, {"head": head_drafter(head, k)}).acceptance
            return [one.drafts, *(round(rate * one.drafts) for rate in one.rates)]

        found.append(_row(answer, every, count))
    return found


def measure_lookup(answers: Sequence[Answer], every: Sequence[int]) -> Counted:
    """Count the drafts of prompt lookup."""
    return [_row(a, every, lambda k, a=a: _drafted(a, lookup_drafts(a.batch(k).tokens, k), k)) for a in answers]


def measure_bigram(target: Path, data: Path, answers: Sequence[Answer], every: Sequence[int]) -> Counted:
    """Count the drafts of a table of the pairs of tokens in dialogues."""
    tokenizer, config = load_tokenizer(target), read_target_config(target)
    table = count_bigrams(_texts(data, tokenizer), config.vocab)
    return [_row(a, every, lambda k, a=a: _drafted(a, bigram_drafts(table, a.batch(k).tokens, k), k)) for a in answers]


def _texts(data: Path, tokenizer: Any) -> Iterator[Tensor]:
    return (sample.ids for where, row in read_rows(str(data)) for sample in encode_row(row, tokenizer, where))


def _drafted(answer: Answer, drafted: Tensor, k: int) -> list[int]:
    found: Acceptance = greedy_acceptance(drafted[:, 0], answer.batch(k).tokens[0], len(answer.start))
    return [int(found.drafts), *map(int, found.accepted)]


def _row(answer: Answer, every: Sequence[int], count: Callable[[int], list[int]]) -> dict[str, Any]:
    """Return an answer's counts; one of a single token takes no verify step."""
    row: dict[str, Any] = {"prompt": answer.prompt, "category": answer.category, "tokens": answer.length}
    return row | {f"k{k}": count(k) for k in every if answer.length > 1}
