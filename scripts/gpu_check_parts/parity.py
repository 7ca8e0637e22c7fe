"""A converted head in bf16 on the card, against its source in fp32."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from .bench import Bench

# Logits of a bf16 head against fp32's, root mean square of the difference over that of the logits.
PARITY = 0.05


def check_parity(bench: Bench) -> dict[str, Any]:
    """A head converted to vLLM's layout, in bf16 on the card, against its source in fp32 on the CPU."""
    from kconv.checkpoint.bytes import write_safetensors
    from kconv.checkpoint.folder import open_checkpoint
    from kconv.checkpoint.tensors import entry
    from kconv.convert.execute import execute
    from kconv.convert.plan import plan
    from kconv.convert.read import read_head, read_weights
    from kconv.drafters.chain import draft_logits, overlap
    from kconv.drafters.forward import DraftHead
    from kconv.engines import by_name
    from kconv.engines.layout import stored
    from kconv.targets.config import parse_target_config
    from kconv.train.recipe import complete, read_recipe_file

    vocab, length = bench.size.parity_vocab, bench.size.parity_tokens
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = parse_target_config(bench.size.config | tokens | {"vocab_size": vocab})
    recipe = complete(read_recipe_file("eagle3-mla"), config, 8)
    spec = recipe.spec(config)
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return (1 + 0.1 * torch.randn(shape, generator=generator)).bfloat16()
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        source, out = Path(name) / "source", Path(name) / "vllm"
        source.mkdir()
        rows = stored(by_name("torchspec"), spec).values()
        write_safetensors(source / "model.safetensors", [entry(row.name, draw(row.expected.shape)) for row in rows])
        write_config = by_name("trtllm").write_config
        assert write_config is not None
        (source / "config.json").write_text(json.dumps(write_config(spec)))
        execute(plan(read_head(open_checkpoint(source)), by_name("vllm")), out)
        before, after = (read_head(open_checkpoint(folder)) for folder in (source, out))
        exact = DraftHead(before.spec, {n: w.float() for n, w in read_weights(before).items()})
        moved = {n: w.to(bench.device) for n, w in read_weights(after).items()}
        served = DraftHead(after.spec, moved)
    text = torch.randint(0, vocab, (1, length), generator=generator)
    states = torch.randn(1, length, len(spec.captured) * spec.target_hidden, generator=generator).bfloat16()
    with torch.no_grad():
        wanted = draft_logits(exact, text, states.float(), recipe.draft_steps)
        found = draft_logits(served, text.to(bench.device), states.to(bench.device), recipe.draft_steps).cpu().float()
        # The source's own first step as the target's distribution: what bf16 alone would cost a perfect head.
        aligned = torch.zeros(1, length, vocab)
        aligned[:, 1 : 1 + wanted.shape[2]] = wanted[0]
        share = float(overlap(found[:1], aligned, torch.arange(vocab)).mean())
    apart = float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
    assert apart < PARITY, f"the logits are apart by {apart:.3f} of their own size; {PARITY} is the most"
    return {
        "draft_steps": recipe.draft_steps,
        "vocab": vocab,
        "tokens": length,
        "logits_apart": round(apart, 5),
        "same_top_token": round(float((found.argmax(-1) == wanted.argmax(-1)).float().mean()), 4),
        "overlap_of_step_1": round(share, 5),
        "peak_gib": bench.peak(),
    }
