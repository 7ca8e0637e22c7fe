"""Findings about a head: rules, parity, acceptance."""
