"""What a target's config says about its tensors, and what it excludes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from ...checkpoint.formats import CONFIG_KEY, FP8_PB_WO, NVFP4, NVFP4_MIXED, NVFP4_PACKED, SIDE_FILE
from ...errors import SourceFormatUnknown
from ...rule import Found, Rule
from ...targets.mtp import mtp_faults
from .subject import concerned
from .target import LAYER, OWN_LAYER, TargetSubject, bare, entries_of, to_object

# What vLLM reads of ModelOpt's mixed form besides, and kconv does not check.
UNCHECKED = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8")
MODELOPT = "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py"


def stale_text_block(subject: TargetSubject) -> Iterator[Found]:
    block = subject.text_block
    if subject.packed and block and dict(block) != dict(subject.root_block):
        named = block.get("quant_method") or block.get("quant_algo")
        yield Found(f"config.json: text_config.{CONFIG_KEY}", f"says {named!r}, but the weights are NVFP4")


def algorithm_unknown(subject: TargetSubject) -> Iterator[Found]:
    if subject.fp8 and subject.block and subject.format != NVFP4_MIXED:
        first, more = next(iter(subject.fp8)), len(subject.fp8) - 1
        what = f"is FP8 beside NVFP4, but the config is not {NVFP4_MIXED.algorithm}"
        yield Found(first, what + (f"; so are {more:,} more" if more else ""))
    if subject.packed and not subject.modelopt:
        yield from _packed_unknown(subject.root_block or subject.text_block)
        return
    for where, block in (("config.json", subject.root_block), (SIDE_FILE, subject.side)):
        if not block or not subject.modelopt:
            continue
        algorithm, method = block.get("quant_algo"), block.get("quant_method", "modelopt")
        if algorithm not in (*NVFP4.algorithms, NVFP4_MIXED.algorithm) and not subject.is_hybrid:
            yield Found(f"{where}: quant_algo", f"is {algorithm!r}")
        if where == "config.json" and not str(method).startswith(("modelopt", "nvfp4")) and not subject.is_hybrid:
            yield Found(f"{where}: quant_method", f"is {method!r}")
        for size in _sizes(block):
            if size != NVFP4.group:
                yield Found(f"{where}: group_size", f"is {size!r}, but NVFP4 has groups of {NVFP4.group}")
        if algorithm == NVFP4_MIXED.algorithm:
            yield from _layers_unknown(f"{where}: {NVFP4_MIXED.key}", block)


def _layers_unknown(where: str, block: Mapping[str, Any]) -> Iterator[Found]:
    """Yield what kconv does not read of the algorithms and the sizes that are stated for modules, each value once."""
    told: dict[str, list[str]] = {}
    for module, said in NVFP4_MIXED.unread(block).items():
        if NVFP4_MIXED.meant(said) not in UNCHECKED:
            what = "has no quant_algo" if said is None else f"has the quant_algo {said!r}, which kconv does not read"
            told.setdefault(what, []).append(module)
    groups = dict.fromkeys(NVFP4.algorithms, NVFP4.group) | {FP8_PB_WO.name: FP8_PB_WO.width}
    for module, said in NVFP4_MIXED.stated(block).items():
        group, size = groups.get(NVFP4_MIXED.meant(said)), to_object(block[NVFP4_MIXED.key][module]).get("group_size")
        if group and size not in (None, group):
            told.setdefault(f"has the group_size {size!r}, but {said} has groups of {group}", []).append(module)
    yield from _told(where, told)


def _told(where: str, told: Mapping[str, list[str]]) -> Iterator[Found]:
    for what, modules in told.items():
        yield Found(where, f"{modules[0]} {what}" + (f"; so have {len(modules) - 1:,} more" if modules[1:] else ""))


def layers_unchecked(subject: TargetSubject) -> Iterator[Found]:
    told: dict[str, list[str]] = {}
    if subject.format == NVFP4_MIXED:
        for module, said in NVFP4_MIXED.unread(subject.block).items():
            if NVFP4_MIXED.meant(said) in UNCHECKED:
                told.setdefault(f"has the quant_algo {said!r}, of which kconv checks nothing", []).append(module)
    yield from _told(f"config.json: {CONFIG_KEY}.{NVFP4_MIXED.key}", told)


def _packed_unknown(block: Mapping[str, Any]) -> Iterator[Found]:
    if block and block.get("quant_method") != NVFP4_PACKED.method:
        yield Found("config.json: quant_method", f"is {block.get('quant_method')!r}")
    elif block:
        try:
            known = NVFP4_PACKED.from_config(block, "config.json")
        except SourceFormatUnknown as fault:
            yield Found(f"config.json: {CONFIG_KEY}.config_groups", fault.what)
        else:
            if known is None:
                yield Found(f"config.json: {CONFIG_KEY}.format", f"is {block.get('format')!r}")


def side_file_differs(subject: TargetSubject) -> Iterator[Found]:
    one, other = subject.root_block, subject.side
    if other and subject.packed and not subject.modelopt:
        yield Found(SIDE_FILE, f"says {other.get('quant_algo')!r}, but the tensors are in compressed-tensors' form")
        return
    if not one or not other:
        return
    if one.get("quant_algo") != other.get("quant_algo"):
        yield Found(
            f"{SIDE_FILE}: quant_algo", f"is {other.get('quant_algo')!r}, but {one.get('quant_algo')!r} in config.json"
        )
    mine, its = ({bare(entry) for entry in entries_of(block)} for block in (one, other))
    if mine != its:
        entry = sorted(mine ^ its)[0]
        yield Found(
            f"{SIDE_FILE}: exclude_modules",
            f"{len(mine ^ its)} entries are in only one of the two files, e.g. {entry!r}",
        )
    stated, others = (
        {module: NVFP4_MIXED.meant(said) for module, said in NVFP4_MIXED.stated(block).items()}
        for block in (one, other)
    )
    if unequal := {module for module, _ in stated.items() ^ others.items()}:
        yield Found(
            f"{SIDE_FILE}: {NVFP4_MIXED.key}", f"{len(unequal)} modules are stated otherwise, e.g. {min(unequal)}"
        )
    if _kv(one) != _kv(other):
        yield Found(f"{SIDE_FILE}: kv_cache_quant_algo", f"is {_kv(other)}, but {_kv(one)} in config.json")


def layers_misstated(subject: TargetSubject) -> Iterator[Found]:
    # Of a hybrid engines look up no module: its routed experts are NVFP4, the rest is FP8.
    if subject.format != NVFP4_MIXED or subject.is_hybrid:
        return
    stated, where = subject.layers, f"config.json: {CONFIG_KEY}.{NVFP4_MIXED.key}"
    unread = {bare(name) for name in NVFP4_MIXED.unread(subject.block)}
    used: set[str] = set()
    for modules, form, allowed in (
        (subject.packed, NVFP4.name, NVFP4.algorithms),
        (subject.fp8, "FP8", (FP8_PB_WO.name,)),
    ):
        for module in modules:
            names = subject.named(module)
            used.update(names)
            # Of FP8 by an algorithm that kconv does not read, `algorithm_unknown` tells.
            if module in subject.fp8 and not unread.isdisjoint(names):
                continue
            if not any(NVFP4_MIXED.meant(stated[name]) in allowed for name in names):
                said = f"says {stated[names[0]]!r} of it" if names else "does not name it"
                yield Found(module, f"is {form}, but {NVFP4_MIXED.key} {said}")
    for name in sorted(stated.keys() - used - unread):
        yield Found(where, f"{name} is {stated[name]}, but no such module is stored")


def kv_scheme_unknown(subject: TargetSubject) -> Iterator[Found]:
    for where, block in ((f"config.json: {CONFIG_KEY}", subject.root_block), (SIDE_FILE, subject.side)):
        if subject.packed and _kv(block) not in ("FP8", "none"):
            yield Found(where, f"the KV cache's scheme is {_kv(block)}")


def kv_scales_unstated(subject: TargetSubject) -> Iterator[Found]:
    if subject.packed and _kv(subject.block) == "none":
        names = [name for name in subject.tensors if name.endswith((".k_scale", ".v_scale"))]
        if names:
            yield Found(names[0], f"one of {len(names)} scales of the KV cache")


def layers_miscounted(subject: TargetSubject) -> Iterator[Found]:
    counted, extra = (subject.text.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    stored = {int(layer[1]) for layer in map(OWN_LAYER.match, subject.tensors) if layer}
    if not isinstance(counted, int):
        yield Found("config.json: num_hidden_layers", f"is {counted!r}, but {len(stored)} layers are stored")
        return
    absent = next((layer for layer in range(counted) if layer not in stored), None)
    if absent is not None:
        yield Found("config.json: num_hidden_layers", f"is {counted}, but layer {absent} is not stored")
    # MTP layers come after the last one; `mtp_missing` finds those that are not there.
    uncounted = [layer for layer in stored if layer >= counted + (extra if isinstance(extra, int) else 0)]
    if uncounted:
        yield Found("config.json: num_hidden_layers", f"is {counted}, but layer {min(uncounted)} is stored")


def mtp_missing(subject: TargetSubject) -> Iterator[Found]:
    yield from (Found(*fault) for fault in mtp_faults(subject.text, subject.tensors))


def mtp_not_excluded(subject: TargetSubject) -> Iterator[Found]:
    # vLLM reads no entries of a hybrid, and builds its MTP as FP8.
    if not subject.packed or not subject.block or subject.is_hybrid:
        return
    for root, packed in subject.mtp.items():
        # vLLM drops entries that start with "mtp." when it renames the target's modules, and looks for
        # shared_head.head as head.
        entries = replace(
            subject.excludes, entries=tuple(e for e in subject.excludes.entries if not e.startswith("mtp."))
        )
        asked = [f"{root}.head"] if packed else [f"{root}.head", f"{root}.layers.0.mlp", f"{root}.self_attn.o_proj"]
        lacking = [name for name in asked if entries.covering(name) is None]
        if lacking:
            yield Found(root, f"is unquantized, but no entry of ignore covers {lacking[0]}")


def _kv(block: Mapping[str, Any]) -> str:
    """Return a block's KV cache scheme as one phrase, from either of its two forms."""
    scheme, algorithm = block.get("kv_cache_scheme"), block.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        bits, kind = scheme.get("num_bits"), scheme.get("type")
        return "FP8" if (bits, kind) == (8, "float") else f"{bits} bits of {kind}"
    return str(scheme or algorithm or "none")


