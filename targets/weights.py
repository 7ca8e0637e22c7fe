"""A target's weights in any stored form, plain or of `OF_TARGETS`, read as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ..checkpoint.folder import Checkpoint, read_json
from ..checkpoint.formats import (
    FP8_PB_WO,
    MXFP4_AMID_FP8,
    NVFP4_AMID_FP8,
    NVFP4_MIXED,
    OF_TARGETS,
    ONLY_QUANTIZED,
    SIDE_FILE,
    StoredFormat,
    stated_format,
)
from ..checkpoint.header import TensorInfo
from ..checkpoint.tensors import TORCH, read_span, read_tensor
from ..errors import SourceFormatUnknown
from .config import TargetConfig

# Elements to dequantize at a time: about ten MiB with all intermediate values.
SPAN = 1 << 21

Seen = Callable[[TensorInfo, torch.Tensor], None]
"""Called with each part of a stored tensor as it is read, in order."""


def unseen(info: TensorInfo, part: torch.Tensor) -> None:
    """See `Seen`; nobody looks."""


class StoredWeight(Protocol):
    """A weight in any stored form.

    Attributes:
        name: its name as a plain tensor, e.g. "model.layers.1.mlp.experts.0.up_proj.weight".
        shape: its dims as a plain tensor.
        dtype: safetensors name of the dtype that it is read as.
        infos: the tensors on disk that hold it.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def form(self) -> str: ...
    @property
    def infos(self) -> tuple[TensorInfo, ...]: ...

    def blocks(self, seen: Seen = unseen) -> Iterator[torch.Tensor]:
        """Yield a matrix dequantized, in consecutive blocks of rows of about `SPAN` elements."""
        ...

    def read(self) -> torch.Tensor:
        """Return it whole and dequantized, in memory of its own."""
        ...


@dataclass(frozen=True)
class Plain:
    """A tensor that is stored as itself."""

    info: TensorInfo
    form = "plain"

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> str:
        return self.info.dtype

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        return (self.info,)

    def blocks(self, seen: Seen = unseen) -> Iterator[torch.Tensor]:
        for begin, end in spans(self.shape):
            part = read_span(self.info, begin, end)
            seen(self.info, part)
            yield part

    def read(self) -> torch.Tensor:
        return read_tensor(self.info)


