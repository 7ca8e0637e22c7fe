"""Compare a training step of kconv, of ModelOpt's own loop, and of plain PyTorch with the same mathematics.

The plain step is written here for one decoder layer with grouped heads: each draft step computes only the chains that
count, the target's probabilities are computed once, and the gradient of the loss comes with the loss, a block of tokens
at a time. It keeps all activations, and all attention scores.

Hidden 1,024, 16 heads that share 8, an MLP of 2,752, a vocabulary of 32,768; one row, one thread. Each step runs in its
own process: forward and backward, without the optimizer. Memory is the peak minus what was there before the step.

    .venv/bin/python scripts/bench train-step [--pairs 3] [--only "fp32, 1,024, 3"] [--markdown]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_parts.machine import apart
from bench_parts.page import closing, write_section
from bench_parts.train_memory import memory
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

HEADS, KV_HEADS, WIDTH, HIDDEN, MLP, VOCAB, EPS, THETA = 16, 8, 128, 1024, 2752, 32768, 1e-6, 10000.0
BLOCK = 256  # tokens whose logits the plain step holds at a time
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "vocab_size": VOCAB,
    "num_hidden_layers": 8, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH,
    "intermediate_size": MLP, "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 32768,
    "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
SIDES = ("plain", "kconv", "ModelOpt")


@dataclass(frozen=True)
class Case:
    """A step: the dtype of its matrix products, the tokens of its row, its draft steps, and the share that counts."""

    dtype: str
    tokens: int
    steps: int
    answers: float = 1.0

    @property
    def name(self) -> str:
        """What a row of the table is called."""
        return f"{self.dtype}, {self.tokens:,}, {self.steps}" + (", half" if self.answers < 1 else "")


CASES = (
    Case("fp32", 512, 3), Case("fp32", 512, 7), Case("fp32", 1024, 3), Case("fp32", 1024, 3, 0.5),
    Case("bf16", 512, 3), Case("bf16", 512, 7), Case("bf16", 1024, 3),
    Case("fp32", 4096, 3), Case("bf16", 4096, 3),
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """What one step took: seconds of the processor, GFLOP of its products, MiB, its loss, and its gradients' norms."""

    seconds: float
    gflop: float
    mib: float
    loss: float
    norms: dict[str, float]


