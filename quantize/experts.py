"""Read a layer's routed experts from disk one by one.

A layer of Kimi-K2 has 384 experts of 44 million parameters: 34 GB in bf16, 68 GB in fp32. A machine with less memory
holds one expert at a time: the tokens of all texts go through the layer together, so that each expert is read once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import TargetTooLarge
from ..targets.config import TargetConfig
from ..targets.weights import StoredWeight

# Transforms a linear layer's input before the multiplication: the module's group and the input, `[N, in]`, same shape
# out.
See = Callable[[str, Tensor], Tensor]
# The share of free memory that weights may use; the rest is for activations.
SHARE = 0.8


def layer_bytes(stored: Mapping[str, StoredWeight], config: TargetConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Return the memory of a target's largest layer, in bytes: whole, and with only one routed expert."""
    whole: dict[int, int] = {}
    experts: dict[int, dict[str, int]] = {}
    for name, weight in stored.items():
        parts = name.removeprefix(config.prefix).split(".")
        # Layers beyond the target's depth are MTP's, which are not run.
        if parts[:2] != ["model", "layers"] or (layer := int(parts[2])) >= config.layers:
            continue
        size = math.prod(weight.shape) * dtype.itemsize
        whole[layer] = whole.get(layer, 0) + size
        if "experts" in parts:
            own = experts.setdefault(layer, {})
            expert = parts[parts.index("experts") + 1]
            own[expert] = own.get(expert, 0) + size
    parted = {
        layer: size - sum((own := experts.get(layer, {})).values()) + max(own.values(), default=0)
        for layer, size in whole.items()
    }
    return max(whole.values(), default=0), max(parted.values(), default=0)


def must_part(stored: Mapping[str, StoredWeight], config: TargetConfig, dtype: torch.dtype, where: object) -> bool:
    """Return whether a target's experts must be read one by one for its layers to fit into memory.

    Raises:
        TargetTooLarge: they do not fit even then.
    """
    whole, parted = layer_bytes(stored, config, dtype)
    left = int(psutil.virtual_memory().available * SHARE)
    if parted > left:
        raise TargetTooLarge(
            f"a layer of the target needs {parted / 1e9:,.1f} GB of memory as {str(dtype).removeprefix('torch.')} with "
            f"one expert at a time, but only {left / 1e9:,.1f} GB may be used",
            where=where,
            fix="Run it on a machine with more memory.",
        )
    return whole > left


def describe_memory(stored: Mapping[str, StoredWeight], config: TargetConfig, dtype: torch.dtype, parted: bool) -> str:
    whole, one = layer_bytes(stored, config, dtype)
    said = f"a layer takes {whole / 1e9:,.1f} GB of memory as {str(dtype).removeprefix('torch.')}"
    return f"{said}, so its experts are read one by one, {one / 1e9:,.1f} GB at a time" if parted else said


class ExpertsOneByOne(torch.nn.Module):
    """Routed experts of a layer, each read when its tokens come; replaces transformers' own module.

    Args:
        own: transformers' module, of which only the activation function is kept.
        base: the experts' name on disk, e.g. "model.layers.3.mlp.experts".
        see: called with each input; the groups are `base` with ".gate_up_proj" and ".down_proj".
    """

    def __init__(self, own: Any, stored: Mapping[str, StoredWeight], base: str, dtype: torch.dtype, see: See) -> None:
        super().__init__()
        self._activate = own.act_fn
        self._stored, self._base, self._dtype, self._see = stored, base, dtype, see

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See transformers' `DeepseekV3Experts.forward`."""
        total = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            rows, place = (top_k_index == expert).nonzero(as_tuple=True)
            # Experts without tokens are not read.
            gate, up, down = (self._weight(expert, name) for name in ("gate_proj", "up_proj", "down_proj"))
            x = self._see("gate_up_proj", hidden_states[rows])
            x = self._see("down_proj", self._activate(F.linear(x, gate)) * F.linear(x, up))
            total.index_add_(0, rows, (F.linear(x, down) * top_k_weights[rows, place, None]).to(total.dtype))
        return total

    def _weight(self, expert: int, name: str) -> Tensor:
        return self._stored[f"{self._base}.{expert}.{name}.weight"].read().to(self._dtype)


def refuse_other_experts(layer: torch.nn.Module, where: object) -> None:
    """Refuse a layer whose experts are not of the form that `ExpertsOneByOne` replaces.

    Raises:
        TargetTooLarge: they can only be held in memory together.
    """
    for name, module in layer.named_modules():
        if name.rpartition(".")[2] != "experts":
            continue
        parameters = {own for own, _ in module.named_parameters()}
        if name != "mlp.experts" or parameters != {"gate_up_proj", "down_proj"} or not hasattr(module, "act_fn"):
            known = type(module).__name__
            raise TargetTooLarge(
                f"a layer of the target does not fit into memory, and kconv does not read {known} one by one",
                where=where,
                fix="Run it on a machine with more memory.",
            )


def run_together(layer: Any, hidden: Sequence[Tensor], run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Run a layer over several texts, `[1, T, hidden]` each; their tokens go through its MLP together.

    The layer's own forward runs twice, so nothing is assumed of it but that it calls `layer.mlp` once: first for what
    it gives to the MLP, then with what the MLP returned.

    Args:
        run: runs the layer over one text.
    """
    given: list[Tensor] = []

    def note(states: Tensor) -> Tensor:
        given.append(states)
        return torch.zeros_like(states)

    mlp = layer.mlp
    with _instead_of_mlp(layer, note):
        for states in hidden:
            run(states)
    returned = iter(mlp(torch.cat(given, dim=1)).split([states.shape[1] for states in given], dim=1))
    with _instead_of_mlp(layer, lambda _: next(returned)):
        return [run(states) for states in hidden]


@contextmanager
def _instead_of_mlp(layer: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    mlp, layer.mlp = layer.mlp, torch.nn.Module()
    layer.mlp.forward = forward
    try:
        yield
    finally:
        layer.mlp = mlp
