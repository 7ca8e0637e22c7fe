"""Heads with nothing wrong: every layout and flag, for the engines that can run them, with weights as if trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kconv.checkpoint.tensors import TORCH
from kconv.drafters.keys import TOP
from kconv.drafters.slots import needs
from kconv.drafters.spec import HeadSpec, Mla, Norms, Yarn
from kconv.engines import BY_NAME
from kconv.engines.config import identity, write_keys
from kconv.engines.layout import Layout
from kconv.validate.rules.head import ENGINE_OF, WRITTEN_FOR
from kconv.validate.rules.subject import ENGINES

from .block_drafters import DFLASH, DSPARK
from .heads import GQA, MLA, PORTABLE, QK, random_map, write_head

ONE_LAYER = {"torchspec", "specforge", "safeailab", "automodel", "deepspec"}
NO_MLA = {"specforge", "safeailab", "speculators", "deepspec"}
# Both are told by the maps that they save with a reduced vocabulary.
REDUCED = {"specforge", "safeailab"}
P_EAGLE = {"speculators", "automodel", "specforge-peagle"}


def can_make(layout: Layout, spec: HeadSpec) -> bool:
    """Say whether a layout's maker makes such heads."""
    if layout.drafter is not spec.drafter:
        return False
    if layout.write_config is not None and layout.name != "speculators":
        beside = any(limit.hits(spec, None) for limit in layout.target_limits)
        return not beside and not any(limit.applies(spec, ()) for limit in layout.limits)
    if layout.name == "specforge-peagle" and (isinstance(spec.attention, Mla) or spec.mask is None):
        return False
    if layout.name not in P_EAGLE and spec.mask is not None:
        return False
    if layout.name in NO_MLA and isinstance(spec.attention, Mla):
        return False
    if layout.name in ONE_LAYER and spec.layers != 1:
        return False
    yarn = spec.rope.scaling
    if layout.name == "automodel" and isinstance(spec.attention, Mla) and isinstance(yarn, Yarn) and yarn.mscale != 0:
        return False
    if layout.name == "automodel" and spec.norms.qk:
        return False
    is_reduced = spec.draft_vocab != spec.vocab
    if layout.name == "deepspec" and (spec.norms != Norms(qk=True) or is_reduced):
        return False
    if layout.name == "torchspec" and (spec.norms != Norms() or is_reduced):
        return False
    return not (layout.name in REDUCED and (not is_reduced or spec.norms.output))


def make_config(layout: Layout, spec: HeadSpec) -> dict[str, Any]:
    """Return a config in which the captured layers stand as the layout's maker has them."""
    if layout.write_config is not None and layout.name != "speculators":
        return layout.write_config(spec)
    config = identity(spec) | write_keys(spec)
    ids = {"eagle_aux_hidden_state_layer_ids": list(spec.captured)}
    match layout.name:
        case "modelopt":
            config["eagle_config"] |= ids | {"next_layer_regular": True, "parallel_draft_step": 1}
        case "torchspec":
            config["eagle_config"] |= ids | {"use_mtp_layernorm": False}
            del config["norm_output"]
        case "specforge":
            config["eagle_config"] |= ids
            config["norm_output"] = True
            del config["eagle_config"]["return_hidden_post_norm"]
        case "specforge-peagle":
            config |= {"architectures": ["PEagleDraftModel"]}
        case "automodel":
            config |= {"architectures": ["LlamaEagle3DraftModel"]}
        case "deepspec":
            config |= {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": list(spec.captured)}
        case "safeailab":
            config |= {"architectures": ["LlamaForCausalLM"]}
        case "speculators":
            outer = ["draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm"]
            outer += ["mask_token_id"] * (spec.mask is not None)
            config = {
                "architectures": ["Eagle3DraftModel"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.3.0",
                "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/target"}},
                "norm_output": config.pop("norm_output"),
                TOP: [i + 1 for i in spec.captured],
                **{key: config.pop(key) for key in outer},
                "transformer_layer_config": config,
            }
    return config


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
    spec: Any
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
    for name, block in {"dflash": DFLASH, "dspark": DSPARK}.items():
        for layout in (*WRITTEN, "speculators"):
            yield Good(f"{name}, {layout}", f"dflash-{layout}", block, FOR[layout])
    for layout in WRITTEN:
        yield Good(f"gqa, NVFP4 MLP, {layout}", layout, QUANTIZABLE, FOR[layout], nvfp4=True)
    for layout in ("vllm", "trtllm"):
        yield Good(f"mla, NVFP4 MLP, {layout}", layout, LATENT_QUANTIZABLE, FOR[layout], nvfp4=True)


GOOD = {good.name: good for good in _variants()}
