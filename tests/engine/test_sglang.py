"""SGLang's own code, but its kernels, serves heads and accepts what kconv's chain says, place by place.

The kernels are plain torch (scripts/sglang_cpu); scheduler, loader, model classes, capture of layers, drafting and
verification are SGLang's. Its verification is greedy on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.silent_faults import SILENT
from support.witness import (
    CONVERTED,
    LONG,
    LONGER,
    NEW_TOKENS,
    RIGHT,
    STEPS,
    TREE,
    Served,
    expect,
    load,
    prompts_of,
    rules_that_name,
    serve_sglang,
    write_broken,
    write_converted,
    write_right,
)

from kconv.bench.acceptance import read_acceptance
from kconv.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.engine]

FAULTS = tuple(fault for fault in SILENT if "sglang" in fault.engines)


@pytest.fixture(scope="module")
def target(demo):
    return load(demo)


@pytest.fixture(scope="module")
def right(demo, short_gauges, tmp_path_factory) -> dict[str, Path]:
    right = write_right(demo, tmp_path_factory.mktemp("right"), "sglang")
    return right | write_converted(demo, tmp_path_factory.mktemp("converted"), "sglang")


@pytest.fixture(scope="module")
def broken(right, tmp_path_factory) -> dict[str, Path]:
    return write_broken(right, tmp_path_factory.mktemp("broken"), "sglang")


@pytest.fixture(scope="module")
def served(sglang_python, demo, right, tmp_path_factory) -> Served:
    """Have SGLang serve the right ones, and once none."""
    return serve_sglang(sglang_python, demo, right, tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="module")
def served_broken(sglang_python, demo, right, broken, tmp_path_factory) -> Served:
    heads = broken | {name: right[name] for name in ("mla sglang", "gqa sglang")}
    return serve_sglang(sglang_python, demo, heads, tmp_path_factory.mktemp("sglang"))


def test_greedy_decoding_is_that_of_transformers(target, demo, served):
    for prompt, output in zip(prompts_of(demo / "target"), served[1], strict=True):
        with torch.no_grad():
            logits = target(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output
        assert len(output) == NEW_TOKENS + LONGER - 1


@pytest.mark.parametrize("name", [*RIGHT["sglang"], *CONVERTED["sglang"], LONG])
def test_sglang_accepts_what_the_simulated_chain_accepts(served, right, target, demo, name):
    (answers, own), steps = served, LONGER if name == LONG else STEPS
    head = right.get(name, right["mla sglang"])
    found = expect(answers[name], head, target, demo / "target", own, steps)
    assert not found.error
    assert found.same == found.prompts == len(own)
    assert (found.drafts, found.places) == (found.expected_drafts, found.expected_places)
    assert found.length > 1.5
    assert found.unreached == ()


def test_the_commands_start_it_and_find_nothing_wrong(sglang_python, right, demo, tmp_path):
    """Over HTTP: two servers for validate, and one that drafts a tree for bench."""
    head, target = right["mla sglang"], demo / "target"
    words = ["validate", head, "--target", target, "--prompts", demo / "held-out.jsonl", "--engine", "sglang"]
    words += ["--engine-python", sglang_python, "--new-tokens", "24", "--prompt-tokens", "64", "--json"]
    done = CliRunner().invoke(main, [str(word) for word in words])
    report = json.loads(done.stdout)
    assert done.exit_code == 0, report["findings"]
    figures = report["figures"]["engine"]
    assert figures["same_output"] == figures["prompts"] == 4
    assert figures["drafts"] == figures["expected_drafts"] > 0
    assert figures["per_position"] == figures["expected_per_position"]
    assert figures["unreached"] == []
    assert "except for the kernels" in report["provenance"]["engine"]["kernels"]

    (suite := tmp_path / "suite.jsonl").write_text('{"prompt": "When opening as text,"}\n')
    out = tmp_path / "tree.json"
    words = ["bench", "--engine", "sglang", "--engine-python", sglang_python, "--tree", "topk=4,nodes=8", "--out", out]
    words += ["--head", head, "--target", target, "--suite", suite, "--max-tokens", "16"]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    found = read_acceptance(out)
    assert found.provenance["by_request"] == found.provenance["by_counters"]
    [row] = [row for row in found.rows if row.averaging == "micro_steps"]
    assert found.provenance["by_request"]["drafts"] == row.drafts
    assert (row.tree, row.engine, row.draft_tokens) == ("topk=4,nodes=8", "sglang", 3)
    assert row.value and row.value > 1


def test_a_tree_accepts_more_than_a_chain(served):
    tree, chain = served[0][TREE], served[0]["mla sglang"]
    assert tree.same == tree.prompts
    assert tree.length > chain.length + 0.1


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_silent_fault_is_named_by_a_rule(broken, demo, fault):
    assert rules_that_name(fault, broken[fault.name], "sglang", demo)


# Each fault is a server of its own.
@pytest.mark.release
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_silent_fault_is_served_without_a_word(served_broken, fault):
    found, good = served_broken[0][fault.name], served_broken[0][f"{fault.kind} sglang"]
    # It answers, and rightly: speculation changes no output. What it accepts is another thing.
    assert not found.error
    assert found.same == found.prompts
    assert ((found.drafts, found.places) == (good.drafts, good.places)) == fault.dropped
    # What no tensor reached is named, by the mark that kconv puts there.
    assert bool(found.unreached) == bool(fault.unreached)
    assert all(fault.unreached in name for name in found.unreached)
