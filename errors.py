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
    """The path is missing, or holds no config.json and safetensors."""


class HubRefused(KconvError):
    """The Hub has no such repository, revision or file, or this account may not read it."""


class HubUnreachable(KconvError):
    """The Hub cannot be reached or is too busy, and its local cache does not help."""


class DownloadDamaged(KconvError):
    """A downloaded file differs from the digest that the Hub announced."""


class CorruptHeader(KconvError):
    """A safetensors header with impossible sizes, offsets, names or dtypes."""


class CorruptIndex(KconvError):
    """An index file names a missing file or tensor, or a path outside its folder."""


class OutputExists(KconvError):
    """The output already exists; kconv never overwrites."""


class OutputFailed(KconvError):
    """The output could not be written: the disk is full, or the folder cannot be made."""


class UnknownLayout(KconvError):
    """No layout that kconv knows fits this config and these tensor names."""


class EngineUnknown(KconvError):
    """No engine that kconv knows has this name."""


class PluginInvalid(KconvError):
    """An engine or layout from another package cannot be loaded, or its name is taken."""


class ConfigInvalid(KconvError):
    """A config.json cannot be read as a head: a key is missing, has a wrong type, or contradicts another."""


class ConfigUnsupported(KconvError):
    """A config.json asks for something that kconv or the engine does not support."""


class CapturedUndecided(KconvError):
    """The captured layers are unknown, or could be read in two ways."""


class TensorMissing(KconvError):
    """A tensor that the head needs is not in the checkpoint."""


class TensorUnknown(KconvError):
    """A tensor that no row of the layout accounts for."""


class TensorShape(KconvError):
    """A tensor has the wrong shape for its role."""


class TensorValue(KconvError):
    """A tensor has impossible values: NaN, Inf, an id out of range."""


class TensorTwins(KconvError):
    """Two tensors hold the same weight under two names, with different values."""


class LayoutCannot(KconvError):
    """The layout to write has no place for a part of this head."""


class ManifestMismatch(KconvError):
    """The bytes on disk differ from the manifest."""


class TargetInvalid(KconvError):
    """The target model cannot be read, or is not this head's target."""


class TargetTooLarge(KconvError):
    """The target does not fit into this machine's memory."""


class PromptsInvalid(KconvError):
    """Prompts cannot be read, or overlap with text that must stay held out."""


class RecipeInvalid(KconvError):
    """A recipe has an unknown key or an invalid value."""


class TrainingFailed(KconvError):
    """Training stopped: the loss is not a number, or the training library failed."""


class MissingExtra(KconvError):
    """A command needs packages of an extra that is not installed."""


class ReportInvalid(KconvError):
    """A validation report does not match its schema, or describes other files."""


class EngineFailed(KconvError):
    """An engine does not start, dies, or answers with an error."""


class CountersMissing(KconvError):
    """A server counts no drafts: it does not speculate, hides its counters, or is not a known engine."""


class CountersReset(KconvError):
    """Counters went backwards: the server was restarted between two readings."""


class StatesInvalid(KconvError):
    """Stored hidden states are unreadable or damaged, or come from another target, capture or prompts."""


class AcceptanceInvalid(KconvError):
    """An acceptance.json does not match its schema, repeats a row, or has an impossible figure."""


class DefinitionsMixed(KconvError):
    """Figures with different definitions cannot be combined, or a server counts in two ways."""


class SuiteInvalid(KconvError):
    """A suite lacks a category, or its prompts are placeholders."""


class FactsInvalid(KconvError):
    """A card's facts file has an unknown key or an invalid value."""


class LicenseUnknown(KconvError):
    """kconv has no data about a license, or cannot find its text."""


class SourceFormatUnknown(KconvError):
    """A target has a quantized format that kconv cannot read, or only in part."""


class WorkerFailed(KconvError):
    """A worker process ended before its work was done."""


class TrainingDataInvalid(KconvError):
    """Training data is unreadable, has an unknown form, or holds nothing to train on."""


class PublishRefused(KconvError):
    """A release check failed, or the repository cannot be published to as requested."""


class HubMoved(KconvError):
    """The repository has changed: its branch moved, or the tag exists with other files."""


class ReadBackFailed(KconvError):
    """The Hub returns different bytes than were uploaded."""


class CalibrationInvalid(KconvError):
    """States cannot be used for calibration: they come from another target, or are too few."""


class ConversionInaccurate(KconvError):
    """A conversion loses more acceptance on held-out text than allowed."""


class ReadingBeaten(KconvError):
    """Measured on the target, another reading of the head beats the one that was asked for."""


class UnknownRule(KconvError):
    """No validation rule has this id or name."""


class ReleaseBusy(KconvError):
    """Another run is working in the release's folder."""


class ReleaseStateInvalid(KconvError):
    """The release's record cannot be read, or a step's input does not exist yet."""


class InputScalesInvalid(KconvError):
    """A calibration is unreadable, belongs to another target, lacks a module, or has an impossible amax."""


class AcceptanceForged(KconvError):
    """A server accepts a fixed number of drafts, so it does not measure the head."""


class CountersDisturbed(KconvError):
    """Somebody else is using the server: its counters move without requests from here."""


class ComparisonUnfit(KconvError):
    """A head cannot be compared with a target, or the measurement does not apply to a target."""


class RequestInvalid(KconvError):
    """An option does not exist, has a wrong value, or conflicts with another option."""


class EngineInvalid(KconvError):
    """An engine from another package cannot be loaded, or its name is taken."""


class StepFailed(KconvError):
    """A recipe step found errors, so later steps were not run."""
