"""Healing in other forms than kconv's.

A rate is that of the peak, relative to the size of each tensor. Texts, their order, what is healed and the schedule
are those of `convert.attention.heal`; but what it ends at is measured even where the start was nearer.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch.optim.lr_scheduler import LambdaLR

from kconv.convert.attention.heal import (
    ATTENTION,
    RATE,
    REST,
    _optimizers,
    _share,
    _size,
    descend,
    in_order,
    loss_by_piece,
    mean_loss,
    take_tokens,
)
from kconv.drafters.forward import DraftHead
from kconv.measure.batches import Calibration
from kconv.measure.compare import compare

from .attention_beds import open_bed
from .attention_rows import ROWS_OF_TABLE, cell, errors, percent, start_of
from .attention_store import load, save

BED, NAME = "bytes", "healing"
NEAR, FAR = "gqa-mla", "mha-1-32"
SLOTS = (*ATTENTION, *REST)
Descent = Callable[[DraftHead, DraftHead, Calibration, int, float], DraftHead]


def descend_by_adamw(
    original: DraftHead, start: DraftHead, calibration: Calibration, steps: int, rate: float
) -> DraftHead:
    """Heal by AdamW alone, in the matrices' own coordinates."""
    return _descend_plainly(original, start, calibration, steps, rate, lambda all_: _optimizers([], all_))


def descend_by_muon(
    original: DraftHead, start: DraftHead, calibration: Calibration, steps: int, rate: float
) -> DraftHead:
    """Heal by Muon, and gains by AdamW, in the matrices' own coordinates."""

    def make(groups: list[dict]) -> list[torch.optim.Optimizer]:
        matrices = [group for group in groups if group["params"][0].ndim == 2]
        return _optimizers(matrices, [group for group in groups if group["params"][0].ndim == 1])

    return _descend_plainly(original, start, calibration, steps, rate, make)


def descend_in_white(
    original: DraftHead, start: DraftHead, calibration: Calibration, steps: int, rate: float
) -> DraftHead:
    """Heal as kconv does, but at a given rate."""
    return descend(original, start, calibration, steps, SLOTS, rate)


def _descend_plainly(
    original: DraftHead,
    start: DraftHead,
    calibration: Calibration,
    steps: int,
    rate: float,
    make: Callable[[list[dict]], list[torch.optim.Optimizer]],
) -> DraftHead:
    trained = {name: w.detach().clone().requires_grad_() for name, w in start.weights.items() if name in SLOTS}
    student = DraftHead(start.spec, {**start.weights, **trained})
    optimizers = make([{"params": [weight], "lr": rate * _size(weight)} for weight in trained.values()])
    schedules = [LambdaLR(one, lambda step: _share(step, steps)) for one in optimizers]
    texts = in_order(calibration, torch.Generator().manual_seed(0))
    for _ in range(steps):
        batches = take_tokens(texts)
        for batch in batches:
            for part in loss_by_piece(original, student, calibration, batch):
                (part.total / len(batches)).backward()
        for one in (*optimizers, *schedules):
            one.step()
        for one in optimizers:
            one.zero_grad()
    return DraftHead(start.spec, {name: weight.detach() for name, weight in student.weights.items()})


@dataclass(frozen=True)
class Form:
    """A form of healing."""

    says: str
    descend: Descent


FORMS = {
    "adamw": Form("AdamW", descend_by_adamw),
    "muon": Form("Muon", descend_by_muon),
    "white": Form("Muon in white inputs", descend_in_white),
}
RATES = (0.001, 0.003, 0.01, 0.03)
# What 200 steps of kconv's own form come to is in the rows of the bed.
TRIALS = [
    *((start, form, 50, rate) for start in (FAR, NEAR) for form in FORMS for rate in RATES),
    *((FAR, form, 200, rate) for form in ("adamw", "muon") for rate in RATES),
]


def measure_healing(only: str, seconds: float) -> None:
    """Measure the trials whose names fit, until the time is over."""
    begun = time.monotonic()
    for start, form, steps, rate in TRIALS:
        name, found = key(start, form, steps, rate), load(NAME)
        if name in found or not fnmatchcase(name, only) or time.monotonic() - begun > seconds:
            continue
        bench, (original, converted) = open_bed(BED), start_of(BED, start)
        if start not in found:
            found[start] = {"distance": float(mean_loss(original, converted, bench.fitted).apart)}
        healed = FORMS[form].descend(original, converted, bench.fitted, steps, rate)
        figures = compare(original, healed, bench.fitted, bench.held_out)
        found[name] = dataclasses.asdict(figures)
        save(NAME, found)
        print(f"{name}: {percent(figures)}", flush=True)


def key(start: str, form: str, steps: int, rate: float) -> str:
    """Return the name of a trial in the store."""
    return f"{start} {form} {steps} {rate}"


def describe_healing() -> list[str]:
    """Return the trials as Markdown: the best of each form, and how each goes with the rate from either start."""
    found = load(NAME)
    if not all(start in found for start in (FAR, NEAR)):
        return ["Not measured yet: `scripts/bench attention --healing` takes half an hour."]
    rows, own = load(BED), {start: RATE * found[start]["distance"] ** 0.5 for start in (FAR, NEAR)}
    every = [one for one in found.values() if "kept" in one]
    # The trials are compared with the original as it was.
    kconv = [f"{100 * rows[FAR][str(steps)]['figures']['held-out']['gained']:.1f}" for steps in (50, 200)]
    lines = []
    for start in (FAR, NEAR):
        lines += [f"| *{ROWS_OF_TABLE[start].says}, {_unhealed(rows[start])} unhealed* |" + " |" * len(RATES)]
        lines += [
            f"| {form.says} | " + " | ".join(_at(found, start, name, 50, rate) for rate in RATES) + " |"
            for name, form in FORMS.items()
        ]
    return [
        f'Kept acceptance in %, on the "{BED}" bed, after 50 steps at each rate; {errors(every)}:',
        "",
        "| healing | " + " | ".join(f"rate {rate}" for rate in RATES) + " |",
        "| --- | " + " | ".join("---" for _ in RATES) + " |",
        *lines,
        "",
        f"{ROWS_OF_TABLE[FAR].says} after 200 steps, at the best rate: "
        + "; ".join(f"{FORMS[form].says} {_best(found, form, 200)}" for form in ("adamw", "muon"))
        + f". As kconv heals, at its own rate: {kconv[0]} after 50 steps, {kconv[1]} after 200.",
        "",
        f"The starts are {found[FAR]['distance']:.3f} and {found[NEAR]['distance']:.4f} nats from the original, so "
        f"kconv's rates are {own[FAR]:.4f} and {own[NEAR]:.4f}.",
    ]


def _unhealed(row: dict) -> str:
    return f"{100 * row['0']['figures']['held-out']['kept']:.1f}"


def _best(found: dict, form: str, steps: int) -> str:
    tried = {rate: found[name] for rate in RATES if (name := key(FAR, form, steps, rate)) in found}
    if not tried:
        return ""
    best = max(tried, key=lambda rate: tried[rate]["kept"])
    return f"{cell(tried[best])} at {best}"


def _at(found: dict, start: str, form: str, steps: int, rate: float) -> str:
    name = key(start, form, steps, rate)
    return cell(found[name]) if name in found else ""
