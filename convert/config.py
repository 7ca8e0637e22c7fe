"""config.json to the spec of a drafter, by the keys and facts of its family."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.formats import CONFIG_KEY
from ..checkpoint.header import TensorInfo
from ..checkpoint.manifest import Hints, Unverified
from ..checkpoint.schema import Json
from ..drafters.base import Drafter, Spec
from ..drafters.captured import Captured
from ..drafters.contract import Problems
from ..drafters.facts import TARGETS_DEPTH, THETA_LOST, Fact, stored_layers
from ..drafters.keys import ABSENT, BALLAST, ConfigTable, Key, checked, find
from ..drafters.rope_keys import find_rope, stated_places, states_theta
from ..drafters.spec import Gqa, Mla, Rope, Yarn
from ..errors import ConfigInvalid, ConfigUnsupported, Problem, in_config
from ..lines import counted
from .quantized import has_scales

# In a nested config and its root, the inner keys are the head's.
INNER = BALLAST | {"architectures", "model_type", "torch_dtype", "dtype"}
THETA = (
    "Pass --rope-theta from the head's training config, or state it in config.json. If that config has none either:"
    " SafeAILab's trainer and transformers' LlamaConfig default to 10000."
)
# What to do about a key that is not there.
FROM_TRAINING = "Copy it from the head's training config."
# Draft heads have one decoder layer, rarely up to five; a larger number is the target's.
DEEPEST_HEAD = 8


@dataclass(frozen=True)
class ReadConfig:
    """The contents of a config.

    Attributes:
        spec: the drafter it describes, a dataclass of its family.
        carried: keys that kconv does not know, by dotted path; they are copied to the output unchanged.
        dropped: keys that mean nothing for a draft head; not copied.
        unstated: keys that the config lacks, and for which readers use defaults that may differ from training.
        unverified: facts that rest on the user's word or on a default.
        measured: the facts that a measurement on the target confirmed.
    """

    spec: Any
    captured: Captured
    carried: Mapping[str, Any] = field(default_factory=dict[str, Any])
    dropped: tuple[str, ...] = ()
    unstated: tuple[str, ...] = ()
    unverified: tuple[Unverified, ...] = ()
    measured: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ConfigReading:
    """A config, as far as it can be read.

    Attributes:
        keys: the config in the common keys.
        read: the contents; None if a problem makes a spec impossible.
        captured: the captured layers; None if unknown, and `read` then has as many layers as fc has room for.
    """

    keys: Mapping[str, Any]
    read: ReadConfig | None
    captured: Captured | None


def read_config(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    *,
    drafter: Drafter,
    dtype: str,
    hints: Hints,
    table: ConfigTable | None = None,
) -> ReadConfig:
    """Read a head's spec from its config, or raise its first problem; see `find_config` for the arguments."""
    problems = Problems()
    found = find_config(config, tensors, problems, drafter=drafter, dtype=dtype, hints=hints, table=table)
    problems.refuse()
    if found.read is None:
        raise RuntimeError("the config was neither read nor refused")
    return found.read


