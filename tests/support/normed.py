"""Heads with norms that ModelOpt's training has no place for (EAGLE-3.1's, and those of queries and keys).

A trained head is given the norms, and all of it but what it shares with the target is trained on with them: it drafts
K steps on the target's states, and is drawn to the tokens that the target expects there. So the norms are right ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.read import Head, read_head, read_weights
from kconv.drafters.chain import along_chains, unroll
from kconv.drafters.forward import DraftHead
from kconv.drafters.slots import needs
from kconv.drafters.spec import HeadSpec, Norms
from kconv.engines import by_name
from kconv.targets.config import read_target_config
from kconv.targets.forward import States, run_target
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.recipe import cache_root
from kconv.tiny.target import pack
from kconv.tiny.text import read_corpus
from kconv.train.optimizer import MuonAdamW
from kconv.validate.parity import load_head

from .heads import write_head

NORMS_OF_3_1, NORMS_OF_QK = Norms(fc=True, output=True), Norms(qk=True)
STEPS, DECAY = 3, 0.9
BATCH, LENGTH, BATCHES, UPDATES = 4, 96, 200, 400
RATE, GAINS_RATE, WARMUP = 0.03, 3e-3, 20
SHARED = ("embed_tokens", "lm_head")


def write_normed(trained: Path, target: Path, norms: Norms, layout: str, folder: Path) -> Path:
    """Write a head with more norms than it was trained with, trained on with them (once; then found in the cache).

    Args:
        trained: the head to begin with.
        target: its target.
        norms: what it gets.
        layout: the name of what reads it.
        folder: where to.
    """
    head = read_head(open_checkpoint(trained))
    spec, own = replace(head.spec, norms=norms), read_weights(head)
    key = hashlib.sha256(Path(__file__).read_bytes() + repr(spec).encode())
    for file in (trained / "model.safetensors", target / "model.safetensors"):
        key.update(hashlib.sha256(file.read_bytes()).digest())
    made = cache_root() / f"normed-{key.hexdigest()[:16]}.safetensors"
    with FileLock(cache_root() / f".{made.stem}.lock"):
        if not made.exists():
            weights = train(head, spec, target)
            kept = {slot: weight.contiguous() for slot, weight in weights.items() if slot in own or slot not in SHARED}
            save_file(kept, half := made.with_suffix(".part"))
            half.rename(made)
    return write_head(folder, by_name(layout), spec, load_file(made))


def train(
    head: Head, spec: HeadSpec, target: Path, progress: Callable[[int, float], None] = lambda *_: None
) -> dict[str, Tensor]:
    """Return a head's weights under another spec, trained on.

    Args:
        head: the head to begin with.
        spec: the same with more norms.
        target: its target's folder.
        progress: told the steps done and the loss.
    """
    generator = torch.Generator().manual_seed(0)
    model = load_target(target, torch.float32)
    stream = pack(load_tokenizer(target).inner, read_corpus().train)
    batches = stream[: BATCHES * BATCH * LENGTH].view(BATCHES, BATCH, LENGTH)
    states = [run_target(model, tokens, spec.captured) for tokens in batches]
    begun = load_head(head, open_checkpoint(target), read_target_config(target))
    weights = {**begun.weights, **start(begun, spec, batches[0], states[0])}
    moved = {name: weight.clone().requires_grad_() for name, weight in weights.items()
             if name not in SHARED and weight.is_floating_point()}  # fmt: skip
    matrices, gains = ([w for w in moved.values() if w.ndim == dims] for dims in (2, 1))
    optimizer = MuonAdamW(matrices, gains, RATE, GAINS_RATE)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP, UPDATES)
    order: list[int] = []
    for step in range(UPDATES):
        order = order or torch.randperm(BATCHES, generator=generator).tolist()
        at = order.pop()
        loss = loss_of(DraftHead(spec, {**weights, **moved}), batches[at], states[at])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(moved.values()), 1.0)
        optimizer.step()
        schedule.step()
        progress(step + 1, loss.item())
    return {name: moved.get(name, weight).detach() for name, weight in weights.items()}


def loss_of(head: DraftHead, tokens: Tensor, states: States) -> Tensor:
    """Return how far the drafts of all chains are from what the target expects, in nats."""
    goals = along_chains(states.logits, STEPS).log_softmax(-1)[..., head.target_ids]
    total = torch.zeros(())
    for k, step in enumerate(unroll(head, tokens, states.captured, STEPS)):
        drafted = step.logits.log_softmax(-1)
        total = total + DECAY**k * (goals[k].exp() * (goals[k] - drafted)).sum(-1).mean()
    return total


@torch.no_grad()
def start(head: DraftHead, spec: HeadSpec, tokens: Tensor, states: States) -> dict[str, Tensor]:
    """Return gains for the norms that a head lacks, which leave what they norm as large as it is."""
    shapes = {name: need.shape for name, need in needs(spec).items() if name not in head.weights and name != "t2d"}
    found = {name: torch.ones(shape) for name, shape in shapes.items()}
    for at, part in enumerate(states.captured.split(spec.target_hidden, -1)):
        if (name := f"fc_norm.{at}") in found:
            found[name] *= part.square().mean().sqrt()
    return found
