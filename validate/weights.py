"""A head on disk made ready to run."""

from __future__ import annotations

import torch

from ..checkpoint.folder import Checkpoint
from ..checkpoint.tensors import read_tensor
from ..convert.read import Head, read_weights
from ..errors import TargetInvalid
from ..head.forward import DraftHead
from ..targets.config import TargetConfig


def load_head(head: Head, target: Checkpoint, config: TargetConfig, dtype: torch.dtype = torch.float32) -> DraftHead:
    """Load a head to be run by kconv's own forward.

    Args:
        head: the head on disk.
        target: the target it drafts for; gives embed_tokens and lm_head where the head has none of its own.
        config: the target's config.
        dtype: what to compute in.

    Raises:
        TargetInvalid: the target is of other dims than the head was made for, or lacks the layers it reads.
    """
    spec = head.spec
    for what, ours, theirs in (
        ("target_hidden_size", spec.target_hidden, config.hidden),
        ("vocab_size", spec.vocab, config.vocab),
    ):
        if ours != theirs:
            raise TargetInvalid(
                f"the head was made for a target with {what} {ours}; this one has {theirs}",
                where=target.folder,
                fix="Give the target that the head was trained on.",
            )
    if spec.captured[-1] >= config.layers:
        raise TargetInvalid(
            f"the head reads layer {spec.captured[-1]} of a target of {config.layers} layers",
            where=target.folder,
            fix="Give the target that the head was trained on, or put the captured layers right (--captured-are).",
        )
    weights = read_weights(head)
    shared = {"embed_tokens": config.embed_tokens, "lm_head": config.lm_head}
    for slot in shared.keys() - weights.keys():
        if shared[slot] not in target.tensors:
            raise TargetInvalid(f"the target has no {shared[slot]}", where=target.folder, fix="Check the target.")
        weights[slot] = read_tensor(target.tensors[shared[slot]])
    floats = {n: w.to(dtype) if w.is_floating_point() else w for n, w in weights.items()}
    return DraftHead(spec, floats)
