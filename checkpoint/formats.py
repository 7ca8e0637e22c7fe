"""How quantized weights are stored: one class for each format, and all that kconv knows of it.

A module's weight `[rows, columns]` is stored as several tensors, `<module>.<suffix>`: its values and its scales.
Each scale is a multiplier. ModelOpt's names and numbers:
https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/quant_utils.py
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

from ..errors import QuantizedWeightInvalid, SourceFormatUnknown
from .header import TensorInfo
from .schema import Json

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

# The suffix of what engines divide a module's input by.
INPUT_SCALE = "input_scale"
# Where a config describes the quantization; ModelOpt's exporter also writes the second one, as a file.
CONFIG_KEY, SIDE_FILE = "quantization_config", "hf_quant_config.json"
PRODUCER = {"name": "modelopt", "version": "0.47.0"}

# The largest magnitude of each float type.
E2M1_MAX, E4M3_MAX = 6.0, 448.0

# Engines take the reciprocal of an input_scale in float32; for a denormal number it may be infinite:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L2097
SMALLEST_SCALE = 2.0**-126
# The next norm squares a product of an activation in float32; beyond this a square is infinite.
LARGEST_AMAX = 2.0**64


def is_scale(value: float) -> bool:
    """Return whether float32 can calculate with a scale of a whole module: weight_scale_2, or input_scale."""
    return SMALLEST_SCALE <= value < LARGEST_AMAX / (E2M1_MAX * E4M3_MAX)


# Modules that engines fuse and for which only one scale of a whole module survives, by the last part of their names.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_FIRST = {member: members[0] for members in FUSED for member in members}


def fused_group(module: str) -> str:
    """Return a name that only the modules fused with this one share."""
    parent, _, last = module.rpartition(".")
    return f"{parent}.{_FIRST.get(last, last)}"


# What follows the name that a layer's routed experts have together.
_EXPERT = re.compile(r"(?<=\.experts)\.\d+\.\w+\Z")


def experts_of(module: str) -> str:
    """Return the name that a routed expert's module shares with all experts of its layer; of another its own."""
    return _EXPERT.sub("", module)


def one_form_group(module: str) -> str:
    """Return a name that only the modules share which an engine builds as one layer, of one form.

    All routed experts of a layer are one:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L187-L222
    """
    return experts_of(fused_group(module))


@dataclass(frozen=True)
class FormatTensor:
    """One of the tensors that make up a quantized weight.

    Attributes:
        dtypes: the safetensors dtypes it may have; the first is what kconv writes.
        shapes: the shapes it may have, from the weight's rows and columns; the first is what kconv writes.
        rows: how many of the weight's rows one row of it covers; 0 if it is read whole.
    """

    dtypes: tuple[str, ...]
    shapes: Callable[[int, int], tuple[Shape, ...]]
    is_needed: bool = True
    rows: int = 0

    @property
    def dtype(self) -> str:
        """What kconv writes."""
        return self.dtypes[0]


class PartFault(NamedTuple):
    """What keeps a tensor from being a part of a quantized weight; `what` follows its name: "is F32, not F8_E4M3"."""

    kind: Literal["missing", "dtype", "shape"]
    name: str
    what: str


