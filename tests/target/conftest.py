"""The trained tiny target, loaded."""

import pytest
import torch

from kconv.target.model import load_target


@pytest.fixture(scope="session")
def model(tiny_target):
    """Return the TEST target in fp32; tests must not change it."""
    return load_target(tiny_target, torch.float32)
