"""The errors that kconv raises, and the problems that it finds. Nothing here imports anything of kconv's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


class KconvError(Exception):
    """An error that kconv names: what is wrong, where it is, and what to do about it.

    Args:
        what: one sentence that says what is wrong, with the figures that show it.
        where: the file, tensor or key concerned; empty where `what` already says it.
        fix: what the user should do next, an imperative sentence.
        code: the rule's id where the error is a finding about a head, e.g. "K101"; the error's kind otherwise, e.g.
            "output-exists" of `OutputExists`.
    """

    def __init__(self, what: str, *, where: object = "", fix: str = "", code: str = "") -> None:
        self.what, self.where, self.fix = what, str(where), fix
        self.code = code or re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=A)(?=[A-Z][a-z])", "-", type(self).__name__).lower()
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
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
        fix: what the user should do next, an imperative sentence.
        kind: the class of the error that it is raised as.
    """

    code: str
    severity: Severity
    where: str
    what: str
    fix: str
    kind: type[KconvError] = KconvError

    def error(self) -> KconvError:
        """Return the problem as an error to raise."""
        return self.kind(self.what, where=self.where, fix=self.fix, code=self.code)


class NotACheckpoint(KconvError):
    """The path is missing, or holds no config.json and safetensors."""


class HubRefused(KconvError):
    """The Hub has no such repository or revision, a data set no such file, or this account may not read it."""


class HubUnreachable(KconvError):
    """The Hub cannot be reached or is too busy, and its local cache does not help."""


class DownloadDamaged(KconvError):
    """A downloaded file whose bytes are not those that the Hub announces."""


class CorruptHeader(KconvError):
    """A safetensors header that lies: sizes, offsets, names or dtypes that cannot be."""


class CorruptIndex(KconvError):
    """An index file that names what is not there, or a path outside its folder."""


class OutputExists(KconvError):
    """The output is already there; kconv never overwrites."""


class OutputFailed(KconvError):
    """The output could not be written: the disk is full, or the folder cannot be made."""


class UnknownLayout(KconvError):
    """No layout that kconv knows fits this config and these tensor names."""


class EngineUnknown(KconvError):
    """No engine that kconv knows has this name."""


class PluginInvalid(KconvError):
    """An engine or a layout of another package cannot be loaded, or takes a name that is taken."""


class ConfigInvalid(KconvError):
    """A config.json that cannot be read as a head: a key missing, of a wrong type, or contradicting another."""


class ConfigUnsupported(KconvError):
    """A config.json that asks for something kconv or the target engine cannot express."""


class CapturedUndecided(KconvError):
    """The captured layers are absent, or could be read in two ways."""


class TensorMissing(KconvError):
    """A tensor that the head needs is not in the checkpoint."""


class TensorUnknown(KconvError):
    """A tensor that no row of the layout accounts for."""


class TensorShape(KconvError):
    """A tensor whose shape is not the one its meaning demands."""


class TensorValue(KconvError):
    """A tensor whose values cannot be right: NaN, Inf, an id out of range."""


class TensorTwins(KconvError):
    """Two tensors that hold the same weight under two names, and differ."""


class LayoutCannot(KconvError):
    """The target layout has no place for something that this head has."""


class ManifestMismatch(KconvError):
    """The bytes on disk are not the ones that the manifest records."""


class TargetInvalid(KconvError):
    """The target model cannot be read, or does not belong to this head."""


class TargetTooLarge(KconvError):
    """The target is to be run, and does not fit into this machine's memory."""


class PromptsInvalid(KconvError):
    """A prompts file that cannot be read, or that overlaps with the text it must be held out from."""


class RecipeInvalid(KconvError):
    """A recipe with a key that does not exist or a value that cannot be."""


class TrainingFailed(KconvError):
    """Training stopped: a loss that is not a number, or a fault of the training library."""


class MissingExtra(KconvError):
    """A command needs packages of an extra that is not installed."""


class ReportInvalid(KconvError):
    """A validation report that is not of the schema, or is of other bytes than the ones at hand."""


class EngineFailed(KconvError):
    """An engine that does not start, dies, or answers with an error."""


class CountersMissing(KconvError):
    """A server that does not count drafts: it serves without speculation or its counters, or is none that is known."""


class CountersReset(KconvError):
    """Counters that went backwards: the server was restarted between two readings."""


class StatesInvalid(KconvError):
    """Stored hidden states that cannot be read, are damaged, or are of another target, capture or prompts."""


class AcceptanceInvalid(KconvError):
    """An acceptance.json that is not of the schema, repeats a row, or holds a figure that cannot be."""


class DefinitionsMixed(KconvError):
    """Figures of different definitions that would be put together, or a server that counts in two ways."""


class SuiteInvalid(KconvError):
    """A suite of prompts that lacks a category, or whose prompts are placeholders."""


class FactsInvalid(KconvError):
    """A facts file of a card with a key that does not exist or a value that cannot be."""


class LicenseUnknown(KconvError):
    """A license that kconv has no data about, or whose text is nowhere to be copied from."""


class SourceFormatUnknown(KconvError):
    """A target stored in a quantized format that kconv cannot read, or only in part."""


class WorkerFailed(KconvError):
    """A process that was given a part of the work ended without doing it."""


class TrainingDataInvalid(KconvError):
    """Training data that cannot be read, is of no known form, or holds nothing to train on."""


class PublishRefused(KconvError):
    """A folder that the gate does not let through, or a repository that it cannot be published to as asked."""


class HubMoved(KconvError):
    """The repository is not as it was expected: its branch moved on, or the tag is there with other files."""


class ReadBackFailed(KconvError):
    """What the Hub gives back is not what was uploaded."""


class CalibrationInvalid(KconvError):
    """States that a conversion cannot be calibrated on: of another target than the head's, or too few."""


class ConversionInaccurate(KconvError):
    """A converted attention that loses more on held-out text than was allowed."""


class ReadingBeaten(KconvError):
    """A head read in a way that another one beats, where both were measured on its target."""


class UnknownRule(KconvError):
    """No rule of validation has that id or name."""


class ReleaseBusy(KconvError):
    """A release's folder in which another run is at work."""


class ReleaseStateInvalid(KconvError):
    """A release's folder whose record cannot be read, or a step whose input was never made."""


class InputScalesInvalid(KconvError):
    """A calibration that cannot be read, is of another target, lacks a module, or has an amax that cannot be."""


class AcceptanceForged(KconvError):
    """A server that accepts a set number of drafts whatever its target says, which measures no head."""


class CountersDisturbed(KconvError):
    """Counters that count what was not asked for here, or never rest: someone else is using the server."""


class ComparisonUnfit(KconvError):
    """A head that would be held against a target or the other way round, or a measure that a target has not."""


class RequestInvalid(KconvError):
    """An operation was asked for with an option that does not exist, has a wrong value, or does not fit another."""


class EngineInvalid(KconvError):
    """An engine that another package adds cannot be loaded, or has the name of one that is there."""


class StepFailed(KconvError):
    """A step of a recipe did its work and found something wrong, so that no step after it is carried out."""
