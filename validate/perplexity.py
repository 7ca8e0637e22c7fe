"""Compare a quantized target with its source on held-out text.

Both run in fp32 on dequantized weights, one after the other and layer by layer from disk, so that a target of any size
can run; for every position only a loss and a token are kept. The inputs of NVFP4 linear layers are rounded by their
input_scale, as in an engine, so the difference covers everything that the format loses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.folder import Checkpoint, open_checkpoint
from ..checkpoint.formats import INPUT_SCALE, fused_group
from ..checkpoint.source import Source
from ..checkpoint.tensors import read_rows, read_tensor
from ..drafters.attention import rms_norm
from ..errors import PromptsInvalid
from ..measure.figures import PerplexityFigures
from ..measure.held_out import encode_held_out
from ..measure.statistics import standard_errors
from ..quantize.calibrate import LayerLinears, Layers
from ..quantize.experts import must_part
from ..quantize.head.formats import NVFP4
from ..targets.config import read_target_config
from ..targets.weights import stored_weights

Say = Callable[[str], None]
EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class HeldOutText:
    """The text for a target and its source.

    Attributes:
        source: the target before quantization.
        prompts: a JSONL file, or a suite's name and its revision on the Hub; their own text is read, no continuation.
        tokens: length to which texts are cut.
        trust_remote_code: whether the source's tokenizer may run its own Python code.
    """

    source: Source
    prompts: str
    tokens: int = 96
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Run:
    """A target's result for each text: the loss of every token but the first, and the most likely token there."""

    losses: list[Tensor]
    likeliest: list[Tensor]


@dataclass(frozen=True)
class ReadyText:
    """Encoded held-out text.

    Attributes:
        folder: the source.
        texts: token ids of each text, at least two.
        about: a description, for the record.
    """

    folder: Path
    texts: Sequence[Sequence[int]]
    about: dict[str, object]


def prepare_text(text: HeldOutText) -> ReadyText:
    """Read and encode held-out text, and check that the targets' layers fit into memory; reads no weights.

    Raises:
        PromptsInvalid: there are none, they cannot be read, or none has two tokens.
        TargetTooLarge: a layer of the source is larger than memory. Its output, dequantized, takes the same.
        TargetInvalid, SuiteInvalid, HubRefused, HubUnreachable: see `encode_held_out`.
        SourceFormatUnknown, QuantizedWeightInvalid: kconv does not read the form in which the source is stored.
    """
    held_out = encode_held_out(text.prompts, text.source, text.tokens, trust_remote_code=text.trust_remote_code)
    texts = [row for row in held_out.tokens if len(row) > 1]
    if not texts:
        raise PromptsInvalid("no prompt has two tokens", where=text.prompts, fix="Use longer prompts.")
    check_layers_fit(text.source)
    folder = text.source.fetch_model()
    about: dict[str, object] = {
        "prompts": held_out.describe() | {"text_tokens": text.tokens},
        "dtype": "float32, on dequantized weights; inputs of NVFP4 linear layers rounded by their input_scale",
    }
    return ReadyText(folder, texts, about)


def check_layers_fit(target: Source) -> None:
    """Raise TargetTooLarge if a layer of a target is larger than memory; reads and downloads no weights."""
    headers, config = target.open_headers(), read_target_config(target.fetch_config())
    must_part(stored_weights(headers, config), config, torch.float32, target.name)


def measure_perplexity(output: Source, text: ReadyText, say: Say = lambda _: None) -> PerplexityFigures:
    """Run a quantized target and its source over held-out text, one after the other.

    Args:
        output: the quantized target.
        text: its source, and the text for both.
        say: called with progress messages.

    Raises:
        TargetInvalid: one of the two cannot be built, or its tensors do not match its config.
        TargetTooLarge: a layer of one of the two is larger than the memory that is free by then.
        SourceFormatUnknown, QuantizedWeightInvalid: kconv does not read the form in which one is stored.
    """
    say("running the source over held-out text")
    source = _run(text.folder, text.texts)
    say("running the quantized target over held-out text")
    return compare_runs(source, _run(output.fetch_model(), text.texts))


@torch.no_grad()
def _run(folder: Path, texts: Sequence[Sequence[int]]) -> Run:
    checkpoint, config = open_checkpoint(folder), read_target_config(folder)
    layers = Layers(checkpoint, config, torch.float32)
    tokens = [torch.tensor(row) for row in texts]
    hidden = [read_rows(checkpoint.tensors[config.embed_tokens], row).float().unsqueeze(0) for row in tokens]
    for _ in layers.run(hidden, lambda layer: RoundedInputs(layer, checkpoint, config.prefix)):
        pass
    norm = read_tensor(checkpoint.tensors[f"{config.prefix}model.norm.weight"]).float()
    lm_head = read_tensor(checkpoint.tensors[config.lm_head]).float()
    losses, likeliest = [], []
    for row, states in zip(tokens, hidden, strict=True):
        # What follows the last token is unknown.
        logits = F.linear(rms_norm(states[0, :-1], norm, float(config.text["rms_norm_eps"])), lm_head)
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
            if suffix == INPUT_SCALE and module.startswith(f"{layer}."):
                group = _shared(module)
                scale = float(read_tensor(target.tensors[name]))
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
