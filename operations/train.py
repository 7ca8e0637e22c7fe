"""`kconv train`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, model_validator

from ..checkpoint.schema import parse_json
from ..errors import RequestInvalid
from ..lines import Part, Result, Table, next_command
from ..options import Name, argument, option
from ..targets.options import SPLIT
from ..train.options import TrainOptions
from ..train.recipe import NAMES
from .base import Context, Estimate, Operation
from .reading import Reach, check_data, check_target, check_trusted, refuse_existing_output, serving

if TYPE_CHECKING:
    from ..drafters.base import Spec
    from ..drafters.vocab import Coverage
    from ..targets.config import TargetConfig
    from ..train.job import TrainJob
    from ..train.plan import TrainPlan

# A head's size does not depend on how long it is trained.
ANY_ROWS = 1 << 20
NUMBERS = re.compile(r"\d+(,\d+)+")


# A second KEY= behind a comma.
ANOTHER = re.compile(r",\s*[a-z_]+=")


def _settings(value: Any) -> Any:
    """Read settings of a recipe, from a mapping or from words like lr=1e-4; a value is JSON, or otherwise a word."""
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{value!r} is not a list of KEY=VALUE")
    found: dict[str, Any] = {}
    for setting in value:
        key, equals, text = str(setting).partition("=")
        if not equals or not key:
            raise ValueError(f"{setting!r} is not KEY=VALUE")
        if ANOTHER.search(text):
            raise ValueError(f"{setting!r} holds several settings; pass each by its own --set")
        try:
            # A list of numbers may omit its brackets, as everywhere on the command line.
            found[key] = parse_json(f"[{text}]" if NUMBERS.fullmatch(text) else text)
        except ValueError:
            found[key] = text
    return found


@dataclass(frozen=True, repr=False)
class Trained(Result):
    """A trained head: its folder, layout and record, and how much of the training text its vocabulary covers."""

    FOLDS: ClassVar[bool] = True

    out: str
    layout: str
    training: Mapping[str, Any]
    coverage: Coverage | None = None
    coverage_line: str = ""

    def to_json(self) -> Any:
        """Return the record of the training as plain values."""
        return {"out": self.out, "layout": self.layout, "training": dict(self.training)}

    def lines(self) -> Iterator[Part]:
        """Yield the coverage, the head's figures before and after, and the next command."""
        if self.coverage is not None:
            yield self.coverage_line
        if not (training := self.training):
            return
        before, after = training["untrained"], training["trained"]
        steps = sum(name.startswith("rate_") for name in after)
        names = {"loss": "loss, nats", "acceptance": f"acceptance length, sampled, K={steps}"}
        figures = [(name, f"{before[key]:.3f}", f"{after[key]:.3f}") for key, name in names.items()]
        yield Table(("held out", "untrained", "trained"), figures)
        yield ""
        yield next_command(
            *(("validate", self.out) if self.layout == "vllm" else ("to-vllm", self.out, f"{self.out}-vllm"))
        )


def _processes() -> int:
    """Return the number of processes that share the run.

    Raises:
        RequestInvalid: torchrun's variables hold something else than numbers.
    """
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"):
        if not (value := os.environ.get(name, "1")).isdigit():
            raise RequestInvalid(
                f"{name} is {value!r}, not a number", where=name, fix="Start the processes with torchrun, or unset it."
            )
    return int(os.environ.get("WORLD_SIZE", "1"))


def _describe(coverage: Coverage, draft_vocab: int | None) -> str:
    return (
        f"draft vocabulary of {draft_vocab:,}: {coverage.share:.2%} of {coverage.tokens:,} "
        f"training tokens, {coverage.distinct_covered:,} of {coverage.distinct:,} distinct ones"
    )


