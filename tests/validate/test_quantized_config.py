"""A quantized target's config against its source's: the keys that decide a number, and no other."""

import json

import pytest
from support.quantized_targets import make_form
from support.validated import validate
from transformers import DeepseekV3Config

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.source import Folder
from kconv.quantize.calibration import data_free
from kconv.quantize.plan import plan_quantize
from kconv.quantize.recipe import load_recipe
from kconv.quantize.run import quantize
from kconv.targets.config import COUNTS, parse_target_config
from kconv.validate.quantized import KEYS, check_config


@pytest.fixture(scope="module")
def stated(tiny_target):
    """Return the tiny target's config, as Kimi-K2's own is spelled."""
    return json.loads((tiny_target / "config.json").read_text())


def found(config, source):
    return [finding.where for finding in check_config(parse_target_config(config), parse_target_config(source))]


def other(value):
    """Return another value of the same type, by which a model of it could be built."""
    return not value if isinstance(value, bool) else f"{value}x" if isinstance(value, str) else (value or 0) + 1


@pytest.mark.parametrize("key", [*KEYS, "tie_word_embeddings"])
def test_a_key_that_decides_a_number_is_found_alone_where_it_is_another(key, stated):
    unstated = {"rope_interleave": True} | stated
    assert found(unstated | {key: other(unstated[key])}, stated) == [f"config.json: {key}"]


# No target is read without its counts.
@pytest.mark.parametrize("key", [key for key in KEYS if KEYS[key] is None and key not in COUNTS])
def test_a_key_that_the_output_lost_is_found_where_readers_would_take_their_own(key, stated):
    (finding,) = check_config(parse_target_config(stated | {key: None}), parse_target_config(stated))
    assert finding.message == f"it is not stated, but the source's is {stated[key]!r}"


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 10000.0},
        {"rope_theta": None},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "longrope", "factor": 64.0}},
    ],
    ids=str,
)
def test_rope_that_is_another_is_found(change, stated):
    assert found(stated | change, stated) == ["config.json: rope_parameters"]


def test_rope_of_a_kind_that_kconv_does_not_read_is_compared_as_it_stands(stated):
    longrope = stated | {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}
    assert found(longrope, longrope) == []
    assert found(longrope | {"rope_theta": 1.0}, longrope) == ["config.json: rope_parameters"]


def test_nothing_is_said_of_what_transformers_writes_of_the_same_config(stated, tmp_path):
    """transformers 5 states RoPE in another spelling, fills defaults in, and calls the text model deepseek_v3."""
    values = {key: value for key, value in stated.items() if key != "model_type"}
    DeepseekV3Config(**json.loads(json.dumps(values))).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written and "rope_scaling" not in written and "rope_interleave" in written
    assert written["model_type"] == "deepseek_v3" != stated["model_type"]
    assert found(written, stated) == []


def test_a_wrapped_targets_text_model_is_compared_and_its_other_part_is_not(stated):
    source = {"text_config": stated, "vision_config": {"depth": 2}, "eos_token_id": 2}
    output = {"text_config": stated, "vision_config": {"depth": 2, "hidden_act": "gelu"}, "eos_token_id": [2, 3]}
    assert found(output, source) == []
    wrong = output | {"text_config": stated | {"rms_norm_eps": 1e-3}}
    assert found(wrong, source) == ["config.json: rms_norm_eps"]


def test_validate_reports_it_of_a_target_that_has_no_manifest(tiny_target, tmp_path):
    source = open_checkpoint(make_form(tiny_target, tmp_path / "source", "int4"))
    plan = plan_quantize(source, parse_target_config(source.config), load_recipe("nvfp4-mlp"), data_free())
    quantize(plan, tmp_path / "out")
    (tmp_path / "out" / "kconv.json").unlink()
    file = tmp_path / "out" / "config.json"
    written = json.loads(file.read_text())

    def errors():
        report = validate(Folder(tmp_path / "out"), source=source)
        return [(finding.rule, finding.where) for finding in report.findings if finding.severity == "error"]

    assert errors() == []
    file.write_text(json.dumps(written | {"num_experts_per_tok": 1}))
    assert errors() == [("K393", "config.json: num_experts_per_tok")]
