"""A target as a torch module: transformers' native DeepSeek-V3 with the target's weights in it.

What belongs here: building that module and loading it strictly. Native transformers has no `kimi_k2`, whose
text model *is* DeepSeek-V3's, and what the hub's folder names in `auto_map` would be remote code.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from ..checkpoint.folder import Checkpoint, open_checkpoint
from ..checkpoint.tensors import read_tensor
from ..errors import TargetInvalid
from .config import TargetConfig, parse_target_config

TEXT_MODELS = ("kimi_k2", "deepseek_v3")
SOURCE_DTYPES = ("BF16", "F16", "F32")
# Parts of a multimodal target that a text forward has no use for.
NOT_TEXT = ("vision_tower.", "mm_projector.")
EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


def build_target(config: TargetConfig, dtype: torch.dtype) -> DeepseekV3ForCausalLM:
    """Return a freshly initialized target in evaluation mode.

    Args:
        config: of a Kimi-K2 or DeepSeek-V3 target.
        dtype: of the weights; `e_score_correction_bias` stays float32, as transformers keeps it.

    Raises:
        TargetInvalid: the text model is of another family, or transformers refuses a value of the config.
    """
    if config.model_type not in TEXT_MODELS:
        raise TargetInvalid(
            f"the target's text model is {config.model_type!r}, not one of {', '.join(TEXT_MODELS)}",
            fix="Give a Kimi-K2 target.",
        )
    ours = {"model_type", "quantization_config", "auto_map", "architectures", "dtype", "torch_dtype"}
    # A deep copy, for transformers completes the rope dict in place.
    values = copy.deepcopy({key: value for key, value in config.text.items() if key not in ours})
    try:
        with _default_dtype(dtype):
            model = DeepseekV3ForCausalLM(DeepseekV3Config(**values))
    except (TypeError, ValueError, KeyError) as fault:
        raise TargetInvalid(f"transformers cannot build this target: {fault}", where="config.json") from fault
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    return model.eval()


def load_target(folder: Path, dtype: torch.dtype) -> DeepseekV3ForCausalLM:
    """Load a bf16, fp16 or fp32 target whole into memory, in evaluation mode.

    Args:
        folder: a checkpoint folder under the hub's names (one tensor per expert).
        dtype: of the weights in memory.

    Raises:
        TargetInvalid: the target is quantized or of another family, or a tensor is missing, unknown or of a
            wrong shape.
        NotACheckpoint, ConfigInvalid, CorruptIndex, CorruptHeader: the folder cannot be read.
    """
    checkpoint = open_checkpoint(folder)
    config = parse_target_config(checkpoint.config, where=folder / "config.json")
    _refuse_quantized(config, checkpoint)
    model = build_target(config, dtype)
    sources = {name: _sources(name, tensor.shape) for name, tensor in model.state_dict().items()}
    _account(config, checkpoint, {name: shape for parts in sources.values() for name, shape in parts.items()})
    for name, own in model.state_dict().items():
        parts = [read_tensor(checkpoint.tensors[config.prefix + part]) for part in sources[name]]
        # Fused experts are [experts, gate rows then up rows, hidden], which is the order of `_sources`.
        own.copy_(torch.cat([part.flatten() for part in parts]).view(own.shape))
    return model


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Construct modules in a dtype, as transformers' own loading does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _sources(name: str, shape: torch.Size) -> dict[str, tuple[int, ...]]:
    """Return the tensors on disk, with shapes, that a parameter is made of: itself, or one or two per expert."""
    fused = EXPERTS.fullmatch(name)
    if not fused:
        return {name: tuple(shape)}
    experts, rows, columns = shape
    parts = ("gate_proj", "up_proj") if fused[2] == "gate_up_proj" else ("down_proj",)
    part_shape = (rows // len(parts), columns)
    return {f"{fused[1]}.{i}.{part}.weight": part_shape for i in range(experts) for part in parts}


def _refuse_quantized(config: TargetConfig, checkpoint: Checkpoint) -> None:
    if config.quantization:
        method = config.quantization.get("quant_method", "an unnamed method")
        raise TargetInvalid(
            f"{checkpoint.folder.name} is quantized ({method}); a forward needs bf16, fp16 or fp32 weights",
            where=checkpoint.folder / "config.json",
            fix="Give the target before its quantization, or one that was dequantized.",
        )


def _account(config: TargetConfig, checkpoint: Checkpoint, wanted: dict[str, tuple[int, ...]]) -> None:
    wanted = {config.prefix + name: shape for name, shape in wanted.items()}
    present = {n: i for n, i in checkpoint.tensors.items() if not n.startswith(NOT_TEXT)}
    missing, unknown = sorted(wanted.keys() - present.keys()), sorted(present.keys() - wanted.keys())
    if missing or unknown:
        counts = [
            f"{len(names)} {kind} (first: {names[0]})"
            for names, kind in ((missing, "missing"), (unknown, "unknown"))
            if names
        ]
        raise TargetInvalid(
            f"the target's tensors are not the ones its config asks for: {'; '.join(counts)}",
            where=checkpoint.folder,
            fix="Check that config.json and the weights are of the same model, and that the download is whole.",
        )
    for name, shape in wanted.items():
        info = present[name]
        if info.shape != shape or info.dtype not in SOURCE_DTYPES:
            raise TargetInvalid(
                f"{name} is {info.dtype} {list(info.shape)}, not {'/'.join(SOURCE_DTYPES)} {list(shape)}",
                where=info.file,
                fix="Check that config.json and the weights are of the same model, and not quantized.",
            )
