"""`kconv.json`, the record beside every output."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ..errors import KconvError, ManifestMismatch, NotACheckpoint
from .bytes import Look, Wanted, file_digest
from .folder import Checkpoint, open_checkpoint
from .schema import load_json

MANIFEST = "kconv.json"
AGAIN = "Fetch the folder again, or create it again with kconv."
ADDED = "Remove the file if it was added; if not, convert the head again."
# What an engine reads of a folder: config, weights in any container, and how they are quantized.
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/model_loader/default_loader.py#L184-L208
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/config.py#L893-L898
READ_BY_ENGINES = (
    "config.json", "*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*quant_config.json",
    "quantize_config.json",
)  # fmt: skip
# What a report and a card say of a head by `Manifest.as_it_ships`.
DRAFTS = {
    True: "the draft as it ships: byte-identical to the one it came from, and eligible where a reference draft is "
    "asked for",
    False: "another draft than the one it came from: not eligible where a reference draft is to be served as it ships",
}
Action = Literal[
    "copied", "renamed", "repacked", "cast", "added", "rebuilt", "expanded", "pruned", "quantized", "dequantized",
    "converted",
]  # fmt: skip


def _bare(name: str) -> str:
    """Refuse a name that leads out of the manifest's own folder; a manifest may be a stranger's."""
    if name in ("", ".", "..") or any(mark in name for mark in ("/", "\\", "\0")):
        raise ValueError(f"{name!r} is not the bare name of a file")
    return name


FileName = Annotated[str, AfterValidator(_bare)]


class Record(BaseModel):
    """A part of a file that kconv writes: no key beyond its own, and no change once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorRecord(Record):
    """A tensor on one side: its name, dtype, shape, and the blake3 of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blake3: str


class StepRecord(Record):
    """How one output tensor was made; `reason` explains a computed one."""

    action: Action
    output: TensorRecord
    sources: tuple[TensorRecord, ...]
    reason: str = ""


class DroppedRecord(TensorRecord):
    """A source tensor that is not in the output, and why."""

    reason: str


class HintsRecord(Record):
    """Options with which the user described the source; see `convert.captured.Hints`."""

    captured: tuple[int, ...] | None = None
    captured_are: Literal["outputs", "inputs"] | None = None
    target_layers: int | None = None
    max_positions: int | None = None
    norm_before_residual: bool | None = None
    rope_theta: float | None = None
    layers: int | None = None


class UnverifiedRecord(Record):
    """A fact that only the user or a default states; see `convert.config.Unverified`."""

    fact: str
    value: str
    word: str
    against: str = ""


class FileRecord(Record):
    """A file of the output, by its bare name; `sha256` is what the Hub shows for it."""

    name: FileName
    size: int
    sha256: str


class Parameters(Record):
    """Numbers of weight elements: trained with the head, copied from its target, or one of the two."""

    trained: int
    copied_from_target: int
    unknown: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.trained + self.copied_from_target + self.unknown


class ConversionRecord(Record):
    """A conversion of the attention: an approximation, calibrated and measured.

    Attributes:
        method: the steps, one sentence.
        calibration: the text that it was calibrated and measured on.
        calibration_sha256: over the token ids, in order.
        prompts: the digest of each prompt that the texts were made of, so that none is measured on as held out.
        sequences, context: how many texts, and tokens of the longest.
        rows: states that it was fitted to: chains times draft steps.
        heal_steps: of gradient descent towards the original.
        held_out: figures on text that neither the fit nor healing used; lengths include the bonus token.
        details: choices that the fit made.
        fingerprint: what the measured head computed on inputs of its own; see `head.fingerprint`. Empty where it was
            not taken.
        before: the record of the head that this one was converted from, where that was an approximation itself.
    """

    method: str
    calibration: str
    calibration_sha256: str
    sequences: int
    context: int
    rows: int
    heal_steps: int
    held_out: dict[str, Any]
    details: dict[str, Any] = {}
    prompts: tuple[str, ...] = ()
    fingerprint: tuple[float, ...] = ()
    before: ConversionRecord | None = None


class Manifest(Record):
    """What an output was made from, and how; the schema of kconv.json.

    Attributes:
        kconv: the version that wrote it.
        exact: whether every weight's bytes are the source's, or the target's where one was added from it.
        source: the source, as the user named it.
        source_config: sha256 of its config.json.
        source_pickles: the files of the source that were pickles, read with weights_only; empty for safetensors.
        source_layout, layout: of the source and of the output.
        hints: the options with which the user described the source.
        spec: the head, as `HeadSpec` names it.
        captured_by: how the captured layers were decided.
        unverified: facts that only the user or a default states, until kconv validate measures them.
        parameters: number of weight elements in the output.
        parameters_by_origin: the same, trained and copied ones apart.
        config_copied, config_dropped: the source config's keys that kconv does not interpret.
        tensors: every tensor of the output.
        dropped: every source tensor that is not in the output.
        files: every file of the output but this one.
        training: how kconv trained the head, if it did: recipe, data, tokens, figures, libraries.
        conversion: how its attention was converted, if it was.
        draft: whether a head is byte for byte the draft that it came from, however many conversions ago, or another
            one; None of a target, and of a head that an older kconv wrote.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    kconv: str = Field(default_factory=lambda: version("kconv"))
    exact: bool
    source: str
    source_config: str
    source_pickles: tuple[str, ...] = ()
    source_layout: str
    layout: str
    hints: HintsRecord = HintsRecord()
    spec: dict[str, Any]
    captured_by: str
    unverified: tuple[UnverifiedRecord, ...] = ()
    parameters: int
    parameters_by_origin: Parameters
    config_copied: tuple[str, ...] = ()
    config_dropped: tuple[str, ...] = ()
    tensors: tuple[StepRecord, ...]
    dropped: tuple[DroppedRecord, ...] = ()
    files: tuple[FileRecord, ...]
    training: dict[str, Any] | None = None
    conversion: ConversionRecord | None = None
    draft: Literal["as it ships", "another"] | None = None

    @property
    def as_it_ships(self) -> bool:
        """Whether the draft is the one it came from, byte for byte, as referees ask of a reference draft.

        https://github.com/SemiAnalysisAI/InferenceX/pull/3283, and MLPerf Inference's rules, appendix C: a submission
        may not quantize or recast a draft.
        """
        return self.draft == "as it ships" if self.draft else self.exact and self.conversion is None

    @property
    def weight_files(self) -> dict[str, str]:
        """The sha256 of each weight file, by name: what a report or a figure must name to be of these weights."""
        return {file.name: file.sha256 for file in self.files if file.name.endswith(".safetensors")}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write kconv.json into a folder."""
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1, by_alias=True) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's kconv.json.

    Raises:
        NotACheckpoint: there is none.
        ManifestMismatch: it is not of the schema.
    """
    file = folder / MANIFEST
    # os.path says False of a name that is too long; pathlib raises.
    if not os.path.isfile(file) or not os.access(file, os.R_OK):  # noqa: PTH113
        raise NotACheckpoint(
            f"{folder} has no readable {MANIFEST}, so kconv did not write it",
            where=folder,
            fix="Convert it with kconv.",
        )
    return load_json(
        Manifest,
        file,
        ManifestMismatch,
        what="manifest of kconv's schema",
        fix="Make it again, or use the kconv that did.",
    )


