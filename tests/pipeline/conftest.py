"""The Hub's stand-in, as a fixture."""

from support.hub import hub

__all__ = ["hub"]
