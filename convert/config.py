"""config.json to `HeadSpec` and back: every key that is read, and what a config must not say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.formats import CONFIG_KEY
from ..checkpoint.header import TensorInfo
from ..checkpoint.manifest import Hints, Unverified
from ..drafters.contract import Problems, problem_of
from ..drafters.spec import Gqa, HeadSpec, Mla, Norms, Rope, Tokens, Yarn
from ..engines.keys import BALLAST, COMMON, ELSEWHERE, FIXED, GQA, MLA, NESTED, TOP, ConfigTable, Key
from ..errors import ConfigInvalid, ConfigUnsupported, KconvError, Problem
from .captured import EAGLE, Captured, read_captured
from .facts import FACTS, TARGETS_DEPTH, stored_layers
from .quantized import has_scales
from .rope import find_rope, stated_places, states_theta

# In a nested config and its root, the inner keys are the head's.
# Classes of heads with Qwen3's attention; those for Qwen-VL targets have Llama's.
QWEN3 = re.compile(r"Eagle3Qwen3ForCausalLM|Qwen3ForCausalLM(Eagle3)?|Qwen3Eagle3Model")
INNER = BALLAST | {"architectures", "model_type", "torch_dtype", "dtype"}
ABSENT = object()
# Far above any draft head; each layer's tensors are listed one by one, so a billion layers would never end.
MAX_LAYERS = 1000
# Keys of `FIXED` with a rule of their own; K013 covers the others.
TIED = "tie_word_embeddings"
OF_FIXED = {TIED: "K170", CONFIG_KEY: "K198"}
THETA = (
    "Pass --rope-theta from the head's training config, or state it in config.json. If that config has none either:"
    " SafeAILab's trainer and transformers' LlamaConfig default to 10000."
)
# Draft heads have one decoder layer, rarely up to five; a larger number is the target's.
DEEPEST_HEAD = 8
# What to do about a value of `FIXED` that is more than a key without effect.
OF_K3 = "This is a Kimi-K3 head, whose attention has no RoPE; kconv does not support these yet."
FIXES = {"mla_use_nope": OF_K3}


@dataclass(frozen=True)
class ReadConfig:
    """The contents of a config.

    Attributes:
        spec: the head it describes.
        captured: the captured layers and how they were decided.
        carried: keys that kconv does not know, by dotted path; they are copied to the output unchanged.
        dropped: keys that mean nothing for a draft head; not copied.
        unstated: keys that the config lacks, and for which readers use defaults that may differ from training.
        unverified: facts that rest on the user's word or on a default.
        measured: the facts that a measurement on the target confirmed.
    """

    spec: HeadSpec
    captured: Captured
    carried: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    unstated: tuple[str, ...] = ()
    unverified: tuple[Unverified, ...] = ()
    measured: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ConfigReading:
    """A config, as far as it can be read.

    Attributes:
        keys: the config in the keys of `engines.keys`.
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
    dtype: str,
    hints: Hints,
    table: ConfigTable | None = None,
) -> ReadConfig:
    """Read a head's spec from its config; see `find_config` for the arguments.

    Raises:
        ConfigInvalid: a key is missing, of a wrong type, or contradicts another.
        ConfigUnsupported: a key asks for something that kconv does not support.
        CapturedUndecided: see `convert.captured`.
    """
    problems = Problems()
    found = find_config(config, tensors, problems, dtype=dtype, hints=hints, table=table)
    problems.refuse()
    if found.read is None:
        raise RuntimeError("the config was neither read nor refused")
    return found.read


