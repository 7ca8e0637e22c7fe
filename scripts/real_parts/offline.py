"""Drafts of greedy answers without a server: by heads, a bigram table and prompt lookup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.read import read_head
from kconv.head.drafters import count_bigrams
from kconv.targets.config import read_target_config
from kconv.targets.dialogues import encode_row, read_rows
from kconv.targets.forward import generate_greedy
from kconv.targets.model import load_target
from kconv.targets.suites import Suite
from kconv.targets.tokenizer import load_tokenizer
from kconv.validate.measure import Drafter, head_drafter, measure
from kconv.validate.parity import load_head
from kconv.validate.texts import Batch, Text


def measure_offline(
    target: Path, heads: Mapping[str, Path], suite: Suite, every: Sequence[int], max_tokens: int, data: Path
) -> list[dict[str, Any]]:
    """Return, for each answer and K, the verify steps of each drafter and what they accept at each place.

    The target answers a little beyond an answer's end, as the last drafts of an engine look there too, so these are an
    engine's own counts (see `kconv.bench.offline`).

    Args:
        target: its folder.
        heads: by name.
        suite: what is asked.
        every: each K.
        max_tokens: an answer's limit.
        data: dialogues, whose pairs of tokens the bigram table counts.
    """
    tokenizer, config = load_tokenizer(target), read_target_config(target)
    model, checkpoint = load_target(target, torch.float32), open_checkpoint(target)
    samples = (sample for where, row in read_rows(str(data)) for sample in encode_row(row, tokenizer, where))
    bigram = count_bigrams((sample.ids for sample in samples), config.vocab)
    loaded = {name: load_head(read_head(open_checkpoint(folder)), checkpoint, config) for name, folder in heads.items()}
    captured = next(iter(loaded.values())).spec.captured
    found = []
    for prompt in suite.prompts:
        turns: list[str] = []
        for turn in prompt.turns:
            turns.append(turn)
            start = tokenizer.encode_chat(turns)
            [tokens] = generate_greedy(model, [start], max_tokens + max(every) - 1)
            length = next((i + 1 for i, token in enumerate(tokens[:max_tokens]) if token in config.eos), max_tokens)
            turns.append(str(tokenizer.inner.decode(tokens[:length], skip_special_tokens=True)))
            row: dict[str, Any] = {"prompt": prompt.id, "category": prompt.category, "tokens": length}
            for k in every if length > 1 else ():
                batch = Batch(torch.tensor([start + tokens[: length + k - 1]]), len(start))
                drafters: dict[str, Drafter] = {name: head_drafter(head, k) for name, head in loaded.items()}
                measured = measure(Text("greedy", (batch,)), model, captured, k, drafters, bigram=bigram)
                row[f"k{k}"] = {
                    one.drafter: [one.drafts, *(round(rate * one.drafts) for rate in one.rates)]
                    for one in measured.acceptance
                }
            found.append(row)
            print(f"{prompt.category} {prompt.id}: {length} tokens", flush=True)
    return found
