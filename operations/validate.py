"""`kconv validate`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from ..engines import registry
from ..errors import ComparisonUnfit, KconvError, ReportInvalid, RequestInvalid, TargetInvalid
from ..lines import counted
from ..options import Name, argument, plain_name
from ..validate.options import PYTHON, ValidateOptions
from .base import Context
from .reading import Reading, check_prompts, check_python, check_target, check_trusted

if TYPE_CHECKING:
    from ..checkpoint.folder import Checkpoint
    from ..measure.held_out import HeldOut
    from ..validate.report import Report

# A server answers which model it serves at once.
CONNECT_SECONDS = 30.0
# The options that each option needs: without any of them it would have no effect.
GOES_WITH = {
    "draft_tokens": ("prompts", "states"),
    "prompt_tokens": ("prompts",),
    "new_tokens": ("prompts",),
    "seed": ("prompts",),
    "calibrated_on": ("prompts", "states"),
    "min_retention": ("prompts", "states"),
    "allow_pickle": ("states",),
    "trust_remote_code": ("prompts",),
}
# What does not apply to a head.
OF_TARGETS = ("results", "source_results")
# What does not apply to a target: it runs over text, and drafts nothing.
OF_HEADS = ("states", "draft_tokens", "seed", "calibrated_on", "min_retention", "engine", "engine_python", "url")
SHOWN = 5
TOO_LARGE = "Get its states from a running vLLM (kconv states --url), and pass them with --states."
TOO_LARGE_BESIDE_ENGINE = (
    "Leave out --engine, and pass --states, which kconv states --url gets from a running vLLM. kconv bench --url "
    "measures the server itself."
)


class Validate(Reading, ValidateOptions):
    """Check HEAD; exit 1 if an engine would fail on it or serve wrong numbers, 3 if an option must decide that.

    Checks names, shapes, config, known engine faults, and every value. --source compares the bits. --target with
    --prompts measures logits, top-1 agreement and acceptance length on the prompts' own text and on the target's
    sampled and greedy continuations. HEAD may also be a target: then its quantization is checked, with --source the
    noise of every tensor, and with --prompts both perplexities.
    """

    EXAMPLES = (
        "kconv validate my-head --for all",
        "kconv validate org/head --for sglang --headers-only --strict",
        "kconv validate my-head-vllm --source my-head --target my-target --prompts held-out.jsonl --out report",
        "kconv validate my-head --source old-head --target my-target --states my-states",
        "kconv validate my-target-nvfp4 --source my-target --prompts held-out.jsonl --out report",
        "kconv validate my-head --engine vllm --engine-python vllm-env/bin/python --target my-target --prompts p.jsonl",
        "kconv validate my-head --explain K101",
    )

    head: Name = argument("A head or a target: a folder or a Hub id.", kind="checkpoint")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        asked_for = [("for_", asked, registry.asked()) for asked in self.for_]
        for name, asked, known in (*asked_for, ("engine", self.engine, registry.servable())):
            if asked is not None and asked not in known:
                raise ValueError(
                    f"--{plain_name(name)} {asked!r} is not one of {', '.join(known)}{_meant(asked, known)}"
                )
        if self.headers_only and (self.measures or self.source):
            raise ValueError("--headers-only reads no weights, but --source and measurements need them")
        if bool(self.results) != bool(self.source_results):
            raise ValueError("--results and --source-results go together: one of HEAD, one of its source")
        if self.results and not self.source:
            raise ValueError("--results needs --source, the target that HEAD was made from")
        if self.prompts and self.states:
            raise ValueError("--prompts and --states exclude each other; use one of them")
        if (self.prompts or self.states) and not (self.target or self.source):
            given = "prompts" if self.prompts else "states"
            raise ValueError(f"--{given} needs --target (for a target: --source)")
        if self.asks_engine and not (self.prompts and (self.target or self.source)):
            asks = (
                f"; to check what {self.engine} would read, without it, pass --for {self.engine}" if self.engine else ""
            )
            raise ValueError(f"--engine and --url need --target and --prompts, to run a real engine{asks}")
        if self.engine_python and self.url:
            raise ValueError("--engine-python starts a server, --url uses a running one; use one of them")
        if self.engine and self.engine not in registry.startable() and not self.url:
            raise ValueError(f"kconv cannot start {self.engine}; pass the --url of a running one")
        if self.engine and not (self.python or self.url):
            raise ValueError(
                f"--engine needs --engine-python (or ${PYTHON}) to start it, or the --url of a running one"
            )
        for name, ways in GOES_WITH.items():
            if not any(getattr(self, way) for way in ways):
                self.refuse(name, unless="with " + " or ".join(f"--{way}" for way in ways))
        return self

    def run(self, context: Context) -> Report:
        """Return the report, which is also written to `out` if given.

        Problems of the checkpoint are findings in it; those of other inputs are raised.

        Raises:
            ComparisonUnfit: a target and a head are to be compared.
            KconvError: the source, the target, the prompts or the states cannot be read, or an engine fails.
        """
        self._refuse_reports()
        self._refuse_early(context)
        request = self.located(context)
        with context.status("validating") as say:
            report = self._check(context, request, say)
        if self.strict:
            report = report.model_copy(update={"provenance": report.provenance | {"strict": True}})
        if self.out is not None:
            _write(report, Path(self.out))
        return report

    def _check(self, context: Context, request: Self, say: Callable[[str], None]) -> Report:
        """Check a head, or a target."""
        from ..convert.opening import open_origin
        from ..validate.accuracy import compare_accuracy
        from ..validate.files import is_target, open_subject, unreadable
        from ..validate.head import validate_head
        from ..validate.target import validate_target

        head, target, source = context.source(self.head), context.maybe(self.target), context.maybe(self.source)
        layout, hints = self.layout(), self.hints(self.target_config(context))
        # The headers tell which it is, so wrong usage is reported before weights are downloaded.
        of_target = source is not None and is_target(source.open_headers())
        if of_target and (given := self.given(*OF_HEADS)):
            raise RequestInvalid(
                f"{', '.join(given)}: only for a head, but this is a target",
                fix="Leave them out.",
            )
        if source and not of_target and (given := self.given(*OF_TARGETS)):
            raise RequestInvalid(
                f"{', '.join(given)}: only for a target, but this is a head", fix="Leave them out; see kconv bench."
            )
        results, of_source = ([context.path(name) for name in names] for names in (self.results, self.source_results))
        accuracy = compare_accuracy(results, of_source) if results else ()
        if self.measures and not of_target and target is None:
            raise RequestInvalid("measuring a head needs --target", fix="Pass the target that the head drafts for.")
        prompts = request._held_out(context, of_target=of_target)
        compared = source.open_weights() if source else None
        origin = open_origin(compared, head, target, hints) if compared and not of_target else None
        try:
            checkpoint = open_subject(head, request, say)
        except KconvError as error:
            return unreadable(head, request, error)
        whole = is_target(checkpoint) and layout is None
        self._refuse_unfit(checkpoint, whole, of_target)
        if whole:
            return validate_target(
                head, checkpoint, request, source=compared, prompts=prompts, accuracy=accuracy, say=say
            )
        return validate_head(
            head,
            checkpoint,
            request,
            layout=layout,
            hints=hints,
            target=target,
            source=origin,
            prompts=prompts,
            say=say,
        )

    def _refuse_unfit(self, checkpoint: Checkpoint, whole: bool, of_target: bool) -> None:
        """Refuse comparisons that could only be skipped: the report would be clean of a comparison that nobody made.

        Raises:
            ComparisonUnfit: a target and a head are to be compared, or a target's acceptance is requested.
        """
        kind, other = ("target", "head") if whole else ("head", "target")
        if self.source and of_target != whole:
            raise ComparisonUnfit(
                f"this is a {kind}, but --source is a {other}",
                where=checkpoint.source,
                fix=f"Pass the {kind} that it was made from.",
            )
        if whole and self.target and self.measures:
            raise ComparisonUnfit(
                "this is a target, but only a head has an acceptance to measure",
                where=checkpoint.source,
                fix="Validate the head with this as its --target. For a target's perplexity, pass --source.",
            )

    def passed(self, result: Report) -> bool:
        """Return whether no engine fails, and none depends on a fact left open."""
        return result.outcome == "pass"

    def exit_code(self, result: Report) -> int:
        """Return 3 where only facts that the head's files leave open stand against it: an option decides those."""
        return {"pass": 0, "fail": 1, "undecided": 3}[result.outcome]

    def failure(self, result: Report) -> ReportInvalid:
        """Return the error of a report that does not pass, if something depends on it."""
        from ..validate.report import SEVERITIES, STOPS

        stops = SEVERITIES[:-1] if self.strict else STOPS
        wrong = [f for f in result.findings if f.severity in stops]
        counts = {what: sum(f.severity == what for f in wrong) for what in stops}
        said = ", ".join(counted(count, what) for what, count in counts.items() if count)
        lines = "".join(f"\n  {f.rule} {f.where}: {f.message}\n    fix: {f.fix}" for f in wrong[:SHOWN])
        more = f"\n  and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        return ReportInvalid(
            f"validation found {said} in {result.subject}:{lines}{more}",
            where=self.out or "",
            fix="Do what the report says of each.",
        )

    def _refuse_early(self, context: Context) -> None:
        """Refuse what names, configs and headers show to be wrong for a measurement, before torch is loaded.

        Raises:
            EngineFailed: the engine's python does not run or lacks the engine, or nothing answers at the URL.
            PromptsInvalid: a record of a calibration does not exist.
            NotACheckpoint, TargetInvalid: the target is none, or has no tokenizer.
            StatesInvalid: there are no states.
        """
        # Without a target it is one itself, and some options do not apply.
        if not self.measures or not self.target:
            return
        from ..measure.held_out import find_records
        from ..targets.states import RECORD as STATES
        from ..targets.states import read_record

        check_python(self.python, self.engine)
        if self.url:
            from ..serving.client import connect

            connect(self.url, None, {}, CONNECT_SECONDS)
        for _ in find_records(map(context.path, self.calibrated_on)):
            pass
        if self.states and not self.allow_pickle and not (context.path(self.states) / STATES).exists():
            read_record(context.path(self.states))  # which says why it cannot
        check_target(context, self.target, tokenizer=bool(self.prompts))

    def _refuse_misfit(self, context: Context) -> None:
        """Raise TargetInvalid for a target that is not this head's; other errors are findings of the report."""
        try:
            self.open_headers(context, self.head)
        except TargetInvalid:
            raise
        except KconvError:
            pass

    def _refuse_reports(self) -> None:
        """Refuse a folder that holds a report or cannot be written, before an hour of measuring is lost to it."""
        if not self.out:
            return
        from ..checkpoint.staging import refuse_existing
        from ..validate.markdown import HTML, MARKDOWN
        from ..validate.report import REPORT

        if Path(self.out).is_file():
            raise RequestInvalid(f"--out {self.out} is a file", fix="Name a folder: three files are written there.")
        for name in (REPORT, MARKDOWN, HTML):
            refuse_existing(Path(self.out) / name, fix="Choose another folder for --out, or delete the old report.")

    def _held_out(self, context: Context, *, of_target: bool) -> HeldOut | None:
        """Return the held-out prompts, once it is known that what runs over them fits into memory."""
        name = self.source if of_target else self.target
        if self.prompts is None or name is None:
            return None
        check_trusted(context, self.trust_remote_code, name)
        check_prompts(Path(self.prompts))
        target = context.source(name)
        if of_target:
            from ..validate.perplexity import encode_texts

            return encode_texts(self, target)
        import torch

        from ..measure.held_out import encode_held_out
        from ..targets.model import check_memory

        # Checked before the head and its source are downloaded, which may be large themselves.
        instead = TOO_LARGE_BESIDE_ENGINE if self.engine else TOO_LARGE
        check_memory(target.open_headers(), torch.float32, instead=instead)
        self._refuse_misfit(context)
        return encode_held_out(self.prompts, target, self.text_tokens, trust_remote_code=self.trust_remote_code)


