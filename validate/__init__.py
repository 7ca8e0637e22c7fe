"""Findings about a head: rules, parity, acceptance."""

from .. import _callable

_callable(__name__)
