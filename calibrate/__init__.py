"""What is fitted or scaled on text: its batches, the part held out, and what a head keeps on it."""

from .. import _callable

_callable(__name__)
