"""What a target says before its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import TrainingDataInvalid

# SGLang's and TensorRT-LLM's name of what a reasoning parser took out of an answer, and vLLM's:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/entrypoints/openai/chat_completion/protocol.py#L79
REASONING = "reasoning_content"
NAMES = (REASONING, "reasoning")
# How Kimi's chat templates write an answer whose reasoning they leave out, as it is history (commit 6126819):
# https://huggingface.co/moonshotai/Kimi-K2-Thinking/blob/main/chat_template.jinja
OPEN, CLOSE = "<think>", "</think>"


def read_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's reasoning under the one name that kconv writes; empty where it has none."""
    found = next((message[name] for name in NAMES if message.get(name)), None)
    return {} if found is None else {REASONING: found}


def add_reasoning(before: str, after: str, reasoning: str, where: str) -> str:
    """Return a rendered dialogue with the reasoning of its last answer in the place that was left empty for it.

    Args:
        before: the dialogue up to where that answer begins.
        after: the dialogue with the answer, as the chat template writes it without the reasoning.
        reasoning: what the target said before the answer.
        where: the row, for messages.

    Raises:
        TrainingDataInvalid: the template has no place for it.
    """
    # What the target is asked with may end in the opening tag already.
    start = len(before.removesuffix(OPEN))
    gap, empty, answer = after[start:].partition(OPEN + CLOSE)
    # Behind other text the tags are the answer's own.
    if not empty or gap.strip():
        raise TrainingDataInvalid(
            f"this row has {REASONING}, and the target's chat template no place for it ({OPEN}{CLOSE})",
            where=where,
            fix="Give answers of this very target, or the chat template that it is served with.",
        )
    return f"{after[:start]}{gap}{OPEN}{reasoning}{CLOSE}{answer}"
