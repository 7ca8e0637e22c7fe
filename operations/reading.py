"""Facts that a head's config may leave open: the options of every operation that reads a head."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, create_model, model_validator

from ..drafters.registry import drafters
from ..errors import KconvError, PluginInvalid
from ..options import Count, LayerIds, Name, option
from .base import Context, Operation

if TYPE_CHECKING:
    from ..checkpoint.folder import Checkpoint
    from ..checkpoint.manifest import Hints
    from ..checkpoint.source import Source
    from ..convert.read import Head
    from ..engines.layout import Layout
    from ..serving.states import ServedRunner
    from ..targets.config import TargetConfig

Theta = Annotated[float, Field(gt=0)]


class _Reading(Operation):
    """The options about every family's facts, and the target."""

    from_: str | None = option(None, "Layout of the head; detected by default.", metavar="LAYOUT")
    captured: LayerIds | None = option(
        None,
        "The captured (auxiliary hidden-state) layers, as 0-based outputs, e.g. 1,29,57.",
        kind="ids",
    )
    captured_are: Literal["outputs", "inputs"] | None = option(None, "Whether the config lists outputs or inputs.")
    rope_theta: Theta | None = option(None, "RoPE base, if the config omits it.", metavar="BASE")
    layers: Count | None = option(None, "Decoder layers of the head, if the config states the target's.", metavar="N")
    max_positions: Count | None = option(None, "Longest context that you will serve.", metavar="N")
    target: Name | None = option(None, "The target; its depth decides the default captured layers.", kind="checkpoint")
    target_layers: Count | None = option(None, "The target's depth, instead of --target.", metavar="N")

    @model_validator(mode="after")
    def _one_depth(self) -> Self:
        if self.target is not None and self.target_layers is not None:
            raise ValueError("--target already gives the number of layers; remove --target-layers")
        head = getattr(self, "head", None)
        if self.target is not None and head is not None and os.path.realpath(self.target) == os.path.realpath(head):
            raise ValueError("--target is the head itself; pass the model that the head drafts for")
        return self

    def layout(self) -> Layout | None:
        """Return the layout that the request names; None to detect it from the head's marks.

        Raises:
            UnknownLayout: there is no such layout.
        """
        from ..engines import by_name

        return by_name(self.from_) if self.from_ else None

    def hints(self, config: TargetConfig | None = None) -> Hints:
        """Return the user's options where a config is silent, for a target if there is one."""
        from ..checkpoint.manifest import Hints

        given = {name: getattr(self, name) for name in Reading.model_fields.keys() - {"from_", "target"}}
        told = Hints.model_validate({name: value for name, value in given.items() if value is not None})
        return told.model_copy(update={"target_layers": config.layers}) if config else told

    def target_config(self, context: Context) -> TargetConfig | None:
        """Return the config of the target that the request names; None if it names none."""
        if self.target is None:
            return None
        from ..targets.config import read_target_config

        return read_target_config(context.source(self.target).fetch_config())

    def open(self, context: Context, head: str) -> Head:
        """Open a head with its weights, downloading them if needed.

        Raises:
            TargetInvalid: the head reads other hidden states, or another vocabulary, than the target's.
            KconvError: it cannot be read; see `convert.read`.
        """
        return self._open(context.source(head), context.source(head).open_weights(), context.maybe(self.target))

    def open_headers(self, context: Context, head: str) -> Head:
        """Open a head from its config and headers alone; see `open`."""
        return self._open(context.source(head), context.source(head).open_headers(), context.maybe(self.target))

    def _open(self, head: Source, checkpoint: Checkpoint, target: Source | None) -> Head:
        """Open a head; where its target would decide an open fact, the error names the target that its files name."""
        from ..convert.identify import name_target
        from ..convert.opening import open_head

        try:
            return open_head(checkpoint, self.layout(), self.hints(), target)
        except KconvError as error:
            error.needs, error.fix = name_target(error.needs, error.fix, head, checkpoint.config)
            raise


def fields_of_facts() -> dict[str, Any]:
    """Return the fields that state a family's own facts, each from the fact's row.

    Raises:
        PluginInvalid: another package's fact has the option of something else.
    """
    found: dict[str, Any] = {}
    for fact in (fact for one in drafters() for fact in one.facts.values()):
        if fact.answer is None:
            continue
        if fact.hint in _Reading.model_fields:
            raise PluginInvalid(
                f"the fact {fact.name} is stated by {fact.option}, which is an option already",
                where=f"the fact's rule {fact.rule.id}",
                fix="Give the fact's hint another name.",
            )
        found[fact.hint] = (fact.answer.type | None, fact.answer.option(f"{fact.name}, if the config omits it."))
    return found


if TYPE_CHECKING:
    Reading = _Reading
else:
    Reading = create_model("Reading", __base__=_Reading, __module__=__name__, **fields_of_facts())
    Reading.__doc__ = "The user's options where a head's config is silent or ambiguous."
    Reading.RARE = frozenset(Reading.model_fields.keys() - {"target"})


def check_trusted(context: Context, trust_remote_code: bool, target: str | None) -> None:
    """Refuse to run the code of a target's tokenizer unless the user named its commit.

    Raises:
        RequestInvalid: it may run, and the target's code could change tomorrow.
    """
    from ..errors import RequestInvalid

    if trust_remote_code and target is not None and not (source := context.source(target)).pinned:
        raise RequestInvalid(
            "--trust-remote-code needs a pinned target", where="--target", fix=f"Name the commit: {source.name}"
        )


