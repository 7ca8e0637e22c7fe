"""A target as rules see it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from typing import Any

from ...checkpoint.folder import read_json
from ...checkpoint.formats import (
    CONFIG_KEY,
    FP8_PB_WO,
    NVFP4,
    NVFP4_AMID_FP8,
    NVFP4_MIXED,
    NVFP4_PACKED,
    SIDE_FILE,
    Nvfp4,
    PartFault,
    experts_of,
)
from ...checkpoint.header import TensorInfo
from ...errors import KconvError
from ...targets.mtp import mtp_root, mtp_roots
from .subject import Subject

# The dtype of packed values.
VALUES = NVFP4.tensors[NVFP4.values].dtype
FLOATS = ("BF16", "F16", "F32")
# Wrapper prefixes that engines strip from the names of entries and modules.
PREFIXES = ("language_model.", "model.")
EXPERT = re.compile(r"\.experts\.\d+\.")
LAYER = re.compile(r"layers\.(\d+)\.")
# The same at the start of a name, for `bare`.
OWN_LAYER = re.compile("".join(f"(?:{re.escape(prefix)})?" for prefix in PREFIXES) + LAYER.pattern)


def bare(name: str) -> str:
    """Return the name of a module or an entry without a wrapper's prefixes."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


@dataclass(frozen=True)
class Excludes:
    """The entries of `ignore` or `exclude_modules`, as two engines read them.

    vLLM matches an entry as a name, as a part of a name and as a wildcard:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L187-L222
    TensorRT-LLM matches it as a wildcard on the name and on each of its parents.
    """

    entries: tuple[str, ...]

    def covering(self, module: str) -> str | None:
        """Return an entry that covers a module for either engine."""
        found = self._any.search(bare(module)) if self.entries else None
        return self.entries[int(str(found.lastgroup)[1:])] if found else None

    def is_wildcard_for(self, module: str) -> bool:
        """Return whether an entry covers a module for TensorRT-LLM."""
        return bool(self.entries) and any(self._whole.fullmatch(name) for name in (module, *_parents(module)))

    @property
    def invalid(self) -> Mapping[str, str]:
        """The entries at which vLLM stops, and what is wrong with each."""
        return {}

    @cached_property
    def _any(self) -> re.Pattern[str]:
        return re.compile("|".join(f"(?P<e{i}>{_reading(entry)})" for i, entry in enumerate(self.entries)))

    @cached_property
    def _whole(self) -> re.Pattern[str]:
        return re.compile("|".join(f"(?:{translate(bare(e))})|(?:{translate(e)})" for e in self.entries))


@dataclass(frozen=True)
class PackedExcludes(Excludes):
    """The entries of `ignore` in compressed-tensors' form: whole names, and regular expressions after `re:`.

    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/utils/config_utils.py#L392-L412
    """

    def covering(self, module: str) -> str | None:
        """See `Excludes.covering`."""
        names = (module, bare(module))
        if found := self._exact.get(bare(module)):
            return found
        return next((entry for entry, read in self._read.items() if any(map(read.match, names))), None)

    @cached_property
    def _exact(self) -> Mapping[str, str]:
        return {bare(entry): entry for entry in self.entries if not entry.startswith("re:")}

    @property
    def invalid(self) -> Mapping[str, str]:
        """See `Excludes.invalid`."""
        return {entry: read for entry, read in self._compiled.items() if isinstance(read, str)}

    @cached_property
    def _read(self) -> Mapping[str, re.Pattern[str]]:
        return {entry: read for entry, read in self._compiled.items() if isinstance(read, re.Pattern)}

    @cached_property
    def _compiled(self) -> Mapping[str, re.Pattern[str] | str]:
        return {entry: _compile(entry[3:]) for entry in self.entries if entry.startswith("re:")}


def _compile(expression: str) -> re.Pattern[str] | str:
    """Return an expression that can be matched, or what is wrong with it."""
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as fault:
        return str(fault)


def _reading(entry: str) -> str:
    entry = bare(entry)
    # For a wrapped model, the mapper turns "x*" into "x" and "x.*", and "x" then matches as a part of a name.
    stem = entry.removesuffix("*")
    return re.escape(stem) if stem and not set(stem) & set("*?[") else f"^{translate(entry)}"


