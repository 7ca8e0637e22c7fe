"""Sequences of operations; the demo is one of them."""
