"""Rules against heads: each corruption is found by the rule it was made for, and nothing is said of a good head."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.changes import P, drop, edit, nest, put
from support.faults import FAULTS, GQA_TRT, GQA_VLLM, MLA_VLLM, MODELOPT_GQA, REDUCED, Fault, good, write_target
from support.good_heads import GOOD, SGLANG, TRTLLM, VLLM_V1, VLLM_V2, Good, trained_slots
from support.heads import GQA, MLA, TARGET
from support.published import EAGLE3
from support.validated import validate

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import ConversionRecord, Hints
from kconv.checkpoint.source import Folder
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.drafters.spec import Linear, Rope, Yarn
from kconv.engines import BY_NAME, by_name
from kconv.validate.options import ValidateOptions
from kconv.validate.report import Finding, Report
from kconv.validate.rules.table import HEAD_RULES, all_rules

# What a launch flag must supply, and what is not compared where no target is given.
ALWAYS = {"K144", "K184", "K193", "K194", "K195", "K196", "K214", "K533", "K538"}


def check(folder: Path, engines: tuple[str, ...] = (), *, headers_only: bool = False, **about) -> Report:
    options = ValidateOptions(for_=engines, headers_only=headers_only)
    return validate(Folder(folder), options, **about)


def of(report: Report, rule: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.rule == rule]


def test_a_name_that_one_engine_does_not_read_concerns_that_engine_alone(tmp_path):
    [fault] = [one for one in FAULTS if one.name == "a second layer's norm under vLLM's name, for TensorRT-LLM"]
    report = check(fault.write(tmp_path / "head"), (VLLM_V1, VLLM_V2, TRTLLM), headers_only=True)
    assert [finding.engines for finding in of(report, "K131")] == [("trtllm",)]
    told = {verdict.engine: verdict.errors for verdict in report.verdicts}
    assert told["vLLM"] == 0 < told["TensorRT-LLM"]


def test_an_mla_head_without_its_targets_scaling_lost_it_unless_a_conversion_fitted_it(tmp_path):
    yarn = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    target = TARGET | {"kv_lora_rank": 16, "rope_scaling": yarn}
    fault = Fault("", "", good("vllm", replace(MLA, rope=Rope(50000.0))), target=target)
    folder = fault.write(tmp_path / "head")
    assert [finding.severity for finding in of(fault.validate(folder), "K165")] == ["warning"]
    out = tmp_path / "converted" / "head"
    manifest = execute(plan(read_head(open_checkpoint(folder)), by_name("vllm")), out)
    record = ConversionRecord(
        method="", calibration="", calibration_sha256="", sequences=2, context=8, rows=8, heal_steps=0, held_out={}
    )
    (out / "kconv.json").write_text(manifest.model_copy(update={"conversion": record}).model_dump_json(by_alias=True))
    assert [finding.severity for finding in of(fault.validate(out), "K165")] == ["note"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_corruption_is_found_by_the_rule_it_was_made_for(fault: Fault, tmp_path: Path):
    folder = fault.write(tmp_path / "head")
    report = fault.validate(folder)
    found = of(report, fault.rule)
    assert found, [finding.rule for finding in report.findings]
    assert all(f.severity == all_rules()[fault.rule].severity and f.message and f.fix for f in found)


@pytest.mark.parametrize("good", GOOD.values(), ids=GOOD)
def test_of_a_good_head_nothing_is_said_but_what_a_flag_must_supply(good, tmp_path: Path):
    report = check(good.write(tmp_path / "head"), good.engines)
    assert [f for f in report.findings if f.severity != "note"] == []
    assert {f.rule for f in report.findings} <= ALWAYS | {"K203"}


def test_each_thing_that_a_flag_must_supply_is_said_of_a_good_head(tmp_path: Path):
    told = {
        finding.rule
        for name in ("mla, portable", "gqa, portable", "dflash, portable")
        for finding in check(GOOD[name].write(tmp_path / name), ("all",)).findings
    }
    assert told >= ALWAYS


def test_every_rule_over_heads_has_a_corruption_or_is_said_of_good_ones():
    assert {rule.id for rule in HEAD_RULES} - {fault.rule for fault in FAULTS} <= ALWAYS


def test_the_corruptions_were_good_before(tmp_path: Path):
    bases = {fault.base.name + repr(fault.base.spec): fault.base for fault in FAULTS if not fault.engines}
    for number, base in enumerate(bases.values()):
        if any(limit.applies(base.spec, ()) for limit in BY_NAME[base.layout].limits) or base.layout == "specforge":
            continue
        found = check(base.write(tmp_path / str(number)), base.engines).findings
        assert [f.rule for f in found if f.severity == "error"] == [
            rule for rule in ("K191",) if base.layout == "speculators" and base.spec.kind == "mla"
        ]


def test_there_are_as_many_as_promised():
    assert len(FAULTS) >= 60 and len(GOOD) >= 20 and len({fault.name for fault in FAULTS}) == len(FAULTS)
    rules = {fault.rule for fault in FAULTS}
    assert len(rules) >= 60
    assert {name for name, one in BY_NAME.items() if one.write_config} <= {good.layout for good in GOOD.values()}


def write(folder: Path, base, change) -> Path:
    return Fault("", "", base, change).write(folder)


def test_without_values_maps_and_weights_are_not_looked_at(tmp_path: Path):
    def spoil(config, tensors):
        tensors["d2t"].zero_()
        tensors["fc.weight"][0, 0] = float("nan")

    folder = write(tmp_path / "head", REDUCED, spoil)
    assert {f.rule for f in check(folder).findings} >= {"K174", "K201"}
    report = check(folder, headers_only=True)
    assert report.clean and report.weights == {} and report.provenance["headers_only"] is True


def test_every_missing_tensor_is_named(tmp_path: Path):
    names = ["fc.weight", f"{P}hidden_norm.weight", f"{P}mlp.up_proj.weight", "norm.weight"]
    report = check(write(tmp_path / "head", MLA_VLLM, drop(*names)))
    assert sorted(f.where for f in report.findings if f.severity == "error") == sorted(names)


# Its loader skips a module of a GQA head for which it finds no tensors:
# https://github.com/NVIDIA/TensorRT-LLM/blob/047098b74c51f488abcfcd72f7d4a988a56442f6/tensorrt_llm/_torch/models/modeling_utils.py
LOST_IN_SILENCE = {
    "fc.weight": "K104",
    "norm.weight": "K106",
    f"{P}hidden_norm.weight": "K106",
    f"{P}input_layernorm.weight": "K106",
    f"{P}post_attention_layernorm.weight": "K106",
    f"{P}self_attn.o_proj.weight": "K108",
    f"{P}mlp.down_proj.weight": "K108",
}


@pytest.mark.parametrize("name, rule", LOST_IN_SILENCE.items(), ids=LOST_IN_SILENCE)
def test_a_tensor_that_tensorrt_llm_leaves_uninitialized_in_silence_fails_for_it(name: str, rule: str, tmp_path: Path):
    report = check(write(tmp_path / "head", GQA_TRT, drop(name)), (TRTLLM,))
    (error,) = (finding for finding in report.findings if finding.severity == "error")
    assert (error.rule, error.where) == (rule, name)
    assert error.engines in ((), (TRTLLM,)) and not report.clean


def test_weights_in_float32_are_no_error_where_tensorrt_llm_casts_them_to_bfloat16(tmp_path: Path):
    """As an older revision of NVIDIA's MLA head for Kimi-K2 is: its config states bfloat16."""
    head = good("trtllm", replace(MLA, dtype="F32"), (TRTLLM,))
    report = check(write(tmp_path / "cast", head, put(torch_dtype="bfloat16", dtype="bfloat16")), (TRTLLM,))
    assert not of(report, "K347") and of(report, "K208")
    assert of(check(write(tmp_path / "kept", head, put()), (TRTLLM,)), "K347")


