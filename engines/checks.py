"""What an engine's own rules may ask about a head, and the checks that several engines share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Protocol

from ..checkpoint.header import TensorInfo
from ..checkpoint.schema import Json
from ..drafters.spec import Gqa, HeadSpec, Mla
from ..rule import Found
from .base import Runner
from .layout import Layout


class TargetType(Protocol):
    """The target's text model, by its model_type."""

    @property
    def model_type(self) -> str: ...


class HeadFacts(Protocol):
    """A head as far as it can be read; parts that cannot be read are None.

    Attributes:
        config, flat: its config.json, unchanged and in the common keys.
        tensors: header entries by name.
        slots: tensor names of the stored slots, by slot.
        captured: the layers that it reads, as outputs.
        is_mla: whether the config asks for latent attention.
        misfits: whether a tensor does not fit the spec.
        engines: the runners to check for.
    """

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def flat(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def slots(self) -> Mapping[str, str]: ...
    @property
    def spec(self) -> HeadSpec | None: ...
    @property
    def captured(self) -> tuple[int, ...] | None: ...
    @property
    def layout(self) -> Layout | None: ...
    @property
    def target(self) -> TargetType | None: ...
    @property
    def is_mla(self) -> bool: ...
    @property
    def misfits(self) -> bool: ...
    @property
    def engines(self) -> Set[str]: ...


def seen_by(runner: Runner, head: HeadFacts) -> tuple[int, ...] | None:
    """Return the layers that a runner would capture for a config, as outputs; None if it uses its default."""
    return runner.aux_layers(head.flat, head.target.model_type if head.target else None) if runner.aux_layers else None


def fed_otherwise(head: HeadFacts, runners: Iterable[Runner], place: str) -> Iterator[Found]:
    """Find runners that would feed a head other layers than it was trained on; `place` is the list that they read."""
    for runner in runners:
        seen = seen_by(runner, head) if runner.name in head.engines and head.captured is not None else None
        if seen is not None and seen != head.captured:
            yield Found(
                f"config.json: {place}",
                f"the head was trained on the outputs of layers {list(head.captured or ())}, but {runner.name} would"
                f" feed it those of {list(seen)}",
                engines=(runner.name,),
            )


def first_architecture(head: HeadFacts) -> str | None:
    """Return the class that a head names first, the one that engines look up."""
    names: Json = head.config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def other_class(head: HeadFacts, known: Mapping[type, frozenset[str]]) -> Iterator[Found]:
    name, classes = first_architecture(head), known[Mla if head.is_mla else Gqa]
    if name is not None and head.layout is not None and name not in classes:
        kind = "an MLA" if head.is_mla else "a GQA"
        yield Found(
            "config.json: architectures",
            f"{name} is not a class for {kind} head; known are {', '.join(sorted(classes))}",
        )


def is_speculators(head: HeadFacts) -> bool:
    return head.layout is not None and head.layout.name == "speculators"
