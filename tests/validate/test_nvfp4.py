"""Rules against NVFP4 targets: each corruption is found by its rule, and nothing is said of a good target."""

import json
from fnmatch import fnmatchcase

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.deepseek_v4 import write_deepseek_v4
from support.heads import linear_modules
from support.mtp_targets import write_with_mtp
from support.quantized_targets import make_form, write_wide
from support.target_faults import (
    FAULTS,
    FP8_KV,
    GATE,
    K_SCALE,
    MIXED,
    UP,
    V_SCALE,
    block,
    both,
    drop,
    edit,
    excludes,
    fill,
    ignore,
    kv_scale,
    no_blocks,
    root_gone,
    side_block,
    state,
    state_nvfp4,
    to_compressed_tensors,
    write_changed,
)
from support.validated import validate

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.source import Folder
from kconv.cli import main
from kconv.quantize.calibration import data_free
from kconv.quantize.plan import exclude_modules, plan_quantize
from kconv.quantize.recipe import builtin_recipes, load_recipe
from kconv.quantize.run import quantize
from kconv.targets.config import parse_target_config
from kconv.validate.files import is_target
from kconv.validate.options import ValidateOptions
from kconv.validate.rules.table import TARGET_RULES, all_rules
from kconv.validate.rules.target import Excludes


@pytest.fixture(scope="module")
def good(tiny_target, tmp_path_factory):
    """Return the folder of a good target; each is made once."""
    made = {}

    def find(recipe="nvfp4-experts", form="bf16", wrapped=False, mtp=False):
        key = recipe, form, wrapped, mtp
        if key not in made:
            root = tmp_path_factory.mktemp("good")
            plain = write_with_mtp(tiny_target, root / "plain") if mtp else tiny_target
            plain = write_wide(plain, root / "plain") if recipe == MIXED else plain
            source = open_checkpoint(make_form(plain, root / "source", form, wrapped=wrapped))
            plan = plan_quantize(source, parse_target_config(source.config), load_recipe(recipe), data_free())
            quantize(plan, root / "out")
            made[key] = root / "out"
        return made[key]

    return find


def check(folder, **options):
    return validate(Folder(folder), ValidateOptions(**options)).findings


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_corruption_is_found_by_the_rule_it_was_made_for(fault, good, tmp_path):
    folder = write_changed(good(fault.recipe, wrapped=fault.wrapped, mtp=fault.mtp), tmp_path / "target", fault.change)
    found = check(folder)
    mine = [finding for finding in found if finding.rule == fault.rule]
    assert mine, [finding.rule for finding in found]
    assert all(f.severity == all_rules()[f.rule].severity and f.where and f.message and f.fix for f in mine)


def test_every_rule_over_targets_has_a_corruption():
    assert {rule.id for rule in TARGET_RULES} - {fault.rule for fault in FAULTS} == set()


KINDS = (("bf16", False, False), ("int4", True, False), ("fp8", False, True))
GOOD = [(recipe, *kind) for recipe in builtin_recipes() if recipe != MIXED for kind in KINDS]


@pytest.mark.parametrize("recipe, form, wrapped, mtp", GOOD, ids=str)
def test_of_a_good_target_nothing_is_said(recipe, form, wrapped, mtp, good):
    assert check(good(recipe, form, wrapped, mtp)) == ()


@pytest.mark.parametrize("form, wrapped", [("bf16", False), ("int4", True), ("fp8", False)])
def test_of_fp8_beside_nvfp4_only_who_cannot_read_it_is_said(form, wrapped, good):
    folder = good(MIXED, form, wrapped)
    assert [(f.rule, f.severity) for f in check(folder)] == [("K414", "error")]
    assert check(folder, for_=("vllm-v1", "trtllm")) == ()


def test_sglangs_loader_of_kimi_k3_reads_fp8_in_blocks(good, tmp_path):
    def rename(config, tensors, side):
        config["architectures"] = ["KimiK3ForConditionalGeneration"]

    assert check(write_changed(good(MIXED), tmp_path / "target", rename)) == ()


OF_V4 = "layers.1.ffn.experts.0.w1"


def test_of_deepseek_v4_as_it_is_published_nothing_is_said(tmp_path):
    folder = write_deepseek_v4(tmp_path / "target")
    assert is_target(open_checkpoint(folder)) and check(folder) == ()
    done = CliRunner().invoke(main, ["inspect", str(folder), "--json"])
    assert json.loads(done.stdout)["kind"] == "target"


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("K401", drop(f"{OF_V4}.input_scale")),
        ("K403", edit(f"{OF_V4}.weight_scale", torch.Tensor.float)),
        ("K404", edit(f"{OF_V4}.weight_scale", lambda t: t[:, ::2])),
        ("K409", lambda config, tensors, side: tensors.update({f"{OF_V4}.weight_packed": torch.ones(1)})),
        ("K423", block(moe_quant_algo=None)),
        ("K423", block(group_size=32)),
        ("K424", side_block(exclude_modules=["head"])),
        ("K428", lambda config, tensors, side: config.update(num_hidden_layers=4)),
    ],
)
def test_what_is_wrong_with_a_deepseek_v4_is_found(rule, change, tmp_path):
    good = write_deepseek_v4(tmp_path / "good")
    assert rule in {finding.rule for finding in check(write_changed(good, tmp_path / "target", change))}


