"""A target's layers for multi-token prediction (MTP): which tensors they are, and where engines read them.

No class of transformers has them. Names by family: DeepSeek-V3, GLM-4.5 and others store a layer behind the last one
(model.layers.61), Qwen3-Next and Qwen3.5 `mtp.`, MiMo `model.mtp_layers.`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..lines import counted

# The config keys that say how many there are: DeepSeek-V3's and most others', Qwen3.5's, MiniMax's.
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L662-L1075
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_LAYER = re.compile(r"((?:(?:language_model|model)\.)*layers\.(\d+))\.")
_NAMED = re.compile(r"((?:[^.]+\.)*?mtp(?:_[a-z]+)*)\.")


# Parts of a multimodal target that a text forward does not need; see `is_run`.
NOT_TEXT = (
    "vision_tower.", "mm_projector.", "vision_model.", "multi_modal_projector.", "visual.", "model.visual.",
    "model.vision_tower.", "model.multi_modal_projector.", "audio_tower.", "model.audio_tower.",
)  # fmt: skip


class Place(NamedTuple):
    """Where engines read a family's MTP layers.

    Attributes:
        root: the start of their names, without a wrapper's; "" for the layers behind the last one.
        joins: what joins the last state with the next token's embedding, below `root` or below each such layer.
    """

    root: str
    joins: tuple[str, ...]


BEHIND = Place("", ("eh_proj.weight", "enorm.weight", "hnorm.weight"))
UNDER_MTP = Place("mtp", ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"))
# By the text model's type; MTP layers of others are taken as they stand.
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/utils.py#L571-L603
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/qwen3_next_mtp.py#L226-L241
PLACES: Mapping[str, Place] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), BEHIND),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), UNDER_MTP),
    "mimo": Place("model.mtp_layers", ()),
}


def mtp_root(name: str, layers: int) -> str:
    """Return the name of the MTP layer, or of what holds all of them, that a tensor or module is part of; else "".

    Args:
        name: on disk.
        layers: the decoder's own: its config's num_hidden_layers.
    """
    layer = _LAYER.match(name)
    if layer:
        return layer[1] if int(layer[2]) >= layers else ""
    named = _NAMED.match(name)
    return named[1] if named else ""


def is_run(name: str, layers: int) -> bool:
    """Return whether a text forward needs a tensor: not an image's parts, nor MTP layers."""
    return not name.startswith(NOT_TEXT) and not mtp_root(name, layers)


def mtp_roots(names: Iterable[str], layers: int) -> dict[str, int]:
    """Return how many of some tensors each MTP layer has, by its `mtp_root`."""
    found: dict[str, int] = {}
    for name in names:
        if root := mtp_root(name, layers):
            found[root] = found.get(root, 0) + 1
    return found


def promised(text: Mapping[str, Any]) -> tuple[str, int]:
    """Return the key in which a text model's config states how many MTP layers there are, and the number; "", 0."""
    for key in COUNTS:
        count = text.get(key)
        if isinstance(count, int) and count > 0:
            return key, count
    return "", 0


def mtp_faults(text: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield where and what keeps engines from reading the MTP layers that a text model's config promises."""
    names, layers = set(names), text.get("num_hidden_layers")
    key, count = promised(text)
    if not count or not isinstance(layers, int):
        return
    where, roots = f"config.json: {key}", mtp_roots(names, layers)
    place = PLACES.get(str(text.get("model_type")))
    if not roots:
        yield where, f"promises {counted(count, 'MTP layer')}, but the files hold none"
    elif place is not None:
        inner = {re.sub(r"^(?:language_model\.)", "", root): root for root in roots}
        wanted = [place.root] if place.root else [f"model.layers.{layers + i}" for i in range(count)]
        for root in wanted:
            stored = inner.get(root)
            if stored is None:
                others = ", ".join(sorted(roots))
                yield (
                    where,
                    f"promises {counted(count, 'MTP layer')}, but {root} is not stored; the files hold {others}",
                )
                continue
            for name in (f"{stored}.{join}" for join in place.joins):
                if name not in names:
                    yield name, f"is missing, so {stored} cannot draft"
