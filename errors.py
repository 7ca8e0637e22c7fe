"""The errors that kconv raises, and the problems that it finds. Nothing here imports the rest of kconv."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Worst first.
Severity = Literal["error", "undecided", "warning", "note"]
# The user and password of a URL: shown to nobody.
PASSWORD = re.compile(r"://[^/\s@'\"]+@")
# How Python holds the bytes of a path that its locale cannot decode.
UNDECODED = re.compile("[\udc80-\udcff]+")


def readable(text: object) -> str:
    """Return a text with a path's bytes as UTF-8, whatever the locale: what is written and printed must be UTF-8."""
    return UNDECODED.sub(lambda found: found[0].encode("utf-8", "surrogateescape").decode(errors="replace"), str(text))


class Where(str):
    """What an error or a problem is about: the text that says it, and the file and the key as values.

    The file is relative if it is one of the checkpoint in hand. An empty key means the whole file.
    """

    file: Path
    key: str

    def __new__(cls, file: Path, key: str = "") -> Where:
        where = super().__new__(cls, f"{readable(file)}: {key}" if key else readable(file))
        where.file, where.key = file, key
        return where

    def within(self, folder: object) -> str:
        """Return it with the name of the checkpoint, which who reads a config does not know."""
        return str(self) if self.file.is_absolute() else f"{folder}/{self}"


class Setting(str):
    """A value of --set that an error is about: the text that says it, and the key as a value."""

    key: str

    def __new__(cls, key: object) -> Setting:
        setting = super().__new__(cls, f"--set {key}")
        setting.key = str(key)
        return setting


def in_config(key: str = "") -> Where:
    """Return the place of a key of the config.json in hand, or of the whole file."""
    return Where(Path("config.json"), key)


class KconvError(Exception):
    """An error with a code: what is wrong, where it is, and what to do about it.

    Args:
        what: one sentence that says what is wrong, with the figures that show it.
        where: the file, tensor or key concerned; empty where `what` already says it.
        fix: what the user should do next, as an imperative sentence.
        see: a link to the line of code or the thread that decides it; empty if there is none.
        needs: the option that decides it, if the files only leave a fact open, e.g. "--captured-are".
        code: the rule's id if the error is a finding about a head, e.g. "K101"; otherwise the error's kind, e.g.
        "output-exists" for `OutputExists`.
    """

    def __init__(
        self, what: str, *, where: object = "", fix: str = "", see: str = "", code: str = "", needs: str = ""
    ) -> None:
        self.what, self.fix = (PASSWORD.sub("://***@", readable(text)) for text in (what, fix))
        where = Where(where) if isinstance(where, Path) else where
        self.where = where if isinstance(where, Where | Setting) else PASSWORD.sub("://***@", readable(where))
        self.see, self.needs = see, needs
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

    def as_json(self) -> dict[str, dict[str, str]]:
        """Return the object that a command with --json prints."""
        parts = {"code": self.code, "what": self.what, "where": str(self.where), "fix": self.fix}
        return {"error": parts | {"see": self.see, "needs": self.needs}}

    def problem(self, code: str = "") -> Problem:
        """Return the error as a problem, under its own code or the one given."""
        return Problem(code or self.code, "error", self.where, self.what, self.fix, type(self), self.needs)


@dataclass(frozen=True)
class Problem:
    """Something wrong with a checkpoint, as data: reading collects them, converting raises the first error.

    The other fields are those of a `KconvError`.

    Attributes:
        severity: "error" if nothing can be made of the head, else "warning" or "note"; its rule says what engines do.
        kind: the error class that the problem is raised as.
        knows: whether the fix is for this very tensor or key, and goes before its rule's.
    """

    code: str
    severity: Severity
    where: str
    what: str
    fix: str
    kind: type[KconvError] = KconvError
    needs: str = ""
    knows: bool = False

    def error(self) -> KconvError:
        return self.kind(self.what, where=self.where, fix=self.fix, code=self.code, needs=self.needs)


class NotACheckpoint(KconvError):
    """The path is missing, or holds no config.json and safetensors."""


class HubRefused(KconvError):
    """The Hub has no such file, or this account may not read it."""


class HubUnreachable(KconvError):
    """The Hub cannot be reached, and its cache does not help."""


class DownloadDamaged(KconvError):
    """A downloaded file differs from the announced digest."""


class CorruptHeader(KconvError):
    """A safetensors header is impossible."""


class CorruptIndex(KconvError):
    """An index names a missing file or tensor, or leads out of its folder."""


class OutputExists(KconvError):
    """The output already exists; kconv never overwrites."""


class OutputFailed(KconvError):
    """The output cannot be written, e.g. the disk is full."""


class UnknownLayout(KconvError):
    """No layout that kconv knows fits this config and these tensor names."""


