"""What bf16 costs a converted head."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from unittest.mock import patch

import torch
from torch import Tensor

from kconv.convert.attention import latents as gauges
from kconv.convert.attention.convert import as_stored
from kconv.drafters.forward import DraftHead
from kconv.measure.compare import compare

from .attention_beds import FITTED, open_bed
from .attention_rows import ROWS_OF_TABLE, cell, convert, errors, percent, start_of
from .attention_store import load, save

BED, NAME = "bytes", "bf16"
FEW = 40
LATENTS = (("q_a_proj", "q_a_layernorm", "q_b_proj"), ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"))


def turn_latents(head: DraftHead, seed: int = 0) -> DraftHead:
    """Return an MLA head with each latent turned by a rotation drawn at random.

    A norm without gains commutes with a rotation, so what the head computes is the same but for rounding.
    """
    weights, generator = dict(head.weights), torch.Generator().manual_seed(seed)
    for down, norm, up in (tuple(f"0.{name}" for name in names) for names in LATENTS):
        if not bool((weights[norm] == 1).all()):
            raise ValueError(f"{norm} has gains, which do not commute with a rotation")
        rank = len(weights[norm])
        rotation = torch.linalg.qr(torch.randn(rank, rank, generator=generator, dtype=torch.float64)).Q
        latent, key_rope = weights[down].double().split([rank, len(weights[down]) - rank])
        weights[down] = torch.cat([rotation @ latent, key_rope]).to(weights[down])
        weights[up] = (weights[up].double() @ rotation.T).to(weights[up])
    return DraftHead(head.spec, weights)


def in_bf16(head: DraftHead) -> DraftHead:
    """Return a head that computes in bf16."""
    # A head computes in the dtype of fc.
    return DraftHead(head.spec, {**head.weights, "fc": head.weights["fc"].bfloat16()})


# What becomes of the original and of the converted head before they are compared.
ROUNDED: dict[str, Callable[[DraftHead, DraftHead], tuple[DraftHead, DraftHead]]] = {
    "fp32": lambda original, converted: (original, converted),
    "weights in bf16": lambda original, converted: (original, as_stored(converted, "BF16")),
    "both heads computed in bf16": lambda original, converted: (in_bf16(original), in_bf16(converted)),
}


def convert_unturned(row: str, batches: int = FITTED) -> DraftHead:
    """Return a row's head with each gauge in the rotation that its minimum is found in."""
    to_sphere = gauges._to_sphere

    def find(white: Tensor) -> Tensor:
        # Of the gauge's singular values it keeps the values times the directions: here, the gauge itself.
        with patch.object(torch.linalg, "svd", lambda gauge: (None, gauge.new_ones(len(gauge)), gauge)):
            return to_sphere(white)

    with patch.object(gauges, "_to_sphere", find):
        return convert(open_bed(BED).of_fewer(batches), ROWS_OF_TABLE[row])


BASES: dict[str, Callable[[str], DraftHead]] = {
    "as converted": lambda row: start_of(BED, row)[1],
    "latents turned at random": lambda row: turn_latents(start_of(BED, row)[1]),
    "gauges not turned": convert_unturned,
    f"as converted, fitted to {FEW} batches": lambda row: convert(open_bed(BED).of_fewer(FEW), ROWS_OF_TABLE[row]),
    f"gauges not turned, fitted to {FEW} batches": lambda row: convert_unturned(row, FEW),
}
CASES = (
    *(("gqa-mla", basis) for basis in BASES),
    *(("mha-1-32", basis) for basis in ("as converted", "latents turned at random")),
    ("mla-mha", "as converted"),
)


def measure_rounding(only: str, seconds: float) -> None:
    """Measure the rows whose names fit, unhealed, until the time is over."""
    begun, bench = time.monotonic(), open_bed(BED)
    for name, basis in CASES:
        found = load(NAME)
        if basis in found.get(name, {}) or not fnmatchcase(name, only) or time.monotonic() - begun > seconds:
            continue
        original, converted = start_of(BED, name)[0], BASES[basis](name)
        kept = {}
        for rounded, apply in ROUNDED.items():
            figures = compare(*apply(original, converted), bench.fitted, bench.held_out)
            kept[rounded] = dataclasses.asdict(figures)
            print(f"{name}, {basis}, {rounded}: {percent(figures)}", flush=True)
        found.setdefault(name, {})[basis] = kept
        save(NAME, found)


def describe_rounding() -> list[str]:
    """Return what was measured as Markdown."""
    found = load(NAME)
    if not found:
        return ["Not measured yet: `scripts/bench attention --bf16` takes ten minutes."]
    every = [one for bases in found.values() for basis in bases.values() for one in basis.values()]
    return [
        f'Kept acceptance in %, unhealed, on the "{BED}" bed: {", ".join(list(ROUNDED)[1:])}; {errors(every)}:',
        "",
        *_lines(found),
    ]


def _lines(found: dict) -> list[str]:
    """Return a line for each conversion: what it keeps in fp32, and each head in every form of rounding."""
    exact, *rounded = ROUNDED
    said: dict[str, list[str]] = {}
    for name, basis in CASES:
        if basis in found.get(name, {}):
            kept = found[name][basis]
            start = f"{ROWS_OF_TABLE[name].says} ({cell(kept[exact])} in {exact})"
            said.setdefault(start, []).append(f"{basis} {', '.join(cell(kept[one]) for one in rounded)}")
    return [f"- {start}: {'; '.join(cases)}" for start, cases in said.items()]
