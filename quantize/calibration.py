"""A calibration's record of each module's input, and the input scales that follow from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from blake3 import blake3
from pydantic import Field

from ..checkpoint.bytes import file_digest, sample_weights
from ..checkpoint.folder import Checkpoint
from ..checkpoint.formats import fused_group, is_scale
from ..checkpoint.header import TensorInfo
from ..checkpoint.schema import load_json
from ..checkpoint.staging import write_new
from ..checkpoint.tensors import read_tensor
from ..errors import InputScalesInvalid
from ..strict import StrictModel
from ..targets.config import TargetConfig
from .pack import scale_2


class TargetIdentity(StrictModel):
    """A target's identity, whatever form its weights are stored in.

    Attributes:
        hidden, layers, vocab: its dims.
        norm: blake3 of the final norm's values in bf16: no form quantizes it, and most training changes it.
        form, weights: see `WeightsSample`. Two targets of one form are compared by `weights` too.
    """

    hidden: int
    layers: int
    vocab: int
    norm: str
    form: str
    weights: str


# What two targets are compared by, in words.
COMPARED = {
    "hidden": "hidden size", "layers": "number of layers", "vocab": "vocabulary", "norm": "final norm",
    "weights": "content of its weights",
}  # fmt: skip


class CalibrationPrompts(StrictModel):
    """The calibration text: the file's sha256, prompts and tokens, and the digest of each prompt."""

    sha256: str
    count: int
    tokens: int
    digests: tuple[str, ...]


class TargetCalibration(StrictModel):
    """The largest magnitudes at the inputs of a target's linear modules; the schema of calibration.json.

    Attributes:
        target: the target that was calibrated.
        prompts: the text.
        input_amax: by the module's name in the text model, e.g. "model.layers.1.mlp.experts.0.up_proj"; without experts
            to which no token was routed.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    target: TargetIdentity
    prompts: CalibrationPrompts
    input_amax: dict[str, float]


def identify(target: Checkpoint, config: TargetConfig) -> TargetIdentity:
    norm = target.tensors.get(f"{config.prefix}model.norm.weight")
    if norm is None:
        raise InputScalesInvalid(
            f"{target.folder.name} has no {config.prefix}model.norm.weight to identify it by",
            where=target.folder,
            fix="Pass the complete target.",
        )
    values = read_tensor(norm).bfloat16().contiguous()
    digest = blake3(values.view(torch.uint8).numpy().data).hexdigest()
    sample = sample_weights(target.tensors.values())
    return TargetIdentity(
        hidden=config.hidden,
        layers=config.layers,
        vocab=config.vocab,
        norm=digest,
        form=sample.form,
        weights=sample.weights,
    )


def read_calibration(file: Path) -> TargetCalibration:
    return load_json(
        TargetCalibration,
        file,
        InputScalesInvalid,
        what="calibration of kconv's",
        fix="Pass a file that kconv calibrate wrote, or data-free.",
    )


def write_calibration(file: Path, calibration: TargetCalibration) -> None:
    write_new(file, calibration.model_dump_json(indent=1, by_alias=True) + "\n")


EXPERT = re.compile(r"(?P<layer>.*\.mlp\.experts)\.\d+\.(?P<part>\w+)")


@dataclass(frozen=True)
class InputScales:
    """The input_scale of each module, and its origin.

    Attributes:
        description: for the manifest and the output's reader.
        amax: largest magnitude at each module's input, by its name in the text model; None if every scale is 1.0.
        prefix: of the names on disk.
        digests: of the prompts, so that none is later used as held out.
    """

    description: str
    amax: Mapping[str, float] | None = field(default=None, repr=False)
    prefix: str = ""
    digests: tuple[str, ...] = field(default=(), repr=False)

    def scales(self, modules: Collection[str]) -> dict[str, float]:
        """Return the input_scale of each module, by its name on disk, equal for modules that an engine fuses.

        An expert to which no token was routed gets the largest amax of its layer's experts, as in ModelOpt.
        """
        if self.amax is None:
            return dict.fromkeys(modules, 1.0)
        layers: dict[str, float] = {}
        for name, value in self.amax.items():
            if expert := EXPERT.fullmatch(name):
                key = f"{expert['layer']}.{expert['part']}"
                layers[key] = max(layers.get(key, 0.0), value)
        shared: dict[str, float] = {}
        for module in modules:
            found = self._amax_of(module.removeprefix(self.prefix), layers)
            group = fused_group(module)
            shared[group] = max(shared.get(group, 0.0), found)
        return {module: float(scale_2(shared[fused_group(module)])) for module in modules}

    def _amax_of(self, name: str, layers: Mapping[str, float]) -> float:
        expert = EXPERT.fullmatch(name)
        found = (self.amax or {}).get(name, layers.get(f"{expert['layer']}.{expert['part']}") if expert else None)
        if found is None:
            raise InputScalesInvalid(
                f"the calibration has no amax for {name}",
                where=name,
                fix="Calibrate this target again, with more prompts.",
            )
        check_amax(name, found)
        return found


def data_free() -> InputScales:
    """Return what ModelOpt's data-free recipes write: 1.0 for every module, whatever its activations are."""
    return InputScales("data-free: every input_scale is 1.0")


