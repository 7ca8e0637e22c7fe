"""The modules that an engine must not take for quantized.

vLLM tests each entry as a name, as a *part* of a name, and as a wildcard; TensorRT-LLM as a wildcard on the name and
on each of its parents, and it tests the bare `kv_b_proj` too:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L187-L222
So `model.layers.1*` would cover layer 10, and `*kv_b_proj` would make TensorRT-LLM look for FP8 scales. An entry here
is a module of one layer, in full, closed by `*` where all below it stays.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

# The parts of a decoder layer that engines build apart, each with the modules of which it may consist.
PARTS = ("self_attn", "mlp.shared_experts", "mlp.experts", "mlp")
LAYER = re.compile(r"(?P<layer>.*model\.layers\.(?P<index>\d+))\.(?P<rest>.+)")
# Whole parts of a multimodal target that are no text.
OTHERS = ("mm_projector", "vision_tower")


def exclude_modules(linear: Iterable[str], quantized: Collection[str]) -> list[str]:
    """Return the entries for `exclude_modules` and `ignore`.

    Args:
        linear: names on disk of every linear module, quantized or not.
        quantized: those of them that are.

    Returns:
        Entries in order of layers, each of which covers unquantized modules only.
    """
    parts: dict[str, list[str]] = {}
    entries: dict[str, None] = {}
    for module in sorted(linear, key=_order):
        found = LAYER.fullmatch(module)
        if found:
            part = next((p for p in PARTS if found["rest"].startswith(f"{p}.")), "")
            # The router is a module of its own, which no engine looks up here.
            if not found["rest"].endswith("mlp.gate"):
                parts.setdefault(f"{found['layer']}.{part}" if part else module, []).append(module)
        else:
            entries[_root(module)] = None
    for part, modules in parts.items():
        kept = [module for module in modules if module not in quantized]
        if len(kept) == len(modules):
            entries[part if modules == [part] else f"{part}*"] = None
        else:
            entries |= dict.fromkeys(kept)
    return list(entries)


def _root(module: str) -> str:
    """Return the entry of a module outside the decoder layers."""
    top = module.split(".")[0]
    return f"{top}*" if top in OTHERS else module


def _order(module: str) -> tuple[int, str]:
    found = LAYER.fullmatch(module)
    return (int(found["index"]) if found else -1, module)
