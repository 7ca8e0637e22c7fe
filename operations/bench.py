"""`kconv bench` and `kconv compare`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from ..bench.options import MeasureOptions
from ..engines import registry
from ..lines import Part, Result
from ..options import Count, Name, Url, Words, argument, option
from .base import Context, Operation
from .reading import Reading, check_python, check_target, check_trusted, refuse_existing_output

if TYPE_CHECKING:
    from ..bench.acceptance import AcceptanceFile
    from ..bench.compare import Comparison
    from ..drafters.base import Spec
    from ..targets.suites import Suite

# The engine tests and `validate` use it too.
PYTHON = "KCONV_ENGINE_PYTHON"
TREE = re.compile(r"topk=([1-9]\d*),nodes=([1-9]\d*)")
MOST = 32  # K
TOO_LARGE = "Serve it, and measure it there (--url)."
CHAT_TOKENS = 64  # tokens that a chat template adds to a turn
# Options that the other way of measuring would ignore.
OF_SERVERS = (
    "tree", "speed_at", "concurrency", "precision", "model", "engine_version", "draft_sample_method",
    "rejection_sample_method", "baseline_url", "extra",
)  # fmt: skip
OFFLINE = (
    "trust_remote_code", "from_", "captured", "captured_are", "max_positions", "norm_before_residual",
)  # fmt: skip


def _lengths(value: Any) -> Any:
    """Read values of K: 3, "3", "1-8", "1,3,5", or a list."""
    parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
    try:
        ranges = [tuple(map(int, part.split("-"))) if isinstance(part, str) else (part,) for part in parts]
        found = tuple(k for begin, *end in ranges for k in range(begin, (end[0] if end else begin) + 1))
    except (TypeError, ValueError, AttributeError):
        found = ()
    if not found or list(found) != sorted(set(found)) or not (MOST >= found[-1] >= found[0] >= 1):
        raise ValueError(f"{value!r} is neither a K from 1 to {MOST} nor an ascending list of them, like 1-8 or 1,3,5")
    return found


class Bench(Reading, MeasureOptions):
    """Measure acceptance length per category of a suite, and record the measuring conditions.

    --url measures a running server, from its answers or from its counters; nobody else may use it during the run.
    --engine starts a server in fp32. Without either, kconv computes --head and --target itself.
    """

    EXAMPLES = (
        "kconv bench --url http://127.0.0.1:8000 --suite mt-bench --head my-head --precision NVFP4 --out a.json",
        "kconv bench --head my-head --target my-target --suite prompts.jsonl --out acceptance.json",
        "kconv bench --engine vllm --engine-python vllm-env/bin/python --draft-tokens 1-8 --head my-head "
        "--target my-target --suite speed-bench --categories coding --reasoning on --out curve.json",
        "kconv bench --engine sglang --engine-python sglang-env/bin/python --tree topk=4,nodes=8 --head my-head "
        "--target my-target --suite prompts.jsonl --out tree.json",
    )
    OUTPUT = "acceptance.json"

    url: Url | None = option(None, "A running vLLM, SGLang or TensorRT-LLM that speculates.")
    head: Name = option(..., "The head to measure, or that is served.", kind="checkpoint")
    suite: Name = option(
        ..., "mt-bench, speed-bench, or a JSONL file of prompts.", kind="file", metavar="NAME|FILE",
        words=("mt-bench", "speed-bench"),
    )  # fmt: skip
    revision: str | None = option(
        None,
        "Revision of the suite; by default a pinned commit for SPEED-Bench, main for MT-Bench.",
    )
    categories: Words = option((), "Only these categories of the suite.", kind="list", metavar="A,B")
    limit: Count | None = option(None, "Use only N prompts of each category.", metavar="N")
    out: Name = option(..., "The acceptance.json to write.", kind="output")
    draft_tokens: Annotated[tuple[int, ...], BeforeValidator(_lengths)] | None = option(
        None,
        "Draft tokens per step (K), as served; without --url also a range. By default 3, or a block.",
        kind="list", metavar="K|A-B",
    )  # fmt: skip
    engine: str | None = option(None, "Start this engine to serve --target with --head.", metavar="ENGINE")
    engine_python: Name | None = option(
        None, "Python of the engine's environment (see scripts/engine-env).", metavar="PATH"
    )
    ready_seconds: Count = option(300, "Seconds that a started engine may take to be ready.", metavar="SECONDS")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        branches, _ = self.branches
        if not (self.url or self.target):
            raise ValueError("--url or --target is required")
        if self.url and len(self.draft_tokens or ()) > 1:
            raise ValueError(
                "--draft-tokens: a running server drafts with one K; pass that K, or use --engine for several"
            )
        if self.url:
            self.refuse("target", "engine", "engine_python", "ready_seconds", *OFFLINE, unless="without --url")
        elif not self.engine:
            self.refuse("engine_python", "ready_seconds", *OF_SERVERS, unless="with --url or --engine")
        else:
            own = ("model", "engine_version", "draft_sample_method", "rejection_sample_method")
            self.refuse(*own, *OFFLINE, unless="without --engine")
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
        """The interpreter that starts the engine."""
        given = self.engine_python or os.environ.get(PYTHON)
        return Path(given) if given and self.engine else None

    @property
    def branches(self) -> tuple[int, int]:
        """Branches of each drafted token, and tokens that a step verifies; (1, 0) for a chain.

        Raises:
            ValueError: `tree` is neither form.
        """
        if self.tree == "chain":
            return 1, 0
        if not (found := TREE.fullmatch(self.tree)):
            raise ValueError(f"--tree {self.tree!r} is neither chain nor like topk=4,nodes=8")
        return int(found[1]), int(found[2])

    def run(self, context: Context) -> AcceptanceFile:
        """Return the measurements, which are also written.

        Raises:
            OutputExists, OutputFailed: the file exists, or cannot be written.
            SuiteInvalid: the suite cannot be read.
            KconvError: the head or the target cannot be read, or the server's counters are inconclusive.
        """
        from ..targets.suites import load_suite

        check_trusted(context, self.trust_remote_code, self.target)
        refuse_existing_output(self.out)
        suite = load_suite(
            str(context.path(self.suite)), revision=self.revision, categories=self.categories, limit=self.limit
        )
        check_python(self.python, self.engine)
        if self.target:
            check_target(context, self.target, tokenizer=True)
        with context.status("measuring") as say:
            if self.engine:
                found = self._started(context, suite, say)
            else:
                found = self._on_server(context, suite, say) if self.url else self._offline(context, suite, say)
        Written.write(self.out, found.to_json())
        return found

    def _started(self, context: Context, suite: Suite, say: Any) -> AcceptanceFile:
        from ..bench.acceptance import join
        from ..bench.measure import ServedHead, measure_served
        from ..convert.read import read
        from ..engines.base import Serving
        from ..serving.start import check_start, serve
        from ..validate.report import called

        engine, target, python = registry.engine(self.engine or ""), context.source(self.target or ""), self.python
        head = context.source(self.head)
        # A prompt has no more tokens than characters, and each turn has an answer.
        longest = max(sum(len(turn) + self.max_tokens + CHAT_TOKENS for turn in p.turns) for p in suite.prompts)
        branches, nodes = self.branches
        spec = read(head.open_headers(), layout=self.layout(), hints=self.hints(), values=False).spec
        every = self._steps(spec)
        serving = Serving(
            python or Path(),
            Path(),
            Path(self.head),
            spec,
            max_model_len=longest,
            ready_seconds=self.ready_seconds,
            branches=branches,
            nodes=nodes,
        )
        for steps in every:
            check_start(replace(serving, draft_tokens=steps), engine)
        serving = replace(serving, target=target.fetch_model(), head=head.open_weights().folder)
        starter = engine.starter
        told = {"target_name": self.target_name or called(target.name), "precision": self.precision or serving.dtype}
        options = self.model_copy(update=told | dict(starter.methods if starter else {}))
        own = ServedHead(every[0], kernels=starter.note(serving.python) if starter else "")
        if self.speed_at and not self.baseline_url:
            from ..bench.speed import measure_loads

            say(f"starting {engine.title} without a draft")
            with serve(replace(serving, head=None), engine) as served:
                say("measuring speed without a draft")
                client = replace(served.client, extra=self.extra)
                loads = measure_loads(client, suite.prompts, self.speed_at, self.max_tokens, self.temperature)
            own = replace(own, loads=loads)
        found = []
        # An engine drafts only with the K that it was started with; see engines/base.py, Serving.
        for steps in every:
            say(f"starting {engine.title}, K = {steps}")
            with serve(replace(serving, draft_tokens=steps), engine) as served:
                own = replace(own, draft_tokens=steps)
                found.append(measure_served(served.client.url, suite, head, own, options, fetch=True, say=say))
        return join(found)

    def _on_server(self, context: Context, suite: Suite, say: Any) -> AcceptanceFile:
        from ..bench.measure import ServedHead, measure_served

        # The head may be no more than a name on the Hub, and a server checks K.
        [steps] = self.draft_tokens or [3]
        return measure_served(self.url or "", suite, context.source(self.head), ServedHead(steps), self, say=say)

    def _steps(self, head: Spec) -> tuple[int, ...]:
        """Return each K: as many tokens as the head's family drafts, unless the user asks for others."""
        return self.draft_tokens or (head.drafter.draft_tokens(head),)

    def _offline(self, context: Context, suite: Suite, say: Any) -> AcceptanceFile:
        import torch

        from ..bench.offline import measure_head
        from ..targets.model import check_memory
        from ..validate.report import called

        target = context.source(self.target or "")
        # Checked before the head and the target are downloaded.
        check_memory(target.open_headers(), torch.float32, instead=TOO_LARGE)
        self.open_headers(context, self.head)
        head = self.open(context, self.head)
        return measure_head(
            head,
            target.fetch_model(),
            suite,
            self._steps(head.spec),
            self.model_copy(update={"target_name": self.target_name or called(target.name)}),
            say=say,
        )


