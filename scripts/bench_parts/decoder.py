"""Train GQA heads with kconv's decoder layer and with stock ModelOpt's, and measure both as trained and as served.

    .venv/bin/python scripts/bench decoder [--markdown]

The heads are the demo's GQA head, for fewer steps and from several seeds, trained with Muon as kconv trains tiny heads
and with AdamW. *As trained* is ModelOpt's own module, *as served* kconv's computation of its export, whose counts are
those of both engines (docs/evidence/real.md). Heads are kept in the cache, so that a stopped run resumes.
`--markdown` writes the table into docs/guides/train.md.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.read import read_head
from kconv.drafters.chain import draft_logits, overlap, overlap_acceptance, pool
from kconv.targets.config import read_target_config
from kconv.targets.forward import States, run_target
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.recipe import DEMO, cache_root
from kconv.tiny.target import make_target, pack
from kconv.tiny.text import read_corpus
from kconv.train.module import draft_logits as module_logits
from kconv.train.recipe import TINY_GQA, EagleRecipe
from kconv.train.run import head_key, share_states, train_head
from kconv.validate.parity import load_head

from .train_runs import MEASURED, TOKENS, measured_texts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "train.md"
BEGIN, END = "<!-- decoder: begin -->", "<!-- decoder: end -->"
K, SEEDS, STEPS = 3, (0, 1, 2), 400
LAYERS = ("served", "stock")
OPTIMIZERS = {"Muon": {}, "AdamW": {"optimizer": "adamw", "lr": 3e-3, "rest_lr": 3e-3}}


def recipes() -> Iterator[tuple[str, str, EagleRecipe]]:
    """Yield optimizer, layer and recipe of each head."""
    for seed, optimizer, layer in product(SEEDS, OPTIMIZERS, LAYERS):
        yield (
            optimizer,
            layer,
            replace(TINY_GQA, **OPTIMIZERS[optimizer], batches=200, steps=STEPS, seed=seed, decoder_layer=layer),
        )


@torch.no_grad()
def measure(target: Path, folder: Path, tokens: Tensor, states: States) -> tuple[float, float]:
    """Return a head's sampled acceptance length in ModelOpt's module, and in kconv's computation of its export."""
    head = load_head(read_head(open_checkpoint(folder)), open_checkpoint(target), read_target_config(target))
    trained = module_logits(folder / "modelopt", target, tokens, states, K)
    lengths = []
    for logits in (trained, draft_logits(head, tokens, states.captured, K)):
        shares = overlap(logits, states.logits, head.target_ids)
        lengths.append(pool([overlap_acceptance(shares[:, row : row + 1]) for row in range(len(tokens))]).length)
    return lengths[0], lengths[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="write the table into docs/guides/train.md")
    wish = parser.parse_args()
    torch.set_num_threads(1)
    target, corpus = make_target(DEMO, cache_root()), read_corpus()
    tokenizer = load_tokenizer(target)
    texts = pack(tokenizer.inner, corpus.train), pack(tokenizer.inner, corpus.held_out)
    tokens = torch.tensor([tokenizer.encode(text)[:TOKENS] for text in measured_texts(tokenizer)])
    states = run_target(load_target(target, torch.float32), tokens, TINY_GQA.captured)
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for optimizer, layer, recipe in recipes():
        shared = cache_root() / f"decoder-states-{target.name}-{recipe.seed}-{recipe.batches}.safetensors"
        if not shared.exists():
            share_states(target, shared, recipe, *texts)
        out = cache_root() / f"head-{head_key(target, recipe, *texts)}"
        train_head(target, out, recipe, *texts, states=shared)
        loss = json.loads((out / "modelopt" / "training.json").read_text())["trained"]["loss"]
        found.setdefault((optimizer, layer), []).append((loss, *measure(target, out, tokens, states)))
        print(optimizer, layer, recipe.seed, found[optimizer, layer][-1], flush=True)
    lines = [
        f"GQA heads for the demo's target, {STEPS} steps, means of {len(SEEDS)} seeds (in brackets the range).",
        f"Acceptance lengths are by rejection sampling at temperature 1, K = {K}, over {MEASURED} held-out texts of "
        f"{TOKENS} tokens:",
        "",
        "| optimizer | `decoder_layer` | held-out loss | acceptance length as trained | as served |",
        "|---|---|---|---|---|",
    ]
    for (optimizer, layer), rows in found.items():
        cells = " | ".join(f"{mean(one):.3f} ({min(one):.3f}–{max(one):.3f})" for one in zip(*rows, strict=True))
        lines.append(f"| {optimizer} | {layer} | {cells} |")
    print("\n".join(lines))
    if wish.markdown:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text("\n".join([before + BEGIN, *lines, END + rest.partition(END)[2]]))


if __name__ == "__main__":
    main()
