"""The tiny target in the forms that Kimi targets are published in: bf16, INT4 in groups, FP8 in blocks; wrapped too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.formats import FP8_BLOCKS, NVFP4, Int4, StoredFormat
from kconv.checkpoint.header import read_header
from kconv.targets.config import parse_target_config
from kconv.targets.weights import Plain, Quantized, StoredWeight, stored_weights

# As Kimi-K2.5 has it: the routed experts alone are INT4.
INT4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
                "actorder": None, "dynamic": False, "block_structure": None, "observer": "minmax",
            },
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip
# As Kimi-K2-Instruct has it.
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
# As Kimi-K3 has it, by compressed-tensors' own scheme.
MXFP4_CONFIG = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "mxfp4-pack-quantized",
            "weights": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
}
FORMS = ("bf16", "int4", "fp8")
EXPERTS = ".mlp.experts."


# Dims at which attention's inputs are whole blocks of FP8.
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128}


def write_wide(narrow: Path, folder: Path, layers: int = 3) -> Path:
    """Write a target as a tiny one is, of other dims and with the weights that it is born with."""
    from kconv.targets.config import parse_target_config
    from kconv.targets.model import build_target
    from kconv.tiny.target import initialize

    config = json.loads((narrow / "config.json").read_text()) | WIDE | {"num_hidden_layers": layers}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_target(parse_target_config(config), torch.float32)
        initialize(model)
        for parameter in (p for p in model.parameters() if p.ndim > 1):
            torch.nn.init.normal_(parameter, std=0.05)
        model.save_pretrained(folder)
    for file in narrow.glob("*token*"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_form(source: Path, folder: Path, form: str, *, wrapped: bool = False, shards: int = 1) -> Path:
    """Write a plain fp32 target in another form.

    Args:
        source: the target.
        folder: what to make.
        form: one of `FORMS`, or "mxfp4".
        wrapped: as Kimi-K2.5 is: text_config, the `language_model.` prefix, and a vision tower beside.
        shards: files, with an index if more than one.
    """
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype"] = "bfloat16"
    if form == "int4":
        config["quantization_config"] = INT4_CONFIG
    if form == "fp8":
        config["quantization_config"] = FP8_CONFIG
    if form == "mxfp4":
        config["quantization_config"] = MXFP4_CONFIG
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        made |= _store(name, tensor, form)
    if wrapped:
        made = {f"language_model.{name}": tensor for name, tensor in made.items()}
        made["vision_tower.patch_embed.proj.weight"] = torch.randn(48, 32).bfloat16()
        made["mm_projector.proj.0.weight"] = torch.randn(32, 48).bfloat16()
        text = config | {"_name_or_path": ""}
        config = {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "text_config": text,
            "vision_config": {"mm_hidden_size": 48},
        }
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_shards(made, folder, shards)
    return folder


def write_shards(tensors: dict[str, torch.Tensor], folder: Path, shards: int) -> None:
    """Write tensors into one file, or cut in order of names into several with an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    step = -(-len(names) // shards)
    weight_map = {}
    for i in range(shards):
        part = names[i * step : (i + 1) * step]
        file = f"model-{i + 1:05d}-of-{shards:06d}.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _store(name: str, tensor: torch.Tensor, form: str) -> dict[str, torch.Tensor]:
    if name.endswith("e_score_correction_bias"):
        return {name: tensor}
    base = name.removesuffix(".weight")
    linear = base.endswith(("_proj", "_proj_with_mqa"))
    if form == "int4" and ".experts." in name:
        return {f"{base}.{suffix}": part for suffix, part in quantize_int4(tensor).items()}
    if form == "mxfp4" and ".experts." in name:
        return {f"{base}.{suffix}": part for suffix, part in quantize_mxfp4(tensor).items()}
    if form == "fp8" and linear:
        weight, scale = quantize_fp8(tensor)
        return {name: weight, f"{base}.weight_scale_inv": scale}
    return {name: tensor.bfloat16()}


def with_plain_experts(quantized: Path, folder: Path) -> Path:
    """Write a quantized target with its routed experts dequantized, and said to be plain.

    vLLM has no NVFP4 experts on a CPU.
    """
    shutil.copytree(quantized, folder, ignore=shutil.ignore_patterns("*.safetensors*", "kconv.json"))
    tensors = {}
    for file in quantized.glob("*.safetensors"):
        tensors |= {name: tensor for name, tensor in load_file(file).items() if EXPERTS not in name}
    checkpoint = open_checkpoint(quantized)
    read = stored_weights(checkpoint, parse_target_config(checkpoint.config))
    experts = {name: weight.read().bfloat16() for name, weight in read.items() if EXPERTS in name}
    save_file(tensors | experts, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] += sorted({f"{name.split(EXPERTS)[0]}.mlp.experts*" for name in experts})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def quantize_int4(weight: torch.Tensor, group: int = 32) -> dict[str, torch.Tensor]:
    """Return a matrix in compressed-tensors' pack-quantized form, made by compressed-tensors itself."""
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scale = (weight.unflatten(-1, (-1, group)).abs().amax(-1) / 7.5).clamp(min=1e-8).bfloat16()
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight.bfloat16(), "weight_scale": scale}
    made = PackedQuantizationCompressor.compress(state, scheme)
    return {suffix: made[suffix].contiguous() for suffix in ("weight_packed", "weight_scale", "weight_shape")}


