"""The one form of findings and figures, from which text, JSON and cards are made."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from pydantic import Field, computed_field, field_validator, model_validator

from ..checkpoint.bytes import Look, Wanted, file_digest
from ..checkpoint.folder import Checkpoint
from ..checkpoint.schema import load_json
from ..convert.read import Head
from ..drafters.facts import phrase
from ..engines.registry import engines, engines_of
from ..errors import NotACheckpoint, ReportInvalid, Severity
from ..installed import version, version_of
from ..lines import Line, Part, Result, Styled, Table, counted, next_command
from ..measure.figures import Figures, ReadingFigures
from ..rule import Finding as Finding
from ..strict import StrictModel

if TYPE_CHECKING:
    from ..measure.drafting import Measured


REPORT = "report.json"
# In a report's provenance: why a rule without findings may not have been applied.
UNREAD = "unread"
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
# With these no engine passes.
STOPS = ("error", "undecided")
Outcome = Literal["pass", "fail", "undecided"]
COLORS = {"error": "red", "undecided": "yellow", "warning": "yellow", "note": "blue"}
# Number of readings of a head to show; report.json has all.
READINGS = 8
# With these findings, the readings of a head matter.
OF_READINGS = ("K312", "K313", "K314")


class Verdict(StrictModel):
    """What the findings come to for one engine.

    Attributes:
        engine: its title, e.g. "vLLM".
        runners: its checked runners, e.g. vllm-v1.
        outcome: "fail" with an error, and with --strict also with a warning or a fact left open; "undecided" if only
            facts that the head's files leave open stand against a "pass".
        errors, undecided, warnings: how many findings of each severity concern it.
        needs: the options that decide the facts left open, e.g. "--target org/name".
    """

    engine: str
    runners: tuple[str, ...]
    outcome: Outcome
    errors: int
    undecided: int
    warnings: int
    needs: tuple[str, ...]

    @property
    def words(self) -> tuple[str | Styled, ...]:
        """The verdict, e.g. "FAIL SGLang (1)" with the number of its errors."""
        if self.outcome == "pass":
            return Styled("PASS", "bold green"), f" {self.engine}"
        if self.outcome == "undecided":
            return Styled("UNDECIDED", "bold yellow"), f" {self.engine}: needs {' and '.join(self.needs)}"
        counts = {"undecided": self.undecided, "warning": self.warnings}
        why = ", ".join(counted(count, what) for what, count in counts.items() if count)
        return Styled("FAIL", "bold red"), f" {self.engine} ({self.errors or f'strict: {why}'})"


class Report(Result, StrictModel):
    """The findings and figures about one folder; the schema of report.json.

    Attributes:
        subject: the validated folder, as the user named it.
        weights: sha256 of each weight file; the report holds for these bytes only.
        config: sha256 of config.json, if it was on this machine.
        findings: worst first.
        figures: the measurements.
        provenance: how they were made: versions, target, prompts and their hash, seed, date, whether --strict.
        verdicts: one for each engine in `provenance.for`; kconv computes them again when it reads the file.
        outcome: "pass", "fail" or "undecided", for all engines together; a report itself is neither true nor false.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    subject: str
    weights: dict[str, str] = Field(default={})
    config: str = ""
    findings: tuple[Finding, ...] = ()
    figures: Figures = Figures()
    provenance: dict[str, Any] = Field(default={})

    @field_validator("provenance")
    @classmethod
    def _names_engines(cls, value: dict[str, Any]) -> dict[str, Any]:
        # Publishing and verdicts look into this list: in a text, any substring would count as an engine.
        asked = value.get("for", [])
        if not isinstance(asked, list) or not all(isinstance(name, str) for name in asked):
            raise ValueError(f"for is {asked!r}, not a list of engines")
        return value

    @model_validator(mode="before")
    @classmethod
    def _computes_verdicts(cls, value: Any) -> Any:
        return {key: one for key, one in value.items() if key != "verdicts"} if isinstance(value, dict) else value

    @computed_field
    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        asked = [str(name) for name in self.provenance.get("for", ())]
        titles = {name: engine.title for engine in engines() for name in engine.runner_names}
        found = []
        for title in dict.fromkeys(titles.get(name, name) for name in asked):
            runners = tuple(name for name in asked if titles.get(name, name) == title)
            own = [finding for finding in self.findings if finding.concerns(runners)]
            errors, undecided, warnings = (sum(f.severity == s for f in own) for s in SEVERITIES[:3])
            found.append(
                Verdict(
                    engine=title,
                    runners=runners,
                    outcome=self._outcome(own),
                    errors=errors,
                    undecided=undecided,
                    warnings=warnings,
                    needs=tuple(dict.fromkeys(f.needs for f in own if f.needs)),
                )
            )
        return tuple(found)

    def __bool__(self) -> NoReturn:
        raise TypeError(f"a report is neither true nor false; its outcome is {self.outcome!r} (report.outcome)")

    @property
    def outcome(self) -> Outcome:
        """What the findings come to for all engines together."""
        return self._outcome(self.findings)

    def _outcome(self, findings: Iterable[Finding]) -> Outcome:
        found = {finding.severity for finding in findings}
        if "error" in found or (self.provenance.get("strict") is True and found & {"undecided", "warning"}):
            return "fail"
        return "undecided" if "undecided" in found else "pass"

    @property
    def clean(self) -> bool:
        """Whether no finding stops a head, --strict or not."""
        return not any(finding.severity in STOPS for finding in self.findings)

    def to_json(self) -> str:
        """Return report.json's text."""
        return self.model_dump_json(indent=1, by_alias=True) + "\n"

    def lines(self, *, verbose: bool = False) -> Iterator[Part]:
        """Yield findings, figures and verdicts; notes are only counted unless `verbose`."""
        figures = self.figures
        yield from finding_lines(one for one in self.findings if one.severity != "note" or verbose)
        counts = {severity: sum(f.severity == severity for f in self.findings) for severity in SEVERITIES}
        if counts["note"] and not verbose:
            yield Line((Styled(f"{counted(counts['note'], 'note')}; -v shows them", "dim"),))
        if figures.acceptance:
            yield self.acceptance_table()
            yield ""
        yield from map(Line, _measured(figures))
        if figures.readings and any(f.rule in OF_READINGS for f in self.findings):
            yield _readings_table(figures.readings)
            yield ""
        if figures.identical is not None:
            yield Line(
                "weights: " + ("identical to the source" if figures.identical else "NOT identical to the source")
            )
        if asked := self.provenance.get("for"):
            as_target = "as a target, not as a draft head, " if self.provenance.get("checked") == "target" else ""
            why = self.provenance.get("for_by", "every engine")
            yield Line(f"checked {as_target}for {', '.join(asked)} ({why})")
        told = [counted(counts["error"], "error") if counts["error"] else "no errors"]
        told += [counted(counts[what], what) for what in ("undecided", "warning") if counts[what]]
        yield Line(f"{self.subject}: {', '.join(told)}")
        if judged := self.verdicts:
            parts = [part for one in judged for part in (" · ", *one.words)]
            yield Line(tuple(parts[1:]))
        if self._servable():
            yield next_command("serve", self.subject, "--target", str(self.provenance.get("target") or "TARGET"))

    def _servable(self) -> bool:
        """Return whether it is of a head that `kconv serve` starts an engine with.

        What an option states in place of the files, no engine is told.
        """
        passed = {one.engine for one in self.verdicts if one.outcome == "pass" and "stated" not in self.provenance}
        layout = str(self.provenance.get("layout")) if self.provenance.get("checked") == "head" else ""
        return any(one.title in passed and one.launch and not one.launch.config for one in engines_of(layout))

    def acceptance_table(self, title: str = "") -> Table:
        """Return acceptance lengths by drafter and text, with standard errors if available."""
        rows = self.figures.acceptance
        kinds = list(dict.fromkeys(row.text for row in rows))
        distinct = {text.kind: text.distinct_4grams for text in self.figures.texts}
        lengths = {(row.drafter, row.text): _with_error(row.length, row.standard_error) for row in rows}
        return Table(
            ("drafter", *(f"{kind}\n({distinct[kind]:.0%} distinct 4-grams)" for kind in kinds)),
            [
                (drafter, *(lengths[drafter, kind] for kind in kinds))
                for drafter in dict.fromkeys(row.drafter for row in rows)
            ],
            title=f"{title}: " * bool(title) + f"acceptance length, K={rows[0].steps}, bonus token included",
            right=True,
        )