class EngineUnknown(KconvError):
    """No engine that kconv knows has this name."""


class PluginInvalid(KconvError):
    """A plugin's engine or layout cannot be loaded, or its name is taken."""


class ConfigInvalid(KconvError):
    """A key of config.json is missing, of a wrong type, or contradicts another."""


class ConfigUnsupported(KconvError):
    """config.json asks for what kconv or the engine does not support."""


class CapturedUndecided(KconvError):
    """The captured layers are unknown or ambiguous."""


class TensorMissing(KconvError):
    """The checkpoint lacks a tensor."""


class TensorUnknown(KconvError):
    """The layout has no row for a tensor."""


class TensorShape(KconvError):
    """A tensor has the wrong shape for its role."""


class TensorValue(KconvError):
    """A tensor has impossible values: NaN, Inf, an id out of range."""


class TensorTwins(KconvError):
    """A weight has two names, with different values."""


class LayoutCannot(KconvError):
    """The layout to write has no place for a part of this head."""


class ManifestMismatch(KconvError):
    """The bytes on disk differ from the manifest."""


class AnotherSource(ManifestMismatch):
    """A checkpoint is not the one that the manifest names as its source."""


class TargetInvalid(KconvError):
    """The target model cannot be read, or is not this head's target."""


class TargetTooLarge(KconvError):
    """The target does not fit into this machine's memory."""


class PromptsInvalid(KconvError):
    """Prompts cannot be read, or overlap with text that must stay held out."""


class RecipeInvalid(KconvError):
    """A recipe has an unknown key or an invalid value."""


class TrainingFailed(KconvError):
    """The loss is not a number, or the training library failed."""


class MissingExtra(KconvError):
    """An extra is not installed."""


class ReportInvalid(KconvError):
    """A report does not match its schema, or describes other files."""


class ResultsInvalid(KconvError):
    """A harness's results are unreadable, or do not fit together."""


class EngineFailed(KconvError):
    """An engine does not start, dies, or answers with an error."""


class ConnectionBroken(EngineFailed):
    """A server that was reached ended a connection before its answer; it may answer the same request again."""


class ServerUnreachable(EngineFailed):
    """No server can be reached at an address, or it is no address."""


class CountersMissing(KconvError):
    """A server does not speculate, hides its counters, or is unknown."""


class CountersReset(KconvError):
    """Counters went backwards: the server was restarted."""


class StatesInvalid(KconvError):
    """Stored states are damaged, or come from another target, capture or prompts."""


class AcceptanceInvalid(KconvError):
    """An acceptance.json is not of its schema, or has an impossible figure."""


class DefinitionsMixed(KconvError):
    """Figures have different definitions."""


class SuiteInvalid(KconvError):
    """A suite lacks a category, or its prompts are placeholders."""


class FactsInvalid(KconvError):
    """A card's facts file has an unknown key or an invalid value."""


class LicenseUnknown(KconvError):
    """A license or its text is unknown."""


class SourceFormatUnknown(KconvError):
    """kconv cannot read a target's quantized format."""


class QuantizedWeightInvalid(KconvError):
    """A quantized weight lacks a tensor, or one has a dtype, a shape or a content that its format does not have."""


class WorkerFailed(KconvError):
    """A worker process ended early."""


class TrainingDataInvalid(KconvError):
    """Training data is unreadable, or holds nothing to train on."""


class PublishRefused(KconvError):
    """A release check failed."""


class HubMoved(KconvError):
    """The branch moved, or the tag has other files."""


class ReadBackFailed(KconvError):
    """The Hub returns other bytes than were uploaded."""


class CalibrationInvalid(KconvError):
    """States are too few, or of another target."""


class ConversionInaccurate(KconvError):
    """A conversion loses more acceptance than allowed."""


class ReadingBeaten(KconvError):
    """On the target, another reading of the head is better."""


class UnknownRule(KconvError):
    """No validation rule has this id or name."""


class ReleaseBusy(KconvError):
    """Another run is working in the release's folder."""


class ReleaseStateInvalid(KconvError):
    """The release's record is unreadable, or a step's input is missing."""


class InputScalesInvalid(KconvError):
    """A calibration is damaged, incomplete, or of another target."""


class AcceptanceForged(KconvError):
    """A server accepts a fixed number of drafts."""


class CountersDisturbed(KconvError):
    """Somebody else is using the server."""


class ComparisonUnfit(KconvError):
    """The comparison or the measurement does not apply."""


class RequestInvalid(KconvError):
    """An option is unknown, wrong, or conflicts with another."""


class EngineInvalid(KconvError):
    """A plugin's engine cannot be loaded, or its name is taken."""


class StepFailed(KconvError):
    """A recipe step found errors."""