def test_a_rule_speaks_to_those_who_asked(tmp_path: Path):
    folder = write(tmp_path / "head", MODELOPT_GQA, nest())
    for engines, rule, said in (
        ((VLLM_V1,), "K140", True),
        ((VLLM_V2,), "K140", False),
        ((SGLANG,), "K140", False),
        ((TRTLLM,), "K140", False),
        (("vllm",), "K143", True),
    ):
        assert bool(of(check(folder, engines), rule)) is said
    (finding,) = of(check(folder, ("all",)), "K140")
    # The other runner is in the rule too, and not in what was found.
    assert finding.engines == ("vllm-v1",) and "v1 would feed it those of [0, 2, 4]" in finding.message
    found = of(check(GQA_VLLM.write(tmp_path / "for-vllm"), ("all",)), "K143")
    assert {finding.engines for finding in found} == {("sglang",)}


ALL = ["vllm-v1", "vllm-v2", "sglang", "trtllm"]
WRITTEN_FOR = {"vllm": ALL[:2], "sglang": ALL[2:3], "trtllm": ALL[3:], "modelopt": ALL[3:], "portable": ALL}


@pytest.mark.parametrize("layout, engines", (WRITTEN_FOR | {"torchspec": ALL}).items())
def test_without_a_wish_a_head_is_checked_for_whom_it_was_written(layout, engines, tmp_path: Path):
    good = next(g for g in GOOD.values() if g.layout == layout and g.spec.kind == "mla")
    assert check(good.write(tmp_path / "head")).provenance["for"] == engines