def _sizes(block: Mapping[str, Any]) -> Iterator[object]:
    if "group_size" in block:
        yield block["group_size"]
    groups = block.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        for part in ("weights", "input_activations"):
            numbers = group.get(part) if isinstance(group, Mapping) else None
            if isinstance(numbers, Mapping) and "group_size" in numbers:
                yield numbers["group_size"]


IGNORE = "Write each module's full name, or each layer's part followed by *, e.g. model.layers.1.self_attn*."


def unquantized_not_excluded(subject: TargetSubject) -> Iterator[Found]:
    if subject.packed and subject.block:
        for module in subject.plain:
            # Of the mixed form engines take a module that is not named for unquantized, but experts after those beside.
            named = subject.format == NVFP4_MIXED and ".experts." not in module
            if subject.covered[module] is None and not named:
                yield Found(module, "is not quantized, but no entry of ignore covers it")


def packed_but_excluded(subject: TargetSubject) -> Iterator[Found]:
    for module, entry in _packed_and_covered(subject):
        if not _collides(entry, module):
            yield Found(module, f"is quantized, but {entry!r} covers it")


def exclude_collision(subject: TargetSubject) -> Iterator[Found]:
    told = set()
    for module, entry in _packed_and_covered(subject):
        if _collides(entry, module) and entry not in told:
            told.add(entry)
            yield Found(f"config.json: {CONFIG_KEY}.ignore", f"{entry!r} covers {module}, which is quantized")


