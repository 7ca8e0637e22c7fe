"""What an engine's config class asks for: held against transformers' own classes, by which engines read a head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.changes import Change, put, to_inner
from support.fault import GQA_VLLM, MLA_VLLM, SPECULATORS, Fault
from support.good_heads import SGLANG, TRTLLM, VLLM, Good
from support.heads import MLA

from kconv.checkpoint.source import Folder
from kconv.validate.report import Finding
from kconv.validate.rules.config import DEFAULT_HEADS, DTYPES
from kconv.validate.rules.subject import ENGINES
from kconv.validate.run import validate


def check(rule: str, base: Good, change: Change, folder: Path, engines: tuple[str, ...] = ENGINES) -> list[Finding]:
    fault = Fault("", rule, base, change, engines)
    head = fault.write(folder)
    return [finding for finding in validate(Folder(head), fault.wish(head)).findings if finding.rule == rule]


@pytest.mark.parametrize("stated", [..., None, 3])
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