@pytest.mark.parametrize("layers, rules", [(9, set()), (30, {"K142"}), (None, {"K143"})])
def test_the_targets_depth_decides_whether_a_default_is_the_heads(layers, rules, tmp_path: Path):
    """Outputs [1, 3, 5] are ModelOpt's default of 9 layers: {1, 9 // 2 - 1, 9 - 4}."""
    target = write_target(tmp_path / "target", TARGET | {"num_hidden_layers": layers}) if layers else None
    folder = MODELOPT_GQA.write(tmp_path / "head")
    found = check(folder, (VLLM_V2,), hints=Hints(target_layers=layers), target=target)
    assert {f.rule for f in found.findings if f.severity != "note"} == rules


KIMI_K2 = replace(MLA, max_positions=262144)
SHORT = replace(GQA, rope=Rope(1e4, Yarn(8.0, 64)), max_positions=512)
# What ModelOpt's exporter writes by default of a head of a Kimi-K2.6 target.
INJECTED = replace(GQA, rope=Rope(1e4, Yarn(32.0, 2048)), max_positions=262144)


@pytest.mark.parametrize(
    "layout, spec, context, rules",
    [
        ("vllm", GQA, 262144, set()),
        ("vllm", KIMI_K2, 262144, set()),
        ("vllm", INJECTED, 262144, {"K167", "K169"}),
        ("vllm", INJECTED, 65536, {"K169"}),
        ("vllm", replace(INJECTED, max_positions=65536), 65536, set()),
        ("vllm", SHORT, 513, {"K167"}),
        ("vllm", replace(SHORT, rope=Rope(1e4, Yarn(512 / 48, 48))), 512, set()),
        ("trtllm", INJECTED, 262144, set()),
        ("sglang", INJECTED, 262144, set()),
        ("trtllm", SHORT, 513, {"K167"}),
        ("sglang", SHORT, 513, {"K167"}),
    ],
)
def test_a_table_of_angles_is_as_long_as_the_engine_makes_it(layout, spec, context, rules, tmp_path: Path):
    """vLLM makes as many rows as are served, but of YaRN its reach; the others go by max_position_embeddings."""
    engines = WRITTEN_FOR[layout]
    target = write_target(tmp_path / "target", TARGET | {"max_position_embeddings": context})
    folder = Good("", layout, spec, tuple(engines)).write(tmp_path / "head")
    found = check(folder, tuple(engines), target=target).findings
    assert {f.rule for f in found} & {"K166", "K167", "K169"} == rules


