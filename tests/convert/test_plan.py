"""Plans: each tensor is used once, nothing is invented, and nothing is written."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from support.heads import GQA, MLA, MODELOPT_LLAMA, PORTABLE, cut, random_slots, write_head, written

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.computed import from_values
from kconv.convert.execute import execute
from kconv.convert.plan import Change, Replaced, SourceTensor, plan, plan_in_place
from kconv.convert.read import read_head
from kconv.drafters.slots import needs
from kconv.engines import BY_NAME
from kconv.engines.layout import Row
from kconv.engines.moves import Stack
from kconv.errors import ConfigInvalid, LayoutCannot

VLLM, TRTLLM, MODELOPT = BY_NAME["vllm"], BY_NAME["trtllm"], BY_NAME["modelopt"]


def planned(root, spec, source, target):
    folder = write_head(root / "head", source, spec, random_slots(spec))
    return plan(read_head(open_checkpoint(folder)), target)


@pytest.mark.parametrize("spec", PORTABLE.values(), ids=PORTABLE)
def test_each_source_tensor_is_the_source_of_one_step(tmp_path, spec):
    decided = planned(tmp_path, spec, VLLM, TRTLLM)
    sources = [source.info.name for step in decided.steps for source in step.sources]
    assert sorted(sources) == sorted(decided.source.checkpoint.tensors)
    assert not decided.dropped
    assert all(step.is_copy for step in decided.steps)


LOST = {"rope_theta": ..., "rope_parameters": ...}


@pytest.mark.parametrize("spec", [GQA, MLA], ids=["GQA", "MLA"])
def test_a_theta_that_the_config_lost_is_not_invented(tmp_path, spec):
    """Written down, an engine's default would pass for what the head was trained with."""
    config = written(spec, **LOST)
    config.get("rope_scaling", {}).pop("rope_theta", None)
    head = read_head(open_checkpoint(write_head(tmp_path / "lost", VLLM, spec, random_slots(spec), config)))
    assert head.spec.rope.theta == 10000.0, "what engines serve it with"
    for layout in (VLLM, TRTLLM):
        with pytest.raises(ConfigInvalid, match="rope_theta") as caught:
            plan(head, layout)
        assert "training config" in caught.value.fix
    put_right = write_head(tmp_path / "right", VLLM, spec, random_slots(spec), config | {"rope_theta": 5e4})
    assert plan(read_head(open_checkpoint(put_right)), TRTLLM).config["rope_theta"] == 5e4


def test_a_theta_in_any_of_its_places_is_stated(tmp_path):
    for number, place in enumerate(("rope_parameters", "rope_scaling")):
        config = written(GQA, **LOST) | {place: {"rope_type": "default", "rope_theta": 5e4}}
        folder = write_head(tmp_path / str(number), VLLM, GQA, random_slots(GQA), config)
        assert plan(read_head(open_checkpoint(folder)), TRTLLM).config["rope_theta"] == 5e4


def test_planning_writes_nothing(tmp_path):
    folder = write_head(tmp_path / "head", MODELOPT, GQA, random_slots(GQA), cut(MODELOPT_LLAMA, GQA))
    before = sorted(tmp_path.rglob("*"))
    plan(read_head(open_checkpoint(folder)), VLLM)
    assert sorted(tmp_path.rglob("*")) == before


def opened(root, spec, layout=VLLM):
    return read_head(open_checkpoint(write_head(root, layout, spec, random_slots(spec))))


def scaled(head, *slots):
    """Return a change that doubles slots."""
    values = {slot: 2 * load_file(head.places[slot][1].file)[head.places[slot][1].name] for slot in slots}
    return values, {
        slot: Replaced(from_values(tensor, "twice"), "converted", (SourceTensor(*head.places[slot]),))
        for slot, tensor in values.items()
    }


@pytest.mark.parametrize("name", ["vllm", "trtllm", "sglang", "portable"])
def test_a_change_of_nothing_plans_the_exact_conversion(tmp_path, name):
    head = opened(tmp_path / "head", GQA)
    assert plan(head, BY_NAME[name], change=Change(head.spec)) == plan(head, BY_NAME[name])


def test_a_replaced_slot_is_computed_and_every_other_tensor_copied(tmp_path):
    head = opened(tmp_path / "head", GQA)
    values, replaced = scaled(head, "0.o_proj")
    decided = plan(head, TRTLLM, change=Change(head.spec, replaced, {"note": 1}, {}))
    manifest = execute(decided, tmp_path / "out")
    changed = [step for step in manifest.tensors if step.action not in ("copied", "renamed")]
    assert [(step.action, step.reason) for step in changed] == [("converted", "twice")] and not manifest.exact
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[changed[0].output.name], values["0.o_proj"])
    assert decided.config["note"] == 1


def test_a_replaced_slot_of_a_fused_row_is_packed_with_the_others(tmp_path):
    head = opened(tmp_path / "head", GQA)
    values, replaced = scaled(head, "0.up_proj")
    apart = ("{i}.gate_proj", "{i}.up_proj")
    rows = [row for row in VLLM.rows if not set(row.slots) & set(apart)]
    fused = replace(VLLM, rows=(*rows, Row("layers.{i}.mlp.gate_up_proj.weight", apart, Stack())))
    execute(plan(head, fused, change=Change(head.spec, replaced)), tmp_path / "out")
    gate = load_file(head.places["0.gate_proj"][1].file)[head.places["0.gate_proj"][1].name]
    written = load_file(tmp_path / "out" / "model.safetensors")["layers.0.mlp.gate_up_proj.weight"]
    assert torch.equal(written, torch.cat([gate, values["0.up_proj"]]))


@pytest.mark.parametrize("place", [lambda head, change: plan(head, VLLM, change=change), plan_in_place])
def test_a_source_tensor_that_a_change_leaves_out_is_refused_unless_it_says_why(tmp_path, place):
    """Both ways through the planner account for every source tensor."""
    head = opened(tmp_path / "head", replace(GQA, draft_vocab=40))
    full = replace(head.spec, draft_vocab=head.spec.vocab)
    shape = needs(full)["lm_head"].shape
    replaced = {"lm_head": Replaced(from_values(torch.ones(shape, dtype=torch.bfloat16), "one"), "expanded")}
    with pytest.raises(LayoutCannot, match=r"has no place for d2t, lm_head\.weight, t2d"):
        place(head, Change(full, replaced))
    dropped = dict.fromkeys(("d2t", "t2d", "lm_head.weight"), "a reason")
    assert place(head, Change(full, replaced, {}, dropped)).dropped == dropped


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_in_place_names_and_config_stay(tmp_path, name):
    head = opened(tmp_path / "head", GQA, BY_NAME[name])
    decided = plan_in_place(head, Change(head.spec, config={"note": 1}))
    assert {step.name for step in decided.steps} == head.checkpoint.tensors.keys()
    assert {step.action for step in decided.steps} == {"copied"}
    assert decided.config == {**head.checkpoint.config, "note": 1}
