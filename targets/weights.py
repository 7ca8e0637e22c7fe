"""A target's weights in any stored form, read as plain numbers.

The forms: plain; INT4 in groups (compressed-tensors); FP8 in blocks (DeepSeek); NVFP4 (ModelOpt, and kconv).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ..checkpoint.folder import Checkpoint, read_json
from ..checkpoint.header import TensorInfo
from ..checkpoint.tensors import read_span, read_tensor
from ..errors import SourceFormatUnknown, TensorShape
from .config import TargetConfig

# Elements to dequantize at a time: about ten MiB with all intermediate values.
BLOCK = 1 << 21


class StoredWeight(Protocol):
    """A weight in any stored form.

    Attributes:
        name: its name as a plain tensor, e.g. "model.layers.1.mlp.experts.0.up_proj.weight".
        shape: its dims as a plain tensor.
        dtype: safetensors name of the dtype that it is read as.
        form: the stored form, as in `target.source_formats`.
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

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield a matrix dequantized, in consecutive blocks of rows of about `BLOCK` elements."""
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
        """Its name on disk."""
        return self.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dims."""
        return self.info.shape

    @property
    def dtype(self) -> str:
        """Its dtype on disk."""
        return self.info.dtype

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """Itself."""
        return (self.info,)

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield a matrix in consecutive blocks of rows."""
        for begin, end in spans(self.shape):
            yield read_span(self.info, begin, end)

    def read(self) -> torch.Tensor:
        """Return it whole."""
        return read_tensor(self.info)


@dataclass(frozen=True)
class _InBlocks:
    """A quantized matrix, read by blocks of rows."""

    def blocks(self) -> Iterator[torch.Tensor]:
        raise NotImplementedError

    def read(self) -> torch.Tensor:
        """Return it whole, dequantized."""
        return torch.cat(list(self.blocks()))


@dataclass(frozen=True)
class _Scaled(_InBlocks):
    """A weight stored under its own name, with separate scales."""

    weight: TensorInfo
    scale: TensorInfo
    dtype = "BF16"

    @property
    def name(self) -> str:
        """Its name on disk."""
        return self.weight.name


def spans(shape: tuple[int, ...], multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the row ranges that split a matrix into blocks of about `BLOCK` elements.

    Args:
        shape: [rows, columns].
        multiple: each range except the last is a multiple of it.
    """
    rows, columns = shape
    step = max(BLOCK // max(columns, 1) // multiple, 1) * multiple
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)


# compressed-tensors' pack-quantized INT4, as used by Kimi-K2-Thinking and K2.5.
#
# A weight [out, in] is three tensors: `weight_packed` I32 [out, in/8], whose lowest four bits hold the first of eight
# columns, each stored as its value plus 8; `weight_scale` [out, in/group]; `weight_shape` [2]. A value is
# (nibble - 8) * scale, rounded to the scale's dtype:
# https://github.com/vllm-project/compressed-tensors/blob/0.17.0/src/compressed_tensors/compressors/pack_quantized/base.py

SUFFIXES = ("weight_packed", "weight_scale", "weight_shape")
SCALES = ("BF16", "F16", "F32")
# What a config group's `weights` must state; an absent key has compressed-tensors' default.
DEMANDS = {
    "num_bits": (4,), "type": ("int",), "symmetric": (True,), "strategy": ("group",), "dynamic": (False,),
    "actorder": (None, False), "block_structure": (None,),
}  # fmt: skip