def finding_lines(findings: Iterable[Finding]) -> Iterator[Line]:
    """Yield what is said of each finding, and what to do."""
    for one in findings:
        kind = Styled(f"{one.severity} {one.rule}", f"bold {COLORS[one.severity]}")
        yield Line((kind, f" {one.where}: {one.message}"))
        yield Line(f"  fix: {one.fix}")


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def _readings_table(rows: Sequence[ReadingFigures]) -> Table:
    """Return the acceptance length of each reading of a head, and its distance from the best."""
    first = rows[0]
    return Table(
        (*first.facts, "length", "behind", ""),
        [
            (
                *(phrase(name, value) for name, value in row.facts.items()),
                f"{row.length:.3f}",
                _with_error(row.behind_best, row.behind_best_se) if row.behind_best else "best",
                "current reading" if row.taken else "",
            )
            for row in sorted(rows, key=lambda row: row.behind_best)[:READINGS]
        ],
        title=f"readings of the head: acceptance length, K={first.steps}, {first.sequences} sequences of "
        f"{first.text} text",
    )


def _measured(figures: Figures) -> Iterator[str]:
    """Yield a line for each measurement."""
    for parity in figures.parity:
        yield (
            f"{parity.text}: logits differ by {parity.rms_error:.1e} (worst {parity.relative_error:.1e}), "
            f"KL {parity.kl:.1e}, top-1 agreement {parity.top1:.2%}, acceptance {parity.length_difference:+.4f}"
        )
    if by := figures.engine:
        yield (
            f"{by.engine}: {by.same_output} of {by.prompts} outputs equal, {by.drafts} drafts, acceptance length "
            f"{by.length:.4f}; kconv's chain gives {by.expected_drafts} drafts and {by.expected_length:.4f}"
        )
    noise = figures.noise
    if noise is not None and noise.exact:
        yield f"{noise.exact:,} of {noise.tensors:,} tensors in NVFP4 were cast without noise"
    if noise is not None and noise.median is not None:
        yield (
            f"{noise.tensors:,} tensors in NVFP4: median signal-to-noise ratio {noise.median:.1f} dB, "
            f"worst {noise.worst:.1f} dB ({noise.worst_tensor})"
        )
    if (text := figures.perplexity) is not None:
        yield (
            f"perplexity {text.output:.4f}, source {text.source:.4f} ({math.expm1(text.log_ratio):+.2%}); top-1 "
            f"agreement {text.top1:.2%} of {text.tokens:,} tokens"
        )
    for row in figures.accuracy:
        points = 100 * (row.output - row.source)
        yield f"{row.task}, {row.metric}: {row.output:.2%}, source {row.source:.2%} ({points:+.2f} points)"


