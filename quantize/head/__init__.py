"""Quantize a draft head to FP8 or NVFP4: formats, input scales of its linear layers, proof, and plan."""
