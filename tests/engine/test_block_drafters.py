"""DFlash and DSpark drafters that ModelOpt trained, served by the real engines.

What an engine accepts of each place of a block is what kconv's own forward says, to the last token.

SGLang refuses DFLASH and DSPARK on a CPU. scripts/sglang_cpu changes three of its modules as they load, and links to
each line; drafting, verification and the drafters' classes are SGLang's own. In vLLM's `dflash` and `dspark` one method
is replaced (engines/watch_vllm.py), since its CPU kernel norms the context's keys of all layers with the first one's
weights. Only vLLM's V2 runner has `dspark`, and it needs Triton, which has no backend for CPUs. So Triton's interpreter
runs the kernels, from a folder beside the environment, and an entry for the CPU stands in Triton's list of backends
(support/vllm_drafts.py): TRITON_INTERPRET=1 and VLLM_USE_V2_MODEL_RUNNER=1.
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/vllm.py#L2978-L2979
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/vllm.py#L3189-L3190
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.silent_faults import SILENT_BLOCKS, SilentFault
from support.trained_blocks import SERVED, convert_blocks, train_blocks
from support.witness import FEWER, NO_FLAG, PROMPTS, Witnessed, rules_of, serve_blocks, write_broken_blocks

from kconv.bench.acceptance import read_acceptance
from kconv.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.engine]

Served = dict[str, Witnessed]


@pytest.fixture(scope="module")
def trained(cache, tiny_target) -> tuple[dict[str, Path], dict[str, Path]]:
    return train_blocks(cache, tiny_target)


@pytest.fixture(scope="module")
def converted(trained, tmp_path_factory) -> dict[str, dict[str, Path]]:
    """Return right drafters in each engine's layout."""
    return {name: convert_blocks(trained[1], name, tmp_path_factory.mktemp(name) / "right") for name in SERVED}


@pytest.fixture(scope="module")
def broken(converted, tmp_path_factory) -> dict[str, dict[str, Path]]:
    return {name: write_broken_blocks(right, name, tmp_path_factory.mktemp(name)) for name, right in converted.items()}


