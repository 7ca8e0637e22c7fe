"""Heads that were really trained keep their acceptance: in bytes, where a latent of 32 holds what 128 KV dims say.

A target and a head as scripts/bench attention makes, trained for fewer steps; once, then found in the cache.
"""

from dataclasses import replace

import pytest
import torch

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.attention.convert import as_stored
from kconv.convert.attention.heal import heal
from kconv.convert.attention.swap import Shape, with_attention
from kconv.convert.attention.to_mla import convert_to_mla
from kconv.convert.read import read_head
from kconv.drafters.spec import Gqa
from kconv.measure.batches import Calibration, StatesBatch
from kconv.measure.compare import compare
from kconv.targets.config import read_target_config
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.recipe import DEMO, cache_root
from kconv.tiny.target import make_target, pack
from kconv.tiny.text import read_corpus
from kconv.train.data import cut_windows
from kconv.train.recipe import TINY_GQA
from kconv.train.run import head_key, train_head
from kconv.validate.parity import load_head

pytestmark = [pytest.mark.slow, pytest.mark.release, pytest.mark.usefixtures("short_gauges")]

RECIPE = replace(
    TINY_GQA, attention=Gqa(8, 2, 32), optimizer="adamw", lr=3e-3, rest_lr=3e-3, steps=200, batches=100
)  # fmt: skip


@pytest.fixture(scope="module")
def bed():
    """Return a trained head, states of training text, and batches of held-out text."""
    folder = make_target(replace(DEMO, vocab_size=259, steps=150, parts=1), cache_root())
    tokenizer, corpus = load_tokenizer(folder).inner, read_corpus()
    text, held = pack(tokenizer, corpus.train), pack(tokenizer, corpus.held_out)
    out = cache_root() / f"head-{head_key(folder, RECIPE, text, held)}"
    train_head(folder, out, RECIPE, text, held)
    head = load_head(read_head(open_checkpoint(out)), open_checkpoint(folder), read_target_config(folder))
    model = load_target(folder, torch.float32)

    def states(stream, batches):
        found = []
        for tokens in cut_windows(stream, 96, 8 * batches, seed=1).split(8):
            ran = run_target(model, tokens, RECIPE.captured)
            found.append(StatesBatch(tokens, ran.captured, ran.hidden))
        return found

    return head, Calibration(states(text, 30), model.lm_head.weight.detach(), "docstrings"), states(held, 8)


def test_gqa_to_mla_keeps_99_percent_without_a_gradient_step_and_more_after_20(bed):
    head, calibration, held_out = bed
    attention, found = convert_to_mla(head, calibration, Shape(latent=32, rotary=16, q_lora_rank=128))
    start = with_attention(head, attention)
    unhealed = compare(head, start, calibration, held_out)
    # Each head turns 16 pairs, MLA 8: the fastest 8 as they are.
    assert found.ladder == "high" and found.ladder_errors["high"] < found.ladder_errors["stride"]
    assert unhealed.kept >= 0.99
    assert unhealed.kept_error < 0.002
    # The gauge of a latent is nearly singular, and bf16 must not make it felt.
    assert compare(head, as_stored(start, "BF16"), calibration, held_out).kept > unhealed.kept - 0.002
    healed = compare(head, heal(head, start, calibration, 20), calibration, held_out)
    assert healed.kept >= 0.995
    assert healed.kept > unhealed.kept
