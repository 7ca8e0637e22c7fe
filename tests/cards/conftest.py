"""The Hub's stand-in, and a folder to publish, as fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hub import Hub, hub
from support.releases import TOKEN, write_release

__all__ = ["hub"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_release(tmp_path / "head")


@pytest.fixture
def waits(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Show a token that the stand-in accepts, and note how long anybody would have waited."""
    waited: list[float] = []
    hub.tokens = {TOKEN}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("time.sleep", waited.append)
    return waited
