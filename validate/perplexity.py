"""A quantized target on held-out text, beside its source.

Both are computed in fp32 on dequantized weights, one after the other: of each only a loss and a token are kept for
every place. So what differs is the weights' rounding alone; an engine's own kernels round activations too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..checkpoint.source import Source
from ..errors import PromptsInvalid
from ..targets.model import check_memory, load_target
from .figures import PerplexityFigures
from .held_out import encode_held_out
from .measure import standard_errors

Say = Callable[[str], None]
INSTEAD = "Leave --prompts out: the noise of every tensor needs no model."


@dataclass(frozen=True)
class HeldOutText:
    """What a target and its source are both run over.

    Attributes:
        source: what the target was quantized from.
        prompts: a JSONL file, or a suite's name and its revision on the Hub; their own text is read, no continuation.
        tokens: texts are cut to this.
        trust_remote_code: whether the source's tokenizer may run code of its own.
    """

    source: Source
    prompts: str
    tokens: int = 96
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Run:
    """What a target says of each text: loss of every token but the first, and the likeliest token there."""

    losses: list[Tensor]
    likeliest: list[Tensor]


@dataclass(frozen=True)
class ReadyText:
    """Held-out text that can be run over.

    Attributes:
        folder: the source, which fits into memory.
        texts: token ids of each text, two at the least.
        about: what it is, for the record.
    """

    folder: Path
    texts: Sequence[Sequence[int]]
    about: dict[str, object]


def prepare_text(text: HeldOutText) -> ReadyText:
    """Read and encode held-out text, and see that the targets fit into memory; no weight is read.

    Raises:
        PromptsInvalid: there are none, they cannot be read, or none has two tokens.
        TargetTooLarge: the source is larger than what memory is left. Its output, dequantized, takes the same.
        TargetInvalid, SuiteInvalid, HubRefused, HubUnreachable: see `encode_held_out`.
        SourceFormatUnknown, TensorShape: the source is stored in a form that is not read.
    """
    held_out = encode_held_out(text.prompts, text.source, text.tokens, trust_remote_code=text.trust_remote_code)
    texts = [row for row in held_out.tokens if len(row) > 1]
    if not texts:
        raise PromptsInvalid(
            "no prompt has two tokens", where=text.prompts, fix="Give prompts with text to be predicted in them."
        )
    check_memory(text.source.open_headers(), torch.float32, instead=INSTEAD)
    folder = text.source.fetch_model()
    about: dict[str, object] = {
        "prompts": held_out.describe() | {"text_tokens": text.tokens},
        "dtype": "float32, on dequantized weights",
        "not_run": "input_scale: activations are not rounded, as an engine rounds them",
    }
    return ReadyText(folder, texts, about)


def measure_perplexity(output: Source, text: ReadyText, say: Say = lambda _: None) -> PerplexityFigures:
    """Run a quantized target and its source over held-out text, one after the other.

    Args:
        output: the quantized target.
        text: its source, and what both are run over.
        say: told what is going on.

    Raises:
        TargetInvalid: one of the two cannot be built, or has other tensors than its config asks for.
        TargetTooLarge: one of the two is larger than what memory is left by now.
        SourceFormatUnknown, TensorShape: one is stored in a form that is not read.
    """
    say("running the source over held-out text")
    source = _run(text.folder, text.texts)
    say("running the quantized target over held-out text")
    return compare_runs(source, _run(output.fetch_model(), text.texts))


@torch.no_grad()
def _run(folder: Path, texts: Sequence[Sequence[int]]) -> Run:
    model = load_target(folder, torch.float32, instead=INSTEAD)
    losses, likeliest = [], []
    for row in texts:
        tokens = torch.tensor([row])
        # [1, T, vocab]; what follows the last token is not known.
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
        losses.append(cross_entropy(logits, tokens[0, 1:], reduction="none").double())
        likeliest.append(logits.argmax(-1))
    return Run(losses, likeliest)


def compare_runs(source: Run, output: Run) -> PerplexityFigures:
    """Return the figures of two runs over the same texts."""
    differences = [after - before for before, after in zip(source.losses, output.losses, strict=True)]
    tokens = sum(len(row) for row in differences)
    ratio = float(torch.cat(differences).sum()) / tokens
    moved = torch.stack([(row - ratio).sum() / tokens for row in differences])[:, None]
    same = sum(int((a == b).sum()) for a, b in zip(source.likeliest, output.likeliest, strict=True))
    return PerplexityFigures(
        prompts=len(differences),
        tokens=tokens,
        source=math.exp(float(torch.cat(source.losses).mean())),
        output=math.exp(float(torch.cat(output.losses).mean())),
        log_ratio=ratio,
        log_ratio_se=standard_errors(moved)[0],
        top1=same / tokens,
    )