def measure(side: str, case: Case) -> Step:
    """Return what a side's step takes."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    from kconv.targets.config import parse_target_config
    from kconv.targets.model import build_target
    from kconv.train.module import build_module, run_eagle
    from kconv.train.recipe import complete

    config = parse_target_config(CONFIG)
    torch.manual_seed(0)
    values = {
        "decoder": "gqa", "seq": case.tokens, "batch": 1, "batches": 1, "steps": 1, "warmup": 0, "optimizer": "adamw",
        "ttt_steps": case.steps, "kernel": "eager" if side == "ModelOpt" else "sdpa", "intermediate": MLP,
    }  # fmt: skip
    if case.dtype == "bf16":
        values["compute"] = "BF16"
    recipe = complete(values, config, 1)
    target = build_target(replace(config, text=config.text | {"num_hidden_layers": 0}), torch.float32)
    target.config.num_hidden_layers = config.layers
    model = build_module(target, recipe)
    model.train()
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(1, case.tokens, dtype=torch.bool)
    mask[:, : round(case.tokens * (1 - case.answers))] = False
    batch: dict[str, Any] = {
        "input_ids": torch.randint(3, VOCAB, (1, case.tokens), generator=generator),
        "loss_mask": mask,
        "base_model_outputs": {
            name: torch.randn(1, case.tokens, width, generator=generator)
            for name, width in (("aux_hidden_states", 3 * HIDDEN), ("base_model_hidden_states", HIDDEN))
        },
    }
    plain = Plain(dict(model.eagle_module.named_parameters()), model.lm_head.weight, case)

    def step() -> float:
        model.zero_grad()
        if side == "plain":
            return plain.step(batch, model.get_input_embeddings().weight, recipe.loss_decay)
        loss = run_eagle(model, batch, recipe).loss
        loss.backward()
        return float(loss.detach())

    # The first step's memory, as freed memory is used again, and the last one's time.
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step()
    mib = (memory("VmHWM") - before) / 1024
    with FlopCounterMode(display=False) as counter:
        step()
    begin = time.process_time()
    loss = step()
    seconds = time.process_time() - begin
    norms = {name: float(one.grad.norm()) for name, one in plain.weights.items() if one.grad is not None}
    return Step(seconds, counter.get_total_flops() / 1e9, mib, loss, norms)


class Plain:
    """The step of a head of one layer with grouped heads, in plain PyTorch."""

    def __init__(self, weights: dict[str, Tensor], lm_head: Tensor, case: Case) -> None:
        self.weights, self.case = weights, case
        self.dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
        # It is frozen, so it is cast once.
        self.lm_head = lm_head.detach().to(self.dtype)
        powers = torch.arange(0, WIDTH, 2, dtype=torch.float32) / WIDTH
        angles = torch.arange(case.tokens)[:, None] * THETA**-powers
        self.cos, self.sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Return a normed state."""
        return F.rms_norm(x, (HIDDEN,), self.weights[f"{name}.weight"], EPS)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Return a state times a matrix."""
        return F.linear(x, self.weights[f"{name}.weight"])

    def heads(self, name: str, x: Tensor, places: Tensor | None = None) -> Tensor:
        """Return queries, keys or values of a state [N, hidden], as [heads, N, width], rotated to their places."""
        out = self.linear(f"layers.0.self_attn.{name}", x).view(len(x), -1, WIDTH).transpose(0, 1)
        if places is None:
            return out
        half = torch.cat([-out[..., WIDTH // 2 :], out[..., : WIDTH // 2]], -1)
        return out * self.cos[places] + half * self.sin[places]

    def layer(self, hidden: Tensor, embeds: Tensor, starts: Tensor, step: int, keys: list[Any]) -> Tensor:
        """Run a draft step of chains that start at some tokens, and add its keys and values."""
        places = starts + step
        both = torch.cat([self.norm("layers.0.input_layernorm", embeds), self.norm("layers.0.hidden_norm", hidden)], -1)
        query, key = self.heads("q_proj", both, places), self.heads("k_proj", both, places)
        keys.append((key, self.heads("v_proj", both), starts))
        attended = self.linear("layers.0.self_attn.o_proj", self.attend(query, starts, keys))
        hidden = hidden + attended
        inner = self.norm("layers.0.post_attention_layernorm", hidden)
        gated = F.silu(self.linear("layers.0.mlp.gate_proj", inner)) * self.linear("layers.0.mlp.up_proj", inner)
        return hidden + self.linear("layers.0.mlp.down_proj", gated)

    def attend(self, query: Tensor, starts: Tensor, keys: list[Any]) -> Tensor:
        """Attend to the first step's keys up to a chain's start, and to the chain's own."""
        query = query.view(KV_HEADS, HEADS // KV_HEADS, len(starts), WIDTH) * WIDTH**-0.5
        (first, values, every), *later = keys
        seen = every[None] <= starts[:, None]
        scores = [(query @ first[:, None].transpose(-1, -2)).masked_fill(~seen, float("-inf"))]
        own = []
        for key, value, at in later:
            # A chain that goes on began with those before it.
            chosen = torch.searchsorted(at, starts)
            scores.append((query * key[:, None, chosen]).sum(-1, True))
            own.append(value[:, None, chosen])
        shares = torch.cat(scores, -1).softmax(-1, torch.float32).to(query.dtype)
        out = shares[..., : len(every)] @ values[:, None]
        for i, value in enumerate(own):
            out = out + shares[..., len(every) + i, None] * value
        return out.permute(2, 0, 1, 3).reshape(len(starts), -1)

    def step(self, batch: dict[str, Any], embedding: Tensor, decay: float) -> float:
        """Return the loss of all draft steps, and leave its gradients."""
        ids, mask = batch["input_ids"][0], batch["loss_mask"][0]
        base, count = batch["base_model_outputs"], len(ids)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.dtype == "bf16"):
            embeds = embedding[ids.roll(-1)].detach()
            hidden = self.linear("fc", base["aux_hidden_states"][0])
            keys, normed, spots = [], [], []
            starts = torch.arange(count)
            for step in range(self.case.steps):
                if step:
                    # Only the chains of which a later draft counts go on.
                    ends = starts + self.case.steps
                    going = (starts + step + 1 < count) & self._counts_later(mask, starts, step, ends)
                    hidden, starts = hidden[going], starts[going]
                hidden = self.layer(hidden, embeds[starts + step], starts, step, keys)
                places = starts + step + 1
                kept = (places < count) & mask[places.clamp(max=count - 1)]
                normed.append(self.norm("norm", hidden[kept]))
                spots.append(places[kept])
            return self.loss(normed, spots, base["base_model_hidden_states"][0], decay)

    def _counts_later(self, mask: Tensor, starts: Tensor, step: int, ends: Tensor) -> Tensor:
        counted = F.pad(mask.long().cumsum(0), (1, 0))
        last = (ends + 1).clamp(max=len(mask))
        return counted[last] > counted[(starts + step + 1).clamp(max=len(mask))]

    def loss(self, normed: list[Tensor], spots: list[Tensor], target: Tensor, decay: float) -> float:
        """Return the loss, and propagate its gradient, which the forward computes a block of tokens at a time."""
        grads = [torch.zeros_like(one) for one in normed]
        total = 0.0
        with torch.no_grad():
            for begin in range(0, len(target), BLOCK):
                block = range(begin, min(begin + BLOCK, len(target)))
                wanted = F.linear(target[block.start : block.stop].to(self.dtype), self.lm_head).float().softmax(-1)
                for step, (states, at) in enumerate(zip(normed, spots, strict=True)):
                    a, b = (int(torch.searchsorted(at, edge)) for edge in (block.start, block.stop))
                    if a == b:
                        continue
                    weight = decay**step / (len(at) + 1e-5)
                    goal = wanted[at[a:b] - begin]
                    logs = F.linear(states[a:b].to(self.dtype), self.lm_head).float().log_softmax(-1)
                    total -= weight * float((goal * logs).sum())
                    grads[step][a:b] = ((logs.exp_() - goal) * weight).to(self.dtype) @ self.lm_head
        torch.autograd.backward(normed, grads)
        return total


