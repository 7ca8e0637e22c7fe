"""DFlash and DSpark drafters that ModelOpt trained, served by the real engines.

What an engine accepts of each place of a block is what kconv's own forward says, to the last token.

SGLang refuses DFLASH and DSPARK on a CPU. scripts/sglang_cpu changes three of its modules as they load, and links to
each line; drafting, verification and the drafters' classes are SGLang's own. In vLLM's `dflash` one method is replaced
(engines/watch_vllm.py), since its CPU kernel norms the context's keys of all layers with the first one's weights.
vLLM's `dspark` is not served yet: only its V2 runner has it, which needs Triton, and that has no CPU backend.
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/vllm.py#L2978-L2979
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/vllm.py#L3189-L3190
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.silent_faults import SILENT_BLOCKS
from support.trained_blocks import SERVED, train_blocks
from support.witness import FEWER, PROMPTS, Witnessed, rules_of, serve_blocks

pytestmark = [pytest.mark.slow, pytest.mark.engine]

Blocks = tuple[dict[str, Witnessed], dict[str, Path]]


@pytest.fixture(scope="module")
def trained(cache, tiny_target) -> tuple[dict[str, Path], dict[str, Path]]:
    return train_blocks(cache, tiny_target)


@pytest.fixture(scope="module")
def in_vllm(engine_python, trained, tmp_path_factory) -> Blocks:
    return serve_blocks("vllm", engine_python, *trained, tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def in_sglang(sglang_python, trained, tmp_path_factory) -> Blocks:
    return serve_blocks("sglang", sglang_python, *trained, tmp_path_factory.mktemp("sglang"))


def right(engine: str) -> list[str]:
    return [*(f"{name} {engine}" for name in SERVED[engine]), f"DFlash {engine}, K = {FEWER}"]


def check(found: Witnessed) -> None:
    """Hold what an engine did against kconv's forward."""
    assert not found.error, found.error
    assert found.same == found.prompts == PROMPTS
    assert found.unreached == ()
    assert (found.drafts, found.places) == (found.expected_drafts, found.expected_places)
    # Not the chance of a drafter that drafts nothing.
    assert found.length > 1.5 and found.places[1] > 0


@pytest.mark.parametrize("name", right("sglang"))
def test_sglang_accepts_what_kconvs_forward_says(in_sglang, name):
    check(in_sglang[0][name])


@pytest.mark.parametrize("name", right("vllm"))
def test_vllm_accepts_what_kconvs_forward_says(in_vllm, name):
    check(in_vllm[0][name])


@pytest.mark.parametrize("fault", SILENT_BLOCKS, ids=[fault.name for fault in SILENT_BLOCKS])
def test_sglang_serves_a_silent_fault_that_a_rule_names(in_sglang, trained, fault):
    found, good = in_sglang[0][fault.name], in_sglang[0][f"{fault.kind} sglang"]
    assert not found.error
    assert found.same == found.prompts
    assert (found.drafts, found.places) != (good.drafts, good.places)
    assert bool(found.unreached) == bool(fault.unreached)
    assert all(fault.unreached in name for name in found.unreached)
    targets, heads = trained
    assert rules_of(fault, in_sglang[1][fault.name], "sglang", targets["qwen3"], heads[fault.kind])
