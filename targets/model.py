"""A target as a torch module: transformers' native DeepSeek-V3 with the target's weights in it."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import psutil
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from ..checkpoint.bytes import digest
from ..checkpoint.folder import Checkpoint, open_checkpoint
from ..checkpoint.header import TensorInfo
from ..checkpoint.source import Source
from ..checkpoint.tensors import read_tensor
from ..errors import TargetInvalid, TargetTooLarge
from .config import TargetConfig, parse_target_config, read_target_config
from .weights import StoredWeight, stored_weights

TEXT_MODELS = ("kimi_k2", "deepseek_v3")
SOURCE_DTYPES = ("BF16", "F16", "F32")
# Parts of a multimodal target that a text forward has no use for.
NOT_TEXT = ("vision_tower.", "mm_projector.")
# What to do with a target that is larger than the memory, where a head is trained or measured on it.
STATES = "Have a running vLLM give its states (kconv states --url), and use those (--states)."
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
        raise TargetInvalid(
            f"transformers cannot build this target: {fault}",
            where="config.json",
            fix="Fetch the target's config.json again; a key is missing or of a wrong type.",
        ) from fault
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    return model.eval()


def load_target(folder: Path, dtype: torch.dtype, *, instead: str = STATES) -> DeepseekV3ForCausalLM:
    """Load a target whole into memory, in evaluation mode; quantized weights are dequantized one by one.

    Args:
        folder: a checkpoint folder under the hub's names (one tensor per expert), in a form of `source_formats`.
        dtype: of the weights in memory.
        instead: what the user should do with a target that does not fit.

    Raises:
        TargetInvalid: the target is of another family, or a tensor is missing, unknown or of a wrong shape.
        TargetTooLarge: it is larger than what memory is left.
        SourceFormatUnknown, TensorShape: it is quantized in another way, or its scales do not fit its values.
        NotACheckpoint, ConfigInvalid, CorruptIndex, CorruptHeader: the folder cannot be read.
    """
    checkpoint = open_checkpoint(folder)
    config = parse_target_config(checkpoint.config, where=folder / "config.json")
    stored = stored_weights(checkpoint, config)
    _check_memory(folder, stored, dtype, instead)
    model = build_target(config, dtype)
    check_tensors(model, checkpoint, config, stored)
    fill(model.state_dict(), stored, config.prefix)
    return model


def check_memory(checkpoint: Checkpoint, dtype: torch.dtype, *, instead: str = STATES) -> None:
    """Raise TargetTooLarge, and whatever else its headers tell, if `load_target` would; no weight is read."""
    config = parse_target_config(checkpoint.config, where=checkpoint.folder / "config.json")
    _check_memory(checkpoint.folder, stored_weights(checkpoint, config), dtype, instead)


def _check_memory(folder: Path, stored: dict[str, StoredWeight], dtype: torch.dtype, instead: str) -> None:
    text = [weight for name, weight in stored.items() if not name.startswith(NOT_TEXT)]
    needed = sum(math.prod(weight.shape) for weight in text) * dtype.itemsize
    left = psutil.virtual_memory().available + psutil.swap_memory().free
    if needed > left:
        raise TargetTooLarge(
            f"the target takes {needed / 1e9:,.1f} GB in memory as {str(dtype).removeprefix('torch.')}, "
            f"and {left / 1e9:,.1f} GB are left",
            where=folder,
            fix=instead,
        )


def check_tensors(
    model: DeepseekV3ForCausalLM, checkpoint: Checkpoint, config: TargetConfig, stored: dict[str, StoredWeight]
) -> None:
    """Raise TargetInvalid unless a checkpoint's tensors are just those that a model, which may be empty, asks for."""
    sources = (_sources(name, tensor.shape) for name, tensor in model.state_dict().items())
    _account(config, checkpoint, stored, {name: shape for parts in sources for name, shape in parts.items()})


