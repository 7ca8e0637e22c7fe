"""The options of `kconv validate` that measure."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..checkpoint.source import Source
from .options import FOLDER, check_trusted, told

if TYPE_CHECKING:
    from ..validate.engines.check import Engined
    from ..validate.parity import Parity
    from ..validate.perplexity import HeldOutText

# Also where the engine tests look.
PYTHON = "KCONV_ENGINE_PYTHON"
POSITIVE = click.IntRange(min=1)
# What each option is of: without any of these it would be passed over.
BELONGS_TO = {
    "steps": ("prompts", "states"),
    "prompt_tokens": ("prompts",),
    "new_tokens": ("prompts",),
    "seed": ("prompts",),
    "calibrated_on": ("prompts", "states"),
    "allow_pickle": ("states",),
    "trust_remote_code": ("prompts",),
}
# What a target has none of: it is run over text, and drafts nothing.
OF_HEADS = ("states", "steps", "seed", "calibrated_on", "engine", "engine_python", "url")


@dataclass(frozen=True)
class Measuring:
    """What the user wants measured, and on what."""

    prompts: str | None
    states: Path | None
    steps: int
    prompt_tokens: int
    new_tokens: int
    seed: int
    calibrated_on: tuple[Path, ...]
    allow_pickle: bool
    trust_remote_code: bool
    engine: str | None
    engine_python: Path | None
    url: str | None

    def check(self, target: Source | None) -> None:
        """Raise UsageError for options that do not go together."""
        if self.prompts and self.states:
            raise click.UsageError("--prompts and --states are two ways to the same figures; give one of them")
        if (self.prompts or self.states) and not target:
            given = "prompts" if self.prompts else "states"
            raise click.UsageError(f"--{given} needs --target; where a target itself is checked, its --source")
        if self.wants_engine and not (self.prompts and target):
            raise click.UsageError("an engine is asked with --target and --prompts")
        if self.engine_python and self.url:
            raise click.UsageError("--engine-python starts a server and --url reaches one; give one of them")
        if self.engine in ("sglang", "trtllm") and not self.url:
            raise click.UsageError(f"{self.engine} cannot be started here; give the --url of one that runs")
        if self.engine and not (self.python or self.url):
            raise click.UsageError(f"--engine needs --engine-python (or ${PYTHON}), to start it, or --url, to reach it")
        for name, ways in BELONGS_TO.items():
            for option in told(name) if not any(getattr(self, way) for way in ways) else ():
                raise click.UsageError(f"{option} goes with {' or '.join(f'--{way}' for way in ways)}")
        check_trusted(self.trust_remote_code, target)

    @property
    def wanted(self) -> bool:
        """Whether anything is to be measured."""
        return bool(self.prompts or self.states or self.wants_engine)

    @property
    def python(self) -> Path | None:
        """The interpreter that vLLM is started with."""
        given = self.engine_python or os.environ.get(PYTHON)
        return Path(given) if given and not self.url else None

    @property
    def wants_engine(self) -> bool:
        """Whether an engine is to be asked."""
        return bool(self.engine or self.engine_python or self.url)

    def parity(self, target: Source | None) -> Parity | None:
        """Return how logits and acceptance are measured, with the prompts read; None where nobody asked."""
        if target is None or not (self.prompts or self.states):
            return None
        from ..validate.held_out import encode_held_out
        from ..validate.parity import Parity

        prompts = None
        if self.prompts:
            limit = self.prompt_tokens + self.new_tokens
            prompts = encode_held_out(self.prompts, target, limit, trust_remote_code=self.trust_remote_code)
        return Parity(
            target,
            prompts,
            self.states,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            seed=self.seed,
            calibrated_on=self.calibrated_on,
            allow_pickle=self.allow_pickle,
        )

    def held_out(self, source: Source) -> HeldOutText | None:
        """Return what a quantized target and its source are run over; None where nobody asked.

        Raises:
            UsageError: something is given that is about heads.
        """
        from ..validate.perplexity import HeldOutText

        if given := told(*OF_HEADS):
            raise click.UsageError(f"a target is measured with --prompts; these are about heads: {', '.join(given)}")
        check_trusted(self.trust_remote_code, source)
        if not self.prompts:
            return None
        return HeldOutText(source, self.prompts, self.prompt_tokens + self.new_tokens, self.trust_remote_code)

    def engined(self, target: Source | None) -> Engined | None:
        """Return how an engine is asked; None where nobody asked."""
        if target is None or not self.prompts or not self.wants_engine:
            return None
        from ..validate.engines.check import Engined

        return Engined(
            self.engine,
            target,
            self.prompts,
            python=self.python,
            url=self.url,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            trust_remote_code=self.trust_remote_code,
        )


OPTIONS = (
    click.option(
        "--prompts",
        metavar="FILE|SUITE@COMMIT",
        help="Held-out prompts, with --target: logits and acceptance; of a target, with --source: perplexity. A JSONL, "
        "or mt-bench@<commit> from the Hub.",
    ),
    click.option("--states", type=FOLDER, help="The same from stored states; of --target only two tensors are read."),
    click.option("--steps", default=3, show_default=True, type=click.IntRange(1, 16), help="Drafted tokens (K)."),
    click.option("--prompt-tokens", default=32, show_default=True, type=POSITIVE, help="Cut prompts to this."),
    click.option("--new-tokens", default=64, show_default=True, type=POSITIVE, help="Continue prompts by this."),
    click.option("--seed", default=0, show_default=True, help="Of the sampled continuations."),
    click.option(
        "--calibrated-on",
        multiple=True,
        type=FOLDER,
        help="A states.json or its folder: prompts that stand there are refused.",
    ),
    click.option("--allow-pickle", is_flag=True, help="Read ModelOpt's .pt files as --states."),
    click.option("--trust-remote-code", is_flag=True, help="Run the tokenizer's own Python; --target must be pinned."),
    click.option(
        "--engine",
        type=click.Choice(["vllm", "sglang", "trtllm"]),
        help="Have it serve HEAD, and compare output and counters with kconv's own chain.",
    ),
    click.option("--engine-python", type=FOLDER, help="Start vLLM with this python (see scripts/engine-env)."),
    click.option("--url", help="Reach an engine that serves --target with HEAD already."),
)


def measuring(command: Callable) -> Callable:
    """Add the options that measure; the command gets them as one `measuring`."""

    @functools.wraps(command)
    def packed(*args: Any, **kwargs: Any) -> Any:
        own = {field.name: kwargs.pop(field.name) for field in fields(Measuring)}
        return command(*args, measuring=Measuring(**own), **kwargs)

    for option in reversed(OPTIONS):
        packed = option(packed)
    return packed
