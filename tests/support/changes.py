"""Changes to a written head, each a function of its config and tensors in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Config, Tensors = dict[str, Any], dict[str, torch.Tensor]
Change = Callable[[Config, Tensors], None]
P = "layers.0."


def put(**keys: Any) -> Change:
    """Return the change that sets keys of the config; `...` takes one out."""

    def change(config: Config, tensors: Tensors) -> None:
        for key, value in keys.items():
            config.pop(key, None) if value is ... else config.update({key: value})

    return change


def nest(**keys: Any) -> Change:
    """Return the change that sets keys of eagle_config; `...` takes one out."""

    def change(config: Config, tensors: Tensors) -> None:
        put(**keys)(config.setdefault("eagle_config", {}), tensors)

    return change


def inside(**keys: Any) -> Change:
    """Return the change that sets keys of dflash_config; `...` takes one out."""

    def change(config: Config, tensors: Tensors) -> None:
        put(**keys)(config["dflash_config"], tensors)

    return change


def drop(*names: str) -> Change:
    """Return the change that takes tensors out."""

    def change(config: Config, tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def add(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Change:
    """Return the change that adds a tensor of ones."""

    def change(config: Config, tensors: Tensors) -> None:
        tensors[name] = torch.ones(shape, dtype=dtype)

    return change


def edit(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Return the change that puts what `how` makes of a tensor in its place."""

    def change(config: Config, tensors: Tensors) -> None:
        tensors[name] = how(tensors[name]).contiguous()

    return change


def write_twice(name: str, over: str) -> Change:
    """Return the change that puts one tensor in another's place too."""

    def change(config: Config, tensors: Tensors) -> None:
        tensors[over] = tensors[name].clone()

    return change


def rename(old: str, new: str) -> Change:
    """Return the change that renames each tensor whose name begins with `old`."""

    def change(config: Config, tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return change


def also(*changes: Change) -> Change:
    """Return several changes as one."""

    def change(config: Config, tensors: Tensors) -> None:
        for one in changes:
            one(config, tensors)

    return change


def fuse(names: list[str], into: str) -> Change:
    """Return the change that stores linears as one."""

    def change(config: Config, tensors: Tensors) -> None:
        tensors[into] = torch.cat([tensors.pop(name) for name in names])

    return change


def to_inner(**keys: Any) -> Change:
    """Return the change that sets keys of a speculators config's inner part."""

    def change(config: Config, tensors: Tensors) -> None:
        put(**keys)(config["transformer_layer_config"], tensors)

    return change


def rope(place: str, **keys: Any) -> Change:
    """Return the change that sets RoPE's keys in rope_scaling or rope_parameters."""

    def change(config: Config, tensors: Tensors) -> None:
        put(**keys)(config.setdefault(place, {}), tensors)

    return change


def as_ids(d2t: torch.Tensor) -> torch.Tensor:
    """Return the target ids that offsets lead to."""
    return d2t + torch.arange(d2t.numel())


def one_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[3] = float("nan")
    return tensor


def one_inf(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[0] = float("inf")
    return tensor


def initial(std: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what draws a tensor anew as an initializer does."""
    generator = torch.Generator().manual_seed(5)
    return lambda tensor: (std * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)


def uniform(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as torch.nn.Linear leaves it."""
    drawn = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(6)) * 2 - 1
    return (drawn / tensor.shape[1] ** 0.5).to(tensor.dtype)


def some_rows_zero(tensor: torch.Tensor) -> torch.Tensor:
    tensor[5:9] = 0
    return tensor


def uneven(tensor: torch.Tensor) -> torch.Tensor:
    """Return a norm's weight as training leaves it: of many values."""
    return torch.linspace(0.2, 1.8, tensor.numel()).to(tensor.dtype)


def stale_quantization(config: Config, tensors: Tensors) -> None:
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def exclude(*entries: str) -> Change:
    """Return the change that excludes modules from a quantization."""

    def change(config: Config, tensors: Tensors) -> None:
        config["quantization_config"] = config["quantization_config"] | {"ignore": list(entries)}

    return change


def fp8(linear: str) -> Change:
    """Return the change that stores a linear in FP8, and says so."""

    def change(config: Config, tensors: Tensors) -> None:
        name = f"{linear}.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.tensor(0.01)
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}

    return change


def shorten(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def bad_index(folder: Path) -> None:
    weight_map = {"fc.weight": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def cut_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text()[:-5])


def twins_apart(config: Config, tensors: Tensors) -> None:
    tensors["layers.1.hidden_norm.weight"] = tensors["layers.1.hidden_norm.weight"] + 1
    tensors["layers.1.input_layernorm.weight"] = torch.ones_like(tensors["layers.1.hidden_norm.weight"])
