"""Targets of other families than Kimi-K2's, each with a head that `kconv train` made, served by the real engines.

What an engine accepts of each place of a draft is what kconv's own chain of the head says, to the last token.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.families import QK, train_families
from support.witness import Witnessed, serve_families

from kconv.engines.vllm import CAPTURES

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@pytest.fixture(scope="module")
def trained(cache, tiny_target) -> dict[str, Path]:
    return train_families(cache, tiny_target)


@pytest.fixture(scope="module")
def in_vllm(engine_python, trained, tmp_path_factory) -> dict[str, Witnessed]:
    return serve_families("vllm", engine_python, trained, tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def in_sglang(sglang_python, trained, tmp_path_factory) -> dict[str, Witnessed]:
    return serve_families("sglang", sglang_python, trained, tmp_path_factory.mktemp("sglang"))


def check(found: Witnessed) -> None:
    """Hold what an engine did against kconv's chain."""
    assert not found.error, found.error
    assert found.same == found.prompts == 16
    assert found.unreached == ()
    assert (found.drafts, found.places) == (found.expected_drafts, found.expected_places)
    # Not the chance of a head that drafts nothing.
    assert found.places[0] > 0.1 * found.drafts


@pytest.mark.parametrize("name", ["llama target", "qwen3 target", "gpt_oss target", f"qwen3 target, {QK}"])
def test_vllm_accepts_what_kconvs_chain_says(in_vllm, name):
    check(in_vllm[name])


@pytest.mark.parametrize("name", ["llama target", "qwen3 target"])
def test_sglang_accepts_what_kconvs_chain_says(in_sglang, name):
    check(in_sglang[name])


def test_vllms_own_classes_capture_for_each_target_that_is_listed(engine_python):
    """By transformers' name of the causal model of each text config, as vLLM's registry has it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    classes = {kind: NAMES[kind] for one in CAPTURES for kind in one.model_types if kind in NAMES}
    script = (
        "import json, sys; from vllm.model_executor.models.registry import ModelRegistry;"
        "from vllm.model_executor.models.interfaces import supports_eagle3;"
        "print('FOUND', json.dumps({kind: bool(supports_eagle3(ModelRegistry._try_load_model_cls(name)))"
        " for kind, name in json.loads(sys.argv[1]).items()}))"
    )
    command = [engine_python, "-c", script, json.dumps(classes)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout.rpartition("FOUND ")[2])
    assert found == dict.fromkeys(classes, True)
