"""A target that runs, to have its states written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import DeepseekV3ForCausalLM

from ..checkpoint.tensors import NAMES
from .generate import generate_greedy, generate_sampled
from .states import capture
from .states_record import Kind


class Runner(Protocol):
    """A target that runs, here or behind a server."""

    @property
    def dtype(self) -> str:
        """Safetensors name of the dtype that its states have."""
        ...

    def capture(self, tokens: torch.Tensor, captured: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run tokens `[1, T]`; see `target.states.capture`."""
        ...

    def extend(self, kind: Kind, prompts: Sequence[Sequence[int]], length: int, seed: int) -> list[list[int]]:
        """Return the new tokens of continuations, "sampled" at temperature 1 or "greedy"."""
        ...


@dataclass(frozen=True)
class LocalRunner:
    """A target in memory.

    Attributes:
        model: as `load_target` gives it.
    """

    model: DeepseekV3ForCausalLM

    @property
    def dtype(self) -> str:
        """See `Runner.dtype`."""
        return NAMES[self.model.lm_head.weight.dtype]

    def capture(self, tokens: torch.Tensor, captured: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Runner.capture`."""
        states, hidden = capture(self.model, tokens.to(self.model.device), captured)
        return states.cpu(), hidden.cpu()

    def extend(self, kind: Kind, prompts: Sequence[Sequence[int]], length: int, seed: int) -> list[list[int]]:
        """See `Runner.extend`."""
        if kind == "sampled":
            return generate_sampled(self.model, prompts, length, temperature=1.0, seed=seed)
        return generate_greedy(self.model, prompts, length)
