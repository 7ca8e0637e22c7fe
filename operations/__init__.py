"""What kconv does: one typed request per operation. Each is imported on first use."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Operation


@dataclass(frozen=True)
class Entry:
    """An operation as help lists it, before it is imported: its module and class, its heading, and its summary."""

    module: str
    cls: str
    job: str
    summary: str


# Every operation, by its name in recipes and in Python. On the command line `convert` is one command per layout that
# kconv writes (`to-vllm`), and words are joined by dashes.
OPERATIONS = {
    "tiny": Entry("tiny", "Tiny", "Try it", "Train a tiny Kimi-K2, and write texts for it."),
    "inspect": Entry("inspect", "Inspect", "Look", "Show what a checkpoint is, from its config and headers."),
    "diff": Entry("diff", "Diff", "Look", "Show what differs between two drafters."),
    "env": Entry("env", "Env", "Look", "Show versions and the machine, for a bug report."),
    "vocab": Entry("vocab", "Vocab", "Look", "Examine a head's draft vocabulary, or change it."),
    "convert": Entry("convert", "Convert", "Convert", "Write a head in an engine's layout."),
    "verify": Entry("verify", "Verify", "Convert", "Check every byte of an output against its manifest."),
    "validate": Entry(
        "validate",
        "Validate",
        "Check and measure",
        "Check a head or a target before you serve it.",
    ),
    "bench": Entry("bench", "Bench", "Check and measure", "Measure acceptance length, on a server or offline."),
    "compare": Entry("bench", "Compare", "Check and measure", "Compare acceptance figures of several heads."),
    "curve": Entry("bench", "Curve", "Check and measure", "Write acceptance by K as InferenceX's golden YAML."),
    "quote": Entry("bench", "Quote", "Check and measure", "Take figures of vllm bench, AIPerf or SGLang as rows."),
    "states": Entry(
        "states",
        "States",
        "Make",
        "Store a target's hidden states for training, calibration and validation.",
    ),
    "generate": Entry("generate", "Generate", "Make", "Let the served target answer prompts, as training data."),
    "train": Entry("train", "Train", "Make", "Train an Eagle3 head with ModelOpt, or continue training one."),
    "calibrate": Entry("quantize", "Calibrate", "Make", "Collect activation ranges for kconv quantize."),
    "quantize": Entry("quantize", "Quantize", "Make", "Quantize a target to NVFP4, shard by shard."),
    "quantize_head": Entry("quantize", "QuantizeHead", "Make", "Quantize a draft head to FP8 or NVFP4."),
    "card": Entry("card", "Card", "Release", "Write a model card with its licenses and notice."),
    "publish": Entry("publish", "Publish", "Release", "Publish a folder to the Hub after all release checks pass."),
}


def load(name: str) -> type[Operation]:
    """Return an operation by its name.

    Raises:
        KeyError: there is no such operation.
    """
    entry = OPERATIONS[name]
    return getattr(import_module(f".{entry.module}", __name__), entry.cls)
