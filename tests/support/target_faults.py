"""Good NVFP4 targets with one thing wrong each, and the rule that each was made for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
from safetensors.torch import load_file, save_file

Json, Tensors = dict[str, Any], dict[str, torch.Tensor]
Change = Callable[[Json, Tensors, Json], None]
LAYER = "model.layers.2"
EXPERT, ATTENTION = f"{LAYER}.mlp.experts.1", f"{LAYER}.self_attn"
UP, GATE = f"{EXPERT}.up_proj", f"{EXPERT}.gate_proj"
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@dataclass(frozen=True)
class TargetFault:
    """One thing wrong with a good NVFP4 target.

    Attributes:
        name: what was done to it.
        rule: the rule that must find it.
        change: does it, to config.json, the tensors and hf_quant_config.json in place.
        recipe: of the good one.
        wrapped: the good one is as Kimi-K2.5 is, with text_config and a vision tower.
        mtp: the good one has an MTP layer, as DeepSeek-V3 does.
    """

    name: str
    rule: str
    change: Change
    recipe: str = "nvfp4-experts"
    wrapped: bool = False
    mtp: bool = False


def write_changed(good: Path, folder: Path, change: Change) -> Path:
    """Write a good target with a change into a folder; an emptied config file is left out."""
    shutil.copytree(good, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json", "kconv.json"))
    tensors: Tensors = {}
    for file in sorted(good.glob("*.safetensors")):
        tensors |= load_file(file)
    config_file, side_file = folder / "config.json", folder / "hf_quant_config.json"
    config, side = json.loads(config_file.read_text()), json.loads(side_file.read_text())
    change(config, tensors, side)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config_file.write_text(json.dumps(config))
    side_file.write_text(json.dumps(side)) if side else side_file.unlink()
    return folder


def drop(name: str) -> Change:
    def change(config: Json, tensors: Tensors, side: Json) -> None:
        del tensors[name]

    return change


def edit(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda config, tensors, side: tensors.update({name: how(tensors[name])})


def fill(name: str, value: float) -> Change:
    return edit(name, lambda tensor: torch.full_like(tensor, value))


def scale_inputs(factor: float) -> Change:
    """Return the change of every input_scale by a factor."""

    def change(config: Json, tensors: Tensors, side: Json) -> None:
        for name in tensors:
            if name.endswith(".input_scale"):
                tensors[name] = tensors[name] * factor

    return change


def excludes(how: Callable[[list[str]], list[str]]) -> Change:
    """Return the change of the excludes, in both files."""

    def change(config: Json, tensors: Tensors, side: Json) -> None:
        changed = how(config["quantization_config"]["ignore"])
        config["quantization_config"]["ignore"] = side["quantization"]["exclude_modules"] = changed

    return change


def without(part: str) -> Change:
    return excludes(lambda entries: [entry for entry in entries if part not in entry])


def block(**keys: Any) -> Change:
    return lambda config, tensors, side: config["quantization_config"].update(keys)


def side_block(**keys: Any) -> Change:
    return lambda config, tensors, side: side["quantization"].update(keys)


def to_compressed_tensors(config: Json, tensors: Tensors, side: Json) -> None:
    """As compressed-tensors' own converter does it; no entry with a wildcard keeps its meaning."""
    modules = [name.removesuffix(".weight_scale_2") for name in tensors if name.endswith(".weight_scale_2")]
    ModelOptNvfp4Converter(targets=modules).process(tensors)
    entries = ["re:.*" + re.escape(entry.rstrip("*")) for entry in config["quantization_config"]["ignore"]]
    block = ModelOptNvfp4Converter(targets=["Linear"]).create_config().model_dump(mode="json")
    config["quantization_config"] = block | {"ignore": entries}
    side.clear()


def both(*changes: Change) -> Change:
    def change(config: Json, tensors: Tensors, side: Json) -> None:
        for one in changes:
            one(config, tensors, side)

    return change


def unpack(*modules: str) -> Change:
    """Return the change that puts a plain weight in the place of packed ones."""

    def change(config: Json, tensors: Tensors, side: Json) -> None:
        for module in modules:
            rows, halves = tensors[f"{module}.weight"].shape
            for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
                tensors.pop(f"{module}.{suffix}", None)
            tensors[f"{module}.weight"] = torch.ones(rows, halves * 2).bfloat16()

    return change


