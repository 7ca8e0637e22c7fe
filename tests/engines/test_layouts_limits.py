"""What an engine has no place for is refused, with the reason; each limit of each layout is met here."""

import re
from dataclasses import replace

import pytest
from support.heads import GQA, MLA, QK, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.attention.swap import check_convertible
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import read_head
from kconv.convert.shared import SharedTensors
from kconv.drafters.eagle3 import EAGLE3
from kconv.drafters.spec import Linear, Llama3, Norms, Rope, Yarn
from kconv.engines import BY_NAME, LAYOUTS
from kconv.engines.dflash import READ_IN_PARTS
from kconv.engines.trtllm import MLA_MODULE
from kconv.errors import LayoutCannot, RecipeInvalid
from kconv.quantize.head.formats import FORMATS
from kconv.quantize.head.plan import check_head
from kconv.train.recipe import EagleRecipe

ALL = ("trtllm", "vllm", "sglang", "portable")
PLAIN = Yarn(factor=64.0, original_max_positions=4096)
MLA, GQA = replace(MLA, captured=(1, 3, 5)), replace(GQA, captured=(1, 3, 5))


def gqa_yarn(**values):
    return replace(GQA, rope=Rope(1e4, replace(PLAIN, **values)))


def mla_rope(scaling):
    return replace(MLA, rope=Rope(5e4, scaling))


# A spec, the engines that refuse it, and what each of them says.
REFUSED = {
    "MLA, linear RoPE": (mla_rope(Linear(2.0)), ALL, "DeepSeek's YaRN"),
    "MLA, Llama-3 RoPE": (mla_rope(Llama3(8.0, 1.0, 4.0, 8192)), ALL, "DeepSeek's YaRN"),
    "MLA, an attention factor": (mla_rope(replace(PLAIN, attention_factor=1.2)), ALL, "attention_factor"),
    "MLA, the attention factor that vLLM takes for another RoPE": (
        mla_rope(replace(PLAIN, mscale=1.0, mscale_all_dim=1.0, attention_factor=1.0)),
        ALL,
        "attention_factor",
    ),
    "MLA, mscale alone": (mla_rope(replace(PLAIN, mscale=1.0)), ALL, "one of mscale"),
    "MLA, mscale_all_dim alone": (mla_rope(replace(PLAIN, mscale_all_dim=1.0)), ALL, "one of mscale"),
    "GQA, an attention factor": (gqa_yarn(attention_factor=1.2), ("trtllm", "sglang", "portable"), "attention_factor"),
    "GQA, mscale alone": (gqa_yarn(mscale=0.7), ("trtllm", "portable"), "mscale"),
    "GQA, mscale_all_dim alone": (gqa_yarn(mscale_all_dim=0.7), ("trtllm", "portable"), "mscale"),
    "GQA, an mscale of nought": (gqa_yarn(mscale=0.0, mscale_all_dim=1.0), ("trtllm", "sglang", "portable"), "mscale"),
    "the residual after the norm": (
        replace(GQA, norms=Norms(before_residual=True)),
        ("trtllm", "sglang", "portable"),
        "norm_before_residual",
    ),
    "P-EAGLE": (replace(GQA, mask=3), ("trtllm", "sglang", "portable"), "parallel"),
    "P-EAGLE with MLA": (replace(MLA, mask=3), ALL, "parallel"),
    "a single captured layer": (replace(MLA, captured=(3,)), ("trtllm", "sglang", "portable"), "fc"),
    "states as wide together as the head": (
        replace(GQA, captured=(1, 3), target_hidden=24),
        ("trtllm", "sglang", "portable"),
        "skips fc",
    ),
    "the output of layer 0": (replace(MLA, captured=(0, 3, 5)), ("sglang", "portable"), "output of layer 0"),
    "MLA in float32": (replace(MLA, dtype="F32"), ("trtllm", "portable"), "bfloat16"),
    "MLA in float16": (replace(MLA, dtype="F16"), ("trtllm", "portable"), "bfloat16"),
    "MLA, a reduced vocabulary": (replace(MLA, draft_vocab=40), ("trtllm", "portable"), "reduced vocabulary"),
    "MLA, two layers": (replace(MLA, layers=2), ("sglang", "portable"), "one layer"),
    "MLA, a norm before fc": (
        replace(MLA, norms=Norms(before_fc=True)),
        ("vllm", "sglang", "portable"),
        "norm_before_fc",
    ),
    "MLA, biases of the MLP": (replace(MLA, mlp_bias=True), ("vllm", "sglang", "portable"), "MLP"),
    "GQA, biases of the MLP": (replace(GQA, mlp_bias=True), ("sglang", "portable"), "MLP"),
    "GQA, biases of the attention": (
        replace(GQA, attention=replace(GQA.attention, bias=True)),
        ("sglang", "portable"),
        "q_proj",
    ),
    "GQA, a bias of fc": (replace(GQA, fc_bias=True), ("vllm", "sglang", "portable"), "fc.bias"),
    "MLA, a bias of fc": (replace(MLA, fc_bias=True), ("vllm", "portable"), "fc.bias"),
    "norms of queries and keys": (QK, ("trtllm", "sglang", "portable"), "query and key norms"),
    "norms of queries and keys, biases of the MLP": (replace(QK, mlp_bias=True), ALL, "query and key norms"),
    "both norms before fc": (replace(GQA, norms=Norms(before_fc=True, fc=True)), ("trtllm", "portable"), "fc_norm"),
}


