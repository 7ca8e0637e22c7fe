"""Which modules become NVFP4.

Patterns match module names of the text model in Kimi-K2's form, without a wrapper's `language_model.`; `*` matches any
run of characters, including dots. An MTP layer is matched only by patterns that start with its name: `model.layers.61.`
in DeepSeek-V3, `mtp.` in Qwen3-Next.
"""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from ..checkpoint.formats import NVFP4, NVFP4_MIXED, NVFP4_PACKED, Nvfp4
from ..checkpoint.schema import MAX_YAML, check_values, parse_yaml, read_bounded
from ..errors import RecipeInvalid
from ..strict import StrictModel

# No engine reads these in four bits. Of an indexer (DeepSeek-V3.2, GLM-5) vLLM builds wk and weights_proj as one
# unquantized layer; its third module stays with them:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L702-L719
NEVER = (
    "model.embed_tokens",
    "lm_head",
    "model.layers.*.mlp.gate",
    "*.indexer.*",
    "*.eh_proj",
    "*.shared_head.head",
    "mtp.fc",
)


# How block scales are chosen; pack.py computes them.
WeightScales = Literal["max", "mse", "four-over-six"]
# Whose names and config the output has.
FORMATS = {"modelopt": NVFP4, "compressed-tensors": NVFP4_PACKED}


class Recipe(StrictModel):
    """What is quantized, and how.

    Attributes:
        name: its name in the manifest.
        about: one line for people.
        quantize: patterns of the modules that become NVFP4.
        fp8: patterns of the modules that become FP8 in blocks of 128 by 128, beside NVFP4 in one target.
        keep: patterns of modules that stay unquantized although others match them.
        weight_only: whether activations stay bf16 (W4A16), and no module has an input_scale.
        weight_scales: how block scales are chosen: from the largest magnitude of a block (max), or by the least squared
            error among all e4m3 numbers (mse) or two (four-over-six).
        format: whose names and config the output has; the numbers are the same.
    """

    name: str = Field(min_length=1)
    about: str = ""
    quantize: tuple[str, ...] = Field(min_length=1)
    fp8: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    weight_only: bool = False
    weight_scales: WeightScales = "max"
    format: Literal["modelopt", "compressed-tensors"] = "modelopt"

    @property
    def stored(self) -> Nvfp4:
        """The format of the output."""
        return NVFP4_MIXED if self.fp8 else FORMATS[self.format]

    @model_validator(mode="after")
    def _check_mixed(self) -> Self:
        if self.fp8 and self.format != "modelopt":
            raise ValueError("fp8 beside NVFP4 is written in ModelOpt's format only")
        return self

    def takes(self, module: str, *, below: str = "") -> bool:
        """Return whether a module becomes NVFP4, by its name in the text model; `below` is its MTP layer, if any."""
        chosen = tuple(pattern for pattern in self.quantize if not below or pattern.startswith(f"{below}."))
        return _any(module, chosen) and not _any(module, (*self.keep, *NEVER))

    def keeps(self, module: str) -> bool:
        """Return whether a module stays unquantized because `keep` says so."""
        return _any(module, self.keep)

    def rounds(self, module: str) -> bool:
        """Return whether a module becomes FP8, by its name in the text model; one of an MTP layer never does."""
        return _any(module, self.fp8) and not _any(module, (*self.keep, *NEVER))


def builtin_recipes() -> dict[str, str]:
    """Return the package's recipes: the YAML text of each, by its name."""
    return {
        file.stem: file.read_text(encoding="utf-8")
        for file in sorted((Path(__file__).parent / "recipes").glob("*.yaml"))
    }


def load_recipe(name: str) -> Recipe:
    """Read a recipe by its name in the package, or from a YAML file.

    Raises:
        RecipeInvalid: there is none, or a key does not exist or has an invalid value.
    """
    known = builtin_recipes()
    if name in known:
        return parse_recipe(known[name], where=name)
    known_or_file = f"Pass a YAML file, or one of {', '.join(known)}."
    close = get_close_matches(name.lower(), known, n=1)
    meant = f" Did you mean {close[0]}?" if close else ""
    missing = RecipeInvalid(f"there is no recipe and no file {name!r}", fix=known_or_file + meant)
    text = read_bounded(Path(name), RecipeInvalid, limit=MAX_YAML, fix=known_or_file, missing=missing)
    return parse_recipe(text, where=name)


def parse_recipe(text: str | bytes, *, where: str = "") -> Recipe:
    """Read a recipe's YAML."""
    fix = f"Correct it. The keys are {', '.join(Recipe.model_fields)}."
    values = parse_yaml(text, RecipeInvalid, where=where, what="recipe", fix=fix)
    return check_values(Recipe, values, RecipeInvalid, where=where, what="recipe", fix=fix, text=text)


def _any(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)