def quantize_mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a matrix in compressed-tensors' mxfp4-pack-quantized form, made by compressed-tensors itself."""
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import MXFP4A16

    scale = (weight.unflatten(-1, (-1, 32)).abs().amax(-1) / 6).clamp(min=2.0**-60).log2().ceil().exp2().bfloat16()
    scheme = QuantizationScheme(targets=["Linear"], **MXFP4A16)
    made = MXFP4PackedCompressor.compress({"weight": weight.bfloat16(), "weight_scale": scale}, scheme)
    return {suffix: made[suffix].contiguous() for suffix in ("weight_packed", "weight_scale")}


def quantize_fp8(weight: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in FP8, and the float32 scale of each block of 128 by 128."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // block) * block, -(-columns // block) * block)
    padded[:rows, :columns] = weight
    tiles = padded.unflatten(0, (-1, block)).unflatten(-1, (-1, block))
    scale = tiles.abs().amax((1, 3)) / 448
    made = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return made.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scale


Tensors = dict[str, torch.Tensor]
# Two blocks of FP8 and a part of a third.
ROWS, COLUMNS = 300, 192
FORMATS: dict[str, StoredFormat | None] = {"plain": None, "int4": Int4((32,)), "fp8": FP8_BLOCKS, "nvfp4": NVFP4}


def store_weight(form: str, folder: Path) -> tuple[StoredWeight, torch.Tensor]:
    """Store a weight, and return it as it is found on disk beside the numbers that it stands for, all made at once.

    Its rows grow by two powers of ten from the first to the last: with another row's scale it is another weight.

    Args:
        form: one of `STORES`.
        folder: where to write a file.
    """
    plain = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    plain = (plain * torch.logspace(-1, 1, ROWS)[:, None]).bfloat16()
    format_, tensors = FORMATS[form], STORES[form](plain)
    file = folder / "x.safetensors"
    save_file({f"x.{suffix}": tensor for suffix, tensor in tensors.items()}, file)
    found = read_header(file)
    if format_ is None:
        return Plain(found["x.weight"]), tensors["weight"]
    whole = format_.unpack(tensors)
    return Quantized(format_, format_.parts("x", found)), whole.bfloat16() if form == "nvfp4" else whole


def _store_fp8(plain: torch.Tensor) -> Tensors:
    weight, scale = quantize_fp8(plain.float())
    return {"weight": weight, "weight_scale_inv": scale}


def _store_nvfp4(plain: torch.Tensor) -> Tensors:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    scale_2 = plain.abs().amax().float() / (6.0 * 448.0)
    packed, scale, _ = NVFP4QTensor.quantize(plain, 16, None, scale_2, try_tensorrt=False)
    return {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2}


STORES: dict[str, Callable[[torch.Tensor], Tensors]] = {
    "plain": lambda plain: {"weight": plain},
    "int4": quantize_int4,
    "fp8": _store_fp8,
    "nvfp4": _store_nvfp4,
}