# FP8 that vLLM reads beside NVFP4: what is stored of a module, from its rows and columns.
OTHER_FP8 = {
    "FP8": lambda rows, columns: {"weight_scale": torch.ones(()), "input_scale": torch.ones(())},
    "FP8_PER_CHANNEL_PER_TOKEN": lambda rows, columns: {"weight_scale": torch.ones(rows, 1)},
    "MXFP8": lambda rows, columns: {"weight_scale": torch.ones(rows, columns // 32, dtype=torch.uint8)},
}


@pytest.mark.parametrize("algorithm", OTHER_FP8)
def test_of_fp8_by_another_algorithm_only_that_kconv_does_not_read_it_is_said(algorithm, good, tmp_path):
    def change(config, tensors, side):
        for name in [name for name in tensors if name.endswith(".o_proj.weight")]:
            module = name.removesuffix(".weight")
            scales = OTHER_FP8[algorithm](*tensors[name].shape)
            tensors |= {f"{module}.{suffix}": scale for suffix, scale in scales.items()}
            state(module, algorithm)(config, tensors, side)

    found = check(write_changed(good(MIXED), tmp_path / "target", change), for_=("vllm-v1",))
    assert [(finding.rule, finding.severity) for finding in found] == [("K439", "warning")]
    assert f"has the quant_algo '{algorithm}', of which kconv checks nothing; so have 2 more" in found[0].message


def test_of_fp8_in_a_config_of_nvfp4_one_thing_is_said(good, tmp_path):
    found = check(write_changed(good(MIXED), tmp_path / "target", state_nvfp4))
    assert [finding.rule for finding in found] == ["K423"]
    assert "is FP8 beside NVFP4, but the config is not MIXED_PRECISION; so are" in found[0].message


def published(config, tensors, side):
    """Exclude as the published targets do: layer by layer, with the dense layer as one."""
    entries = ["model.layers.0*", "lm_head"]
    entries += [f"model.layers.{i}.{part}*" for i in range(1, 7) for part in ("mlp.shared_experts", "self_attn")]
    excludes(lambda _: entries)(config, tensors, side)


def side_gone(config, tensors, side):
    side.clear()


def inner_block(config, tensors, side):
    del config["quantization_config"]


def same_inside(config, tensors, side):
    config["text_config"]["quantization_config"] = config["quantization_config"]


VARIANTS = {
    "excludes as published": (published, False, set()),
    "scales of an FP8 KV cache": (both(kv_scale(K_SCALE, V_SCALE), FP8_KV), False, set()),
    "an FP8 KV cache without scales, as ModelOpt's fp8_cast": (FP8_KV, False, set()),
    "another producer's version": (block(producer={"name": "modelopt", "version": "0.41.0"}), False, set()),
    "no config_groups": (block(config_groups={}), False, set()),
    "the side file alone": (inner_block, False, set()),
    "no side file": (side_gone, False, {"K425"}),
    "the same block in text_config too": (same_inside, True, set()),
}


@pytest.mark.parametrize("change, wrapped, said", VARIANTS.values(), ids=VARIANTS)
def test_of_another_good_target_nothing_is_said_but_to_know(change, wrapped, said, good, tmp_path):
    found = check(write_changed(good(wrapped=wrapped), tmp_path / "target", change))
    assert {finding.rule for finding in found} == said
    assert all(finding.severity == "note" for finding in found)


def leave(name):
    return lambda config, tensors, side: tensors.update({name: torch.ones(1)})


PACKED_FAULTS = {
    "a scale is gone": (drop(f"{UP}.weight_global_scale"), {"K402"}),
    "gate and up differ": (edit(f"{UP}.weight_global_scale", lambda scale: scale * 2), {"K440"}),
    "a scale is zero": (both(*(fill(f"{part}.weight_global_scale", 0.0) for part in (UP, GATE))), {"K442"}),
    "no scale of an input": (drop(f"{UP}.input_global_scale"), {"K401"}),
    "a scale of ModelOpt's beside": (leave(f"{UP}.weight_scale_2"), {"K409"}),
}


@pytest.mark.parametrize("change, said", PACKED_FAULTS.values(), ids=PACKED_FAULTS)
def test_the_tensors_of_compressed_tensors_form_are_checked_too(change, said, good, tmp_path):
    folder = write_changed(good(), tmp_path / "target", both(to_compressed_tensors, change))
    assert {finding.rule for finding in check(folder)} == said | {"K436"}


# Rules over the config that hold in compressed-tensors' form too: faults made before the conversion, then after it.
BEFORE = ("K412", "K422", "K428", "K429", "K430", "K431", "K432", "K435")


def leave_fp8(config, tensors, side):
    tensors[f"{K_SCALE.rpartition('.')[0]}.weight"] = torch.ones(4, 32).to(torch.float8_e4m3fn)


INT4_GROUP = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}}
AFTER = {
    "no config": ("K420", no_blocks),
    "no packed weights": ("K421", lambda config, tensors, side: [tensors.pop(n) for n in packed_names(tensors)]),
    "a method of another library": ("K423", block(quant_method="modelopt")),
    "another format": ("K423", block(format="pack-quantized")),
    "a group of INT4": ("K423", block(config_groups=INT4_GROUP)),
    "ModelOpt's side file": ("K424", lambda config, tensors, side: side.update(quantization={"quant_algo": "NVFP4"})),
    "a KV cache in four bits": ("K426", block(kv_cache_scheme={"num_bits": 4, "type": "float"})),
    "scales of a KV cache that nothing speaks of": ("K427", kv_scale(K_SCALE, V_SCALE)),
    "an expression for everything": ("K431", block(ignore=["re:.*"])),
    "an expression that is none": ("K430", block(ignore=["re:("])),
    "FP8 beside": ("K423", leave_fp8),
}