def pack(module: str) -> Change:
    """Return the change that puts NVFP4 in the place of a plain weight."""

    def change(config: Json, tensors: Tensors, side: Json) -> None:
        rows, columns = tensors[f"{module}.weight"].shape
        tensors[f"{module}.weight"] = torch.ones(rows, columns // 2, dtype=torch.uint8)
        tensors[f"{module}.weight_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
        tensors |= {f"{module}.{suffix}": torch.tensor([1.0]) for suffix in ("weight_scale_2", "input_scale")}

    return change


def tied(config: Json, tensors: Tensors, side: Json) -> None:
    config["tie_word_embeddings"] = True


def layer_ten(config: Json, tensors: Tensors, side: Json) -> None:
    """Make a layer 10 of layer 6, leave layer 1 as it was before, and exclude it by a number without an end."""
    experts = {n.rpartition(".")[0] for n in tensors if n.startswith("model.layers.1.mlp.experts.")}
    unpack(*experts)(config, tensors, side)
    for name in [name for name in tensors if name.startswith("model.layers.6.")]:
        tensors[name.replace("layers.6.", "layers.10.")] = tensors.pop(name)
    renamed = [entry.replace("layers.6.", "layers.10.") for entry in config["quantization_config"]["ignore"]]
    excludes(lambda _: [e for e in renamed if "layers.1." not in e] + ["model.layers.1*"])(config, tensors, side)


def layers(count: int | None) -> Change:
    return lambda config, tensors, side: (config.get("text_config") or config).update(num_hidden_layers=count)


def no_input_scales(config: Json, tensors: Tensors, side: Json) -> None:
    for name in [name for name in tensors if name.endswith(".input_scale")]:
        del tensors[name]


def no_blocks(config: Json, tensors: Tensors, side: Json) -> None:
    del config["quantization_config"]
    side.clear()


def unpack_all(config: Json, tensors: Tensors, side: Json) -> None:
    unpack(*[n.removesuffix(".weight_scale_2") for n in tensors if n.endswith(".weight_scale_2")])(
        config, tensors, side
    )


def stale_text(config: Json, tensors: Tensors, side: Json) -> None:
    config["text_config"]["quantization_config"] = INT4


def root_gone(config: Json, tensors: Tensors, side: Json) -> None:
    del config["quantization_config"]
    config["text_config"]["quantization_config"] = INT4


def left_over(config: Json, tensors: Tensors, side: Json) -> None:
    tensors[f"{UP}.weight_packed"] = torch.ones(4, 4, dtype=torch.int32)


def kv_scale(*names: str) -> Change:
    return lambda config, tensors, side: tensors.update({name: torch.tensor(1.0) for name in names})


MTP = "model.layers.7"


def move_mtp(to: str) -> Change:
    """Return the change that gives the MTP layer another name; it is lost with none."""

    def change(config: Json, tensors: Tensors, side: Json) -> None:
        for name in [name for name in tensors if name.startswith(f"{MTP}.")]:
            tensor = tensors.pop(name)
            if to:
                tensors[name.replace(f"{MTP}.", f"{to}.")] = tensor

    return change


def exclude_mtp_by(*parts: str) -> Change:
    return excludes(lambda entries: [e for e in entries if e != f"{MTP}*"] + [f"{MTP}.{part}" for part in parts])


def add_indexer(config: Json, tensors: Tensors, side: Json) -> None:
    """Add what only an indexer (DeepSeek-V3.2, GLM-5) has, plain and excluded."""
    for module in (INDEXER, WK):
        tensors[f"{module}.weight"] = torch.ones(4, 64).bfloat16()


# FP8 attention beside NVFP4 experts.
MIXED = "nvfp4-experts-fp8-attention"
O_PROJ, INDEXER = f"{ATTENTION}.o_proj", f"{ATTENTION}.indexer.weights_proj"
WK = f"{ATTENTION}.indexer.wk"


def state(name: str, algorithm: str) -> Change:
    """Return the change of what both files state for a module; of no algorithm, that they do not name it."""

    def change(config: Json, tensors: Tensors, side: Json) -> None:
        for layers in (part["quantized_layers"] for part in (config["quantization_config"], side["quantization"])):
            layers.pop(name, None)
            if algorithm:
                layers[name] = {"quant_algo": algorithm}

    return change


def round_indexer(config: Json, tensors: Tensors, side: Json) -> None:
    tensors[f"{INDEXER}.weight"] = torch.ones(4, 128).to(torch.float8_e4m3fn)
    tensors[f"{INDEXER}.weight_scale"] = torch.ones(1, 1, 1, 1)


def state_nvfp4(config: Json, tensors: Tensors, side: Json) -> None:
    """State NVFP4 alone, in both files."""
    for part in (config["quantization_config"], side["quantization"]):
        del part["quantized_layers"]
        part["quant_algo"] = "NVFP4"


def size(name: str, group: int) -> Change:
    """Return the change of the group size that both files state for a module."""

    def change(config: Json, tensors: Tensors, side: Json) -> None:
        for part in (config["quantization_config"], side["quantization"]):
            part["quantized_layers"][name]["group_size"] = group

    return change


def ignore(entry: str) -> Change:
    """Return the change that adds an entry to compressed-tensors' ignore list."""
    return lambda config, tensors, side: config["quantization_config"]["ignore"].append(entry)


def plain_again(module: str) -> Change:
    """Return the change that puts a plain weight in the place of an FP8 one."""

    def change(config: Json, tensors: Tensors, side: Json) -> None:
        del tensors[f"{module}.weight_scale"]
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"].bfloat16()

    return both(change, state(module, ""), excludes(lambda entries: [*entries, module]))


K_SCALE, V_SCALE = f"{ATTENTION}.k_proj.k_scale", f"{ATTENTION}.v_proj.v_scale"
FP8_KV = both(block(kv_cache_scheme={"num_bits": 8, "type": "float"}), side_block(kv_cache_quant_algo="FP8"))
FAULTS = (
    TargetFault("every input_scale lost", "K401", no_input_scales),
    TargetFault("one input_scale lost", "K401", drop(f"{UP}.input_scale")),
    TargetFault("block scales lost", "K402", drop(f"{UP}.weight_scale")),
    TargetFault("weight_scale_2 lost", "K402", drop(f"{UP}.weight_scale_2")),
    TargetFault("a packed weight lost", "K402", drop(f"{UP}.weight")),
    TargetFault("block scales in float32", "K403", edit(f"{UP}.weight_scale", torch.Tensor.float)),
    TargetFault("weight_scale_2 in bf16", "K403", edit(f"{UP}.weight_scale_2", torch.Tensor.bfloat16)),
    TargetFault("packed bytes as signed ones", "K403", edit(f"{UP}.weight", lambda t: t.view(torch.int8))),
    TargetFault("block scales of groups of 32", "K404", edit(f"{UP}.weight_scale", lambda t: t[:, ::2])),
    TargetFault("block scales transposed", "K404", edit(f"{UP}.weight_scale", lambda t: t.T)),
    TargetFault("four weight_scale_2", "K404", edit(f"{UP}.weight_scale_2", lambda t: t.reshape(1).repeat(4))),
    TargetFault("a packed weight cut to half its columns", "K405",
                both(edit(f"{UP}.weight", lambda t: t[:, ::2]), edit(f"{UP}.weight_scale", lambda t: t[:, ::2]))),
    TargetFault("up packed, gate not", "K406", both(unpack(GATE), excludes(lambda e: [*e, GATE]))),
    TargetFault("q_a packed, kv_a not", "K406",
                both(unpack(f"{ATTENTION}.kv_a_proj_with_mqa"),
                     excludes(lambda e: [*e, f"{ATTENTION}.kv_a_proj_with_mqa"])), "nvfp4"),
    TargetFault("one expert plain", "K406",
                both(*(both(unpack(f"{EXPERT}.{part}"), excludes(lambda e, part=part: [*e, f"{EXPERT}.{part}"]))
                       for part in ("gate_proj", "up_proj", "down_proj")))),
    TargetFault("a router packed", "K407", pack(f"{LAYER}.mlp.gate")),
    TargetFault("an indexer's weights_proj packed", "K407", both(add_indexer, pack(INDEXER)), "nvfp4"),
    TargetFault("an indexer's wk packed", "K407", both(add_indexer, pack(WK)), "nvfp4"),
    TargetFault("an indexer's weights_proj in FP8", "K407", both(round_indexer, state(INDEXER, "fp8_pb_wo")), MIXED),
    TargetFault("lm_head packed", "K408", both(pack("lm_head"), without("lm_head"))),
    TargetFault("INT4's bytes left beside", "K409", left_over),
    TargetFault("kv_b_proj packed", "K410", pack(f"{ATTENTION}.kv_b_proj"), "nvfp4"),
    TargetFault("a k_scale without its v_scale", "K411", kv_scale(K_SCALE)),
    TargetFault("FP8's scales lost", "K413", drop(f"{O_PROJ}.weight_scale"), MIXED),
    TargetFault("FP8's scales in DeepSeek's dims", "K413",
                edit(f"{O_PROJ}.weight_scale", lambda t: t[:, 0, :, 0]), MIXED),
    TargetFault("FP8's scales in bf16", "K413", edit(f"{O_PROJ}.weight_scale", torch.Tensor.bfloat16), MIXED),
    TargetFault("FP8 beside NVFP4", "K414", lambda config, tensors, side: None, MIXED),
    TargetFault("q_a FP8, kv_a plain", "K406", plain_again(f"{ATTENTION}.kv_a_proj_with_mqa"), MIXED),
    TargetFault("q_a FP8, kv_a NVFP4", "K406", pack(f"{ATTENTION}.kv_a_proj_with_mqa"), MIXED),
    TargetFault("both config blocks lost", "K420", no_blocks),
    TargetFault("the config of an NVFP4 target beside plain weights", "K421", unpack_all),
    TargetFault("INT4's block left in text_config", "K422", stale_text, wrapped=True),
    TargetFault("INT4's block in text_config alone", "K422", root_gone, wrapped=True),
    TargetFault("quant_algo FP8", "K423", both(block(quant_algo="FP8"), side_block(quant_algo="FP8"))),
    TargetFault("quant_method of another library", "K423", block(quant_method="compressed-tensors")),
    TargetFault("groups of 32 in the side file", "K423", side_block(group_size=32)),
    TargetFault("FP8 beside NVFP4, and both files say NVFP4", "K423", state_nvfp4, MIXED),
    TargetFault("an algorithm that no engine knows, beside NVFP4", "K423", state(O_PROJ, "INT4_FP8"), MIXED),
    TargetFault("an algorithm that kconv does not check, beside NVFP4", "K439", state(O_PROJ, "FP8"), MIXED),
    TargetFault("groups of 32 for one layer's experts", "K423", size(f"{LAYER}.mlp.experts", 32), MIXED),
    TargetFault("FP8 in blocks of 64", "K423", size(O_PROJ, 64), MIXED),
    TargetFault("the algorithm in one file only", "K424", side_block(quant_algo="W4A16_NVFP4")),
    TargetFault("an exclude in one file only", "K424", side_block(exclude_modules=["lm_head"])),
    TargetFault("the KV cache's format in one file only", "K424", side_block(kv_cache_quant_algo="FP8")),
    TargetFault("hf_quant_config.json deleted", "K425", lambda config, tensors, side: side.clear()),
    TargetFault("a KV cache in four bits", "K426", block(kv_cache_scheme={"num_bits": 4, "type": "float"})),
    TargetFault("scales of a KV cache that nothing speaks of", "K427", kv_scale(K_SCALE, V_SCALE)),
    TargetFault("six layers counted, and seven there", "K428", layers(6)),
    TargetFault("eight layers counted, and seven there", "K428", layers(8), wrapped=True),
    TargetFault("layers not counted", "K428", layers(None)),
    TargetFault("an MTP layer promised, and none there", "K429", move_mtp(""), mtp=True),
    TargetFault("an MTP layer where only Qwen3-Next's is read", "K429", move_mtp("mtp.layers.0"), mtp=True),
    TargetFault("an MTP layer without its projection", "K429", drop(f"{MTP}.eh_proj.weight"), mtp=True),
    TargetFault("an MTP layer in NVFP4", "K412", pack(f"{MTP}.mlp.shared_experts.up_proj"), mtp=True),
    TargetFault("compressed-tensors' form", "K436", to_compressed_tensors),
    TargetFault("an entry of ignore that is no expression", "K438", both(to_compressed_tensors, ignore("re:("))),
    TargetFault("an FP8 module not named", "K437", state(O_PROJ, ""), MIXED),
    TargetFault("an FP8 module named NVFP4", "K437", state(O_PROJ, "NVFP4"), MIXED),
    TargetFault("a layer's experts not named", "K437", state(f"{LAYER}.mlp.experts", ""), MIXED),
    TargetFault("a module named that is plain", "K437", state(f"{LAYER}.mlp.shared_experts.up_proj", "NVFP4"), MIXED),
    TargetFault("quantized_layers of the two files differ", "K424",
                lambda config, tensors, side: side["quantization"]["quantized_layers"].popitem(), MIXED),
    TargetFault("FP8 attention excluded", "K431", excludes(lambda e: [*e, f"{LAYER}.self_attn*"]), MIXED),
    TargetFault("an output matrix tied to the embedding, and not excluded", "K430",
                both(drop("lm_head.weight"), without("lm_head"), tied)),
    TargetFault("an MTP layer not excluded", "K435", exclude_mtp_by(), mtp=True),
    TargetFault("an MTP layer excluded by its tensors' names", "K435",
                exclude_mtp_by("eh_proj", "mlp*", "self_attn*", "shared_head.head"), mtp=True),
    TargetFault("attention not excluded", "K430", without("self_attn")),
    TargetFault("lm_head not excluded", "K430", without("lm_head")),
    TargetFault("experts excluded", "K431", excludes(lambda e: [*e, f"{LAYER}.mlp.experts*"])),
    TargetFault("everything excluded", "K431", excludes(lambda e: ["*"])),
    TargetFault("layer 1 excluded as model.layers.1*, with a layer 10", "K432", layer_ten),
    TargetFault("*kv_b_proj excluded", "K433", excludes(lambda e: [*e, "*kv_b_proj"])),
    TargetFault("*kv_b_proj* excluded, attention packed", "K433", excludes(lambda e: [*e, "*kv_b_proj*"]), "nvfp4"),
    TargetFault("attention excluded by a part of its name", "K434",
                excludes(lambda e: [*[x for x in e if "self_attn" not in x], "self_attn"])),
    TargetFault("up's weight_scale_2 doubled", "K440", edit(f"{UP}.weight_scale_2", lambda t: t * 2)),
    TargetFault("q_a's weight_scale_2 halved", "K440", edit(f"{ATTENTION}.q_a_proj.weight_scale_2", lambda t: t / 2),
                "nvfp4"),
    TargetFault("gate's input_scale another than up's", "K441", fill(f"{GATE}.input_scale", 0.5)),
    TargetFault("weight_scale_2 zero", "K442", fill(f"{EXPERT}.down_proj.weight_scale_2", 0.0)),
    TargetFault("weight_scale_2 NaN", "K442", fill(f"{EXPERT}.down_proj.weight_scale_2", float("nan"))),
    TargetFault("input_scale Inf", "K442", fill(f"{EXPERT}.down_proj.input_scale", float("inf"))),
    TargetFault("a negative input_scale", "K442", fill(f"{EXPERT}.down_proj.input_scale", -1.0)),
    TargetFault("every input_scale times 1e30", "K442", scale_inputs(1e30)),
    TargetFault("a denormal input_scale", "K442", fill(f"{EXPERT}.down_proj.input_scale", 1e-40)),
    TargetFault("every input_scale times a thousand", "K444", scale_inputs(1e3)),
    TargetFault("block scales zero throughout", "K443", fill(f"{UP}.weight_scale", 0.0)),
    TargetFault("a block scale NaN", "K443",
                edit(f"{UP}.weight_scale", lambda t: t.view(torch.uint8).clone().index_fill_(1, torch.tensor(0), 0xFF)
                     .view(torch.float8_e4m3fn))),
)  # fmt: skip
