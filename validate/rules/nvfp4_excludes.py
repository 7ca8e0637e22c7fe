"""What an NVFP4 target's config excludes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from .rule import TRTLLM, Found, rule
from .target import BLOCK, LAYER, SIDE_FILE, TargetSubject, entries_of

IGNORE = "Write an entry for each module in full, or for each layer's part closed by *, e.g. model.layers.1.self_attn*."
MODELOPT = "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py"


@rule(
    "K430",
    "unquantized-not-excluded",
    "error",
    "A linear module is neither packed nor excluded: engines build an NVFP4 layer for it, and find no scales.",
    fix=IGNORE,
    seen_in="https://github.com/vllm-project/vllm/issues/45102",
)
def unquantized_not_excluded(subject: TargetSubject) -> Iterator[Found]:
    if subject.packed and subject.block:
        for module in subject.plain:
            if subject.covered[module] is None:
                yield Found(module, "is not quantized, and no entry of ignore covers it")


@rule(
    "K431",
    "packed-but-excluded",
    "error",
    "A packed module is covered by an exclude: engines build a plain layer for it, and take packed bytes for weights.",
    fix=IGNORE,
    seen_in="https://github.com/vllm-project/vllm/issues/45102",
)
def packed_but_excluded(subject: TargetSubject) -> Iterator[Found]:
    for module, entry in _packed_and_covered(subject):
        if not _collides(entry, module):
            yield Found(module, f"is NVFP4, and {entry!r} covers it")


@rule(
    "K432",
    "exclude-collision",
    "error",
    "An exclude that was meant for one layer covers others, as model.layers.1* covers layers 10 to 19.",
    fix=IGNORE,
    seen_in=f"{MODELOPT}#L187-L222",
)
def exclude_collision(subject: TargetSubject) -> Iterator[Found]:
    told = set()
    for module, entry in _packed_and_covered(subject):
        if _collides(entry, module) and entry not in told:
            told.add(entry)
            yield Found(f"config.json: {BLOCK}.ignore", f"{entry!r} covers {module}, which is NVFP4")


@rule(
    "K433",
    "exclude-kv-b-proj",
    "error",
    "An exclude matches the bare word kv_b_proj, which TensorRT-LLM tests by itself: it then looks for FP8 scales of a"
    " plain kv_b_proj, and fails or reads it wrongly.",
    fix="Name each layer's kv_b_proj in full, e.g. model.layers.0.self_attn.kv_b_proj.",
    engines=(TRTLLM,),
)
def exclude_kv_b_proj(subject: TargetSubject) -> Iterator[Found]:
    for where, block in ((f"config.json: {BLOCK}.ignore", subject.root_block), (SIDE_FILE, subject.side)):
        for entry in entries_of(block):
            plain_kv_b = any(module.endswith(".kv_b_proj") for module in subject.plain)
            if subject.packed and plain_kv_b and fnmatchcase("kv_b_proj", entry):
                yield Found(where, f"{entry!r} matches kv_b_proj")


@rule(
    "K434",
    "exclude-part-of-name",
    "error",
    "A module is excluded by a part of its name only, which vLLM takes and TensorRT-LLM does not: it wants wildcards.",
    fix=IGNORE,
    engines=(TRTLLM,),
)
def exclude_part_of_name(subject: TargetSubject) -> Iterator[Found]:
    if not subject.packed:
        return
    for module in subject.plain:
        entry = subject.covered[module]
        if entry is not None and not subject.excludes.is_wildcard_for(module):
            yield Found(module, f"is covered by {entry!r} only")


def _packed_and_covered(subject: TargetSubject) -> Iterator[tuple[str, str]]:
    for module in subject.packed:
        entry = subject.covered[module]
        if entry is not None:
            yield module, entry


def _collides(entry: str, module: str) -> bool:
    """Say whether an entry ends in a layer's number, and the module is of another layer."""
    meant, own = re.search(r"layers\.(\d+)\*?$", entry), LAYER.search(module)
    return bool(meant and own and meant[1] != own[1])


RULES = (
    unquantized_not_excluded,
    packed_but_excluded,
    exclude_collision,
    exclude_kv_b_proj,
    exclude_part_of_name,
)
