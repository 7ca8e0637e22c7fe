"""The conversions that docs/attention.md compares."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache

import torch

from kconv.convert.attention.heal import ATTENTION, REST, heal, train_alike
from kconv.convert.attention.rotary import Options
from kconv.convert.attention.swap import with_attention
from kconv.convert.attention.to_mha import convert_to_mha
from kconv.convert.attention.to_mla import Choices, convert_to_mla
from kconv.drafters.forward import DraftHead
from kconv.measure.compare import compare
from kconv.measure.retention import Retention

from .attention_beds import Bench, open_bed
from .attention_store import load, save

HEALED = (0, 50, 200, 1000)


@dataclass(frozen=True)
class Row:
    """One conversion, measured after some numbers of healing steps, against the original after as many."""

    head: str
    says: str
    ratio: int = 0
    choices: dict = field(default_factory=dict)
    steps: tuple[int, ...] = (0,)
    slots: str = "all"


REAL_ONLY = Options(is_complex=False, by_queries=False, phases=False)
TRANSMLA = {"ladders": ("stride",), "rotary": REAL_ONLY, "metric": "none", "gauges": ("none",), "refit_latents": False}
LIKE_TRANSMLA = {**TRANSMLA, "refit_output": False}
ROWS_OF_TABLE = {
    "mla-mha": Row("mla", "MLA → MHA", steps=HEALED),
    "mla-mha-constant": Row("mla", "constant norm", choices={"ridges": (), "refit": False}),
    "mla-mha-constant-o": Row("mla", "constant norm, o refit", choices={"ridges": ()}),
    "mla-mha-squares": Row("mla", "least squares, no o refit", choices={"refit": False}),
    "gqa-mla": Row("gqa", "GQA → MLA, 1 : 4", 4, steps=HEALED),
    "gqa-mla-stride": Row("gqa", "the stride ladder alone", 4, {"ladders": ("stride",)}),
    "gqa-mla-norms": Row("gqa", "no gauge", 4, {"gauges": ("none",)}),
    "gqa-mla-white": Row("gqa", "whitened, no sphere", 4, {"gauges": ("white",)}),
    "gqa-mla-output": Row("gqa", "metric of queries and o_proj, not Fisher", 4, {"metric": "output"}),
    "gqa-mla-no-o": Row("gqa", "no o refit", 4, {"refit_output": False}),
    "gqa-mla-transmla": Row("gqa", "TransMLA-like", 4, LIKE_TRANSMLA, steps=(0, 200)),
    "gqa-mla-random": Row("gqa", "random start", 4, {"random": True}, steps=(0, 200)),
    "mha-mla": Row("mha", "MHA → MLA, 1 : 16", 16, steps=HEALED),
    "mha-mla-64": Row("mha", "MHA → MLA, 1 : 8", 8, steps=(0, 200)),
    "mha-1-32": Row("mha", "MHA → MLA, 1 : 32", 32, steps=HEALED),
    "mha-1-32-attention": Row("mha", "attention alone healed", 32, steps=HEALED, slots="attention"),
    "mha-1-32-transmla": Row("mha", "TransMLA-like", 32, LIKE_TRANSMLA, steps=(0, 200)),
    "gqa-1-32": Row("wide", "GQA → MLA, 1 : 32", 32, steps=HEALED),
    "gqa-1-32-attention": Row("wide", "attention alone healed", 32, steps=HEALED, slots="attention"),
}


def convert(bench: Bench, row: Row) -> DraftHead:
    """Return a row's head as it is before healing."""
    head, choices = bench.head(row.head), dict(row.choices)
    if not row.ratio:
        return with_attention(head, convert_to_mha(head, bench.fitted, **choices)[0])
    is_random = choices.pop("random", False)
    attention, _ = convert_to_mla(head, bench.fitted, bench.bed.shape(row.ratio, row.head), Choices(**choices))
    if is_random:
        generator = torch.Generator().manual_seed(0)
        drawn = {
            name: weight.std() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            if weight.ndim == 2
            else weight
            for name, weight in attention.weights.items()
        }
        attention = replace(attention, weights=drawn)
    return with_attention(head, attention)


@cache
def start_of(bed: str, row: str) -> tuple[DraftHead, DraftHead]:
    """Return the original head of a row of a bed, and the converted one before healing."""
    return open_bed(bed).head(ROWS_OF_TABLE[row].head), convert(open_bed(bed), ROWS_OF_TABLE[row])


def measure(bench: Bench, row: Row, done: dict) -> Iterator[tuple[str, dict]]:
    """Yield what a row keeps after each number of steps that is not done, and the seconds of both trainings."""
    head = bench.head(row.head)
    wanted = [s for s in row.steps if str(s) not in done]
    if not wanted:
        return
    begun = time.perf_counter()
    start, seconds = convert(bench, row), time.perf_counter() - begun
    for steps in wanted:
        slots = ATTENTION if row.slots == "attention" else (*ATTENTION, *REST)
        begun = time.perf_counter()
        healed = heal(head, start, bench.fitted, steps, slots=slots)
        trained = None if healed is start else train_alike(head, start, bench.fitted, steps, slots=slots)
        spent = time.perf_counter() - begun if steps else seconds
        texts = bench.unseen if 0 < steps == row.steps[-1] else {"held-out": bench.held_out}
        figures = {
            name: dataclasses.asdict(compare(head, healed, bench.fitted, batches, trained=trained))
            for name, batches in texts.items()
        }
        yield str(steps), {"figures": figures, "seconds": round(spent, 1)}


def measure_rows(bed: str, only: str, seconds: float) -> None:
    """Measure the rows of a bed whose names fit, until the time is over."""
    begun = time.monotonic()
    for name, row in ROWS_OF_TABLE.items():
        if not fnmatchcase(name, only) or time.monotonic() - begun > seconds:
            continue
        found = load(bed)
        for steps, figures in measure(open_bed(bed), row, found.get(name, {})):
            found.setdefault(name, {})[steps] = figures
            save(bed, found)
            kept = Retention(**figures["figures"]["held-out"])
            print(f"{name} {steps}: {percent(kept)} ({figures['seconds']} s)", flush=True)
            if time.monotonic() - begun > seconds:
                break


def percent(figures: Retention) -> str:
    """Return the share of the acceptance length that is kept, and its standard error, in %, as a run prints it."""
    return f"{100 * figures.kept:.2f} ± {100 * figures.kept_error:.2f}"


def share(figures: dict, kind: str = "kept") -> str:
    """Return a share of stored figures and its standard error in %, as a table has them."""
    return f"{100 * figures[kind]:.1f} ± {100 * figures[f'{kind}_error']:.1f}"


def cell(figures: dict) -> str:
    """Return the share of stored figures in %, as a table has it."""
    return f"{100 * figures['kept']:.1f}"


def errors(figures: Iterable[dict]) -> str:
    """Say how large the standard errors of stored figures are at most."""
    return f"standard errors are {100 * max(one['kept_error'] for one in figures):.1f} at most"
