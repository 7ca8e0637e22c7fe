"""A small head held against an engine."""

from __future__ import annotations

from kconv.drafters.spec import Gqa, HeadSpec, Rope

SPEC = HeadSpec(
    attention=Gqa(4, kv_heads=2, head_dim=16), hidden=64, target_hidden=64, intermediate=96, layers=1, vocab=512,
    draft_vocab=2, rope=Rope(1e4), captured=(1, 3, 5), eps=1e-5, dtype="F32", max_positions=512,
)  # fmt: skip
STEPS, PROMPT_TOKENS, NEW_TOKENS = 3, 12, 10


def metrics(drafts: int, accepted: tuple[int, ...], base: int = 0) -> str:
    """Return vLLM's counters in Prometheus' text, `base` above what was counted."""
    name = "vllm:spec_decode_num_"
    lines = [
        f"{name}drafts_total {drafts + base}",
        f"{name}draft_tokens_total {STEPS * drafts + base}",
        f"{name}accepted_tokens_total {sum(accepted) + base}",
    ]
    places = [
        f'{name}accepted_tokens_per_pos_total{{position="{i}"}} {count + base}' for i, count in enumerate(accepted)
    ]
    return "\n".join(lines + places) + "\n"
