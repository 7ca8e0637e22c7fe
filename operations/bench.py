"""`kconv bench` and `kconv compare`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from ..checkpoint.schema import parse_json
from ..engines import registry
from .base import Context, Name, Operation, Words, argument, option
from .reading import Count, Reading, check_trusted, refuse_existing_output

if TYPE_CHECKING:
    from ..bench.acceptance import AcceptanceFile
    from ..bench.compare import Comparison
    from ..targets.suites import Suite

# Also where the engine tests look, and `validate`.
PYTHON = "KCONV_ENGINE_PYTHON"
TREE = re.compile(r"topk=([1-9]\d*),nodes=([1-9]\d*)")
TOO_LARGE = "Serve it, and measure there (--url)."
CHAT_TOKENS = 64  # what a chat template adds to a turn
# What the other way of measuring would pass over.
OF_SERVERS = (
    "tree", "concurrency", "reasoning", "precision", "model", "engine_version", "baseline_url", "extra",
)  # fmt: skip
OFFLINE = (
    "trust_remote_code", "from_", "captured", "captured_are", "max_positions", "norm_before_residual",
)  # fmt: skip


def _object(value: Any) -> Any:
    """Read a JSON object, from a mapping or from its text."""
    if isinstance(value, Mapping):
        return value
    try:
        found = parse_json(value) if isinstance(value, str) else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{value!r} is not a JSON object")
    return found


class Bench(Reading):
    """Measure acceptance length per category of a suite, and record the measuring conditions.

    --url measures a running server, from its answers or from its counters; nobody else may use it meanwhile.
    --engine starts a server in fp32. Without either, kconv computes --head and --target itself.
    """

    EXAMPLES = (
        "kconv bench --url http://127.0.0.1:8000 --suite mt-bench --head my-head --precision NVFP4 --out a.json",
        "kconv bench --head my-head --target my-target --suite prompts.jsonl --out acceptance.json",
        "kconv bench --engine sglang --engine-python env/bin/python --tree topk=4,nodes=8 --head my-head "
        "--target my-target --suite prompts.jsonl --out tree.json",
    )
    OUTPUT = "acceptance.json"

    url: str | None = option(None, "Address of a running vLLM, SGLang or TensorRT-LLM that speculates.")
    head: Name = option(..., "The head to measure; with --url, the head that is served.", kind="checkpoint")
    suite: Name = option(
        ..., "mt-bench, speed-bench, or a JSONL of prompts.", kind="file", metavar="NAME|FILE",
        words=("mt-bench", "speed-bench"),
    )  # fmt: skip
    revision: str | None = option(
        None,
        "Revision of the suite on the Hub; default: a pinned commit for SPEED-Bench, main for MT-Bench (recorded).",
    )
    categories: Words = option((), "Only these categories of the suite.", kind="list", metavar="A,B")
    limit: Count | None = option(None, "Use only N prompts of each category.", metavar="N")
    out: Name = option(..., "The acceptance.json to write.", kind="output")
    draft_tokens: Annotated[int, Field(ge=1, le=16)] = option(3, "Draft tokens per step (K), as served.", metavar="K")
    engine: str | None = option(None, "Start this engine to serve --target with --head.", metavar="ENGINE")
    engine_python: Name | None = option(
        None, "Start the engine with this Python (see scripts/engine-env).", metavar="PATH"
    )
    tree: str = option(
        "chain", "Shape of drafts: topk=4,nodes=8 means 4 branches and 8 verified tokens per step, including the last "
        "accepted one.", metavar="TREE",
    )  # fmt: skip
    concurrency: Count = option(1, "Prompts in flight.", metavar="N")
    max_tokens: Count = option(1024, "Maximum tokens per answer.", metavar="N")
    temperature: Annotated[float, Field(ge=0)] = option(0.0, "0 is greedy.", metavar="T")
    reasoning: str | None = option(None, "The target's reasoning mode, e.g. medium.")
    target_name: str | None = option(None, "Hub id of the target; by default the server's name for it.")
    precision: str | None = option(None, "Number format of the served target, e.g. NVFP4.")
    model: str | None = option(None, "The server's name for the target, if it serves several.")
    engine_version: str | None = option(None, "The engine's version, if the server does not report it.")
    baseline_url: str | None = option(None, "A server with the same target and no speculation, for the speed-up.")
    extra: Annotated[dict[str, Any], BeforeValidator(_object)] = option(
        {}, "Extra fields for each request.", kind="json", metavar="JSON"
    )
    trust_remote_code: bool = option(False, "Run the tokenizer's own Python code; --target must be pinned.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        branches, _ = self.branches
        if not (self.url or self.target):
            raise ValueError("--url or --target is required")
        if self.url:
            self.refuse("target", "engine", "engine_python", *OFFLINE, unless="without --url")
        elif not self.engine:
            self.refuse("engine_python", *OF_SERVERS, unless="with --url or --engine")
        else:
            self.refuse("model", "engine_version", *OFFLINE, unless="without --engine")
            if self.engine not in registry.startable():
                raise ValueError(f"--engine {self.engine!r} is not one of {', '.join(registry.startable())}")
            if not self.python:
                raise ValueError(f"--engine needs --engine-python (or ${PYTHON})")
            starter = registry.engine(self.engine).starter
            if branches > 1 and not (starter and starter.trees):
                raise ValueError(f"--tree: {self.engine} drafts only chains")
        return self

    @property
    def python(self) -> Path | None:
        """The interpreter that the engine is started with."""
        given = self.engine_python or os.environ.get(PYTHON)
        return Path(given) if given and self.engine else None

    @property
    def branches(self) -> tuple[int, int]:
        """Branches of each drafted token, and tokens that a step verifies; (1, 0) for a chain.

        Raises:
            ValueError: `tree` says neither.
        """
        if self.tree == "chain":
            return 1, 0
        if not (found := TREE.fullmatch(self.tree)):
            raise ValueError(f"--tree {self.tree!r} is neither chain nor like topk=4,nodes=8")
        return int(found[1]), int(found[2])

    def run(self, context: Context) -> AcceptanceFile:
        """Return what was measured, which is also written.

        Raises:
            OutputExists, OutputFailed: the file is there, or cannot be written.
            SuiteInvalid: the suite cannot be read.
            KconvError: the head or the target cannot be read, or the server's counters do not tell.
        """
        from ..checkpoint.staging import write_new
        from ..targets.suites import load_suite

        check_trusted(context, self.trust_remote_code, self.target)
        refuse_existing_output(self.out)
        suite = load_suite(
            str(context.path(self.suite)), revision=self.revision, categories=self.categories, limit=self.limit
        )
        with context.status("measuring") as say:
            if self.engine:
                found = self._started(context, suite, say)
            else:
                found = self._on_server(context, suite, say) if self.url else self._offline(context, suite, say)
        write_new(Path(self.out), found.to_json())
        return found

    def _started(self, context: Context, suite: Suite, say: Any) -> AcceptanceFile:
        from ..bench.measure import ServerRun, measure_served
        from ..engines.base import Serving
        from ..engines.serving import serve

        engine, target, python = registry.engine(self.engine or ""), context.source(self.target or ""), self.python
        head = context.source(self.head)
        # A prompt has no more tokens than characters, and each turn an answer.
        longest = max(sum(len(turn) + self.max_tokens + CHAT_TOKENS for turn in p.turns) for p in suite.prompts)
        branches, nodes = self.branches
        serving = Serving(
            python or Path(),
            target.fetch_model(),
            head.open_weights().folder,
            draft_tokens=self.draft_tokens,
            max_model_len=longest,
            branches=branches,
            nodes=nodes,
        )
        fields = (
            "draft_tokens", "tree", "concurrency", "max_tokens", "temperature", "reasoning", "baseline_url", "extra",
        )  # fmt: skip
        run = ServerRun(
            target=self.target_name or target.name,
            precision=self.precision or serving.dtype,
            kernels=engine.starter.note(serving.python) if engine.starter else "",
            **{name: getattr(self, name) for name in fields},
        )
        say(f"{engine.title}: starting")
        with serve(serving, engine) as served:
            return measure_served(served.client.url, suite, head, run, fetch=True, say=say)

    def _on_server(self, context: Context, suite: Suite, say: Any) -> AcceptanceFile:
        from ..bench.measure import ServerRun, measure_served

        fields = (
            "draft_tokens", "tree", "concurrency", "max_tokens", "temperature", "reasoning", "precision", "model",
            "engine_version", "baseline_url", "extra",
        )  # fmt: skip
        run = ServerRun(target=self.target_name, **{name: getattr(self, name) for name in fields})
        return measure_served(self.url or "", suite, context.source(self.head), run, say=say)

    def _offline(self, context: Context, suite: Suite, say: Any) -> AcceptanceFile:
        import torch

        from ..bench.offline import measure_head
        from ..targets.model import check_memory

        target = context.source(self.target or "")
        # Before the head is downloaded, and the target.
        check_memory(target.open_headers(), torch.float32, instead=TOO_LARGE)
        return measure_head(
            self.open(context, self.head),
            target.fetch_model(),
            suite,
            draft_tokens=self.draft_tokens,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            target_name=self.target_name or target.name,
            trust_remote_code=self.trust_remote_code,
            say=say,
        )


@dataclass(frozen=True)
class Compared:
    """Figures that compare, and those that do not."""

    comparison: Comparison

    def to_json(self) -> Any:
        """Return the comparison as plain values."""
        return self.comparison.to_json()


class Compare(Operation):
    """Compare the acceptance.json FILES of two heads or more.

    Figures are put side by side only if all their measuring conditions are stated and equal. The others are listed with
    the difference. Exit 1 if nothing is comparable.
    """

    EXAMPLES = ("kconv compare mla/acceptance.json gqa/acceptance.json --chart heads.png",)

    files: tuple[Name, ...] = argument("The acceptance.json files.", kind="file")
    chart: Name | None = option(None, "Write a chart of the comparable figures (PNG).", metavar="PATH")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.files) < 2:
            raise ValueError("give at least two files")
        return self

    def run(self, context: Context) -> Compared:
        """Return the comparison.

        Raises:
            OutputExists: the chart is there.
            AcceptanceInvalid: a file cannot be read.
        """
        from ..bench.acceptance import read_acceptance
        from ..bench.compare import compare, draw

        refuse_existing_output(self.chart)
        comparison = compare([read_acceptance(context.path(file)) for file in self.files])
        if self.chart:
            draw(comparison, Path(self.chart))
        return Compared(comparison)

    def passed(self, result: Compared) -> bool:
        """Say whether any figures compare."""
        return bool(result.comparison.tables)