def fill(state: dict[str, torch.Tensor], stored: dict[str, StoredWeight], prefix: str) -> None:
    """Read weights into a model's tensors.

    Args:
        state: tensors to fill, by their names in the whole model.
        stored: the weights, by their names on disk.
        prefix: of the names on disk.
    """
    for name, own in state.items():
        # Fused experts are [experts, gate rows then up rows, hidden], which is the order of `_sources`.
        flat, at = own.view(-1), 0
        for part, shape in _sources(name, own.shape).items():
            size = math.prod(shape)
            flat[at : at + size] = stored[prefix + part].read().flatten()
            at += size


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: sums come out the same however many cores there are, and what is trained with them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


def _account(
    config: TargetConfig,
    checkpoint: Checkpoint,
    stored: dict[str, StoredWeight],
    wanted: dict[str, tuple[int, ...]],
) -> None:
    wanted = {config.prefix + name: shape for name, shape in wanted.items()}
    present = {name: weight for name, weight in stored.items() if not name.startswith(NOT_TEXT)}
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
        weight = present[name]
        if weight.shape != shape or weight.dtype not in SOURCE_DTYPES:
            raise TargetInvalid(
                f"{name} is {weight.dtype} {list(weight.shape)}, not {'/'.join(SOURCE_DTYPES)} {list(shape)}",
                where=weight.infos[0].file,
                fix="Check that config.json and the weights are of the same model, and not quantized.",
            )


# A target's two ends: embedding, final norm, output matrix.
#
# Training from stored states needs no more of a target, whose layers may be a trillion parameters.


@dataclass(frozen=True)
class Ends:
    """Where a target's embedding, final norm and output matrix are.

    Attributes:
        config: the target's.
        tensors: they, by their names on disk; a checkpoint that lacks one has fewer.
        name: the target's, for messages.
    """

    config: TargetConfig
    tensors: Mapping[str, TensorInfo]
    name: str

    @cached_property
    def digests(self) -> dict[str, str]:
        """The blake3 of each one's bytes, which are read once for that."""
        return {name: digest(info) for name, info in sorted(self.tensors.items())}


def find_ends(source: Source) -> Ends:
    """Find a target's ends; of a hub id their bytes alone are downloaded, and of a folder no other shard is opened.

    Raises:
        HubRefused, HubUnreachable, OutputFailed: see `checkpoint.hub`.
        NotACheckpoint, ConfigInvalid, CorruptIndex, CorruptHeader: it cannot be read.
        TargetInvalid: it is no target.
    """
    config = read_target_config(source.fetch_config())
    names = {config.embed_tokens, f"{config.prefix}model.norm.weight", config.lm_head}
    return Ends(config, source.fetch_tensors(names), source.name)


def load_ends(ends: Ends, dtype: torch.dtype) -> DeepseekV3ForCausalLM:
    """Load a target's embedding, final norm and output matrix, in evaluation mode.

    Args:
        ends: of a target whose layers may be quantized; its ends may not, and no Kimi's are.
        dtype: of the weights in memory.

    Returns:
        A model of no layers, whose config names the target's number of layers all the same.

    Raises:
        TargetInvalid: the target is of another family, or an end is missing, of a wrong shape, or quantized.
    """
    config = ends.config
    model = build_target(replace(config, text=config.text | {"num_hidden_layers": 0}), dtype)
    for name, own in model.state_dict().items():
        stored = config.lm_head if name == "lm_head.weight" else config.prefix + name
        info = ends.tensors.get(stored)
        if info is None or info.shape != tuple(own.shape) or info.dtype not in SOURCE_DTYPES:
            found = f"it is {info.dtype} {list(info.shape)}" if info else "it is missing"
            raise TargetInvalid(
                f"the target's {stored} should be {'/'.join(SOURCE_DTYPES)} {list(own.shape)}, and {found}",
                where=ends.name,
                fix="Check that config.json and the weights are of the same model.",
            )
        own.copy_(read_tensor(info))
    model.config.num_hidden_layers = config.layers
    return model
