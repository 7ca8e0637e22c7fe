"""What an engine is: one object with everything that kconv knows of it.

All else iterates over `registry.engines()`. Another package adds an engine by an entry point of the group
`kconv.engines` that names such an object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..head.spec import HeadSpec
from .counters import Counters, PerRequest
from .layout import Layout

# What stands in launch commands until somebody says it, and K in them.
HEAD, TARGET = "PATH_OR_ID_OF_THIS_HEAD", "PATH_OR_ID_OF_THE_TARGET"
DRAFT_TOKENS = 3
# Where a server that kconv starts listens.
HOST = "127.0.0.1"

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Runner:
    """A part of an engine that reads a head's config in its own way, under the name that `validate --for` takes.

    Attributes:
        name: e.g. "vllm-v1".
        aux_layers: from a config in the common keys and the model_type of the target's text model (None where the
            target is not known) to the layers that it captures, as outputs; None of it where it takes its default.
            None where a launch option says them, and the config does not.
        aux_count: from a config and whether the head is an MLA one to the number of captured states that fc is built
            for; None of it where it takes its default, which is 3.
    """

    name: str
    aux_layers: Callable[[Config, str | None], tuple[int, ...] | None] | None = None
    aux_count: Callable[[Config, bool], Any] | None = None


@dataclass(frozen=True)
class Capture:
    """How an engine's class of a target captures the layers that a head lists.

    Attributes:
        model_types: of the target's text model.
        source: pinned link to the lines that decide it.
        listed: from the captured layers, as outputs, and the target's number of layers (None where that is not known)
            to the list that the class takes for them; None where no list says them.
    """

    model_types: tuple[str, ...]
    source: str
    listed: Callable[[tuple[int, ...], int | None], tuple[int, ...] | None]


@dataclass(frozen=True)
class NullKey:
    """A config key that may be absent and may not be null.

    Attributes:
        path: dotted, in config.json.
        becomes: what follows.
        heads: those that it concerns: "" for all, "gqa", "mla", "deep" for more than one layer, "normed" for a norm
            before fc.
        runner: the one of the engine's that it concerns; "" for all.
    """

    path: str
    becomes: str
    heads: str = ""
    runner: str = ""


@dataclass(frozen=True)
class Launch:
    """How an engine is told about a head.

    Attributes:
        command: for a shell, with `HEAD` and `TARGET` in it.
        file: the file that a conversion writes beside the weights.
        text: its content. Lines that begin with # are notes.
        is_config: whether the command names the file, which is then no script.
        unwritten: what a card says where the file is not at hand; "" for nothing.
    """

    command: str
    file: str
    text: Callable[[HeadSpec], str]
    is_config: bool = False
    unwritten: str = ""


@dataclass(frozen=True)
class Drafting:
    """Where a running server says how it drafts, as a JSON object.

    Attributes:
        path: its page.
        steps: the key of K.
        branches: the key of the number of branches; 1 is a chain.
        nodes: the key of the number of tokens that a verify step looks at, the last accepted one among them.
        keys: those that acceptance.json keeps.
    """

    path: str
    steps: str
    branches: str
    nodes: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Serving:
    """What a started engine shall serve.

    Attributes:
        python: the interpreter of an environment that holds the engine (see scripts/engine-env).
        target: the target's folder.
        head: the draft head's folder; None to serve without speculation.
        draft_tokens: tokens drafted per verify step (K).
        dtype: of the weights in memory, target's and head's.
        max_model_len: context, tokens.
        ready_seconds: how long it may take to be ready; one that fails dies, and is not waited for.
        options: further options of its command line, by name.
        branches: how many likeliest tokens each drafted one branches into; 1 is a chain.
        nodes: tokens of a tree that a verify step looks at, the last accepted one among them.
    """

    python: Path
    target: Path
    head: Path | None = None
    draft_tokens: int = 3
    dtype: str = "float32"
    max_model_len: int = 256
    ready_seconds: float = 1800.0
    options: Mapping[str, str] = field(default_factory=dict)
    branches: int = 1
    nodes: int = 0


@dataclass(frozen=True)
class Starter:
    """How an engine is started; see `serving.serve`.

    Attributes:
        command: its command line, for a port.
        environment: the variables that are set beside the caller's own.
        cause: matches a line of its log that says why it died, group 1 what to show.
        note: what its figures rest on besides the engine itself, from the python that it is started with; "" for
            nothing.
        trees: whether it drafts trees too.
        methods: how one that is started so samples, by vLLM's names, where it does not say that itself.
    """

    command: Callable[[Serving, int], list[str]]
    environment: Callable[[Serving], Mapping[str, str]]
    cause: re.Pattern[str]
    note: Callable[[Path], str] = lambda _: ""
    trees: bool = False
    methods: Mapping[str, str] = field(default_factory=dict)


def rows_as_stated(spec: HeadSpec) -> float:
    """Return the rows of a table of angles that is as long as max_position_embeddings says."""
    return spec.max_positions


@dataclass(frozen=True, eq=False)
class Engine:
    """An engine.

    Attributes:
        name: what a user calls it: in `--engine`, `--for`, facts files and acceptance.json.
        title: its name on a card.
        layout: the layout that it reads. Several engines may read one.
        release: the releases whose code this was read in, and for which its rules hold.
        runners: who reads a config in it; by default one, of the engine's name, that reads no list of layers.
        captures: its classes of targets that capture; a target of another model type is not known to be served with a
            head. Empty where kconv does not know.
        launch: how it is told about a head; None where kconv writes no launch file.
        counters: how its counters of drafts are read; None where it has none.
        drafting: where a server says how it drafts; None where it does not.
        starter: how kconv starts it; None where it cannot.
        per_request: how it continues token ids and says what it drafted meanwhile; outputs are compared as text where
            it is None.
        architectures: the names of a head's class that it knows, for `Gqa` and for `Mla`; empty where it takes any.
        rewritten: model types for which it builds something else than a head.
        latent_by_default: model types whose config class makes each head an MLA one.
        head_counts: the keys that it takes an MLA head's number of heads from.
        rope_objects: those of rope_scaling and rope_parameters that it may take alone.
        rope_rows: from a head to the rows of its table of angles; the positions behind them are read past its end.
        flags: where it reads a flag, by the flag's field in `keys.COMMON`; only those that it does not read everywhere.
        null_keys: keys that it takes otherwise than absent where they are null.
    """

    name: str
    title: str
    layout: Layout
    release: str = ""
    runners: tuple[Runner, ...] = ()
    captures: tuple[Capture, ...] = ()
    launch: Launch | None = None
    counters: Counters | None = None
    drafting: Drafting | None = None
    starter: Starter | None = None
    per_request: PerRequest | None = None
    architectures: Mapping[type, frozenset[str]] = field(default_factory=dict)
    rewritten: tuple[str, ...] = ()
    latent_by_default: tuple[str, ...] = ()
    head_counts: tuple[str, ...] = ("num_attention_heads",)
    rope_objects: tuple[str, ...] = ("rope_scaling",)
    rope_rows: Callable[[HeadSpec], float] = rows_as_stated
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    null_keys: tuple[NullKey, ...] = ()

    def __post_init__(self) -> None:
        if not self.runners:
            object.__setattr__(self, "runners", (Runner(self.name),))

    def capture(self, model_type: str) -> Capture | None:
        """Return how it captures from a target of this model type; None where it is not known to."""
        return next((one for one in self.captures if model_type in one.model_types), None)

    @property
    def runner_names(self) -> tuple[str, ...]:
        """The names under which `validate --for` checks it."""
        return tuple(runner.name for runner in self.runners)
