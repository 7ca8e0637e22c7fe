"""Targets of other families than Kimi-K2's, held against transformers' own loading of them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import LAYERS, MODELS, VOCAB, write_target
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CohereConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    PhiConfig,
)

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.source import Folder
from kconv.errors import TargetInvalid
from kconv.targets.config import parse_target_config, read_target_config
from kconv.targets.forward import generate_greedy, run_target
from kconv.targets.model import find_ends, load_ends, load_target, refuse_by_layers
from kconv.targets.weights import stored_weights

CAPTURED = (1, 2, 5)


@pytest.fixture(scope="module")
def folders(tiny_target, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {kind: write_target(root / kind, kind, tiny_target, None) for kind in MODELS}


def theirs(folder: Path, kind: str):
    loader = AutoModelForImageTextToText if kind == "qwen3_vl" else AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", MODELS)
def test_its_states_logits_and_texts_are_transformers_own(folders, kind):
    model, reference = load_target(folders[kind], torch.float32), theirs(folders[kind], kind)
    tokens = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    states = run_target(model, tokens, CAPTURED)
    with torch.no_grad():
        said = reference(tokens, output_hidden_states=True)
        assert torch.equal(states.logits, said.logits)
        # Their entry i + 1 is the output of layer i, but for the last one, which is normed.
        assert torch.equal(states.captured, torch.cat([said.hidden_states[i + 1] for i in CAPTURED], dim=-1))
        written = generate_greedy(model, tokens[:, :7].tolist(), 6)
        grown = tokens[:, :7]
        for _ in range(6):
            grown = torch.cat([grown, reference(grown).logits[:, -1:].argmax(-1)], dim=-1)
    assert written == grown[:, 7:].tolist()


@pytest.mark.parametrize("kind", MODELS)
def test_its_ends_are_found_under_its_own_names(folders, kind):
    whole, ends = load_target(folders[kind], torch.float32), load_ends(find_ends(Folder(folders[kind])), torch.float32)
    assert ends.config.num_hidden_layers == LAYERS and len(ends.model.layers) == 0
    for part in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(ends.state_dict()[part], whole.state_dict()[part])
    config, stored = read_target_config(folders[kind]), load_file(folders[kind] / "model.safetensors")
    assert stored[config.embed_tokens].shape == stored[config.lm_head].shape == (VOCAB, config.hidden)


@pytest.mark.parametrize("kind, name", [("llama", "model.norm.weight"), ("gpt_oss", "model.layers.3.self_attn.sinks")])
def test_a_tensor_that_is_not_there_is_named(folders, kind, name, tmp_path):
    copy_without(folders[kind], tmp_path, name)
    with pytest.raises(TargetInvalid, match=f"1 missing .first: {name}"):
        load_target(tmp_path, torch.float32)


def copy_without(folder: Path, out: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text((folder / "config.json").read_text())


def test_a_tensor_that_the_class_does_not_know_is_named(folders, tmp_path):
    tensors = load_file(folders["llama"] / "model.safetensors") | {"model.layers.0.self_attn.sinks": torch.zeros(4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folders["llama"] / "config.json").read_text())
    with pytest.raises(TargetInvalid, match=r"1 unknown .first: model\.layers\.0\.self_attn\.sinks"):
        load_target(tmp_path, torch.float32)


def test_a_target_that_caps_its_logits_is_refused(tmp_path):
    """A head drafts by lm_head of its own state, and is trained and measured by lm_head of the target's."""
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=1.0,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path)
    with pytest.raises(TargetInvalid, match="scales or caps"):
        load_target(tmp_path, torch.float32)


def test_a_wrapper_that_keeps_its_text_elsewhere_is_told_apart_by_its_type(folders):
    config = read_target_config(folders["qwen3_vl"])
    assert (config.embed_tokens, config.lm_head) == ("model.language_model.embed_tokens.weight", "lm_head.weight")
    assert json.loads((folders["qwen3_vl"] / "config.json").read_text())["model_type"] == "qwen3_vl"


BY_NAME = {"gpt_oss": "holds all experts of a layer", "qwen3_vl": "has its text model at model.language_model."}


@pytest.mark.parametrize("kind", BY_NAME)
def test_what_cannot_be_run_layer_by_layer_is_refused_by_name(folders, kind):
    config, checkpoint = read_target_config(folders[kind]), open_checkpoint(folders[kind])
    with pytest.raises(TargetInvalid, match=BY_NAME[kind]) as caught:
        refuse_by_layers(config, stored_weights(checkpoint, config))
    assert config.model_type in caught.value.what


AROUND = {
    "a scaled embedding": (Gemma3TextConfig, "changes its embedding"),
    "an embedding times a number": (partial(GraniteConfig, embedding_multiplier=2.0), "changes its embedding"),
    "other names": (PhiConfig, "has no model.norm"),
    "capped logits": (partial(CohereConfig, logit_scale=0.1), "scales or caps"),
    "no class": (None, "no causal language model"),
}


@pytest.mark.parametrize("own, why", AROUND.values(), ids=AROUND)
def test_what_does_more_around_its_layers_is_refused_by_name(own, why):
    dims = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip
    config = parse_target_config(own(**dims).to_dict() if own else dims | {"model_type": "new"})
    with pytest.raises(TargetInvalid, match=why):
        refuse_by_layers(config, {})
