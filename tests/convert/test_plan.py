"""Plans: what each engine has no place for is refused before a byte is written, with what to do instead."""

from dataclasses import replace

import pytest
from support.configs import MODELOPT_LLAMA, cut, written
from support.heads import GQA, MLA, PORTABLE, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import BY_NAME
from kconv.errors import ConfigInvalid, LayoutCannot
from kconv.head.spec import Norms

VLLM, TRTLLM, MODELOPT = BY_NAME["vllm"], BY_NAME["trtllm"], BY_NAME["modelopt"]


def planned(root, spec, source, target):
    folder = write_head(root / "head", source, spec, random_slots(spec))
    return plan(read_head(open_checkpoint(folder)), target)


CANNOT = {
    "TensorRT-LLM takes the residual before the norm": (replace(GQA, norms=Norms(before_residual=True)), VLLM, TRTLLM),
    "TensorRT-LLM loads no reduced MLA head": (replace(MLA, draft_vocab=40), VLLM, TRTLLM),
    "TensorRT-LLM has no fc for one state": (replace(GQA, captured=(3,)), VLLM, TRTLLM),
    "vLLM's MLA has no norm before fc": (replace(MLA, norms=Norms(before_fc=True)), TRTLLM, VLLM),
    "vLLM drops fc's bias": (replace(GQA, fc_bias=True), TRTLLM, VLLM),
    "vLLM's MLA drops the MLP's biases": (replace(MLA, mlp_bias=True), TRTLLM, VLLM),
}


@pytest.mark.parametrize("spec, source, target", CANNOT.values(), ids=CANNOT)
def test_what_an_engine_cannot_hold_is_refused(tmp_path, spec, source, target):
    with pytest.raises(LayoutCannot) as caught:
        planned(tmp_path, spec, source, target)
    assert caught.value.fix


@pytest.mark.parametrize("spec, source", [(spec, source) for spec, source, _ in CANNOT.values()], ids=CANNOT)
def test_the_other_engine_takes_it(tmp_path, spec, source):
    assert planned(tmp_path, spec, source, source).spec == spec


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


def test_a_layout_that_is_only_read_is_not_written(tmp_path):
    with pytest.raises(LayoutCannot) as caught:
        planned(tmp_path, GQA, VLLM, MODELOPT)
    assert "vllm" in caught.value.fix


def test_planning_writes_nothing(tmp_path):
    folder = write_head(tmp_path / "head", MODELOPT, GQA, random_slots(GQA), cut(MODELOPT_LLAMA, GQA))
    before = sorted(tmp_path.rglob("*"))
    plan(read_head(open_checkpoint(folder)), VLLM)
    assert sorted(tmp_path.rglob("*")) == before
