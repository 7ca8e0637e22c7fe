"""A target as a torch module: transformers' own class of its text model, with the target's weights.

DeepSeek-V3 and Kimi-K2 are filled tensor by tensor from the Hub's names, so that a part of one can be loaded too.
transformers loads any other causal model, and its report of missing and unknown tensors is trusted.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import CONFIG_MAPPING, DeepseekV3Config, DeepseekV3ForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from ..checkpoint.bytes import digest
from ..checkpoint.folder import Checkpoint, open_checkpoint
from ..checkpoint.header import TensorInfo
from ..checkpoint.source import Source
from ..checkpoint.tensors import read_tensor
from ..errors import TargetInvalid, TargetTooLarge
from .config import TargetConfig, parse_target_config, read_target_config
from .mtp import is_run
from .weights import StoredWeight, stored_weights

CausalLM = Any
"""transformers' class of a target's text model: `model` with its `layers`, and `lm_head`."""

# Model types of DeepSeek-V3's class, into which quantized experts are read one by one.
DEEPSEEKS = ("kimi_k2", "deepseek_v3")
TIED = ("lm_head.weight",)
# Text models of multimodal targets that on text equal another class; transformers has no class for them alone.
AS_CAUSAL = {"qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
# RoPE keys that place images; for a text token all three positions are equal.
OF_IMAGES = ("mrope_section", "mrope_interleaved")
# How far logits may be from lm_head of the last state, as a share of the largest: rounding only.
NEAR = 1e-3
SOURCE_DTYPES = ("BF16", "F16", "F32")
# What to do about a target that is larger than memory, when a head is trained or measured on it.
STATES = "Get its states from a running vLLM (kconv states --url), and use those (--states)."
EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


def build_target(config: TargetConfig, dtype: torch.dtype) -> CausalLM:
    """Return a freshly initialized target in evaluation mode.

    `e_score_correction_bias` stays float32, as in transformers, whatever the dtype of the weights.

    Raises:
        TargetInvalid: transformers has no class for the text model, or refuses a value of the config.
    """
    text, model_class = _class_of(config)
    try:
        with _default_dtype(dtype):
            model = model_class(text)
    except (TypeError, ValueError, KeyError) as fault:
        raise _unbuildable(fault) from fault
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    _refuse_shape(model, config)
    return model.eval()


def refuse_by_layers(config: TargetConfig, stored: Mapping[str, StoredWeight]) -> None:
    """Refuse a target that cannot be run layer by layer between its embedding and its output matrix.

    Raises:
        TargetInvalid: transformers has no class for it, the class does more than that, or the files hold all experts of
            a layer in one tensor.
    """
    fix = "Use ModelOpt's own scripts for this target. kconv quantizes it data-free, but cannot measure the result."
    place = "config.json: model_type"
    if fused := next((name for name in stored if EXPERTS.match(name)), ""):
        what = f"{fused} of this {config.model_type} holds all experts of a layer, so it cannot be run layer by layer"
        raise TargetInvalid(what, where=place, fix=fix)
    if config.on_disk("model.") != f"{config.prefix}model.":
        what = f"this {config.model_type} has its text model at {config.body}, so it cannot be run layer by layer"
        raise TargetInvalid(what, where=place, fix=fix)
    # Its class with few tokens and no layers is what surrounds them.
    few: dict[str, Any] = {"vocab_size": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    small = build_target(replace(config, text=config.text | _without_layers(config) | few), torch.float32)
    known = type(small).__name__
    body = getattr(small, "model", None)
    if other := [name for name in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(body, name)]:
        what = f"{known} has no model.{other[0]}, so it cannot be run layer by layer"
        raise TargetInvalid(what, where=place, fix=fix)
    _refuse_other_logits(small, config)
    small.model.norm = torch.nn.Identity()
    ids = torch.arange(few["vocab_size"]).unsqueeze(0)
    with torch.no_grad():
        begun = small.model(input_ids=ids, use_cache=False).last_hidden_state
    if not torch.equal(begun, small.model.embed_tokens.weight[ids]):
        what = f"{known} changes its embedding before the first layer, so it cannot be run layer by layer"
        raise TargetInvalid(what, where=place, fix=fix)


def _without_layers(config: TargetConfig) -> dict[str, Any]:
    """Return the config's keys for a model that has no layers."""
    return {"num_hidden_layers": 0} | ({"layer_types": []} if config.text.get("layer_types") else {})


