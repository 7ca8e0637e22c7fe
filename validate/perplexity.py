"""Compare a quantized target with its source on held-out text.

Both run in fp32 on dequantized weights, one after the other and layer by layer from disk, so that a target of any size
can run; for every position only a loss and a token are kept. The inputs of NVFP4 linear layers are rounded by their
input_scale, as in an engine, so the difference covers everything that the format loses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint import formats
from ..checkpoint.folder import Checkpoint
from ..checkpoint.formats import fused_group
from ..checkpoint.source import Source
from ..checkpoint.tensors import read_tensor
from ..errors import PromptsInvalid
from ..measure.figures import PerplexityFigures
from ..measure.held_out import HeldOut, encode_held_out
from ..measure.statistics import standard_errors
from ..quantize.calibrate import LayerLinears, Layers
from ..quantize.experts import must_part
from ..quantize.head.formats import NVFP4
from ..rule import Found
from ..targets.config import read_target_config
from ..targets.weights import stored_weights
from .options import ValidateOptions
from .report import Finding
from .rules.comparisons import RULE

Say = Callable[[str], None]
PRECISION = "float32, on dequantized weights; inputs of NVFP4 linear layers rounded by their input_scale"
EXPERT = re.compile(r"\.experts\.\d+\.")
# By the suffix of a scale of the input.
FORMATS = {format_.inputs: format_ for format_ in (formats.NVFP4, formats.NVFP4_PACKED)}


def judge_perplexity(figures: PerplexityFigures) -> Iterator[Finding]:
    """Find a perplexity that grew by more than a release may lose without a reason."""
    if figures.is_larger:
        said = f"{figures.output:.4f}, the source's {figures.source:.4f} ({figures.growth:+.2%})"
        yield RULE["K395"].finding(Found("perplexity", f"on held-out text it is {said}"))


@dataclass(frozen=True)
class Run:
    """A target's result for each text: the loss of every token but the first, and the most likely token there."""

    losses: list[Tensor]
    likeliest: list[Tensor]


def encode_texts(options: ValidateOptions, source: Source) -> HeldOut:
    """Read held-out text for a target and its source; reads no weights, but checks that their layers fit into memory.

    Raises:
        TargetTooLarge: a layer of the source is larger than memory. Its output, dequantized, takes the same.
        PromptsInvalid: there are no prompts, they cannot be read, or none has two tokens.
        TargetInvalid, SuiteInvalid, HubRefused, HubUnreachable: see `encode_held_out`.
        SourceFormatUnknown, QuantizedWeightInvalid: kconv does not read the form in which the source is stored.
    """
    headers, config = source.open_headers(), read_target_config(source.fetch_config())
    must_part(stored_weights(headers, config), config, torch.float32, source.name)
    prompts, trusted = options.prompts or "", options.trust_remote_code
    held_out = encode_held_out(prompts, source, options.text_tokens, trust_remote_code=trusted)
    if max(map(len, held_out.tokens)) < 2:
        raise PromptsInvalid("no prompt has two tokens", where=prompts, fix="Use longer prompts.")
    return held_out


def measure_perplexity(
    output: Checkpoint, source: Checkpoint, held_out: HeldOut, say: Say = lambda _: None
) -> PerplexityFigures:
    """Run a quantized target and its source over held-out text, one after the other.

    Args:
        output: the quantized target.
        source: the target before quantization.
        held_out: the text for both, see `encode_texts`; no continuation is made.
        say: called with progress messages.

    Raises:
        TargetInvalid: one of the two cannot be built, or its tensors do not match its config.
        TargetTooLarge: a layer of one of the two is larger than the memory that is free by then.
        SourceFormatUnknown, QuantizedWeightInvalid: kconv does not read the form in which one is stored.
    """
    texts = [row for row in held_out.tokens if len(row) > 1]
    say("running the source over held-out text")
    before = _run(source, texts)
    say("running the quantized target over held-out text")
    return compare_runs(before, _run(output, texts))


@torch.no_grad()
def _run(checkpoint: Checkpoint, texts: Sequence[Sequence[int]]) -> Run:
    config = read_target_config(checkpoint.folder)
    layers = Layers(checkpoint, config, torch.float32)
    tokens = [torch.tensor(row) for row in texts]
    hidden = [layers.embed(row) for row in tokens]
    for _ in layers.run(hidden, lambda layer: RoundedInputs(layer, checkpoint, config.prefix)):
        pass
    lm_head = read_tensor(checkpoint.tensors[config.lm_head]).float()
    losses, likeliest = [], []
    for row, states in zip(tokens, hidden, strict=True):
        # What follows the last token is unknown.
        logits = F.linear(layers.norm(states[0, :-1]), lm_head)
        losses.append(F.cross_entropy(logits, row[1:], reduction="none").double())
        likeliest.append(logits.argmax(-1))
    return Run(losses, likeliest)


class RoundedInputs(LayerLinears):
    """Rounds the inputs of a layer's NVFP4 linear layers by their input_scale; without one they stay unchanged.

    Modules that an engine fuses share the largest scale, and so do a layer's experts, as in FlashInfer's and vLLM's own
    kernels
    (https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L2095).
    """

    def __init__(self, layer: str, target: Checkpoint, prefix: str) -> None:
        super().__init__(layer)
        self._scales: dict[str, float] = {}
        for name in target.tensors:
            module, _, suffix = name.removeprefix(prefix).rpartition(".")
            format_ = FORMATS.get(suffix)
            if format_ and module.startswith(f"{layer}."):
                group = _shared(module)
                scale = format_.stored_scale(float(read_tensor(target.tensors[name])))
                self._scales[group] = max(scale, self._scales.get(group, 0.0))

    def see(self, group: str, x: Tensor) -> Tensor:
        """See `LayerLinears.see`."""
        scale = self._scales.get(_shared(self.groups[group][0]))
        return x if scale is None else NVFP4.round(x, torch.tensor(scale))


def _shared(module: str) -> str:
    """Return a name that all modules with a common input scale share."""
    return fused_group(EXPERT.sub(".experts.", module))


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
