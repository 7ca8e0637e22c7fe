"""config.json to `HeadSpec` and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.formats import CONFIG_KEY
from ..checkpoint.header import TORCH_NAMES, TensorInfo
from ..engines.keys import (
    BALLAST,
    COMMON,
    ELSEWHERE,
    FIXED,
    GQA,
    MLA,
    ConfigTable,
    Key,
)
from ..errors import ConfigInvalid
from ..head.spec import Gqa, HeadSpec, Mla, Norms, Tokens, Yarn
from .captured import Captured, Hints, decide
from .config_checks import ABSENT, check_dims, checked, find, refuse_unsupported
from .own_keys import unify
from .quantized import has_scales
from .rope_keys import read_rope, states_theta, write_rope

EAGLE = "eagle_config"


@dataclass(frozen=True)
class ReadConfig:
    """What a config says.

    Attributes:
        spec: the head it describes.
        captured: the captured layers and how they were decided.
        carried: keys that kconv does not know, by dotted path, carried into the output as they are.
        dropped: keys that mean nothing for a draft head, not carried.
        unstated: keys that the config lacks, each of which readers give a value that the head may not be trained with.
    """

    spec: HeadSpec
    captured: Captured
    carried: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    unstated: tuple[str, ...] = ()


def read_config(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    *,
    dtype: str,
    hints: Hints,
    table: ConfigTable | None = None,
) -> ReadConfig:
    """Read a head's spec from its config.

    Args:
        config: config.json.
        tensors: the checkpoint's tensors, whose names say who made the head and whether it is quantized;
            and `d2t`'s rows stand in for the one key that ModelOpt's kimik2 exporter forgets.
        dtype: the weights' dtype, as safetensors names it.
        hints: what the user says where the config is silent or ambiguous.
        table: how the layout's config differs from the common keys.

    Raises:
        ConfigInvalid: a key is missing, of a wrong type, or contradicts another.
        ConfigUnsupported: a key asks for something that kconv cannot carry.
        CapturedUndecided: see `convert.captured`.
    """
    config, left = unify(config, table or ConfigTable(), hints)
    # Carried as it is, beside the scales that it is about.
    quantization = {CONFIG_KEY: config.pop(CONFIG_KEY)} if CONFIG_KEY in config and has_scales(tensors) else {}
    refuse_unsupported(config)
    is_mla = bool(config.get("kv_lora_rank"))
    own, others = (MLA, GQA) if is_mla else (GQA, MLA)
    reduced = tensors.get("d2t")
    values: dict[str, Any] = {"lm_head_rows": reduced.shape[0] if reduced and reduced.shape else 0}
    for key in (*COMMON, *own):
        values[key.field] = _read(config, key, values)
    captured = decide(config, hints, tensors)
    rope = read_rope(config)
    spec = HeadSpec(
        attention=(Mla if is_mla else Gqa)(**_group(values, "attention")),
        norms=Norms(**_group(values, "norms")),
        tokens=Tokens(**_group(values, "tokens")),
        rope=rope,
        captured=captured.ids,
        dtype=dtype,
        max_positions=_max_positions(config, rope.scaling, hints),
        **{name: value for name, value in values.items() if "." not in name and name != "lm_head_rows"},
    )
    check_dims(spec, config)
    stated = {k: v for k, v in config.items() if k != EAGLE}
    stated |= {f"{EAGLE}.{k}": v for k, v in (config.get(EAGLE) or {}).items()}
    known = {name for key in (*COMMON, *own) for name in key.names + key.also} | ELSEWHERE | FIXED.keys()
    meaningless = BALLAST | {name for key in others for name in key.names}
    rest = {k: v for k, v in stated.items() if k not in known}
    carried = {k: v for k, v in rest.items() if k not in meaningless} | quantization
    unstated = () if states_theta(config) else ("rope_theta",)
    return ReadConfig(spec, captured, carried, (*left, *(k for k in rest if k in meaningless)), unstated)


def refuse_unstated(read: ReadConfig) -> None:
    """Refuse to write a config that would state what the one that was read does not.

    Raises:
        ConfigInvalid: engines have a default for a key that the config lacks; written down, it would pass for what the
            head was trained with.
    """
    for key in read.unstated:
        raise ConfigInvalid(
            f"the config does not state {key}; engines take a default of theirs, whatever the head was trained with",
            where="config.json",
            fix=f"State {key} as in the head's training config; where that is silent too, the trainer's default.",
        )


def write_keys(spec: HeadSpec) -> dict[str, Any]:
    """Return the config keys that every engine reads; layouts add identity and captured layers."""
    config: dict[str, Any] = {}
    table = MLA if isinstance(spec.attention, Mla) else GQA
    for key in (*COMMON, *table):
        value = _get(spec, key.field)
        if key.kind == "token" and value is None:
            continue
        for name in key.names:
            _put(config, name, list(value) if isinstance(value, tuple) else value)
    dtype = TORCH_NAMES.get(spec.dtype, "bfloat16")
    config |= {"hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": spec.max_positions}
    # transformers 4 reads torch_dtype, 5 reads dtype.
    return config | {"torch_dtype": dtype, "dtype": dtype} | write_rope(spec.rope)


def carry(config: dict[str, Any], carried: Mapping[str, Any]) -> dict[str, Any]:
    """Return a written config with the source's carried keys put where they stood."""
    inner = {path.removeprefix(f"{EAGLE}."): v for path, v in carried.items() if path.startswith(f"{EAGLE}.")}
    outer = {path: v for path, v in carried.items() if not path.startswith(f"{EAGLE}.")}
    return config | outer | ({EAGLE: config.get(EAGLE, {}) | inner} if inner else {})


def _read(config: Mapping[str, Any], key: Key, values: Mapping[str, Any]) -> Any:
    stated = {name: value for name in key.names + key.also if (value := find(config, name)) not in (ABSENT, None)}
    if len(set(map(repr, stated.values()))) > 1:
        raise ConfigInvalid(
            "the config contradicts itself: " + ", ".join(f"{n} is {v!r}" for n, v in stated.items()),
            where="config.json",
            fix="Engines would pick one each; leave the one that the head was trained with.",
        )
    for name, value in stated.items():
        return checked(name, value, key.kind)
    if key.default is None:
        raise ConfigInvalid(
            f"the config has no {key.names[0]}", where="config.json", fix="Take it from the head's training config."
        )
    return key.default(values)


def _max_positions(config: Mapping[str, Any], scaling: object, hints: Hints) -> int:
    stated = hints.max_positions or config.get("max_position_embeddings")
    if stated is not None:
        return checked("max_position_embeddings", stated, "count")
    if isinstance(scaling, Yarn):
        return checked("max_position_embeddings, which follows from YaRN's factor,", scaling.reach, "count")
    raise ConfigInvalid(
        "the config has no max_position_embeddings",
        where="config.json",
        fix="Say --max-positions: the longest context that will be served.",
    )


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        config = config.setdefault(part, {})
    config[last] = value


def _get(spec: HeadSpec, path: str) -> Any:
    value: Any = spec
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _group(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.split(".")[1]: value for name, value in values.items() if name.startswith(prefix + ".")}