def _class_of(config: TargetConfig) -> tuple[PretrainedConfig, type]:
    """Return the config of a target's text model, and the class that transformers builds from it."""
    ours = {"model_type", "quantization_config", "auto_map", "architectures", "dtype", "torch_dtype"}
    # A deep copy, since transformers completes the rope dict in place.
    values = copy.deepcopy({key: value for key, value in config.text.items() if key not in ours})
    if config.model_type in DEEPSEEKS:
        try:
            return DeepseekV3Config(**values), DeepseekV3ForCausalLM
        except Exception as fault:  # its check of types raises a plain Exception
            raise _unbuildable(fault) from fault
    for place in ("rope_scaling", "rope_parameters"):
        if config.model_type in AS_CAUSAL and isinstance(values.get(place), dict):
            values[place] = {key: value for key, value in values[place].items() if key not in OF_IMAGES}
            if values[place].get("type", values[place].get("rope_type")) == "mrope":
                values[place] |= {"type": "default", "rope_type": "default"}
    known = AS_CAUSAL.get(config.model_type, config.model_type)
    if known not in CONFIG_MAPPING or CONFIG_MAPPING[known] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise TargetInvalid(
            f"transformers has no causal language model for the target's text model {config.model_type!r}",
            where="config.json: model_type",
            fix="Update transformers, or use states from a running vLLM (kconv states --url).",
        )
    text_class = CONFIG_MAPPING[known]
    try:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[text_class]
        return text_class(**values), model_class
    except Exception as fault:  # its check of types raises a plain Exception
        raise _unbuildable(fault) from fault


def _unbuildable(fault: Exception) -> TargetInvalid:
    return TargetInvalid(
        f"transformers cannot build this target: {fault}",
        where="config.json",
        fix="Fetch the target's config.json again; a key is missing or of a wrong type.",
    )


def _refuse_shape(model: CausalLM, config: TargetConfig) -> None:
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or not hasattr(model, "lm_head"):
        raise TargetInvalid(
            f"{type(model).__name__} has no decoder at model.layers, or no lm_head",
            where=f"config.json: model_type {config.model_type!r}",
            fix="Use states from a running vLLM (kconv states --url).",
        )


def load_target(folder: Path, dtype: torch.dtype, *, instead: str = STATES) -> CausalLM:
    """Load a target whole into memory, in evaluation mode; quantized weights are dequantized one by one.

    The folder has the Hub's names (one tensor per expert). `dtype` is that of the weights in memory, and `instead` what
    the user should do if the target does not fit.

    Raises:
        TargetInvalid: transformers has no class for the target, or a tensor is missing, unknown or of a wrong shape.
        TargetTooLarge: it is larger than the free memory.
        SourceFormatUnknown, QuantizedWeightInvalid: it is quantized in another way, or scales do not fit their values.
        NotACheckpoint, ConfigInvalid, CorruptIndex, CorruptHeader: the folder cannot be read.
    """
    checkpoint = open_checkpoint(folder)
    config = parse_target_config(checkpoint.config, where=folder / "config.json")
    stored = stored_weights(checkpoint, config)
    _check_memory(folder, config, stored, dtype, instead)
    if config.model_type not in DEEPSEEKS:
        return _load_causal(folder, config, stored, dtype)
    model = build_target(config, dtype)
    check_tensors(model, checkpoint, config, stored)
    fill(model.state_dict(), stored, config.prefix)
    return model


