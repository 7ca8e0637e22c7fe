"""A target's config: what is read, from where in a wrapped one, and what is refused."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconv.errors import ConfigInvalid, NotACheckpoint, TargetInvalid
from kconv.targets.config import parse_target_config, read_target_config

TEXT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 64, "num_hidden_layers": 8,
    "vocab_size": 100, "num_attention_heads": 4, "max_position_embeddings": 1024, "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 64.0}, "torch_dtype": "bfloat16", "bos_token_id": 7,
    "eos_token_id": 8, "tie_word_embeddings": False,
}  # fmt: skip
QUANTIZED = {"quant_method": "compressed-tensors"}


def wrap(text: dict, **root) -> dict:
    return {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16",
        "text_config": text, **root,
    }  # fmt: skip


def test_a_plain_config():
    config = parse_target_config(TEXT)
    assert (config.hidden, config.layers, config.vocab, config.heads, config.max_positions) == (64, 8, 100, 4, 1024)
    assert (config.bos, config.eos, config.pad, config.dtype) == (7, (8,), None, "BF16")
    assert config.rope == {"rope_theta": 50000.0, "rope_scaling": {"type": "yarn", "factor": 64.0}}
    assert (config.embed_tokens, config.lm_head) == ("model.embed_tokens.weight", "lm_head.weight")
    assert config.quantization is None


def test_a_wrapped_config_is_read_through():
    plain, config = parse_target_config(TEXT), parse_target_config(wrap(TEXT, eos_token_id=[8, 9], pad_token_id=0))
    for name in ("hidden", "layers", "vocab", "heads", "max_positions", "rope", "dtype", "model_type", "bos"):
        assert getattr(config, name) == getattr(plain, name)
    assert config.architecture == "KimiK25ForConditionalGeneration"
    # Only the root's end tokens are kept up to date by those who publish: Kimi-K2.6 differs there.
    assert (config.eos, config.pad) == ((8, 9), 0)
    assert config.embed_tokens == "language_model.model.embed_tokens.weight"
    assert config.lm_head == "language_model.lm_head.weight"


@pytest.mark.parametrize("raw", [TEXT | {"quantization_config": QUANTIZED}, wrap(TEXT, quantization_config=QUANTIZED),
                                 wrap(TEXT | {"quantization_config": QUANTIZED})])  # fmt: skip
def test_a_quantization_is_found_wherever_it_stands(raw):
    assert parse_target_config(raw).quantization == QUANTIZED


@pytest.mark.parametrize("key", [{"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {"eagle_config": {}}])
def test_a_draft_head_is_no_target(key):
    with pytest.raises(TargetInvalid, match="draft head"):
        parse_target_config(TEXT | key)


def test_a_tied_output_matrix_is_the_embedding():
    config = parse_target_config(TEXT | {"tie_word_embeddings": True})
    assert config.lm_head == "model.embed_tokens.weight"


@pytest.mark.parametrize(("name", "dtype"), [("float32", "F32"), ("torch.float16", "F16"), ("fp9", None), (None, None)])
def test_the_dtype_under_both_of_its_keys(name, dtype):
    text = {key: value for key, value in TEXT.items() if key != "torch_dtype"}
    assert parse_target_config(text | {"dtype": name}).dtype == dtype
    assert parse_target_config(text | {"torch_dtype": name}).dtype == dtype


@given(
    st.sampled_from(["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"]),
    st.sampled_from([None, 0, -1, 1.5, "64", True, [64]]),
)
def test_a_dimension_that_is_no_count_is_refused_by_name(key, value):
    with pytest.raises(TargetInvalid, match=key):
        parse_target_config(TEXT | {key: value})


@pytest.mark.parametrize("change", [{"bos_token_id": "7"}, {"eos_token_id": [8, None]}, {"pad_token_id": -1},
                                    {"bos_token_id": []}, {"architectures": "Deepseek"}])  # fmt: skip
def test_what_is_no_token_id_or_architecture_is_refused(change):
    with pytest.raises(TargetInvalid):
        parse_target_config(TEXT | change)


@pytest.mark.parametrize("change", [{"quantization_config": 1.0}, {"quantization_config": "nvfp4"},
                                    {"num_experts_per_tok": 9, "n_routed_experts": 8},
                                    {"num_experts_per_tok": 3, "num_experts": 2}])  # fmt: skip
def test_a_quantization_that_is_no_object_and_too_few_experts_are_refused_by_name(change):
    with pytest.raises(TargetInvalid, match=next(iter(change))):
        parse_target_config(TEXT | change)


def test_reading_changes_nothing():
    raw = wrap(copy.deepcopy(TEXT))
    before = copy.deepcopy(raw)
    assert parse_target_config(raw).raw == before
    assert raw == before


def test_a_folder_without_a_config_or_with_a_broken_one(tmp_path):
    with pytest.raises(NotACheckpoint):
        read_target_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigInvalid):
        read_target_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": 3}))
    with pytest.raises(TargetInvalid, match="text_config"):
        read_target_config(tmp_path)
