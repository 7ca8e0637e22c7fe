"""Excludes: each reader finds the modules that stay, and no other, however its matching works."""

from fnmatch import fnmatch

import pytest
from support.heads import linear_modules

from kconv.quantize.plan import exclude_modules
from kconv.quantize.recipe import builtin_recipes, load_recipe


def vllm_excludes(module: str, entries: list[str]) -> bool:
    """As vLLM 0.32 decides, with each `x*` made `x` and `x.*` first, as its mapper does for Kimi-K2.5."""
    spread = [e for entry in entries for e in ((entry[:-1], f"{entry[:-1]}.*") if entry.endswith("*") else (entry,))]
    return any(entry in module or fnmatch(module, entry) for entry in (*entries, *spread))


def trtllm_excludes(module: str, entries: list[str]) -> bool:
    """As TensorRT-LLM decides: a wildcard on the name or on any of its parents."""
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatch(name, entry) for name in names for entry in entries)


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("recipe", builtin_recipes())
def test_what_stays_is_excluded_and_nothing_else(prefix, recipe):
    linear = linear_modules(prefix, layers=23, experts=3)
    quantized = {name for name in linear if load_recipe(recipe).takes(name.removeprefix(prefix))}
    entries = exclude_modules(linear, quantized)
    for module in linear:
        if module.endswith("mlp.gate"):
            continue  # no engine asks for it
        for excludes in (vllm_excludes, trtllm_excludes):
            assert excludes(module, entries) == (module not in quantized), (module, excludes.__name__)


@pytest.mark.parametrize("recipe", builtin_recipes())
def test_no_entry_matches_the_bare_kv_b_proj(recipe):
    linear = linear_modules("language_model.", layers=12, experts=2)
    quantized = {name for name in linear if load_recipe(recipe).takes(name.removeprefix("language_model."))}
    assert not any(fnmatch("kv_b_proj", entry) for entry in exclude_modules(linear, quantized))


def test_the_published_kimi_lists_are_covered():
    """nvidia/Kimi-K2.6-NVFP4 has these entries, besides `layers.0*`, which is two here so that 1* never covers 10."""
    linear = linear_modules("language_model.", layers=12, experts=2)
    quantized = {name for name in linear if ".mlp.experts." in name}
    assert exclude_modules(linear, quantized) == [
        "language_model.lm_head",
        "mm_projector*",
        "vision_tower*",
        "language_model.model.layers.0.mlp*",
        "language_model.model.layers.0.self_attn*",
        *(
            f"language_model.model.layers.{layer}.{part}*"
            for layer in range(1, 12)
            for part in ("mlp.shared_experts", "self_attn")
        ),
    ]
