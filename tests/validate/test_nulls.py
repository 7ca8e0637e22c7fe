"""Keys that are null: said where an engine takes a null otherwise than an absent key, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from support.changes import Change, also, nest, put
from support.faults import Fault
from support.good_heads import SGLANG, TRTLLM, VLLM, VLLM_V1, VLLM_V2, Good
from support.heads import GQA, MLA

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.drafters.spec import HeadSpec, Norms
from kconv.engines import BY_NAME
from kconv.engines.vllm import REFUSED
from kconv.validate.rules.config import NULLS
from kconv.validate.rules.head import ENGINE_OF

LAYERED = replace(GQA, layers=2)
NORMED = replace(GQA, norms=Norms(before_fc=True))
# By key: engines that stumble over its null in a GQA head and in an MLA head, and the head where it is no plain one.
TYPED = (*VLLM, SGLANG)
EXPECTED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attention_bias": (TYPED, TYPED),
    "initializer_range": (TYPED, TYPED),
    "max_position_embeddings": (TYPED, TYPED),
    "mlp_bias": (TYPED, ()),
    "routed_scaling_factor": ((), TYPED),
    "tie_word_embeddings": (TYPED, TYPED),
    "use_cache": (TYPED, TYPED),
    "target_hidden_size": ((*TYPED, TRTLLM), (*VLLM, TRTLLM)),
    "logit_scale": (VLLM, VLLM),
    "index_topk": ((), VLLM),
    "rope_interleave": ((), (SGLANG,)),
    "partial_rotary_factor": ((SGLANG,), ()),
    "eagle_config": ((TRTLLM,), (TRTLLM,)),
    "eagle_config.next_layer_regular": ((), ()),
    "eagle_config.use_aux_hidden_state": (VLLM, VLLM),
    "eagle_config.norm_before_fc": ((), ()),
}
ENGINES = (VLLM_V1, VLLM_V2, SGLANG, TRTLLM)


def nulled(path: str) -> Change:
    name = path.removeprefix("eagle_config.")
    return nest(**{name: None}) if name != path else put(**{path: None})


def stumble(folder: Path, spec: HeadSpec, change: Change) -> set[str]:
    """Return the engines to which a head with a change has a null."""
    stumbled = set()
    for engine in ENGINES:
        layout = ENGINE_OF[engine]
        fault = Fault("", "", Good("", layout, spec, (engine,)), change)
        head = fault.write(folder / engine)
        report = fault.validate(head)
        stumbled |= {engine for finding in report.findings if finding.rule == "K019"}
    return stumbled


@pytest.mark.parametrize("path", EXPECTED)
def test_a_null_is_said_to_those_who_do_not_take_it_for_an_absent_key(path: str, tmp_path: Path):
    gqa, mla = EXPECTED[path]
    assert stumble(tmp_path / "gqa", GQA, nulled(path)) == set(gqa)
    assert stumble(tmp_path / "mla", MLA, nulled(path)) == set(mla)


def test_each_key_of_the_table_is_tried():
    assert {null.path for null in NULLS} == EXPECTED.keys()


def test_a_null_that_concerns_later_layers_is_said_of_a_head_that_has_some(tmp_path: Path):
    assert stumble(tmp_path, LAYERED, nulled("eagle_config.next_layer_regular")) == {TRTLLM}


def test_a_null_hides_the_norm_before_fc_that_the_top_level_states(tmp_path: Path):
    change = also(put(norm_before_fc=True), nulled("eagle_config.norm_before_fc"))
    assert stumble(tmp_path, NORMED, change) == set(TYPED)


@pytest.mark.parametrize("null", [null for null in NULLS if null.becomes == REFUSED], ids=lambda null: null.path)
def test_transformers_refuses_what_is_said_to_be_refused(null):
    """Which of the two configs a head is read by, `Null.of` says; a key of neither would be carried as it is."""
    from transformers import DeepseekV3Config, LlamaConfig

    refusing = set()
    for config, name in ((LlamaConfig, "gqa"), (DeepseekV3Config, "mla")):
        try:
            config(**{null.path: None})
        except StrictDataclassFieldValidationError:
            refusing.add(name)
    gqa, mla = EXPECTED[null.path]
    assert refusing == {name for name, engines in (("gqa", gqa), ("mla", mla)) if engines}


@pytest.mark.parametrize("spec", [GQA, MLA], ids=["gqa", "mla"])
def test_a_conversion_writes_none_of_these_as_null(spec: HeadSpec, tmp_path: Path):
    """As the rule's advice says, and whatever the source has."""
    every = also(*(nulled(path) for path in EXPECTED if path != "eagle_config"))
    folder = Fault("", "", Good("", "vllm", spec, VLLM), every).write(tmp_path / "head")
    head = read_head(open_checkpoint(folder), hints=Hints(max_positions=1024))
    for layout in ("vllm", "sglang", "trtllm", "portable"):
        config = plan(head, BY_NAME[layout]).config
        nested = {f"eagle_config.{name}": value for name, value in config.get("eagle_config", {}).items()}
        assert {name for name, value in (config | nested).items() if value is None}.isdisjoint(EXPECTED)
