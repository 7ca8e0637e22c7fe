"""Facts that a head's config may leave open: the options of every operation that reads a head."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from .base import Context, LayerIds, Name, Operation, option

if TYPE_CHECKING:
    from ..convert.captured import Hints
    from ..convert.read import Head
    from ..engines.layout import Layout
    from ..engines.vllm_states import ServedRunner
    from ..targets.config import TargetConfig

Count = Annotated[int, Field(ge=1)]
Theta = Annotated[float, Field(gt=0)]
YES_OR_NO = {"yes": True, "no": False}
YesOrNo = Annotated[bool, BeforeValidator(lambda value: YES_OR_NO.get(str(value).lower(), value))]


class Reading(Operation):
    """The user's options where a head's config is silent or ambiguous."""

    from_: str | None = option(None, "Layout of HEAD; detected by default.", metavar="LAYOUT")
    captured: LayerIds | None = option(
        None,
        "The captured layers, as 0-based outputs, e.g. 1,29,57.",
        kind="ids",
    )
    captured_are: Literal["outputs", "inputs"] | None = option(None, "What the config's list counts.")
    rope_theta: Theta | None = option(None, "RoPE base, if the config omits it.", metavar="BASE")
    layers: Count | None = option(None, "Decoder layers of the head, if the config states the target's.", metavar="N")
    max_positions: Count | None = option(None, "Longest context that you will serve.", metavar="N")
    norm_before_residual: YesOrNo | None = option(
        None, "Its value, if the config omits it.",
        kind="yes-or-no",
    )  # fmt: skip
    target: Name | None = option(None, "The target; its depth decides the default captured layers.", kind="checkpoint")
    target_layers: Count | None = option(None, "The target's depth, instead of --target.", metavar="N")

    @model_validator(mode="after")
    def _one_depth(self) -> Self:
        if self.target is not None and self.target_layers is not None:
            raise ValueError("--target already gives the number of layers; remove --target-layers")
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
        from ..convert.captured import Hints

        return Hints(
            self.captured,
            self.captured_are,
            config.layers if config else self.target_layers,
            self.max_positions,
            self.norm_before_residual,
            self.rope_theta,
            self.layers,
        )

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
        from ..convert.opening import open_head

        return open_head(context.source(head).open_weights(), self.layout(), self.hints(), context.maybe(self.target))

    def open_headers(self, context: Context, head: str) -> Head:
        """Open a head from its config and headers alone; see `open`."""
        from ..convert.opening import open_head

        return open_head(context.source(head).open_headers(), self.layout(), self.hints(), context.maybe(self.target))


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
    from ..engines.client import connect
    from ..engines.vllm_states import ServedRunner, swept
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


def check_data(context: Context, name: str | None) -> None:
    """Refuse a file of training data that is not there, before anything is loaded that takes seconds.

    Args:
        context: of the request.
        name: a file, or the id of a data set on the Hub, which is looked at later; None for neither.

    Raises:
        TrainingDataInvalid: it is the name of a file, and there is none.
    """
    from ..errors import TrainingDataInvalid

    if name is not None and name.endswith((".json", ".jsonl")) and not context.path(name).exists():
        raise TrainingDataInvalid(
            f"there is no file {name}",
            where=name,
            fix="Give a JSONL file, or the id of a data set on the Hub (with --split and --revision).",
        )


def refuse_existing_output(out: str | None, source: str | None = None) -> None:
    """Refuse an output that already exists, or that lies inside the checkpoint it is made from.

    Raises:
        OutputExists: it exists.
        RequestInvalid: it would lie inside the source's folder, where its files would count as the source's.
    """
    from ..checkpoint.staging import refuse_existing
    from ..errors import RequestInvalid

    if out is None:
        return
    refuse_existing(Path(out))
    if source is not None and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(source)):
        raise RequestInvalid(f"{out} is inside {source}, its source", where="OUT", fix="Choose a folder outside it.")
