"""The keys of a drafter's config, as data, and how a value is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from ..checkpoint.schema import Json
from ..errors import ConfigInvalid, ConfigUnsupported, in_config
from .contract import Problems
from .spec import Gqa, Mla

Values = Mapping[str, Any]

# Where a config lists the captured layers.
IDS = "eagle_aux_hidden_state_layer_ids"
TOP, NESTED = IDS, f"eagle_config.{IDS}"
# What kconv writes next to each list; no engine reads it.
CONVENTION = "aux_hidden_state_layer_ids_are"
OUTPUTS, INPUTS = "layer_outputs", "layer_inputs"


@dataclass(frozen=True)
class Key:
    """Where a config holds one field of the spec.

    Attributes:
        field: dotted path of the field in the family's spec.
        names: dotted paths in config.json. Reading takes those that exist and refuses a contradiction; writing fills
            each of them, since engines look in different places.
        kind: "count" (positive int), "depth" (a count of layers), "vocabulary" (a count of tokens), "fraction" (a
            small number above 0), "flag", "token" (id, list of ids or null), "whole" (0 or more) or "word".
        default: computes the field's value from what was read before it, if the config lacks the key; None if a missing
            key is an error.
        also: dotted paths that are read too, but never written.
    """

    field: str
    names: tuple[str, ...]
    kind: str
    default: Callable[[Values], Any] | None = None
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConfigTable:
    """How the config of one layout differs from the keys below.

    Attributes:
        nested: an object whose keys replace those of the top level; empty if there is none.
        ballast: keys that mean nothing outside this layout.
        otherwise: keys with another meaning here than below, and the only values that kconv supports; they are not
            read, and not copied.
        must_state: keys whose absence could be read in two ways, with the sentence that says so.
        adapt: returns replacements for keys whose values differ from what the head was trained with.
        trained: what the layout's trainer uses for facts (`drafters.facts`) that the config does not state.
    """

    nested: str = ""
    ballast: frozenset[str] = frozenset()
    otherwise: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    must_state: Mapping[str, str] = field(default_factory=dict[str, str])
    adapt: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    trained: Mapping[str, Any] = field(default_factory=dict[str, Any])


def off(_: Values) -> bool:
    """Return the default of a flag."""
    return False


def none(_: Values) -> None:
    """Return the default of a token."""
    return


GQA = (
    Key("attention.heads", ("num_attention_heads",), "count"),
    Key("attention.kv_heads", ("num_key_value_heads",), "count", lambda v: v["attention.heads"]),
    Key("attention.head_dim", ("head_dim",), "count", lambda v: v["hidden"] // v["attention.heads"]),
    Key("attention.bias", ("attention_bias",), "flag", off),
)

MLA = (
    # TensorRT-LLM requires num_key_value_heads for an MLA head too.
    Key("attention.heads", ("num_attention_heads", "num_key_value_heads"), "count"),
    Key("attention.q_lora_rank", ("q_lora_rank",), "count"),
    Key("attention.kv_lora_rank", ("kv_lora_rank",), "count"),
    Key("attention.qk_nope_head_dim", ("qk_nope_head_dim",), "count"),
    Key("attention.qk_rope_head_dim", ("qk_rope_head_dim",), "count"),
    Key("attention.v_head_dim", ("v_head_dim",), "count"),
)

ATTENTION: Mapping[type, tuple[Key, ...]] = {Gqa: GQA, Mla: MLA}

# Keys that transformers writes into every config, and the mixture-of-experts keys that ModelOpt's kimik2 template
# copies although a head's MLP is dense. Nothing in a draft head depends on them.
BALLAST = frozenset(
    """
    _name_or_path _attn_implementation auto_map transformers_version use_cache initializer_range
    attention_dropout pretraining_tp chunk_size_feed_forward diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size ep_size aux_loss_alpha seq_aux id2label label2id
    forced_bos_token_id forced_eos_token_id is_decoder is_encoder_decoder length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id decoder_start_token_id
    suppress_tokens begin_suppress_tokens bad_words_ids exponential_decay_length_penalty
    finetuning_task prefix task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torchscript typical_p use_bfloat16 cross_attention_hidden_size
    add_cross_attention max_window_layers first_k_dense_replace moe_intermediate_size moe_layer_freq
    n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
    num_nextn_predict_layers routed_scaling_factor scoring_func topk_group topk_method qk_head_dim
    """.split()
)


def checked(name: str, value: Json, kind: str, key: str = "") -> Any:
    """Return a key's value, with a list as a tuple.

    Args:
        name: the key's name, for the message.
        value: the value in the config.
        kind: see `drafters.keys.Key`.
        key: its place, if that differs from its name.

    Raises:
        ConfigInvalid: the value is not of its kind.
    """
    right, phrase = KINDS[kind]
    if not right(value):
        raise ConfigInvalid(
            f"{name} is {value!r}, not {phrase}",
            where=in_config(key or name),
            fix="Correct the key.",
            code="K012",
        )
    return tuple(value) if isinstance(value, list) else value


def _is_int(value: Json) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


ABSENT = object()
# Limits that no head ever exceeded: a larger value is a mistake or an attack.
# Engines add epsilon in fp32, in which 1e-38 and less is zero.
MAX_VOCAB, LEAST_POSITIONS, MIN_EPS, MAX_EPS = 1 << 24, 8, 1e-30, 0.1
# Far above any draft head; each layer's tensors are listed one by one, so a billion layers would never end.
MAX_LAYERS = 1000
KINDS: Mapping[str, tuple[Callable[[Json], bool], str]] = {
    "count": (lambda v: _is_int(v) and 0 < v < 2**31, "a positive number"),
    "depth": (lambda v: _is_int(v) and 0 < v <= MAX_LAYERS, f"a number of layers up to {MAX_LAYERS}"),
    # The largest known target has 262,208; until it is checked, the number that decides an allocation is untrusted.
    "vocabulary": (lambda v: _is_int(v) and 0 < v <= MAX_VOCAB, f"a number of tokens up to {MAX_VOCAB:,}"),
    "positions": (
        lambda v: _is_int(v) and LEAST_POSITIONS <= v < 2**31,
        f"a context of {LEAST_POSITIONS} tokens or more",
    ),
    "fraction": (
        lambda v: isinstance(v, (int, float)) and MIN_EPS <= v <= MAX_EPS,
        f"a number between {MIN_EPS:g} and {MAX_EPS}",
    ),
    "flag": (lambda v: isinstance(v, bool), "true or false"),
    "whole": (lambda v: _is_int(v) and 0 <= v < 2**31, "a whole number from 0"),
    "word": (lambda v: isinstance(v, str), "a word"),
    # Some configs use -1 for none.
    "token": (
        lambda v: all(_is_int(i) and -1 <= i < 2**31 for i in (v if isinstance(v, list) else [v])),
        "a token id or a list of them",
    ),
}


def find(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, `ABSENT` if there is none."""
    place: Json | Mapping[str, Any] = config
    for part in path.split("."):
        if not isinstance(place, Mapping) or part not in place:
            return ABSENT
        place = place[part]
    return place