def main() -> None:
    """Print the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", default="*", help="the cases whose name fits")
    parser.add_argument("--modelopt", action="store_true", help="ModelOpt's own loop too, at up to 1,024 tokens")
    parser.add_argument("--markdown", action="store_true", help="write the table into docs/evidence/benchmarks.md")
    wish = parser.parse_args()
    rows = [report(case, wish.pairs, wish.modelopt) for case in CASES if fnmatchcase(case.name, wish.only)]
    if wish.markdown:
        write(rows)


def report(case: Case, pairs: int, modelopt: bool) -> str:
    """Return a row: kconv's over the plain step's, and how far loss and gradients are apart."""
    sides = SIDES if modelopt and case.tokens <= 1024 else SIDES[:2]
    found: dict[str, list[Step]] = {side: [] for side in sides}
    for pair in range(pairs):
        for side in sides if pair % 2 else sides[::-1]:
            found[side].append(apart(measure, side, case))
    plain, kconv = found["plain"], found["kconv"]
    apart_by = max(
        abs(one / plain[0].norms[name] - 1) for name, one in kconv[0].norms.items() if plain[0].norms[name] > 0
    )
    ratio = statistics.median(ours.seconds / theirs.seconds for ours, theirs in zip(kconv, plain, strict=True))
    cells = [
        case.name,
        *(f"{1e3 * statistics.median(one.seconds for one in found[side]) / case.tokens:.2f}" if side in found else ""
          for side in SIDES),
        f"**{ratio:.2f}**",
        f"{kconv[0].gflop / plain[0].gflop:.2f}",
        f"{kconv[0].mib:,.0f} / {plain[0].mib:,.0f} MiB",
        f"{abs(kconv[0].loss / plain[0].loss - 1):.0e}, {apart_by:.0e}",
    ]  # fmt: skip
    row = f"| {' | '.join(cells)} |"
    print(row, flush=True)
    return row


def write(rows: list[str]) -> None:
    """Put the table into docs/evidence/benchmarks.md."""
    write_section(
        "train-step",
        [
            "## A training step against plain PyTorch",
            "",
            "ms of the processor per token; kconv's time and products over the plain step's; memory of both; how far "
            "loss and gradients' norms are apart.",
            "",
            "| dtype, tokens, draft steps | plain | kconv | ModelOpt | time | products | memory | apart |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            closing("bench train-step"),
        ],
    )


if __name__ == "__main__":
    main()
