"""Measuring: texts, drafting over them, and the acceptance that a head has and retains."""