@dataclass(frozen=True)
class Quantized:
    """A matrix in a quantized format; its tensors on disk by suffix, values first."""

    format: StoredFormat
    parts: Mapping[str, TensorInfo]

    @property
    def name(self) -> str:
        return f"{self.infos[0].name.removesuffix(f'.{self.format.values}')}.weight"

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.format.shape(self.parts)

    @property
    def dtype(self) -> str:
        return self.format.dtype(self.parts)

    @property
    def form(self) -> str:
        return self.format.form

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        return tuple(self.parts.values())

    def stored(self, seen: Seen = unseen) -> Iterator[dict[str, torch.Tensor]]:
        """Yield its tensors as stored, by suffix, in consecutive blocks of rows."""
        rows = {suffix: self.format.tensors[suffix].rows for suffix in self.parts}
        whole = {suffix: read_tensor(info) for suffix, info in self.parts.items() if not rows[suffix]}
        self.format.check_values(self.parts, whole)
        for suffix, part in whole.items():
            seen(self.parts[suffix], part)
        for begin, end in spans(self.shape, max(rows.values())):
            split = {
                suffix: read_span(info, begin // rows[suffix], -(-end // rows[suffix]))
                for suffix, info in self.parts.items()
                if rows[suffix]
            }
            for suffix, part in split.items():
                seen(self.parts[suffix], part)
            yield whole | split

    def blocks(self, seen: Seen = unseen) -> Iterator[torch.Tensor]:
        for stored in self.stored(seen):
            yield self.format.unpack(stored).to(TORCH[self.dtype])

    def read(self) -> torch.Tensor:
        return torch.cat(list(self.blocks()))


def spans(shape: tuple[int, ...], multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the row ranges that split a matrix into blocks of about `SPAN` elements.

    Each range except the last is a multiple of `multiple`.
    """
    rows, columns = shape
    step = max(SPAN // max(columns, 1) // multiple, 1) * multiple
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)


# What a target without a format is in.
PLAIN = "bf16, fp16 or fp32"
# Dtypes that form a weight only together with scales.
PACKED = ("F8_E4M3", "F8_E5M2", "U8", "I8", "I32", "F4")


def read_format(checkpoint: Checkpoint, config: TargetConfig) -> StoredFormat | None:
    """Return the format of a target's weights according to its config; None for a plain target.

    Raises:
        SourceFormatUnknown: kconv does not read the format that the config states.
    """
    where = checkpoint.folder / "config.json"
    block = config.quantization or _side_block(checkpoint)
    if not block:
        return None
    if config.model_type == "deepseek_v4" and config.text.get("expert_dtype") == "fp4":
        return NVFP4_AMID_FP8 if NVFP4_AMID_FP8.is_stated(block) else MXFP4_AMID_FP8
    found = stated_format(block, where)
    if found is None:
        method, form = block.get("quant_method"), block.get("format")
        named = f"{method!r}" + (f" in {form!r}" if form else "")
        raise SourceFormatUnknown(
            f"{checkpoint.folder.name} is quantized ({named}), which kconv cannot read",
            where=where,
            fix=f"Pass a target in {'; '.join([PLAIN, *(format_.title for format_ in OF_TARGETS)])}.",
        )
    return found


def stored_weights(checkpoint: Checkpoint, config: TargetConfig) -> dict[str, StoredWeight]:
    """Return every tensor of a target as the weight that it stands for, by its name as a plain tensor.

    Scales and shapes are part of their weight and have no entry of their own; only headers are read.

    Raises:
        SourceFormatUnknown: kconv does not read the format, or the tensors contradict the config.
        QuantizedWeightInvalid: the tensors of a quantized weight do not fit each other.
    """
    format_, tensors = read_format(checkpoint, config), checkpoint.tensors
    found: list[StoredWeight] = []
    if format_:
        bases = _bases(tensors, format_.mark)
        if format_.amid_fp8:
            # FP8's scales are called as MXFP4's. The MTP layers' experts stay MXFP4.
            packed = MXFP4_AMID_FP8.tensors[MXFP4_AMID_FP8.values].dtype
            mxfp4 = [
                base
                for base in _bases(tensors, MXFP4_AMID_FP8.mark)
                if (info := tensors.get(f"{base}.{MXFP4_AMID_FP8.values}")) and info.dtype == packed
            ]
            found += [Quantized(MXFP4_AMID_FP8, MXFP4_AMID_FP8.parts(base, tensors)) for base in mxfp4]
            bases = [] if format_ == MXFP4_AMID_FP8 else bases
        found += [Quantized(format_, format_.parts(base, tensors)) for base in bases]
        if format_ == NVFP4_MIXED:
            others = sorted(set(_bases(tensors, FP8_PB_WO.mark)).difference(bases))
            found += [Quantized(FP8_PB_WO, FP8_PB_WO.parts(base, tensors)) for base in others]
        if not found:
            raise SourceFormatUnknown(
                f"the config says {format_.title}, but no tensor is stored that way",
                where=checkpoint.folder,
                fix="Check that config.json and the weights belong to the same model.",
            )
    beside = tuple(f".{suffix}" for suffix in format_.beside) if format_ else ()
    part_of = {info.name for weight in found for info in weight.infos}
    for name, info in tensors.items():
        if name in part_of or name.endswith(beside):
            continue
        if not (format_ and format_.amid_fp8):
            _refuse_packed(info, format_.title if format_ else PLAIN)
        found.append(Plain(info))
    return {weight.name: weight for weight in found}


def _side_block(checkpoint: Checkpoint) -> dict | None:
    """Return the settings that ModelOpt wrote to its own file when the config lacks them."""
    file = checkpoint.folder / SIDE_FILE
    if checkpoint.headers_only or not file.exists():
        return None
    said = read_json(file).get("quantization")
    return {**said, "quant_method": "modelopt"} if isinstance(said, dict) else None


def _bases(tensors: dict[str, TensorInfo], suffix: str) -> list[str]:
    return [name.removesuffix(f".{suffix}") for name in tensors if name.endswith(f".{suffix}")]


def _refuse_packed(info: TensorInfo, stated: str) -> None:
    suffix = info.name.rpartition(".")[2]
    if suffix in ONLY_QUANTIZED or (suffix == "weight" and info.dtype in PACKED):
        raise SourceFormatUnknown(
            f"{info.name} is {info.dtype}, a part of a quantized weight, but the config says {stated}",
            where=info.file,
            fix="Check that config.json and the weights belong to the same model, and that the download is complete.",
        )
