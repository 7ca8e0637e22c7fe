"""The options of `kconv validate`, which the request and what checks share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field

from ..engines import registry
from ..options import Count, Name, Share, Url, option
from ..strict import StrictModel

if TYPE_CHECKING:
    from ..drafters.base import Spec

# The engine tests use it too.
PYTHON = "KCONV_ENGINE_PYTHON"
# One name, or several.
Engines = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: tuple(value.split(",")) if isinstance(value, str) else value)
]


class ValidateOptions(StrictModel):
    """What to check a checkpoint for, and how to measure it."""

    for_: Engines = option(
        (), "Engine that will serve it, or all; by default its layout's; repeatable.", metavar="ENGINE"
    )
    source: Name | None = option(None, "The checkpoint that HEAD was made from, to compare.", kind="checkpoint")
    results: tuple[Name, ...] = option(
        (), "lm_eval's results_*.json of HEAD, a target; needs --source-results; repeatable.", kind="file"
    )
    source_results: tuple[Name, ...] = option((), "The same of its source; repeatable.", kind="file")
    headers_only: bool = option(False, "Read and download no weights.")
    strict: bool = option(False, "Fail on warnings and undecided facts too.")
    prompts: Name | None = option(
        None,
        "Held-out prompts: a JSONL, or mt-bench@<commit>. Needs --target, or for a target --source.",
        kind="file", metavar="FILE|SUITE@COMMIT",
    )  # fmt: skip
    states: Name | None = option(None, "Output of kconv states, instead of --prompts.", kind="file")
    draft_tokens: Annotated[int, Field(ge=1, le=32)] | None = option(
        None, "Draft tokens per step (K). Without it 3, or a whole block.", metavar="K"
    )
    prompt_tokens: Count = option(32, "Cut prompts to N tokens.", metavar="N")
    new_tokens: Count = option(64, "Continue prompts by N tokens.", metavar="N")
    seed: int = option(0, "Random seed for sampling.")
    calibrated_on: tuple[Name, ...] = option(
        (), "A states.json, whose prompts are refused as held-out text; repeatable.", kind="file"
    )
    min_retention: Share = option(
        0.97,
        "Smallest share of the acceptance length that may remain.",
        metavar="SHARE",
    )
    allow_pickle: bool = option(False, "Read ModelOpt's .pt files as --states.")
    trust_remote_code: bool = option(False, "Run the tokenizer's own Python code; the target must be pinned.")
    engine: str | None = option(
        None,
        "Let this engine serve HEAD, and compare it with kconv's own computation.",
        metavar="ENGINE",
    )
    engine_python: Name | None = option(
        None, "Python of the engine's environment (see scripts/engine-env).", metavar="PATH"
    )
    url: Url | None = option(None, "A running engine that serves --target with HEAD.")
    out: Name | None = option(None, "A folder for report.json, report.md and report.html.", kind="output")

    @property
    def runners(self) -> tuple[str, ...]:
        """What to check for, by the names of `ENGINES`; empty for those that the layout was written for."""
        return tuple(dict.fromkeys(name for one in self.for_ for name in registry.asked()[one]))

    def steps(self, head: Spec) -> int:
        """Return K for a head: as many tokens as its family drafts, unless the user asks for another number."""
        return self.draft_tokens or head.drafter.draft_tokens(head)

    @property
    def text_tokens(self) -> int:
        """The tokens of a prompt and its continuation, to which the prompt's own text is cut."""
        return self.prompt_tokens + self.new_tokens

    @property
    def measures(self) -> bool:
        """Whether to measure anything."""
        return bool(self.prompts or self.states or self.asks_engine)

    @property
    def asks_engine(self) -> bool:
        """Whether to query an engine."""
        return bool(self.engine or self.engine_python or self.url)

    @property
    def python(self) -> Path | None:
        """The interpreter that starts the engine."""
        given = self.engine_python or os.environ.get(PYTHON)
        return Path(given) if given and not self.url else None


DEFAULTS = ValidateOptions()
