"""Measure acceptance: on servers or with kconv's own forward, and record it in a file."""

from ..functions import make_callable

make_callable(__name__)