def find_config(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    problems: Problems,
    *,
    drafter: Drafter,
    dtype: str,
    hints: Hints,
    table: ConfigTable | None = None,
) -> ConfigReading:
    """Read a head's config, as far as it can be read.

    The names of the checkpoint's tensors show who made the head and whether it is quantized, and `d2t`'s rows replace
    the one key that ModelOpt's kimik2 exporter omits. `dtype` is the weights', as safetensors names it.
    """
    table = table or ConfigTable()
    keys, left = _unify(config, table, problems)
    unverified = _words(drafter, keys, table, hints)
    keys = _with_words(drafter, keys, table, hints, problems) | _own_depth(keys, tensors, hints, problems)
    config = dict(keys)
    # Copied unchanged, like the scales that it describes.
    quantization = {CONFIG_KEY: config.pop(CONFIG_KEY)} if CONFIG_KEY in config and has_scales(tensors) else {}
    drafter.check_keys(config, tensors, problems)
    attention = Mla if Mla in drafter.attention and bool(config.get("kv_lora_rank")) else Gqa
    own = (*drafter.keys, *drafter.attention.get(attention, ()))
    reduced = tensors.get("d2t")
    values: dict[str, Any] = {"lm_head_rows": reduced.shape[0] if reduced and reduced.shape else 0}
    for key in own:
        _read_key(config, key, values, drafter.facts, problems)
    captured = drafter.captured(config, hints, tensors, problems)
    rope = find_rope(config, problems)
    if not states_theta(config):
        what = "the config has no rope_theta; engines use their own default"
        problems.append(Problem(THETA_LOST.id, "warning", in_config("rope_theta"), what, THETA, needs="--rope-theta"))
    max_positions = None
    with problems.catching():
        max_positions = _max_positions(config, rope, hints)
    room = drafter.room(tensors, values)
    states = None if has_scales(tensors) else room
    drafter.check_captured(config, captured, hints, states, problems)
    if rope is None or max_positions is None or any(key.field not in values for key in own):
        return ConfigReading(keys, None, captured)
    # Of an option that does not fit the head, nothing is to be said about the head.
    if captured and hints.captured is not None and states not in (None, len(captured.ids)):
        captured = None
    # Not from 0: nothing should be said about layer 0 of a head that may not read it.
    ids = captured.ids if captured else tuple(range(1, (room or 3) + 1))
    values |= drafter.derived(values, config, tensors)
    parts = {**drafter.parts, **({"attention": attention} if drafter.attention else {})}
    spec = drafter.spec(
        **{name: part(**_group(values, name)) for name, part in parts.items()},
        rope=rope,
        captured=ids,
        dtype=dtype,
        max_positions=max_positions,
        **{name: value for name, value in values.items() if "." not in name and name != "lm_head_rows"},
    )
    _check_dims(spec, problems)
    inner: Json = config.get(drafter.nested)
    stated = {k: v for k, v in config.items() if k != drafter.nested}
    stated |= {f"{drafter.nested}.{k}": v for k, v in inner.items()} if isinstance(inner, Mapping) else {}
    known = {name for key in own for name in key.names + key.also} | drafter.elsewhere | drafter.fixed.keys()
    others = (key for kind, table in drafter.attention.items() if kind is not attention for key in table)
    meaningless = BALLAST | {name for key in others for name in key.names}
    rest = {k: v for k, v in stated.items() if k not in known}
    carried = {k: v for k, v in rest.items() if k not in meaningless} | quantization
    unstated = () if states_theta(config) else ("rope_theta",)
    dropped = (*left, *(k for k in rest if k in meaningless))
    if captured and captured.word:
        told = Unverified(fact="captured", value=captured.ids, word=captured.word, against=captured.against)
        unverified = (told, *unverified)
    about = (carried, dropped, unstated, unverified)
    return ConfigReading(keys, ReadConfig(spec, captured or Captured(ids, "not known"), *about), captured)


def refuse_unstated(read: ReadConfig) -> None:
    """Refuse to write a config that would state what the source config does not.

    Raises:
        ConfigInvalid: the config lacks a key for which engines have a default; writing the default would make it look
        like the value used in training.
    """
    for key in read.unstated:
        raise ConfigInvalid(
            f"the config has no {key}; engines use their own default, whatever the head was trained with",
            where=in_config(),
            fix=THETA,
        )


def carry(config: dict[str, Any], carried: Mapping[str, Any], nested: str) -> dict[str, Any]:
    """Return a written config with the source's copied keys back in their places, those of `nested` inside it."""
    inner = {path.removeprefix(f"{nested}."): v for path, v in carried.items() if path.startswith(f"{nested}.")}
    outer = {path: v for path, v in carried.items() if not path.startswith(f"{nested}.")}
    return config | outer | ({nested: config.get(nested, {}) | inner} if inner else {})


def _unify(config: Mapping[str, Any], table: ConfigTable, problems: Problems) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Convert a layout's config to the common keys; return it, and the keys left out."""
    flat = _flatten(config, table.nested, problems) if table.nested else dict(config)
    flat |= table.adapt(flat) if table.adapt else {}
    for key, allowed in table.otherwise.items():
        if key in flat and flat[key] not in allowed:
            problems.add(
                ConfigUnsupported,
                f"{key} is {flat[key]!r}; kconv supports such heads only with {allowed[0]!r}",
                in_config(key),
                "If another layout gives the key the meaning that it has for this head, name that layout with --from.",
            )
    left = tuple(key for key in flat if key in table.ballast or key in table.otherwise)
    flat = {key: value for key, value in flat.items() if key not in left}
    return flat, left


