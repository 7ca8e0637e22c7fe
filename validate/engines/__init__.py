"""Engines as witnesses: compare what an engine did with a head with kconv's own chain."""
