"""A head as a repository of the Hub holds it, for tests: its files, and how a client is taken offline."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

SECRET = "hf_aVerySecretToken"


def weights(fill: float = 1.0) -> dict[str, torch.Tensor]:
    """Return tensors of a megabyte."""
    return {"fc.weight": torch.full((512, 512), fill), "norm.weight": torch.ones(512, dtype=torch.bfloat16)}


def head(fill: float = 1.0) -> dict[str, bytes]:
    """Return the files of a repository: one safetensors of a megabyte, and some that kconv has no use for."""
    return {
        "config.json": b'{"hidden_size": 512}',
        "model.safetensors": save(weights(fill)),
        "README.md": b"# a head\n",
        "optimizer.pt": b"a pickle, as far as anybody knows",
        "checkpoint-1/model.safetensors": save(weights(9.0)),
    }


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take huggingface_hub offline, as HF_HUB_OFFLINE does."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