def from_calibration(file: Path, target: Checkpoint, config: TargetConfig) -> InputScales:
    """Return the scales from a calibration of exactly this target."""
    calibration, own = read_calibration(file), identify(target, config)
    theirs = calibration.target
    apart = [name for name in COMPARED if getattr(theirs, name) != getattr(own, name)]
    # Of another form, the same weights are stored otherwise.
    differing = [name for name in apart if name != "weights" or own.form == theirs.form]
    if differing:
        raise InputScalesInvalid(
            f"{file.name} belongs to another target, of another {' and '.join(map(COMPARED.__getitem__, differing))}",
            where=file,
            fix="Calibrate this target, or pass --input-scale data-free.",
        )
    check_norms(calibration.input_amax, target, config)
    digest = file_digest(file)
    prompts = calibration.prompts
    return InputScales(
        f"calibrated on {prompts.count} prompts, {prompts.tokens} tokens (file sha256 {digest[:16]})",
        calibration.input_amax,
        config.prefix,
        prompts.digests,
    )


def check_amax(name: str, amax: float) -> None:
    """Raise InputScalesInvalid unless an amax gives an input_scale that engines can calculate with."""
    if not is_scale(float(scale_2(amax))):
        raise InputScalesInvalid(
            f"the amax of {name} is {amax:g}, which gives an input_scale outside float32's range",
            where=name,
            fix="Calibrate again, with other prompts.",
        )


def check_norms(amaxes: Mapping[str, float], target: Checkpoint, config: TargetConfig) -> None:
    """Raise InputScalesInvalid for an amax beyond what the norm before the module can output."""
    named = {f"{config.prefix}{name}": amax for name, amax in amaxes.items()}
    for beyond in beyond_norms(named, target.tensors, config.model_type):
        name = beyond.module.removeprefix(config.prefix)
        norm = beyond.norm.removeprefix(config.prefix)
        raise InputScalesInvalid(
            f"the amax of {name} is {beyond.amax:g}, but its input, {norm}, reaches at most {beyond.bound:g}",
            where=name,
            fix="Calibrate this target again. The file was changed, or belongs to another target.",
        )


# Where a norm follows the MLP, the one after the attention is no module's input (OLMo 2).
AFTER_ATTENTION, AFTER_MLP = "post_attention_layernorm", "post_feedforward_layernorm"
# The norm in the same layer whose output a module reads, by the last part of the module's name. o_proj and down_proj
# have none.
NORMS = {
    **dict.fromkeys(("q_proj", "q_a_proj", "kv_a_proj_with_mqa"), "input_layernorm"),
    "q_b_proj": "self_attn.q_a_layernorm",
    "kv_b_proj": "self_attn.kv_a_layernorm",
    **dict.fromkeys(("gate_proj", "up_proj"), AFTER_ATTENTION),
}
# Model types whose norms multiply by 1 plus their weight:
# https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/models/qwen3_next/modeling_qwen3_next.py#L166
LESS_ONE = (
    "gemma", "gemma2", "gemma3_text", "minimax_m3_vl_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next",
    "recurrent_gemma", "vaultgemma",
)  # fmt: skip
# For two roundings to bf16 on the way, of 2^-8 each.
SLACK = 1.02
# The end is looked at first, once, and not behind each number of a long name.
MODULE = re.compile(r"(?=.*\.\w+\Z)(?P<layer>(?:.*\.)?layers\.\d+)\.(?:.*\.)?(?P<last>\w+)")


@dataclass(frozen=True)
class Beyond:
    """A module whose recorded input exceeds what the norm before it can output."""

    module: str
    amax: float
    norm: str
    bound: float


def beyond_norms(amaxes: Mapping[str, float], tensors: Mapping[str, TensorInfo], model_type: str) -> Iterator[Beyond]:
    """Yield the modules, named as in the target, whose amax exceeds what the norm before them can output.

    RMSNorm of n numbers outputs at most sqrt(n) times its largest weight, when all numbers but one are zero. Modules
    whose norm is missing are skipped.
    """
    bounds: dict[str, float] = {}
    for module, amax in amaxes.items():
        found = MODULE.fullmatch(module)
        norm = f"{found['layer']}.{NORMS[found['last']]}" if found and found["last"] in NORMS else ""
        info = tensors.get(f"{norm}.weight")
        after = norm.endswith(AFTER_ATTENTION) and f"{norm.removesuffix(AFTER_ATTENTION)}{AFTER_MLP}.weight" in tensors
        if info is None or after:
            continue
        if norm not in bounds:
            weight = read_tensor(info).float() + (model_type in LESS_ONE)
            bounds[norm] = float(weight.abs().max()) * weight.numel() ** 0.5
        if amax > SLACK * bounds[norm]:
            yield Beyond(module, amax, norm, bounds[norm])