@dataclass(frozen=True)
class Int4(_InBlocks):
    """A weight in INT4 groups that share a scale."""

    packed: TensorInfo
    scale: TensorInfo
    extent: TensorInfo
    form = "int4"

    @property
    def name(self) -> str:
        """As a plain weight."""
        return self.packed.name.removesuffix("_packed")

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]; nibbles that only pad the last I32 of a row are not counted."""
        return self.packed.shape[0], self.scale.shape[1] * self.group

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.packed.shape[1] * 8 // self.scale.shape[1]

    @property
    def dtype(self) -> str:
        """The scale's."""
        return self.scale.dtype

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """The packed values, their scales and the shape."""
        return self.packed, self.scale, self.extent

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield it in consecutive blocks of rows, in the scale's dtype."""
        self.check()
        for packed, scale in self.packed_blocks():
            yield dequantize_int4(packed, scale)

    def packed_blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield it in consecutive blocks of rows as stored: I32 [rows, in/8] and scales [rows, in/group]."""
        for begin, end in spans(self.shape):
            yield read_span(self.packed, begin, end), read_span(self.scale, begin, end)

    def check(self) -> None:
        """Raise TensorShape if `weight_shape` contradicts the shapes of the packed values and the scales."""
        said = tuple(read_tensor(self.extent).flatten().tolist())
        if said != self.shape:
            raise TensorShape(
                f"{self.extent.name} says {list(said)}, but the packed values are {list(self.shape)}",
                where=self.extent.file,
                fix="Fetch the shard again; compare its sha256 with the publisher's.",
            )


def dequantize_int4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return INT4 values as numbers, bit for bit like compressed-tensors.

    Args:
        packed: I32 [rows, columns/8].
        scale: [rows, columns/group].

    Returns:
        [rows, columns] in the scale's dtype; the product is rounded to it once.
    """
    # Little-endian: the low nibble of each byte holds the even column.
    halves = packed.view(torch.uint8)
    values = torch.empty(halves.shape[0], halves.shape[1], 2, dtype=torch.int8)
    torch.bitwise_and(halves, 15, out=values[:, :, 0].view(torch.uint8))
    torch.bitwise_right_shift(halves, 4, out=values[:, :, 1].view(torch.uint8))
    grouped = values.sub_(8).to(scale.dtype).view(*scale.shape, -1)
    return grouped.mul_(scale.unsqueeze(-1)).view(halves.shape[0], -1)


