"""docs/evidence/real.md, of what scripts/real left in its folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kconv.bench.acceptance import AcceptanceFile, AcceptanceRow, read_acceptance
from kconv.bench.stats import Counts, add_up, interval
from kconv.checkpoint.bytes import digest
from kconv.checkpoint.folder import open_checkpoint, read_json
from kconv.targets.states import open_states

from .attention import ALIKE, CONVERSIONS, SERVED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "real.md"
NGRAM, LOOKUP, BIGRAM = "n-gram", "prompt lookup", "bigram"
CARDS = {"release": "smollm2-135m-instruct-eagle3", "release-nvfp4": "smollm2-135m-instruct-nvfp4"}
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
SHOWN = 3  # the K of the table by category


def write_page(work: Path, form: Any) -> None:
    """Write what a page says between its markers, and the release's card.

    Args:
        work: the folder of scripts/real.
        form: how much was done.
    """
    text = PAGE.read_text()
    for name, describe in PARTS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, begun, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not (begun and ended):
            raise SystemExit(f"error: {PAGE} has no {begin} with {end} behind it")
        text = "\n".join([before + begin, "", *describe(Found.read(work, form)), "", end + after])
    PAGE.write_text(text)
    for release, card in CARDS.items():
        out = PAGE.parents[1] / "cards" / card
        out.mkdir(exist_ok=True)
        for name in ("README.md", "acceptance.png", "LICENSE", "NOTICE"):
            if (work / release / name).exists():
                shutil.copy(work / release / name, out)


def summarize(work: Path, form: Any) -> str:
    """Return what a whole run found, and where its card lies."""
    found = Found.read(work, form)
    lines = ["", *describe_lengths(found), "", *describe_nvfp4(found)]
    return "\n".join([*lines, "", f"the card: {work / 'release' / 'README.md'}"])


@dataclass(frozen=True)
class Found:
    """What scripts/real left.

    Attributes:
        work: its folder.
        form: how much was done.
        offline: by drafter, what was counted on each answer.
        served: by engine, drafter and K.
    """

    work: Path
    form: Any
    offline: Mapping[str, Any]
    served: Mapping[tuple[str, str, int], AcceptanceFile]

    @classmethod
    def read(cls, work: Path, form: Any) -> Found:
        """Read the folder; what was not measured is left out."""
        names = (*form.trained, SERVED, NGRAM, LOOKUP, BIGRAM)
        served = {
            (engine, name, k): read_acceptance(file)
            for engine in ENGINES
            for name in names
            for k in form.draft_tokens
            if (file := work / f"{engine}-{name}-k{k}.json").exists()
        }
        files = {name: work / f"offline-{name}.json" for name in names}
        offline = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
        return cls(work, form, offline, served)

    def of_prompts(self, name: str, prompts: Collection[str] | None = None) -> list[Mapping[str, Any]]:
        """Return what was counted offline for a drafter, on some prompts or on all."""
        return [row for row in self.offline[name] if prompts is None or row["prompt"] in prompts]

    @property
    def both(self) -> set[str]:
        """The prompts that engines were asked too: the first of each category."""
        rows = self.offline[LOOKUP]
        by_category: dict[str, dict[str, None]] = {}
        for row in rows:
            by_category.setdefault(row["category"], {})[row["prompt"]] = None
        return {prompt for own in by_category.values() for prompt in list(own)[: self.form.served]}


def describe_heads(found: Found) -> list[str]:
    """Return how the heads were trained."""
    sequences = open_states(found.work / "states").sequences
    lines = [
        f"{len(sequences):,} dialogues.",
        "",
        "| head | parameters | draft vocabulary | covers | tokens | steps (draft steps) | acceptance |",
        "|---|---|---|---|---|---|---|",
    ]
    form = found.form
    for name in form.trained:
        if (found.work / name).exists():
            first = form.heads[0] if name == form.released else name
            folders = [found.work / own for own in dict.fromkeys((f"{first}-begun", first, name))]
            reports = [folder / "modelopt" / "training.json" for folder in folders if folder.exists()]
            lines.append(_head(name, [read_json(report) for report in reports]))
    return lines


def describe_lengths(found: Found) -> list[str]:
    """Return each drafter's length, by K, and where engines count as kconv does."""
    every, rows = found.form.draft_tokens, found.offline[LOOKUP]
    some = len(found.both)
    lines = [
        f"{len({row['prompt'] for row in rows})} prompts, {len(rows)} answers, {sum(r['tokens'] for r in rows):,} "
        f"tokens; the engines answered {some} of the prompts.",
        "",
        f"| drafter | measured by | prompts | {' | '.join(f'K = {k}' for k in every)} |",
        f"|---|---|---|{'|'.join('---' for _ in every)}|",
    ]
    for name in found.offline:
        cells = [_length(list(counts_of(found.of_prompts(name), k).values())) for k in every]
        lines.append(f"| {name} | kconv | {len({row['prompt'] for row in rows})} | {' | '.join(cells)} |")
    for engine, name in dict.fromkeys((engine, name) for engine, name, _ in found.served):
        files = [found.served.get((engine, name, k)) for k in every]
        version = next(row_of(file).engine_version for file in files if file)
        cells = [_cell(row_of(file)) if file else "" for file in files]
        lines.append(f"| {name} | {ENGINES[engine]} {version} | {some} | {' | '.join(cells)} |")
        if name == NGRAM:
            cells = [f"{over_all_steps(found, file):.3f}" if file else "" for file in files]
            lines.append(f"| {name}, over all steps | {ENGINES[engine]} {version} | {some} | {' | '.join(cells)} |")
    return [*lines, "", equal(found)]


