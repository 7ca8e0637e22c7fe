"""Texts of the tiny target and its states over them, in memory: what heads with faults are measured on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kconv.checkpoint.folder import Checkpoint, open_checkpoint
from kconv.checkpoint.tensors import read_tensor
from kconv.convert.read import Head, read_weights
from kconv.drafters.forward import DraftHead
from kconv.measure.drafting import count_halves, head_drafter, measure_states
from kconv.measure.figures import AcceptanceFigures
from kconv.measure.texts import Batch, Text, make_texts
from kconv.targets.config import TargetConfig, read_target_config
from kconv.targets.forward import States, run_target
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.text import read_corpus

STEPS = 3


def _by_row(largest: float, how: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def rounded(weight: Tensor) -> Tensor:
        scale = weight.abs().amax(1, keepdim=True) / largest
        return how(weight / scale) * scale

    return rounded


# How right heads are stored.
ROUNDINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda weight: weight,
    "BF16": lambda weight: weight.bfloat16().float(),
    "F16": lambda weight: weight.half().float(),
    "FP8": _by_row(448.0, lambda values: values.to(torch.float8_e4m3fn).float()),
    "INT8": _by_row(127.0, torch.round),
    "INT6": _by_row(31.0, torch.round),
}


@dataclass(frozen=True)
class Bed:
    """A target's texts and its states over them: the states of all layers, by the tokens of a batch."""

    target: Checkpoint
    config: TargetConfig
    texts: Sequence[Text]
    states: Sequence[tuple[Batch, States]]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(self.config.layers))

    def run(self, batch: Batch) -> States:
        rows = len(batch.tokens)
        for held, states in self.states:
            if held.prompt_length == batch.prompt_length and torch.equal(held.tokens[:rows], batch.tokens):
                return States(states.captured[:rows], states.hidden[:rows], states.logits[:rows])
        raise KeyError(batch.places)

    def whole(self, head: Head) -> dict[str, Tensor]:
        """Return a head's weights, in fp32, with what it shares with the target."""
        shared = {"embed_tokens": self.config.embed_tokens, "lm_head": self.config.lm_head}
        slots = {slot: read_tensor(self.target.tensors[name]) for slot, name in shared.items()} | read_weights(head)
        return {name: weight.float() if weight.is_floating_point() else weight for name, weight in slots.items()}

    def measure(self, text: Text, head: DraftHead) -> Sequence[AcceptanceFigures]:
        drafters = {"output": head_drafter(head, STEPS, self.layers)}
        pairs = count_halves(text, self.config.vocab)
        return measure_states(text, self.run, STEPS, drafters, bigram=pairs).acceptance


@torch.no_grad()
def make_bed(folder: Path) -> Bed:
    """Run a target once over texts that no head was trained on, and over its own continuations."""
    config, model, tokenizer = read_target_config(folder), load_target(folder, torch.float32), load_tokenizer(folder)
    prompts = [tokenizer.encode(text, 56) for text in [t for t in read_corpus().held_out if len(t) > 300][:12]]
    texts = make_texts(model, prompts, prompt_tokens=16, new_tokens=40, steps=STEPS, seed=0)
    layers = tuple(range(config.layers))
    states = [(batch, run_target(model, batch.tokens, layers)) for text in texts for batch in text.batches]
    return Bed(open_checkpoint(folder), config, texts, states)