@pytest.fixture(scope="module")
def in_vllm(engine_python, trained, converted, tmp_path_factory) -> Served:
    return serve_blocks("vllm", engine_python, trained[0], converted["vllm"], tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def in_sglang(sglang_python, trained, converted, tmp_path_factory) -> Served:
    return serve_blocks("sglang", sglang_python, trained[0], converted["sglang"], tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="module")
def broken_in_vllm(engine_python, trained, converted, broken, tmp_path_factory) -> Served:
    folder = tmp_path_factory.mktemp("vllm")
    return serve_blocks("vllm", engine_python, trained[0], converted["vllm"], folder, broken["vllm"])


@pytest.fixture(scope="module")
def broken_in_sglang(sglang_python, trained, converted, broken, tmp_path_factory) -> Served:
    folder = tmp_path_factory.mktemp("sglang")
    return serve_blocks("sglang", sglang_python, trained[0], converted["sglang"], folder, broken["sglang"])


def right(engine: str) -> list[str]:
    return [*(f"{name} {engine}" for name in SERVED[engine]), f"DFlash {engine}, K = {FEWER}"]


# vLLM makes this norm in each layer of an Eagle3 head, and uses only the first.
UNUSED = {"P-EAGLE": ("model.layers.1.hidden_norm.weight",)}


def check(found: Witnessed) -> None:
    """Hold what an engine did against kconv's forward."""
    assert not found.error, found.error
    assert found.same == found.prompts == PROMPTS
    assert found.unreached == UNUSED.get(found.head.split()[0], ())
    assert (found.drafts, found.places) == (found.expected_drafts, found.expected_places)
    # Not the chance of a drafter that drafts nothing.
    assert found.length > 1.5 and found.places[1] > 0


@pytest.mark.parametrize("name", right("sglang"))
def test_sglang_accepts_what_kconvs_forward_says(in_sglang, name):
    check(in_sglang[name])


@pytest.mark.parametrize("name", right("vllm"))
def test_vllm_accepts_what_kconvs_forward_says(in_vllm, name):
    check(in_vllm[name])


def test_vllm_serves_a_p_eagle_head_as_another_without_its_flag(in_vllm):
    """As one that drafts a token a step, from each token before: what it drafts is not what the head's forward says."""
    good, other = in_vllm["P-EAGLE vllm"], in_vllm[f"P-EAGLE vllm, {NO_FLAG}"]
    assert not other.error and other.same == other.prompts
    assert (other.drafts, other.places) != (good.drafts, good.places)


def check_fault(served: Served, fault: SilentFault, engine: str) -> None:
    """Hold that an engine served a fault without a word, and drafted otherwise."""
    found, good = served[fault.name], served[f"{fault.kind} {engine}"]
    assert not found.error
    assert found.same == found.prompts
    assert (found.drafts, found.places) != (good.drafts, good.places)
    assert bool(found.unreached) == bool(fault.unreached)
    assert all(fault.unreached in name for name in found.unreached)


SILENT_IN = [(engine, fault) for engine in SERVED for fault in SILENT_BLOCKS if engine in fault.engines]


@pytest.mark.parametrize(("engine", "fault"), SILENT_IN, ids=[f"{engine}-{fault.name}" for engine, fault in SILENT_IN])
def test_a_silent_fault_is_named_by_a_rule(broken, trained, engine, fault):
    targets, heads = trained
    assert rules_of(fault, broken[engine][fault.name], engine, targets["qwen3"], heads[fault.kind])


# Each fault is a server of its own.
@pytest.mark.release
@pytest.mark.parametrize("fault", [one for engine, one in SILENT_IN if engine == "sglang"], ids=lambda one: one.name)
def test_sglang_serves_a_silent_fault_without_a_word(broken_in_sglang, fault):
    check_fault(broken_in_sglang, fault, "sglang")


@pytest.mark.release
@pytest.mark.parametrize("fault", [one for engine, one in SILENT_IN if engine == "vllm"], ids=lambda one: one.name)
def test_vllm_serves_a_silent_fault_without_a_word(broken_in_vllm, fault):
    check_fault(broken_in_vllm, fault, "vllm")


@pytest.mark.parametrize(("engine", "name"), [("vllm", "DFlash"), ("sglang", "DSpark")])
def test_the_commands_start_it_by_its_own_method_and_find_nothing_wrong(engine, name, trained, tmp_path, request):
    """Over HTTP, with K left to the family."""
    (targets, heads), target = trained, tmp_path / "target"
    shutil.copytree(targets["qwen3"], target)
    # bench asks as a chat does.
    shutil.copy(targets["kimi"] / "chat_template.jinja", target)
    python = request.getfixturevalue({"vllm": "engine_python", "sglang": "sglang_python"}[engine])
    head = convert_blocks(heads, engine, tmp_path)[f"{name} {engine}"]
    (prompts := tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("When opening as text,", "Return the number of"))
    )
    common = ["--target", target, "--engine", engine, "--engine-python", python]
    words = ["validate", head, *common, "--prompts", prompts, "--new-tokens", "24", "--json"]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.stdout
    figures = json.loads(done.stdout)["figures"]["engine"]
    assert figures["same_output"] == figures["prompts"] == 2
    assert figures["per_position"] == figures["expected_per_position"]
    assert (figures["drafts"], figures["unreached"]) == (figures["expected_drafts"], [])

    words = ["bench", *common, "--head", head, "--suite", prompts, "--max-tokens", "16", "--out", tmp_path / "a.json"]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    found = read_acceptance(tmp_path / "a.json")
    assert {row.draft_tokens for row in found.rows} == {figures["steps"]} == {len(figures["per_position"])}
