"""What several rooms' tests stand on: a cache inside the repository, and a tiny target that was really trained."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A machine that is slow for a moment is no fault of the example that it was at.
settings.register_profile("kconv", deadline=None)
settings.load_profile("kconv")
os.environ.setdefault("KCONV_CACHE", str(Path(__file__).parent.parent / ".cache"))


@pytest.fixture(scope="session")
def tiny_target() -> Path:
    """Return the folder of the trained TEST target; trained once, then found in the cache."""
    from kconv.tiny.recipe import TEST, cache_root
    from kconv.tiny.target import make_target

    return make_target(TEST, cache_root())