def find_config(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    problems: Problems,
    *,
    dtype: str,
    hints: Hints,
    table: ConfigTable | None = None,
) -> ConfigReading:
    """Read a head's config, as far as it can be read.

    Args:
        config: config.json.
        tensors: the checkpoint's tensors. Their names show who made the head and whether it is quantized, and `d2t`'s
            rows replace the one key that ModelOpt's kimik2 exporter omits.
        problems: the list to which problems are added.
        dtype: the weights' dtype, as safetensors names it.
        hints: the user's options where the config is silent or ambiguous.
        table: how the layout's config differs from the common keys.
    """
    table = table or ConfigTable()
    keys, left = _unify(config, table, problems)
    unverified = _words(keys, table, hints)
    keys = _with_words(keys, table, hints, problems) | _own_depth(keys, tensors, hints, problems)
    config = dict(keys)
    # Copied unchanged, like the scales that it describes.
    quantization = {CONFIG_KEY: config.pop(CONFIG_KEY)} if CONFIG_KEY in config and has_scales(tensors) else {}
    _check_unsupported(config, tensors, problems)
    is_mla = bool(config.get("kv_lora_rank"))
    own, others = (MLA, GQA) if is_mla else (GQA, MLA)
    reduced = tensors.get("d2t")
    values: dict[str, Any] = {"lm_head_rows": reduced.shape[0] if reduced and reduced.shape else 0}
    for key in (*COMMON, *own):
        _read_key(config, key, values, problems)
    captured = read_captured(config, hints, tensors, problems)
    rope = find_rope(config, problems)
    if not states_theta(config):
        what = "the config has no rope_theta; engines use their own default"
        problems.append(Problem("K162", "warning", "config.json: rope_theta", what, THETA, needs="--rope-theta"))
    max_positions = None
    with problems.catching():
        max_positions = _max_positions(config, rope, hints)
    states = _states(tensors, values)
    _check_count(config, captured, hints, None if has_scales(tensors) else states, problems)
    if rope is None or max_positions is None or any(key.field not in values for key in (*COMMON, *own)):
        return ConfigReading(keys, None, captured)
    # Not from 0: nothing should be said about layer 0 of a head that may not read it.
    ids = captured.ids if captured else tuple(range(1, (states or 3) + 1))
    spec = HeadSpec(
        attention=(Mla if is_mla else Gqa)(**_group(values, "attention")),
        norms=Norms(**_group(values, "norms"), qk=not is_mla and _norms_qk(config, tensors)),
        tokens=Tokens(**_group(values, "tokens")),
        rope=rope,
        captured=ids,
        dtype=dtype,
        max_positions=max_positions,
        **{name: value for name, value in values.items() if "." not in name and name != "lm_head_rows"},
    )
    _check_dims(spec, problems)
    inner = config.get(EAGLE)
    stated = {k: v for k, v in config.items() if k != EAGLE}
    stated |= {f"{EAGLE}.{k}": v for k, v in inner.items()} if isinstance(inner, Mapping) else {}
    known = {name for key in (*COMMON, *own) for name in key.names + key.also} | ELSEWHERE | FIXED.keys()
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
            where="config.json",
            fix=THETA,
        )


def carry(config: dict[str, Any], carried: Mapping[str, Any]) -> dict[str, Any]:
    """Return a written config with the source's copied keys back in their places."""
    inner = {path.removeprefix(f"{EAGLE}."): v for path, v in carried.items() if path.startswith(f"{EAGLE}.")}
    outer = {path: v for path, v in carried.items() if not path.startswith(f"{EAGLE}.")}
    return config | outer | ({EAGLE: config.get(EAGLE, {}) | inner} if inner else {})


def _unify(config: Mapping[str, Any], table: ConfigTable, problems: Problems) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Convert a layout's config to the common keys; return it, and the keys left out."""
    flat = _flatten(config, table.nested, problems) if table.nested else dict(config)
    flat |= table.adapt(flat) if table.adapt else {}
    for key, allowed in table.otherwise.items():
        if key in flat and flat[key] not in allowed:
            _add(
                problems,
                ConfigUnsupported,
                f"{key} is {flat[key]!r}; kconv supports such heads only with {allowed[0]!r}",
                f"config.json: {key}",
                "If another layout gives the key the meaning that it has for this head, name that layout with --from.",
            )
    left = tuple(key for key in flat if key in table.ballast or key in table.otherwise)
    flat = {key: value for key, value in flat.items() if key not in left}
    return flat, left