def exclude_kv_b_proj(subject: TargetSubject) -> Iterator[Found]:
    for where, block in ((f"config.json: {CONFIG_KEY}.ignore", subject.root_block), (SIDE_FILE, subject.side)):
        for entry in entries_of(block):
            plain_kv_b = any(module.endswith(".kv_b_proj") for module in subject.plain)
            if subject.modelopt and plain_kv_b and fnmatchcase("kv_b_proj", entry):
                yield Found(where, f"{entry!r} matches kv_b_proj")


def ignore_invalid(subject: TargetSubject) -> Iterator[Found]:
    for entry, why in subject.excludes.invalid.items():
        yield Found(f"config.json: {CONFIG_KEY}.ignore", f"{entry!r} is no regular expression: {why}")


def exclude_part_of_name(subject: TargetSubject) -> Iterator[Found]:
    if not subject.modelopt:
        return
    for module in subject.plain:
        entry = subject.covered[module]
        if entry is not None and not subject.excludes.is_wildcard_for(module):
            yield Found(module, f"is covered by {entry!r} only")


def _packed_and_covered(subject: TargetSubject) -> Iterator[tuple[str, str]]:
    for module in (*subject.packed, *subject.fp8):
        entry = subject.covered[module]
        if entry is not None:
            yield module, entry


