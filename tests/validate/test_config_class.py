"""What an engine's config class asks for: held against transformers' own classes, by which engines read a head."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.changes import Change, put, to_inner
from support.faults import GQA_VLLM, MLA_VLLM, SPECULATORS, Fault
from support.good_heads import SGLANG, TRTLLM, VLLM, Good
from support.heads import MLA
from support.validated import validate

import kconv
from kconv.checkpoint.manifest import Hints
from kconv.checkpoint.source import Folder
from kconv.engines.vllm import built_layers, default_theta
from kconv.validate.options import ValidateOptions
from kconv.validate.report import Finding
from kconv.validate.rules.config import DEFAULT_HEADS, DTYPES
from kconv.validate.rules.subject import ENGINES


def check(rule: str, base: Good, change: Change, folder: Path, engines: tuple[str, ...] = ENGINES) -> list[Finding]:
    fault = Fault("", rule, base, change, engines)
    head = fault.write(folder)
    return [finding for finding in fault.validate(head).findings if finding.rule == rule]


@pytest.mark.parametrize("stated", [..., None, 3, "", "F8", "kimi_k2\0", ["kimi_k2"]])
def test_a_head_that_no_class_is_chosen_for_is_found(stated: Any, tmp_path: Path):
    from transformers import AutoConfig

    (finding,) = check("K020", MLA_VLLM, put(model_type=stated), tmp_path / "head")
    assert finding.engines == ENGINES
    with pytest.raises((ValueError, TypeError)):
        AutoConfig.from_pretrained(tmp_path / "head")


def test_speculators_format_has_a_key_of_its_own(tmp_path: Path):
    assert not check("K020", SPECULATORS, to_inner(model_type=...), tmp_path / "head")


@pytest.mark.parametrize(
    "key, engines", [("num_attention_heads", (*VLLM, SGLANG, TRTLLM)), ("num_key_value_heads", (TRTLLM,))]
)
def test_the_name_that_an_engine_reads_is_asked_for(key: str, engines: tuple[str, ...], tmp_path: Path):
    found = {
        engine: bool(check("K021", MLA_VLLM, put(**{key: ...}), tmp_path / engine, (engine,))) for engine in ENGINES
    }
    assert found == {engine: engine in engines for engine in ENGINES}


def test_as_many_heads_as_the_default_has_need_not_be_stated(tmp_path: Path):
    spec = replace(MLA, attention=replace(MLA.attention, heads=DEFAULT_HEADS))
    base = Good("as many", "vllm", spec, VLLM)
    assert not check("K021", base, put(num_attention_heads=...), tmp_path / "head")


def test_a_gqa_heads_missing_count_is_no_default(tmp_path: Path):
    assert not check("K021", GQA_VLLM, put(num_key_value_heads=...), tmp_path / "head")


def test_the_default_is_transformers_own():
    from transformers import DeepseekV3Config

    config = DeepseekV3Config()
    assert {config.num_attention_heads, config.num_key_value_heads} == {DEFAULT_HEADS}


@pytest.mark.parametrize("stated", ["bf16", "torch.bfloat16", "auto", "int8", "", 3, ["bfloat16"], {}])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_what_is_no_dtype_is_found(key: str, stated: Any, tmp_path: Path):
    (finding,) = check("K022", GQA_VLLM, put(**{key: stated}), tmp_path / "head")
    assert finding.where == f"config.json: {key}"


@pytest.mark.parametrize("stated", [*sorted(DTYPES), None, ...])
def test_a_dtype_under_any_of_its_names_is_none_of_it(stated: Any, tmp_path: Path):
    assert not check("K022", GQA_VLLM, put(dtype=stated, torch_dtype=stated), tmp_path / "head")


def test_the_names_are_torchs():
    floats = {
        name
        for name in dir(torch)
        if isinstance(dtype := getattr(torch, name), torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    }
    assert floats == DTYPES


NO_THETA = put(rope_theta=..., rope_scaling=..., rope_parameters=...)
# For each option: the head, what its config does not say, the option, and what each engine takes.
TAKEN: dict[str, tuple[Good, Change, Hints, dict[str, Any]]] = {
    "a base": (GQA_VLLM, NO_THETA, Hints(rope_theta=50000.0), dict.fromkeys(ENGINES, 10000.0)),
    "a base of MLA": (MLA_VLLM, NO_THETA, Hints(rope_theta=50000.0), dict.fromkeys(ENGINES, 10000.0)),
    "the engines' own base": (GQA_VLLM, NO_THETA, Hints(rope_theta=10000.0), {}),
    "a number of layers": (GQA_VLLM, put(num_hidden_layers=40), Hints(layers=1), dict.fromkeys(ENGINES, 40)),
    "layers by default": (MLA_VLLM, put(num_hidden_layers=...), Hints(layers=1), dict.fromkeys(ENGINES, 61)),
    "the stored number": (GQA_VLLM, put(), Hints(layers=1), {}),
    "speculators' residual": (
        SPECULATORS, put(norm_before_residual=...), Hints(norm_before_residual=False), dict.fromkeys(VLLM, True)
    ),
    "vLLM's residual": (SPECULATORS, put(norm_before_residual=...), Hints(norm_before_residual=True), {}),
    "speculators' null": (SPECULATORS, put(norm_before_residual=None), Hints(norm_before_residual=False), {}),
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", TAKEN.values(), ids=TAKEN)
def test_an_option_that_an_engine_does_not_see_is_an_error_until_it_is_converted(case, engine: str, tmp_path: Path):
    base, change, hints, taken = case
    fault = Fault("", "K024", base, change, (engine,), hints=hints)
    head = fault.write(tmp_path / "head")
    found = [finding for finding in fault.validate(head).findings if finding.rule == "K024"]
    assert [finding.engines for finding in found] == ([(engine,)] if engine in taken else [])
    for finding in found:
        assert f"takes {taken[engine]!r} from this config (https://" in finding.message
        assert "kconv to-" in finding.fix
    if found:
        kconv.convert(head, tmp_path / "out", to=engine.partition("-")[0], **hints.model_dump(exclude_none=True))
        report = validate(Folder(tmp_path / "out"), ValidateOptions(for_=(engine,)))
        assert not [finding for finding in report.findings if finding.severity == "error"]


@pytest.mark.parametrize("base", [GQA_VLLM, MLA_VLLM], ids=lambda base: base.name)
@pytest.mark.parametrize("kind", [None, "qwen3", "gpt_oss", "minimax_m2"])
def test_the_base_and_the_layers_are_those_of_the_config_class(base: Good, kind: str | None, tmp_path: Path):
    from transformers import AutoConfig

    drop = dict.fromkeys(("num_hidden_layers", "rope_theta", "rope_scaling", "rope_parameters"), ...)
    change = put(**drop, **({"model_type": kind} if kind else {}))
    fault = Fault("", "K024", base, change, hints=Hints(layers=1))
    config = json.loads((fault.write(tmp_path / "head") / "config.json").read_text())
    known = config | ({"model_type": "deepseek_v3"} if config["model_type"] == "kimi_k2" else {})
    (tmp_path / "head" / "config.json").write_text(json.dumps(known))
    theirs = AutoConfig.from_pretrained(tmp_path / "head")
    assert theirs.rope_parameters["rope_theta"] == default_theta(config)
    if kind is None:
        assert theirs.num_hidden_layers == built_layers(config)
