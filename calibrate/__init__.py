"""Calibration text: its batches, the part held out, and the acceptance that a head retains on it."""

from .. import _callable

_callable(__name__)
