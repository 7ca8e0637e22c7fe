"""A target in NVFP4: recipes, the packer, calibration with ModelOpt, and the streaming road."""

from .. import _callable

_callable(__name__)
