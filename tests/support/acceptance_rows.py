"""A published figure with everything that it can state."""

from kconv.bench.acceptance import AcceptanceRow

FULL = {
    "metric": "al_incl_bonus", "value": 2.5, "draft_tokens": 3, "tree": "chain", "averaging": "macro_request",
    "engine": "vllm", "engine_version": "0.32.0", "target": "moonshotai/Kimi-K2.6", "precision": "NVFP4",
    "temperature": 0.0, "dataset": "MT-Bench", "revision": "a" * 40, "category": "math", "prompts": 10,
    "max_tokens": 1024, "date": "2026-11-21", "measured_by": "self",
}  # fmt: skip


def row(**changes) -> AcceptanceRow:
    return AcceptanceRow.model_validate(FULL | changes)
