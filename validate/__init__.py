"""Findings about a head: rules, parity, acceptance."""

from ..functions import make_callable

make_callable(__name__)
