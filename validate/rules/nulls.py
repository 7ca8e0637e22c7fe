"""Keys that are null."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ...engines.registry import engines
from .head import HeadSubject
from .identity import is_speculators
from .rule import ENGINES, Found, rule


def _always(_: HeadSubject) -> bool:
    return True


def _is_mla(subject: HeadSubject) -> bool:
    return subject.is_mla


def _is_gqa(subject: HeadSubject) -> bool:
    return not subject.is_mla


def _is_deep(subject: HeadSubject) -> bool:
    return subject.spec is not None and subject.spec.layers > 1


def _is_normed_before_fc(subject: HeadSubject) -> bool:
    return subject.stated("norm_before_fc") is True


class Null(NamedTuple):
    """A key that may be absent and may not be null.

    Attributes:
        path: dotted path in config.json.
        engines: who asks whether the key is there, or what it holds, and does not expect null.
        becomes: what follows.
        of: the heads that it concerns.
    """

    path: str
    engines: tuple[str, ...]
    becomes: str
    of: Callable[[HeadSubject], bool] = _always


# By the words of `engines.base.NullKey.heads`.
HEADS: Mapping[str, Callable[[HeadSubject], bool]] = {
    "": _always,
    "mla": _is_mla,
    "gqa": _is_gqa,
    "deep": _is_deep,
    "normed": _is_normed_before_fc,
}


def _nulls() -> Iterator[Null]:
    found: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for engine in engines():
        for null in engine.null_keys:
            names = (null.runner,) if null.runner else engine.runner_names
            key = (null.path, null.becomes, null.heads)
            found[key] = (*found.get(key, ()), *names)
    for (path, becomes, heads), names in found.items():
        yield Null(path, names, becomes, HEADS[heads])


NULLS = tuple(_nulls())


@rule(
    "K019",
    "key-null",
    "error",
    "A key is null, which an engine does not take for absent: it fails, or runs another computation.",
    fix="Remove the key, or state what the head was trained with; kconv's conversions write none of these as null.",
    engines=ENGINES,
    seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1138",
)
def key_null(subject: HeadSubject) -> Iterator[Found]:
    # vLLM builds a config of its own from speculators' format, and the other engines do not read it.
    if subject.layout is None or is_speculators(subject):
        return
    for null in NULLS:
        engines = sorted(subject.engines.intersection(null.engines))
        if engines and subject.stated(null.path) is None and null.of(subject):
            yield Found(f"config.json: {null.path}", f"null, and {null.becomes} ({', '.join(engines)})")


RULES = (key_null,)
