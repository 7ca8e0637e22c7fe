"""Calibration text: its batches, the part held out, and the acceptance that a head retains on it."""

from ..functions import make_callable

make_callable(__name__)