@dataclass(frozen=True)
class StoredFormat(ABC):
    """How a quantized weight is stored.

    Attributes:
        name: ModelOpt's `quant_algo`, if it has one.
        form: what manifests and messages call a target in it; empty if no target is read in it.
        values, scale: the suffixes of the values, and of the scales with a dim.
        mark: the suffix of the tensor that tells this format from the others.
        columns: how many columns one stored element holds.
        group: how many columns share a scale; 1 if rows are not split into groups.
        largest: the largest magnitude with scales of 1.
        numbers: the description of weights and inputs in config.json's `config_groups`.
        weight_only_name: ModelOpt's `quant_algo` if engines leave the inputs unquantized.
        beside: suffixes of tensors that a target stores for engines alone: no weight's value depends on them.
        amid_fp8: whether the target's other matrices are DeepSeek-V4's FP8, which is taken as it is stored.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    form: ClassVar[str] = ""
    values: ClassVar[str] = "weight"
    scale: ClassVar[str] = "weight_scale"
    mark: ClassVar[str] = scale
    columns: ClassVar[int] = 1
    group: ClassVar[int] = 1
    largest: ClassVar[float] = 0.0
    numbers: ClassVar[Mapping[str, Any]] = {}
    weight_only_name: ClassVar[str] = ""
    beside: ClassVar[tuple[str, ...]] = ()
    amid_fp8: ClassVar[bool] = False

    def __reduce__(self) -> tuple[Any, ...]:
        # To a worker process: the functions in `tensors` cannot be sent.
        return type(self), tuple(getattr(self, one.name) for one in fields(self))

    @cached_property
    @abstractmethod
    def tensors(self) -> Mapping[str, FormatTensor]:
        """The tensors by suffix; values first."""

    @property
    def split(self) -> str:
        """How a weight's columns share scales, as a phrase."""
        return f"in groups of {self.group}"

    @abstractmethod
    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers `[rows, columns]` of stored tensors, by suffix, bit for bit like the format's maker."""

    @property
    def scales(self) -> dict[str, FormatTensor]:
        """The tensors other than the values, by suffix."""
        return {suffix: tensor for suffix, tensor in self.tensors.items() if suffix != self.values}

    def dtype(self, parts: Mapping[str, TensorInfo]) -> str:
        """Return the safetensors dtype that a target's weight is read as."""
        return "BF16"

    def shape(self, parts: Mapping[str, TensorInfo]) -> tuple[int, int]:
        rows, stored = parts[self.values].shape
        return rows, stored * self.columns

    def fits(self, columns: int) -> bool:
        """Return whether so many columns form whole groups."""
        return columns % self.group == 0

    def written(self, module: str, shape: Sequence[int]) -> dict[str, tuple[str, Shape]]:
        """Return dtype and shape of each tensor that kconv writes for a module's weight of this shape, by name."""
        rows, columns = shape
        return {
            f"{module}.{suffix}": (tensor.dtype, tensor.shapes(rows, columns)[0])
            for suffix, tensor in self.tensors.items()
        }

    def parts(self, module: str, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return the tensors from which a module's weight is read, by suffix."""
        named = {suffix: f"{module}.{suffix}" for suffix, tensor in self.tensors.items() if tensor.is_needed}
        found = {suffix: tensors[name] for suffix, name in named.items() if name in tensors}
        for fault in self.faults(module, found):
            raise QuantizedWeightInvalid(
                f"{fault.name} {fault.what}, so {module} cannot be read as {self.name}",
                where=next(iter(found.values())).file if found else module,
                fix="Fetch the shard again, and check that config.json and the weights belong to the same model.",
            )
        return found

    def faults(self, module: str, parts: Mapping[str, TensorInfo]) -> Iterator[PartFault]:
        """Yield what is wrong with the tensors of a module's weight, by suffix."""
        for suffix, tensor in self.tensors.items():
            info = parts.get(suffix)
            if info is None:
                if tensor.is_needed:
                    yield PartFault("missing", f"{module}.{suffix}", "is missing")
            elif info.dtype not in tensor.dtypes:
                yield PartFault("dtype", info.name, f"is {info.dtype}, not {' or '.join(tensor.dtypes)}")
        values = parts.get(self.values)
        if values is None or values.dtype not in self.tensors[self.values].dtypes:
            return
        if len(values.shape) != 2:
            yield PartFault("shape", values.name, f"is {list(values.shape)}, not a matrix")
            return
        rows, columns = self.shape(parts)
        if not self.fits(columns):
            yield PartFault("shape", values.name, f"has {columns} columns, which cannot be split {self.split}")
        for suffix, info in parts.items():
            shapes = self.tensors[suffix].shapes(rows, columns)
            if info.shape not in shapes:
                yield PartFault(
                    "shape",
                    info.name,
                    f"is {list(info.shape)}, but {[rows, columns]} {self.split} needs {list(shapes[0])}",
                )

    def check_values(self, parts: Mapping[str, TensorInfo], whole: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Raise QuantizedWeightInvalid if the tensors that are read whole contradict the others."""

    def quantization_config(self, exclude: Sequence[str], *, weight_only: bool = False) -> dict[str, Any]:
        """Return config.json's `quantization_config` as ModelOpt writes it, which vLLM and SGLang read.

        It states no quantized KV cache, since kconv writes no scales of one: engines would calculate with 1.0.

        Args:
            exclude: names or name patterns of modules that stay unquantized.
            weight_only: whether engines leave the inputs unquantized.
        """
        numbers = dict(self.numbers)
        group = {"input_activations": None if weight_only else numbers, "weights": numbers, "targets": ["Linear"]}
        return {
            "config_groups": {"group_0": group},
            "ignore": list(exclude),
            "quant_algo": self.weight_only_name if weight_only else self.name,
            "producer": PRODUCER,
            "quant_method": "modelopt",
        }

    def hf_quant_config(self, exclude: Sequence[str], *, weight_only: bool = False) -> dict[str, Any]:
        """Return hf_quant_config.json, which TensorRT-LLM reads; options as for `quantization_config`."""
        return {
            "producer": PRODUCER,
            "quantization": {
                "quant_algo": self.weight_only_name if weight_only else self.name,
                "kv_cache_quant_algo": None,
                **({"group_size": self.group} if self.group > 1 else {}),
                "exclude_modules": list(exclude),
            },
        }


# A module has one such scale. Engines load it with and without a dim:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/parameter.py#L294-L296
def _scalar(rows: int, columns: int) -> tuple[Shape, ...]:
    return (), (1,)


_INPUT_SCALE = FormatTensor(("F32",), _scalar, is_needed=False)


class Nvfp4(StoredFormat):
    """Groups of sixteen e2m1 values that share an e4m3 scale; a value is e2m1 * (weight_scale * weight_scale_2)."""

    name = "NVFP4"
    title = "ModelOpt's NVFP4"
    form = "nvfp4"
    scale_2 = "weight_scale_2"
    inputs = INPUT_SCALE
    mark = scale_2
    columns = 2
    group = 16
    largest = E2M1_MAX * E4M3_MAX
    numbers: ClassVar = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": group}
    weight_only_name = "W4A16_NVFP4"
    # What `quant_algo` may say.
    algorithms = (name, weight_only_name)
    beside = (INPUT_SCALE, "k_scale", "v_scale")

    @cached_property
    def tensors(self) -> Mapping[str, FormatTensor]:
        return {
            # The low nibble of a byte holds the even column.
            self.values: FormatTensor(("U8",), lambda rows, columns: ((rows, columns // 2),), rows=1),
            self.scale: FormatTensor(("F8_E4M3",), lambda rows, columns: ((rows, ceil(columns / self.group)),), rows=1),
            self.scale_2: FormatTensor(("F32",), self.whole),
            self.inputs: FormatTensor(("F32",), self.whole, is_needed=False),
        }

    # The shapes of a scale of a whole module.
    whole = staticmethod(_scalar)

    def stored_scale(self, value: float) -> float:
        """Return how a scale of a whole module is stored; from the stored one, the scale."""
        return value

    def block_scales(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Return what each block's values are multiplied by, float32."""
        return stored[self.scale].float() * stored[self.scale_2]

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `StoredFormat.unpack`; float32."""
        packed, scale = stored[self.values], stored[self.scale]
        values = _pairs().to(packed.device)[packed.int()].view(*scale.shape, self.group)
        return values.mul_(self.block_scales(stored).unsqueeze(-1)).view(packed.shape[0], -1)

    @classmethod
    def from_config(cls, block: Mapping[str, Any], where: object) -> StoredFormat | None:
        if not str(block.get("quant_method")).startswith("modelopt"):
            return None
        algorithm = block.get("quant_algo")
        mixed = algorithm == NVFP4_MIXED.algorithm
        unread = NVFP4_MIXED.unread(block) if mixed else {} if algorithm in cls.algorithms else {"": algorithm}
        for module, said in unread.items():
            what = "states no quant_algo" if said is None else f"has the quant_algo {said!r}"
            raise SourceFormatUnknown(
                f"this ModelOpt checkpoint {what}" + (f" for {module}" if module else ""),
                where=where,
                fix=f"kconv reads {' and '.join((*cls.algorithms, FP8_PB_WO.name))}, the last beside NVFP4 only.",
            )
        return NVFP4_MIXED if mixed else NVFP4


@cache
def _pairs() -> Tensor:
    """Return both e2m1 values of each byte: [256, 2]."""
    import torch

    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    # As in ModelOpt, no zero is negative. Dtype and device are not the defaults of a model that is being loaded.
    e2m1 = torch.tensor([*sizes, 0.0, *(-size for size in sizes[1:])], dtype=torch.float32, device="cpu")
    return torch.stack([e2m1.repeat(16), e2m1.repeat_interleave(16)], dim=-1)


class Fp8(StoredFormat):
    """e4m3 values with one scale for the whole weight, or one for each row."""

    name = "FP8"
    title = "ModelOpt's FP8"
    largest = E4M3_MAX
    numbers: ClassVar = {"dynamic": False, "num_bits": 8, "type": "float"}

    @cached_property
    def tensors(self) -> Mapping[str, FormatTensor]:
        return {
            self.values: FormatTensor(("F8_E4M3",), lambda rows, columns: ((rows, columns),), rows=1),
            self.scale: FormatTensor(("F32",), lambda rows, columns: ((), (1,), (rows, 1), (rows,))),
            INPUT_SCALE: _INPUT_SCALE,
        }

    @property
    def split(self) -> str:
        return "with one scale, or one for each row,"

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `StoredFormat.unpack`; float32."""
        return stored[self.values].float() * stored[self.scale].float().reshape(-1, 1)


@dataclass(frozen=True)
class Fp8Blocks(StoredFormat):
    """DeepSeek's FP8: e4m3 values of which a block of rows and columns shares a scale, as in DeepSeek-V3.

    https://github.com/deepseek-ai/DeepSeek-V3/blob/06231633430c449a1f6a8c0b5a1d6f99860b8eb2/inference/kernel.py#L78-L81
    """

    height: int = 128
    width: int = 128

    name = title = "FP8 in blocks"
    form = "fp8"
    scale = "weight_scale_inv"
    mark = scale

    @cached_property
    def tensors(self) -> Mapping[str, FormatTensor]:
        def blocks(rows: int, columns: int) -> tuple[Shape, ...]:
            return ((ceil(rows / self.height), ceil(columns / self.width)),)

        return {
            self.values: FormatTensor(("F8_E4M3",), lambda rows, columns: ((rows, columns),), rows=1),
            # Engines copy it into a float32 parameter, whatever its dtype.
            self.scale: FormatTensor(("F32", "BF16"), blocks, rows=self.height),
        }

    @property
    def split(self) -> str:
        return f"in blocks of {[self.height, self.width]}"

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `StoredFormat.unpack`; the product in float32, rounded to bf16."""
        rows, columns = stored[self.values].shape
        tall = stored[self.scale].float().repeat_interleave(self.height, 0)[:rows]
        return stored[self.values].float().mul_(tall.repeat_interleave(self.width, 1)[:, :columns]).bfloat16()

    @classmethod
    def from_config(cls, block: Mapping[str, Any], where: object) -> StoredFormat | None:
        if block.get("quant_method") != "fp8":
            return None
        match block:
            case {"weight_block_size": [int(rows), int(columns)]} if rows > 0 and columns > 0:
                pass
            case _:
                raise SourceFormatUnknown(
                    f"this FP8 checkpoint has the weight_block_size {block.get('weight_block_size')!r}",
                    where=where,
                    fix="kconv reads FP8 in blocks, as used by Kimi-K2-Instruct and DeepSeek-V3.",
                )
        if block.get("fmt", "e4m3") != "e4m3":
            raise SourceFormatUnknown(f"this FP8 checkpoint is {block['fmt']!r}", where=where, fix="kconv reads e4m3.")
        return cls(rows, columns)


@dataclass(frozen=True)
class Fp8PbWo(Fp8Blocks):
    """ModelOpt's FP8 in blocks: DeepSeek's numbers, with scales of another name and of four dims.

    Engines round the inputs as they come.
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L2214-L2255
    """

    name = "FP8_PB_WO"
    title = "ModelOpt's FP8 in blocks"
    form = "fp8-blocks"
    largest = E4M3_MAX
    scale = StoredFormat.scale
    mark = scale

    @cached_property
    def tensors(self) -> Mapping[str, FormatTensor]:
        def blocks(rows: int, columns: int) -> tuple[Shape, ...]:
            return ((ceil(rows / self.height), 1, ceil(columns / self.width), 1),)

        return {**super().tensors, self.scale: FormatTensor(("F32",), blocks, rows=self.height)}

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `Fp8Blocks.unpack`."""
        return super().unpack({**stored, self.scale: stored[self.scale][:, 0, :, 0]})

    def fits(self, columns: int) -> bool:
        """Return whether vLLM takes a weight of so many columns."""
        return columns % self.width == 0


@dataclass(frozen=True)
class Int4(StoredFormat):
    """compressed-tensors' pack-quantized INT4, as in Kimi-K2-Thinking: a value is (nibble - 8) * scale.

    https://github.com/vllm-project/compressed-tensors/blob/0.17.0/src/compressed_tensors/compressors/pack_quantized/base.py

    Attributes:
        groups: how many columns may share a scale: the group_size of each of the config's groups.
    """

    groups: tuple[int, ...] = (32,)

    name = "INT4"
    title = "compressed-tensors pack-quantized INT4 in groups"
    form = "int4"
    values = "weight_packed"
    mark = values
    extent = "weight_shape"
    columns = 8
    # What a config group's `weights` must state; an absent key has compressed-tensors' default.
    demands: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "num_bits": (4,),
        "type": ("int",),
        "symmetric": (True,),
        "strategy": ("group",),
        "dynamic": (False,),
        "actorder": (None, False),
        "block_structure": (None,),
    }

    @cached_property
    def tensors(self) -> Mapping[str, FormatTensor]:
        def scales(rows: int, columns: int) -> tuple[Shape, ...]:
            sizes = [size for size in self.groups if columns % size == 0] or self.groups
            return tuple((rows, ceil(columns / size)) for size in sizes)

        return {
            # The lowest four bits hold the first of eight columns; each is stored as its value plus 8.
            self.values: FormatTensor(("I32",), lambda rows, columns: ((rows, ceil(columns / self.columns)),), rows=1),
            self.scale: FormatTensor(("BF16", "F16", "F32"), scales, rows=1),
            self.extent: FormatTensor(("I64", "I32"), lambda rows, columns: ((2,),)),
        }

    @property
    def split(self) -> str:
        return f"in groups of {' or '.join(map(str, self.groups))}"

    def fits(self, columns: int) -> bool:
        return any(columns % size == 0 for size in self.groups)

    def dtype(self, parts: Mapping[str, TensorInfo]) -> str:
        """Return the scales' dtype, to which the product is rounded."""
        return parts[self.scale].dtype

    def group_of(self, parts: Mapping[str, TensorInfo]) -> int:
        """Return how many columns of a weight share a scale."""
        return self.shape(parts)[1] // parts[self.scale].shape[1]

    def check_values(self, parts: Mapping[str, TensorInfo], whole: Mapping[str, Tensor]) -> None:
        stated, shape = tuple(cast(list[int], whole[self.extent].flatten().tolist())), self.shape(parts)
        if stated != shape:
            raise QuantizedWeightInvalid(
                f"{parts[self.extent].name} says {list(stated)}, but the packed values are {list(shape)}",
                where=parts[self.extent].file,
                fix="Fetch the shard again; compare its sha256 with the publisher's.",
            )

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `StoredFormat.unpack`; in the scale's dtype, to which the product is rounded once."""
        import torch

        # Little-endian: the low nibble of each byte holds the even column.
        halves, scale = stored[self.values].view(torch.uint8), stored[self.scale]
        values = torch.empty(halves.shape[0], halves.shape[1], 2, dtype=torch.int8)
        torch.bitwise_and(halves, 15, out=values[:, :, 0].view(torch.uint8))
        torch.bitwise_right_shift(halves, 4, out=values[:, :, 1].view(torch.uint8))
        grouped = values.sub_(8).to(scale.dtype).view(*scale.shape, -1)
        return grouped.mul_(scale.unsqueeze(-1)).view(halves.shape[0], -1)

    @classmethod
    def from_config(cls, block: Mapping[str, Any], where: object) -> StoredFormat | None:
        if (block.get("quant_method"), block.get("format")) != ("compressed-tensors", "pack-quantized"):
            return None

        def unknown(what: str) -> SourceFormatUnknown:
            return SourceFormatUnknown(
                f"this compressed-tensors checkpoint cannot be read: {what}",
                where=where,
                fix="kconv reads pack-quantized symmetric INT4 in groups, as used by Kimi-K2-Thinking, K2.5 and K2.6.",
            )

        groups: Json = block.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise unknown("its config_groups are missing")
        sizes: dict[int, None] = {}
        group: Json
        for name, group in groups.items():
            weights: Json = group.get("weights") if isinstance(group, dict) else None
            if not isinstance(weights, dict):
                raise unknown(f"{name} has no weights")
            for key, allowed in cls.demands.items():
                if key in weights and weights[key] not in allowed:
                    raise unknown(f"{name} has {key} {weights[key]!r}, but kconv reads {allowed[0]!r}")
            if weights.get("num_bits") != 4 or weights.get("strategy") != "group":
                raise unknown(f"{name} does not state 4 bits in groups")
            size = weights.get("group_size")
            # compressed-tensors refuses groups without a size; vLLM sizes the scales' parameter by it:
            # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py#L147-L159
            if not isinstance(size, int) or size < 1:
                raise unknown(f"{name} has the group_size {size!r}")
            sizes[size] = None
        return cls(tuple(sizes))


class Nvfp4Packed(Nvfp4):
    """compressed-tensors' form of NVFP4: the same values and block scales, with reciprocals of a module's scales.

    https://github.com/vllm-project/compressed-tensors/blob/0.17.0/src/compressed_tensors/entrypoints/convert/converters/modelopt_nvfp4.py
    """

    title = "compressed-tensors nvfp4-pack-quantized"
    form = "nvfp4-pack-quantized"
    method = "compressed-tensors"
    values = Int4.values
    scale_2 = "weight_global_scale"
    inputs = "input_global_scale"
    mark = scale_2
    # compressed-tensors' own QuantizationArgs for weights, and what it states beside them for inputs.
    numbers: ClassVar = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": Nvfp4.group,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": "torch.float8_e4m3fn",
    }
    of_inputs: ClassVar = numbers | {"dynamic": "local", "observer": "static_minmax"}
    # What a config group's `weights` must state.
    demands = ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic")
    beside = (inputs, "k_scale", "v_scale")

    @staticmethod
    def whole(rows: int, columns: int) -> tuple[Shape, ...]:
        """See `Nvfp4.whole`; compressed-tensors and transformers build parameters with a dim."""
        return (1,), ()

    def stored_scale(self, value: float) -> float:
        """See `Nvfp4.stored_scale`; the reciprocal, in float32 where it is stored."""
        return 1.0 / value

    def block_scales(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `Nvfp4.block_scales`; a quotient, as compressed-tensors computes it."""
        return stored[self.scale].float() / stored[self.scale_2]

    def quantization_config(self, exclude: Sequence[str], *, weight_only: bool = False) -> dict[str, Any]:
        """Return config.json's `quantization_config` as compressed-tensors writes it; see `StoredFormat`.

        A pattern in `exclude`, which ends in `*`, becomes a regular expression.
        """
        ignore = [f"re:.*{re.escape(entry[:-1])}.*" if entry.endswith("*") else entry for entry in exclude]
        inputs = None if weight_only else dict(self.of_inputs)
        group = {"format": self.form, "input_activations": inputs, "output_activations": None, "targets": ["Linear"]}
        return {
            "config_groups": {"group_0": {**group, "weights": dict(self.numbers)}},
            "format": self.form,
            "ignore": ignore,
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }

    @classmethod
    def from_config(cls, block: Mapping[str, Any], where: object) -> StoredFormat | None:
        if (block.get("quant_method"), block.get("format")) != ("compressed-tensors", cls.form):
            return None
        groups: Json = block.get("config_groups")
        group: Json
        for name, group in groups.items() if isinstance(groups, dict) else ():
            weights: Json = group.get("weights") if isinstance(group, dict) else None
            stated: dict[str, Json] = (
                {key: weights.get(key) for key in cls.demands} if isinstance(weights, dict) else {}
            )
            if stated != {key: cls.numbers[key] for key in cls.demands}:
                raise SourceFormatUnknown(
                    f"{name} of this {cls.form} checkpoint has the weights {weights!r}, which are not NVFP4",
                    where=where,
                    fix="kconv reads e2m1 in groups of 16 with one scale for the whole tensor.",
                )
        return NVFP4_PACKED


class Mxfp4(StoredFormat):
    """compressed-tensors' MXFP4, as in Kimi-K3: groups of 32 e2m1 values that share a power of two, stored plus 127.

    https://github.com/vllm-project/compressed-tensors/blob/0.17.0/src/compressed_tensors/compressors/mx_utils.py
    """

    name = "MXFP4"
    title = "compressed-tensors mxfp4-pack-quantized"
    form = "mxfp4-pack-quantized"
    values = Int4.values
    mark = values
    columns = 2
    group = 32
    bias = 127

    @cached_property
    def tensors(self) -> Mapping[str, FormatTensor]:
        return {
            # The low nibble of a byte holds the even column.
            self.values: FormatTensor(("U8",), lambda rows, columns: ((rows, columns // 2),), rows=1),
            self.scale: FormatTensor(("U8",), lambda rows, columns: ((rows, ceil(columns / self.group)),), rows=1),
        }

    def unpack(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `StoredFormat.unpack`; bf16, which holds each product exactly."""
        import torch

        stored = self.as_bytes(stored)
        packed, exponents = stored[self.values], stored[self.scale].int() - self.bias
        values = _pairs()[packed.int()].view(*exponents.shape, self.group)
        return torch.ldexp(values, exponents.unsqueeze(-1)).view(packed.shape[0], -1).bfloat16()

    def as_bytes(self, stored: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return stored tensors as their bytes, uint8."""
        return stored

    @classmethod
    def from_config(cls, block: Mapping[str, Any], where: object) -> StoredFormat | None:
        groups: Json = block.get("config_groups")
        group: Json
        forms: set[Json] = {block.get("format")}
        # Kimi-K3 states it in each group.
        for group in groups.values() if isinstance(groups, dict) else ():
            forms.add(group.get("format", block.get("format")) if isinstance(group, dict) else None)
        if block.get("quant_method") != "compressed-tensors" or cls.form not in forms:
            return None
        if forms - {cls.form, None}:
            raise SourceFormatUnknown(
                f"this compressed-tensors checkpoint is in {' and '.join(sorted(map(str, forms)))}",
                where=where,
                fix=f"kconv reads {cls.form} alone.",
            )
        return MXFP4


class Mxfp4AmidFp8(Mxfp4):
    """DeepSeek-V4's MXFP4 of the routed experts, under names of its own.

    Its config states the FP8 of all other matrices; that the experts are MXFP4 `expert_dtype` says.
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/models/deepseek_v4/quant_config.py#L176-L197
    """

    title = "DeepSeek-V4's MXFP4 experts amid FP8"
    form = "mxfp4-amid-fp8"
    values = StoredFormat.values
    scale = "scale"
    mark = scale
    amid_fp8 = True

    @cached_property
    def tensors(self) -> Mapping[str, FormatTensor]:
        own = super().tensors
        return {
            self.values: replace(own[self.values], dtypes=("I8",)),
            self.scale: replace(own[self.scale], dtypes=("F8_E8M0",)),
        }

    def as_bytes(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Mxfp4.as_bytes`."""
        import torch

        return {suffix: tensor.view(torch.uint8) for suffix, tensor in stored.items()}

    @classmethod
    def from_config(cls, block: Mapping[str, Any], where: object) -> StoredFormat | None:
        return None


class Nvfp4AmidFp8(Nvfp4):
    """ModelOpt's NVFP4 of the same experts, beside the source's FP8; its config says so in `moe_quant_algo`."""

    title = "ModelOpt's NVFP4 experts amid DeepSeek-V4's FP8"
    amid_fp8 = True
    key = "moe_quant_algo"
    # As NVIDIA publishes it; engines take what is not a routed expert as the source's FP8.
    excludes = ("*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*")

    @classmethod
    def is_stated(cls, block: Mapping[str, Any]) -> bool:
        """Return whether a `quantization_config` states it.

        https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/configs/model_config.py#L776-L789
        """
        return block.get("quant_method") == "fp8" and Nvfp4Mixed.meant(block.get(cls.key)) == cls.name

    def described(self, source: Mapping[str, Any], layers: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return both config blocks: that of the source and NVFP4's, of the experts of some layers, by their names."""
        side = self.hf_quant_config(self.excludes)
        said = side["quantization"] | {
            "quant_algo": Nvfp4Mixed.algorithm,
            Nvfp4Mixed.key: {name: {"quant_algo": self.name, "group_size": self.group} for name in layers},
        }
        own = self.quantization_config(self.excludes)
        stated = {key: own[key] for key in ("config_groups", "ignore", "producer")}
        moe = {key: value for key, value in said.items() if key != "exclude_modules"}
        return {**source, self.key: self.name, **stated, **moe}, {**side, "quantization": said}


class Nvfp4Mixed(Nvfp4):
    """ModelOpt's mixed form: its config names each quantized module, NVFP4 or FP8 in blocks, with its algorithm."""

    title = "ModelOpt's NVFP4 beside FP8 in blocks"
    algorithm = "MIXED_PRECISION"
    # Where each module's algorithm stands.
    key = "quantized_layers"

    @classmethod
    def stated(cls, block: Mapping[str, Any]) -> dict[str, Json]:
        """Return the algorithm that a config block states for each module, as it stands there; None without one."""
        layers: Json = block.get(cls.key)
        said: Json
        found: dict[str, Json] = {}
        for name, said in layers.items() if isinstance(layers, dict) else ():
            found[name] = said.get("quant_algo") if isinstance(said, dict) else None
        return found

    @staticmethod
    def meant(said: object) -> str:
        """Return a stated algorithm as engines compare it: ModelOpt writes FP8's in small letters."""
        return str(said).upper()

    @classmethod
    def unread(cls, block: Mapping[str, Any]) -> dict[str, Json]:
        """Return those of `stated` that kconv does not read."""
        known = (*cls.algorithms, FP8_PB_WO.name)
        return {name: said for name, said in cls.stated(block).items() if cls.meant(said) not in known}

    def layers(self, nvfp4: Iterable[str], fp8: Iterable[str], *, weight_only: bool = False) -> dict[str, Any]:
        """Return ModelOpt's description of each quantized module."""
        algorithm = self.weight_only_name if weight_only else self.name
        described: dict[str, Any] = {name: {"quant_algo": FP8_PB_WO.name.lower()} for name in fp8}
        return described | {name: {"quant_algo": algorithm, "group_size": self.group} for name in nvfp4}

    def described(
        self, config: Mapping[str, Any], side: Mapping[str, Any], layers: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return NVFP4's two config blocks with the description of each module, as ModelOpt writes them."""
        numbers = {key: value for key, value in config["config_groups"]["group_0"].items() if key != "targets"}
        fp8 = [name for name, said in layers.items() if "group_size" not in said]
        groups = [
            {"quant_algo": FP8_PB_WO.name.lower(), "targets": sorted(fp8)},
            {
                **{key: value for key, value in numbers.items() if value is not None},
                "targets": sorted(layers.keys() - set(fp8)),
            },
        ]
        named = {"quant_algo": self.algorithm, self.key: dict(layers)}
        quantization = {key: value for key, value in side["quantization"].items() if key != "group_size"}
        return (
            {**config, "config_groups": {f"group_{i}": group for i, group in enumerate(groups)}, **named},
            {**side, "quantization": {**quantization, **named}},
        )


NVFP4, NVFP4_PACKED, NVFP4_MIXED, MXFP4 = Nvfp4(), Nvfp4Packed(), Nvfp4Mixed(), Mxfp4()
MXFP4_AMID_FP8, NVFP4_AMID_FP8 = Mxfp4AmidFp8(), Nvfp4AmidFp8()
FP8, FP8_BLOCKS, FP8_PB_WO = Fp8(), Fp8Blocks(), Fp8PbWo()
# The formats in which a head's linear layer is read; one that lacks another's mark comes after it.
OF_HEADS: tuple[StoredFormat, ...] = (NVFP4, FP8_BLOCKS, FP8)
# Suffixes of the scales that a head's linear layer may have.
HEAD_SCALES = tuple(dict.fromkeys(suffix for format_ in OF_HEADS for suffix in format_.scales))
# The formats in which a target is read.
OF_TARGETS = (Int4, Fp8Blocks, Nvfp4, Nvfp4Packed, Mxfp4)
# Suffixes of the tensors that belong to a quantized weight and determine its numbers, but are not a module's "weight";
# those of asymmetric and of reordered INT4 too, which kconv does not read.
_FORMATS = (*OF_HEADS, Int4(), NVFP4_PACKED)
ONLY_QUANTIZED = (
    {suffix for format_ in _FORMATS for suffix, tensor in format_.tensors.items() if tensor.is_needed}
    | {"weight_zero_point", "weight_g_idx"}
) - {StoredFormat.values}


def marked_format(suffixes: Collection[str]) -> StoredFormat:
    """Return the format of a head's linear layer, from the suffixes of its scales."""
    return next(format_ for format_ in OF_HEADS if format_.mark in suffixes)


def stated_format(block: Mapping[str, Any], where: object) -> StoredFormat | None:
    """Return the format of a target's `quantization_config`; None if kconv reads no format of its `quant_method`.

    Raises:
        SourceFormatUnknown: kconv reads formats of that method, but not this one.
    """
    return next(filter(None, (format_.from_config(block, where) for format_ in OF_TARGETS)), None)
