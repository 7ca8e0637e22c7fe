"""What an Eagle3 head is: spec, slots, contract, RoPE, the reference forward, the drafting chain."""
