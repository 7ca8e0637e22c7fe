"""A head as rules look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...checkpoint.bytes import stream
from ...checkpoint.header import TensorInfo
from ...checkpoint.values import FLOAT_BITS, Scan, Values
from ...convert.captured import Hints, without_lists
from ...convert.config import ReadConfig, read_config
from ...convert.own_keys import unify
from ...convert.read import Head, claim_tensors, find_breaches, read_head, rows_of, weight_dtype
from ...convert.shared import SharedTensors
from ...engines import BY_NAME, detect
from ...engines.layout import Layout, Stored
from ...errors import CapturedUndecided, KconvError
from ...head.contract import Breach
from ...head.slots import needs
from ...head.spec import HeadSpec
from ...targets.config import TargetConfig
from .rule import ENGINES, SGLANG, TRTLLM, VLLM, Subject

if TYPE_CHECKING:
    from torch import Tensor

# Which table says what an engine reads, and which engines a layout is for. Trainers' own layouts are for none, and
# are held against all of them.
ENGINE_LAYOUT = {**dict.fromkeys(VLLM, "vllm"), SGLANG: "sglang", TRTLLM: "trtllm"}
WRITTEN_FOR: Mapping[str, tuple[str, ...]] = {
    "vllm": VLLM,
    "sglang": (SGLANG,),
    "trtllm": (TRTLLM,),
    "modelopt": (TRTLLM,),
    "speculators": VLLM,
}
MISSING = object()
EAGLE = "eagle_config"


@dataclass(frozen=True)
class HeadSubject(Subject):
    """A head, read as far as it can be read; what cannot be read is None, and `fault` says why.

    Attributes:
        named_layout: the layout that the user named, None to go by the head's marks.
        hints: what the user says where the config is silent.
        target: the target that the head is for, where it is known.
        lent: finds what it is asked for of the target's embedding and lm_head, by slot.
    """

    named_layout: Layout | None = None
    hints: Hints = field(default_factory=Hints)
    target: TargetConfig | None = None
    lent: Callable[[Iterable[str]], SharedTensors] | None = None

    @cached_property
    def layout(self) -> Layout | None:
        """The layout the head is in."""
        try:
            return self.named_layout or detect(self.config, self.tensors)
        except KconvError:
            return None

    @cached_property
    def flat(self) -> Mapping[str, Any]:
        """The config in the common keys; as it is where it cannot be brought to them."""
        if self.layout is None:
            return self.config
        try:
            return unify(self.config, self.layout.config, self.hints)[0]
        except KconvError:
            nested = self.config.get(self.layout.config.nested)
            return {**self.config, **nested} if isinstance(nested, Mapping) else self.config

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

    @cached_property
    def _config(self) -> tuple[ReadConfig | None, KconvError | None]:
        if self.layout is None:
            return None, None
        try:
            return self._read_config(self.config, self.hints), None
        except CapturedUndecided as fault:
            return self._guess(), fault
        except KconvError as fault:
            return None, fault

    def _read_config(self, config: Mapping[str, Any], hints: Hints) -> ReadConfig:
        assert self.layout is not None
        dtype = weight_dtype(self.checkpoint)
        return read_config(config, self.tensors, dtype=dtype, hints=hints, table=self.layout.config)

    def _guess(self) -> ReadConfig | None:
        """Read the config with as many captured layers as fc has room for; which ones they are is not looked at."""
        widths = [self.flat.get("target_hidden_size"), self.flat.get("hidden_size")]
        width = next((w for w in widths if isinstance(w, int) and not isinstance(w, bool) and w > 0), 0)
        fc = self.tensors.get("fc.weight")
        count = fc.shape[1] // width if fc and len(fc.shape) == 2 and width else 3
        try:
            hints = Hints(tuple(range(max(count, 1))), max_positions=self.hints.max_positions)
            return self._read_config(without_lists(self.config), hints)
        except KconvError:
            return None

    @property
    def read(self) -> ReadConfig | None:
        """What the config says."""
        return self._config[0]

    @property
    def undecided(self) -> CapturedUndecided | None:
        """Why it is not known which layers the head reads; `read` has then as many as fc has room for."""
        fault = self._config[1]
        return fault if isinstance(fault, CapturedUndecided) else None

    @property
    def spec(self) -> HeadSpec | None:
        """What the head is."""
        return self.read.spec if self.read else None

    @property
    def captured(self) -> tuple[int, ...] | None:
        """The layers that the head reads, as outputs, where they are known."""
        return self.spec.captured if self.spec and not self.undecided else None

    @cached_property
    def rows(self) -> Mapping[str, Stored]:
        """What the head's layout stores for its spec, by name; empty where that cannot be said."""
        return self.rows_in(self.layout) if self.layout else {}

    def rows_in(self, layout: Layout) -> Mapping[str, Stored]:
        """Return what another layout stores for this head's spec."""
        try:
            return rows_of(layout, self.spec, self.tensors) if self.spec else {}
        except KconvError:
            return {}

    @cached_property
    def breaches(self) -> tuple[Breach, ...]:
        """Every way in which the tensors' names, shapes and dtypes are not what the spec demands."""
        try:
            return tuple(find_breaches(self.layout, self.spec, self.tensors)) if self.layout and self.spec else ()
        except KconvError:
            return ()

    @cached_property
    def _head(self) -> tuple[Head | None, KconvError | None]:
        if not self.tensors:
            return None, None
        reader = read_head if self.with_values else claim_tensors
        try:
            return reader(self.checkpoint, layout=self.named_layout, hints=self.hints), None
        except KconvError as fault:
            return None, fault

    @property
    def head(self) -> Head | None:
        """The head, with each tensor claimed by a row of its layout."""
        return self._head[0]

    @property
    def fault(self) -> KconvError | None:
        """What stopped the reading."""
        return self._head[1]

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
        return {name: _scan(info) for name, info in self.tensors.items() if info.dtype in FLOAT_BITS and info.size}

    @cached_property
    def d2t(self) -> Tensor | None:
        """The map of a reduced vocabulary; None where there is none, or not one that can be read."""
        return self._map("d2t", ("I64", "I32"))

    @cached_property
    def t2d(self) -> Tensor | None:
        """The marks of a reduced vocabulary; None as `d2t`."""
        return self._map("t2d", ("BOOL",))

    def _map(self, name: str, dtypes: tuple[str, ...]) -> Tensor | None:
        from ...checkpoint.tensors import read_tensor

        info = self.tensors.get(name)
        wanted = needs(self.spec).get(name) if self.spec else None
        if not self.with_values or info is None or wanted is None:
            return None
        return read_tensor(info) if info.dtype in dtypes and info.shape == wanted.shape else None


def _scan(info: TensorInfo) -> Values:
    scan = Scan(info.dtype)
    for chunk in stream(info):
        scan.update(chunk)
    return scan.result()


def engines_of(layout: Layout | None) -> tuple[str, ...]:
    """Return the engines that a layout is written for; all of them for a trainer's own, or for none."""
    return WRITTEN_FOR.get(layout.name, ENGINES) if layout else ENGINES


def engine_layouts(engines: Iterable[str]) -> dict[str, Layout]:
    """Return the tables of these engines by engine, vLLM's two runners as one."""
    known = {ENGINE_LAYOUT[engine]: engine for engine in sorted(engines)}
    return {engine: BY_NAME[name] for name, engine in known.items()}


def listed_ids(value: object) -> tuple[int, ...] | None:
    """Return a list of layer ids as it stands in a config; None where there is none, or it is none."""
    if not isinstance(value, (list, tuple)) or not value:
        return None
    return tuple(value) if all(isinstance(i, int) and not isinstance(i, bool) for i in value) else None
