"""What lm_eval measured of a quantized target and of its source, task by task.

kconv runs no harness: it reads the files that lm_eval wrote, results_*.json, and compares what was
measured alike.
https://github.com/EleutherAI/lm-evaluation-harness/blob/v0.4.13/lm_eval/loggers/evaluation_tracker.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from ..checkpoint.bytes import file_digest
from ..checkpoint.schema import MAX_JSON, find_wrong, parse_object, read_bounded
from ..errors import ComparisonUnfit, ResultsInvalid
from ..measure.figures import AccuracyFigures
from ..rule import Found
from ..strict import StrictModel
from .report import Finding
from .rules.comparisons import RULE

FIX = "Pass a results_*.json that lm_eval wrote."
ALIKE = "Run lm_eval on both with the same tasks and options, but for the model."


class Samples(StrictModel):
    """How many questions a task has, and how many were asked."""

    original: int
    effective: int


class Results(StrictModel):
    """What kconv reads of a results_*.json; lm_eval writes more."""

    model_config = ConfigDict(extra="ignore")

    results: dict[str, dict[str, Any]]
    versions: dict[str, Any]
    shots: dict[str, int | None] = Field(alias="n-shot")
    samples: dict[str, Samples] = Field(alias="n-samples")
    higher_is_better: dict[str, dict[str, bool | None]] = Field(default_factory=dict)
    group_subtasks: dict[str, list[str]] = Field(default_factory=dict)
    config: dict[str, Any]
    lm_eval_version: str = "of an unknown version"
    chat_template_sha: str | None = None
    system_instruction_sha: str | None = None
    fewshot_as_multiturn: bool | None = None
    max_length: Any = None

    @property
    def tasks(self) -> list[str]:
        """The tasks and groups of tasks; a task of a group counts in its group."""
        within = {task for tasks in self.group_subtasks.values() for task in tasks}
        return [task for task in self.results if task not in within]

    def parts(self, task: str) -> list[str]:
        """Return the tasks of a group, and of the groups in it; a task itself."""
        found, left = dict[str, None](), [task]
        while left:
            one = left.pop()
            if one not in found:
                found[one] = None
                left += self.group_subtasks.get(one, [])
        return [one for one in found if not self.group_subtasks.get(one)]

    def conditions(self, task: str) -> dict[str, object]:
        """Return how a task was measured, as far as it must be equal for two figures to be compared."""
        parts = sorted(self.parts(task))
        return {
            "lm_eval": self.lm_eval_version,
            "metrics": sorted(self.scores(task)),
            "version": {part: self.versions.get(part) for part in (task, *parts)},
            "few-shot": "/".join(sorted({str(self.shots.get(part)) for part in parts})),
            "questions": sum(self.samples[part].effective for part in parts if part in self.samples),
            "limit": self.config.get("limit"),
            "gen_kwargs": self.config.get("gen_kwargs") or None,
            "seeds": {name: self.config.get(f"{name}_seed") for name in ("random", "numpy", "torch", "fewshot")},
            # What a prompt has beyond it is cut off at the front.
            "max_length": self.max_length,
            "chat template": self.chat_template_sha,
            "system instruction": self.system_instruction_sha,
            "few-shot as turns": self.fewshot_as_multiturn or None,
        }

    def scores(self, task: str) -> dict[str, tuple[float, float | None]]:
        """Return a task's shares of which more is better, with their standard errors, by metric and filter."""
        found: dict[str, tuple[float, float | None]] = {}
        stated = [self.higher_is_better.get(part, {}) for part in self.parts(task)]
        better = {name for one in stated for name, more in one.items() if more}
        for key, value in self.results[task].items():
            metric, comma, kept = key.partition(",")
            if comma and metric in better and (share := _share(value)) is not None:
                name = metric if kept == "none" else f"{metric}, {kept}"
                found[name] = share, _share(self.results[task].get(f"{metric}_stderr,{kept}"))
        return found


def _share(value: object) -> float | None:
    """Return a share of the questions; None for anything else, e.g. "N/A"."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= 1 else None


def read_results(file: Path) -> Results:
    """Read a results_*.json of lm_eval.

    Raises:
        ResultsInvalid: it is none, or holds no figure.
    """
    text = read_bounded(file, ResultsInvalid, limit=MAX_JSON, fix=FIX)
    try:
        found = Results.model_validate(parse_object(text))
    except ValueError as fault:
        why = find_wrong(fault) if isinstance(fault, ValidationError) else fault
        raise ResultsInvalid(f"{file.name} is no result of lm_eval: {why}", where=file, fix=FIX) from fault
    if not any(found.scores(task) for task in found.tasks):
        raise ResultsInvalid(f"{file.name} has no share of which more is better", where=file, fix=FIX)
    return found


@dataclass(frozen=True)
class Measured:
    """A task's figures in one file."""

    file: Path
    results: Results
    task: str


def compare_accuracy(output: Sequence[Path], source: Sequence[Path]) -> tuple[AccuracyFigures, ...]:
    """Compare what lm_eval measured of a quantized target and of its source.

    Raises:
        ResultsInvalid: a file is no result of lm_eval, or is given for both, or a task stands in several.
        ComparisonUnfit: a task, or a metric of it, was measured of one of them alone, or otherwise.
    """
    if same := {file_digest(file) for file in output} & {file_digest(file) for file in source}:
        [twice, *_] = (file for file in source if file_digest(file) in same)
        raise ResultsInvalid("these results are given for HEAD and for its source", where=twice, fix=ALIKE)
    ours, theirs = _by_task(output), _by_task(source)
    if alone := sorted(ours.keys() ^ theirs.keys()):
        where = (ours | theirs)[alone[0]].file
        raise ComparisonUnfit(
            f"{', '.join(alone)} was measured of only one of the two", where=where,
            fix="Run lm_eval on both with the same tasks.",
        )  # fmt: skip
    return tuple(row for task in ours for row in _rows(ours[task], theirs[task]))


def _by_task(files: Sequence[Path]) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    for file in files:
        results = read_results(file)
        for task in results.tasks:
            if task in found:
                raise ResultsInvalid(
                    f"{task} is also in {found[task].file}", where=file, fix="Pass each task's results once."
                )
            found[task] = Measured(file, results, task)
    return found


def _rows(ours: Measured, theirs: Measured) -> Iterator[AccuracyFigures]:
    task, how, other = ours.task, ours.results.conditions(ours.task), theirs.results.conditions(theirs.task)
    unlike = [f"{name} is {value}, the source's {other[name]}" for name, value in how.items() if value != other[name]]
    if unlike:
        raise ComparisonUnfit(f"{task} was measured otherwise: {'; '.join(unlike)}", where=ours.file, fix=ALIKE)
    scores = theirs.results.scores(task)
    for metric, (value, error) in ours.results.scores(task).items():
        yield AccuracyFigures(
            task=task,
            metric=metric,
            shots=str(how["few-shot"]),
            questions=int(str(how["questions"])),
            harness=f"lm_eval {ours.results.lm_eval_version}",
            output=value,
            output_error=error,
            source=scores[metric][0],
            source_error=scores[metric][1],
        )


def judge_accuracy(rows: Sequence[AccuracyFigures]) -> Iterator[Finding]:
    """Find tasks of which the quantized target answers clearly fewer."""
    for row in rows:
        if row.is_lower:
            message = f"{row.metric} fell from {row.source:.2%} to {row.output:.2%}, by more than two standard errors"
            yield RULE["K394"].finding(Found(f"accuracy: {row.task}", message))