def check_int4(quantization: dict, where: object) -> None:
    """Raise SourceFormatUnknown unless a compressed-tensors config is the INT4 that kconv reads."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unknown("its config_groups are missing", where)
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise _unknown(f"{name} has no weights", where)
        for key, allowed in DEMANDS.items():
            if key in weights and weights[key] not in allowed:
                raise _unknown(f"{name} has {key} {weights[key]!r}, but kconv reads {allowed[0]!r}", where)
        if weights.get("num_bits") != 4 or weights.get("strategy") != "group":
            raise _unknown(f"{name} does not state 4 bits in groups", where)


def int4_of(base: str, tensors: dict[str, TensorInfo]) -> Int4:
    """Return the weight of a module from its packed values.

    Args:
        base: the module's name on disk.
        tensors: the checkpoint's tensors.

    Raises:
        SourceFormatUnknown: the scales or the shape are missing, or have another dtype.
        TensorShape: the scales do not divide the packed values into groups.
    """
    found = [tensors.get(f"{base}.{suffix}") for suffix in SUFFIXES]
    if None in found or f"{base}.weight_zero_point" in tensors or f"{base}.weight_g_idx" in tensors:
        raise _unknown(f"{base} lacks one of the three tensors {', '.join(SUFFIXES)}", base)
    packed, scale, extent = (info for info in found if info is not None)
    if packed.dtype != "I32" or scale.dtype not in SCALES or extent.dtype not in ("I32", "I64"):
        raise _unknown(f"{base} is {packed.dtype} with scales in {scale.dtype}", packed.file)
    columns = packed.shape[-1] * 8
    sound = len(packed.shape) == len(scale.shape) == 2 and packed.shape[0] == scale.shape[0] and extent.shape == (2,)
    if not sound or not scale.shape[1] or columns % scale.shape[1]:
        raise TensorShape(
            f"{packed.name} is {list(packed.shape)} and its scales {list(scale.shape)}, which do not form whole groups",
            where=packed.file,
            fix="Fetch the shard again; compare its sha256 with the publisher's.",
        )
    return Int4(packed, scale, extent)


def _unknown(what: str, where: object) -> SourceFormatUnknown:
    return SourceFormatUnknown(
        f"this compressed-tensors checkpoint cannot be read: {what}",
        where=where,
        fix="kconv reads pack-quantized symmetric INT4 in groups, as used by Kimi-K2-Thinking, K2.5 and K2.6.",
    )


# FP8 in blocks, as used by DeepSeek-V3 and Kimi-K2-Instruct.
#
# A weight [out, in] is F8_E4M3 with `weight_scale_inv` [ceil(out/128), ceil(in/128)]; a value is the product of the
# two in float32, rounded to bf16, as in DeepSeek's `weight_dequant`:
# https://github.com/deepseek-ai/DeepSeek-V3/blob/06231633430c449a1f6a8c0b5a1d6f99860b8eb2/inference/kernel.py#L78-L81

SCALE = "weight_scale_inv"


@dataclass(frozen=True)
class Fp8(_Scaled):
    """A weight in FP8 blocks that share a scale.

    Attributes:
        weight: F8_E4M3 [out, in].
        scale: [ceil(out / block rows), ceil(in / block columns)].
        block: rows and columns that share a scale.
    """

    block: tuple[int, int]
    form = "fp8"

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.weight.shape

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """The values and their scales."""
        return self.weight, self.scale

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield it in consecutive blocks of rows, in bf16."""
        scale = read_tensor(self.scale).float()
        height = self.block[0]
        for begin, end in spans(self.shape, height):
            yield dequantize_fp8(
                read_span(self.weight, begin, end), scale[begin // height : -(-end // height)], self.block
            )


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return FP8 values as numbers, bit for bit like DeepSeek's own kernel.

    Args:
        weight: F8_E4M3 [rows, columns].
        scale: float32 [ceil(rows / block rows), ceil(columns / block columns)].
        block: rows and columns that share a scale.

    Returns:
        bf16 [rows, columns].
    """
    rows, columns = weight.shape
    spread = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.float().mul_(spread).bfloat16()


def block_of(quantization: dict, where: object) -> tuple[int, int]:
    """Return the rows and columns that share a scale, from a config.

    Raises:
        SourceFormatUnknown: this is another kind of FP8.
    """
    match quantization:
        case {"weight_block_size": [int(rows), int(columns)]} if rows > 0 and columns > 0:
            pass
        case _:
            raise SourceFormatUnknown(
                f"this FP8 checkpoint has the weight_block_size {quantization.get('weight_block_size')!r}",
                where=where,
                fix="kconv reads FP8 in blocks, as used by Kimi-K2-Instruct and DeepSeek-V3.",
            )
    if quantization.get("fmt", "e4m3") != "e4m3":
        raise SourceFormatUnknown(
            f"this FP8 checkpoint is {quantization['fmt']!r}", where=where, fix="kconv reads e4m3."
        )
    return rows, columns


def fp8_of(base: str, tensors: dict[str, TensorInfo], block: tuple[int, int]) -> Fp8:
    """Return the weight of a module from its scales.

    Raises:
        SourceFormatUnknown: the weight is missing, or has another dtype.
        TensorShape: there is not one scale per block.
    """
    weight, scale = tensors.get(f"{base}.weight"), tensors[f"{base}.{SCALE}"]
    if weight is None or weight.dtype != "F8_E4M3" or scale.dtype not in ("F32", "BF16"):
        held = "missing" if weight is None else weight.dtype
        raise SourceFormatUnknown(
            f"{base}.weight is {held} with scales in {scale.dtype}",
            where=scale.file,
            fix="Fetch the shard again; an FP8 weight is F8_E4M3 with scales in F32.",
        )
    wanted = tuple(-(-count // size) for count, size in zip(weight.shape, block, strict=False))
    if len(weight.shape) != 2 or scale.shape != wanted:
        raise TensorShape(
            f"{scale.name} is {list(scale.shape)}, but {list(weight.shape)} in blocks of {list(block)} needs "
            f"{list(wanted)}",
            where=scale.file,
            fix="Check that config.json and the weights belong to the same model.",
        )
    return Fp8(weight, scale, block)


# NVFP4, as ModelOpt exports it and kconv writes it.
#
# A weight [out, in] is U8 [out, in/2], whose low nibble holds the even column; `weight_scale` F8_E4M3 [out, in/16];
# `weight_scale_2` F32. A value is e2m1(nibble) * (weight_scale * weight_scale_2), in float32.

GROUP = 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
# Both values of each byte: [256, 2].
PAIRS = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], dim=-1)
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
# Stored with a weight, but only for engines: they do not change its value.
BESIDE = ("input_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class Nvfp4(_Scaled):
    """A weight in groups of sixteen e2m1 values that share an e4m3 scale."""

    scale_2: TensorInfo
    form = "nvfp4"

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.weight.shape[0], self.weight.shape[1] * 2

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """The values and both scales."""
        return self.weight, self.scale, self.scale_2

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield it in consecutive blocks of rows, in bf16."""
        scale_2 = read_tensor(self.scale_2).reshape(())
        for begin, end in spans(self.shape):
            packed, scale = read_span(self.weight, begin, end), read_span(self.scale, begin, end)
            yield dequantize_nvfp4(packed, scale, scale_2).bfloat16()


def dequantize_nvfp4(packed: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """Return NVFP4 values as numbers, bit for bit like ModelOpt.

    Args:
        packed: U8 [rows, columns/2].
        scale: F8_E4M3 [rows, columns/16].
        scale_2: F32 [].

    Returns:
        float32 [rows, columns].
    """
    values = PAIRS.to(packed.device)[packed.int()].view(*scale.shape, GROUP)
    return values.mul_((scale.float() * scale_2).unsqueeze(-1)).view(packed.shape[0], -1)


def check_nvfp4(quantization: dict, where: object) -> None:
    """Raise SourceFormatUnknown unless a ModelOpt config is the NVFP4 that kconv reads."""
    algorithm = quantization.get("quant_algo")
    if algorithm not in ALGORITHMS:
        raise SourceFormatUnknown(
            f"this ModelOpt checkpoint has the quant_algo {algorithm!r}",
            where=where,
            fix=f"kconv reads {' and '.join(ALGORITHMS)}.",
        )


def nvfp4_of(base: str, tensors: dict[str, TensorInfo]) -> Nvfp4:
    """Return the weight of a module from its `weight_scale_2`.

    Raises:
        SourceFormatUnknown: a part is missing, or has another dtype.
        TensorShape: there is not one scale per sixteen values.
    """
    parts = {suffix: tensors.get(f"{base}.{suffix}") for suffix in ("weight", "weight_scale", "weight_scale_2")}
    held = {suffix: info.dtype if info else "missing" for suffix, info in parts.items()}
    if held != {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"}:
        raise SourceFormatUnknown(
            f"{base} is not an NVFP4 weight: " + ", ".join(f"{suffix} is {dtype}" for suffix, dtype in held.items()),
            where=base,
            fix="Export or quantize the target again.",
        )
    weight, scale, scale_2 = (info for info in parts.values() if info)
    fits = len(weight.shape) == 2 and scale.shape == (weight.shape[0], weight.shape[1] * 2 // GROUP)
    if not fits or weight.shape[1] * 2 % GROUP or scale_2.shape not in ((), (1,)):
        raise TensorShape(
            f"{scale.name} is {list(scale.shape)}, which is not one scale per {GROUP} of {list(weight.shape)} x 2",
            where=scale.file,
            fix="Export or quantize the target again.",
        )
    return Nvfp4(weight, scale, scale_2)


SIDE_CONFIG = "hf_quant_config.json"
KNOWN = {
    "plain": "bf16, fp16 or fp32",
    "int4": "compressed-tensors pack-quantized INT4 in groups",
    "fp8": "FP8 in blocks",
    "nvfp4": "ModelOpt's NVFP4",
}
# Dtypes that form a weight only together with scales.
PACKED = ("F8_E4M3", "F8_E5M2", "U8", "I8", "I32", "F4")


def read_form(checkpoint: Checkpoint, config: TargetConfig) -> tuple[str, dict]:
    """Return the form of a target's weights according to its config, and the config block that states it.

    Returns:
        A key of `KNOWN`, and the quantization block, empty for "plain".

    Raises:
        SourceFormatUnknown: kconv does not read the form in that block.
    """
    where = checkpoint.folder / "config.json"
    block = config.quantization
    if not block:
        block = _side_block(checkpoint)
    if not block:
        return "plain", {}
    method, form = block.get("quant_method"), block.get("format")
    if method == "compressed-tensors" and form == "pack-quantized":
        check_int4(block, where)
        return "int4", block
    if method == "fp8":
        block_of(block, where)
        return "fp8", block
    if isinstance(method, str) and method.startswith("modelopt"):
        check_nvfp4(block, where)
        return "nvfp4", block
    named = f"{method!r}" + (f" in {form!r}" if form else "")
    raise SourceFormatUnknown(
        f"{checkpoint.folder.name} is quantized ({named}), which kconv cannot read",
        where=where,
        fix=f"Pass a target in {'; '.join(KNOWN.values())}.",
    )


def stored_weights(checkpoint: Checkpoint, config: TargetConfig) -> dict[str, StoredWeight]:
    """Return every tensor of a target as the weight that it stands for, by its name as a plain tensor.

    Scales and shapes are part of their weight and have no entry of their own; only headers are read.

    Raises:
        SourceFormatUnknown: kconv does not read the form, or the tensors contradict the config.
        TensorShape: scales do not fit their values.
    """
    form, block = read_form(checkpoint, config)
    tensors = checkpoint.tensors
    found: list[StoredWeight]
    beside: tuple[str, ...] = ()
    if form == "int4":
        found = [int4_of(base, tensors) for base in _bases(tensors, SUFFIXES[0])]
    elif form == "fp8":
        size = block_of(block, checkpoint.folder)
        found = [fp8_of(base, tensors, size) for base in _bases(tensors, SCALE)]
    elif form == "nvfp4":
        found, beside = [nvfp4_of(base, tensors) for base in _bases(tensors, "weight_scale_2")], BESIDE
    else:
        found = []
    if form != "plain" and not found:
        raise SourceFormatUnknown(
            f"the config says {KNOWN[form]}, but no tensor is stored that way",
            where=checkpoint.folder,
            fix="Check that config.json and the weights belong to the same model.",
        )
    part_of = {info.name for weight in found for info in weight.infos}
    for name, info in tensors.items():
        if name in part_of or name.endswith(tuple(f".{suffix}" for suffix in beside)):
            continue
        _refuse_packed(info, form)
        found.append(Plain(info))
    return {weight.name: weight for weight in found}


def _side_block(checkpoint: Checkpoint) -> dict | None:
    """Return the settings that ModelOpt wrote to its own file when the config lacks them."""
    file = checkpoint.folder / SIDE_CONFIG
    if checkpoint.headers_only or not file.exists():
        return None
    said = read_json(file).get("quantization")
    return {**said, "quant_method": "modelopt"} if isinstance(said, dict) else None


def _bases(tensors: dict[str, TensorInfo], suffix: str) -> list[str]:
    return [name.removesuffix(f".{suffix}") for name in tensors if name.endswith(f".{suffix}")]


def _refuse_packed(info: TensorInfo, form: str) -> None:
    scale = info.name.endswith((".weight_scale", ".weight_scale_inv", ".weight_shape", ".weight_packed"))
    if scale or (info.name.endswith(".weight") and info.dtype in PACKED):
        raise SourceFormatUnknown(
            f"{info.name} is {info.dtype}, a part of a quantized weight, but the config says {KNOWN[form]}",
            where=info.file,
            fix="Check that config.json and the weights belong to the same model, and that the download is complete.",
        )