class Curve(Operation):
    """Write the golden acceptance curve of a head's acceptance.json FILES, in the form that InferenceX uses.

    Each figure has one K and one thinking mode (--reasoning of kconv bench). The category is SPEED-Bench's coding, or
    --category. All figures of a mode must have been measured in the same way.
    """

    EXAMPLES = ("kconv curve on.json off.json --out my-target_eagle3.yaml",)
    OUTPUT = "curve.yaml"

    files: tuple[Name, ...] = argument("acceptance.json files about one head.", kind="file")
    category: str | None = option(None, "Category; by default coding for SPEED-Bench, else all.")
    model: str | None = option(None, "The target's name in the curve; by default its own in lower case.")
    out: Name = option(..., "The YAML to write.", kind="output")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.files:
            raise ValueError("give an acceptance.json")
        return self

    def run(self, context: Context) -> Written:
        """Return the curve's text, which is also written.

        Raises:
            OutputExists: the file exists.
            AcceptanceInvalid, DefinitionsMixed: the figures do not form a curve.
        """
        from ..bench.acceptance import read_acceptance
        from ..bench.golden import write_curve

        refuse_existing_output(self.out)
        files = {file: read_acceptance(context.path(file)) for file in self.files}
        return Written.write(self.out, write_curve(files, self.category, self.model))


