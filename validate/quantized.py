"""Compare a quantized target with the target that it was made from, tensor by tensor.

Perplexity is insensitive: it hardly moves when a whole expert's scale is doubled. The noise of one tensor shows it:
NVFP4
leaves about 20 dB of signal over noise, a doubled scale 0 dB, swapped nibbles or an exchanged gate less than 0.

Two parts of its config are not compared, since exporters write both anew: token ids, which generation_config.json also
states, and the part of a wrapped target that is not a text model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch

from ..checkpoint.bytes import digest
from ..checkpoint.folder import Checkpoint
from ..checkpoint.formats import FP8_PB_WO, NVFP4, NVFP4_PACKED
from ..drafters.rope_keys import read_rope
from ..errors import ComparisonUnfit, KconvError
from ..measure.figures import NoiseFigures
from ..rule import Found
from ..targets.config import TargetConfig, parse_target_config
from ..targets.weights import Plain, StoredWeight, stored_weights
from .report import Finding
from .rules.comparisons import FLOOR, FP8_FLOOR, RULE

# What rounds, by its form in the output: its name, and the least signal over noise, dB.
ROUNDED = dict.fromkeys((NVFP4.form, NVFP4_PACKED.form), (NVFP4.name, FLOOR)) | {
    FP8_PB_WO.form: (FP8_PB_WO.name, FP8_FLOOR)
}
# Each key of the text model that affects a number, with the meaning of its absence for every reader; None if readers
# differ, or fail. An exporter may write such a value explicitly, or omit it.
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L305-L387
# https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/models/deepseek_v3/configuration_deepseek_v3.py#L82-L116
KEYS: Mapping[str, Any] = {
    "hidden_size": None,
    "num_hidden_layers": None,
    "vocab_size": None,
    "max_position_embeddings": None,
    "hidden_act": None,
    "rms_norm_eps": None,
    "intermediate_size": None,
    # Attention.
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "q_lora_rank": None,
    "kv_lora_rank": None,
    "qk_nope_head_dim": None,
    "qk_rope_head_dim": None,
    "v_head_dim": None,
    "attention_bias": False,
    "rope_interleave": True,
    # Experts, their choice and their weights.
    "first_k_dense_replace": None,
    "moe_layer_freq": 1,
    "moe_intermediate_size": None,
    "n_routed_experts": None,
    "n_shared_experts": None,
    "num_experts_per_tok": None,
    "n_group": None,
    "topk_group": None,
    "topk_method": None,
    "scoring_func": None,
    "norm_topk_prob": None,
    "routed_scaling_factor": None,
}


def check_config(output: TargetConfig, source: TargetConfig) -> list[Finding]:
    """Return a finding for each key that makes a quantized target a different model from its source.

    Args:
        output: the quantized target's config.
        source: the source's config.
    """
    theirs = dict(_deciding(source))
    return [_another(key, mine, theirs[key]) for key, mine in _deciding(output) if mine != theirs[key]]


def _deciding(config: TargetConfig) -> Iterator[tuple[str, Any]]:
    for key, unstated in KEYS.items():
        value = config.text.get(key)
        yield key, unstated if value is None else value
    yield "tie_word_embeddings", config.tied
    yield "rope_parameters", _rope(config)


def _rope(config: TargetConfig) -> Any:
    """Return RoPE in one of the two spellings; unchanged if kconv does not read its kind."""
    try:
        return read_rope(config.rope)
    except KconvError:
        return config.rope


def _another(key: str, mine: Any, its: Any) -> Finding:
    said, wanted = ("not stated" if value is None else repr(value) for value in (mine, its))
    return RULE["K393"].finding(Found(f"config.json: {key}", f"it is {said}, but the source's is {wanted}"))


def check_quantized(
    output: Checkpoint, source: Checkpoint, say: Callable[[str], None] = lambda _: None
) -> tuple[list[Finding], NoiseFigures]:
    """Check every tensor of a quantized target, and the settings in its config, against its source.

    Args:
        output: the quantized target.
        source: what it was made from, in any form that kconv reads.
        say: called with progress messages.

    Returns:
        Findings, and the noise over all tensors that became NVFP4.

    Raises:
        SourceFormatUnknown, QuantizedWeightInvalid: one of the two cannot be read.
        ComparisonUnfit: the source is quantized itself.
    """
    configs = [parse_target_config(one.config) for one in (output, source)]
    ours, theirs = map(stored_weights, (output, source), configs)
    nvfp4 = (NVFP4.form, NVFP4_PACKED.form)
    if any(one.form in nvfp4 for one in theirs.values()):
        rounded = any(one.form in nvfp4 for one in ours.values())
        raise ComparisonUnfit(
            f"{source.source} is quantized itself"
            + (", so it is not what this target was made from" if rounded else ", and this target is not"),
            where="source",
            fix="Pass as the source the target that kconv quantize read."
            if rounded
            else "Swap HEAD and --source: the source is the unquantized one.",
        )
    findings = check_config(*configs)
    findings += [_absent(name, "is missing") for name in sorted(theirs.keys() - ours.keys())]
    findings += [_absent(name, "is not in the source") for name in sorted(ours.keys() - theirs.keys())]
    noise: dict[str, float] = {}
    for i, name in enumerate(sorted(ours.keys() & theirs.keys())):
        if i % 100 == 0:
            say(f"comparing {name}")
        mine, its = ours[name], theirs[name]
        if mine.shape != its.shape:
            findings.append(_absent(name, f"is {list(mine.shape)}, but the source's is {list(its.shape)}"))
        elif mine.form in ROUNDED and its.form not in ROUNDED:
            (rounded_to, floor), ratio = ROUNDED[mine.form], signal_to_noise(its, mine)
            if rounded_to == NVFP4.name:
                noise[name] = ratio
            if not ratio >= floor:
                least = f"rounding to {rounded_to} leaves at least {floor} dB"
                message = f"its signal over noise is {ratio:.1f} dB, but {least}"
                findings.append(RULE["K390"].finding(Found(name, message)))
        elif not _same(mine, its):
            message = "it is not quantized, but its values differ from the source's"
            findings.append(RULE["K391"].finding(Found(name, message)))
    return findings, _figures(noise)


def signal_to_noise(source: StoredWeight, output: StoredWeight) -> float:
    """Return the power of a weight over that of its change, in dB; infinite if nothing changed.

    Args:
        source: the weight.
        output: the same weight, quantized.
    """
    signal = change = 0.0
    for its, mine in _aligned(source, output):
        its, mine = its.double(), mine.double()
        signal += float(its.square().sum())
        change += float((mine - its).square().sum())
    return decibels(signal, change)


def decibels(signal: float, change: float) -> float:
    """Return the ratio of two powers in dB; infinite if the second is zero, NaN if it means nothing."""
    if not change:
        return math.inf
    return 10 * math.log10(signal / change) if signal > 0 and math.isfinite(signal / change) else math.nan


def _aligned(source: StoredWeight, output: StoredWeight) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both weights in the same blocks of rows, though each is stored in different ones."""
    streams = (source.blocks(), output.blocks())
    held: list[torch.Tensor | None] = [None, None]
    while True:
        for i, blocks in enumerate(streams):
            if held[i] is None:
                held[i] = next(blocks, None)
        one, other = held
        if one is None or other is None:
            return
        rows = min(len(one), len(other))
        yield one[:rows], other[:rows]
        held = [part[rows:] if len(part) > rows else None for part in (one, other)]


def _same(mine: StoredWeight, its: StoredWeight) -> bool:
    if isinstance(mine, Plain) and isinstance(its, Plain):
        return mine.dtype == its.dtype and digest(mine.info) == digest(its.info)
    return all(torch.equal(a, b) for a, b in _aligned(its, mine)) and mine.dtype == its.dtype


def _figures(noise: dict[str, float]) -> NoiseFigures:
    finite = {name: value for name, value in noise.items() if math.isfinite(value)}
    exact = sum(value == math.inf for value in noise.values())
    if not finite:
        return NoiseFigures(tensors=len(noise), exact=exact)
    worst = min(finite, key=lambda name: finite[name])
    return NoiseFigures(
        tensors=len(noise),
        exact=exact,
        median=round(median(finite.values()), 2),
        worst=round(finite[worst], 2),
        worst_tensor=worst,
        by_tensor={name: round(value, 2) for name, value in finite.items()},
    )


def _absent(name: str, what: str) -> Finding:
    return RULE["K392"].finding(Found(name, f"the tensor {what}"))
