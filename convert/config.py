"""config.json to `HeadSpec` and back. What belongs here: walking the key tables; the tables are in `convert.keys`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.header import TensorInfo
from ..errors import ConfigInvalid, ConfigUnsupported
from ..head.spec import Gqa, HeadSpec, Mla, Norms, Tokens, Yarn
from .captured import Captured, Hints, decide
from .keys import BALLAST, COMMON, ELSEWHERE, FIXED, GQA, MLA, Key
from .rope_keys import read_rope, write_rope

_ABSENT = object()


@dataclass(frozen=True)
class ReadConfig:
    """What a config says.

    Attributes:
        spec: the head it describes.
        captured: the captured layers and how they were decided.
        carried: keys that kconv does not know, carried into the output as they are.
        dropped: keys that mean nothing for a draft head, not carried.
    """

    spec: HeadSpec
    captured: Captured
    carried: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()


def read_config(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], *, dtype: str, hints: Hints
) -> ReadConfig:
    """Read a head's spec from its config.

    Args:
        config: config.json, flat (a nested one is unnested by its layout first).
        tensors: the checkpoint's tensors; only `d2t`'s rows are looked at, for the one key that
            ModelOpt's kimik2 exporter forgets.
        dtype: the weights' dtype, as safetensors names it.
        hints: what the user says where the config is silent or ambiguous.

    Raises:
        ConfigInvalid: a key is missing, of a wrong type, or contradicts another.
        ConfigUnsupported: a key asks for something that kconv cannot carry.
        CapturedUndecided: see `convert.captured`.
    """
    _refuse_unsupported(config)
    is_mla = bool(config.get("kv_lora_rank"))
    reduced = tensors.get("d2t")
    values: dict[str, Any] = {"lm_head_rows": reduced.shape[0] if reduced and reduced.shape else 0}
    for key in (*COMMON, *(MLA if is_mla else GQA)):
        values[key.field] = _read(config, key, values)
    if _find(config, "eagle_config.return_hidden_post_norm") is True:
        # TensorRT-LLM's older name of norm_output.
        values["norms.output"] = True
    captured = decide(config, hints)
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
    names = {top for key in (*COMMON, *GQA, *MLA) for name in key.names for top in (name.split(".")[0],)}
    rest = [k for k in config if k not in names | ELSEWHERE | FIXED.keys() and k != "eagle_config"]
    carried = {k: config[k] for k in rest if k not in BALLAST}
    return ReadConfig(spec, captured, carried, tuple(k for k in rest if k in BALLAST))


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


TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for name, allowed in FIXED.items():
        value = _find(config, name)
        if value is not _ABSENT and value not in allowed:
            raise ConfigUnsupported(
                f"{name} is {value!r}; kconv carries heads with {allowed[0]!r} only",
                where="config.json",
                fix="If the key has no effect on this head, remove it; else this head is of a kind kconv cannot prove.",
            )
    kinds = config.get("layer_types")
    if kinds is not None and any(kind != "full_attention" for kind in kinds):
        raise ConfigUnsupported(f"layer_types is {kinds!r}; kconv carries full attention only", where="config.json")


def _read(config: Mapping[str, Any], key: Key, values: Mapping[str, Any]) -> Any:
    stated = {name: value for name in key.names if (value := _find(config, name)) not in (_ABSENT, None)}
    if len(set(map(repr, stated.values()))) > 1:
        raise ConfigInvalid(
            "the config contradicts itself: " + ", ".join(f"{n} is {v!r}" for n, v in stated.items()),
            where="config.json",
            fix="Engines would pick one each; leave the one that the head was trained with.",
        )
    for name, value in stated.items():
        return _checked(name, value, key.kind)
    if key.default is None:
        raise ConfigInvalid(
            f"the config has no {key.names[0]}", where="config.json", fix="Take it from the head's training config."
        )
    return key.default(values)


def _checked(name: str, value: Any, kind: str) -> Any:
    right = {
        "count": lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 < v < 2**31,
        "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < 1,
        "flag": lambda v: isinstance(v, bool),
        "token": lambda v: isinstance(v, int) or (isinstance(v, list) and all(isinstance(i, int) for i in v)),
    }[kind]
    if not right(value):
        raise ConfigInvalid(f"{name} is {value!r}, not a {kind}", where="config.json", fix="Put the key right.")
    return tuple(value) if isinstance(value, list) else value


def _max_positions(config: Mapping[str, Any], scaling: object, hints: Hints) -> int:
    stated = hints.max_positions or config.get("max_position_embeddings")
    if stated is not None:
        return _checked("max_position_embeddings", stated, "count")
    if isinstance(scaling, Yarn):
        return int(scaling.factor * scaling.original_max_positions)
    raise ConfigInvalid(
        "the config has no max_position_embeddings",
        where="config.json",
        fix="Say --max-positions: the longest context that will be served.",
    )


def _find(config: Mapping[str, Any], path: str) -> Any:
    place: Any = config
    for part in path.split("."):
        if not isinstance(place, Mapping) or part not in place:
            return _ABSENT
        place = place[part]
    return place


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
