"""Which modules become NVFP4.

Patterns are over module names of the text model as Kimi-K2 has them, without the `language_model.` of a wrapper;
`*` matches any run of characters, dots among them.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import RecipeInvalid

KvCache = Literal["fp8", "none"]
# No engine reads these in four bits.
NEVER = ("model.embed_tokens", "lm_head", "model.layers.*.mlp.gate", "model.layers.*.eh_proj")


class Recipe(BaseModel):
    """What is quantized, and how.

    Attributes:
        name: what the manifest calls it.
        about: one line for people.
        quantize: patterns of the modules that become NVFP4.
        keep: patterns of modules that stay, though `quantize` matches them.
        weight_only: activations stay bf16 (W4A16), and no module has an input_scale.
        kv_cache: what the engine is told to keep its KV cache in.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    about: str = ""
    quantize: tuple[str, ...] = Field(min_length=1)
    keep: tuple[str, ...] = ()
    weight_only: bool = False
    kv_cache: KvCache = "none"

    def takes(self, module: str) -> bool:
        """Say whether a module becomes NVFP4.

        Args:
            module: its name in the text model, e.g. "model.layers.1.mlp.experts.0.up_proj".
        """
        return _any(module, self.quantize) and not _any(module, (*self.keep, *NEVER))


def builtin_recipes() -> dict[str, str]:
    """Return the package's recipes: the YAML text of each, by its name."""
    return {file.stem: file.read_text() for file in sorted((Path(__file__).parent / "recipes").glob("*.yaml"))}


def load_recipe(name: str) -> Recipe:
    """Read a recipe by its name in the package, or from a YAML file.

    Raises:
        RecipeInvalid: there is none, or a key does not exist or has a value that cannot be.
    """
    known = builtin_recipes()
    if name in known:
        return parse_recipe(known[name], where=name)
    try:
        text = Path(name).read_text()
    except (OSError, UnicodeDecodeError) as fault:
        raise RecipeInvalid(
            f"there is no recipe {name!r}, and no file of that name that can be read",
            fix=f"Give a YAML file, or one of {', '.join(known)}.",
        ) from fault
    return parse_recipe(text, where=name)


def parse_recipe(text: str, *, where: str = "") -> Recipe:
    """Read a recipe's YAML.

    Raises:
        RecipeInvalid: it is no YAML mapping, or a key does not exist or has a value that cannot be.
    """
    keys = f"The keys are {', '.join(Recipe.model_fields)}."
    try:
        return Recipe.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as fault:
        raise RecipeInvalid(f"the recipe is no YAML: {fault}", where=where, fix=keys) from fault
    except ValidationError as fault:
        first = fault.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "its top"
        raise RecipeInvalid(f"the recipe is wrong at {place}: {first['msg']}", where=where, fix=keys) from fault


def _any(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)