def over_all_steps(found: Found, file: AcceptanceFile) -> float:
    """Return the tokens per step, those steps included in which nothing was drafted, which vLLM does not count.

    The answers are those that kconv has of the same prompts: each token but an answer's first is a step's own or was
    accepted. What a last draft accepts beyond an answer's end is among the accepted, so this is a little high.
    """
    row, answers = row_of(file), found.of_prompts(LOOKUP, found.both)
    accepted = sum(row.rates or ()) * (row.drafts or 0)
    tokens = sum(answer["tokens"] - 1 for answer in answers)
    return tokens / (tokens - accepted)


def describe_categories(found: Found) -> list[str]:
    """Return the lengths by category, drafter and K."""
    drafters = [name for name in (found.form.released, LOOKUP, BIGRAM) if name in found.offline]
    columns = [(name, k) for name in drafters for k in found.form.draft_tokens]
    lines = [
        "Counted by kconv:",
        "",
        f"| category | {' | '.join(f'{name}, K = {k}' for name, k in columns)} |",
        f"|---|{'|'.join('---' for _ in columns)}|",
    ]
    for category in dict.fromkeys(row["category"] for row in found.offline[LOOKUP]):
        own = {name: [row for row in rows if row["category"] == category] for name, rows in found.offline.items()}
        cells = [_length(list(counts_of(own[name], k).values())) for name, k in columns]
        lines.append(f"| {category} | {' | '.join(cells)} |")
    return lines


def _shown(found: Found) -> int:
    return SHOWN if SHOWN in found.form.draft_tokens else found.form.draft_tokens[0]


def describe_attention(found: Found) -> list[str]:
    """Return what heads with the other attention keep, by healing steps."""
    files = {name: found.work / "attention" / f"{name}.json" for name in (*CONVERSIONS, ALIKE)}
    figures = {name: read_json(file) for name, file in files.items() if file.exists()}
    if not figures:
        return ["Not measured yet: `scripts/real --only attention --markdown`."]
    steps = sorted({int(count) for row in figures.values() for count in row})
    one = next(iter(next(iter(figures.values())).values()))
    lines = [
        f"{one['positions']:,} positions of {one['sequences']} held-out dialogues, {one['context']} tokens each, "
        f"K = {one['steps']}, sampled.",
        "",
        f"| conversion | original | {' | '.join(f'{count:,} steps' for count in steps)} | greedy, in the end |",
        f"|---|---|{'|'.join('---' for _ in steps)}|---|",
    ]
    for name, says in SAYS.items():
        if row := figures.get(name):
            last = row[str(max(map(int, row)))]
            cells = [_share(row[str(count)]) if str(count) in row else "" for count in steps]
            lines.append(f"| {says} | {last['before']:.3f} | {' | '.join(cells)} | {_share(last, 'greedy_')} |")
    return lines


SAYS = {name: conversion.says for name, conversion in CONVERSIONS.items()}
SAYS[ALIKE] = "MHA itself, by the same steps"


def _share(figures: Mapping[str, Any], kind: str = "") -> str:
    return f"{100 * figures[f'{kind}kept']:.1f} ± {100 * figures[f'{kind}kept_error']:.1f}"


def describe_nvfp4(found: Found) -> list[str]:
    """Return what NVFP4 loses, and whether both backends wrote the same bits."""
    ours, theirs = (_bytes(found.work / name) for name in ("nvfp4", "nvfp4-modelopt"))
    apart = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    figures = read_json(found.work / "nvfp4-report" / "report.json")["figures"]
    noise, text = figures["noise"], figures["perplexity"]
    return [
        f"- Tensors that differ from ModelOpt's own export: {len(apart)} of {len(ours)}.",
        f"- Signal to noise of {noise['tensors']} matrices: median {noise['median']:.1f} dB, "
        f"worst {noise['worst']:.1f} dB.",
        f"- Perplexity on {text['prompts']} prompts, {text['tokens']:,} tokens: {text['source']:.2f} of the target, "
        f"{text['output']:.2f} of its NVFP4; the likeliest token is the same at {text['top1']:.1%} of them.",
        *_kept_on_nvfp4(found),
    ]


