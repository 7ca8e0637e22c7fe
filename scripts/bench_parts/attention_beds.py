"""What docs/attention.md is measured on."""

from __future__ import annotations

import ast
import json
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod
from pathlib import Path

import torch

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.attention.swap import Shape
from kconv.convert.read import read_head
from kconv.drafters.forward import DraftHead
from kconv.drafters.slots import needs
from kconv.drafters.spec import Gqa, Mla
from kconv.measure.batches import Calibration, StatesBatch
from kconv.targets.config import read_target_config
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.recipe import DEMO, TinyRecipe, cache_root
from kconv.tiny.target import make_target, pack
from kconv.tiny.text import read_corpus
from kconv.train.data import cut_windows
from kconv.train.evaluate import spec_of
from kconv.train.recipe import TINY_GQA, TINY_MLA, EagleRecipe
from kconv.train.run import head_key, train_head
from kconv.validate.parity import load_head

FITTED, MEASURED, SEQ, ROWS = 150, 12, 96, 8
ADAMW = {"optimizer": "adamw", "lr": 3e-3, "rest_lr": 3e-3, "steps": 400, "batches": 200}
# "wide" has as many KV dims as MHA, so that a latent of 1 : 32 has entries to speak of.
HEADS: dict[str, Gqa | Mla] = {
    "mla": Mla(8, q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32),
    "mha": Gqa(8, 8, 32),
    "gqa": Gqa(8, 2, 32),
    "wide": Gqa(16, 8, 32),
}
# The same with heads of twice the dims.
LARGE: dict[str, Gqa | Mla] = {
    "mla": Mla(8, q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
    "mha": Gqa(8, 8, 64),
    "gqa": Gqa(8, 2, 64),
    "wide": Gqa(16, 8, 64),
}


@dataclass(frozen=True)
class Bed:
    """A target and how its heads are trained."""

    target: TinyRecipe
    training: dict
    says: str
    heads: dict[str, Gqa | Mla] = field(default_factory=lambda: HEADS)

    @property
    def folder(self) -> Path:
        """The target's checkpoint, made where the cache has it not."""
        return make_target(self.target, cache_root())

    def recipe(self, kind: str) -> EagleRecipe:
        """Return how a head of `heads` is trained."""
        base = TINY_MLA if kind == "mla" else TINY_GQA
        return replace(base, attention=self.heads[kind], **self.training)

    def parameters(self, kind: str) -> int:
        """Return how many parameters a head of `heads` has beside the embedding and lm_head."""
        spec = spec_of(self.recipe(kind), read_target_config(self.folder))
        return sum(prod(need.shape) for name, need in needs(spec).items() if name not in ("embed_tokens", "lm_head"))

    def shape(self, ratio: int, kind: str) -> Shape:
        """Return MLA's dims for a latent of 1 : ratio, and half of the rotary dims, as at Kimi-K2's size: 64 of 128."""
        gqa = self.heads[kind]
        assert isinstance(gqa, Gqa)
        return Shape(2 * gqa.kv_heads * gqa.head_dim // ratio, rotary=gqa.head_dim // 2, q_lora_rank=4 * gqa.head_dim)


# As it was when the heads of the page were made: trained on one core.
ALONE = replace(DEMO, parts=1)
BEDS = {
    "words": Bed(
        ALONE, {"steps": 1000}, "the demo's target (512 tokens), heads trained with Muon, as kconv trains tiny heads"
    ),
    "bytes": Bed(
        replace(ALONE, vocab_size=259, steps=250),
        ADAMW,
        "a target of the demo's dims that reads bytes, heads trained with AdamW",
    ),
    "large": Bed(
        replace(ALONE, vocab_size=259, hidden_size=320, steps=250),
        ADAMW | {"intermediate": 1280},
        "a wider target that reads bytes, wider heads trained with AdamW",
        LARGE,
    ),
}


class Bench:
    """A bed's target, states and heads, made when they are asked for."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.folder = bed.folder
        self.model = load_target(self.folder, torch.float32)
        self.tokenizer = load_tokenizer(self.folder).inner
        corpus = read_corpus()
        self.text, self.held = pack(self.tokenizer, corpus.train), pack(self.tokenizer, corpus.held_out)

    def head(self, kind: str) -> DraftHead:
        """Return a head of `bed.heads`; it is trained where the cache has it not."""
        recipe = self.bed.recipe(kind)
        key = head_key(self.folder, recipe, self.text, self.held)
        out = train_head(self.folder, cache_root() / f"head-{key}", recipe, self.text, self.held)
        return load_head(read_head(open_checkpoint(out)), open_checkpoint(self.folder), read_target_config(self.folder))

    def states(self, text: torch.Tensor, seq: int, batches: int, rows: int, name: str) -> Calibration:
        """Return the target's states over windows of a text, `rows` of `seq` tokens to a batch."""
        found = []
        for tokens in cut_windows(text, seq, batches * rows, seed=1).split(rows):
            states = run_target(self.model, tokens, (1, 3, 5))
            found.append(StatesBatch(tokens, states.captured, states.hidden))
        return Calibration(found, self.model.lm_head.weight.detach(), name)

    @cached_property
    def fitted(self) -> Calibration:
        """What conversions are fitted to, and healed on."""
        return self.states(self.text, SEQ, FITTED, ROWS, "docstrings")

    def of_fewer(self, batches: int) -> Bench:
        """Return the same bench with so many of the batches that conversions are fitted to."""
        fewer = copy(self)
        fewer.fitted = replace(self.fitted, batches=self.fitted.batches[:batches])
        return fewer

    @cached_property
    def held_out(self) -> list[StatesBatch]:
        """Held-out documents in texts as long as the fitted ones."""
        return list(self.states(self.held, SEQ, MEASURED, ROWS, "held-out").batches)

    @cached_property
    def unseen(self) -> dict[str, list[StatesBatch]]:
        """Held-out documents, the same in longer texts, and source code, which no one was trained on."""
        code = pack(
            self.tokenizer, [without_docstrings(Path(json.__file__).with_name(n)) for n in ("decoder.py", "encoder.py")]
        )
        return {
            "held-out": self.held_out,
            "1,024 tokens": list(self.states(self.held, 1024, 2, 4, "long").batches),
            "source code": list(self.states(code, SEQ, 4, ROWS, "code").batches),
        }


@cache
def open_bed(bed: str) -> Bench:
    """Return the bench of a bed by name, with all that it has made already."""
    return Bench(BEDS[bed])


def without_docstrings(file: Path) -> str:
    """Return a source as Python writes it, without the docstrings, which are what heads are trained on."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
