"""Start, ask and watch a running engine."""
