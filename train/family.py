"""What training asks of a family of drafters about ModelOpt's model of one; the rest stands in its recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from ..targets.model import CausalLM
from .drafter_recipe import DrafterRecipe

Model = Any
"""A target that ModelOpt turned into a model with a drafter; ModelOpt creates its class at run time."""


@dataclass(frozen=True)
class Family:
    """A family that is trained.

    Attributes:
        part: the attribute of the model that is the drafter.
        build: turns a target, in place, into a model with an untrained drafter; the target's layers are dropped.
        run: runs a model, or what shares it among processes, over a batch; what it returns has the `loss`, and in
            `train_acc[0]` the share of most likely tokens that are right, of each draft step or of all.
        drafts: kconv's own forward of a drafter along a text: of each of K draft steps the logits `[B, T', vocab]`.
        exported: the layout of what ModelOpt exports, from a spec.
        layer: the class of the layers that FSDP2 shards as one unit, from a recipe.
        by_token: the names of matrices with a row for each token.
    """

    part: str
    build: Callable[[CausalLM, Any], Model]
    run: Callable[[Any, Mapping[str, Any], Any], Any]
    drafts: Callable[[Any, Tensor, Tensor, int], Iterable[Tensor]]
    exported: Callable[[Any], str]
    layer: Callable[[Any], str]
    by_token: frozenset[str]


def family_of(recipe: DrafterRecipe) -> Family:
    """Return what is a recipe's family's own."""
    return import_module(f".{recipe.TRAINED_BY}", __package__).FAMILY