def _load_causal(folder: Path, config: TargetConfig, stored: dict[str, StoredWeight], dtype: torch.dtype) -> CausalLM:
    """Let transformers load a target's text model, and check its report against the files."""
    text, model_class = _class_of(config)
    loader: Any = model_class
    names: dict[str, Any] = {}
    weights: Path | None = folder
    if any(weight.form != "plain" for weight in stored.values()):
        weights, names = None, {"state_dict": _plain_text(config, stored)}
    elif config.body != "model." or config.prefix:
        names = {
            "key_mapping": {f"^{re.escape(config.body)}": "model.", f"^{re.escape(config.prefix)}lm_head": "lm_head"}
        }
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # what it would warn about is refused below
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
            model, account = loader.from_pretrained(
                weights, config=text, dtype=dtype, output_loading_info=True, use_safetensors=True,
                local_files_only=True, ignore_mismatched_sizes=True, **names,
            )  # fmt: skip
    except (TypeError, ValueError, KeyError, OSError, RuntimeError) as fault:
        raise _unbuildable(fault) from fault
    finally:
        transformers_logging.set_verbosity(verbosity)
    _refuse_account(folder, config, account)
    _refuse_shape(model, config)
    _refuse_other_logits(model, config)
    return model.eval()


def _plain_text(config: TargetConfig, stored: dict[str, StoredWeight]) -> dict[str, torch.Tensor]:
    """Return the text model's weights, dequantized, by their names in its own class."""
    found = {}
    for name, weight in stored.items():
        if is_run(name, config.layers):
            inner = f"model.{name.removeprefix(config.body)}" if name.startswith(config.body) else name
            found[inner.removeprefix(config.prefix)] = weight.read()
    return found


def _refuse_account(folder: Path, config: TargetConfig, account: dict[str, Any]) -> None:
    unknown = sorted(name for name in account["unexpected_keys"] if is_run(name, config.layers))
    missing = sorted(name for name in account["missing_keys"] if not (config.tied and name == "lm_head.weight"))
    wrong = sorted(str(name) for name, *_ in account["mismatched_keys"])
    found = {"missing": missing, "unknown": unknown, "of another shape": wrong}
    if any(found.values()) or account.get("error_msgs"):
        counts = [f"{len(names)} {kind} (first: {names[0]})" for kind, names in found.items() if names]
        raise TargetInvalid(
            f"the target's tensors do not match its config: {'; '.join(counts or account['error_msgs'])}",
            where=folder,
            fix="Check that config.json and the weights belong to the same model, and that the download is complete.",
        )


@torch.no_grad()
def _refuse_other_logits(model: CausalLM, config: TargetConfig) -> None:
    """Refuse a target whose logits are not `lm_head` of its last state, since training and measuring assume that."""
    model.eval()
    tokens = torch.zeros(1, 1, dtype=torch.long)
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    ours, theirs = model.lm_head(hidden).float(), model(input_ids=tokens, use_cache=False).logits.float()
    if not (ours - theirs).abs().max() <= NEAR * theirs.abs().max():
        raise TargetInvalid(
            f"the logits of {type(model).__name__} are not lm_head times its last state; the model scales or caps them",
            where=f"config.json: model_type {config.model_type!r}",
            fix="Use states from a running vLLM (kconv states --url).",
        )


def check_memory(checkpoint: Checkpoint, dtype: torch.dtype, *, instead: str = STATES) -> None:
    """Raise TargetTooLarge, or any other error visible in the headers, if `load_target` would; reads no weights."""
    config = parse_target_config(checkpoint.config, where=checkpoint.folder / "config.json")
    _check_memory(checkpoint.folder, config, stored_weights(checkpoint, config), dtype, instead)


def _check_memory(
    folder: Path, config: TargetConfig, stored: dict[str, StoredWeight], dtype: torch.dtype, instead: str
) -> None:
    text = [weight for name, weight in stored.items() if is_run(name, config.layers)]
    needed = sum(math.prod(weight.shape) for weight in text) * dtype.itemsize
    left = psutil.virtual_memory().available + psutil.swap_memory().free
    if needed > left:
        raise TargetTooLarge(
            f"the target needs {needed / 1e9:,.1f} GB of memory as {str(dtype).removeprefix('torch.')}, "
            f"but only {left / 1e9:,.1f} GB are free",
            where=folder,
            fix=instead,
        )


def check_tensors(
    model: CausalLM, checkpoint: Checkpoint, config: TargetConfig, stored: dict[str, StoredWeight]
) -> None:
    """Raise TargetInvalid unless a checkpoint has exactly the tensors of a model, which may be empty."""
    # A model on the meta device lists its output matrix separately even if it is tied to the embedding.
    own = {name: tensor for name, tensor in model.state_dict().items() if not (config.tied and name in TIED)}
    sources = (_sources(name, tensor.shape) for name, tensor in own.items())
    _account(config, checkpoint, stored, {name: shape for parts in sources for name, shape in parts.items()})


