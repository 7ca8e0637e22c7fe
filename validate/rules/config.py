"""Statements in a config, and checkpoints that cannot be read at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ...convert.config import FROM_TRAINING
from ...convert.read import ITS_CONFIG, ONE_NAME
from ...drafters.eagle3 import KEYS
from ...drafters.facts import TARGETS_DEPTH, UNDECIDED
from ...drafters.keys import FULL_ATTENTION, Key
from ...drafters.spec import Mla
from ...engines.checks import is_speculators
from ...engines.registry import engines
from ...rule import Found, Rule
from .head import HeadSubject
from .subject import ENGINES, readers

FLAGS = "https://github.com/vllm-project/vllm/pull/42143"


def flag_of_another_meaning(subject: HeadSubject) -> Iterator[Found]:
    otherwise = subject.layout.config.otherwise if subject.layout is not None else {}
    if "norm_output" in otherwise and subject.config.get("norm_output") is True:
        yield Found("config.json: norm_output", "true, but this head passes on the state before the norm")


class Place(NamedTuple):
    """Where an engine reads a flag; it does not see the flag anywhere else."""

    flag: tuple[str, ...]
    engines: tuple[str, ...]
    read: tuple[str, ...]


def _places(key: Key) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return where a flag is read by engines that do not read it everywhere, and which engines these are."""
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for engine in engines():
        if read := engine.flags.get(key.field):
            found[read] = (*found.get(read, ()), *engine.runner_names)
    return found


PLACES = tuple(Place(key.names + key.also, names, read) for key in KEYS for read, names in _places(key).items())


def flag_not_read(subject: HeadSubject) -> Iterator[Found]:
    for place in PLACES:
        stated = [name for name in place.flag if subject.stated(name) is True]
        blind = sorted(subject.engines.intersection(place.engines))
        if stated and blind and not any(subject.stated(name) is True for name in place.read):
            yield Found(f"config.json: {stated[0]}", f"true, but {', '.join(blind)} reads {place.read[0]}")


def _always(_: HeadSubject) -> bool:
    return True


def _is_mla(subject: HeadSubject) -> bool:
    return subject.is_mla


def _is_gqa(subject: HeadSubject) -> bool:
    return not subject.is_mla


def _is_deep(subject: HeadSubject) -> bool:
    return subject.spec is not None and subject.spec.layers > 1


def _is_normed_before_fc(subject: HeadSubject) -> bool:
    return subject.stated("norm_before_fc") is True


class Null(NamedTuple):
    """A key that may be absent but not null.

    Attributes:
        path: dotted path in config.json.
        engines: the engines that check whether the key exists, or read its value, without expecting null.
        becomes: what follows.
        of: the heads concerned.
    """

    path: str
    engines: tuple[str, ...]
    becomes: str
    of: Callable[[HeadSubject], bool] = _always


# By the values of `engines.base.NullKey.heads`.
HEADS: Mapping[str, Callable[[HeadSubject], bool]] = {
    "": _always,
    "mla": _is_mla,
    "gqa": _is_gqa,
    "deep": _is_deep,
    "normed": _is_normed_before_fc,
}


def _nulls() -> Iterator[Null]:
    found: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for engine in engines():
        for null in engine.null_keys:
            names = (null.runner,) if null.runner else engine.runner_names
            key = (null.path, null.becomes, null.heads)
            found[key] = (*found.get(key, ()), *names)
    for (path, becomes, heads), names in found.items():
        yield Null(path, names, becomes, HEADS[heads])


NULLS = tuple(_nulls())


def key_null(subject: HeadSubject) -> Iterator[Found]:
    # vLLM builds its own config from speculators' format, and the other engines do not read that format.
    if subject.layout is None or is_speculators(subject):
        return
    for null in NULLS:
        asked = sorted(subject.engines.intersection(null.engines))
        if asked and subject.stated(null.path) is None and null.of(subject):
            yield Found(f"config.json: {null.path}", f"null, so {null.becomes} ({', '.join(asked)})")


# torch's names of the dtypes in which a head can be computed; transformers looks them up by these names.
DTYPES = frozenset("bfloat16 float16 half float32 float float64 double".split())
# Default number of heads of an MLA config's class; the engines say which keys they read:
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/deepseek_v3/configuration_deepseek_v3.py#L87-L88
DEFAULT_HEADS = 128
# Every name in transformers' registry is of this form, but for one old one of another kind of model.
MODEL_TYPE = re.compile(r"[a-z0-9._-]+")
HEAD_KEYS: Mapping[str, tuple[str, ...]] = readers(lambda engine: engine.head_counts)