class Quote(Operation):
    """Write figures that another program measured as acceptance.json, with their origin.

    FILE is a result of vllm bench serve, of AIPerf (profile_export_aiperf.json) or of sglang.bench_serving, or one of
    InferenceX's golden curves. Add what the file leaves open with options. A figure with an unstated condition is
    never compared.
    """

    EXAMPLES = (
        "kconv quote result.json --head org/my-head --dataset mt-bench --temperature 0 --out acceptance.json",
        "kconv quote kimik2.5_eagle3.yaml --head lightseekorg/kimi-k2.5-eagle3-mla --out golden.json",
    )
    OUTPUT = "acceptance.json"

    file: Name = argument("The result.", kind="file")
    head: str | None = option(None, "Hub id of the head.", metavar="ID")
    url: str | None = option(None, "Where the result was published.")
    out: Name = option(..., "The acceptance.json to write.", kind="output")
    dataset: str | None = option(None, "The data set, e.g. mt-bench.")
    revision: str | None = option(None, "Revision of the dataset.")
    category: str | None = option(None, "Its category.")
    prompts: Count | None = option(None, "Number of prompts.", metavar="N")
    draft_tokens: Count | None = option(None, "K.", metavar="K")
    tree: str | None = option(None, "Shape of drafts.")
    engine: str | None = option(None, "The engine, e.g. vllm.")
    engine_version: str | None = option(None, "The engine's version, if not reported.")
    target: str | None = option(None, "Hub id of the target.", metavar="ID")
    precision: str | None = option(None, "Number format of the target, e.g. NVFP4.")
    temperature: Annotated[float, Field(ge=0)] | None = option(None, "0 is greedy.", metavar="T")
    reasoning: str | None = option(None, "The target's reasoning mode, e.g. medium.")
    max_tokens: Count | None = option(None, "Maximum tokens per answer.", metavar="N")
    draft_sample_method: str | None = option(None, "How drafts were sampled, e.g. greedy, if not reported.")
    rejection_sample_method: str | None = option(None, "How drafts were rejected, e.g. standard, if not reported.")
    date: str | None = option(None, "Date of the measurement, e.g. 2026-11-23.")

    def run(self, context: Context) -> AcceptanceFile:
        """Return the figures, which are also written.

        Raises:
            OutputExists: the file exists.
            AcceptanceInvalid, DefinitionsMixed: the result cannot be read, or contradicts an option.
        """
        from ..bench.acceptance import METHOD
        from ..bench.foreign import quote

        refuse_existing_output(self.out)
        names = ("dataset", "revision", "category", "prompts", "date", *METHOD)
        said = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        found = quote(context.path(self.file), self.head, self.url, said)
        Written.write(self.out, found.to_json())
        return found