# https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct/blob/main/config.json, dims cut; the head states 2048.
LLAMA31 = TARGET | {"model_type": "llama", "num_hidden_layers": 32, "max_position_embeddings": 131072}


@pytest.mark.parametrize(
    "context, told, served",
    [(131072, None, 131072), (2048, None, None), (131072, 8192, 8192), (None, 8192, 8192), (None, None, None)],
)
def test_of_safeailabs_llama_head_it_is_said_that_vllm_stops_drafting(context, told, served, tmp_path: Path):
    """V1 drafts to the head's max_position_embeddings; V2, which raises it to the context, is not accused."""
    folder = EAGLE3["SafeAILab, Llama-3.1"].write(tmp_path / "head")
    target = write_target(tmp_path / "target", LLAMA31 | {"max_position_embeddings": context}) if context else None
    hints = Hints(target_layers=32, max_positions=told)
    report = check(folder, ("vllm",), hints=hints, target=target)
    found = [f for f in report.findings if "position" in f.where]
    assert [(f.rule, f.severity, f.engines) for f in found] == [("K215", "warning", (VLLM_V1,))] * bool(served)
    assert all(f"at most 2048 tokens; the context is {served}" in f.message for f in found)
    assert all(f"--max-positions {served} " in f.fix and "than 2048" in f.fix for f in found)


@pytest.mark.parametrize(
    "spec, change, context, said",
    [
        # The classes of transformers that read a config without the key: LlamaConfig and DeepseekV3Config.
        (GQA, put(max_position_embeddings=...), 4096, {"K215": "most 2048 tokens"}),
        (MLA, put(max_position_embeddings=...), 262144, {"K215": "most 4096 tokens", "K167": "4096 positions"}),
        (replace(GQA, rope=Rope(1e4, Linear(4.0))), put(), 4096, {}),
        (replace(GQA, rope=Rope(1e4, Linear(2.0))), put(), 4096, {"K215": "most 2048 tokens"}),
        # In 0.32 V2 reads past YaRN's end; from 0.33 on it serves what the head states.
        (
            SHORT,
            put(),
            513,
            {"K215": "most 512 tokens", "K167": "the context is 513: 0.32"},
        ),
        (SHORT, put(max_position_embeddings=256), 512, {"K215": "most 256", "K167": "the context is 512: from 0.33"}),
    ],
)
def test_vllms_runners_go_by_what_the_head_states(spec, change, context, said, tmp_path: Path):
    folder = write(tmp_path / "head", Good("", "vllm", spec, ()), change)
    hints = Hints(target_layers=9, max_positions=context)
    found = check(folder, ("vllm",), hints=hints).findings
    positions = {f.rule: (f.engines, f.message) for f in found if f.rule in ("K157", "K215", "K167")}
    assert {rule: engines for rule, (engines, _) in positions.items()} == {
        rule: {"K215": (VLLM_V1,), "K167": (VLLM_V2,)}[rule] for rule in said
    }
    assert all(words in positions[rule][1] for rule, words in said.items())


def test_a_list_that_the_user_explains_is_decided(tmp_path: Path):
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}
    folder = write(tmp_path / "head", MODELOPT_GQA, nest(**ids))
    assert of(check(folder), "K006")
    assert check(folder, hints=Hints(captured_are="outputs")).clean
    told = check(folder, ("vllm-v1",), hints=Hints(captured_are="inputs"))
    assert not of(told, "K140") and told.clean
    misread = check(folder, ("vllm-v1",), hints=Hints(captured_are="outputs"))
    assert of(misread, "K140")