def _with_words(config: Mapping[str, Any], table: ConfigTable, hints: Hints, problems: Problems) -> dict[str, Any]:
    """Return a config with what the user says, or the layout's trainer uses, where it states nothing."""
    stated = stated_places(config).get("rope_theta", {})
    if hints.rope_theta is not None and any(value != hints.rope_theta for value in stated.values()):
        _add(
            problems,
            ConfigInvalid,
            f"rope_theta is {next(iter(stated.values()))!r} in the config, but --rope-theta is {hints.rope_theta!r}",
            "config.json: rope_theta",
            "Remove --rope-theta, or correct the config.",
        )
    theta = hints.rope_theta if hints.rope_theta is not None else table.trained.get("rope_theta")
    flat = dict(config) | ({} if stated or theta is None else {"rope_theta": theta})
    key, told = "norm_before_residual", hints.norm_before_residual
    if told is not None:
        stated = flat.get(key)
        if stated is None and key not in table.must_state and told:
            _add(
                problems,
                ConfigInvalid,
                f"{key} is not in the config, which means false in this layout, but the option says true",
                f"config.json: {key}",
                "Remove the option. If the config lost the key, add it there with the value used in training.",
            )
        if stated not in (None, told):
            _add(
                problems,
                ConfigInvalid,
                f"{key} is {stated!r} in the config, but the option says {told!r}",
                f"config.json: {key}",
                "Remove the option, or correct the config.",
            )
        flat |= {key: told}
    for name, why in table.must_state.items():
        if flat.get(name) is None:
            _add(
                problems,
                ConfigInvalid,
                f"the config does not state {name}: {why}",
                f"config.json: {name}",
                "Pass --norm-before-residual yes or no, as the head was trained.",
                "K015",
                "--norm-before-residual",
            )
    return flat


def _words(keys: Mapping[str, Any], table: ConfigTable, hints: Hints) -> tuple[Unverified, ...]:
    """Return the facts, other than the captured layers, that rest on the user's word or on a default.

    Args:
        keys: the config in the common keys.
        table: how the layout's config differs.
        hints: the user's options.
    """
    found = []
    for fact in FACTS.values():
        if fact.stated is None or fact.stated(keys):
            continue
        told, trained = getattr(hints, fact.hint), table.trained.get(fact.name)
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
            _add(
                problems,
                ConfigInvalid,
                f"{held} decoder layer(s) are stored, but --layers is {hints.layers}",
                f"config.json: {key}",
                "Pass the number of stored layers, or export the whole head.",
                TARGETS_DEPTH,
            )
        return {key: hints.layers}
    if not isinstance(stated, int) or isinstance(stated, bool):
        return {}
    if held and held < stated and stated >= DEEPEST_HEAD:
        _add(
            problems,
            ConfigInvalid,
            f"{key} is {stated}, but {held} decoder layer(s) are stored: the number looks copied from the target's"
            " config",
            f"config.json: {key}",
            f"Pass --layers {held}, or correct the config. If the head has {stated} layers, export all of them.",
            TARGETS_DEPTH,
        )
        return {key: held}
    return {}


def _flatten(config: Mapping[str, Any], nested: str, problems: Problems) -> dict[str, Any]:
    inner = config.get(nested)
    if not isinstance(inner, Mapping):
        what = f"{nested} is {inner!r}, not an object"
        _add(problems, ConfigInvalid, what, f"config.json: {nested}", "Export the head again.")
        return dict(config)
    outer = {key: value for key, value in config.items() if key != nested}
    for key in sorted(outer.keys() & inner.keys() - INNER):
        if outer[key] != inner[key]:
            _add(
                problems,
                ConfigInvalid,
                f"the config contradicts itself: {key} is {outer[key]!r}, but {inner[key]!r} in {nested}",
                f"config.json: {key}",
                "Keep the one that the head was trained with.",
                "K016",
            )
    return outer | dict(inner)