def model_type_unstated(subject: HeadSubject) -> Iterator[Found]:
    # vLLM recognizes speculators' format by another key, and the other engines do not read that format.
    stated = subject.config.get("model_type")
    if not is_speculators(subject) and not (isinstance(stated, str) and MODEL_TYPE.fullmatch(stated)):
        yield Found("config.json: model_type", "the key is absent or null" if stated is None else f"{stated!r}")


def heads_by_default(subject: HeadSubject) -> Iterator[Found]:
    attention = subject.spec.attention if subject.spec else None
    if not isinstance(attention, Mla) or attention.heads == DEFAULT_HEADS:
        return
    for key, read_by in HEAD_KEYS.items():
        asked = sorted(subject.engines.intersection(read_by))
        if asked and subject.flat.get(key) is None:
            taken = f"{', '.join(asked)} would assume {DEFAULT_HEADS}, but the head has {attention.heads}"
            yield Found(f"config.json: {key}", f"the key is absent or null: {taken}")


def dtype_unknown(subject: HeadSubject) -> Iterator[Found]:
    for key in ("torch_dtype", "dtype"):
        stated = subject.flat.get(key)
        if stated is not None and (not isinstance(stated, str) or stated not in DTYPES):
            yield Found(f"config.json: {key}", f"{stated!r} is not one of {', '.join(sorted(DTYPES))}")


def taken_otherwise(subject: HeadSubject) -> Iterator[Found]:
    if subject.layout is None or subject.drafter is None:
        return
    inner = subject.config.get(subject.layout.config.nested)
    written = {**subject.config, **(inner if isinstance(inner, Mapping) else {})}
    for fact in subject.drafter.facts.values():
        said = subject.hints.told(fact.hint)
        if said is None or (fact.stated and fact.stated(written)):
            continue
        for engine in engines():
            taken, asked = engine.taken.get(fact.name), subject.engines.intersection(engine.runner_names)
            value = taken.value(written) if taken and asked else None
            if taken and value is not None and value != said:
                yield Found(
                    f"config.json: {fact.name}",
                    f"{fact.options(said)}, but {engine.title} takes {value!r} from this config ({taken.source})",
                    f"Convert the head (kconv to-{engine.name} with {fact.options(said)}), which writes it into the"
                    " config.",
                    engine.runner_names,
                )


