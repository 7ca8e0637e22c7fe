"""How much a step will write.

None stands for what cannot be known before an earlier step has made its output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .inputs import Found
from .kinds import Card, Convert, Publish, Quantize, StepBase, Tiny, Train

# A head's size does not hang on how much it is trained on.
ANY_ROWS = 1 << 20


def estimate(step: StepBase, found: Found | None) -> int | None:
    """Return the bytes that a step will write; None where that is not known yet.

    Args:
        step: the step.
        found: its inputs; None where one of them is not made yet.

    Raises:
        KconvError: an input cannot be read.
    """
    known = SIZES.get(type(step))
    return known(step, found) if known else 0  # reports and figures are small


def _tiny(step: Tiny, _: Found | None) -> int | None:
    from ..tiny.recipe import DEMO, TEST, cache_root, recipe_key
    from ..tiny.target import KIND, SOURCE

    recipe = {"demo": DEMO, "test": TEST}[step.target]
    cached = cache_root() / f"{KIND}-{recipe_key(recipe, source=SOURCE)}"
    return _folder(cached) if cached.is_dir() else None


def _train(step: Train, found: Found | None) -> int | None:
    """Twice the head: as it is exported, and as ModelOpt's own module."""
    from ..head.slots import needs
    from ..targets.config import read_target_config
    from ..train.evaluate import spec_of
    from ..train.recipe import complete, read_recipe_file

    if found is None or step.start:
        return None
    config = read_target_config(found.inputs["target"][0].fetch_config())
    values = read_recipe_file(found.words["recipe"][0]) | step.set
    spec = spec_of(complete(values, config, ANY_ROWS), config)
    width = {"F32": 4, "BF16": 2}[spec.dtype]
    return 2 * sum(math.prod(need.shape) for need in needs(spec).values()) * width


def _quantize(step: Quantize, found: Found | None) -> int | None:
    from ..quantize.calibration import data_free
    from ..quantize.plan import plan_quantize
    from ..quantize.recipe import load_recipe
    from ..targets.config import parse_target_config

    if found is None:
        return None
    source = found.inputs["target"][0].open_headers()
    config = parse_target_config(source.config, where=source.folder / "config.json")
    plan = plan_quantize(source, config, load_recipe(found.words["recipe"][0]), data_free())
    return sum(unit.bytes_out for unit in plan.units)


def _convert(step: Convert, found: Found | None) -> int | None:
    from ..convert.cast import DTYPES
    from ..convert.plan import Wishes, plan
    from ..engines import by_name
    from .job import read_step_head
    from .making import find_shapes

    if found is None:
        return None
    target = found.inputs["target"][0] if step.target else None
    head = read_step_head(found.inputs["head"][0].open_headers(), step.reading, target)
    shared = find_shapes(target) if target else None
    wishes = Wishes(shared, step.drop_shared, DTYPES[step.dtype] if step.dtype else "")
    return sum(one.size for one in plan(head, by_name(step.layout), wishes).steps)


def _nothing(_: StepBase, __: Found | None) -> int:
    """A card's folder has second names of the head's files; a publication has none here."""
    return 0


SIZES: Mapping[type[StepBase], Callable[[Any, Found | None], int | None]] = {
    Tiny: _tiny, Train: _train, Quantize: _quantize, Convert: _convert, Card: _nothing, Publish: _nothing,
}  # fmt: skip


def _folder(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