def _is_untied(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether a head's lm_head has other rows than its embedding, so that the two cannot be tied."""
    lm_head = tensors.get("lm_head.weight")
    return lm_head is not None and lm_head.shape[:1] != (config.get("vocab_size"),)


def _check_unsupported(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], problems: Problems) -> None:
    """Find keys of a config (`engines.keys`) that ask for something that kconv does not support."""
    # Two of these keys have their rule's meaning only for some heads.
    codes = OF_FIXED | ({"rope_interleave": "K168"} if config.get("kv_lora_rank") else {})
    codes |= {f"{EAGLE}.use_aux_hidden_state": "K151"} if "fc.weight" in tensors else {}
    for name, allowed in FIXED.items():
        value = find(config, name)
        if value is not ABSENT and value not in allowed:
            if name == TIED and value is True and _is_untied(config, tensors):
                what = f"{TIED} is true, but lm_head has its own rows, so it is not tied; engines may believe the key"
                problems.append(Problem(OF_FIXED[TIED], "warning", f"config.json: {TIED}", what, "Convert the head."))
                continue
            only = "without the key" if allowed[0] is None else f"with {allowed[0]!r}"
            _add(
                problems,
                ConfigUnsupported,
                f"{name} is {value!r}; kconv supports only heads {only}",
                f"config.json: {name}",
                FIXES.get(name)
                or "If the key has no effect on this head, remove it; otherwise kconv cannot support this head.",
                codes.get(name, "K013"),
            )
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        _add(
            problems,
            ConfigUnsupported,
            f"layer_types is {kinds!r}; kconv supports only full attention",
            "config.json: layer_types",
            "Serve this head with the engine that it was made for.",
            "K014",
        )
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window") is not False and not kinds:
        _add(
            problems,
            ConfigUnsupported,
            f"sliding_window is {window!r}; kconv supports only full attention",
            "config.json: sliding_window",
            "If the head was trained with full attention, set use_sliding_window to false.",
            "K014",
        )


def _read_key(config: Mapping[str, Any], key: Key, values: dict[str, Any], problems: Problems) -> None:
    """Add a key's value to those read before it, unless it has a problem."""
    stated = {name: value for name in key.names + key.also if (value := find(config, name)) not in (ABSENT, None)}
    if len(set(map(repr, stated.values()))) > 1:
        _add(
            problems,
            ConfigInvalid,
            "the config contradicts itself: " + ", ".join(f"{n} is {v!r}" for n, v in stated.items()),
            f"config.json: {', '.join(stated)}",
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
        what, where = f"the config has no {key.names[0]}", f"config.json: {key.names[0]}"
        code = "K189" if key.field == "attention.q_lora_rank" else "K010"
        _add(problems, ConfigInvalid, what, where, "Copy it from the head's training config.", code)


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
        where="config.json: max_position_embeddings",
        fix="Pass --max-positions: the longest context that you will serve.",
    )


def _check_count(
    config: Mapping[str, Any], captured: Captured | None, hints: Hints, states: int | None, problems: Problems
) -> None:
    """Find a count of captured layers that differs from fc's width or from the number of listed layers."""
    if captured and hints.captured is not None and states not in (None, len(captured.ids)):
        _add(
            problems,
            ConfigInvalid,
            f"fc.weight takes {states} states, but --captured names {len(captured.ids)}",
            "--captured",
            "Pass one layer per state, in ascending order.",
        )
    count = config.get("num_aux_hidden_states")
    if captured:
        lengths = {"": len(captured.ids)}
    else:
        lengths = {
            f" in {path}": len(ids) for path in (TOP, NESTED) if isinstance(ids := find(config, path), list) and ids
        }
    for place, length in lengths.items() if count is not None else ():
        if count != length:
            _add(
                problems,
                ConfigInvalid,
                f"num_aux_hidden_states is {count!r}, but {length} captured layers are listed{place}",
                "config.json: num_aux_hidden_states",
                "Correct whichever contradicts fc.weight's width.",
                "K149",
            )


def _norms_qk(config: Mapping[str, Any], tensors: Iterable[str]) -> bool:
    """Return whether a config asks for query and key norms: by a class with Qwen3's attention, or by its model_type.

    The model_type may be there only because the target is a Qwen3, so without such norms it does not ask for them.
    """
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str) and QWEN3.fullmatch(named[0]):
        return True
    return config.get("model_type") == "qwen3" and any(name.endswith(".q_norm.weight") for name in tensors)


