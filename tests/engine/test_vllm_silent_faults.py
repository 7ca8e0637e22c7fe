"""vLLM serves heads with a fault each without a word of it; kconv's rules name each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.silent_faults import SHORT_POSITIONS, SILENT
from support.witness import Served, rules_that_name, serve_vllm, write_broken, write_right

from kconv.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.engine]

FAULTS = tuple(fault for fault in SILENT if "vllm" in fault.engines)
GOOD = ("mla vllm", "gqa vllm", "mla EAGLE-3.1", "gqa EAGLE-3.1")
RAISED = "with --max-positions"


@pytest.fixture(scope="module")
def right(demo, tmp_path_factory) -> dict[str, Path]:
    return write_right(demo, tmp_path_factory.mktemp("right"), "vllm")


@pytest.fixture(scope="module")
def broken(right, tmp_path_factory) -> dict[str, Path]:
    return write_broken(right, tmp_path_factory.mktemp("broken"), "vllm")


@pytest.fixture(scope="module")
def raised(broken, demo, tmp_path_factory) -> Path:
    """A head that states fewer positions than the text has, converted for the target's context."""
    out = tmp_path_factory.mktemp("raised") / "head"
    positions = json.loads((demo / "target" / "config.json").read_text())["max_position_embeddings"]
    words = ["to-vllm", broken[SHORT_POSITIONS], out, "--max-positions", positions]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture(scope="module")
def served(engine_python, demo, right, broken, raised, tmp_path_factory) -> Served:
    """Have vLLM serve them, and some that are right."""
    good = {name: right[name] for name in GOOD} | {RAISED: raised}
    return serve_vllm(engine_python, demo, good | broken, tmp_path_factory.mktemp("vllm"))


# Each head is a server of its own.
@pytest.mark.release
@pytest.mark.parametrize("name", GOOD)
def test_every_parameter_of_a_right_head_is_reached(served, name):
    found = served[0][name]
    assert not found.error
    assert found.unreached == ()
    assert found.same == found.prompts


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_silent_fault_is_named_by_a_rule(broken, demo, fault):
    named = rules_that_name(fault, broken[fault.name], "vllm", demo)
    assert named and (not fault.warning or fault.warning in named)


@pytest.mark.release
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_silent_fault_is_served_without_a_word(served, fault):
    found, good = served[0][fault.name], served[0][f"{fault.kind} vllm"]
    assert not found.error
    assert found.same == found.prompts
    assert ((found.drafts, found.places) == (good.drafts, good.places)) == fault.dropped
    assert bool(found.unreached) == bool(fault.unreached)
    assert all(fault.unreached in name for name in found.unreached)


@pytest.mark.release
def test_beyond_the_positions_that_a_head_states_vllm_drafts_nothing_until_it_states_more(served):
    short, right, raised = (served[0][name] for name in (SHORT_POSITIONS, "gqa vllm", RAISED))
    assert short.length == 1 and right.length > 2
    assert (raised.drafts, raised.places) == (right.drafts, right.places)