# What the speculators library has no place for, which is no engine.
OF_SPECULATORS = {
    "MLA": (MLA, "no latent attention"),
    "both norms before fc": (replace(GQA, norms=Norms(before_fc=True, fc=True)), "not both"),
    "a target of another width": (replace(GQA, target_hidden=56), "as wide as the head"),
    "a bias of fc": (replace(GQA, fc_bias=True), "no bias"),
    "d2t without t2d": (replace(GQA, draft_vocab=40), "t2d as well as d2t"),
}


@pytest.mark.parametrize("spec, phrase", OF_SPECULATORS.values(), ids=OF_SPECULATORS)
def test_what_the_speculators_library_has_no_place_for_is_refused(tmp_path, spec, phrase):
    slots = random_slots(spec, without=("t2d",))
    head = read_head(open_checkpoint(write_head(tmp_path / "head", BY_NAME["vllm"], spec, slots)))
    with pytest.raises(LayoutCannot, match=phrase) as caught:
        plan(head, BY_NAME["speculators"], WriteOptions(SharedTensors("org/target", {}, layers=9, model_type="llama")))
    assert caught.value.fix
    with pytest.raises(LayoutCannot):
        plan(head, BY_NAME["speculators"])


@pytest.mark.parametrize("spec, engines, phrase", REFUSED.values(), ids=REFUSED)
def test_refused_with_the_reason(tmp_path, spec, engines, phrase):
    # A folder that says all of a spec, whichever engine could load it.
    head = read_head(open_checkpoint(write_head(tmp_path / "head", BY_NAME["vllm"], spec, random_slots(spec))))
    assert head.spec == spec
    for name in ALL:
        if name in engines:
            with pytest.raises(LayoutCannot) as caught:
                plan(head, BY_NAME[name])
            assert phrase in caught.value.what and caught.value.fix
        else:
            assert plan(head, BY_NAME[name]).steps


TAKEN = {
    "GQA, both mscales": (gqa_yarn(mscale=0.7, mscale_all_dim=0.9), ALL),
    "GQA, neither": (gqa_yarn(), ALL),
    "MLA, neither": (mla_rope(PLAIN), ALL),
    "MLA, no scaling": (mla_rope(None), ALL),
    "GQA, Llama-3 RoPE": (replace(GQA, rope=Rope(5e5, Llama3(8.0, 1.0, 4.0, 8192))), ALL),
    "GQA, an attention factor that says what is meant anyway": (
        gqa_yarn(mscale=1.0, mscale_all_dim=1.0, attention_factor=1.0),
        ALL,
    ),
    "GQA, two layers": (replace(GQA, layers=2), ALL),
    "GQA in float32": (replace(GQA, dtype="F32"), ALL),
    "GQA in float16": (replace(GQA, dtype="F16"), ALL),
    "GQA, reduced": (replace(GQA, draft_vocab=40), ALL),
    "MLA, other layers": (replace(MLA, captured=(7, 23, 51)), ALL),
}


