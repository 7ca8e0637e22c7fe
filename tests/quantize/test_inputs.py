"""Input scales: ModelOpt's arithmetic of a calibration's amax, and only of this target's calibration."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantized_targets import make_form
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import read_manifest
from kconv.checkpoint.tensors import read_tensor
from kconv.errors import InputScalesInvalid
from kconv.quantize.calibration import (
    CalibrationPrompts,
    TargetCalibration,
    data_free,
    from_calibration,
    identify,
    write_calibration,
)
from kconv.quantize.plan import plan_quantize
from kconv.quantize.recipe import load_recipe
from kconv.quantize.run import quantize
from kconv.targets.config import parse_target_config

LAYER = "model.layers.2.mlp.experts"


def opened(folder):
    checkpoint = open_checkpoint(folder)
    return checkpoint, parse_target_config(checkpoint.config)


@pytest.fixture
def calibrated(forms, tmp_path):
    """Return a function that writes a calibration of the tiny target, with some amax changed."""

    def make(change=lambda amax: None):
        checkpoint, config = opened(forms("bf16"))
        names = [n.removesuffix(".weight") for n in checkpoint.tensors if n.endswith("_proj.weight")]
        amax = {name: 1.0 + i / 64 for i, name in enumerate(sorted(names))}
        change(amax)
        prompts = CalibrationPrompts(sha256="0" * 64, count=3, tokens=99, digests=())
        held = TargetCalibration(target=identify(checkpoint, config), prompts=prompts, input_amax=amax)
        file = tmp_path / "calibration.json"
        file.unlink(missing_ok=True)
        write_calibration(file, held)
        return file, amax

    return make


@pytest.mark.parametrize("form", ["bf16", "int4", "fp8"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_calibration_is_of_every_form_of_its_target(form, wrapped, forms, calibrated):
    file, amax = calibrated()
    checkpoint, config = opened(forms(form, wrapped=wrapped))
    scales = from_calibration(file, checkpoint, config)
    name = f"{LAYER}.1.down_proj"
    found = scales.scales([config.prefix + name])[config.prefix + name]
    assert found == pytest.approx(amax[name] / (6 * 448), rel=1e-7)
    assert "calibrated on 3 prompts" in scales.description


def test_fused_modules_share_the_larger(forms, calibrated):
    file, amax = calibrated()
    gate, up = f"{LAYER}.1.gate_proj", f"{LAYER}.1.up_proj"
    scales = from_calibration(file, *opened(forms("bf16"))).scales([gate, up])
    assert scales[gate] == scales[up] == pytest.approx(max(amax[gate], amax[up]) / (6 * 448), rel=1e-7)


def test_an_expert_without_tokens_takes_its_layers_largest(forms, calibrated):
    name = f"{LAYER}.1.down_proj"
    file, amax = calibrated(lambda amax: amax.pop(name))
    scales = from_calibration(file, *opened(forms("bf16"))).scales([name])
    largest = max(value for other, value in amax.items() if other.startswith(LAYER) and other.endswith("down_proj"))
    assert scales[name] == pytest.approx(largest / (6 * 448), rel=1e-7)


def test_the_scales_reach_the_output_and_are_said_there(forms, calibrated, tmp_path):
    file, amax = calibrated()
    checkpoint, config = opened(forms("int4"))
    inputs = from_calibration(file, checkpoint, config)
    quantize(plan_quantize(checkpoint, config, load_recipe("nvfp4-experts"), inputs), tmp_path / "out")
    made = load_file(next((tmp_path / "out").glob("*.safetensors")))
    name = f"{LAYER}.3.down_proj"
    assert made[f"{name}.input_scale"].item() == pytest.approx(amax[name] / (6 * 448), rel=1e-7)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.spec["input_scale"] == inputs.description
    assert {s.reason for s in manifest.tensors if s.output.name.endswith("input_scale")} == {inputs.description}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("model.norm.weight", "final norm and content of its weights"),
        ("model.layers.2.self_attn.o_proj.weight", "content of its weights"),
    ],
    ids=["trained otherwise", "with a LoRA merged"],
)
def test_a_calibration_of_another_model_is_named(changed, said, tiny_target, calibrated, tmp_path):
    other = make_form(tiny_target, tmp_path / "other", "bf16")
    tensors = load_file(other / "model.safetensors")
    tensors[changed] *= 2
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(InputScalesInvalid, match=f"another target, of another {said}\n"):
        from_calibration(calibrated()[0], *opened(other))


def test_a_module_that_was_not_calibrated_is_named(forms, calibrated):
    name = "model.layers.0.mlp.up_proj"
    file, _ = calibrated(lambda amax: amax.pop(name))
    with pytest.raises(InputScalesInvalid, match=f"no amax for {name}"):
        from_calibration(file, *opened(forms("bf16"))).scales([name])


@pytest.mark.parametrize("amax", [0.0, -1.0, 1e30, 2.0**64, 1e-40])
def test_an_amax_without_a_scale_to_calculate_with_is_named(amax, forms, calibrated):
    name = "model.layers.0.mlp.down_proj"  # reads no norm
    file, _ = calibrated(lambda held: held.update({name: amax}))
    with pytest.raises(InputScalesInvalid, match=rf"the amax of {name} is .* float32"):
        from_calibration(file, *opened(forms("bf16"))).scales([name])


READS_NORM = {
    "model.layers.0.mlp.up_proj": "post_attention_layernorm",
    f"{LAYER}.1.gate_proj": "post_attention_layernorm",
    "model.layers.2.mlp.shared_experts.up_proj": "post_attention_layernorm",
    "model.layers.3.self_attn.kv_a_proj_with_mqa": "input_layernorm",
    "model.layers.3.self_attn.q_b_proj": "self_attn.q_a_layernorm",
    "model.layers.3.self_attn.kv_b_proj": "self_attn.kv_a_layernorm",
}


@pytest.mark.parametrize("name, norm", READS_NORM.items(), ids=READS_NORM)
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_amax_beyond_what_its_norm_can_reach_is_named(name, norm, wrapped, forms, calibrated):
    target, config = opened(forms("bf16", wrapped=wrapped))
    layer = ".".join(name.split(".")[:3])
    weight = read_tensor(target.tensors[f"{config.prefix}{layer}.{norm}.weight"])
    # The largest that transformers' norm makes: of a vector with one number alone, the largest weight's.
    alone = torch.zeros(1, len(weight)).scatter(1, weight.abs().argmax().view(1, 1), 1000.0)
    module = DeepseekV3RMSNorm(len(weight), eps=1e-6)
    module.weight.data = weight.float()
    reached = float(module(alone).detach().abs().max())
    from_calibration(calibrated(lambda held: held.update({name: reached}))[0], target, config)
    with pytest.raises(InputScalesInvalid, match=rf"the amax of {name} is .*{norm}, reaches at most"):
        from_calibration(calibrated(lambda held: held.update({name: 1.05 * reached}))[0], target, config)


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"schema": 2}), json.dumps({"input_amax": {}})])
def test_a_file_that_is_no_calibration_is_named(text, forms, tmp_path):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(InputScalesInvalid, match=r"c\.json is not a valid calibration"):
        from_calibration(tmp_path / "c.json", *opened(forms("bf16")))


def test_a_missing_file_is_named(forms, tmp_path):
    with pytest.raises(InputScalesInvalid, match="cannot be read"):
        from_calibration(tmp_path / "c.json", *opened(forms("bf16")))


def test_data_free_is_one_for_all():
    assert data_free().scales(["a", "b"]) == {"a": 1.0, "b": 1.0}
