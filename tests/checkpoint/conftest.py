"""The Hub's stand-in and a folder of two shards, as fixtures."""

import json

import pytest
import torch
from safetensors.torch import save_file
from support.hub import hub

from kconv.checkpoint.folder import INDEX

__all__ = ["hub"]


@pytest.fixture
def two_shards(tmp_path):
    """A folder of two shards and an index, as safetensors itself writes them."""
    folder = tmp_path / "local"
    folder.mkdir()
    shards = {"one.safetensors": {"a": torch.rand(256, 512)}, "two.safetensors": {"b": torch.rand(64, 512)}}
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    placed = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (folder / "config.json").write_text('{"hidden_size": 512}')
    return folder