@pytest.mark.parametrize("spec, engines", TAKEN.values(), ids=TAKEN)
def test_taken(tmp_path, spec, engines):
    head = read_head(open_checkpoint(write_head(tmp_path / "head", BY_NAME["vllm"], spec, random_slots(spec))))
    for name in engines:
        assert plan(head, BY_NAME[name]).steps


@pytest.mark.parametrize("dtype", ["F32", "F16"])
@pytest.mark.parametrize("engine", ["trtllm", "portable"])
def test_rounding_is_the_cure_that_is_named_for_an_mla_head_in_another_dtype(tmp_path, engine, dtype):
    spec = replace(MLA, dtype=dtype)
    head = read_head(open_checkpoint(write_head(tmp_path / "head", BY_NAME["vllm"], spec, random_slots(spec))))
    with pytest.raises(LayoutCannot) as caught:
        plan(head, BY_NAME[engine])
    assert "--dtype bfloat16" in caught.value.fix
    planned = plan(head, BY_NAME[engine], WriteOptions(dtype="BF16"))
    assert {step.dtype for step in planned.steps} == {"BF16"} and planned.config["torch_dtype"] == "bfloat16"


def test_every_limit_is_met_above():
    """Those of quantized heads aside, which depend on tensors and not on the spec."""
    for layout in (one for one in LAYOUTS if one.drafter is EAGLE3):
        for limit in layout.limits:
            met = [spec for spec, engines, _ in REFUSED.values() if layout.name in engines and limit.hits(spec)]
            met += [spec for spec, _ in OF_SPECULATORS.values() if layout.name == "speculators" and limit.hits(spec)]
            assert met or limit.holds, limit.what


def test_portable_refuses_what_any_engine_refuses():
    engines = [BY_NAME[name] for name in ALL[:-1]]
    union = {limit.what for layout in engines for limit in layout.limits}
    assert {limit.what for limit in BY_NAME["portable"].limits} == union


def test_a_limit_names_the_lines_that_decide_it_at_a_tag_or_a_commit():
    pinned = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/blob/(v[\d.]+|[0-9a-f]{40})/\S+\.py#L\d+(-L\d+)?")
    for layout in LAYOUTS:
        for limit in (*layout.limits, *layout.target_limits):
            # A file that was only read in parts, so that its lines were not counted; a comment names the function.
            assert pinned.fullmatch(limit.source) or limit.source in (MLA_MODULE, *READ_IN_PARTS), (
                layout.name,
                limit.what,
            )


def test_a_reduced_mla_head_is_told_the_command_that_expands_it(tmp_path):
    spec = replace(MLA, draft_vocab=40)
    head = read_head(open_checkpoint(write_head(tmp_path / "head", BY_NAME["vllm"], spec, random_slots(spec))))
    with pytest.raises(LayoutCannot) as caught:
        plan(head, BY_NAME["trtllm"])
    assert "kconv vocab HEAD --expand OUT" in caught.value.fix


def test_a_p_eagle_head_is_not_changed_as_one_that_drafts_a_token_a_step(tmp_path):
    spec = replace(GQA, mask=3)
    head = read_head(open_checkpoint(write_head(tmp_path / "head", BY_NAME["vllm"], spec, random_slots(spec))))
    for work, does in (
        (lambda: check_convertible(head.spec, "mla"), "converts the attention of"),
        (lambda: check_head(head, FORMATS["fp8"]), "quantizes"),
    ):
        with pytest.raises(LayoutCannot, match=f"kconv {does} only Eagle3 heads that draft a token a step"):
            work()
    with pytest.raises(RecipeInvalid, match="it has parallel drafting"):
        EagleRecipe.of_head(spec)
