"""FP8 attention beside NVFP4 experts in one target: ModelOpt's bits and config, and the source's own FP8 unchanged."""

import json
import re

import modelopt.torch.quantization as mtq
import pytest
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
from safetensors.torch import load_file, save_file
from support.quantized_targets import make_form, write_wide
from support.target_faults import MIXED
from support.validated import validate
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.header import read_header
from kconv.checkpoint.manifest import verify
from kconv.checkpoint.source import Folder
from kconv.errors import RecipeInvalid, SourceFormatUnknown, TensorShape
from kconv.quantize.calibration import data_free
from kconv.quantize.fp8 import scales_of, values_of
from kconv.quantize.modelopt_backend import plan_in_memory, quant_cfg
from kconv.quantize.plan import plan_quantize
from kconv.quantize.recipe import load_recipe, parse_recipe
from kconv.quantize.run import quantize
from kconv.targets.config import parse_target_config
from kconv.targets.weights import Plain, stored_weights
from kconv.validate.quantized import check_quantized

OF_LLAMA = "{name: x, quantize: [model.layers.*.mlp.*_proj], fp8: [model.layers.*.self_attn.*_proj]}"


def bits(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def tensors_of(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def plan_of(folder, recipe, **changes):
    source = open_checkpoint(folder)
    recipe = (load_recipe(recipe) if recipe == MIXED else parse_recipe(recipe)).model_copy(update=changes)
    return plan_quantize(source, parse_target_config(source.config), recipe, data_free())


def config_of(folder, name="config.json"):
    return json.loads((folder / name).read_text())


@pytest.fixture(scope="module")
def wide(tiny_target, tmp_path_factory):
    """Return a function that gives the folder of a target in a form, and of what it becomes."""
    root = tmp_path_factory.mktemp("wide")
    narrow, made = write_wide(tiny_target, root / "plain"), {}

    def find(form):
        if form not in made:
            made[form] = make_form(narrow, root / form / "source", form), root / form / "out"
            quantize(plan_of(made[form][0], MIXED), made[form][1])
        return made[form]

    return find


def test_the_tensors_and_the_config_are_modelopts_own(tmp_path):
    dims = {"hidden_size": 256, "intermediate_size": 400, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(**dims, num_hidden_layers=2, vocab_size=64, head_dim=128)
        model = LlamaForCausalLM(config).bfloat16().eval()
    with torch.no_grad():
        # A block with a single large value.
        model.model.layers[0].self_attn.o_proj.weight[3, 200] = 7.0
    model.save_pretrained(tmp_path / "source")
    quantize(plan_of(tmp_path / "source", OF_LLAMA), tmp_path / "ours")
    model.config.dtype, model.config.architectures = torch.bfloat16, ["LlamaForCausalLM"]
    mtq.quantize(model, quant_cfg(parse_recipe(OF_LLAMA)), lambda it: it(torch.arange(64)[None]))
    export_hf_checkpoint(model, export_dir=tmp_path / "theirs")
    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    # Calibrated there, 1.0 here.
    same = [name for name in ours if not name.endswith("input_scale")]
    assert [name for name in same if not torch.equal(bits(ours[name]), bits(theirs[name]))] == []
    assert sum(t.dtype == torch.float8_e4m3fn for name, t in ours.items() if name.endswith(".weight")) == 8
    one, other = (config_of(tmp_path / who, "hf_quant_config.json") for who in ("ours", "theirs"))
    # ModelOpt lists no excludes here; engines take what is not named for unquantized.
    assert one["quantization"].pop("exclude_modules") == ["lm_head"] and one == other
    one, other = (config_of(tmp_path / who)["quantization_config"] for who in ("ours", "theirs"))
    assert (one.pop("ignore"), other.pop("ignore")) == (["lm_head"], [])
    assert one == other
    findings = validate(Folder(tmp_path / "theirs")).findings
    assert [(finding.rule, finding.severity) for finding in findings] == [("K414", "error")]


def test_a_layers_routed_experts_are_named_as_modelopt_names_them(tmp_path):
    dims = {"hidden_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(
        **dims, num_hidden_layers=2, vocab_size=64, head_dim=128, num_experts=4, num_experts_per_tok=2
    )
    model = Qwen3MoeForCausalLM(config).bfloat16().eval()
    model.save_pretrained(tmp_path / "source")
    recipe = OF_LLAMA.replace("mlp.*_proj", "mlp.experts.*_proj")
    quantize(plan_of(tmp_path / "source", recipe), tmp_path / "ours")
    model.config.dtype, model.config.architectures = torch.bfloat16, ["Qwen3MoeForCausalLM"]
    mtq.quantize(model, quant_cfg(parse_recipe(recipe)), lambda it: it(torch.arange(64)[None]))
    export_hf_checkpoint(model, export_dir=tmp_path / "theirs")
    one, other = (config_of(tmp_path / who, "hf_quant_config.json")["quantization"] for who in ("ours", "theirs"))
    assert one["quantized_layers"] == other["quantized_layers"]
    assert other["quantized_layers"]["model.layers.1.mlp.experts"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert tensors_of(tmp_path / "ours").keys() == tensors_of(tmp_path / "theirs").keys()
    findings = validate(Folder(tmp_path / "theirs")).findings
    assert [(finding.rule, finding.severity) for finding in findings] == [("K414", "error")]


@pytest.mark.parametrize("form", ["bf16", "int4"])
def test_attention_is_rounded_experts_are_packed_and_the_rest_stays(form, wide):
    source, out = wide(form)
    findings, noise = check_quantized(open_checkpoint(out), open_checkpoint(source))
    assert findings == [] and noise.tensors == 24
    manifest = verify(out, open_checkpoint(source))
    assert manifest.spec["recipe"]["fp8"] == ["model.layers.*.self_attn.*_proj*"]
    layers = config_of(out)["quantization_config"]["quantized_layers"]
    assert layers["model.layers.1.mlp.experts"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert layers["model.layers.0.self_attn.o_proj"] == {"quant_algo": "fp8_pb_wo"} and len(layers) == 2 + 3 * 4


def test_fp8_keeps_its_bytes(wide):
    source, out = wide("fp8")
    theirs, ours = tensors_of(source), tensors_of(out)
    names = [name for name in ours if name.endswith(".weight") and ours[name].dtype == torch.float8_e4m3fn]
    assert len(names) == 3 * 4
    for name in names:
        assert torch.equal(bits(ours[name]), bits(theirs[name]))
        scale = ours[name.replace(".weight", ".weight_scale")]
        assert scale.dim() == 4
        assert torch.equal(scale.squeeze(3).squeeze(1), theirs[name.replace(".weight", ".weight_scale_inv")].float())
    assert check_quantized(open_checkpoint(out), open_checkpoint(source))[0] == []
    steps = {step.output.name: step.action for step in verify(out, open_checkpoint(source)).tensors}
    o_proj = "model.layers.1.self_attn.o_proj"
    assert (steps[f"{o_proj}.weight"], steps[f"{o_proj}.weight_scale"]) == ("copied", "repacked")
    kept = "model.layers.1.self_attn.kv_b_proj.weight"
    assert steps[kept] == "dequantized" and ours[kept].dtype == torch.bfloat16


def test_weights_of_several_spans_have_the_same_bytes(wide, tmp_path, monkeypatch):
    source, out = wide("bf16")
    monkeypatch.setattr("kconv.targets.weights.SPAN", 100 * 128)
    quantize(plan_of(source, MIXED), tmp_path / "out")
    ours, before = tensors_of(tmp_path / "out"), tensors_of(out)
    assert [name for name in before if not torch.equal(bits(ours[name]), bits(before[name]))] == []


def test_a_scale_that_is_doubled_is_found_by_its_noise(wide, tmp_path):
    source, out = wide("bf16")
    changed = open_checkpoint(out)
    name = "model.layers.1.self_attn.o_proj.weight"
    weights = stored_weights(changed, parse_target_config(changed.config))
    scale = weights[name].infos[1]
    copy = tmp_path / scale.file.name
    data = bytearray(scale.file.read_bytes())
    data[scale.begin + 3] += 1  # the exponent's seven upper bits: times four
    copy.write_bytes(data)
    for file in out.iterdir():
        if file.name != scale.file.name:
            (tmp_path / file.name).symlink_to(file)
    findings, _ = check_quantized(open_checkpoint(tmp_path), open_checkpoint(source))
    assert [(found.rule, found.where) for found in findings] == [("K390", name)]
    assert "rounding to FP8_PB_WO leaves at least 20.0 dB" in findings[0].message


REFUSED = {
    "both": ({"fp8": ("model.layers.*.mlp.experts.*_proj",)}, RecipeInvalid, "would be NVFP4 and FP8"),
    "a fused half": (
        {"quantize": ("model.layers.*.self_attn.q_a_proj",), "fp8": ("model.layers.*.kv_a_proj_with_mqa",)},
        RecipeInvalid,
        "kv_a_proj_with_mqa",
    ),
    "FP8 of q_a alone": (
        {"fp8": ("model.layers.*.self_attn.q_a_proj",)},
        RecipeInvalid,
        "kv_a_proj_with_mqa, one layer in engines, would be FP8 and unquantized",
    ),
    "one layer's kv_a kept": (
        {"keep": ("model.layers.1.self_attn.kv_a_proj_with_mqa", "*.kv_b_proj")},
        RecipeInvalid,
        "layers.1.self_attn.q_a_proj and model.layers.1.self_attn.kv_a_proj_with_mqa",
    ),
    "NVFP4 of gate alone": (
        {"quantize": ("model.layers.*.mlp.experts.*.gate_proj",)},
        RecipeInvalid,
        "would be NVFP4 and unquantized",
    ),
    "one expert plain": (
        {"keep": ("model.layers.1.mlp.experts.0.*", "*.kv_b_proj")},
        RecipeInvalid,
        "one layer in engines, would be NVFP4 and unquantized",
    ),
    "NVFP4 of all experts' down alone": (
        {"quantize": ("model.layers.*.mlp.experts.*.down_proj",)},
        RecipeInvalid,
        "would be NVFP4 and unquantized",
    ),
    "kv_b_proj": ({"quantize": ("*",), "fp8": (), "keep": ()}, RecipeInvalid, r"kv_b_proj would be NVFP4"),
    "no such module": ({"fp8": ("model.layers.*.attention.*",)}, RecipeInvalid, "matches no linear module"),
    "an embedding": ({"fp8": ("lm_head",)}, RecipeInvalid, "matches no linear module"),
    "no whole blocks": (
        {"fp8": ("model.layers.*.mlp.shared_experts.down_proj",)},
        TensorShape,
        "cannot read in blocks",
    ),
    "a block over two parts": (
        {"quantize": ("model.layers.*.self_attn.o_proj",), "fp8": ("model.layers.*.mlp.shared_experts.*_proj",),
         "keep": ("*.down_proj",)},
        TensorShape,
        "gate_proj",
    ),
}  # fmt: skip


@pytest.mark.parametrize("changes, error, phrase", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(changes, error, phrase, wide):
    with pytest.raises(error, match=phrase):
        plan_of(wide("bf16")[0], MIXED, **changes)


def test_compressed_tensors_form_is_refused_and_so_is_modelopt_over_fp8(wide):
    with pytest.raises(RecipeInvalid, match="ModelOpt's format only"):
        parse_recipe("{name: x, quantize: ['*'], fp8: ['*'], format: compressed-tensors}")
    source = open_checkpoint(wide("fp8")[0])
    with pytest.raises(RecipeInvalid, match="round FP8 once more"):
        plan_in_memory(source, parse_target_config(source.config), load_recipe(MIXED), None)


O_PROJ, Q_A = (f"model.layers.0.self_attn.{part}" for part in ("o_proj", "q_a_proj"))
UNREAD = {
    "another algorithm": ({O_PROJ: {"quant_algo": "MXFP8"}}, f"the quant_algo 'MXFP8' for {O_PROJ}"),
    "in small letters": ({O_PROJ: {"quant_algo": "mxfp8"}}, f"the quant_algo 'mxfp8' for {O_PROJ}"),
    "none": ({O_PROJ: {}}, f"states no quant_algo for {O_PROJ}"),
    "no object": ({O_PROJ: "NVFP4"}, f"states no quant_algo for {O_PROJ}"),
    "a list": ({O_PROJ: {"quant_algo": ["NVFP4"]}}, f"the quant_algo ['NVFP4'] for {O_PROJ}"),
    "the first of two": ({Q_A: {"quant_algo": "MXFP8"}, O_PROJ: {"quant_algo": "FP8"}}, f"'MXFP8' for {Q_A}"),
}


@pytest.mark.parametrize("layers, phrase", UNREAD.values(), ids=UNREAD)
def test_an_algorithm_that_kconv_does_not_read_is_named_as_it_stands(layers, phrase, wide):
    checkpoint = open_checkpoint(wide("bf16")[1])
    config = json.loads(json.dumps(checkpoint.config))
    stated = config["quantization_config"]["quantized_layers"]
    for module in layers:
        del stated[module]
    stated |= layers
    with pytest.raises(SourceFormatUnknown, match=re.escape(phrase)):
        stored_weights(checkpoint, parse_target_config(config))


@pytest.mark.parametrize("said, phrase", [(["MIXED_PRECISION"], "['MIXED_PRECISION']"), (None, "states no quant_algo")])
def test_an_algorithm_of_the_whole_that_kconv_does_not_read_is_named(said, phrase, wide):
    checkpoint = open_checkpoint(wide("bf16")[1])
    config = json.loads(json.dumps(checkpoint.config))
    config["quantization_config"]["quant_algo"] = said
    with pytest.raises(SourceFormatUnknown, match=re.escape(phrase)):
        stored_weights(checkpoint, parse_target_config(config))


def test_a_last_block_of_fewer_rows_is_rounded_as_modelopts_and_zeros_stay_zeros(tmp_path):
    weight = torch.randn(200, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"x.weight": weight, "zero.weight": torch.zeros(130, 128)}, tmp_path / "x.safetensors")
    tensors = read_header(tmp_path / "x.safetensors")
    made, scales = FP8QTensor.quantize(weight.float(), block_sizes={-1: 128, -2: 128})
    ours = scales_of(plain := Plain(tensors["x.weight"]))
    assert ours.shape == (2, 1, 2, 1) and torch.equal(ours.flatten(), scales.flatten())
    assert torch.equal(bits(torch.cat(list(values_of(plain, ours)))), bits(made._quantized_data))
    zeros = scales_of(plain := Plain(tensors["zero.weight"]))
    assert torch.equal(torch.cat(list(values_of(plain, zeros))).float(), torch.zeros(130, 128))