@pytest.mark.parametrize("kind, said", [("kimi_k2", {"K330"}), ("qwen3", set())])
def test_of_a_captured_layer_0_one_rule_says_what_to_do(kind, said, tmp_path: Path):
    of_kind = Fault("", "", good("trtllm", replace(MLA, captured=(0, 3, 5))), engines=(SGLANG,),
                    target=TARGET | {"model_type": kind})  # fmt: skip
    found = {finding.rule for finding in of_kind.validate(of_kind.write(tmp_path / "head")).findings}
    assert found & {"K141", "K330"} == said


def test_a_map_of_the_first_tokens_is_no_fault_where_t2d_says_so(tmp_path: Path):
    def first(config, tensors):
        tensors["d2t"].zero_()
        tensors["t2d"][:] = False
        tensors["t2d"][:40] = True

    assert check(write(tmp_path / "head", REDUCED, first)).clean


@pytest.mark.parametrize(("noise", "said"), [(0.2, False), (1.0, True)])
def test_a_fine_tunes_embedding_is_the_targets_and_a_distant_one_is_not(noise, said, tmp_path: Path):
    """Rows with noise of a fifth of their length have a cosine of 0.98 with the target's; with as much, of 0.71."""

    def near(_: torch.Tensor) -> torch.Tensor:
        theirs = trained_slots(GQA, seed=5)["embed_tokens"].float()
        drawn = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
        return (theirs + noise * theirs.norm(dim=1, keepdim=True) * drawn / drawn.norm(dim=1, keepdim=True)).bfloat16()

    changed = Fault("near", "K219", GQA_VLLM, edit("embed_tokens.weight", near), lent=("embed_tokens",))
    assert bool(of(changed.validate(changed.write(tmp_path / "head")), "K219")) == said


def test_a_head_that_kconv_trained_is_not_said_to_be_normed_twice(tmp_path: Path):
    fault = next(fault for fault in FAULTS if fault.rule == "K210")
    folder = fault.write(tmp_path / "head")
    (folder / "modelopt").mkdir()
    (folder / "modelopt" / "training.json").write_text("{}")
    assert not of(fault.validate(folder), "K210")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
KEYS = sorted(BY_NAME["portable"].write_config(MLA_VLLM.spec))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("heads")
    return {base.layout + base.spec.kind: base.write(where / str(i)) for i, base in enumerate((MLA_VLLM, GQA_VLLM))}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_config_says_there_is_a_report_and_an_unreadable_head_is_not_clean(data, folders):
    folder = folders[data.draw(st.sampled_from(sorted(folders)))]
    file = folder / "config.json"
    before = file.read_text()
    config = json.loads(before) | data.draw(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
    try:
        file.write_text(json.dumps(config))
        report = check(folder, ("all",), headers_only=True)
        assert Report.model_validate_json(report.to_json()) == report
        from kconv.checkpoint.folder import open_checkpoint
        from kconv.convert.read import claim_tensors
        from kconv.errors import KconvError

        try:
            claim_tensors(open_checkpoint(folder))
        except KconvError:
            assert not report.clean
    finally:
        file.write_text(before)


def test_a_fault_that_no_rule_speaks_of_is_reported_all_the_same(tmp_path: Path):
    """Also where another one finds an error of its own."""
    change = put(num_key_value_heads=3, architectures=["Unheard"])
    found = {f.rule: f for f in check(write(tmp_path / "head", GQA_VLLM, change)).findings}
    assert {"K008", "K186"} <= found.keys() and "share 3" in found["K008"].message


def test_a_layout_that_is_named_wrongly_is_no_crash(tmp_path: Path):
    spec = next(g for g in GOOD.values() if g.name == "gqa, 2 layers, vllm")
    report = check(spec.write(tmp_path / "head"), layout=BY_NAME["torchspec"])
    assert not report.clean


def test_a_folder_that_is_not_there_is_a_finding(tmp_path: Path):
    report = check(tmp_path / "nothing")
    assert [f.rule for f in report.findings] == ["K001"]
