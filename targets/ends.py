"""A target's two ends: embedding, final norm, output matrix.

Training from stored states needs no more of a target, whose layers may be a trillion parameters.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import DeepseekV3ForCausalLM

from ..checkpoint.folder import open_checkpoint
from ..checkpoint.tensors import read_tensor
from ..errors import TargetInvalid
from .config import parse_target_config
from .model import SOURCE_DTYPES, build_target


def load_ends(folder: Path, dtype: torch.dtype) -> DeepseekV3ForCausalLM:
    """Load a target's embedding, final norm and output matrix, in evaluation mode.

    Args:
        folder: a checkpoint folder. Its layers may be quantized; its ends may not, and no Kimi's are.
        dtype: of the weights in memory.

    Returns:
        A model of no layers, whose config names the target's number of layers all the same.

    Raises:
        TargetInvalid: the target is of another family, or an end is missing, of a wrong shape, or quantized.
        NotACheckpoint, ConfigInvalid, CorruptIndex, CorruptHeader: the folder cannot be read.
    """
    checkpoint = open_checkpoint(folder)
    config = parse_target_config(checkpoint.config, where=folder / "config.json")
    model = build_target(replace(config, text=config.text | {"num_hidden_layers": 0}), dtype)
    for name, own in model.state_dict().items():
        stored = config.lm_head if name == "lm_head.weight" else config.prefix + name
        info = checkpoint.tensors.get(stored)
        if info is None or info.shape != tuple(own.shape) or info.dtype not in SOURCE_DTYPES:
            found = f"it is {info.dtype} {list(info.shape)}" if info else "it is missing"
            raise TargetInvalid(
                f"the target's {stored} should be {'/'.join(SOURCE_DTYPES)} {list(own.shape)}, and {found}",
                where=folder,
                fix="Check that config.json and the weights are of the same model.",
            )
        own.copy_(read_tensor(info))
    model.config.num_hidden_layers = config.layers
    return model
