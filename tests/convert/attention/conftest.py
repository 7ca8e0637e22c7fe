"""Heads of random weights for the tests of attention conversion, and texts of random states."""

from dataclasses import replace

import pytest
import torch
from support.heads import KIMI_MLA, small

from kconv.drafters.forward import DraftHead
from kconv.drafters.slots import needs
from kconv.drafters.spec import Gqa, HeadSpec, Mla, Rope, Yarn
from kconv.measure.batches import Calibration, StatesBatch

YARN = Yarn(32.0, 64, beta_fast=4.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=0.8)
MLA = small(
    KIMI_MLA,
    16,
    23,
    attention=Mla(4, q_lora_rank=10, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=7),
    target_hidden=12,
    intermediate=20,
    rope=Rope(100.0, YARN),
    dtype="F32",
    max_positions=64,
)
GQA = replace(MLA, attention=Gqa(4, kv_heads=2, head_dim=8), rope=Rope(100.0))


def _head(spec: HeadSpec, seed: int = 0) -> DraftHead:
    """Return a head in fp64, so that what is exact agrees to its last digits."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, need in needs(spec).items():
        values = torch.randn(need.shape, generator=generator, dtype=torch.float64)
        if name == "d2t":
            kept = torch.randperm(spec.vocab, generator=generator)[: spec.draft_vocab].sort().values
            values = kept - torch.arange(spec.draft_vocab)
        elif name == "t2d":
            continue
        elif values.ndim == 2:
            values = values if name == "embed_tokens" else values * values.shape[1] ** -0.5
        else:
            values = 1.0 + 0.3 * values
        weights[name] = values
    return DraftHead(spec, weights)


def _calibration(spec: HeadSpec, batches: int = 20, rows: int = 4, length: int = 24, seed: int = 0) -> Calibration:
    """Return states that follow from the tokens, so that there is something to be learned from them."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(spec.vocab, spec.target_hidden, generator=generator, dtype=torch.float64)
    mixes = torch.randn(len(spec.captured), spec.target_hidden, spec.target_hidden, generator=generator).double()
    found = []
    for _ in range(batches):
        tokens = torch.randint(spec.vocab, (rows, length), generator=generator)
        hidden = table[tokens] + 0.5 * table[tokens.roll(1, 1)]
        captured = torch.cat([torch.tanh(hidden @ mix) for mix in mixes], dim=-1)
        found.append(StatesBatch(tokens, captured, hidden))
    lm_head = torch.randn(spec.vocab, spec.target_hidden, generator=generator, dtype=torch.float64)
    return Calibration(found, lm_head, "random states")


@pytest.fixture(scope="session")
def make_head():
    return _head


@pytest.fixture(scope="session")
def make_calibration():
    return _calibration


@pytest.fixture(scope="session")
def mla_spec():
    return MLA


@pytest.fixture(scope="session")
def gqa_spec():
    return GQA


@pytest.fixture(scope="module")
def gqa(make_head, gqa_spec):
    return make_head(gqa_spec)


@pytest.fixture(scope="module")
def mla(make_head, mla_spec):
    return make_head(mla_spec)


@pytest.fixture(scope="module")
def states(make_calibration, gqa_spec):
    return make_calibration(gqa_spec)
