"""Which linears of a head are quantized, and what the config says of the others.

Only what every engine that reads the head builds quantized. Left as they are:

- `fc`: SGLang and older TensorRT-LLM build it plain, and would read packed bytes as weights in silence. It reads the
  target's raw states, whose few large values would set the scale of all; and it runs once per draft, not per token.
- an MLA head's attention, as in the published Kimi-K2 targets. TensorRT-LLM loads no `weight_scale` of the fused
  q_a_proj and kv_a_proj_with_mqa in FP8, SGLang cannot join theirs, and both want kv_b_proj plain.
- `lm_head` and the embedding, which are the target's or grew from there, and the norms.

https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama_eagle3.py
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/kimi_k25_eagle3.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import TensorShape
from ...head.slots import needs
from ...head.spec import Gqa, HeadSpec
from ..formats import fused_group
from .formats import Format

MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Choice:
    """What becomes of the linears of one kind of head.

    Attributes:
        quantized: names in each layer.
        exclude: entries of `ignore` that cover the rest. Engines number and name a draft's layers each their own way
            (`model.layers.61`, `model.midlayer`), so an entry says nothing of what stands before it. It is there twice:
            TensorRT-LLM tests it as a wildcard, SGLang's FP8 as a part of a name, and vLLM as both. None matches the
            bare word `kv_b_proj`, for which TensorRT-LLM would look up scales of FP8 blocks.
    """

    quantized: tuple[str, ...]
    exclude: tuple[str, ...]


GQA = Choice(("q_proj", "k_proj", "v_proj", "o_proj", *MLP), ("lm_head", "fc", "*.fc"))
MLA = Choice(MLP, (*GQA.exclude, "self_attn", "*.self_attn*"))


def choice_of(spec: HeadSpec) -> Choice:
    """Return what becomes of a head's linears."""
    return GQA if isinstance(spec.attention, Gqa) else MLA


def groups_of(spec: HeadSpec, format_: Format) -> list[tuple[str, ...]]:
    """Return the slots that are quantized, those together that engines fuse and give one scale.

    Raises:
        TensorShape: a weight's rows cannot be cut into the format's groups.
    """
    known, found = needs(spec), dict[str, list[str]]()
    for layer in range(spec.layers):
        for name in choice_of(spec).quantized:
            slot = f"{layer}.{name}"
            columns = known[slot].shape[1]
            if columns % format_.columns:
                raise TensorShape(
                    f"{slot} has {columns} columns, and {format_.name} takes them in groups of {format_.columns}",
                    where=slot,
                    fix="Choose another format.",
                )
            found.setdefault(fused_group(slot), []).append(slot)
    return [tuple(group) for group in found.values()]
