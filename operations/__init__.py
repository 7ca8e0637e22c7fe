"""What kconv does: one typed request per operation. Nothing is imported before it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Operation


@dataclass(frozen=True)
class Entry:
    """An operation as help lists it, before it is imported: its module and class, its heading, and what it does."""

    module: str
    cls: str
    job: str
    summary: str


# Every operation, by its name in recipes and in Python. On the command line `convert` is a command for each layout that
# can be written (`to-vllm`), and words are joined by dashes.
OPERATIONS = {
    "tiny": Entry("tiny", "Tiny", "Try it", "A tiny Kimi-K2 that is really trained, and texts for it."),
    "inspect": Entry("inspect", "Inspect", "Look", "Say what a head is, from its config and headers."),
    "vocab": Entry("vocab", "Vocab", "Look", "Examine a head's draft vocabulary, or write the head with another."),
    "convert": Entry("convert", "Convert", "Convert", "Write a head in an engine's layout."),
    "verify": Entry("verify", "Verify", "Convert", "Re-check every byte of an output against its manifest."),
    "validate": Entry(
        "validate",
        "Validate",
        "Check and measure",
        "Check a head or a target before it is served: files, config, values, engines.",
    ),
    "bench": Entry(
        "bench", "Bench", "Check and measure", "Measure acceptance length, on a server or by kconv's own forward."
    ),
    "compare": Entry("bench", "Compare", "Check and measure", "Put acceptance figures of several heads side by side."),
    "curve": Entry("bench", "Curve", "Check and measure", "Write acceptance by K as InferenceX's golden YAML."),
    "quote": Entry("bench", "Quote", "Check and measure", "Take figures of vllm bench, AIPerf or SGLang as rows."),
    "states": Entry(
        "states",
        "States",
        "Make",
        "Write a target's hidden states, for calibration, training and validation without it.",
    ),
    "generate": Entry("generate", "Generate", "Make", "Have the served target answer prompts, to train a head on."),
    "train": Entry("train", "Train", "Make", "Train an Eagle3 head with ModelOpt, or train one on."),
    "calibrate": Entry("quantize", "Calibrate", "Make", "Find what a target's activations reach, for kconv quantize."),
    "quantize": Entry("quantize", "Quantize", "Make", "Write a target in NVFP4, shard by shard."),
    "quantize_head": Entry("quantize", "QuantizeHead", "Make", "Write a draft head's linears in FP8 or NVFP4."),
    "card": Entry("card", "Card", "Release", "Write a head's README.md, its licenses and its notice."),
    "publish": Entry("publish", "Publish", "Release", "Put a finished folder on the Hub, if all checks pass."),
}


def load(name: str) -> type[Operation]:
    """Return an operation by its name.

    Raises:
        KeyError: there is none.
    """
    entry = OPERATIONS[name]
    return getattr(import_module(f".{entry.module}", __name__), entry.cls)
