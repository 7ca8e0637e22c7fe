"""Plans: each tensor is used once, nothing is invented, and nothing is written."""

import pytest
from support.configs import MODELOPT_LLAMA, cut, written
from support.heads import GQA, MLA, PORTABLE, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import BY_NAME
from kconv.errors import ConfigInvalid

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
