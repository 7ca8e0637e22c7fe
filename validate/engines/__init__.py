"""Engines as witnesses: started by path or reached by HTTP, never imported; only what simulates imports torch."""
