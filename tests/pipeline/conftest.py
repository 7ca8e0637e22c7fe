"""The Hub's stand-in, and a small release, as fixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.hub import hub
from support.releases import TOKEN, carry_out, write_acceptance, write_inputs

__all__ = ["hub"]


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return write_inputs(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def token(hub, monkeypatch):
    hub.tokens = {TOKEN}
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def made(recipe, root, tmp_path, token) -> dict[str, Any]:
    """Carry a release out, and return its recipe."""
    carry_out(recipe, root, only="vllm")
    write_acceptance(root / "vllm")
    (root / "vllm" / "acceptance.json").rename(tmp_path / "acceptance.json")
    carry_out(recipe, root)
    return recipe