def _meant(asked: str, known: Collection[str]) -> str:
    """Return how to write what a wrong name of an engine may stand for."""
    if len(several := [part.strip() for part in asked.split(",")]) > 1 and set(several) <= set(known):
        return f". Repeat the option: {' '.join(f'--for {one}' for one in several)}"
    # An engine's title is a name for it too: TensorRT-LLM is trtllm.
    names = {one.title.lower(): one.name for one in registry.engines() if one.name in known} | {n: n for n in known}
    close = get_close_matches(asked.lower(), names, n=1)
    return f"; did you mean {names[close[0]]}?" if close else ""


def _write(report: Report, out: Path) -> None:
    """Write a report into a new folder, whole or not at all, or into an existing folder next to its files."""
    from tempfile import TemporaryDirectory

    from ..checkpoint.schema import MAX_JSON, read_bounded
    from ..checkpoint.staging import refuse_existing, staged, write_new
    from ..validate.markdown import write_report

    with TemporaryDirectory() if out.exists() else staged(out) as made:
        folder = Path(made)
        write_report(report, folder)
        files = sorted(folder.iterdir()) if out.exists() else []
        for file in files:
            refuse_existing(out / file.name)
        for file in files:
            write_new(out / file.name, read_bounded(file, ReportInvalid, limit=MAX_JSON, fix="Run it again."))
