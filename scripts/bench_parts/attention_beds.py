"""What docs/attention.md is measured on."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.metadata import distributions
from math import prod
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.staging import staged
from kconv.convert.attention.swap import Shape
from kconv.convert.read import read_head
from kconv.drafters.forward import DraftHead
from kconv.drafters.slots import needs
from kconv.drafters.spec import Gqa, Mla
from kconv.installed import sources_digest
from kconv.measure.batches import Calibration, StatesBatch
from kconv.targets.config import read_target_config
from kconv.targets.forward import run_target
from kconv.targets.model import load_target, one_thread
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.recipe import DEMO, TinyRecipe, cache_root, recipe_key
from kconv.tiny.target import initialize, make_target, pack, save_tokenizer, train, train_tokenizer
from kconv.tiny.text import SHORTEST, Corpus, _paragraphs, read_corpus
from kconv.train.data import cut_windows
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


# Characters of a section of a manual at least, and one section of how many is held out.
SECTION, HELD_OUT = 600, 10
# As in Qwen3's own config.
POSITIONS = 40960


@cache
def read_manuals() -> Corpus:
    """Read the descriptions of the packages that kconv needs: every machine that runs the bench has them, pinned alike.

    A section's sha256 decides whether it is held out; none is if a paragraph of it is also trained on.
    """
    sections = set[str]()
    # kconv's own changes with each version of it.
    for distribution in (one for one in distributions() if one.name != "kconv"):
        begun = ""
        for paragraph in re.split(r"\n\s*\n", str(distribution.metadata.get_payload())):
            begun += f"{paragraph.rstrip()}\n\n"
            if len(begun) >= SECTION:
                sections.add(begun.strip())
                begun = ""
        sections.add(begun.strip())
    ranked = sorted((hashlib.sha256(s.encode()).digest(), s) for s in sections if len(s) >= SHORTEST)
    chosen = tuple(s for rank, s in ranked if rank[-1] % HELD_OUT)
    trained = {paragraph for s in chosen for paragraph in _paragraphs(s)}
    held_out = (s for rank, s in ranked if not rank[-1] % HELD_OUT and trained.isdisjoint(_paragraphs(s)))
    return Corpus(chosen, tuple(held_out))


def make_qwen3(recipe: TinyRecipe, cache: Path) -> Path:
    """Train a dense Qwen3 of a recipe's dims on the manuals, or find it in the cache."""
    text = read_manuals().train
    source = sources_digest("tiny") + hashlib.sha256("\0".join(text).encode()).hexdigest()
    out = cache / f"tiny-qwen3-{recipe_key(recipe, source=source)}"
    if out.exists():
        return out
    tokenizer = train_tokenizer(text, recipe.vocab_size, POSITIONS)
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_attention_heads // 2,
        head_dim=recipe.v_head_dim,
        max_position_embeddings=POSITIONS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with one_thread(), staged(out) as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Qwen3ForCausalLM(config).float()
        initialize(model)
        train(model, pack(tokenizer, text), recipe, lambda *_: None)
        model.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
    return out


@dataclass(frozen=True)
class Bed:
    """A target and how its heads are trained.

    Attributes:
        make: trains the target in a folder of the cache, or finds it there.
        read: the text of the target and its heads.
    """

    target: TinyRecipe
    training: dict
    says: str
    heads: dict[str, Gqa | Mla] = field(default_factory=lambda: HEADS)
    make: Callable[[TinyRecipe, Path], Path] = make_target
    read: Callable[[], Corpus] = read_corpus

    @property
    def folder(self) -> Path:
        """The target's checkpoint, made where the cache has it not."""
        return self.make(self.target, cache_root())

    def recipe(self, kind: str) -> EagleRecipe:
        """Return how a head of `heads` is trained."""
        base = TINY_MLA if kind == "mla" else TINY_GQA
        return replace(base, attention=self.heads[kind], **self.training)

    def parameters(self, kind: str) -> int:
        """Return how many parameters a head of `heads` has beside the embedding and lm_head."""
        spec = self.recipe(kind).spec(read_target_config(self.folder))
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
    "manual": Bed(
        ALONE,
        {"batch": 8, "steps": 500},
        "a Qwen3 (512 tokens) that reads the descriptions of the installed Python packages, heads trained with Muon",
        make=make_qwen3,
        read=read_manuals,
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
        corpus = bed.read()
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
        return self.states(self.text, SEQ, FITTED, ROWS, "text of the training")

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
