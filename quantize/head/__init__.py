"""A draft head in FP8 or NVFP4: its formats, the scales of what its linears read, the proof, and the plan."""
