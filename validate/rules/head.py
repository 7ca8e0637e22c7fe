"""A head as rules see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...checkpoint.bytes import Look, Wanted, read_integers
from ...checkpoint.folder import Checkpoint
from ...checkpoint.header import TensorInfo
from ...checkpoint.manifest import MANIFEST, Hints, Manifest, read_manifest
from ...checkpoint.values import FLOAT_BITS, Values
from ...convert.read import Head, HeadReading, read, rows_of
from ...convert.shared import SharedTensors
from ...drafters.base import Drafter
from ...drafters.captured import EAGLE
from ...drafters.registry import drafters
from ...drafters.slots import needs
from ...engines.base import Engine
from ...engines.common import listed_ids as listed_ids
from ...engines.layout import Layout, Stored
from ...engines.registry import engines, layouts, own_layouts, runners_of
from ...errors import KconvError, Problem
from ...targets.config import TargetConfig
from .subject import ENGINES, Subject

if TYPE_CHECKING:
    import numpy as np

# Which engine a runner is part of, and which engines a layout is for. Trainers' own layouts are for none, so
# they are checked against all of them.
ENGINE_OF = {runner: engine.name for engine in engines() for runner in engine.runner_names}
WRITTEN_FOR: Mapping[str, tuple[str, ...]] = {
    layout.name: tuple(name for name in ENGINES if name in found)
    for layout in layouts()
    if (found := runners_of(layout.name))
}
MISSING = object()


@dataclass(frozen=True)
class HeadSubject(Subject):
    """A head, as far as it can be read; parts that cannot be read are None, and `problems` say why.

    Attributes:
        named_layout: the layout that the user named, None to detect it from the head's marks.
        hints: the user's options where the config is silent.
        target: the head's target, if known.
        lent: finds requested slots among the target's embedding and lm_head.
        look: the reader of the head's weights, if one is running, see `wanted_values`; a separate reading if None.
    """

    named_layout: Layout | None = None
    hints: Hints = field(default_factory=Hints)
    target: TargetConfig | None = None
    lent: Callable[[Iterable[str]], SharedTensors] | None = None
    look: Look | None = None

    @cached_property
    def reading(self) -> HeadReading:
        """The head as far as it can be read, and its problems."""
        return read(self.checkpoint, layout=self.named_layout, hints=self.hints, values=self.with_values)

    @property
    def problems(self) -> Sequence[Problem]:
        return self.reading.problems

    @property
    def misfits(self) -> bool:
        """Whether a tensor does not fit the spec."""
        return bool(self.reading.misfits)

    @property
    def layout(self) -> Layout | None:
        """The head's layout."""
        return self.reading.layout

    @property
    def drafter(self) -> Drafter | None:
        """The head's family, if its layout or its marks show it."""
        if self.layout is not None:
            return self.layout.drafter
        return next((one for one in drafters() if one.marks(self.config, self.tensors)), None)

    @property
    def flat(self) -> Mapping[str, Any]:
        """The config in the common keys; unchanged if it cannot be converted to them."""
        return self.reading.config

    @cached_property
    def eagle(self) -> Mapping[str, Any]:
        """The config's eagle_config; empty if it has none."""
        nested = self.flat.get(EAGLE)
        return nested if isinstance(nested, Mapping) else {}

    def stated(self, path: str) -> Any:
        """Return a key's value by its dotted path, `MISSING` if it does not exist."""
        place: Any = self.flat
        for part in path.split("."):
            if not isinstance(place, Mapping) or part not in place:
                return MISSING
            place = place[part]
        return place

    @cached_property
    def manifest(self) -> Manifest | None:
        """The head's kconv.json; None if there is none, or if it is broken, which another rule reports."""
        try:
            return read_manifest(self.checkpoint.folder) if (self.checkpoint.folder / MANIFEST).exists() else None
        except KconvError:
            return None

    @property
    def is_mla(self) -> bool:
        """Whether the config asks for latent attention."""
        return bool(self.flat.get("kv_lora_rank")) or any(".kv_b_proj." in name for name in self.tensors)

    @property
    def spec(self) -> Any:
        """The head's spec, None if unknown; if its captured layers are unknown, it has as many as fc has room for."""
        return self.reading.spec

    @property
    def captured(self) -> tuple[int, ...] | None:
        """The layers that the head reads, as outputs, if known."""
        return self.reading.captured.ids if self.spec and self.reading.captured else None

    @property
    def rows(self) -> Mapping[str, Stored]:
        """The tensors that the head's layout stores for its spec, by name; empty if unknown."""
        return self.reading.rows

    def rows_in(self, layout: Layout) -> Mapping[str, Stored]:
        """Return the tensors that another layout stores for this head's spec."""
        try:
            return rows_of(layout, self.spec, self.tensors) if self.spec else {}
        except KconvError:
            return {}

    @property
    def head(self) -> Head | None:
        """The head, if it can be read without error."""
        return None if self.reading.errors else self.reading.head

    @property
    def slots(self) -> Mapping[str, str]:
        """The tensor names of the stored slots, by slot, whether the head can be read or not."""
        return {slot: name for name, row in self.rows.items() if name in self.tensors for slot in row.slots}

    def holds(self, pattern: str) -> bool:
        """Return whether a tensor's name fits a pattern."""
        return any(fnmatchcase(name, pattern) for name in self.tensors)

    @cached_property
    def values(self) -> Mapping[str, Values]:
        """A summary of each float tensor's values, all of them read, a chunk at a time."""
        infos = [info for info in self.tensors.values() if _is_looked_at(info)]
        if self.look is not None:
            return {info.name: self.look.values(info) for info in infos}
        with Look(wanted_values(self.checkpoint)) as look:
            return {info.name: look.values(info) for info in infos}

    @cached_property
    def d2t(self) -> np.ndarray | None:
        """The map of a reduced vocabulary; None if there is none, or if it cannot be read."""
        return self._map("d2t", ("I64", "I32"))

    @cached_property
    def t2d(self) -> np.ndarray | None:
        """The mask of a reduced vocabulary; None as for `d2t`."""
        return self._map("t2d", ("BOOL",))

    def _map(self, name: str, dtypes: tuple[str, ...]) -> np.ndarray | None:
        info = self.tensors.get(name)
        wanted = needs(self.spec).get(name) if self.spec else None
        if not self.with_values or info is None or wanted is None:
            return None
        return read_integers(info) if info.dtype in dtypes and info.shape == wanted.shape else None


def _is_looked_at(info: TensorInfo) -> bool:
    return info.dtype in FLOAT_BITS and info.size > 0


def wanted_values(checkpoint: Checkpoint) -> list[Wanted]:
    """Return a request for the values of each float tensor of a head."""
    return [Wanted(file, values=list(filter(_is_looked_at, held))) for file, held in checkpoint.by_file().items()]


def engines_of(layout: Layout | None) -> tuple[str, ...]:
    """Return the engines that a layout is written for; all that have one of its family for a trainer's own layout."""
    if layout is None:
        return ENGINES
    of_family = [one for one in engines() if any(x.drafter is layout.drafter for x in own_layouts(one))]
    return WRITTEN_FOR.get(layout.name) or tuple(name for one in of_family for name in one.runner_names)


def engine_layouts(asked: Iterable[str], drafter: Drafter) -> Iterator[tuple[Engine, Layout]]:
    """Yield the engines of these runners, each with its table for a family."""
    named = {ENGINE_OF[runner] for runner in asked}
    for engine in engines():
        if engine.name in named:
            yield from ((engine, layout) for layout in own_layouts(engine) if layout.drafter is drafter)