def fill(state: dict[str, torch.Tensor], stored: dict[str, StoredWeight], prefix: str) -> None:
    """Read weights, by their names on disk after a prefix, into tensors, by their names in the whole model."""
    for name, own in state.items():
        # Fused experts are [experts, gate rows then up rows, hidden], in the order of `_sources`.
        flat, at = own.view(-1), 0
        for part, shape in _sources(name, own.shape).items():
            size = math.prod(shape)
            flat[at : at + size] = stored[prefix + part].read().flatten()
            at += size


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: sums, and what is trained with them, then do not depend on the number of cores."""
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
    """Return the tensors on disk, with shapes, that form a parameter: itself, or one or two per expert."""
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
    present = {name: weight for name, weight in stored.items() if is_run(name, config.layers)}
    missing, unknown = sorted(wanted.keys() - present.keys()), sorted(present.keys() - wanted.keys())
    if missing or unknown:
        counts = [
            f"{len(names)} {kind} (first: {names[0]})"
            for names, kind in ((missing, "missing"), (unknown, "unknown"))
            if names
        ]
        raise TargetInvalid(
            f"the target's tensors do not match its config: {'; '.join(counts)}",
            where=checkpoint.folder,
            fix="Check that config.json and the weights belong to the same model, and that the download is complete.",
        )
    for name, shape in wanted.items():
        weight = present[name]
        if weight.shape != shape or weight.dtype not in SOURCE_DTYPES:
            raise TargetInvalid(
                f"{name} is {weight.dtype} {list(weight.shape)}, not {'/'.join(SOURCE_DTYPES)} {list(shape)}",
                where=weight.infos[0].file,
                fix="Check that config.json and the weights belong to the same model, and that it is not quantized.",
            )


# The two ends of a target: embedding, final norm, output matrix.
#
# Training from stored states needs no more of a target, whose layers may have a trillion parameters.


@dataclass(frozen=True)
class Ends:
    """The location of a target's embedding, final norm and output matrix.

    `tensors` has them by their names on disk, without those that the checkpoint lacks.
    """

    config: TargetConfig
    tensors: Mapping[str, TensorInfo]
    source: Source

    @cached_property
    def digests(self) -> dict[str, str]:
        """The blake3 of each tensor's bytes, computed in one read."""
        return {name: digest(info) for name, info in sorted(self.tensors.items())}


def find_ends(source: Source) -> Ends:
    """Find a target's ends; for a hub id only their bytes are downloaded, and in a folder no other shard is opened.

    Raises:
        HubRefused, HubUnreachable, OutputFailed: they cannot be downloaded.
        NotACheckpoint, ConfigInvalid, CorruptIndex, CorruptHeader: it cannot be read.
        TargetInvalid: it is not a target.
    """
    config = read_target_config(source.fetch_config())
    names = {config.embed_tokens, config.on_disk("model.norm.weight"), config.lm_head}
    return Ends(config, source.fetch_tensors(names), source)


def load_ends(ends: Ends, dtype: torch.dtype) -> CausalLM:
    """Load a target's unquantized ends, in evaluation mode; its layers may be quantized.

    The model has no layers, but its config still states the target's number of layers.

    Raises:
        TargetInvalid: the target is of another class, or an end is missing, of a wrong shape, or quantized.
    """
    config = ends.config
    model = build_target(replace(config, text=config.text | _without_layers(config)), dtype)
    for name, own in model.state_dict().items():
        stored = config.lm_head if name == "lm_head.weight" else config.on_disk(name)
        info = ends.tensors.get(stored)
        if info is None or info.shape != tuple(own.shape) or info.dtype not in SOURCE_DTYPES:
            found = f"it is {info.dtype} {list(info.shape)}" if info else "it is missing"
            raise TargetInvalid(
                f"the target's {stored} should be {'/'.join(SOURCE_DTYPES)} {list(own.shape)}, and {found}",
                where=ends.source.name,
                fix="Check that config.json and the weights belong to the same model.",
            )
        own.copy_(read_tensor(info))
    model.config.num_hidden_layers = config.layers
    return model
