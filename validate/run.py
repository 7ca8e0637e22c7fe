"""One validation from end to end. What belongs here: which checks run for what the user gave, and the report."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from ..checkpoint.bytes import file_digest
from ..checkpoint.folder import open_checkpoint
from ..convert.read import Head
from ..target.config import read_target_config
from ..target.model import load_target
from ..target.prompts import Prompt, read_prompts
from ..target.tokenizer import load_tokenizer
from .measure import Drafter, Measured, head_drafter, measure
from .report import Figures, Finding, Report
from .structure import check_source, check_values, is_identical
from .texts import make_texts
from .weights import load_head

Say = Callable[[str], None]


@dataclass(frozen=True)
class Parity:
    """How parity is measured.

    Attributes:
        target: the target's folder.
        prompts: a JSONL of held-out prompts.
        steps: K, drafted tokens per verify step.
        prompt_tokens: prompts are cut to this before they are continued.
        new_tokens: length of the continuations.
        seed: of the sampled continuations.
    """

    target: Path
    prompts: Path
    steps: int = 3
    prompt_tokens: int = 32
    new_tokens: int = 64
    seed: int = 0


def validate(output: Head, *, source: Head | None = None, parity: Parity | None = None, say: Say = print) -> Report:
    """Check a head, against its source and a target where they are given.

    Args:
        output: the head; reading it has held its names, shapes and config already.
        source: what it was converted from.
        parity: how to measure logits and acceptance; nothing is measured if None.
        say: told what is going on.

    Returns:
        The report. Faults of the head are findings in it; faults of what the user gave are raised.
    """
    say("reading every weight")
    findings: list[Finding] = check_values(output)
    identical = None
    if source is not None:
        say("comparing with the source, bit by bit")
        held = check_source(output, source)
        identical = is_identical(output, held)
        findings += held
    measured: list[Measured] = []
    provenance: dict[str, object] = {"source": source.checkpoint.source if source else None}
    if parity is not None:
        measured = _measure(output, source, parity, say)
        provenance |= _provenance(parity)
    return make_report(output, findings, figures(identical, measured), provenance)


def make_report(head: Head, findings: Sequence[Finding], figures: Figures, provenance: Mapping[str, object]) -> Report:
    """Return the report on a head: findings worst first, and the digests of the weights they are about."""
    worst_first = sorted(findings, key=lambda finding: ("error", "warning", "info").index(finding.severity))
    stamp = {"kconv": version("kconv"), "date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__}
    return Report(
        subject=head.checkpoint.source,
        weights={file.name: file_digest(file) for file in head.checkpoint.files},
        findings=tuple(worst_first),
        figures=figures,
        provenance=stamp | dict(provenance),
    )


def figures(identical: bool | None, measured: Sequence[Measured]) -> Figures:
    """Put what was measured on each text into the report's shape."""
    return Figures(
        identical=identical,
        texts=tuple(m.text for m in measured),
        acceptance=tuple(row for m in measured for row in m.acceptance),
        parity=tuple(m.parity for m in measured if m.parity),
    )


def encode_prompts(prompts: Sequence[Prompt], target: Path, limit: int) -> list[list[int]]:
    """Return the token ids of each prompt's first turn, as plain text, cut to `limit` tokens."""
    tokenizer = load_tokenizer(target)
    return [tokenizer.encode(prompt.turns[0])[:limit] for prompt in prompts]


def _measure(output: Head, source: Head | None, parity: Parity, say: Say) -> list[Measured]:
    say("loading the target")
    checkpoint, config = open_checkpoint(parity.target), read_target_config(parity.target)
    drafters: dict[str, Drafter] = {}
    for name, head in (("source", source), ("output", output)):
        if head is not None:
            drafters[name] = head_drafter(load_head(head, checkpoint, config), parity.steps)
    model = load_target(parity.target, torch.float32)
    ids = encode_prompts(read_prompts(parity.prompts), parity.target, parity.prompt_tokens + parity.new_tokens)
    say("continuing the prompts")
    texts = make_texts(
        model,
        [prompt for prompt in ids if prompt],
        prompt_tokens=parity.prompt_tokens,
        new_tokens=parity.new_tokens,
        steps=parity.steps,
        seed=parity.seed,
    )
    measured = []
    for text in texts:
        say(f"measuring on {text.kind} text")
        pair = ("source", "output") if source is not None else None
        measured.append(measure(text, model, output.spec.captured, parity.steps, drafters, compare=pair))
    return measured


def _provenance(parity: Parity) -> dict[str, object]:
    return {
        "target": str(parity.target),
        "prompts": {
            "file": parity.prompts.name,
            "sha256": hashlib.sha256(parity.prompts.read_bytes()).hexdigest(),
            "prompt_tokens": parity.prompt_tokens,
            "new_tokens": parity.new_tokens,
        },
        "seed": parity.seed,
        "temperature": {"sampled": 1.0, "held-out": 1.0, "greedy": 0.0},
        "dtype": "float32",
    }
