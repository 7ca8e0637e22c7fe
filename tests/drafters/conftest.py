"""Random heads for the tests of this room."""

from dataclasses import replace

import pytest
import torch
from support.heads import KIMI_MLA, small

from kconv.drafters.forward import DraftHead
from kconv.drafters.slots import needs
from kconv.drafters.spec import Gqa, HeadSpec, Rope


def _spec(**changes) -> HeadSpec:
    """Return a small spec with the given fields changed."""
    base = small(
        KIMI_MLA,
        24,
        11,
        attention=Gqa(heads=4, kv_heads=2, head_dim=8),
        target_hidden=20,
        intermediate=40,
        rope=Rope(theta=50.0),
        dtype="F32",
        max_positions=64,
    )
    return replace(base, **changes)


def _weights(spec: HeadSpec, seed: int) -> dict[str, torch.Tensor]:
    """Return random weights: gains near 1, matrices that keep a vector's size, d2t a random choice of ids."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, need in needs(spec).items():
        values = torch.randn(need.shape, generator=generator)
        if name == "d2t":
            ids = torch.randperm(spec.vocab, generator=generator)[: spec.draft_vocab]
            weights[name] = ids - torch.arange(spec.draft_vocab)
        elif name == "t2d":
            continue
        elif values.ndim == 2:
            weights[name] = values if name == "embed_tokens" else values * values.shape[1] ** -0.5
        else:
            weights[name] = values * 0.3 + (0.0 if name.endswith("bias") else 1.0)
    return weights


@pytest.fixture(scope="session")
def make_spec():
    return _spec


@pytest.fixture(scope="session")
def make_weights():
    return _weights


@pytest.fixture(scope="session")
def make_head():
    return lambda spec, seed=0: DraftHead(spec, _weights(spec, seed))