def verify(folder: Path, source: Checkpoint | None = None) -> Manifest:
    """Re-check every byte of an output against its manifest, and its source's config and tensors if given.

    Args:
        folder: an output of kconv.
        source: the checkpoint it was made from.

    Raises:
        ManifestMismatch: a file or tensor is missing, unrecorded, or of other bytes.
    """
    manifest = read_manifest(folder)
    try:
        output = open_checkpoint(folder)
    except KconvError as fault:
        # Where its bytes are not those that were written, that is why it cannot be opened.
        with Look([]) as look:
            _check_files(manifest, folder, look)
        raise fault
    with Look([*wanted_digests(output, whole=True), *(wanted_digests(source) if source else ())]) as look:
        hold(manifest, output, source, look)
    return manifest


def wanted_digests(checkpoint: Checkpoint, *, whole: bool = False) -> list[Wanted]:
    """Return that the blake3 of each tensor of a checkpoint is wanted, and the sha256 of its files if `whole`."""
    return [Wanted(file, whole, infos) for file, infos in checkpoint.by_file().items()]


def hold(manifest: Manifest, output: Checkpoint, source: Checkpoint | None, look: Look) -> None:
    """Hold an output against its manifest, and its source's config and tensors if given.

    Args:
        manifest: the output's.
        output: what kconv wrote.
        source: the checkpoint it was made from.
        look: what reads them, see `wanted_digests`; the rest is read here.

    Raises:
        ManifestMismatch: a file or tensor is missing, unrecorded, or of other bytes.
    """
    _check_files(manifest, output.folder, look)
    _agrees_with_itself(manifest)
    _same(output, {step.output.name: step.output for step in manifest.tensors}, AGAIN, look)
    if source is not None:
        fix = f"Give {manifest.source}, as it was when the head was made from it, or convert again."
        config = source.folder / "config.json"
        if file_digest(config) != manifest.source_config:
            raise mismatch(config, "the output was made from another config", fix)
        held: dict[str, TensorRecord] = {s.name: s for step in manifest.tensors for s in step.sources}
        _same(source, held | {record.name: record for record in manifest.dropped}, fix, look)