RULES: tuple[Rule[HeadSubject], ...] = (
    Rule(
        "K001",
        "not-a-checkpoint",
        "error",
        "The folder has no config.json or no safetensors.",
        fix="Check the path, or fetch the missing files. A checkpoint is a folder with config.json and *.safetensors.",
        says_fix=True,
    ),
    Rule(
        "K002",
        "corrupt-header",
        "error",
        "A safetensors header contradicts its own file. The download was cut short, or the file was changed.",
        fix="Fetch or export the file again, and compare its sha256 with the publisher's.",
        says_fix=True,
    ),
    Rule(
        "K003",
        "corrupt-index",
        "error",
        "The index names missing files or tensors, or leaves tensors out, or two files hold the same ones.",
        fix="Fetch the missing shard. If the files come from different runs, export again.",
        says_fix=True,
    ),
    Rule(
        "K004",
        "unknown-layout",
        "error",
        "kconv recognizes no Eagle3 head in the config and the tensor names.",
        fix="If it is an Eagle3 head, name its layout with --from.",
        seen_in="https://github.com/vllm-project/speculators/issues/1114",
        says_fix=True,
    ),
    Rule(
        "K005",
        "twins-differ",
        "error",
        "Two tensors hold one weight under two names, but with different values. Engines load different ones.",
        fix=ONE_NAME,
        says_fix=True,
    ),
    UNDECIDED,
    Rule(
        "K026",
        "config-of-another",
        "error",
        "The config is of another kind of attention than the tensors. It belongs to another head.",
        fix=ITS_CONFIG,
    ),
    Rule(
        "K007",
        "no-place-in-layout",
        "error",
        "The head's layout, or that of --from, has no place for a part of it.",
        fix="Name the layout that the head is in with --from.",
        says_fix=True,
    ),
    Rule(
        "K008",
        "config-invalid",
        "error",
        "A key of the config has an impossible value.",
        fix="Correct the key; the head's training config has the right value.",
        says_fix=True,
    ),
    Rule(
        "K009",
        "head-unproven",
        "error",
        "kconv cannot read the head, so it cannot check it.",
        fix="Follow the message, then validate again.",
        says_fix=True,
    ),
    Rule(
        "K010",
        "key-missing",
        "error",
        "The config lacks a key that an engine needs to build the head.",
        fix=FROM_TRAINING,
    ),
    Rule(
        "K011",
        "key-contradiction",
        "error",
        "Two keys with one meaning have different values. Engines differ in which they read.",
        fix="Keep the value that the head was trained with, and remove the other.",
        seen_in=FLAGS,
    ),
    Rule(
        "K012",
        "key-type",
        "error",
        "A key has a value of the wrong type.",
        fix="Correct the key; the head's training config has the right value.",
    ),
    Rule(
        "K013",
        "key-unsupported",
        "error",
        "A key asks for a computation that engines do not do for Eagle3 heads.",
        fix="Serve the head with the engine it was made for. Remove the key only if it has no effect on this head.",
    ),
    Rule(
        "K014",
        "sliding-window",
        "error",
        "The config asks for a sliding window. Not every engine supports it for a draft head.",
        fix=FULL_ATTENTION,
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama.py#L186-L204",
    ),
    Rule(
        "K016",
        "root-contradicts",
        "error",
        "A nested config and the top level state different values for one key.",
        fix="Keep the value that the head was trained with, and remove the other.",
        seen_in="https://github.com/vllm-project/speculators/issues/610",
    ),
    Rule(
        "K017",
        "flag-of-another-meaning",
        "error",
        "norm_output has SpecForge's meaning, the norm before lm_head. Engines read it as EAGLE-3.1's flag and feed"
        " the normed state to the next step.",
        fix="Convert the head with kconv, which leaves the key out.",
        engines=ENGINES,
        seen_in="https://github.com/sgl-project/sglang/pull/26506",
        check=flag_of_another_meaning,
    ),
    Rule(
        "K018",
        "flag-not-read",
        "error",
        "A flag has a name or a place where an engine does not look. Examples: norm_before_fc outside eagle_config, "
        "use_aux_norm, return_hidden_post_norm.",
        fix="Convert the head with kconv, which writes each flag where engines read it.",
        engines=ENGINES,
        seen_in="https://github.com/vllm-project/speculators/issues/610",
        check=flag_not_read,
    ),
    Rule(
        "K019",
        "key-null",
        "error",
        "A key is null, which an engine treats differently from an absent key. It fails or computes something else.",
        fix="Remove the key, or state the value that the head was trained with. kconv's conversions write no"
        " nulls here.",
        engines=ENGINES,
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1138",
        check=key_null,
    ),
    Rule(
        "K020",
        "model-type-unstated",
        "error",
        "The config states no model_type, or none that can be one. transformers needs it to choose the config class, so"
        " no engine can open the head.",
        fix="Set model_type to llama, or to kimi_k2 for an MLA head. kconv's conversions do this.",
        engines=ENGINES,
        seen_in="https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/auto/"
        "configuration_auto.py#L442-L445",
        check=model_type_unstated,
    ),
    Rule(
        "K021",
        "heads-by-default",
        "error",
        "An MLA head's config states its number of heads under only one of two names. An engine that reads"
        " the other assumes DeepSeek-V3's 128.",
        fix="State num_attention_heads and num_key_value_heads with the same number. kconv's conversions write both.",
        engines=ENGINES,
        seen_in="https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/deepseek_v3/"
        "configuration_deepseek_v3.py#L87-L88",
        check=heads_by_default,
    ),
    Rule(
        "K022",
        "dtype-unknown",
        "error",
        "torch has no dtype of this name, or a head cannot be computed in it. The config is refused, or the"
        " weights are cast wrongly.",
        fix="Set torch_dtype (and dtype) to the dtype of the weights, e.g. bfloat16.",
        engines=ENGINES,
        seen_in="https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/configuration_utils.py#L317-L325",
        check=dtype_unknown,
    ),
    TARGETS_DEPTH,
    Rule(
        "K024",
        "option-not-in-config",
        "error",
        "An option states another value than an engine takes from these files. Engines do not see the option, so the"
        " folder as it is serves another head than the one that kconv checked.",
        fix="Convert the head with the option, which writes it into the config.",
        engines=ENGINES,
        seen_in="https://github.com/sgl-project/SpecForge/issues/265",
        check=taken_otherwise,
    ),
)