def architectures(config: Mapping[str, Any]) -> str:
    """Return the class names that a config states, as one text."""
    names: Json = config.get("architectures")
    return " ".join(map(str, names)) if isinstance(names, list) else str(names)


# What to do about a sliding window.
FULL_ATTENTION = "If the head was trained with full attention, set use_sliding_window to false."


def check_fixed(
    name: str,
    allowed: tuple[Any, ...],
    config: Mapping[str, Any],
    problems: Problems,
    *,
    what: str = "heads",
    fix: str = "",
    code: str = "K013",
) -> None:
    """Find a key that asks for another value than the only ones that kconv supports; see `Drafter.fixed`.

    Args:
        name: its dotted path.
        allowed: those values.
        config: the config.
        problems: the list to which the problem is added.
        what: the family's drafters, for the message.
        fix: what to do about it; "" for what is said of any key.
        code: the rule about it.
    """
    value = find(config, name)
    if value is not ABSENT and value not in allowed:
        only = "without the key" if allowed[0] is None else f"with {allowed[0]!r}"
        problems.add(
            ConfigUnsupported,
            f"{name} is {value!r}; kconv supports only {what} {only}",
            in_config(name),
            fix or "If the key has no effect on this head, remove it; otherwise kconv cannot support this head.",
            code,
        )


def check_full_attention(config: Mapping[str, Any], problems: Problems) -> None:
    """Find a layer whose attention has a sliding window."""
    kinds: Json = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        problems.add(
            ConfigUnsupported,
            f"layer_types is {kinds!r}; kconv supports only full attention",
            in_config("layer_types"),
            "Serve this head with the engine that it was made for.",
            "K014",
        )
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window") is not False and not kinds:
        problems.add(
            ConfigUnsupported,
            f"sliding_window is {window!r}; kconv supports only full attention",
            in_config("sliding_window"),
            FULL_ATTENTION,
            "K014",
        )