def _check_files(manifest: Manifest, folder: Path, look: Look) -> None:
    for record in manifest.files:
        if not _holds(folder / record.name, record, look):
            raise mismatch(folder / record.name, "its bytes are not the ones that were written", AGAIN)
    recorded = {record.name for record in manifest.files}
    for file in sorted(folder.iterdir()):
        if file.name not in recorded and any(file.match(pattern) for pattern in READ_BY_ENGINES):
            raise mismatch(file, "engines read this file, and no record of it was written", ADDED)


# What keeps a tensor's bytes, and what keeps its values.
COPIES, EXACT = ("copied", "renamed"), ("copied", "renamed", "repacked", "added", "rebuilt")
# Maps of a vocabulary, which are no weights: an exact head's may be computed.
MAPS = ("BOOL", "I64", "I32")


def _agrees_with_itself(manifest: Manifest) -> None:
    """Raise ManifestMismatch for a manifest that says one thing twice and differently."""
    for what, records in (("file", manifest.files), ("tensor", [step.output for step in manifest.tensors])):
        names = [record.name for record in records]
        if twice := sorted({name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()):
            raise mismatch(MANIFEST, f"it records the {what} {twice[0]} twice", AGAIN)
    for step in manifest.tensors:
        own = (step.output.dtype, step.output.shape, step.output.blake3)
        if step.action in COPIES and [(s.dtype, s.shape, s.blake3) for s in step.sources] != [own]:
            raise mismatch(MANIFEST, f"{step.output.name} is said to be {step.action}, of other bytes", AGAIN)
    # A target's manifest has no step of a head's; it is never exact.
    changed = [s.output.name for s in manifest.tensors if s.action not in EXACT and s.output.dtype not in MAPS]
    if manifest.spec.get("kind") != "target" and manifest.exact == bool(changed):
        said = f"exact, and {changed[0]} is not" if changed else "not exact, and every tensor is"
        raise mismatch(MANIFEST, f"it says that the weights are {said}", AGAIN)
    if manifest.parameters != manifest.parameters_by_origin.total:
        raise mismatch(MANIFEST, "it counts the parameters twice and differently", AGAIN)


def _holds(file: Path, record: FileRecord, look: Look) -> bool:
    try:
        return file.is_file() and file.stat().st_size == record.size and look.sha256(file) == record.sha256
    except (OSError, NotACheckpoint):
        return False


def _same(checkpoint: Checkpoint, records: Mapping[str, TensorRecord], fix: str, look: Look) -> None:
    for name in sorted(records.keys() - checkpoint.tensors.keys()):
        raise mismatch(name, f"{checkpoint.folder.name} does not hold this tensor", fix)
    for name in sorted(checkpoint.tensors.keys() - records.keys()):
        raise mismatch(
            name, f"{checkpoint.folder.name} holds this tensor and the manifest does not account for it", fix
        )
    for name, record in records.items():
        info = checkpoint.tensors[name]
        if (info.dtype, info.shape) != (record.dtype, record.shape) or look.digest(info) != record.blake3:
            raise mismatch(name, f"its bytes in {checkpoint.folder.name} are not the recorded ones", fix)


def mismatch(where: object, what: str, fix: str) -> ManifestMismatch:
    """Return the error of a folder that its manifest does not describe."""
    return ManifestMismatch(f"the folder does not match its manifest: {what}", where=where, fix=fix)
