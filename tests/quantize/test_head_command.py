"""`kconv quantize-head`: what is written, what is kept of it in other layouts, and what is found when it is damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.good_heads import make_config, trained_slots
from support.heads import FITTING_GQA, FITTING_MLA, read_bytes, write_head
from support.validated import validate

from kconv.cards.sections import conversion
from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import MANIFEST, read_manifest, verify
from kconv.checkpoint.source import Folder
from kconv.cli import main
from kconv.convert.provenance import Origin
from kconv.convert.read import read_head
from kconv.drafters.spec import HeadSpec
from kconv.engines import by_name
from kconv.errors import ConfigUnsupported, KconvError, LayoutCannot, StatesInvalid
from kconv.tiny.text import read_corpus

SPECS = {"gqa": FITTING_GQA, "mla": FITTING_MLA}
FORMATS = ("fp8", "nvfp4")
P = "layers.0."


def run(*arguments, fails: type[KconvError] | None = None) -> str:
    """Run kconv; a named fault comes out as exit code 1."""
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    if fails is None:
        assert result.exit_code == 0, result.output
    else:
        assert result.exit_code == 1 and "fix:" in result.output, result.output
    return result.output


def write(folder: Path, spec: HeadSpec, layout: str) -> Path:
    slots = trained_slots(spec)
    del slots["embed_tokens"]
    write_head(folder, by_name(layout), spec, slots, make_config(by_name(layout), spec))
    return folder


@pytest.fixture(scope="module")
def states(tiny_target, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("states")
    lines = (json.dumps({"prompt": text}) for text in read_corpus().held_out[:30])
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    run("states", tiny_target, root / "states", "--prompts", root / "prompts.jsonl", "--captured", "1,3,5",
        "--text-tokens", 24)  # fmt: skip
    return root / "states"


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("heads")
    for kind, spec in SPECS.items():
        write(root / kind, spec, "vllm")
    return root


@pytest.fixture(scope="module")
def quantized(heads, states, tiny_target) -> Path:
    """Return a folder with each head in each format, and what was said of it."""
    for kind in SPECS:
        for name in FORMATS:
            out = heads / f"{kind}-{name}"
            shown = run("quantize-head", heads / kind, out, "--format", name, "--states", states,
                        "--target", tiny_target, "--min-retention", 0.9)  # fmt: skip
            (heads / f"{kind}-{name}.txt").write_text(shown)
    return heads


def scaled(folder: Path) -> set[str]:
    """Return the linears that a head stores with scales."""
    return {name.removesuffix(".weight_scale") for name in read_bytes(folder) if name.endswith(".weight_scale")}


each = pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in SPECS for name in FORMATS])


@each
def test_what_is_written(quantized, kind, name):
    source, out = open_checkpoint(quantized / kind), quantized / f"{kind}-{name}"
    manifest = verify(out, source)
    assert read_head(open_checkpoint(out)).is_quantized
    mlp = {f"{P}mlp.{part}_proj" for part in ("gate", "up", "down")}
    attention = {f"{P}self_attn.{part}_proj" for part in "qkvo"}
    assert scaled(out) == (mlp | attention if kind == "gqa" else mlp)
    before, after = read_bytes(quantized / kind), read_bytes(out)
    kept = {n: value for n, value in before.items() if n.removesuffix(".weight") not in scaled(out)}
    assert {n: after[n] for n in kept} == kept and not manifest.exact
    actions = {step.output.name: step.action for step in manifest.tensors}
    assert {actions[n] for n in kept} == {"copied"} and {actions[n] for n in after.keys() - kept.keys()} == {
        "quantized"
    }
    config, side = (json.loads((out / file).read_text()) for file in ("config.json", "hf_quant_config.json"))
    assert config["quantization_config"]["quant_algo"] == side["quantization"]["quant_algo"] == name.upper()
    assert "hf_quant_config.json" in {file.name for file in manifest.files}
    # In the config of the source nothing else was changed.
    assert config == json.loads((quantized / kind / "config.json").read_text()) | {
        "quantization_config": config["quantization_config"]
    }


@each
def test_what_is_told_of_it(quantized, states, kind, name):
    out = quantized / f"{kind}-{name}"
    record = read_manifest(out).conversion
    assert record is not None and record.calibration == states.name and len(record.prompts) == 30
    assert record.details["format"] == name.upper() and record.held_out["sequences"] == 3
    shown = (quantized / f"{kind}-{name}.txt").read_text()
    assert f"approximate: retains {record.held_out['kept']:.2%}" in shown and "on 3 held-out sequences" in shown
    said = conversion(read_manifest(out))["approximation"]
    assert f"in {name.upper()}" in said and "calibrated on states" in said


@each
def test_validation_finds_nothing_against_the_source(quantized, kind, name):
    report = validate(
        Folder(quantized / f"{kind}-{name}"),
        source=Origin(*[read_head(open_checkpoint(quantized / kind))] * 2),
        say=lambda _: None,
    )
    assert [finding for finding in report.findings if finding.severity != "note"] == []


@each
def test_other_layouts_carry_it_whole(quantized, tmp_path, kind, name):
    source = quantized / f"{kind}-{name}"
    run("to-trtllm", source, tmp_path / "out")
    assert read_bytes(tmp_path / "out") == read_bytes(source)
    for file, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        assert json.loads((tmp_path / "out" / file).read_text())[key] == json.loads((source / file).read_text())[key]
    assert read_manifest(tmp_path / "out").conversion == read_manifest(source).conversion


def doubled(suffix: str):
    return lambda tensors: tensors[f"{P}mlp.up_proj.{suffix}"].mul_(2)


def swap_nibbles(tensors) -> None:
    name = f"{P}mlp.down_proj.weight"
    tensors[name] = tensors[name] << 4 | tensors[name] >> 4


DAMAGE = {
    "an FP8 scale doubled": ("gqa-fp8", doubled("weight_scale"), "K301"),
    "an FP8 input scale doubled": ("mla-fp8", doubled("input_scale"), "K301"),
    "an NVFP4 scale doubled": ("mla-nvfp4", doubled("weight_scale_2"), "K301"),
    "nibbles swapped": ("gqa-nvfp4", swap_nibbles, "K301"),
    "a scale deleted": ("gqa-fp8", lambda tensors: tensors.pop(f"{P}mlp.up_proj.weight_scale"), "K199"),
    "a block scale deleted": ("mla-nvfp4", lambda tensors: tensors.pop(f"{P}mlp.up_proj.weight_scale"), "K199"),
    "a scale of NaN": ("mla-fp8", lambda tensors: tensors[f"{P}mlp.up_proj.weight_scale"].fill_(torch.nan), "K201"),
}


@pytest.mark.parametrize(("head", "damage", "rule"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found(quantized, tmp_path, head, damage, rule):
    source, out = quantized / head, tmp_path / "out"
    out.mkdir()
    for file in ("config.json", "hf_quant_config.json", MANIFEST):
        (out / file).write_bytes((source / file).read_bytes())
    tensors = load_file(source / "model.safetensors")
    damage(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors")
    original = read_head(open_checkpoint(quantized / head.split("-")[0]))
    report = validate(Folder(out), source=Origin(original, original))
    assert rule in {finding.rule for finding in report.findings if finding.severity == "error"}


@each
def test_without_its_manifest_it_is_compared_by_its_noise(quantized, tmp_path, kind, name):
    source, out = quantized / f"{kind}-{name}", tmp_path / "out"
    out.mkdir()
    for file in ("config.json", "hf_quant_config.json", "model.safetensors"):
        (out / file).write_bytes((source / file).read_bytes())
    report = validate(
        Folder(out), source=Origin(*[read_head(open_checkpoint(quantized / kind))] * 2), say=lambda _: None
    )
    assert [finding.rule for finding in report.findings if finding.severity != "note"] == ["K302"]
    (noise,) = [finding for finding in report.findings if finding.rule == "K306"]
    assert f"{len(scaled(out))} linear layers are rounded to {name.upper()}" in noise.message
    assert report.figures.identical is False


def test_what_is_refused_leaves_nothing(quantized, states, tiny_target, other_target, fine_tune, tmp_path):
    out = tmp_path / "out"

    def refused(head: Path, fault: type[KconvError], name: str = "fp8", *more) -> str:
        words = ("--format", name, "--states", states, "--target", tiny_target, *more)
        return run("quantize-head", head, out, *words, fails=fault)

    assert "already quantized" in refused(quantized / "gqa-fp8", ConfigUnsupported)
    shown = refused(write(tmp_path / "trained", FITTING_GQA, "modelopt"), LayoutCannot)
    assert "in those of engines" in shown and "kconv to-vllm" in shown
    # SGLang drops an MLA head's NVFP4 config, and takes the bytes for weights.
    sglang = write(tmp_path / "sglang", SPECS["mla"], "sglang")
    assert "SGLang" in refused(sglang, LayoutCannot, "nvfp4")
    assert "layer" in refused(
        write(tmp_path / "other", replace(FITTING_GQA, captured=(1, 2, 5)), "vllm"), StatesInvalid
    )
    assert "lm_head differs" in refused(quantized / "gqa", StatesInvalid, "fp8", "--target", other_target)
    assert "layers differ" in refused(quantized / "gqa", StatesInvalid, "fp8", "--target", fine_tune)
    assert not out.exists() and sorted(p.name for p in tmp_path.iterdir()) == ["other", "sglang", "trained"]


def test_a_target_must_be_said(quantized, states, tmp_path):
    words = ["quantize-head", quantized / "gqa", tmp_path / "out", "--format", "fp8", "--states", states]
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 2 and "Missing option '--target'" in result.output


def test_json_prints_the_manifest(quantized, states, tiny_target, tmp_path):
    shown = run("quantize-head", quantized / "mla", tmp_path / "out", "--format", "fp8", "--states", states,
                "--target", tiny_target, "--min-retention", 0.9, "--json")  # fmt: skip
    assert json.loads(shown[shown.index("{") :])["conversion"]["details"]["format"] == "FP8"