def _collides(entry: str, module: str) -> bool:
    """Return whether an entry ends in a layer's number, but the module belongs to another layer."""
    # A regular expression of compressed-tensors' form ends in `.*` for the `*` of ModelOpt's.
    name = entry.removesuffix(".*").replace("\\", "") if entry.startswith("re:") else entry
    meant, own = re.search(r"layers\.(\d+)\*?$", name), LAYER.search(module)
    return bool(meant and own and meant[1] != own[1])


RULES: tuple[Rule[TargetSubject], ...] = (
    Rule(
        "K420",
        "nvfp4-unstated",
        "error",
        "Weights are NVFP4, but neither config.json nor hf_quant_config.json says so. Engines read packed"
        " bytes as weights.",
        fix="Write quantization_config and hf_quant_config.json. kconv quantize writes both.",
        check=lambda s: (
            [Found("config.json", f"{len(s.packed):,} modules are NVFP4")]
            if s.packed and not s.block and not s.side
            else ()
        ),
    ),
    Rule(
        "K421",
        "nvfp4-stale",
        "error",
        "The config says NVFP4, but no tensor is packed. Engines look for scales that do not exist.",
        fix="Remove quantization_config and hf_quant_config.json. They belong to another export.",
        check=lambda s: (
            [Found(f"config.json: {CONFIG_KEY}", f"says {s.block.get('quant_algo') or s.block.get('format')}")]
            if s.is_nvfp4 and not s.packed
            else ()
        ),
    ),
    Rule(
        "K422",
        "stale-text-block",
        "error",
        "text_config still has the quantization_config of the previous format. Engines that look there first"
        " read NVFP4 as INT4 or FP8.",
        fix="Remove quantization_config from text_config. It belongs at the top level.",
        check=stale_text_block,
    ),
    Rule(
        "K423",
        "algorithm-unknown",
        "error",
        "The weights are NVFP4, but the config names another method, algorithm, format or group size. Beside NVFP4,"
        " kconv reads FP8_PB_WO of MIXED_PRECISION, and FP8 with moe_quant_algo NVFP4, as DeepSeek-V4 has it.",
        fix='Write quant_method "modelopt", quant_algo "NVFP4", "W4A16_NVFP4" or "MIXED_PRECISION", and groups of 16.'
        " kconv quantize writes each form's config.",
        seen_in=f"{MODELOPT}#L793-L824",
        check=algorithm_unknown,
    ),
    Rule(
        "K424",
        "side-file-differs",
        "error",
        "hf_quant_config.json and quantization_config in config.json differ. TensorRT-LLM reads the former,"
        " vLLM the latter.",
        fix="Write both from one recipe, as kconv quantize does. Beside compressed-tensors' form there is no former.",
        check=side_file_differs,
    ),
    Rule(
        "K425",
        "side-file-missing",
        "note",
        "There is no hf_quant_config.json. Older TensorRT-LLM reads nothing else.",
        fix="Write hf_quant_config.json too. kconv quantize does.",
        engines=concerned("K425"),
        check=lambda s: (
            [Found(SIDE_FILE, "is not there")]
            if s.modelopt and s.block and not s.side and not s.checkpoint.headers_only
            else ()
        ),
    ),
    Rule(
        "K426",
        "kv-scheme-unknown",
        "error",
        "Engines do not support the KV cache scheme for NVFP4 targets. They support FP8 or none.",
        fix='Write kv_cache_scheme {"dynamic": false, "num_bits": 8, "type": "float"}, or leave it out.',
        check=kv_scheme_unknown,
    ),
    Rule(
        "K427",
        "kv-scales-unstated",
        "warning",
        "The target has KV cache scales, but its config states no quantized cache. Engines ignore the scales.",
        fix='State it (kv_cache_scheme, kv_cache_quant_algo "FP8"), or remove k_scale and v_scale.',
        check=kv_scales_unstated,
    ),
    Rule(
        "K428",
        "layers-miscounted",
        "error",
        "The config's number of decoder layers is not that of the stored ones. A missing layer is served"
        " as uninitialized memory: for a quantized model, vLLM does not check which weights arrived.",
        fix="Set num_hidden_layers to the number of stored layers, or fetch the missing ones.",
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/model_loader/default_loader.py#L505-L509",
        check=layers_miscounted,
    ),
    Rule(
        "K429",
        "mtp-missing",
        "error",
        "The config promises layers for multi-token prediction (MTP), but the files hold none that an engine reads."
        " With MTP vLLM stops, or drafts with uninitialized memory.",
        fix="Quantize the target again from files that hold them, or set the key to 0.",
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_mtp.py#L515-L533",
        check=mtp_missing,
    ),
    Rule(
        "K430",
        "unquantized-not-excluded",
        "error",
        "A linear is neither packed nor excluded. Engines build an NVFP4 layer for it and find no scales.",
        fix=IGNORE,
        seen_in="https://github.com/vllm-project/vllm/issues/45102",
        check=unquantized_not_excluded,
    ),
    Rule(
        "K431",
        "packed-but-excluded",
        "error",
        "An exclude list covers a packed module. Engines build an unquantized layer and read packed bytes as weights.",
        fix=IGNORE,
        seen_in="https://github.com/vllm-project/vllm/issues/45102",
        check=packed_but_excluded,
    ),
    Rule(
        "K432",
        "exclude-collision",
        "error",
        "An exclude that was meant for one layer covers others. For example, model.layers.1* also covers"
        " layers 10 to 19.",
        fix=IGNORE,
        seen_in=f"{MODELOPT}#L187-L222",
        check=exclude_collision,
    ),
    Rule(
        "K433",
        "exclude-kv-b-proj",
        "error",
        "An exclude matches the bare word kv_b_proj. TensorRT-LLM tests this word on its own. It then looks for"
        " FP8 scales of an unquantized kv_b_proj, and fails or reads it wrongly.",
        fix="Name each layer's kv_b_proj in full, e.g. model.layers.0.self_attn.kv_b_proj.",
        engines=concerned("K433"),
        check=exclude_kv_b_proj,
    ),
    Rule(
        "K434",
        "exclude-part-of-name",
        "error",
        "A module is excluded only by a part of its name. vLLM accepts that; TensorRT-LLM needs wildcards.",
        fix=IGNORE,
        engines=concerned("K434"),
        check=exclude_part_of_name,
    ),
    Rule(
        "K435",
        "mtp-not-excluded",
        "error",
        "An MTP layer is unquantized, but not excluded as a whole. vLLM builds NVFP4 modules in it, some under names"
        " that no tensor has, and drafts with what no scale was loaded into.",
        fix="Add the layer's name followed by *, e.g. model.layers.61* or mtp*, to both exclude lists.",
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_mtp.py#L66-L70",
        check=mtp_not_excluded,
    ),
    Rule(
        "K436",
        "compressed-tensors-form",
        "warning",
        "The target is NVFP4 in compressed-tensors' form. kconv knows only vLLM and SGLang to read it.",
        fix="For TensorRT-LLM, quantize again with format: modelopt in the recipe.",
        engines=concerned("K436"),
        check=lambda s: (
            [Found(f"config.json: {CONFIG_KEY}.format", f"is {s.format.form}")] if s.packed and not s.modelopt else ()
        ),
    ),
    Rule(
        "K437",
        "layers-misstated",
        "error",
        "quantized_layers and the stored modules differ. vLLM builds a module that is not named as unquantized, and"
        " reads packed bytes as weights.",
        fix="Name each quantized module with its algorithm, a layer's routed experts as one, e.g."
        " model.layers.1.mlp.experts. kconv quantize does.",
        seen_in=f"{MODELOPT}#L1717-L1794",
        check=layers_misstated,
    ),
    Rule(
        "K439",
        "layers-unchecked",
        "warning",
        "Beside NVFP4, quantized_layers names another FP8 than FP8_PB_WO. vLLM reads it; kconv checks nothing of it.",
        fix="Try the target in the engine that is to serve it.",
        seen_in=f"{MODELOPT}#L139-L152",
        check=layers_unchecked,
    ),
    Rule(
        "K438",
        "ignore-invalid",
        "error",
        "An entry of ignore in compressed-tensors' form is no regular expression. vLLM stops when it compares a module"
        " with it.",
        fix="Correct what follows re:, or remove the entry.",
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/utils/config_utils.py#L392-L412",
        check=ignore_invalid,
    ),
)