def _parents(module: str) -> list[str]:
    parts = bare(module).split(".")
    return [".".join(parts[:i]) for i in range(len(parts), 0, -1)]


@dataclass(frozen=True)
class TargetSubject(Subject):
    """A target, and what its config and its headers say about quantization."""

    @cached_property
    def root_block(self) -> Mapping[str, Any]:
        """config.json's quantization_config, empty if there is none."""
        return to_object(self.config.get(CONFIG_KEY))

    @property
    def text(self) -> Mapping[str, Any]:
        """The text model's part of config.json; the whole config if nothing is wrapped."""
        return to_object(self.config.get("text_config", self.config))

    @cached_property
    def text_block(self) -> Mapping[str, Any]:
        """The quantization_config inside text_config, empty if there is none."""
        return to_object(to_object(self.config.get("text_config")).get(CONFIG_KEY))

    @cached_property
    def side(self) -> Mapping[str, Any]:
        """What hf_quant_config.json says about quantization, empty if there is none."""
        file = self.checkpoint.folder / SIDE_FILE
        try:
            there = not self.checkpoint.headers_only and file.exists()
            return to_object(read_json(file).get("quantization")) if there else {}
        except KconvError:
            return {}

    @cached_property
    def block(self) -> Mapping[str, Any]:
        """The block that vLLM uses: the config's own, of the root or of the text model, else the side file's."""
        return self.root_block or self.text_block or self.side

    @cached_property
    def format(self) -> Nvfp4:
        """The form of NVFP4 that its config states, or else its tensors have; without either ModelOpt's."""
        if self.block.get("format") == NVFP4_PACKED.form or any(
            name.endswith(f".{NVFP4_PACKED.mark}") for name in self.tensors
        ):
            return NVFP4_PACKED
        return NVFP4_MIXED if self.block.get("quant_algo") == NVFP4_MIXED.algorithm else NVFP4

    @property
    def is_hybrid(self) -> bool:
        """Whether it is FP8 but for its routed experts, as NVIDIA publishes DeepSeek-V4."""
        return NVFP4_AMID_FP8.is_stated(self.root_block)

    @cached_property
    def modules(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """Every module with an NVFP4 tensor: its tensors by suffix."""
        found: dict[str, dict[str, TensorInfo]] = {}
        scales, values = self.format.scales, self.format.values
        for name, info in self.tensors.items():
            base, _, suffix = name.rpartition(".")
            if suffix in scales or (suffix == values and info.dtype == VALUES):
                parts = found.get(base)
                if parts is None:
                    parts = found[base] = {}
                parts[suffix] = info
        for base, parts in found.items():
            weight = self.tensors.get(f"{base}.{values}")
            if weight is not None:
                parts[values] = weight
        return found

    @cached_property
    def packed(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """Those whose weight is NVFP4."""
        mark, values = self.format.mark, self.format.values
        return {
            base: parts
            for base, parts in self.modules.items()
            if mark in parts or (values in parts and parts[values].dtype == VALUES)
        }

    @property
    def modelopt(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """Those of a target in ModelOpt's form."""
        return {} if self.format == NVFP4_PACKED else self.packed

    @cached_property
    def fp8(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """The FP8 modules beside NVFP4: their tensors by the suffixes of ModelOpt's FP8 in blocks.

        None of a hybrid: no entry names its FP8, which is the config's own method.
        """
        if self.is_hybrid:
            return {}
        values = FP8_PB_WO.tensors[FP8_PB_WO.values].dtype
        bases = (name.removesuffix(f".{FP8_PB_WO.values}") for name, i in self.tensors.items() if i.dtype == values)
        return {
            base: {
                suffix: self.tensors[f"{base}.{suffix}"]
                for suffix in FP8_PB_WO.tensors
                if f"{base}.{suffix}" in self.tensors
            }
            for base in bases
            if (self.packed or self.format == NVFP4_MIXED) and f"{base}.{FP8_PB_WO.values}" in self.tensors
        }

    @cached_property
    def blocks(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """Those that ModelOpt's mixed form states to be FP8 in blocks."""
        return {
            base: parts
            for base, parts in self.fp8.items()
            if any(NVFP4_MIXED.meant(self.layers[name]) == FP8_PB_WO.name for name in self.named(base))
        }

    @cached_property
    def layers(self) -> Mapping[str, object]:
        """The algorithm that ModelOpt's mixed form states for each module, by its bare name."""
        stated = NVFP4_MIXED.stated(self.block) if self.format == NVFP4_MIXED else {}
        return {bare(name): said for name, said in stated.items()}

    def named(self, module: str) -> list[str]:
        """Return the names of `layers` for a module: a layer's routed experts have one together, or one each."""
        return [name for name in dict.fromkeys((bare(module), bare(experts_of(module)))) if name in self.layers]

    @cached_property
    def faults(self) -> tuple[PartFault, ...]:
        """What is wrong with the tensors of NVFP4 weights."""
        return tuple(fault for base, parts in self.packed.items() for fault in self.format.faults(base, parts))

    @cached_property
    def mtp(self) -> Mapping[str, bool]:
        """Its MTP layers by their names (`mtp_root`), and whether one has NVFP4 modules."""
        layers = self.text.get("num_hidden_layers")
        if not isinstance(layers, int):
            return {}
        packed = {mtp_root(base, layers) for base in self.packed}
        return {root: root in packed for root in mtp_roots(self.tensors, layers)}

    @cached_property
    def plain(self) -> tuple[str, ...]:
        """Unquantized linear layers that engines would treat as NVFP4 unless they are excluded.

        Those of MTP layers that are unquantized throughout need one entry for all.
        """
        found, mtp = [], tuple(f"{root}." for root, packed in self.mtp.items() if not packed)
        for name, info in self.tensors.items():
            if name.startswith(mtp):
                continue
            base, _, suffix = name.rpartition(".")
            last = base.rpartition(".")[2]
            linear = last.endswith(("_proj", "_proj_with_mqa")) and "layers." in base
            if (
                suffix == "weight"
                and info.dtype in FLOATS
                and (linear or last == "lm_head")
                and base not in self.packed
            ):
                found.append(base)
        # Engines build an output matrix of its own before they tie it to the embedding.
        if self._is_tied and not any(name.rpartition(".")[0].endswith("lm_head") for name in self.tensors):
            found.append("lm_head")
        return tuple(found)

    @property
    def _is_tied(self) -> bool:
        key = "tie_word_embeddings"
        return self.text.get(key, self.config.get(key)) is True

    @property
    def is_nvfp4(self) -> bool:
        """Whether its tensors or its config say that it is quantized."""
        stated = (str(self.block.get("quant_algo")), *map(NVFP4_MIXED.meant, NVFP4_MIXED.stated(self.block).values()))
        return bool(self.packed) or self.format == NVFP4_PACKED or any(NVFP4.name in one for one in stated)

    @property
    def weight_only(self) -> bool:
        """Whether its config says that activations stay unquantized."""
        groups = [to_object(group) for group in to_object(self.block.get("config_groups")).values()]
        unread = bool(groups) and all(group.get("input_activations") is None for group in groups)
        return self.block.get("quant_algo") == NVFP4.weight_only_name or unread

    @cached_property
    def excludes(self) -> Excludes:
        """The entries of the block that vLLM uses."""
        return (PackedExcludes if self.format == NVFP4_PACKED else Excludes)(entries_of(self.block))

    def cover(self, modules: Iterable[str]) -> Mapping[str, str | None]:
        """Return the entry that covers each module; a layer's experts are looked up once."""
        one_by_one = any(re.search(r"experts\\?\.(?!\*)", entry) for entry in self.excludes.entries)
        known: dict[str, str | None] = {}
        found = {}
        for module in modules:
            key = module if one_by_one else EXPERT.sub(".experts.0.", module)
            if key not in known:
                known[key] = self.excludes.covering(key)
            found[module] = known[key]
        return found

    @cached_property
    def covered(self) -> Mapping[str, str | None]:
        """The entry that covers each linear layer."""
        return self.cover([*self.packed, *self.fp8, *self.plain])


def entries_of(block: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a block's entries, under either of their names."""
    listed = block.get("ignore", block.get("exclude_modules"))
    return tuple(entry for entry in listed if isinstance(entry, str)) if isinstance(listed, list) else ()


def to_object(value: object) -> Mapping[str, Any]:
    """Return a config's value if it is an object, otherwise an empty one."""
    return value if isinstance(value, Mapping) else {}
