"""RoPE in two objects: what is said of a head is what transformers' class, which engines read it by, makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.changes import Change, also, put, rope
from support.faults import FACTOR, Fault
from support.good_heads import SGLANG, TRTLLM, VLLM, Good
from support.heads import GQA, MLA

from kconv.drafters.rope_keys import read_rope
from kconv.drafters.spec import HeadSpec, Rope
from kconv.validate.rules.head import ENGINE_OF
from kconv.validate.rules.subject import ENGINES
from kconv.validate.rules.table import all_rules

SCALING, PARAMETERS = "rope_scaling", "rope_parameters"
NO_THETA = also(put(rope_theta=...), rope(SCALING, rope_theta=...))


def find(rule: str, spec: HeadSpec, change: Change, folder: Path) -> set[str]:
    """Return the engines to which a rule speaks of a head with a change."""
    found = set()
    for engine in ENGINES:
        fault = Fault("", rule, Good("", ENGINE_OF[engine], spec, (engine,)), change)
        head = fault.write(folder / engine)
        found |= {engine for f in fault.validate(head).findings if f.rule == rule}
    return found


@pytest.mark.parametrize("spec", [MLA, FACTOR], ids=["mla", "gqa"])
@pytest.mark.parametrize(
    "change, engines",
    [
        pytest.param(also(), (), id="both whole"),
        pytest.param(put(rope_scaling=...), (), id="rope_parameters alone"),
        pytest.param(put(rope_scaling={}), (), id="rope_scaling empty"),
        pytest.param(put(rope_parameters=...), (), id="rope_scaling alone"),
        pytest.param(rope(SCALING, factor=...), ENGINES, id="no factor in rope_scaling"),
        pytest.param(rope(SCALING, beta_fast=...), ENGINES, id="no beta_fast in rope_scaling"),
        pytest.param(put(rope_scaling={"rope_theta": 50000.0}), ENGINES, id="theta alone in rope_scaling"),
        pytest.param(rope(PARAMETERS, factor=...), (TRTLLM,), id="no factor in rope_parameters"),
        pytest.param(put(rope_parameters={"rope_theta": 50000.0}), (TRTLLM,), id="theta alone in rope_parameters"),
        pytest.param(rope(SCALING, rope_theta=...), (), id="theta at the top"),
        pytest.param(NO_THETA, ENGINES, id="theta in rope_parameters alone"),
    ],
)
def test_an_object_that_is_taken_alone_states_all_of_it(change, engines, spec, tmp_path: Path):
    assert find("K159", spec, change, tmp_path) == set(engines)


@pytest.mark.parametrize("spec, name", [(MLA, "DeepseekV3Config"), (FACTOR, "LlamaConfig")], ids=["mla", "gqa"])
@pytest.mark.parametrize(
    "change",
    [also(), rope(SCALING, factor=...), rope(PARAMETERS, factor=...), rope(SCALING, beta_fast=...), NO_THETA],
    ids=["both whole", "no factor in rope_scaling", "nor in rope_parameters", "no beta_fast", "no theta"],
)
def test_transformers_takes_the_one_that_the_rule_says(change, spec, name: str, tmp_path: Path):
    """Where nothing is said to vLLM its class reads what both objects state; where it is, it fails or reads another."""
    import transformers

    fault = Fault("", "K159", Good("", "vllm", spec, VLLM), change)
    head = fault.write(tmp_path / "head")
    said = any(f.rule == "K159" for f in fault.validate(head).findings)
    config = json.loads((head / "config.json").read_text())
    try:
        read = getattr(transformers, name).from_dict(json.loads(json.dumps(config))).rope_parameters
    except KeyError:
        read = None
    same = read is not None and read_rope({PARAMETERS: read}) == read_rope(config)
    assert same is not said


def test_a_class_that_takes_rope_scaling_as_an_argument_ends_with_rope_parameters():
    """As TensorRT-LLM's class for kimi_k2 is written; in transformers 5 the two are one attribute."""
    from transformers import PretrainedConfig

    class Named(PretrainedConfig):
        def __init__(self, rope_theta=10000.0, rope_scaling=None, max_position_embeddings=4096, **rest):
            self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
            self.max_position_embeddings = max_position_embeddings
            super().__init__(**rest)

    parts = {PARAMETERS: {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 7.0}
    whole = {SCALING: {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}}
    assert Named(**parts, **whole).rope_scaling["rope_type"] == "default"
    assert Named(**whole).rope_scaling["rope_type"] == "yarn"


@pytest.mark.parametrize("spec", [MLA, FACTOR], ids=["mla", "gqa"])
def test_a_scaling_in_transformers_5s_spelling_alone_is_said_to_those_with_older_releases(spec, tmp_path: Path):
    """TensorRT-LLM's releases for transformers 4 silently turn such a head without its scaling."""
    for rule, engine, severity in (("K163", SGLANG, "warning"), ("K158", TRTLLM, "error")):
        assert all_rules()[rule].severity == severity
        assert find(rule, spec, put(rope_scaling=...), tmp_path / rule) == {engine}
        assert find(rule, spec, put(rope_parameters=...), tmp_path / f"{rule} old") == set()


def test_a_head_without_scaling_may_have_it_in_transformers_5s_spelling_alone(tmp_path: Path):
    assert find("K158", replace(GQA, rope=Rope(1e4)), put(rope_scaling=...), tmp_path) == set()
