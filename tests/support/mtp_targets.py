"""The tiny target as DeepSeek-V3 is: with a layer behind its last that drafts one token further (MTP).

Trained on the target's own states as DeepSeek-V3's report has it (arXiv 2412.19437, section 2.2): norms of the next
token's embedding and of the last state, one projection of both, a decoder layer, and a norm before the output matrix.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, rms_norm
from transformers.masking_utils import create_causal_mask

from kconv.targets.config import parse_target_config
from kconv.targets.model import build_target, load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.target import pack
from kconv.tiny.text import read_corpus

# What vLLM takes for DeepSeek-V3's MTP; of "kimi_k2" it reads none.
MODEL_TYPE = "deepseek_v3"


class Mtp(torch.nn.Module):
    """An MTP layer, by the names that it has on disk."""

    def __init__(self, target: Any, config: Any) -> None:
        super().__init__()
        hidden, self.eps, own = config.hidden, target.config.rms_norm_eps, config.layers
        deeper = replace(config, text=config.text | {"num_hidden_layers": own + 1, "num_nextn_predict_layers": 0})
        self.block = build_target(deeper, torch.float32).model.layers[own]
        self.block.load_state_dict(target.model.layers[own - 1].state_dict())
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.enorm, self.hnorm, self.norm = (torch.nn.Parameter(torch.ones(hidden)) for _ in range(3))

    def forward(self, target: Any, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token after the next, at each place of ids [B, T] that has a next one."""
        with torch.no_grad():
            states = target.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
            embedded = target.model.embed_tokens(ids[:, 1:])
        # As vLLM does at a text's first place:
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_mtp.py#L112-L113
        embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], 1)
        both = [rms_norm(x, x.shape[-1:], w, self.eps) for x, w in ((embedded, self.enorm), (states, self.hnorm))]
        x = self.eh_proj(torch.cat(both, -1))
        places = torch.arange(x.shape[1]).unsqueeze(0)
        mask = create_causal_mask(
            config=target.config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=places
        )
        turned = target.model.rotary_emb(x, position_ids=places)
        x = self.block(x, attention_mask=mask, position_ids=places, position_embeddings=turned, use_cache=False)
        return target.lm_head(rms_norm(x, x.shape[-1:], self.norm, self.eps))

    def stored(self, target: Any, layer: int) -> dict[str, torch.Tensor]:
        """Return its tensors by the Hub's names; DeepSeek-V3 stores embedding and output matrix once more."""
        found = {
            "enorm": self.enorm,
            "hnorm": self.hnorm,
            "eh_proj": self.eh_proj.weight,
            "shared_head.norm": self.norm,
        }
        found |= {"embed_tokens": target.model.embed_tokens.weight, "shared_head.head": target.lm_head.weight}
        made = {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in found.items()}
        for name, tensor in self.block.state_dict().items():
            base = f"model.layers.{layer}.{name}"
            if tensor.dim() == 3:
                parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
                for i, expert in enumerate(tensor):
                    for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                        made[f"{base.rpartition('.')[0]}.{i}.{part}.weight"] = rows
            else:
                made[base] = tensor
        return {name: tensor.detach().clone().contiguous() for name, tensor in made.items()}


def write_with_mtp(source: Path, folder: Path, *, steps: int = 0, seed: int = 0) -> Path:
    """Write a plain target with one MTP layer more; untrained with no steps."""
    return make_with_mtp(source, folder, steps=steps, seed=seed)[0]


def make_with_mtp(source: Path, folder: Path, *, steps: int, seed: int = 0) -> tuple[Path, Any, Mtp]:
    """Return what `write_with_mtp` writes, and its target and MTP layer in memory."""
    config = parse_target_config(json.loads((source / "config.json").read_text()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target = load_target(source, torch.float32).requires_grad_(False)
        mtp = Mtp(target, config)
        if steps:
            _train(mtp, target, pack(load_tokenizer(source).inner, read_corpus().train), steps)
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors") | mtp.stored(target, config.layers)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = config.raw | {"num_nextn_predict_layers": 1, "model_type": MODEL_TYPE}
    (folder / "config.json").write_text(json.dumps(said, indent=1))
    return folder, target, mtp


@torch.no_grad()
def count_drafts(target: Any, mtp: Mtp, prompt: list[int], output: list[int]) -> tuple[int, int]:
    """Return how many drafts of one token an MTP layer makes while a text is generated, and how many are accepted."""
    ids = torch.tensor([prompt + output])
    drafts, at, made, accepted = mtp(target, ids)[0].argmax(-1), len(prompt) - 1, 0, 0
    while at + 2 < ids.shape[1]:
        right = int(drafts[at] == ids[0, at + 2])
        made, accepted, at = made + 1, accepted + right, at + 1 + right
    return made, accepted


def _train(mtp: Mtp, target: Any, tokens: torch.Tensor, steps: int, *, batch: int = 8, seq: int = 96) -> None:
    optimizer = torch.optim.AdamW(mtp.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - seq - 1, (batch, 1), generator=generator)
        ids = tokens[starts + torch.arange(seq)]
        with torch.no_grad():
            chosen = target(input_ids=ids, use_cache=False).logits[:, 1:].argmax(-1)
        # A draft is accepted if the target would choose it too.
        loss = cross_entropy(mtp(target, ids).flatten(0, 1), chosen.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(mtp.parameters(), 1.0)
        optimizer.step()
        schedule.step()
