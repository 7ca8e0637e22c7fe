"""What a config may not say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..engines.keys import FIXED
from ..errors import ConfigInvalid, ConfigUnsupported
from ..head.spec import Gqa, HeadSpec

ABSENT = object()
# Far above any draft head's; what a layer needs is spelled out tensor by tensor, so a billion would never end.
MAX_LAYERS = 1000


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Refuse a config, in the keys of `convert.keys`, that asks for something kconv cannot carry.

    Raises:
        ConfigUnsupported: a key with another value than those of `FIXED`, or attention that is not full.
    """
    for name, allowed in FIXED.items():
        value = find(config, name)
        if value is not ABSENT and value not in allowed:
            raise ConfigUnsupported(
                f"{name} is {value!r}; kconv carries heads {phrase(allowed)} only",
                where="config.json",
                fix="If the key has no effect on this head, remove it; else this head is of a kind kconv cannot prove.",
            )
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise ConfigUnsupported(
            f"layer_types is {kinds!r}; kconv carries full attention only",
            where="config.json: layer_types",
            fix="Serve this head with the engine it was made for.",
        )
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window") is not False and not kinds:
        raise ConfigUnsupported(
            f"sliding_window is {window!r}; kconv carries full attention only",
            where="config.json",
            fix="If the head was trained with full attention, set use_sliding_window to false.",
        )


def phrase(allowed: tuple[Any, ...]) -> str:
    """Return what a value of `FIXED` asks of a head, in words."""
    return "without the key" if allowed[0] is None else f"with {allowed[0]!r}"


def check_dims(spec: HeadSpec, config: Mapping[str, Any]) -> None:
    """Check dims that no tensor's shape tells: how heads are shared, what RoPE turns, how many layers are captured.

    Raises:
        ConfigInvalid, ConfigUnsupported: they cannot be, or not in an MLA head.
    """
    attention, count = spec.attention, config.get("num_aux_hidden_states")
    if isinstance(attention, Gqa):
        if attention.heads % attention.kv_heads:
            raise ConfigInvalid(
                f"{attention.heads} attention heads cannot share {attention.kv_heads} key-value heads evenly",
                where="config.json: num_key_value_heads",
                fix="Correct the two counts; the one must divide the other.",
            )
        rotary = int(spec.rope.partial_rotary_factor * attention.head_dim)
    else:
        rotary = attention.qk_rope_head_dim
        if spec.rope.partial_rotary_factor != 1:
            raise ConfigUnsupported(
                f"partial_rotary_factor is {spec.rope.partial_rotary_factor}, of an MLA head",
                where="config.json",
                fix="Remove the key if it has no effect on this head: qk_rope_head_dim says what is turned.",
            )
    if rotary < 2 or rotary % 2:
        raise ConfigInvalid(
            f"RoPE would turn {rotary} dims of each head; it turns pairs",
            where="config.json",
            fix="Correct head_dim, qk_rope_head_dim or partial_rotary_factor.",
        )
    if count is not None and count != len(spec.captured):
        raise ConfigInvalid(
            f"num_aux_hidden_states is {count!r}, and {len(spec.captured)} captured layers are listed",
            where="config.json",
            fix="Correct the one that fc.weight's width contradicts.",
        )


def checked(name: str, value: Any, kind: str) -> Any:
    """Return a key's value, a list as a tuple.

    Args:
        name: the key's, for the message.
        value: what the config states.
        kind: see `convert.keys.Key`.

    Raises:
        ConfigInvalid: the value is not of its kind.
    """
    right, phrase = KINDS[kind]
    if not right(value):
        raise ConfigInvalid(f"{name} is {value!r}, not {phrase}", where="config.json", fix="Put the key right.")
    return tuple(value) if isinstance(value, list) else value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "count": (lambda v: _is_int(v) and 0 < v < 2**31, "a positive number"),
    "depth": (lambda v: _is_int(v) and 0 < v <= MAX_LAYERS, f"a number of layers up to {MAX_LAYERS}"),
    "fraction": (lambda v: isinstance(v, (int, float)) and 0 < v < 1, "a number between 0 and 1"),
    "flag": (lambda v: isinstance(v, bool), "true or false"),
    "token": (lambda v: all(map(_is_int, v if isinstance(v, list) else [v])), "a token id or a list of them"),
}


def find(config: Mapping[str, Any], path: str) -> Any:
    """Return what stands at a dotted path, `ABSENT` where nothing does."""
    place: Any = config
    for part in path.split("."):
        if not isinstance(place, Mapping) or part not in place:
            return ABSENT
        place = place[part]
    return place