def _kept_on_nvfp4(found: Found) -> list[str]:
    """Return what the released head drafts of the quantized target's answers, and of the target's own."""
    name, k = found.form.released, _shown(found)
    if not (file := found.work / f"nvfp4-{name}.json").exists() or name not in found.offline:
        return []
    lengths = [
        _length(list(counts_of(rows, k).values()))
        for rows in (json.loads(file.read_text()), found.of_prompts(name, found.both))
    ]
    return [
        f"- Tokens per step of the head `{name}` at K = {k} on {len(found.both)} prompts, greedy, counted by kconv: "
        f"{lengths[0]} on the answers of the NVFP4 target (weights dequantized), {lengths[1]} on those of the target."
    ]


def _bytes(folder: Path) -> dict[str, str]:
    return {name: digest(info) for name, info in open_checkpoint(folder).tensors.items()}


def describe_speed(found: Found) -> list[str]:
    """Return the speeds; they mean nothing of a machine that is busy otherwise, so no other stage measures them."""
    if not (file := found.work / "speed.json").exists():
        return ["Not measured yet: `scripts/real --only speed --markdown` on a machine that does nothing else."]
    lines = [
        "| drafter | K | prompts side by side | with | without | ratio | same answers |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in read_json(file)["rows"]:
        lines.append(
            f"| {one['drafter']} | {one['draft_tokens']} | {one['concurrency']} | {one['tokens_per_second']:.1f} | "
            f"{one['baseline_tokens_per_second']:.1f} | {one['speedup']:.2f} | {one['same_answers']:.0%} |"
        )
    return lines


PARTS: dict[str, Callable[[Found], list[str]]] = {
    "heads": describe_heads, "lengths": describe_lengths, "categories": describe_categories,
    "attention": describe_attention, "nvfp4": describe_nvfp4, "speed": describe_speed,
}  # fmt: skip


def _head(name: str, reports: Sequence[Mapping[str, Any]]) -> str:
    report, recipes = reports[-1], [report["recipe"] for report in reports]
    # A head that drafts every token has no draft vocabulary.
    size = f"{report['recipe']['draft_vocab']:,}" if report["draft_vocab"] else "all"
    share = report["draft_vocab"]["share"] if report["draft_vocab"] else 1.0
    before, after = report["untrained"], report["trained"]
    trained = ", then ".join(
        f"{r['steps']:,} ({r['ttt_steps']}{', LK loss' if r.get('lk_loss') else ''})" for r in recipes
    )
    return (
        f"| {name} | {report['parameters']:,} | {size} | {share:.1%} | "
        f"{report['tokens']['counted']:,} | {trained} | "
        f"{before['acceptance']:.3f} to {after['acceptance']:.3f} |"
    )


def counts_of(rows: Iterable[Mapping[str, Any]], k: int) -> dict[str, Counts]:
    """Return what was counted, by prompt."""
    found: dict[str, list[Counts]] = {}
    for row in rows:
        if one := row.get(f"k{k}"):
            found.setdefault(row["prompt"], []).append(Counts(one[0], sum(one[1:]), tuple(one[1:])))
    pooled = {prompt: add_up(parts) for prompt, parts in found.items()}
    return {prompt: Counts(c.drafts, c.accepted, c.per_position) for prompt, c in pooled.items()}


def _length(counts: Sequence[Counts]) -> str:
    mean = 1 + sum(c.accepted for c in counts) / sum(c.drafts for c in counts)
    about = interval(counts, "micro_steps")
    return f"{mean:.3f}" + (f" ({about.low:.2f}–{about.high:.2f})" if about else "")


def row_of(file: AcceptanceFile, category: str = "") -> AcceptanceRow:
    """Return the figure over verify steps of a category, or of all."""
    return next(row for row in file.rows if row.category == category and row.averaging == "micro_steps")


def _cell(row: AcceptanceRow) -> str:
    about = f" ({row.interval.low:.2f}–{row.interval.high:.2f})" if row.interval else ""
    return f"{row.value:.3f}{about}"


def equal(found: Found) -> str:
    """Say where an engine's counts are those of kconv's chain: drafts, and drafts accepted up to each place."""
    apart, compared = [], 0
    for (engine, name, k), file in found.served.items():
        if name not in found.offline:
            continue
        compared += 1
        for row in file.rows:
            if row.averaging != "micro_steps":
                continue
            asked = [own for own in found.of_prompts(name, found.both) if row.category in ("", own["category"])]
            own = list(counts_of(asked, k).values())
            drafts = sum(c.drafts for c in own)
            places = [sum(c.per_position[place] for c in own if c.per_position) for place in range(k)]
            theirs = [round(rate * (row.drafts or 0)) for rate in row.rates or ()]
            if (drafts, places) != (row.drafts, theirs):
                apart.append(
                    f"{ENGINES[engine]}, {name} at K = {k}, {row.category or 'all'}: {row.drafts:g} steps and "
                    f"{theirs}, and here {drafts} and {places}"
                )
    if not compared:
        return "No engine has served the head on these prompts yet."
    if apart:
        return f"In {compared} runs, {len(apart)} counts are not those of kconv's chain: {'; '.join(apart)}."
    return (
        f"In each run of a head ({compared}) the engine's counts, in each category and at each place, are kconv's "
        "chain's to the last token."
    )
