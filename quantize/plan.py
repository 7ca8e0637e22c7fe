"""Plan a quantization from headers alone."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any

from ..checkpoint.folder import Checkpoint
from ..checkpoint.formats import (
    FP8_PB_WO,
    FUSED,
    MXFP4,
    MXFP4_AMID_FP8,
    NVFP4,
    Mxfp4,
    Nvfp4,
    fused_group,
    one_form_group,
)
from ..checkpoint.header import TensorInfo, byte_size
from ..errors import RecipeInvalid, TargetInvalid, TensorShape
from ..targets.config import TargetConfig
from ..targets.mtp import mtp_faults, mtp_root, mtp_roots
from ..targets.weights import Plain, Quantized, StoredWeight, read_format, stored_weights
from .calibration import InputScales
from .mxfp4_to_nvfp4 import is_mxfp4
from .recipe import Recipe, WeightScales

# Approximate bytes of an output shard. Ranks share whole files, so there should be many more files than ranks; and each
# is read twice, the second time from the page cache, which must hold those of all ranks. 1 T parameters make 550.
SHARD = 1 << 30
# Names of modules with a two-dim weight that are not linear layers.
TABLES = ("embed_tokens",)
# Names in a message.
SHOWN = 3
# Titles of a model's parts, by parts of their tensors' names.
TITLES = {
    ".mlp.experts.": "routed experts",
    ".ffn.experts.": "routed experts",
    ".ffn.shared_experts.": "shared experts",
    ".ffn.gate.": "routers",
    ".attn.": "attention",
    ".mlp.shared_experts.": "shared experts",
    ".mlp.gate.": "routers",
    ".mlp.": "dense MLP",
    ".self_attn.": "attention",
    "norm": "norms",
    "embed_tokens": "embedding",
    "lm_head": "lm_head",
    "vision_tower": "vision",
    "mm_projector": "vision",
}
MTP = "MTP"


@dataclass(frozen=True)
class QuantizePlan:
    """A planned quantization.

    Attributes:
        form: how its weights are stored, as in `target.source_formats`.
        inputs: the origin of the input scales.
        units: the output's files, in order.
        linear: names on disk of every linear layer, quantized or not.
    """

    source: Checkpoint
    config: TargetConfig
    form: str
    recipe: Recipe
    inputs: InputScales
    units: tuple[Unit, ...]
    linear: tuple[str, ...]

    @cached_property
    def mtp(self) -> tuple[str, ...]:
        """The names of its MTP layers; see `mtp_root`."""
        return tuple(mtp_roots((name for unit in self.units for name, _, _ in unit.outputs()), self.config.layers))

    @property
    def modules(self) -> list[Module]:
        """Every module that becomes NVFP4."""
        return [module for unit in self.units for module in unit.modules]

    @property
    def rounded(self) -> list[Rounded]:
        """Every module that becomes FP8."""
        return [module for unit in self.units for module in unit.rounded]

    @property
    def bytes_in(self) -> int:
        """Bytes of the source's tensors."""
        return sum(unit.bytes_in for unit in self.units)

    @property
    def bytes_out(self) -> int:
        """Bytes of the output's tensors."""
        return sum(unit.bytes_out for unit in self.units)

    @property
    def scales(self) -> str:
        """Where the input scales come from, in words."""
        return "none, activations are not quantized" if self.recipe.weight_only else self.inputs.description

    @property
    def weight_scales(self) -> str:
        """How block scales are chosen, in a word."""
        return "cast" if self.form in (MXFP4.form, MXFP4_AMID_FP8.form) else self.recipe.weight_scales

    def parts(self) -> dict[tuple[str, str], tuple[int, int, int]]:
        """Return, by part of the model and action: its tensors, bytes before, bytes after."""
        found: dict[tuple[str, str], list[int]] = {}

        def add(name: str, action: str, before: int, after: int) -> None:
            part = next((part for mark, part in TITLES.items() if mark in name), "other")
            part = MTP if mtp_root(name, self.config.layers) else part
            row = found.setdefault((part, action), [0, 0, 0])
            for place, count in enumerate((1, before, after)):
                row[place] += count

        for unit in self.units:
            for module in unit.modules:
                size = sum(byte_size(*kind) for kind in module.outputs.values())
                add(module.name, f"NVFP4 from {module.weight.form}", sum(i.size for i in module.weight.infos), size)
            for module in unit.rounded:
                size = sum(byte_size(*kind) for kind in module.outputs.values())
                add(module.name, f"FP8 from {module.weight.form}", sum(i.size for i in module.weight.infos), size)
            for weight in unit.dequantized:
                before, after = sum(i.size for i in weight.infos), byte_size(weight.dtype, weight.shape)
                add(weight.name, f"{weight.dtype} from {weight.form}", before, after)
            for info in unit.carried:
                add(info.name, "unchanged", info.size, info.size)
        return {key: (row[0], row[1], row[2]) for key, row in sorted(found.items())}

    def to_json(self, files: int | None) -> dict[str, Any]:
        """Return it as plain values, with the number of the output's files if it is known."""
        return {
            "source": self.source.source,
            "form": self.form,
            "recipe": self.recipe.model_dump(mode="json"),
            "input_scale": self.scales,
            "modules": len(self.modules),
            "fp8_modules": len(self.rounded),
            "files": files,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }

    @property
    def key(self) -> str:
        """Sixteen hex digits over everything that decides the output: a restart resumes only its own work."""
        facts = {
            "recipe": self.recipe.model_dump(),
            "config": self.source.config,
            "tensors": [(i.name, i.dtype, i.shape, i.file.name, i.begin) for i in self.source.tensors.values()],
            "stamps": [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in self.source.files],
            "inputs": self.inputs.description,
            "scales": [module.input_scale for module in self.modules],
            # Another split has files of the same names.
            "files": [(unit.file, [name for name, _, _ in unit.outputs()]) for unit in self.units],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def plan_quantize(
    source: Checkpoint, config: TargetConfig, recipe: Recipe, inputs: InputScales, *, shard: int = SHARD
) -> QuantizePlan:
    """Decide what becomes of each tensor; an output file has about `shard` bytes."""
    _refuse_gpt_oss(source)
    format_ = read_format(source, config)
    if isinstance(format_, Nvfp4):
        raise RecipeInvalid(
            f"{source.folder.name} is already NVFP4", where=source.folder, fix="Pass the target that it was made from."
        )
    if isinstance(format_, Mxfp4) and recipe.weight_scales != "max":
        raise RecipeInvalid(
            f"{source.folder.name} is MXFP4, which is cast exactly: there are no scales to search for",
            where=f"weight_scales in the recipe {recipe.name}",
            fix="Remove weight_scales.",
        )
    stored = stored_weights(source, config)
    for where, what in mtp_faults(config.text, stored):
        raise TargetInvalid(
            f"{where} {what}",
            where=source.folder,
            fix="Fetch the target's MTP layers, or set the key that promises them to 0 in config.json.",
        )
    _refuse_fused_experts(stored, config)
    linear = {n.removesuffix(".weight"): w for n, w in stored.items() if _is_linear(n, w)}
    chosen = _choose(linear, config, recipe)
    for weight in chosen.values():
        _check_dims(weight)
    if format_ == MXFP4_AMID_FP8:
        _check_amid_fp8(stored, chosen, config, recipe)
        stored = {one.name: one for weight in stored.values() for one in _as_stored(weight, chosen)}
    rounded = {name: Rounded(name, weight) for name, weight in _choose_rounded(linear, config, recipe).items()}
    _check_forms(linear, chosen, rounded, recipe)
    _check_blocks(rounded)
    scales = {} if recipe.weight_only else inputs.scales(chosen)
    modules = {name: Module(name, weight, scales.get(name), recipe.stored) for name, weight in chosen.items()}
    form = format_.form if format_ else Plain.form
    units = cut_units(stored, modules, shard, recipe.weight_scales, rounded)
    return QuantizePlan(source, config, form, recipe, inputs, units, tuple(linear))


# gpt-oss's experts, which ModelOpt exports in NVFP4 as `experts.gate_up_proj` with `experts.gate_up_proj_weight_scale`:
# vLLM has no parameter for that name, and skips it; TensorRT-LLM takes gate_up_proj for bf16, and SGLang as vLLM.
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/gpt_oss.py#L1417-L1444
# https://github.com/NVIDIA/TensorRT-LLM/blob/050b6cb92871a4ed73486c5e5a573d4198d1a6d9/tensorrt_llm/_torch/models/modeling_gpt_oss.py
GPT_OSS = (
    "gpt-oss's experts, all of a layer in one tensor; no engine reads them in NVFP4 as ModelOpt exports them: vLLM"
    " skips their scales",
    "Serve it in its own MXFP4, which vLLM, SGLang and TensorRT-LLM read.",
)


def _refuse_gpt_oss(source: Checkpoint) -> None:
    for name, info in source.tensors.items():
        if name.endswith("_proj_blocks"):
            raise TargetInvalid(f"{name} is a part of {GPT_OSS[0]}", where=info.file, fix=GPT_OSS[1])


def _check_amid_fp8(
    stored: Mapping[str, StoredWeight], chosen: Collection[str], config: TargetConfig, recipe: Recipe
) -> None:
    """Refuse what DeepSeek-V4's config cannot state: it has one form for all routed experts of the decoder."""
    experts = {
        name.removesuffix(".weight")
        for name, weight in stored.items()
        if is_mxfp4(weight) and not mtp_root(name, config.layers)
    }
    if experts != set(chosen) or recipe.fp8 or recipe.weight_only or recipe.stored != NVFP4:
        raise RecipeInvalid(
            "of DeepSeek-V4 all routed experts become NVFP4, and nothing else, with activations and in ModelOpt's form",
            where=f"the recipe {recipe.name}",
            fix="Use the recipe nvfp4-experts.",
        )


def _as_stored(weight: StoredWeight, chosen: Collection[str]) -> Iterator[StoredWeight]:
    """Yield a weight that stays quantized as the tensors that hold it."""
    if isinstance(weight, Quantized) and weight.name.removesuffix(".weight") not in chosen:
        yield from map(Plain, weight.infos)
    else:
        yield weight


def _refuse_fused_experts(stored: dict[str, StoredWeight], config: TargetConfig) -> None:
    """Refuse experts that share tensors, as gpt-oss and Llama 4 store them: engines want each one's packed apart."""
    fused = next((w for n, w in stored.items() if "experts" in n.split(".") and len(w.shape) > 2), None)
    if fused is not None:
        what = "all experts of a layer in one tensor, which kconv cannot pack"
        fix = "Use ModelOpt's own scripts, which pack each expert by itself."
        what, fix = GPT_OSS if config.model_type == "gpt_oss" else (what, fix)
        raise TargetInvalid(f"{fused.name} is {list(fused.shape)}, {what}", where=fused.infos[0].file, fix=fix)


def _is_linear(name: str, weight: StoredWeight) -> bool:
    return name.endswith(".weight") and len(weight.shape) == 2 and not name.split(".")[-2].endswith(TABLES)


def _choose(linear: dict[str, StoredWeight], config: TargetConfig, recipe: Recipe) -> dict[str, StoredWeight]:
    chosen: dict[str, StoredWeight] = {}
    for name, weight in linear.items():
        inner, root = _in_recipes(name, config), mtp_root(name, config.layers).removeprefix(config.prefix)
        # SGLang reads an MTP layer unquantized only.
        own = name.startswith(config.prefix) and (LAYER.fullmatch(inner) or root)
        if own and recipe.takes(inner, below=root):
            if root and not LAYER.fullmatch(inner):
                raise RecipeInvalid(
                    f"{inner} cannot be NVFP4: vLLM drops each exclude of a module below {root}",
                    where=f"quantize in the recipe {recipe.name}",
                    fix=f"Remove the patterns that start with {root}.; its MTP layers stay as they are.",
                )
            chosen[name] = weight
    inner = [_in_recipes(name, config) for name in chosen]
    for pattern in recipe.quantize:
        alone = recipe.model_copy(update={"quantize": (pattern,)})
        if not any(alone.takes(name) for name in inner):
            raise _no_match(pattern, "quantize", linear, config, recipe)
    named = [_in_recipes(name, config) for name in linear]
    for pattern in recipe.keep:
        # Recipes for any target keep this, though only MLA has it.
        own = pattern.endswith(".kv_b_proj")
        if not own and not any(recipe.model_copy(update={"keep": (pattern,)}).keeps(name) for name in named):
            raise _no_match(pattern, "keep", linear, config, recipe)
    return chosen


# DeepSeek-V4's names for what recipes call as Kimi-K2's files do.
OF_DEEPSEEK_V4 = {
    "layers": "model.layers", "ffn": "mlp", "attn": "self_attn",
    "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj",
}  # fmt: skip


def _in_recipes(name: str, config: TargetConfig) -> str:
    """Return the name that recipes have for a module, by its name on disk."""
    called = OF_DEEPSEEK_V4 if config.model_type == "deepseek_v4" else {}
    return ".".join(called.get(part, part) for part in name.removeprefix(config.prefix).split("."))


def _choose_rounded(linear: dict[str, StoredWeight], config: TargetConfig, recipe: Recipe) -> dict[str, StoredWeight]:
    inner = {
        short: name
        for name in linear
        if name.startswith(config.prefix)
        and LAYER.fullmatch(short := _in_recipes(name, config))
        and not mtp_root(name, config.layers)
    }
    found = {name: linear[name] for short, name in inner.items() if recipe.rounds(short)}
    for pattern in recipe.fp8:
        if not any(recipe.model_copy(update={"fp8": (pattern,)}).rounds(name) for name in inner):
            raise _no_match(pattern, "fp8", linear, config, recipe)
    return found


def _check_forms(linear: Iterable[str], chosen: Collection[str], rounded: Collection[str], recipe: Recipe) -> None:
    """Refuse modules that engines build as one layer and that would not all have one form; no such layer exists."""
    forms = dict.fromkeys(linear, "unquantized") | dict.fromkeys(chosen, NVFP4.name) | dict.fromkeys(rounded, "FP8")
    groups = {one_form_group(name): name for name in (*rounded, *chosen)}
    for name, form in forms.items():
        other = groups.get(one_form_group(name), name)
        its = NVFP4.name if other in chosen else forms[other]
        if form != its:
            both = f"would be {its} and {form}"
            raise RecipeInvalid(
                f"{name} {both}" if other == name else f"{other} and {name}, one layer in engines, {both}",
                where=f"quantize, fp8 and keep in the recipe {recipe.name}",
                fix="Let one of quantize and fp8 match all modules of such a layer, or neither match any.",
            )
    for name in chosen:
        if name.endswith(".kv_b_proj"):
            raise RecipeInvalid(
                f"{name} would be {NVFP4.name}, but TensorRT-LLM and SGLang split it per head and need it unquantized",
                where=f"quantize and keep in the recipe {recipe.name}",
                fix='Add "*.kv_b_proj" to keep.',
            )


def _no_match(
    pattern: str, key: str, linear: dict[str, StoredWeight], config: TargetConfig, recipe: Recipe
) -> RecipeInvalid:
    return RecipeInvalid(
        f"the pattern {pattern!r} matches no linear module of this target",
        where=f"{key} in the recipe {recipe.name}",
        fix=f"Correct the pattern. {_some_names(linear, config, pattern)}",
    )


def _some_names(linear: dict[str, StoredWeight], config: TargetConfig, pattern: str) -> str:
    """Return a sentence with names of modules, those that are most like a pattern first."""
    names = [_in_recipes(name, config) for name in linear]
    close = get_close_matches(pattern, names, n=SHOWN, cutoff=0.0)
    return f"Modules of this target have names like {', '.join(close)}." if close else "The target has none."


def _check_dims(weight: StoredWeight) -> None:
    if not NVFP4.fits(weight.shape[1]) or not prod(weight.shape):
        raise TensorShape(
            f"{weight.name} is {list(weight.shape)}, but {weight.shape[1]} columns do not form groups of {NVFP4.group}",
            where=weight.infos[0].file,
            fix="Keep this module out of the recipe (keep: ...).",
        )


def _check_blocks(rounded: Mapping[str, Rounded]) -> None:
    """Refuse what vLLM cannot split into blocks: in a fused layer, a block would reach into the next part."""
    for name, module in rounded.items():
        rows, columns = module.weight.shape
        parent, _, last = name.rpartition(".")
        later = next((members[members.index(last) + 1 :] for members in FUSED if last in members), ())
        cut = rows % FP8_PB_WO.height and any(f"{parent}.{member}" in rounded for member in later)
        if not FP8_PB_WO.fits(columns) or cut or not rows * columns:
            raise TensorShape(
                f"{module.weight.name} is {[rows, columns]}, which vLLM cannot read {FP8_PB_WO.split}",
                where=module.weight.infos[0].file,
                fix="Keep this module out of the recipe (keep: ...), with those that engines fuse with it.",
            )


@dataclass(frozen=True)
class Rounded:
    """A linear layer that becomes FP8 in blocks; its name is that on disk."""

    name: str
    weight: StoredWeight

    @cached_property
    def outputs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each of its output tensors, by name."""
        return FP8_PB_WO.written(self.name, self.weight.shape)


@dataclass(frozen=True)
class Module:
    """A linear layer that becomes NVFP4.

    Attributes:
        name: on disk, e.g. "model.layers.1.mlp.experts.0.up_proj".
        input_scale: of its activations; None if they stay bf16.
        format: whose names its tensors have.
    """

    name: str
    weight: StoredWeight
    input_scale: float | None
    format: Nvfp4 = NVFP4

    @cached_property
    def outputs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each of its output tensors, by name."""
        found = self.format.written(self.name, self.weight.shape)
        if self.input_scale is None:
            del found[f"{self.name}.{self.format.inputs}"]
        return found


@dataclass(frozen=True)
class FusedGroup:
    """Modules that an engine fuses and that share one weight_scale_2; usually one or two."""

    modules: tuple[Module, ...]
    weight_scales: WeightScales = "max"

    @property
    def mxfp4(self) -> tuple[Quantized, ...]:
        """The weights, if all are MXFP4, which is cast exactly; otherwise none."""
        found = tuple(module.weight for module in self.modules if is_mxfp4(module.weight))
        return found if len(found) == len(self.modules) else ()


@dataclass(frozen=True)
class Unit:
    """One file of the output, and its inputs.

    Attributes:
        dequantized: weights stored in a form that the output's config cannot combine with NVFP4; written dequantized.
        carried: tensors whose bytes stay unchanged.
    """

    file: str
    groups: tuple[FusedGroup, ...]
    rounded: tuple[Rounded, ...]
    dequantized: tuple[StoredWeight, ...]
    carried: tuple[TensorInfo, ...]

    @property
    def modules(self) -> tuple[Module, ...]:
        return tuple(module for group in self.groups for module in group.modules)

    @property
    def inputs(self) -> list[TensorInfo]:
        """Every tensor that it is made from."""
        weights = [*(module.weight for module in (*self.modules, *self.rounded)), *self.dequantized]
        return [*self.carried, *(info for weight in weights for info in weight.infos)]

    @property
    def bytes_in(self) -> int:
        return sum(info.size for info in self.inputs)

    @property
    def bytes_out(self) -> int:
        return sum(byte_size(dtype, shape) for _, dtype, shape in self.outputs())

    def outputs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype and shape of each of its tensors."""
        modules = (*self.modules, *self.rounded)
        packed = [(name, *kind) for module in modules for name, kind in module.outputs.items()]
        plain = [(weight.name, weight.dtype, weight.shape) for weight in self.dequantized]
        return [*packed, *plain, *((info.name, info.dtype, info.shape) for info in self.carried)]


@dataclass(frozen=True)
class _Piece:
    """What must be in one file: a fused group, one module that becomes FP8, or one tensor that is not quantized."""

    group: FusedGroup | None = None
    rounded: Rounded | None = None
    plain: StoredWeight | None = None

    @property
    def size(self) -> int:
        if self.plain is not None:
            return byte_size(self.plain.dtype, self.plain.shape)
        modules = self.group.modules if self.group else (self.rounded,) if self.rounded else ()
        return sum(byte_size(*kind) for module in modules for kind in module.outputs.values())


def cut_units(
    stored: dict[str, StoredWeight],
    modules: dict[str, Module],
    shard: int,
    weight_scales: WeightScales = "max",
    rounded: Mapping[str, Rounded] = MappingProxyType({}),
) -> tuple[Unit, ...]:
    """Split the output into files of about equal size, in the order of the source's files and their bytes."""
    groups = _fuse(modules, weight_scales)
    pieces: list[_Piece] = []
    done: set[str] = set()
    for weight in sorted(stored.values(), key=_place):
        module = weight.name.removesuffix(".weight")
        if module in rounded:
            pieces.append(_Piece(rounded=rounded[module]))
        elif module not in groups:
            pieces.append(_Piece(plain=weight))
        elif module not in done:
            pieces.append(_Piece(group=groups[module]))
            done |= {member.name for member in groups[module].modules}
    cut = _cut(pieces, shard)
    return tuple(_unit(f"model-{i:05d}-of-{len(cut):05d}.safetensors", part) for i, part in enumerate(cut, 1))


def _cut(pieces: Sequence[_Piece], shard: int) -> list[list[_Piece]]:
    """Split pieces into runs of about a shard's size; each goes where its middle falls."""
    total = sum(piece.size for piece in pieces)
    count = -(-total // shard)
    runs: dict[int, list[_Piece]] = {}
    before = 0
    for piece in pieces:
        middle = before + piece.size // 2
        runs.setdefault(middle * count // max(total, 1), []).append(piece)
        before += piece.size
    return list(runs.values())


def _place(weight: StoredWeight) -> tuple[str, int]:
    return weight.infos[0].file.name, weight.infos[0].begin


def _unit(file: str, pieces: Iterable[_Piece]) -> Unit:
    pieces = list(pieces)
    plain = [piece.plain for piece in pieces if piece.plain is not None]
    return Unit(
        file,
        tuple(piece.group for piece in pieces if piece.group is not None),
        tuple(piece.rounded for piece in pieces if piece.rounded is not None),
        tuple(weight for weight in plain if not isinstance(weight, Plain)),
        tuple(weight.info for weight in plain if isinstance(weight, Plain)),
    )


def _fuse(modules: dict[str, Module], weight_scales: WeightScales) -> dict[str, FusedGroup]:
    together: dict[str, list[Module]] = {}
    for name, module in modules.items():
        together.setdefault(fused_group(name), []).append(module)
    groups = [FusedGroup(tuple(members), weight_scales) for members in together.values()]
    return {module.name: group for group in groups for module in group.modules}


# The modules that an engine must treat as unquantized.
#
# vLLM matches each entry as a name, as a *part* of a name, and as a wildcard; TensorRT-LLM as a wildcard on the name
# and on each of its parents, and it also tests the bare `kv_b_proj`:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L187-L222
# So `model.layers.1*` would cover layer 10, and `*kv_b_proj` would make TensorRT-LLM look for FP8 scales. An entry here
# is the full name of one layer's module, ending in `*` if everything below it stays unquantized.

# The parts of a decoder layer that engines build separately, with the modules that each may contain.
PARTS = ("self_attn", "mlp.shared_experts", "mlp.experts", "mlp")
LAYER = re.compile(r"(?P<layer>.*model\.layers\.(?P<index>\d+))\.(?P<rest>.+)", re.DOTALL)
ROUTER = ".mlp.gate"
# Parts of a multimodal target that are not text.
OTHERS = ("mm_projector", "vision_tower")


def exclude_modules(linear: Iterable[str], quantized: Collection[str], mtp: Sequence[str] = ()) -> list[str]:
    """Return the entries for `exclude_modules` and `ignore` by layer; each covers unquantized modules only.

    `mtp` are the names of MTP layers. One that stays unquantized has one entry, as ModelOpt writes it, since engines
    build modules in it that no tensor is named after: `model.layers.61.head` is its shared_head.head, and vLLM drops
    entries that start with `mtp.`.
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_mtp.py#L66-L70
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/qwen3_next.py#L823
    """
    parts: dict[str, list[str]] = {}
    entries: dict[str, None] = {}
    plain = tuple(f"{root}." for root in mtp if not any(module.startswith(f"{root}.") for module in quantized))
    for module in sorted(linear, key=_order):
        if module.startswith(plain):
            continue
        found = LAYER.fullmatch(module)
        if found:
            part = next((p for p in PARTS if found["rest"].startswith(f"{p}.")), "")
            # The router is a separate module, which no engine looks up here.
            if not module.endswith(ROUTER):
                parts.setdefault(f"{found['layer']}.{part}" if part else module, []).append(module)
        else:
            entries[_root(module)] = None
    for part, modules in parts.items():
        kept = [module for module in modules if module not in quantized]
        if len(kept) == len(modules):
            entries[part if modules == [part] else f"{part}*"] = None
        else:
            entries |= dict.fromkeys(kept)
    for root in mtp:
        entries[f"{root}*" if f"{root}." in plain else f"{root}.head"] = None
    return list(entries)


def _root(module: str) -> str:
    """Return the entry for a module outside the decoder layers."""
    top = module.split(".")[0]
    return f"{top}*" if top in OTHERS else module


def _order(module: str) -> tuple[int, str]:
    found = LAYER.fullmatch(module)
    return (int(found["index"]) if found else -1, module)