def check_target(context: Context, name: str | None, *, tokenizer: bool = False) -> TargetConfig | None:
    """Refuse a target that is none, from its config alone, before anything slow is loaded.

    Args:
        context: of the request.
        name: the target's name; None for no target.
        tokenizer: whether a folder must have one.

    Returns:
        Its config.

    Raises:
        NotACheckpoint, TargetInvalid: it is a draft head or no causal language model, or has no tokenizer.
    """
    if name is None:
        return None
    from ..checkpoint.source import Folder
    from ..targets.config import has_tokenizer, no_tokenizer, read_target_config

    source = context.source(name)
    folder = source.fetch_config()
    config = read_target_config(folder)
    # On the Hub it is fetched later, when it is known that the target fits into memory.
    if tokenizer and isinstance(source, Folder) and not has_tokenizer(folder):
        raise no_tokenizer(folder)
    return config


def check_python(python: Path | None, engine: str | None) -> None:
    """Refuse an engine's python that does not run or lacks the engine, before anything slow is loaded.

    Raises:
        EngineFailed: it does not exist, or its environment has no such package.
    """
    if python is None or engine is None:
        return
    import subprocess

    from ..engines import registry
    from ..errors import EngineFailed

    title = registry.engine(engine).title
    fix = f"Pass the python of an environment that has {title} installed."
    # The package has the engine's name. Another exit code is left to the start itself, whose message says more.
    code = f"import importlib.util as u, sys; sys.exit({ABSENT} if u.find_spec({engine!r}) is None else 0)"
    try:
        ran = subprocess.run([python, "-I", "-c", code], capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as fault:
        why = fault.strerror if isinstance(fault, OSError) else "it does not end"
        raise EngineFailed(f"{python} cannot be run: {why}", where="--engine-python", fix=fix) from fault
    if ran.returncode == ABSENT:
        raise EngineFailed(f"{python} has no {title}", where="--engine-python", fix=fix)


# The exit code of the question above; Python's own are 0, 1 and 2.
ABSENT = 9


Reach = Callable[["TargetConfig", str], "ServedRunner"]
"""Returns a target in a vLLM server, from its config and the dtype of its states."""


@contextmanager
def serving(context: Context, target: str, url: str | None, shared: str | None, at_once: int) -> Iterator[Reach | None]:
    """Yield a function that connects to a target in a vLLM server; None without a URL.

    At the end, in any case, nothing that this process requested is left in the folder that the server writes to.
    """
    if url is None:
        yield None
        return
    from ..checkpoint.tensors import read_tensor
    from ..serving.client import connect
    from ..serving.states import ServedRunner, swept
    from ..targets.model import find_ends

    folder = Path(shared or "")
    with swept(folder) as name:

        def reach(config: TargetConfig, dtype: str) -> ServedRunner:
            ends = find_ends(context.source(target)).tensors
            norm, lm_head = (
                read_tensor(ends[tensor]) for tensor in (config.on_disk("model.norm.weight"), config.lm_head)
            )
            server = connect(url, None, {}, 600.0)
            return ServedRunner(server, folder, config, norm, lm_head, dtype, at_once=at_once, name=name)

        yield reach


def check_prompts(file: Path) -> None:
    """Refuse unreadable prompts before anything slow is loaded; a suite is checked later.

    Raises:
        PromptsInvalid: see `targets.prompts.read_prompts`.
    """
    from ..targets.prompts import each_prompt
    from ..targets.suites import SUITES

    if str(file).partition("@")[0] not in SUITES:
        for _ in each_prompt(file):
            pass


def check_data(context: Context, *names: str | None, chosen: Sequence[str] = ()) -> None:
    """Refuse a file of training data that is not there or holds something else, before anything slow is loaded.

    Args:
        context: of the request.
        names: files, or ids of data sets on the Hub, which are looked at later; None for neither.
        chosen: the request's options that choose a part of a data set.

    Raises:
        TrainingDataInvalid: a name is that of a file, and there is none; or its first row is no dialogue and no text.
        RequestInvalid: a part is chosen of files.
    """
    from ..errors import RequestInvalid, TrainingDataInvalid

    given = [name for name in names if name is not None]
    for name in given:
        if context.path(name).is_file():
            from ..targets.dialogues import check_first_row

            check_first_row(context.path(name))
        elif name.endswith((".json", ".jsonl")) and not context.path(name).exists():
            raise TrainingDataInvalid(
                f"there is no file {name}",
                where=name,
                fix="Pass a JSONL file, or the id of a dataset on the Hub (with --split and --revision).",
            )
    if chosen and given and all(context.path(name).is_file() for name in given):
        raise RequestInvalid(
            f"{', '.join(chosen)}: only with a dataset on the Hub; {given[0]} is a file",
            fix=f"Remove {' and '.join(chosen)}.",
        )


def refuse_existing_output(out: str | None, source: str | None = None) -> None:
    """Refuse an output that already exists, or that lies inside the checkpoint it is made from.

    Raises:
        OutputExists: it exists.
        RequestInvalid: it would lie inside the source's folder, where its files would count as the source's.
    """
    from ..checkpoint.staging import ANOTHER_NAME, refuse_existing
    from ..errors import RequestInvalid

    if out is None:
        return
    if source is not None and os.path.lexists(out) and os.path.realpath(out) == os.path.realpath(source):
        raise RequestInvalid(
            f"{out} is the source itself, which kconv does not change",
            where="OUT",
            fix="The source comes first, and OUT last: choose another name for OUT.",
        )
    if source is None or os.path.lexists(source):
        refuse_existing(Path(out))
    else:
        refuse_existing(Path(out), fix=f"If it is the source, name it first; {source} is no folder. {ANOTHER_NAME}")
    if source is not None and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(source)):
        raise RequestInvalid(f"{out} is inside {source}, its source", where="OUT", fix="Choose a folder outside it.")
