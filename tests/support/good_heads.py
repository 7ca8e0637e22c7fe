"""Heads with nothing wrong: every layout and flag, for the engines that can run them, with weights as if trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kconv.checkpoint.tensors import TORCH
from kconv.drafters.slots import needs
from kconv.drafters.spec import HeadSpec
from kconv.engines import BY_NAME
from kconv.validate.rules.head import ENGINE_OF, WRITTEN_FOR
from kconv.validate.rules.subject import ENGINES

from .heads import GQA, MLA, PORTABLE, QK, random_map, write_head
from .makers import can_make, make_config

# The engines' names in rules; vLLM's two model runners look for the captured layers in different places.
VLLM_V1, VLLM_V2 = VLLM = ("vllm-v1", "vllm-v2")
SGLANG, TRTLLM = "sglang", "trtllm"

# Layouts that kconv writes, and the engines that read the folder as it is.
FOR = WRITTEN_FOR | {"portable": ENGINES}
WRITTEN = ("vllm", "trtllm", "sglang", "portable")


@dataclass(frozen=True)
class Good:
    """A head with nothing wrong.

    Attributes:
        name: what it is.
        layout: the layout it is written in.
        spec: what it is, as data.
        engines: who can serve it as it is.
        nvfp4: whether its MLP is quantized.
    """

    name: str
    layout: str
    spec: HeadSpec
    engines: tuple[str, ...]
    nvfp4: bool = False

    def write(self, folder: Path) -> Path:
        """Write it into a folder."""
        layout = BY_NAME[self.layout]
        write_head(folder, layout, self.spec, trained_slots(self.spec), make_config(layout, self.spec))
        if self.nvfp4:
            quantize_mlp(folder)
        return folder


def trained_slots(spec: HeadSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a tensor for each slot that could have come out of a training: norms near one, rows of many lengths."""
    generator = torch.Generator().manual_seed(seed)
    slots: dict[str, torch.Tensor] = {}
    for name, need in needs(spec).items():
        if name == "d2t":
            slots |= random_map(spec, generator)
        elif name != "t2d":
            drawn = torch.randn(need.shape, generator=generator)
            if name.endswith("input_layernorm"):
                drawn = 0.5 + 0.0 * drawn
            elif len(need.shape) == 1 and "norm" in name:
                drawn = 1 + 0.1 * drawn
            elif name == "lm_head":
                drawn = 0.05 * drawn * torch.randn(need.shape[0], 1, generator=generator).exp()
            else:
                drawn = 0.05 * drawn
            slots[name] = drawn.to(TORCH[spec.dtype])
    return slots


def quantize_mlp(folder: Path) -> None:
    """Store the MLP's linears of a written head as NVFP4, and say so in its config."""
    import json

    file = folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(1)
    for part in ("gate", "up", "down"):
        base = f"layers.0.mlp.{part}_proj"
        rows, columns = tensors[f"{base}.weight"].shape
        tensors[f"{base}.weight"] = torch.randint(1, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
        scales = torch.rand(rows, columns // 16, generator=generator) + 0.5
        tensors[f"{base}.weight_scale"] = scales.to(torch.float8_e4m3fn)
        tensors[f"{base}.weight_scale_2"] = torch.tensor(0.01)
        tensors[f"{base}.input_scale"] = torch.tensor(0.02)
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


QUANTIZABLE = replace(GQA, hidden=64, target_hidden=64, intermediate=96)
LATENT_QUANTIZABLE = replace(MLA, hidden=64, target_hidden=64, intermediate=96)


def _variants() -> Iterator[Good]:
    for name, spec in PORTABLE.items():
        for layout in WRITTEN:
            engines = FOR[layout]
            if layout == "portable" and spec.mlp_bias:
                continue
            if can_make(BY_NAME[layout], spec) and not any(
                limit.applies(spec, ()) for e in engines for limit in BY_NAME[ENGINE_OF[e]].limits
            ):
                yield Good(f"{name}, {layout}", layout, spec, engines)
    reduced = PORTABLE["gqa, reduced vocabulary"]
    yield Good("mla, modelopt", "modelopt", MLA, (TRTLLM,))
    yield Good("gqa, modelopt", "modelopt", GQA, (TRTLLM,))
    yield Good("gqa, reduced vocabulary, modelopt", "modelopt", reduced, (TRTLLM,))
    yield Good("mla, torchspec", "torchspec", MLA, (SGLANG, TRTLLM))
    yield Good("gqa, torchspec", "torchspec", GQA, (SGLANG, TRTLLM))
    yield Good("gqa, speculators", "speculators", GQA, VLLM)
    yield Good("gqa, reduced vocabulary, speculators", "speculators", reduced, VLLM)
    yield Good("gqa, norms of queries and keys, vllm", "vllm", QK, VLLM)
    yield Good("mla, reduced vocabulary, vllm", "vllm", replace(MLA, draft_vocab=40), VLLM)
    yield Good("mla, reduced vocabulary, sglang", "sglang", replace(MLA, draft_vocab=40), (SGLANG,))
    for layout in WRITTEN:
        yield Good(f"gqa, NVFP4 MLP, {layout}", layout, QUANTIZABLE, FOR[layout], nvfp4=True)
    for layout in ("vllm", "trtllm"):
        yield Good(f"mla, NVFP4 MLP, {layout}", layout, LATENT_QUANTIZABLE, FOR[layout], nvfp4=True)


GOOD = {good.name: good for good in _variants()}