class Train(Operation, TrainOptions):
    """Train a drafter of the recipe's family for TARGET into the new folder OUT, with ModelOpt's loss.

    --data runs the target during training, whole in each process; with --url and --shared a vLLM runs it, started as
    for kconv states, and its states are removed once they are read. --states does not run it. With --states or --url
    only its embedding, final norm and output matrix are loaded.

    Several processes (torchrun) share each batch; their number must divide it. Each process reads its own rows, so
    a node needs only the files of --states that its processes read; --dry-run --json lists them. It takes the number of
    processes from WORLD_SIZE and those of a node from LOCAL_WORLD_SIZE.

    The same command, with the same number of processes, resumes a stopped run from its last checkpoint
    (.NAME.training next to OUT) and ends with the same weights. OUT is ready for kconv to-vllm. It has ModelOpt's
    layout, an Eagle3 head TensorRT-LLM's, or vLLM's if it is an MLA head that TensorRT-LLM cannot run, with a reduced
    vocabulary or not in bfloat16. Its manifest records the training; its folder modelopt has the head as ModelOpt's
    module, and the curves.

    --dry-run prints steps, memory, disk and, with --rate, hours. It reads the data only if the recipe does not state
    both steps and batches.
    """

    EXAMPLES = (
        "kconv train my-target my-head --recipe eagle3-mla --data dialogues.jsonl --set lr=1e-4",
        "kconv train my-target my-better-head --recipe eagle3-mla --data more.jsonl --init-from my-head",
        "kconv train my-target my-drafter --recipe dflash --data dialogues.jsonl --set mask=151669 --set block=16",
        "kconv train my-target my-head --recipe eagle3-mla --data d.jsonl --url http://host:8000 --shared /dev/shm/v",
        "torchrun --nproc-per-node 8 --no-python kconv train my-target my-head --recipe eagle3-mla --states my-states",
        "kconv train my-target my-head --recipe eagle3-mla --states my-states --rate 20000 --dry-run",
    )
    HEAVY = True
    RESUMES = True
    PLANS = True

    target: Name = argument("The target: a folder or a Hub id.", kind="checkpoint")
    out: Name = argument("The folder to write; it must not exist.", kind="output")
    recipe: Name = option(..., f"{', '.join(NAMES)}, or a YAML file.", kind="file", metavar="NAME|FILE")
    set: Annotated[dict[str, Any], BeforeValidator(_settings)] = option(
        {}, "Set a key of the recipe; repeatable.", kind="settings", metavar="KEY=VALUE"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.data is None) == (self.states is None):
            raise ValueError("pass either --data or --states")
        if bool(self.url) != bool(self.shared):
            raise ValueError("--url and --shared need each other: the server writes states as files")
        if self.states:
            self.refuse("held_out", "split", "revision", "url", "shared", unless="with --data")
        if not self.url:
            self.refuse("concurrency", unless="with --url")
        if self.url:
            self.refuse("held_out", unless="without --url; one prompt in fifty is held out")
        return self

    def run(self, context: Context) -> Trained:
        """Train the head.

        Raises:
            OutputExists, OutputFailed: the folder exists, or cannot be written.
            TrainingFailed: a loss is NaN or infinite, or the training library failed.
            KconvError: the target, the recipe, the data or the states cannot be read.
        """
        from ..train.recipe import check_keys

        check_trusted(context, self.trust_remote_code, self.target)
        # Looked for here, as what knows their names loads torch.
        if os.path.lexists(self.out) and any(Path(self.out).parent.glob(".*.training")):
            from ..train.checkpoints import clear_finished

            clear_finished(Path(self.out))
        refuse_existing_output(self.out)
        check_keys(self._values(context))
        check_data(context, self.data, self.held_out, chosen=self.given("split", "revision"))
        _processes()
        self._check_recipe(context)
        from ..checkpoint.manifest import read_manifest
        from ..train.job import draft_coverage, place
        from ..train.run import train

        out = Path(self.out)
        coverage = None
        with serving(context, self.target, self.url, self.shared, self.concurrency) as reach:
            job = self._job(context, reach)
            if place()[0]:
                # Another process of the run shows the progress.
                train(job, out, self)
            else:
                coverage = draft_coverage(job)
                if coverage:
                    # Checked before hours are spent on a vocabulary that omits too much.
                    context.log(_describe(coverage, job.recipe.draft_vocab))
                with context.steps("training") as advance:
                    train(job, out, self, advance)
        manifest = read_manifest(out)
        line = _describe(coverage, job.recipe.draft_vocab) if coverage else ""
        return Trained(self.out, manifest.layout, manifest.training or {}, coverage, line)

    def precheck(self, context: Context) -> None:
        """Refuse a recipe that cannot be; also for its target, unless an earlier step of a release has yet to make it.

        Raises:
            RecipeInvalid: there is no such recipe, or it has a wrong key or value.
            KconvError: the target or the head to continue from is there, and cannot be read.
        """
        from ..checkpoint.source import Folder
        from ..train.recipe import check_keys

        check_keys(self._values(context))
        named = [context.source(name) for name in (self.target, self.init_from) if name]
        if all(not isinstance(one, Folder) or one.path.exists() for one in named):
            self._check_recipe(context)

    def _values(self, context: Context) -> Mapping[str, Any]:
        """Return the recipe's keys; captured layers that it does not state come from the states, if they are there."""
        from ..targets.states import RECORD, read_record
        from ..train.recipe import read_recipe_file, with_defaults

        values = read_recipe_file(str(context.path(self.recipe))) | self.set
        if self.states is None or self.init_from or not (context.path(self.states) / RECORD).exists():
            return values
        return with_defaults(values, {"captured": list(read_record(context.path(self.states)).captured)})

    def _check_recipe(self, context: Context) -> None:
        """Refuse a recipe or a head to continue from that does not fit the target, before anything slow is loaded."""
        from ..train.recipe import complete

        config = check_target(context, self.target, tokenizer=self.data is not None)
        values = self._values(context)
        if config:
            complete(values, config, ANY_ROWS, self._continued(context) if self.init_from else None)

    def estimate(self, context: Context) -> Estimate:
        """Return the output's size in bytes: the head as exported, and as ModelOpt's own module."""
        if self.init_from:
            return Estimate(None)
        return Estimate(self._plan(context, lambda *_: (ANY_ROWS, None)).output)

    def preview(self, context: Context) -> TrainPlan:
        """Return the estimate of the run.

        Raises:
            KconvError: the target's config, the recipe, the data or the states cannot be read.
        """
        check_data(context, self.data, self.held_out, chosen=self.given("split", "revision"))
        plan = self._plan(context, lambda config, values: self._text(context, config, values))
        return replace(plan, nodes=self._nodes(context, plan.processes)) if self.states else plan

    def _plan(
        self, context: Context, text: Callable[[TargetConfig, Mapping[str, Any]], tuple[int, int | None]]
    ) -> TrainPlan:
        """Plan a run over the number of rows and tokens in `text`."""
        from ..targets.config import read_target_config
        from ..targets.states import open_states
        from ..train.job import check_processes
        from ..train.plan import plan_training
        from ..train.recipe import check_keys, complete

        values = self._values(context)
        check_keys(values)
        config = read_target_config(context.source(self.target).fetch_config())
        rows, tokens = text(config, values)
        recipe = complete(values, config, rows, self._continued(context) if self.init_from else None)
        # A run may be planned before its states are there.
        if self.states and (stored := context.path(self.states)).exists():
            open_states(stored, config=config, captured=recipe.captured)
        # A plan does not depend on whether this machine has the GPUs to distribute over.
        check_processes(recipe.batch, shard=False)
        processes = _processes()
        return plan_training(recipe, config, processes=processes, shard=self.shard, text=tokens, rate=self.rate)

    def _nodes(self, context: Context, processes: int) -> tuple[tuple[str, ...], ...]:
        """Return the files of states that each of several nodes' processes read."""
        from ..targets.states import open_states
        from ..train.data import place_rows
        from ..train.drafter_recipe import DrafterRecipe

        of_node = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        if of_node >= processes:
            return ()
        values = self._values(context)
        stored, seq = open_states(context.path(self.states or "")), values.get("seq", DrafterRecipe.seq)
        pack = values.get("pack", DrafterRecipe.pack)
        placed = [
            place_rows(stored, seq, held_out=held_out, pack=pack and not held_out, processes=processes)
            for held_out in (False, True)
        ]
        ranks = [range(first, min(first + of_node, processes)) for first in range(0, processes, of_node)]
        read = [{name for part in placed for rank in own for name in part.files_of(rank, stored)} for own in ranks]
        return tuple(tuple(sorted(names)) for names in read)

    def _continued(self, context: Context) -> Spec:
        from ..checkpoint.manifest import Hints
        from ..convert.opening import open_head

        head = context.source(self.init_from or "").open_headers()
        return open_head(head, None, Hints(), context.source(self.target)).spec

    def _text(self, context: Context, config: TargetConfig, values: Mapping[str, Any]) -> tuple[int, int | None]:
        """Return the rows and tokens of the text; any number if the recipe states how much of it to use."""
        from ..targets.states import open_states
        from ..targets.tokenizer import load_tokenizer
        from ..train.data import place_rows, prepare_dialogues
        from ..train.drafter_recipe import DrafterRecipe

        if {"steps", "batches"} <= values.keys():
            return ANY_ROWS, None
        seq, pack = values.get("seq", DrafterRecipe.seq), values.get("pack", DrafterRecipe.pack)
        if self.states:
            stored = open_states(context.path(self.states), config=config)
            return len(place_rows(stored, seq, held_out=False, pack=pack).places), stored.record.tokens
        check_trusted(context, self.trust_remote_code, self.target)
        folder = context.source(self.target).fetch_tokenizer()
        text = prepare_dialogues(
            str(context.path(self.data or "")),
            load_tokenizer(folder, trust_remote_code=self.trust_remote_code),
            seq,
            held_out=str(context.path(self.held_out)) if self.held_out else None,
            split=self.split or SPLIT,
            revision=self.revision,
            pack=pack,
        ).text
        return len(text.ids), text.ids.numel()

    def _job(self, context: Context, reach: Reach | None) -> TrainJob:
        from ..checkpoint.manifest import Hints
        from ..convert.opening import open_head
        from ..train.job import prepare_job
        from ..train.recipe import check_keys

        values = self._values(context)
        # Checked before a head is downloaded for it.
        check_keys(values)
        target = context.source(self.target)
        head = context.source(self.init_from).open_weights() if self.init_from else None
        return prepare_job(
            target,
            values,
            self.located(context),
            connect=reach,
            init_from=open_head(head, None, Hints(), target) if head else None,
        )
