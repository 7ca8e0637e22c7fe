"""Engines as witnesses: started by path or reached by HTTP, never imported; nothing here imports torch."""