def _with_words(
    drafter: Drafter, config: Mapping[str, Any], table: ConfigTable, hints: Hints, problems: Problems
) -> dict[str, Any]:
    """Return a config with what the user says, or the layout's trainer uses, where it states nothing."""
    stated = stated_places(config).get("rope_theta", {})
    if hints.rope_theta is not None and any(value != hints.rope_theta for value in stated.values()):
        problems.add(
            ConfigInvalid,
            f"rope_theta is {next(iter(stated.values()))!r} in the config, but --rope-theta is {hints.rope_theta!r}",
            in_config("rope_theta"),
            "Remove --rope-theta, or correct the config.",
        )
    theta = hints.rope_theta if hints.rope_theta is not None else table.trained.get("rope_theta")
    flat = dict(config) | ({} if stated or theta is None else {"rope_theta": theta})
    for fact in drafter.facts.values():
        key, told = fact.name, hints.told(fact.hint) if fact.answer else None
        if told is None:
            continue
        stated, default = flat.get(key), next(one.default for one in drafter.keys if key in one.names)
        meant = default(flat) if default and stated is None and key not in table.must_state else None
        if meant not in (None, told):
            problems.add(
                ConfigInvalid,
                f"{key} is not in the config, which means {json.dumps(meant)} in this layout, but the option"
                f" says {json.dumps(told)}",
                in_config(key),
                "Remove the option. If the config lost the key, add it there with the value used in training.",
            )
        if stated not in (None, told):
            problems.add(
                ConfigInvalid,
                f"{key} is {stated!r} in the config, but the option says {told!r}",
                in_config(key),
                "Remove the option, or correct the config.",
            )
        flat |= {key: told}
    for name, why in table.must_state.items():
        if flat.get(name) is None:
            fact = drafter.facts[name]
            problems.add(
                ConfigInvalid,
                f"the config does not state {name}: {why}",
                in_config(name),
                f"Pass {fact.option} yes or no, as the head was trained.",
                fact.rule.id,
                fact.option,
            )
    return flat


def _words(drafter: Drafter, keys: Mapping[str, Any], table: ConfigTable, hints: Hints) -> tuple[Unverified, ...]:
    """Return the facts, other than the captured layers, that rest on the user's word or on a default."""
    found: list[Unverified] = []
    for fact in drafter.facts.values():
        if fact.stated is None or fact.stated(keys):
            continue
        told, trained = hints.told(fact.hint), table.trained.get(fact.name)
        if told is not None:
            against = f"the trainer's default is {trained!r}" if trained not in (None, told) else ""
            found.append(Unverified(fact=fact.name, value=told, word=fact.option, against=against))
        elif trained is not None:
            found.append(Unverified(fact=fact.name, value=trained, word="the trainer's default"))
    return tuple(found)


def _own_depth(config: Mapping[str, Any], tensors: Iterable[str], hints: Hints, problems: Problems) -> dict[str, Any]:
    """Return the head's own number of decoder layers if num_hidden_layers is the target's, or the user states it."""
    key, stated, held = "num_hidden_layers", config.get("num_hidden_layers"), stored_layers(tensors)
    if hints.layers is not None:
        if hints.layers != held:
            problems.add(
                ConfigInvalid,
                f"--layers is {hints.layers}, but the file stores {counted(held, 'decoder layer')}",
                in_config(key),
                "Pass the number of stored layers, or export the whole head.",
                TARGETS_DEPTH.id,
            )
        return {key: hints.layers}
    if not isinstance(stated, int) or isinstance(stated, bool):
        return {}
    if held and held < stated and stated >= DEEPEST_HEAD:
        problems.add(
            ConfigInvalid,
            f"{key} is {stated}, but the file stores {counted(held, 'decoder layer')}: the number looks copied from the"
            " target's config",
            in_config(key),
            f"Pass --layers {held}, or correct the config. If the head has {stated} layers, export all of them.",
            TARGETS_DEPTH.id,
        )
        return {key: held}
    return {}


