"""What a head may share with its target, found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..checkpoint.source import Folder, Source
from ..errors import CorruptIndex

if TYPE_CHECKING:
    from ..checkpoint.header import TensorInfo
    from ..convert.read import Head
    from ..convert.shared import Shared
    from ..engines.layout import Layout
    from ..targets.config import TargetConfig


def find_taken(target: Source, head: Head, layout: Layout, *, drop_shared: bool) -> Shared:
    """Find what a conversion adds from the target, compares with it, or leaves to it.

    Of a folder all that is there is found, which also tells the target's parameters from the head's own; the Hub's
    copy takes too long to fetch for that alone.
    """
    from ..convert.beside import taken_slots
    from ..convert.shared import SLOTS

    if drop_shared or isinstance(target, Folder):
        return find_shared(target, SLOTS)
    return find_shared(target, taken_slots(head, layout))


def find_shared(target: Source, slots: Iterable[str]) -> Shared:
    """Find some of what a head may share with its target; of the Hub's copy, the files that hold it are downloaded.

    A tensor whose file is missing, as in a folder that was downloaded in part, is a fault only where it is asked for.
    """
    from ..convert.shared import Shared
    from ..targets.config import read_target_config

    config = read_target_config(target.fetch_config())
    found: dict[str, TensorInfo] = {}
    absent: dict[str, CorruptIndex] = {}
    for slot in slots:
        name = _names(config)[slot]
        try:
            tensors = target.open_tensors([name])
        except CorruptIndex as fault:
            absent[slot] = fault
            continue
        if name in tensors:
            found[slot] = tensors[name]
    return Shared(target.name, found, layers=config.layers, model_type=config.model_type, absent=absent)


def find_shapes(target: Source) -> Shared:
    """Find what a head may share with its target, of the Hub's copy by name and shape alone."""
    from ..convert.shared import SLOTS, Shared
    from ..targets.config import read_target_config

    if isinstance(target, Folder):
        return find_shared(target, SLOTS)
    config, tensors = read_target_config(target.fetch_config()), target.open_headers().tensors
    found = {slot: tensors[name] for slot, name in _names(config).items() if name in tensors}
    return Shared(target.name, found, headers_only=True, layers=config.layers, model_type=config.model_type)


def _names(config: TargetConfig) -> dict[str, str]:
    """Return the names, in a target's files, of what a head may share with it, by slot."""
    return {"lm_head": config.lm_head, "embed_tokens": config.embed_tokens}
