"""The files of an output, and what each is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..checkpoint.header import TensorInfo, byte_size
from ..targets.stored import Plain, Stored
from .formats import fused_group, weight_tensors


@dataclass(frozen=True)
class Module:
    """A linear module that becomes NVFP4.

    Attributes:
        name: on disk, e.g. "model.layers.1.mlp.experts.0.up_proj".
        weight: as the source stores it.
        input_scale: of its activations; None if they stay bf16.
    """

    name: str
    weight: Stored
    input_scale: float | None

    @cached_property
    def outputs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each tensor that it becomes, by name."""
        found = weight_tensors(self.name, self.weight.shape)
        return found if self.input_scale is not None else {n: t for n, t in found.items() if "input_scale" not in n}


@dataclass(frozen=True)
class Group:
    """Modules that an engine fuses, and that share one weight_scale_2; most often one or two."""

    modules: tuple[Module, ...]


@dataclass(frozen=True)
class Unit:
    """One file of the output, and all that it is made of.

    Attributes:
        file: its name.
        groups: what becomes NVFP4.
        dequantized: stored in a form that the output's config cannot name beside NVFP4, and written as it reads.
        carried: tensors whose bytes stay.
    """

    file: str
    groups: tuple[Group, ...]
    dequantized: tuple[Stored, ...]
    carried: tuple[TensorInfo, ...]

    @property
    def modules(self) -> tuple[Module, ...]:
        """The modules of its groups."""
        return tuple(module for group in self.groups for module in group.modules)

    @property
    def inputs(self) -> list[TensorInfo]:
        """Every tensor that it is made of."""
        weights = [*(module.weight for module in self.modules), *self.dequantized]
        return [*self.carried, *(info for weight in weights for info in weight.infos)]

    @property
    def bytes_in(self) -> int:
        """Bytes of its inputs."""
        return sum(info.size for info in self.inputs)

    @property
    def bytes_out(self) -> int:
        """Bytes of its tensors."""
        return sum(byte_size(dtype, shape) for _, dtype, shape in self.outputs())

    def outputs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype and shape of each of its tensors."""
        packed = [(name, *kind) for module in self.modules for name, kind in module.outputs.items()]
        plain = [(weight.name, weight.dtype, weight.shape) for weight in self.dequantized]
        return [*packed, *plain, *((info.name, info.dtype, info.shape) for info in self.carried)]


@dataclass(frozen=True)
class _Piece:
    """What must stand in one file: a fused group, or one tensor that is not quantized."""

    group: Group | None
    plain: Stored | None

    @property
    def size(self) -> int:
        if self.plain is not None:
            return byte_size(self.plain.dtype, self.plain.shape)
        modules = self.group.modules if self.group else ()
        return sum(byte_size(*kind) for module in modules for kind in module.outputs.values())


def cut_units(stored: dict[str, Stored], modules: dict[str, Module], shard: int) -> tuple[Unit, ...]:
    """Cut the output into files of about equal sizes, in the order of the source's files and of the bytes in them."""
    groups = _fuse(modules)
    pieces: list[_Piece] = []
    done: set[str] = set()
    for weight in sorted(stored.values(), key=_place):
        module = weight.name.removesuffix(".weight")
        if module not in groups:
            pieces.append(_Piece(None, weight))
        elif module not in done:
            pieces.append(_Piece(groups[module], None))
            done |= {member.name for member in groups[module].modules}
    cut = _cut(pieces, shard)
    return tuple(_unit(f"model-{i:05d}-of-{len(cut):05d}.safetensors", part) for i, part in enumerate(cut, 1))


def _cut(pieces: Sequence[_Piece], shard: int) -> list[list[_Piece]]:
    """Cut pieces into runs of about equal sizes, near that of a shard: each goes where its middle falls."""
    total = sum(piece.size for piece in pieces)
    count = -(-total // shard)
    runs: dict[int, list[_Piece]] = {}
    before = 0
    for piece in pieces:
        middle = before + piece.size // 2
        runs.setdefault(middle * count // max(total, 1), []).append(piece)
        before += piece.size
    return list(runs.values())


def _place(weight: Stored) -> tuple[str, int]:
    return weight.infos[0].file.name, weight.infos[0].begin


def _unit(file: str, pieces: Iterable[_Piece]) -> Unit:
    pieces = list(pieces)
    plain = [piece.plain for piece in pieces if piece.plain is not None]
    return Unit(
        file,
        tuple(piece.group for piece in pieces if piece.group is not None),
        tuple(weight for weight in plain if not isinstance(weight, Plain)),
        tuple(weight.info for weight in plain if isinstance(weight, Plain)),
    )


def _fuse(modules: dict[str, Module]) -> dict[str, Group]:
    """Return the group of each module."""
    together: dict[str, list[Module]] = {}
    for name, module in modules.items():
        together.setdefault(fused_group(name), []).append(module)
    groups = [Group(tuple(members)) for members in together.values()]
    return {module.name: group for group in groups for module in group.modules}