def _flatten(config: Mapping[str, Any], nested: str, problems: Problems) -> dict[str, Any]:
    inner: Json = config.get(nested)
    if not isinstance(inner, Mapping):
        what = f"{nested} is {inner!r}, not an object"
        problems.add(ConfigInvalid, what, in_config(nested), "Export the head again.")
        return dict(config)
    outer = {key: value for key, value in config.items() if key != nested}
    for key in sorted(outer.keys() & inner.keys() - INNER):
        if outer[key] != inner[key]:
            problems.add(
                ConfigInvalid,
                f"the config contradicts itself: {key} is {outer[key]!r}, but {inner[key]!r} in {nested}",
                in_config(key),
                "Keep the one that the head was trained with.",
                "K016",
            )
    return outer | dict(inner)


def _read_key(
    config: Mapping[str, Any], key: Key, values: dict[str, Any], facts: Mapping[str, Fact], problems: Problems
) -> None:
    """Add a key's value to those read before it, unless it has a problem."""
    stated = {name: value for name in key.names + key.also if (value := find(config, name)) not in (ABSENT, None)}
    if len(set(map(repr, stated.values()))) > 1:
        problems.add(
            ConfigInvalid,
            "the config contradicts itself: " + ", ".join(f"{n} is {v!r}" for n, v in stated.items()),
            in_config(", ".join(stated)),
            "Each engine would pick one of them; keep the one that the head was trained with.",
            "K011",
        )
    before = len(problems)
    for name, value in stated.items():
        with problems.catching():
            checked(name, value, key.kind)
    if len(problems) > before or len(set(map(repr, stated.values()))) > 1:
        return
    if stated:
        values[key.field] = checked(key.names[0], next(iter(stated.values())), key.kind)
    elif key.default is not None:
        try:
            values[key.field] = key.default(values)
        except KeyError:
            return  # it depends on a key that has a problem itself
    else:
        name = key.names[0]
        what, where = f"the config has no {name}", in_config(name)
        if (fact := facts.get(name)) is not None and fact.answer:
            problems.add(ConfigInvalid, what, where, f"Pass {fact.option}. {FROM_TRAINING}", fact.rule.id, fact.option)
        else:
            code = "K189" if key.field == "attention.q_lora_rank" else "K010"
            problems.add(ConfigInvalid, what, where, FROM_TRAINING, code)


def _max_positions(config: Mapping[str, Any], rope: Rope | None, hints: Hints) -> int | None:
    stated = hints.max_positions or config.get("max_position_embeddings")
    if stated is not None:
        return checked("max_position_embeddings", stated, "positions")
    if rope is None:
        return None
    if isinstance(rope.scaling, Yarn):
        name = "max_position_embeddings"
        return checked(f"{name}, which follows from YaRN's factor,", rope.scaling.reach, "count", name)
    raise ConfigInvalid(
        "the config has no max_position_embeddings",
        where=in_config("max_position_embeddings"),
        fix="Pass --max-positions: the longest context that you will serve.",
    )


def _check_dims(spec: Spec, problems: Problems) -> None:
    """Check dims that no tensor's shape shows: how heads share keys and values, and what RoPE rotates."""
    attention = getattr(spec, "attention", None)
    if attention is None:
        return
    if isinstance(attention, Gqa):
        if attention.heads % attention.kv_heads:
            problems.add(
                ConfigInvalid,
                f"{attention.heads} attention heads cannot share {attention.kv_heads} key-value heads evenly",
                in_config("num_key_value_heads"),
                "Correct the two counts; the second must divide the first.",
            )
        rotary = int(spec.rope.partial_rotary_factor * attention.head_dim)
    else:
        rotary = attention.qk_rope_head_dim
        if spec.rope.partial_rotary_factor != 1:
            problems.add(
                ConfigUnsupported,
                f"partial_rotary_factor is {spec.rope.partial_rotary_factor} on an MLA head",
                in_config("partial_rotary_factor"),
                "Remove the key if it has no effect on this head: qk_rope_head_dim decides which dims MLA rotates.",
            )
    if rotary < 2 or rotary % 2:
        problems.add(
            ConfigInvalid,
            f"RoPE would rotate {rotary} dims of each head, but it rotates pairs",
            in_config("head_dim, qk_rope_head_dim, partial_rotary_factor"),
            "Correct head_dim, qk_rope_head_dim or partial_rotary_factor.",
        )


def _group(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.split(".")[1]: value for name, value in values.items() if name.startswith(prefix + ".")}
