"""Measuring acceptance: on servers, by kconv's own forward, and what was measured as a file."""

from .. import _callable

_callable(__name__)
