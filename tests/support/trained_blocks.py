"""Tiny targets with DFlash and DSpark drafters that ModelOpt's own classes trained for them, and a P-EAGLE head.

An engine serves them, and what it accepts of each place of a block is what kconv's own forward of the drafter says.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.drafters.chain import along_chains, draft_logits
from kconv.drafters.forward import DraftHead
from kconv.drafters.spec import Gqa, HeadSpec, Rope
from kconv.engines import by_name, registry
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.recipe import TinyRecipe
from kconv.tiny.target import pack
from kconv.tiny.text import read_corpus

from . import families, heads

# The base of RoPE is the target's: engines take the one that a drafter's config states, ModelOpt the target's or 10000.
TARGETS = {"qwen3": 1e6, "kimi": 50000.0}
MASK, IDS = 511, [1, 5]
STEPS = TinyRecipe(steps=200, batch=4, seq=64, warmup=10, lr=3e-3)
DIMS: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 128, "target_layer_ids": IDS,
}  # fmt: skip
DSPARK: dict[str, Any] = {"projector_type": "dspark", "markov_rank": 16, "use_confidence_head": True}
OF_LOSS = {"dflash_ce_loss_alpha": 1.0, "dflash_l1_loss_alpha": 0.9, "dflash_confidence_head_alpha": 1.0}


@dataclass(frozen=True)
class Block:
    """A drafter that is trained.

    Attributes:
        target: a key of `TARGETS`.
        block: its number of slots.
        architecture: what ModelOpt's architecture config states besides `DIMS`.
        more: other keys of ModelOpt's config.
        steps: of training.
    """

    target: str
    block: int
    architecture: dict[str, Any] = field(default_factory=dict[str, Any])
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    steps: int = 200


BLOCKS = {
    "DFlash": Block("qwen3", 5),
    "causal DFlash": Block("qwen3", 5, more={"dflash_draft_attention": "causal"}),
    "DSpark": Block("qwen3", 4, DSPARK | {"markov_head_type": "vanilla"}, OF_LOSS),
    "gated DSpark": Block("qwen3", 4, DSPARK | {"markov_head_type": "gated"}, OF_LOSS),
    "recurrent DSpark": Block("qwen3", 4, DSPARK | {"markov_head_type": "rnn"}, OF_LOSS),
    "DFlash of a Kimi target": Block("kimi", 5),
    "DSpark of a Kimi target": Block("kimi", 4, DSPARK | {"markov_head_type": "vanilla"}, OF_LOSS),
}
# Made of DSpark: as DeepSpec trains its DFlash.
WITHOUT_MARKOV = "DSpark without a Markov head"
# A head that one pass drafts all tokens with, which ModelOpt does not train.
P_EAGLE = "P-EAGLE"
PARALLEL = HeadSpec(
    attention=Gqa(4, 2, 32), hidden=64, target_hidden=64, intermediate=128, layers=2, vocab=512, draft_vocab=512,
    rope=Rope(1e6), captured=(0, 1, 5), eps=1e-6, dtype="F32", max_positions=512, mask=MASK,
)  # fmt: skip
# What an engine serves on a CPU. vLLM has no gated or recurrent Markov head.
SERVED = {
    "vllm": (
        "DFlash",
        "causal DFlash",
        "DSpark",
        WITHOUT_MARKOV,
        "DFlash of a Kimi target",
        "DSpark of a Kimi target",
        P_EAGLE,
    ),
    "sglang": (*BLOCKS, WITHOUT_MARKOV),
}


def train_blocks(cache: Path, kimi: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """Return the targets' folders and the drafters', as ModelOpt exports them; trained once, then found in the cache.

    Args:
        cache: where they are kept.
        kimi: the folder of the tiny Kimi-K2 target, whose tokenizer the other has too.
    """
    sources = [
        inspect.getsource(one) for one in (train, train_parallel, families.write_target, families.MODELS["qwen3"])
    ]
    recipe = repr((sources, TARGETS, MASK, DIMS, STEPS, families.DIMS, kimi.name))

    def once(name: str, of: object, make: Any) -> Path:
        key = hashlib.sha256(f"{recipe}{of}".encode()).hexdigest()[:16]
        made = cache / f"{name.replace(' ', '-')}-{key}"
        with FileLock(cache / f".{name.replace(' ', '-')}.lock"):
            if not made.exists():
                shutil.rmtree(half := made.with_suffix(".part"), ignore_errors=True)
                make(half)
                half.rename(made)
        return made

    qwen3 = once("block-qwen3", STEPS, lambda out: families.write_target(out, "qwen3", kimi, STEPS))
    targets = {"qwen3": qwen3, "kimi": kimi}
    drafters = {
        name: once(f"block-{name}", block, lambda out, block=block: train(block, targets[block.target], out))
        for name, block in BLOCKS.items()
    }
    return targets, drafters | {P_EAGLE: once("block-peagle", PARALLEL, lambda out: train_parallel(qwen3, out))}


def convert_blocks(trained: dict[str, Path], engine: str, root: Path) -> dict[str, Path]:
    """Convert the drafters that an engine serves, by name and engine."""
    made: dict[str, Path] = {}
    for name in SERVED[engine]:
        source = _without_markov(trained["DSpark"], root / "source") if name == WITHOUT_MARKOV else trained[name]
        made[f"{name} {engine}"] = root / name.replace(" ", "-")
        head = read_head(open_checkpoint(source))
        layout = next(one for one in registry.engine(engine).layouts if one.drafter is head.drafter)
        execute(plan(head, layout), made[f"{name} {engine}"])
    return made


def target_of(name: str) -> str:
    """Return the key of the target of a drafter that is served."""
    return "kimi" if "Kimi" in name else "qwen3"


def _without_markov(head: Path, out: Path) -> Path:
    out.mkdir(parents=True)
    config, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    config["dflash_config"] |= {"markov_rank": 0, "use_confidence_head": False}
    (out / "config.json").write_text(json.dumps(config))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(("markov_", "confidence_"))}
    save_file(kept, out / "model.safetensors")
    return out


def train(block: Block, target: Path, out: Path) -> None:
    """Train a drafter with ModelOpt and let it export it."""
    import modelopt.torch.speculative as mtsp

    text = pack(load_tokenizer(target).inner, read_corpus().train)
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(0)
        model: Any = load_target(target, torch.float32)
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": TARGETS[block.target]}}
        config = {
            "dflash_block_size": block.block, "dflash_num_anchors": 16, "dflash_mask_token_id": MASK,
            "dflash_use_torch_compile": False,
            "dflash_architecture_config": DIMS | rope | block.architecture,
        } | block.more  # fmt: skip
        mtsp.convert(model, [("dflash", config)])
        parameters = list(model.dflash_module.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=block.steps, pct_start=0.05)
        length = 12 * block.block
        model.train()
        for _ in range(block.steps):
            tokens = text[torch.randint(len(text) - length, (4, 1)) + torch.arange(length)]
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        model.eval()
        model.get_exporter().export(out, torch.float32)


def train_parallel(target: Path, out: Path) -> None:
    """Train a P-EAGLE head on the places of a draft at once, and save it in the names of the speculators library."""
    text = pack(load_tokenizer(target).inner, read_corpus().train)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = load_target(target, torch.float32)
        ends = load_file(target / "model.safetensors")
        shared = {"embed_tokens": ends["model.embed_tokens.weight"], "lm_head": ends["lm_head.weight"]}
        drawn = heads.random_slots(PARALLEL)
        own = {name: 0.1 * w if w.ndim == 2 else torch.ones_like(w) for name, w in drawn.items()}
        own |= shared | {"norm": ends["model.norm.weight"], "mask_hidden": drawn["mask_hidden"]}
        parameters = [w.requires_grad_() for name, w in own.items() if name not in shared]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS.steps, pct_start=0.05)
        head, length = DraftHead(PARALLEL, own), STEPS.seq
        for _ in range(STEPS.steps):
            tokens = text[torch.randint(len(text) - length, (4, 1)) + torch.arange(length)]
            states = run_target(model, tokens, PARALLEL.captured)
            wanted = along_chains(states.logits.softmax(-1), 4)
            drafted = draft_logits(head, tokens, states.captured, 4)
            torch.nn.functional.cross_entropy(drafted.flatten(0, 2), wanted.flatten(0, 2)).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    kept = {name: weight.detach() for name, weight in own.items() if name not in shared}
    heads.write_head(out, by_name("speculators"), PARALLEL, kept | shared)
