"""What a calibration saw of each module's input."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..checkpoint.folder import Checkpoint
from ..checkpoint.tensors import read_tensor
from ..errors import InputScalesInvalid
from ..targets.config import TargetConfig


class Identity(BaseModel):
    """A target, whatever form its weights are stored in.

    Attributes:
        hidden, layers, vocab: its dims.
        norm: blake3 of the final norm's values in bf16: no form quantizes it, and no other training has it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden: int
    layers: int
    vocab: int
    norm: str


class Prompts(BaseModel):
    """What a calibration ran over: the file's sha256, prompts and tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str
    count: int
    tokens: int


class Calibration(BaseModel):
    """The largest magnitudes at the inputs of a target's linear modules; the schema of calibration.json.

    Attributes:
        target: whose.
        prompts: on what.
        input_amax: by the module's name in the text model, e.g. "model.layers.1.mlp.experts.0.up_proj"; an expert
            that no token was routed to is not in it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    target: Identity
    prompts: Prompts
    input_amax: dict[str, float]


def identify(target: Checkpoint, config: TargetConfig) -> Identity:
    """Return a target's identity.

    Raises:
        InputScalesInvalid: it has no final norm.
    """
    norm = target.tensors.get(f"{config.prefix}model.norm.weight")
    if norm is None:
        raise InputScalesInvalid(
            f"{target.folder.name} has no {config.prefix}model.norm.weight to know it by",
            where=target.folder,
            fix="Give the whole target.",
        )
    values = read_tensor(norm).bfloat16().contiguous()
    digest = blake3(values.view(torch.uint8).numpy().data).hexdigest()
    return Identity(hidden=config.hidden, layers=config.layers, vocab=config.vocab, norm=digest)


def read_calibration(file: Path) -> Calibration:
    """Read a calibration file.

    Raises:
        InputScalesInvalid: it cannot be read, or is not of the schema.
    """
    try:
        return Calibration.model_validate_json(file.read_bytes())
    except OSError as fault:
        raise InputScalesInvalid(
            f"{file} cannot be read: {fault.strerror}", fix="Give a file that kconv calibrate wrote, or data-free."
        ) from fault
    except ValidationError as fault:
        first = fault.errors()[0]
        raise InputScalesInvalid(
            f"{file.name} is no calibration of kconv's: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            where=file,
            fix="Give a file that kconv calibrate wrote, or data-free.",
        ) from fault


def write_calibration(file: Path, calibration: Calibration) -> None:
    """Write a calibration file."""
    file.write_text(calibration.model_dump_json(indent=1, by_alias=True) + "\n")
