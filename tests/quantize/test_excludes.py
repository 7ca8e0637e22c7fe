"""Excludes: each reader finds the modules that stay, and no other, however its matching works."""

import json
from fnmatch import fnmatch

import modelopt.torch.quantization as mtq
import pytest
import torch
from modelopt.torch.export import export_hf_checkpoint
from support.heads import linear_modules
from support.validated import validate
from transformers import LlamaConfig, LlamaForCausalLM

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.source import Folder
from kconv.quantize.calibration import data_free
from kconv.quantize.modelopt_backend import quant_cfg
from kconv.quantize.plan import exclude_modules, plan_quantize
from kconv.quantize.recipe import builtin_recipes, load_recipe
from kconv.quantize.run import quantize
from kconv.targets.config import parse_target_config
from kconv.validate.options import ValidateOptions


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
    takes = load_recipe(recipe).takes
    quantized = {name for name in linear if takes(name.removeprefix(prefix))}
    entries = exclude_modules(linear, quantized)
    for module in linear:
        if module.endswith("mlp.gate"):
            continue  # no engine asks for it
        for excludes in (vllm_excludes, trtllm_excludes):
            assert excludes(module, entries) == (module not in quantized), (module, excludes.__name__)


@pytest.mark.parametrize("recipe", builtin_recipes())
def test_no_entry_matches_the_bare_kv_b_proj(recipe):
    linear = linear_modules("language_model.", layers=12, experts=2)
    takes = load_recipe(recipe).takes
    quantized = {name for name in linear if takes(name.removeprefix("language_model."))}
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


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_an_output_matrix_that_is_the_embedding_is_excluded_as_modelopt_does(form, tmp_path):
    """Engines build one before they tie it; no tensor is named after it."""
    dims = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(**dims, vocab_size=64, tie_word_embeddings=True)
    model = LlamaForCausalLM(config).bfloat16().eval()
    model.save_pretrained(tmp_path / "source")
    source = open_checkpoint(tmp_path / "source")
    assert "lm_head.weight" not in source.tensors
    recipe = load_recipe("nvfp4").model_copy(update={"format": form})
    quantize(plan_quantize(source, parse_target_config(source.config), recipe, data_free()), tmp_path / "ours")
    model.config.dtype, model.config.architectures = torch.bfloat16, ["LlamaForCausalLM"]
    mtq.quantize(model, quant_cfg(load_recipe("nvfp4")), lambda it: it(torch.arange(64)[None]))
    export_hf_checkpoint(model, export_dir=tmp_path / "theirs")
    ours, theirs = (json.loads((tmp_path / who / "config.json").read_text()) for who in ("ours", "theirs"))
    # ModelOpt lists the embedding too, which no engine asks for.
    assert ours["quantization_config"]["ignore"] == ["lm_head"]
    assert theirs["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]
    assert validate(Folder(tmp_path / "ours"), ValidateOptions(for_=("vllm-v1",))).findings == ()
