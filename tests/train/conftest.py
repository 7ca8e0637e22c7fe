"""Heads of each kind, trained for a few steps on the trained tiny target."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hub import hub

from kconv.targets.model import load_target
from kconv.train import recipe as recipes
from kconv.train.data import Rows
from kconv.train.feed import Kept, Online
from kconv.train.job import TrainJob
from kconv.train.options import TrainOptions
from kconv.train.recipe import EagleRecipe
from kconv.train.run import train, train_head

__all__ = ["hub"]

FEW = {"batches": 4, "steps": 12, "batch": 4, "seq": 24, "warmup": 2}
RECIPES = {
    "mla": dataclasses.replace(recipes.TEST_MLA, **FEW),
    "gqa": dataclasses.replace(recipes.TEST_GQA, **FEW),
    "mha": dataclasses.replace(recipes.TEST_MHA, **FEW),
    "reduced mla": dataclasses.replace(recipes.TEST_MLA, **FEW, draft_vocab=96),
    "reduced gqa": dataclasses.replace(recipes.TEST_GQA, **FEW, draft_vocab=96),
}


@dataclass(frozen=True)
class Trained:
    """A trained head: its recipe, its folder, and what its report says."""

    recipe: EagleRecipe
    folder: Path
    report: dict[str, Any]


@pytest.fixture(scope="session")
def target(tiny_target):
    return load_target(tiny_target, torch.float32)


@pytest.fixture(scope="session")
def text():
    """Random tokens: a head learns the target's distribution whatever the target reads."""
    return torch.randint(3, 512, (4000,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def held_out():
    return torch.randint(3, 512, (1200,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def rows():
    def make(count: int, seed: int) -> Rows:
        ids = torch.randint(3, 512, (count, 24), generator=torch.Generator().manual_seed(seed))
        return Rows(ids, torch.ones_like(ids, dtype=torch.bool))

    return make(16, 0), make(8, 1)


@pytest.fixture(scope="session")
def make_job(tiny_target, rows):
    """Return a function that gives a job of a recipe, on random tokens."""

    def make(recipe: EagleRecipe, target: Path = tiny_target, **changes) -> TrainJob:
        def states():
            model = load_target(target, torch.float32)
            return Kept(Online(model, recipe.captured)), Kept(Online(model, recipe.captured))

        return TrainJob(target, recipe, *rows, states, **changes)

    return make


@pytest.fixture(scope="session")
def unstopped(make_job, once) -> Path:
    """Return a GQA head of a run that was not stopped, of checkpoints after five steps and figures after six."""
    options = TrainOptions(save_every=5, eval_every=6)
    return once("unstopped", lambda out: train(make_job(RECIPES["gqa"]), out, options))


@pytest.fixture(scope="session")
def train_few(tiny_target, text, held_out, once):
    """Return a function that trains a head of a kind once for all workers."""
    made: dict[str, Trained] = {}

    def train(kind: str) -> Trained:
        if kind not in made:
            out = once(f"few {kind}", lambda out: train_head(tiny_target, out, RECIPES[kind], text, held_out))
            report = json.loads((out / "modelopt" / "training.json").read_text())
            made[kind] = Trained(RECIPES[kind], out, report)
        return made[kind]

    return train


@pytest.fixture(scope="session", params=list(RECIPES))
def trained(request, train_few) -> Trained:
    return train_few(request.param)
