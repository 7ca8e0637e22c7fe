"""Measure acceptance: on servers or with kconv's own forward, and record it in a file."""

from .. import _callable

_callable(__name__)
