"""A head as rules look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...checkpoint.bytes import Look, Wanted
from ...checkpoint.folder import Checkpoint
from ...checkpoint.header import TensorInfo
from ...checkpoint.values import FLOAT_BITS, Values
from ...convert.captured import EAGLE, Hints
from ...convert.read import Head, HeadReading, read, rows_of
from ...convert.shared import SharedTensors
from ...engines.common import listed_ids as listed_ids
from ...engines.layout import Layout, Stored
from ...engines.registry import by_name, engines, layouts, runners_of
from ...errors import KconvError, Problem
from ...head.slots import needs
from ...head.spec import HeadSpec
from ...targets.config import TargetConfig
from .rule import ENGINES, Subject

if TYPE_CHECKING:
    from torch import Tensor

# Which table says what an engine reads, and which engines a layout is for. Trainers' own layouts are for none, and
# are held against all of them.
ENGINE_LAYOUT = {runner: engine.layout.name for engine in engines() for runner in engine.runner_names}
WRITTEN_FOR: Mapping[str, tuple[str, ...]] = {
    layout.name: tuple(name for name in ENGINES if name in found)
    for layout in layouts()
    if (found := runners_of(layout.name))
}
MISSING = object()


@dataclass(frozen=True)
class HeadSubject(Subject):
    """A head, read as far as it can be read; what cannot be read is None, and `problems` say why.

    Attributes:
        named_layout: the layout that the user named, None to go by the head's marks.
        hints: what the user says where the config is silent.
        target: the target that the head is for, where it is known.
        lent: finds what it is asked for of the target's embedding and lm_head, by slot.
        look: what reads the head's weights already, as `wanted_values` says; a reading of their own if None.
    """

    named_layout: Layout | None = None
    hints: Hints = field(default_factory=Hints)
    target: TargetConfig | None = None
    lent: Callable[[Iterable[str]], SharedTensors] | None = None
    look: Look | None = None

    @cached_property
    def reading(self) -> HeadReading:
        """The head as far as it can be read, and what is wrong with it."""
        return read(self.checkpoint, layout=self.named_layout, hints=self.hints, values=self.with_values)

    @property
    def problems(self) -> Sequence[Problem]:
        return self.reading.problems

    @property
    def layout(self) -> Layout | None:
        """The layout the head is in."""
        return self.reading.layout

    @property
    def flat(self) -> Mapping[str, Any]:
        """The config in the common keys; as it is where it cannot be brought to them."""
        return self.reading.config

    @cached_property
    def eagle(self) -> Mapping[str, Any]:
        """The config's eagle_config, empty where it has none."""
        nested = self.flat.get(EAGLE)
        return nested if isinstance(nested, Mapping) else {}

    def stated(self, path: str) -> Any:
        """Return a key's value by its dotted path, `MISSING` where it is not there."""
        place: Any = self.flat
        for part in path.split("."):
            if not isinstance(place, Mapping) or part not in place:
                return MISSING
            place = place[part]
        return place

    @property
    def is_mla(self) -> bool:
        """Whether the config asks for latent attention."""
        return bool(self.flat.get("kv_lora_rank")) or any(".kv_b_proj." in name for name in self.tensors)

    @property
    def spec(self) -> HeadSpec | None:
        """What the head is; where its captured layers are not known, it has as many as fc has room for."""
        return self.reading.spec

    @property
    def captured(self) -> tuple[int, ...] | None:
        """The layers that the head reads, as outputs, where they are known."""
        return self.reading.captured.ids if self.spec and self.reading.captured else None

    @property
    def rows(self) -> Mapping[str, Stored]:
        """What the head's layout stores for its spec, by name; empty where that cannot be said."""
        return self.reading.rows

    def rows_in(self, layout: Layout) -> Mapping[str, Stored]:
        """Return what another layout stores for this head's spec."""
        try:
            return rows_of(layout, self.spec, self.tensors) if self.spec else {}
        except KconvError:
            return {}

    @property
    def head(self) -> Head | None:
        """The head, if there is no error in reading it."""
        return None if self.reading.errors else self.reading.head

    @cached_property
    def slots(self) -> Mapping[str, str]:
        """The tensor names of the slots that are held, by slot, whether the head can be read or not."""
        return {slot: name for name, row in self.rows.items() if name in self.tensors for slot in row.slots}

    def holds(self, pattern: str) -> bool:
        """Say whether a tensor's name fits a pattern."""
        return any(fnmatchcase(name, pattern) for name in self.tensors)

    @cached_property
    def values(self) -> Mapping[str, Values]:
        """What each float tensor's values are like, every one of them looked at, a chunk at a time."""
        infos = [info for info in self.tensors.values() if _is_looked_at(info)]
        if self.look is not None:
            return {info.name: self.look.values(info) for info in infos}
        with Look(wanted_values(self.checkpoint)) as look:
            return {info.name: look.values(info) for info in infos}

    @cached_property
    def d2t(self) -> Tensor | None:
        """The map of a reduced vocabulary; None where there is none, or not one that can be read."""
        return self._map("d2t", ("I64", "I32"))

    @cached_property
    def t2d(self) -> Tensor | None:
        """The marks of a reduced vocabulary; None as `d2t`."""
        return self._map("t2d", ("BOOL",))

    def _map(self, name: str, dtypes: tuple[str, ...]) -> Tensor | None:
        info = self.tensors.get(name)
        wanted = needs(self.spec).get(name) if self.spec else None
        if not self.with_values or info is None or wanted is None:
            return None
        from ...checkpoint.tensors import read_tensor

        return read_tensor(info) if info.dtype in dtypes and info.shape == wanted.shape else None


def _is_looked_at(info: TensorInfo) -> bool:
    return info.dtype in FLOAT_BITS and info.size > 0


def wanted_values(checkpoint: Checkpoint) -> list[Wanted]:
    """Return that the values of each float tensor of a head are wanted."""
    return [Wanted(file, values=list(filter(_is_looked_at, held))) for file, held in checkpoint.by_file().items()]


def engines_of(layout: Layout | None) -> tuple[str, ...]:
    """Return the engines that a layout is written for; all of them for a trainer's own, or for none."""
    return WRITTEN_FOR.get(layout.name, ENGINES) if layout else ENGINES


def engine_layouts(asked: Iterable[str]) -> dict[str, Layout]:
    """Return the tables of these engines by engine, vLLM's two runners as one."""
    known = {ENGINE_LAYOUT[engine]: engine for engine in sorted(asked)}
    return {engine: by_name(name) for name, engine in known.items()}