@dataclass(frozen=True, repr=False)
class Written(Result):
    """A text that was written: its file, and the text."""

    out: Path
    text: str

    @classmethod
    def write(cls, out: str, text: str) -> Written:
        """Write a text, creating its folder."""
        from ..checkpoint.staging import write_new

        write_new(Path(out), text)
        return cls(Path(out), text)

    def to_json(self) -> Any:
        """Return it as plain values."""
        return {"out": str(self.out), "text": self.text}

    def lines(self) -> Iterable[Part]:
        return (self.text.removesuffix("\n"),)


@dataclass(frozen=True, repr=False)
class Compared(Result):
    """Figures that can be compared, and those that cannot."""

    FOLDS: ClassVar[bool] = True

    comparison: Comparison

    def to_json(self) -> Any:
        """Return the comparison as plain values."""
        return self.comparison.to_json()

    def lines(self) -> Iterable[Part]:
        return self.comparison.lines()


class Compare(Operation):
    """Compare the acceptance.json FILES of two or more heads.

    Figures are compared only if all their measuring conditions are stated and equal. The others are listed with
    the difference. Exit 1 if nothing is comparable.
    """

    EXAMPLES = ("kconv compare mla/acceptance.json gqa/acceptance.json --chart heads.png",)

    files: tuple[Name, ...] = argument("The acceptance.json files.", kind="file")
    chart: Name | None = option(None, "Write a chart of the comparable figures (PNG).", metavar="PATH")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.files) < 2:
            raise ValueError("pass at least two files")
        return self

    def run(self, context: Context) -> Compared:
        """Return the comparison.

        Raises:
            OutputExists: the chart exists.
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
        """Return whether any figures can be compared."""
        return bool(result.comparison.tables)
