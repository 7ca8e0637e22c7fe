"""Quantize a target to NVFP4: recipes, the packer, calibration with ModelOpt, and the streaming backend."""

from .. import _callable

_callable(__name__)
