"""InferenceX's golden curves: acceptance lengths by thinking mode and K, as YAML.

Its referees require such a curve, and measure it as kconv does: 1 + accepted drafts / verify steps over a category of
SPEED-Bench, to two decimals.
https://github.com/SemiAnalysisAI/InferenceX/blob/0c66e113c6397a3f413cccc5f30fc7f6761de1a8/golden_al_distribution/README.md
The conditions of a curve are in its comments, in the form of its collectors. The reader there accepts only one model
per file, so kconv writes one key; a draft's name in `_metadata`, which some curves have, is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from .. import escape
from ..checkpoint.schema import parse_yaml
from ..engines.registry import engines
from ..errors import AcceptanceInvalid, DefinitionsMixed
from .acceptance import LINE, METHOD, AcceptanceFile, AcceptanceRow, suite_name

SPEED_BENCH, CODING = "SPEED-Bench", "coding"
MODES = {"on": "thinking_on", "off": "thinking_off", "thinking_on": "thinking_on", "thinking_off": "thinking_off"}
METADATA = "_metadata"
# What must be equal in all of a curve, and what in each thinking mode.
CURVE = (*LINE, "engine", "engine_version", "target", "precision", "tree", "averaging", "metric", "measured_by",
         "draft_sample_method", "rejection_sample_method")  # fmt: skip
MODE = tuple(dict.fromkeys((*CURVE, *(name for name in METHOD if name != "draft_tokens"))))
# Comments of the collectors, e.g. https://github.com/SemiAnalysisAI/InferenceX/blob/ce4e6f073750328525786d1e799f86c3745abf90/golden_al_distribution/minimaxm3_eagle3_gqa.yaml
SOURCE = re.compile(r"^# Source [^:]*: (https?://\S+)", re.M)
SUITE = re.compile(r"^# .*measured with SPEED-Bench\.", re.M)
CATEGORY = re.compile(r"^# dataset: ([\w-]+)", re.M)
LIMIT = re.compile(r"^# .*output_len: (\d+)", re.M)
TEMPERATURE = r"(?:temperature[:=]|temp) ?(\d+(?:\.\d+)?)"
DRAFT = re.compile(r"(?:^# Draft model: |, draft: )([\w./-]+)", re.M)
MEASURED_ON = r"^# Measured on [^\n(]*\([^\n)]*\b({titles})\b"
# By how much a length may fall with K by chance.
FALL = 0.05
METHODS = ("draft_sample_method", "rejection_sample_method")


def write_curve(files: Mapping[str, AcceptanceFile], category: str | None = None, model: str | None = None) -> str:
    """Return the golden curve of measured figures.

    Args:
        files: by name, about one head, e.g. one with thinking on and one with it off; each row states K and its mode
            (`reasoning`).
        category: of the dataset; if None, "coding" for SPEED-Bench, and everything for another one.
        model: the key of the curve; if None, the target's name without its owner, in lower case.

    Raises:
        AcceptanceInvalid: there is no such figure, two have the same K and mode, one states no mode, or a larger K has
            clearly less.
        DefinitionsMixed: the figures were measured differently, or not with a chain.
    """
    first, *others = files.values()
    for file in others:
        if (file.head, file.weights, file.config) != (first.head, first.weights, first.config):
            raise DefinitionsMixed(
                f"{first.head} and {file.head} are two heads, or one with other weights or another config",
                fix="Write a curve for each head.",
            )
    rows = [(name, row) for name, file in files.items() for row in file.rows if _of_category(row, category)]
    if not rows:
        said = f"of category {category!r}" if category is not None else "of SPEED-Bench's coding, or of all of a suite"
        raise AcceptanceInvalid(
            f"there is no mean over verify steps {said}", where=first.head, fix="Pass --category, or measure it."
        )
    modes: dict[str, dict[int, AcceptanceRow]] = {}
    some = rows[0][1]
    for name, row in rows:
        mode = MODES.get(row.reasoning or "")
        if mode is None:
            raise AcceptanceInvalid(
                f"the figure for K = {row.draft_tokens} has reasoning {row.reasoning or 'unstated'}, but a curve needs "
                "thinking on or off",
                where=name,
                fix="Measure with --reasoning on or --reasoning off; for a target without such modes, off.",
            )
        own = modes.setdefault(mode, {})
        _refuse_apart(some, row, CURVE)
        if own:
            _refuse_apart(next(iter(own.values())), row, MODE)
        if row.draft_tokens in own or row.draft_tokens is None:
            raise AcceptanceInvalid(
                f"two figures have mode {mode} and K = {row.draft_tokens}", where=name, fix="Remove one."
            )
        own[row.draft_tokens] = row
    for mode, own in modes.items():
        for less, more in pairwise(sorted(own)):
            if own[more].value < (1 - FALL) * own[less].value:
                raise AcceptanceInvalid(
                    f"{mode}: the acceptance length falls from {own[less].value:.2f} at K = {less} to"
                    f" {own[more].value:.2f} at K = {more}, but a longer chain accepts no fewer drafts",
                    where=first.head,
                    fix="Check which file is of which K, and measure the wrong one again.",
                )
    if some.tree != "chain":
        raise DefinitionsMixed(
            f"the figures are {f'of the tree {some.tree!r}' if some.tree else 'not said to be of a chain'}",
            where=first.head,
            fix="A golden curve is of chains: measure without --tree, or quote with --tree chain.",
        )  # fmt: skip
    key = (model or (some.target or "").rstrip("/").rpartition("/")[2]).lower()
    lines = [f"# {escape.terminal(line)}".replace("\n", " ") for line in _heading(first, some, modes)]
    lines += ["#", "# key = num_speculative_tokens; value = golden AL", f"{escape.yaml(key)}:"]
    for mode in sorted(modes, reverse=True):
        lines += [f"  {mode}:", *(f"    {k}: {modes[mode][k].value:.2f}" for k in sorted(modes[mode]))]
    return "\n".join(lines) + "\n"


def _of_category(row: AcceptanceRow, category: str | None) -> bool:
    wanted = category if category is not None else CODING if suite_name(row.dataset) == SPEED_BENCH else ""
    return (row.metric, row.averaging, row.category) == ("al_incl_bonus", "micro_steps", wanted)


def _refuse_apart(one: AcceptanceRow, other: AcceptanceRow, names: Sequence[str]) -> None:
    if apart := [name for name in names if one[name] != other[name]]:
        told = "; ".join(f"{name} {one[name]} and {other[name]}" for name in apart)
        raise DefinitionsMixed(
            f"K = {one.draft_tokens} and K = {other.draft_tokens} were measured differently: {told}",
            fix="Measure all K of a mode with the same options.",
        )


def _heading(file: AcceptanceFile, some: AcceptanceRow, modes: Mapping[str, Mapping[int, AcceptanceRow]]) -> list[str]:
    dataset, engine = suite_name(some.dataset), " ".join(filter(None, (some.engine, some.engine_version)))
    methods = " | ".join(f"{name}={some[name]}" for name in METHODS if some[name])
    title = next((one.title for one in engines() if one.name == some.engine), "")
    return [
        f"Acceptance Length (AL) reference values measured with {dataset}.",
        f"dataset: {some.category or 'all'} | prompts: {some.prompts} | revision: {some.revision}",
        *(
            f"{mode}: temperature={row.temperature:g} | output_len: {row.max_tokens} | date: {row.date}"
            for mode, own in modes.items()
            for row in (next(iter(own.values())),)
        ),
        *([f"speculative-config: {methods}"] if methods else []),
        f"Draft model: {file.head}",
        *(f"Draft weights: {name} sha256 {digest}" for name, digest in file.weights.items()),
        f"Measured on {some.target} ({title or some.engine}), per num_speculative_tokens; {engine}"
        + (f"; target in {some.precision}" if some.precision else ""),
        f"AL = 1 + accepted drafts / verify steps, by kconv bench {file.kconv or ''}".rstrip(),
        *([] if (dataset, some.category) == (SPEED_BENCH, CODING) else
          ["No golden value: those are of SPEED-Bench, coding."]),
    ]  # fmt: skip


def read_curve(text: str, where: object) -> tuple[str | None, str | None, list[dict[str, Any]]]:
    """Read a golden curve.

    Returns:
        The draft's name and the source's address, None if the file does not state them; and for each figure the fields
        of an `AcceptanceRow` that it states.
    """
    fix = "Pass a YAML file from InferenceX's golden_al_distribution."
    values = parse_yaml(text, AcceptanceInvalid, where=where, what="golden curve", fix=fix)
    values = dict(values) if isinstance(values, dict) else {}
    metadata = values.pop(METADATA, None)
    curves = [(model, modes) for model, modes in values.items() if isinstance(modes, dict)]
    if len(curves) != 1 or len(values) != 1:
        raise AcceptanceInvalid("a golden curve is of one model, with modes below its name", where=where, fix=fix)
    [(model, modes)] = curves
    shared = {"metric": "al_incl_bonus", "averaging": "micro_steps", "decimals": 2, "target": str(model),
              "published_as": "golden AL"}  # fmt: skip
    if SUITE.search(text):
        shared["dataset"] = SPEED_BENCH
    for name, pattern in (("category", CATEGORY), ("max_tokens", LIMIT)):
        if found := pattern.search(text):
            shared[name] = int(found[1]) if name == "max_tokens" else found[1]
    named = {one.title: one.name for one in engines()}
    if found := re.search(MEASURED_ON.format(titles="|".join(map(re.escape, named))), text, re.M):
        shared["engine"] = named[found[1]]
    for name in METHODS:
        if found := re.search(rf"^# .*\b{name}=(\w+)", text, re.M):
            shared[name] = found[1]
    rows = []
    for mode, own in modes.items():
        if mode not in MODES.values() or not isinstance(own, dict):
            raise AcceptanceInvalid(f"{mode!r} is not a thinking mode of a curve", where=where, fix=fix)
        # A mode's own line, or the one for all.
        lines = (rf"^# {mode} ?:.*?{TEMPERATURE}", rf"^# dataset:.*?{TEMPERATURE}")
        said = next((found for line in lines if (found := re.search(line, text, re.M))), None)
        for k, value in own.items():
            if value == "N/A":  # a server that did not start with this K
                continue
            rows.append(shared | {"reasoning": mode.removeprefix("thinking_"), "draft_tokens": k, "value": value}
                        | ({"temperature": float(said[1])} if said else {}))  # fmt: skip
    draft = metadata.get("draft-model") if isinstance(metadata, dict) else None
    named = DRAFT.search(text)
    source = SOURCE.search(text)
    return draft or (named[1] if named else None), source[1] if source else None, rows
