"""Calls of kconv train."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kconv.checkpoint.folder import read_json
from kconv.targets.tokenizer import Tokenizer, load_tokenizer
from kconv.tiny.target import BOS, EOS
from kconv.tiny.text import read_corpus

from .machine import KCONV, Spent, clock

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-eagle3-mla.yaml"
CAPTURED = (1, 3, 5)
TOKENS = 96  # of each row trained on, and of each text measured on
MEASURED = 48  # held-out documents, as many as the demo drafts on; the evaluations during training are on others
ROWS = 440  # texts of one row
TOGETHER = 24  # documents in a line of the training text, which are read as the target read them: end to end
SHORT: dict[str, Any] = {
    "batches": 60, "steps": 120, "batch": 4, "seq": TOKENS, "captured": CAPTURED,
    "optimizer": "muon", "lr": 0.07, "rest_lr": 3e-3, "warmup": 6, "compute": None,
}  # fmt: skip
LOWER = {"lr": 0.02, "rest_lr": 1e-3}  # for a head that has learnt
GQA = {"attention": {"heads": 4, "kv_heads": 2, "head_dim": 32}, "rope": {"theta": 1e4}}


@dataclass(frozen=True)
class Run:
    """One call of kconv train.

    Attributes:
        name: of its folder.
        recipe: one that kconv brings, or a YAML file.
        more: keys that are set otherwise.
        against: the rows that its acceptance is compared with.
        texts: the file that it trains on, where it reads no states.
        states: whether it reads stored states.
        start: the row that it goes on from.
    """

    name: str
    recipe: str
    more: dict[str, Any]
    against: tuple[str, ...]
    texts: str = "rows.jsonl"
    states: bool = False
    start: str = ""

    @property
    def folder(self) -> str:
        """Its name in the working folder."""
        return self.name.replace(" ", "-")


def list_runs() -> Iterator[Run]:
    """Yield the best recipes, and short runs of every kind."""
    for kind, attention in (("mla", {}), ("gqa", {"decoder": "gqa"} | GQA)):
        against = (f"demo {kind}", "bigram", "prompt lookup")
        yield Run(kind, str(EXAMPLE), attention, against, texts="texts.jsonl")
    for kind, attention in (("mla", {}), ("gqa", GQA)):
        recipe, short = f"eagle3-{kind}", f"short {kind}"
        for name, more in ((short, {}), (f"{short} reduced", {"draft_vocab": 256})):
            yield Run(name, recipe, SHORT | attention | more, ("bigram",))
            yield Run(f"{name} offline", recipe, SHORT | attention | more, (name,), states=True)
        yield Run(f"{short} seed 1", recipe, SHORT | attention | {"seed": 1}, (short,))
        yield Run(f"{short} continued", recipe, SHORT | attention | LOWER, (short,), start=short)


def write_texts(target: Path, work: Path) -> None:
    """Write what is trained on and looked at, where it is not there yet: all documents, and some of one row each."""
    if (work / "eval.jsonl").exists():
        return
    tokenizer, corpus = load_tokenizer(target), read_corpus()
    groups = (corpus.train[begin : begin + TOGETHER] for begin in range(0, len(corpus.train), TOGETHER))
    _write(work / "texts.jsonl", ("".join(f"{BOS}{text}{EOS}" for text in group) for group in groups))
    _write(work / "rows.jsonl", itertools.islice(_one_row_each(corpus.train, tokenizer), ROWS))
    measured = set(measured_texts(tokenizer))
    _write(work / "eval.jsonl", (text for text in corpus.held_out if text not in measured))


def _one_row_each(documents: tuple[str, ...], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield beginnings of documents that are exactly one row, so that a stored sequence and a row are the same."""
    for text in documents:
        begins = tokenizer.encode(text)[:TOKENS]
        whole = tokenizer.decode(begins)
        if len(begins) == TOKENS and tokenizer.encode(whole) == begins:
            yield whole


def _write(file: Path, texts: Iterator[str]) -> None:
    file.write_text("".join(json.dumps({"text": text, "prompt": text}) + "\n" for text in texts))


def measured_texts(tokenizer: Tokenizer) -> list[str]:
    """Return the documents that the demo drafts on: the first held-out ones that are long enough."""
    return [text for text in read_corpus().held_out if len(tokenizer.encode(text)) >= TOKENS][:MEASURED]


def train(run: Run, target: Path, work: Path) -> Spent:
    """Make a head, unless it is there, and return what that took, the parts of a run that was stopped included."""
    out, kept = work / run.folder, work / f"{run.folder}.spent.json"
    before = Spent(**read_json(kept)) if kept.exists() else Spent(0, 0)
    if out.exists():
        return before
    words = ["train", target, out, "--recipe", run.recipe, "--eval-every", "400"]
    for key, value in run.more.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    if run.states:
        words += ["--states", store_states(target, work)]
    else:
        words += ["--data", work / run.texts, "--held-out", work / "eval.jsonl"]
    words += ["--from", work / run.start.replace(" ", "-")] if run.start else []
    begin = clock()
    try:
        subprocess.run([KCONV, *map(str, words)], check=True)
    finally:
        spent = clock() - begin + before
        kept.write_text(json.dumps(asdict(spent)))
    return spent


def store_states(target: Path, work: Path) -> Path:
    """Store the states of the one-row texts, unless they are there."""
    out = work / "states"
    if not out.exists():
        captured = ",".join(map(str, CAPTURED))
        words = ["states", target, out, "--prompts", work / "rows.jsonl", "--captured", captured]
        subprocess.run([KCONV, *map(str, words), "--text-tokens", str(TOKENS)], check=True)
    return out
