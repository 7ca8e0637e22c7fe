"""Engines as witnesses: what one did with a head is held against what kconv's own chain says."""
