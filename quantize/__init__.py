"""A target in NVFP4: recipes, the packer, calibration with ModelOpt, and the streaming backend."""

from .. import _callable

_callable(__name__)