def called(name: str) -> str:
    """Return what a published file calls a checkpoint or a file: its last part, without the path that leads to it here.

    A Hub id stays as it is, unless a folder of that name is here: then it is that folder.
    """
    return Path(name).name or name if Path(name).is_absolute() or os.path.lexists(name) else name


def portable(report: Report) -> Report:
    """Return a report that calls what it is about by names, without the paths that lead there on this machine."""
    values = report.model_dump(mode="json", by_alias=True)
    stated = (text for text in texts_in([values["subject"], values["provenance"]]) if _is_path(text))
    names = {f"{Path.cwd()}{os.sep}": ""} | {text.rstrip(os.sep): called(text) for text in stated}
    paths = _paths(names)
    return Report.model_validate(_each_text(values, lambda text: paths.sub(lambda found: names[found[1]], text)))


def _is_path(text: str) -> bool:
    # What is gone by now was a path, unless it is a sentence.
    gone = Path(text).is_absolute() and len(text.split()) == 1
    return os.sep in text.rstrip(os.sep) and (gone or os.path.lexists(text))


def _paths(names: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of any of these paths, whole or as the beginning of a longer one."""
    ends = {True: "", False: r"(?![\w.-])"}
    named = (re.escape(name) + ends[name.endswith(os.sep)] for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"(?<![\w./-])({'|'.join(named)})(?:/+$)?")


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text inside plain values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts_in(one)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: _each_text(one, change) for name, one in value.items()}
    return [_each_text(one, change) for one in value] if isinstance(value, list) else value


def report_file(path: Path) -> Path:
    """Return a report's path, from its own path or from its folder's."""
    return path / REPORT if path.is_dir() else path


def read_report(file: Path) -> Report:
    """Read a report.json.

    Args:
        file: the file, or its folder (kconv validate --out).

    Raises:
        NotACheckpoint: the file is missing.
        ReportInvalid: it cannot be read, or does not match the schema.
    """
    file = report_file(file)
    missing = NotACheckpoint(
        f"there is no {file.name}", where=file.parent, fix=f"Run kconv validate ... --out {file.parent} first."
    )
    return load_json(
        Report,
        file,
        ReportInvalid,
        what="kconv report",
        fix="Pass the report.json of kconv validate --out FOLDER.",
        missing=missing,
    )


def digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the sha256 of each weight file, by its name."""
    with Look(Wanted(file, whole=True) for file in checkpoint.files) as look:
        return {file.name: look.sha256(file) for file in checkpoint.files}


def make_report(head: Head, findings: Sequence[Finding], figures: Figures, provenance: Mapping[str, object]) -> Report:
    """Return the report on a head: findings worst first, and the digests of its weights."""
    about = head.checkpoint
    return assemble(about.source, digests(about), findings, figures, provenance, config_digest(about))


def config_digest(checkpoint: Checkpoint) -> str:
    """Return the sha256 of a checkpoint's config.json; empty if it is not on this machine."""
    file = checkpoint.folder / "config.json"
    return file_digest(file) if file.is_file() else ""


def assemble(
    subject: str,
    weights: Mapping[str, str],
    findings: Iterable[Finding],
    figures: Figures,
    provenance: Mapping[str, object],
    config: str = "",
) -> Report:
    """Return a report: findings worst first, of these a broken manifest, and the versions used.

    Args:
        subject: what was validated, as the user named it.
        weights: sha256 of each weight file, by its name.
        findings: in any order.
        figures: the measurements.
        provenance: how they were made, besides the versions and the date.
        config: sha256 of config.json.
    """
    # That a file was changed comes before what else it is then found to be.
    worst_first = sorted(findings, key=lambda one: (SEVERITIES.index(one.severity), one.rule != "K301"))
    stamp = {"kconv": version("kconv"), "date": datetime.now(UTC).date().isoformat()}
    # What only reads and compares bytes works without it.
    stamp |= {"torch": found} if (found := version_of("torch")) else {}
    return Report(
        subject=subject,
        weights=dict(weights),
        config=config,
        findings=tuple(worst_first),
        figures=figures,
        provenance=stamp | dict(provenance),
    )


def figures(identical: bool | None, measured: Sequence[Measured]) -> Figures:
    """Put each text's measurements into the report's form."""
    return Figures(
        identical=identical,
        texts=tuple(m.text for m in measured),
        acceptance=tuple(row for m in measured for row in m.acceptance),
        parity=tuple(m.parity for m in measured if m.parity),
        acceptance_by_category=tuple(row for m in measured for row in m.acceptance_by_category),
        parity_by_category=tuple(row for m in measured for row in m.parity_by_category),
        parts=tuple(row for m in measured for row in m.parts),
    )