def _states(tensors: Mapping[str, TensorInfo], values: Mapping[str, Any]) -> int | None:
    """Return how many captured states fc has room for; None if unknown."""
    fc, width = tensors.get("fc.weight") or tensors.get("model.fc.weight"), values.get("target_hidden")
    return min(max(fc.shape[1] // width, 1), MAX_LAYERS) if fc and len(fc.shape) == 2 and width else None


def _check_dims(spec: HeadSpec, problems: Problems) -> None:
    """Check dims that no tensor's shape shows: how heads share keys and values, and what RoPE rotates."""
    attention = spec.attention
    if isinstance(attention, Gqa):
        if attention.heads % attention.kv_heads:
            _add(
                problems,
                ConfigInvalid,
                f"{attention.heads} attention heads cannot share {attention.kv_heads} key-value heads evenly",
                "config.json: num_key_value_heads",
                "Correct the two counts; the second must divide the first.",
            )
        rotary = int(spec.rope.partial_rotary_factor * attention.head_dim)
    else:
        rotary = attention.qk_rope_head_dim
        if spec.rope.partial_rotary_factor != 1:
            _add(
                problems,
                ConfigUnsupported,
                f"partial_rotary_factor is {spec.rope.partial_rotary_factor} on an MLA head",
                "config.json: partial_rotary_factor",
                "Remove the key if it has no effect on this head: qk_rope_head_dim decides which dims MLA rotates.",
            )
    if rotary < 2 or rotary % 2:
        _add(
            problems,
            ConfigInvalid,
            f"RoPE would rotate {rotary} dims of each head, but it rotates pairs",
            "config.json: head_dim, qk_rope_head_dim, partial_rotary_factor",
            "Correct head_dim, qk_rope_head_dim or partial_rotary_factor.",
        )


def _add(
    problems: Problems, kind: type[KconvError], what: str, where: str, fix: str, code: str = "", needs: str = ""
) -> None:
    problems.append(problem_of(kind(what, where=where, fix=fix, code=code, needs=needs)))


def checked(name: str, value: Any, kind: str, key: str = "") -> Any:
    """Return a key's value, with a list as a tuple.

    Args:
        name: the key's name, for the message.
        value: the value in the config.
        kind: see `engines.keys.Key`.
        key: its place, if that differs from its name.

    Raises:
        ConfigInvalid: the value is not of its kind.
    """
    right, phrase = KINDS[kind]
    if not right(value):
        raise ConfigInvalid(
            f"{name} is {value!r}, not {phrase}",
            where=f"config.json: {key or name}",
            fix="Correct the key.",
            code="K012",
        )
    return tuple(value) if isinstance(value, list) else value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# Limits that no head ever exceeded: a larger value is a mistake or an attack.
MAX_VOCAB, LEAST_POSITIONS, MAX_EPS = 1 << 24, 8, 0.1
KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "count": (lambda v: _is_int(v) and 0 < v < 2**31, "a positive number"),
    "depth": (lambda v: _is_int(v) and 0 < v <= MAX_LAYERS, f"a number of layers up to {MAX_LAYERS}"),
    # The largest known target has 262,208; until it is checked, the number that decides an allocation is untrusted.
    "vocabulary": (lambda v: _is_int(v) and 0 < v <= MAX_VOCAB, f"a number of tokens up to {MAX_VOCAB:,}"),
    "positions": (
        lambda v: _is_int(v) and LEAST_POSITIONS <= v < 2**31,
        f"a context of {LEAST_POSITIONS} tokens or more",
    ),
    "fraction": (lambda v: isinstance(v, (int, float)) and 0 < v <= MAX_EPS, f"a number between 0 and {MAX_EPS}"),
    "flag": (lambda v: isinstance(v, bool), "true or false"),
    # Some configs use -1 for none.
    "token": (
        lambda v: all(_is_int(i) and -1 <= i < 2**31 for i in (v if isinstance(v, list) else [v])),
        "a token id or a list of them",
    ),
}


def find(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, `ABSENT` if there is none."""
    place: Any = config
    for part in path.split("."):
        if not isinstance(place, Mapping) or part not in place:
            return ABSENT
        place = place[part]
    return place


def _group(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.split(".")[1]: value for name, value in values.items() if name.startswith(prefix + ".")}
