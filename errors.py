"""The errors that kconv raises, and the problems that it finds. Nothing here imports the rest of kconv."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
# The user and password of a URL: shown to nobody.
PASSWORD = re.compile(r"://[^/\s@'\"]+@")


class KconvError(Exception):
    """An error with a code: what is wrong, where it is, and what to do about it.

    Args:
        what: one sentence that says what is wrong, with the figures that show it.
        where: the file, tensor or key concerned; empty where `what` already says it.
        fix: what the user should do next, as an imperative sentence.
        see: a link to the line of code or the thread that decides it; empty if there is none.
        code: the rule's id if the error is a finding about a head, e.g. "K101"; otherwise the error's kind, e.g.
        "output-exists" for `OutputExists`.
    """

    def __init__(self, what: str, *, where: object = "", fix: str = "", see: str = "", code: str = "") -> None:
        self.what, self.where, self.fix = (PASSWORD.sub("://***@", str(text)) for text in (what, where, fix))
        self.see = see
        self.code = code or re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=A)(?=[A-Z][a-z])", "-", type(self).__name__).lower()
        super().__init__(self.what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        if self.see:
            lines.append(f"  see:   {self.see}")
        return "\n".join(lines)

    def problem(self, code: str = "") -> Problem:
        """Return the error as a problem, under its own code or the one given."""
        return Problem(code or self.code, "error", self.where, self.what, self.fix, type(self))


@dataclass(frozen=True)
class Problem:
    """Something wrong with a checkpoint, as data: reading collects them, converting raises the first error.

    Attributes:
        code: the rule's id, e.g. "K101".
        severity: "error", "warning" or "note".
        where: the file, tensor or key concerned.
        what: one sentence that says what was found, with its figures.
        fix: what the user should do next, as an imperative sentence.
        kind: the error class that the problem is raised as.
    """

    code: str
    severity: Severity
    where: str
    what: str
    fix: str
    kind: type[KconvError] = KconvError

    def error(self) -> KconvError:
        """Return the problem as an error that can be raised."""
        return self.kind(self.what, where=self.where, fix=self.fix, code=self.code)


class NotACheckpoint(KconvError):
    """No config.json and safetensors there."""


class HubRefused(KconvError):
    """No such file, or no right to it."""


class HubUnreachable(KconvError):
    """The Hub cannot be reached."""


class DownloadDamaged(KconvError):
    """A download differs from its digest."""


class CorruptHeader(KconvError):
    """A safetensors header is impossible."""


class CorruptIndex(KconvError):
    """An index does not match its folder."""


class OutputExists(KconvError):
    """kconv never overwrites."""


class OutputFailed(KconvError):
    """The output cannot be written."""


class UnknownLayout(KconvError):
    """No layout fits config and tensor names."""


class EngineUnknown(KconvError):
    """No engine has this name."""


class PluginInvalid(KconvError):
    """A plugin cannot be loaded, or its name is taken."""


class ConfigInvalid(KconvError):
    """A key of config.json is missing or wrong."""


class ConfigUnsupported(KconvError):
    """config.json asks for something unsupported."""


class CapturedUndecided(KconvError):
    """The captured layers are unknown or ambiguous."""


class TensorMissing(KconvError):
    """The checkpoint lacks a tensor."""


class TensorUnknown(KconvError):
    """The layout has no row for a tensor."""


class TensorShape(KconvError):
    """A tensor has the wrong shape for its role."""


class TensorValue(KconvError):
    """A tensor has impossible values."""


class TensorTwins(KconvError):
    """A weight has two names, with different values."""


class LayoutCannot(KconvError):
    """The layout has no place for a part."""


class ManifestMismatch(KconvError):
    """The bytes on disk differ from the manifest."""


class TargetInvalid(KconvError):
    """The target is unreadable, or not this head's."""


class TargetTooLarge(KconvError):
    """The target does not fit into memory."""


class PromptsInvalid(KconvError):
    """Prompts are unreadable, or overlap with held-out text."""


class RecipeInvalid(KconvError):
    """A recipe has a wrong key or value."""


class TrainingFailed(KconvError):
    """The loss is no number, or a library failed."""


class MissingExtra(KconvError):
    """An extra is not installed."""


class ReportInvalid(KconvError):
    """A report is invalid, or describes other files."""


class EngineFailed(KconvError):
    """An engine does not start, dies, or errs."""


class CountersMissing(KconvError):
    """A server does not speculate or hides its counters."""


class CountersReset(KconvError):
    """The server was restarted."""


class StatesInvalid(KconvError):
    """Stored states are damaged, or of another run."""


class AcceptanceInvalid(KconvError):
    """An acceptance.json is invalid."""


class DefinitionsMixed(KconvError):
    """Figures have different definitions."""


class SuiteInvalid(KconvError):
    """A suite lacks a category or real prompts."""


class FactsInvalid(KconvError):
    """A facts file has a wrong key or value."""


class LicenseUnknown(KconvError):
    """A license or its text is unknown."""


class SourceFormatUnknown(KconvError):
    """A target's quantized format is unknown."""


class WorkerFailed(KconvError):
    """A worker process ended early."""


class TrainingDataInvalid(KconvError):
    """Training data is unreadable or empty."""


class PublishRefused(KconvError):
    """A release check failed."""


class HubMoved(KconvError):
    """The branch moved, or the tag has other files."""


class ReadBackFailed(KconvError):
    """The Hub returns other bytes."""


class CalibrationInvalid(KconvError):
    """States are too few, or of another target."""


class ConversionInaccurate(KconvError):
    """A conversion loses too much acceptance."""


class ReadingBeaten(KconvError):
    """Another reading of the head is better."""


class UnknownRule(KconvError):
    """No rule has this id or name."""


class ReleaseBusy(KconvError):
    """Another run works in this folder."""


class ReleaseStateInvalid(KconvError):
    """The record or a step's input is missing or unreadable."""


class InputScalesInvalid(KconvError):
    """A calibration is damaged, or of another target."""


class AcceptanceForged(KconvError):
    """A server accepts a fixed number of drafts."""


class CountersDisturbed(KconvError):
    """Somebody else is using the server."""


class ComparisonUnfit(KconvError):
    """The comparison does not apply."""


class RequestInvalid(KconvError):
    """An option is unknown, wrong, or conflicts."""


class EngineInvalid(KconvError):
    """A plugin's engine cannot be loaded."""


class StepFailed(KconvError):
    """A recipe step found errors."""
