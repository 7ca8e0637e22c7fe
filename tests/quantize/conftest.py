"""The tiny target in each form that is published, quantized."""

from pathlib import Path

import pytest
import torch
from support.families import write_target
from support.quantized_targets import make_form

from kconv.checkpoint.folder import open_checkpoint
from kconv.quantize.calibration import data_free
from kconv.quantize.plan import QuantizePlan, plan_quantize
from kconv.quantize.recipe import load_recipe
from kconv.quantize.run import quantize
from kconv.targets.config import parse_target_config
from kconv.targets.weights import stored_weights


@pytest.fixture(scope="session")
def forms(tiny_target, tmp_path_factory):
    """Return the folder of the tiny target in a form; each is made once, and tests must not change it."""
    made: dict[tuple[str, bool], Path] = {}

    def find(form: str, *, wrapped: bool = False) -> Path:
        if (form, wrapped) not in made:
            folder = tmp_path_factory.mktemp(form) / "target"
            if form == "llama":
                made[form, wrapped] = write_target(folder, form, tiny_target, None)
            else:
                made[form, wrapped] = make_form(tiny_target, folder, form, wrapped=wrapped, shards=3)
        return made[form, wrapped]

    return find


@pytest.fixture(scope="session")
def plan():
    """Return the plan of a folder and a recipe."""

    def make(folder: Path, recipe: str = "nvfp4", **options) -> QuantizePlan:
        source = open_checkpoint(folder)
        return plan_quantize(source, parse_target_config(source.config), load_recipe(recipe), data_free(), **options)

    return make


@pytest.fixture(scope="session")
def quantized(forms, plan, tmp_path_factory):
    """Return the folder of a form under a recipe; each is made once, and tests must not change it."""
    made: dict[tuple, Path] = {}

    def find(form: str, recipe: str = "nvfp4", *, wrapped: bool = False) -> Path:
        key = (form, recipe, wrapped)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("quantized") / "out"
            quantize(plan(forms(form, wrapped=wrapped), recipe), made[key])
        return made[key]

    return find


@pytest.fixture
def little_memory(monkeypatch):
    """Leave so much memory that a layer fits with one expert, and not with all."""

    def leave(folder):
        from kconv.quantize import experts

        source = open_checkpoint(folder)
        config = parse_target_config(source.config)
        whole, one = experts.layer_bytes(stored_weights(source, config), config, torch.float32)
        assert one < whole
        free = type("Memory", (), {"available": (whole + one) / 2 / experts.SHARE})
        monkeypatch.setattr(experts.psutil, "virtual_memory", lambda: free)

    return leave