def packed_names(tensors):
    return [n for n in tensors if n.endswith(("_packed", "_global_scale", "weight_scale"))]


CONVERTED = [f for f in FAULTS if f.rule in BEFORE and f.recipe != MIXED and f.change is not root_gone]


@pytest.mark.parametrize("fault", CONVERTED, ids=lambda fault: fault.name)
def test_what_holds_of_modelopts_config_holds_of_compressed_tensors(fault, good, tmp_path):
    source = good(fault.recipe, wrapped=fault.wrapped, mtp=fault.mtp)
    folder = write_changed(source, tmp_path / "target", both(fault.change, to_compressed_tensors))
    assert fault.rule in {finding.rule for finding in check(folder)}


@pytest.mark.parametrize("rule, change", AFTER.values(), ids=AFTER)
def test_the_config_of_compressed_tensors_form_is_checked_too(rule, change, good, tmp_path):
    folder = write_changed(good(), tmp_path / "target", both(to_compressed_tensors, change))
    assert rule in {finding.rule for finding in check(folder)}


@pytest.mark.parametrize("entry", ["re:(", "re:a{99999999999}"])
def test_an_entry_that_is_no_expression_is_named_beside_valid_ones(entry, good, tmp_path):
    folder = write_changed(good(), tmp_path / "target", both(to_compressed_tensors, ignore(entry)))
    found = {finding.rule: finding for finding in check(folder)}
    assert found.keys() == {"K436", "K438"}
    assert found["K438"].where.endswith(".ignore") and repr(entry) in found["K438"].message


@pytest.mark.parametrize("wrapped, mtp", [(False, False), (True, False), (False, True)])
def test_of_a_good_target_in_compressed_tensors_form_only_who_cannot_read_it_is_said(wrapped, mtp, good, tmp_path):
    folder = write_changed(good(wrapped=wrapped, mtp=mtp), tmp_path / "target", to_compressed_tensors)
    assert {finding.rule for finding in check(folder)} == {"K436"}


@pytest.mark.parametrize("form", ["bf16", "int4", "fp8"])
def test_a_target_that_is_not_nvfp4_is_none_of_their_business(form, tiny_target, tmp_path):
    assert check(make_form(tiny_target, tmp_path / "target", form)) == ()


def test_headers_only_reads_no_scale(good, tmp_path):
    double = next(fault for fault in FAULTS if fault.rule == "K440")
    folder = write_changed(good(), tmp_path / "target", double.change)
    assert check(folder, headers_only=True) == ()
    assert [finding.rule for finding in check(folder)] == ["K440"]


def test_what_only_tensorrt_llm_minds_is_not_said_for_vllm(good, tmp_path):
    fault = next(fault for fault in FAULTS if fault.rule == "K434")
    folder = write_changed(good(), tmp_path / "target", fault.change)
    assert check(folder, for_=("vllm-v1",)) == ()


@given(layers=st.integers(1, 24), experts=st.integers(1, 3), wrapped=st.booleans(), data=st.data())
def test_what_the_quantizer_excludes_covers_just_what_it_left(layers, experts, wrapped, data):
    modules = linear_modules("language_model." if wrapped else "", layers=layers, experts=experts)
    inner = [name for name in modules if ".layers." in name and not name.endswith("mlp.gate")]
    pattern = data.draw(st.sampled_from(["*.experts.*", "*.mlp.*", "*", "*.layers.1.*"]))
    quantized = {name for name in inner if fnmatchcase(name, pattern) and not name.endswith("kv_b_proj")}
    excluded = Excludes(tuple(exclude_modules(modules, quantized)))
    for name in inner:
        assert (excluded.covering(name) is None) == (name in quantized), name
        if name not in quantized:
            assert excluded.is_wildcard_for(name)


def test_the_json_names_rule_and_place(good, tmp_path):
    folder = write_changed(good(), tmp_path / "target", FAULTS[0].change)
    said = json.loads(validate(Folder(folder)).to_json())["findings"]
    assert said[0]["rule"] == "K401" and "more" in said[0]["message"]
