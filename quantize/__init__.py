"""Quantize a target to NVFP4: recipes, the packer, calibration with ModelOpt, and the streaming backend."""

from ..functions import make_callable

make_callable(__name__)
