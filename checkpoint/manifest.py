"""`kconv.json`, the record in every output folder."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ..errors import AnotherSource, KconvError, ManifestMismatch, NotACheckpoint
from ..escape import command
from ..installed import version
from ..strict import StrictModel
from .bytes import Look, Wanted, file_digest
from .folder import Checkpoint, list_names, open_checkpoint
from .schema import load_json

MANIFEST = "kconv.json"
AGAIN = "Fetch the folder again, or create it again with kconv."
ADDED = "Remove the file if somebody added it; otherwise convert the head again."
# The files that an engine reads: config, weights in any container, and quantization settings.
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/model_loader/default_loader.py#L184-L208
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/config.py#L893-L898
READ_BY_ENGINES = (
    "config.json", "*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*quant_config.json",
    "quantize_config.json",
)  # fmt: skip
# How a report and a card describe a head, by `Manifest.as_it_ships`.
DRAFTS = {
    True: "unchanged weights: byte-identical to the source",
    False: "other weights than the source: not for benchmarks that require the published draft",
}
Action = Literal[
    "copied", "renamed", "repacked", "cast", "added", "rebuilt", "expanded", "pruned", "quantized", "dequantized",
    "converted", "zeros",
]  # fmt: skip


def _bare(name: str) -> str:
    """Refuse a name that leads out of the manifest's own folder, since the manifest is untrusted."""
    if name in ("", ".", "..") or any(mark in name for mark in ("/", "\\", "\0")):
        raise ValueError(f"{name!r} is not the bare name of a file")
    return name


FileName = Annotated[str, AfterValidator(_bare)]


class TensorRecord(StrictModel):
    """A tensor of the source or the output: its name, dtype, shape, and the blake3 of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blake3: str


class StepRecord(StrictModel):
    """How one output tensor was made; `reason` explains a computed one."""

    action: Action
    output: TensorRecord
    sources: tuple[TensorRecord, ...]
    reason: str = ""


class DroppedRecord(TensorRecord):
    """A source tensor that is not in the output, and the reason."""

    reason: str


# The value of a fact that a head's files may leave open.
FactValue = bool | int | float | tuple[int, ...]


class Hints(StrictModel, extra="allow"):
    """The user's options where a head's config is silent or ambiguous; those of one family's facts are extra fields.

    Attributes:
        captured: layer ids, in `captured_are`'s convention (outputs if that is None too).
        captured_are: what the layer ids count.
        target_layers: number of decoder layers of the target.
        max_positions: rows of the RoPE table, tokens.
        rope_theta: RoPE's base, if the config states none.
        layers: number of the head's own decoder layers, if num_hidden_layers is the target's.
    """

    __pydantic_extra__: dict[str, FactValue] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    captured: tuple[int, ...] | None = None
    captured_are: Literal["outputs", "inputs"] | None = None
    target_layers: int | None = None
    max_positions: int | None = None
    rope_theta: float | None = None
    layers: int | None = None

    def told(self, hint: str) -> FactValue | None:
        """Return what the user says of a fact, by its `Fact.hint`; None if nothing."""
        return getattr(self, hint, None)


class Unverified(StrictModel):
    """A fact about a head that rests on the user's word or on a default, without confirmation.

    Attributes:
        fact: the config key, or "captured".
        value: the value used.
        word: the options, or the default, that it rests on.
        against: the contradicting statement in the head's own files; "" if there is none.
    """

    fact: str
    value: FactValue
    word: str
    against: str = ""


class FileRecord(StrictModel):
    """A file of the output, by its bare name; `sha256` is the digest that the Hub shows."""

    name: FileName
    size: int
    sha256: str

    def fits(self, file: Path) -> bool:
        """Return whether a file has the recorded size. Ask before hashing it: a sparse one of 10 TB takes hours."""
        try:
            return file.is_file() and file.stat().st_size == self.size
        except OSError:
            return False


class Parameters(StrictModel):
    """Numbers of weight elements: trained with the head, copied from its target, or either of the two."""

    trained: int
    copied_from_target: int
    unknown: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.trained + self.copied_from_target + self.unknown


class ConversionRecord(StrictModel):
    """An attention conversion: an approximation, calibrated and measured.

    Attributes:
        method: the steps, in one sentence.
        calibration: the text used for calibration and measurement.
        calibration_sha256: over the token ids, in order.
        prompts: the digest of each prompt in the texts, so that none is later used as held out.
        sequences, context: how many texts, and tokens of the longest.
        rows: states used in the fit: chains times draft steps.
        heal_steps: gradient descent steps towards the original and what the target accepts.
        held_out: figures on text that neither the fit nor healing used; lengths include the bonus token.
        details: choices that the fit made.
        fingerprint: outputs of the measured head on fixed inputs; see `drafters.fingerprint`. Empty if not computed.
        before: the record of the source head, if that was an approximation itself.
    """

    method: str
    calibration: str
    calibration_sha256: str
    sequences: int
    context: int
    rows: int
    heal_steps: int
    held_out: dict[str, Any]
    details: dict[str, Any] = Field(default={})
    prompts: tuple[str, ...] = ()
    fingerprint: tuple[float, ...] = ()
    before: ConversionRecord | None = None


class Manifest(StrictModel):
    """What an output was made from, and how; the schema of kconv.json.

    Attributes:
        kconv: the version that wrote it.
        exact: whether every weight is byte-identical to the source, or to the target if it was added from there, or is
            a zero without effect.
        source: the source, as the user named it.
        source_config: sha256 of its config.json.
        source_pickles: the source's files that were pickles.
        source_layout, layout: the layouts of the source and of the output.
        hints: options that described the source.
        spec: the drafter, as its family's spec names it.
        captured_by: how the captured layers were decided.
        unverified: facts that only the user or a default states.
        parameters: number of weight elements in the output.
        parameters_by_origin: the same, trained and copied ones apart.
        config_copied, config_dropped: keys of the source config that kconv does not interpret.
        tensors: every tensor of the output.
        dropped: every source tensor that is not in the output.
        left_to_target: by slot, the tensors that this conversion or an earlier one left to the target's equal ones.
        files: every file of the output except this one.
        training: how kconv trained the head, if it did: recipe, data, tokens, figures, libraries.
        conversion: how the attention was converted, if it was.
        draft: whether the head is byte-identical to the draft that it started from; None for a target, or if unknown.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    kconv: str = Field(default_factory=lambda: version("kconv"))
    exact: bool
    source: str
    source_config: str
    source_pickles: tuple[str, ...] = ()
    source_layout: str
    layout: str
    hints: Hints = Hints()
    spec: dict[str, Any]
    captured_by: str
    unverified: tuple[Unverified, ...] = ()
    parameters: int
    parameters_by_origin: Parameters
    config_copied: tuple[str, ...] = ()
    config_dropped: tuple[str, ...] = ()
    tensors: tuple[StepRecord, ...]
    dropped: tuple[DroppedRecord, ...] = ()
    left_to_target: dict[str, TensorRecord] = Field(default_factory=dict[str, TensorRecord])
    files: tuple[FileRecord, ...]
    training: dict[str, Any] | None = None
    conversion: ConversionRecord | None = None
    draft: Literal["as it ships", "another"] | None = None

    @property
    def as_it_ships(self) -> bool:
        """Whether the draft is byte-identical to its source, as benchmark referees require of a reference draft.

        https://github.com/SemiAnalysisAI/InferenceX/pull/3283, and MLPerf Inference's rules, appendix C: a submission
        may not quantize or recast a draft.
        """
        return self.draft == "as it ships" if self.draft else self.exact and self.conversion is None

    @property
    def weight_files(self) -> dict[str, str]:
        """The sha256 of each weight file, by name; a report or a figure names these to identify the weights."""
        return {file.name: file.sha256 for file in self.files if file.name.endswith(".safetensors")}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write kconv.json into a folder."""
    (folder / MANIFEST).write_bytes(dump_manifest(manifest))


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest's file."""
    return f"{manifest.model_dump_json(indent=1, by_alias=True)}\n".encode()


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's kconv.json.

    NotACheckpoint: the folder has none.
    ManifestMismatch: the file does not match the schema.
    """
    file = folder / MANIFEST
    # os.path returns False for a name that is too long; pathlib raises.
    if not os.path.isfile(file) or not os.access(file, os.R_OK):  # noqa: PTH113
        list_names(folder)  # without a folder, that is the error
        raise NotACheckpoint(
            f"this folder has no readable {MANIFEST}: kconv did not write it, or the file was left behind",
            where=folder,
            fix="Copy the whole folder that kconv wrote. Any other is compared with what it was made from by "
            f"{command(('kconv', 'validate', str(folder), '--source', 'SOURCE'))}, and converted by "
            f"{command(('kconv', 'to-vllm', str(folder), 'OUT'))}.",
        )
    return load_json(
        Manifest,
        file,
        ManifestMismatch,
        what="kconv manifest",
        fix="Convert the head again, or use the kconv version that wrote it.",
    )


def verify(folder: Path, source: Checkpoint | None = None) -> Manifest:
    """Re-check every byte of an output against its manifest, and its source's config and tensors if given.

    Args:
        folder: an output of kconv.
        source: the checkpoint that it was made from.

    Raises:
        ManifestMismatch: a file or tensor is missing, unrecorded, or has other bytes.
    """
    manifest = read_manifest(folder)
    try:
        output = open_checkpoint(folder)
    except KconvError as fault:
        # If its bytes have changed, that is the reason why it cannot be opened.
        with Look([]) as look:
            _check_files(manifest, folder, look)
        raise fault
    with Look([*wanted_digests(output, whole=True), *(wanted_digests(source) if source else ())]) as look:
        hold(manifest, output, source, look)
    return manifest


def wanted_digests(checkpoint: Checkpoint, *, whole: bool = False) -> list[Wanted]:
    """Return a request for the blake3 of each tensor of a checkpoint, and the sha256 of its files if `whole`."""
    return [Wanted(file, whole, infos) for file, infos in checkpoint.by_file().items()]


def hold(manifest: Manifest, output: Checkpoint, source: Checkpoint | None, look: Look) -> None:
    """Compare an output with its manifest, and its source's config and tensors if given.

    Args:
        manifest: the output's.
        output: the folder that kconv wrote.
        source: the checkpoint that it was made from.
        look: the reader with these digests, see `wanted_digests`; others are read here.

    Raises:
        AnotherSource: the source's config is another.
        ManifestMismatch: a file or tensor is missing, unrecorded, or has other bytes.
    """
    _check_files(manifest, output.folder, look)
    _agrees_with_itself(manifest)
    _same(output, {step.output.name: step.output for step in manifest.tensors}, AGAIN, look)
    if source is not None:
        fix = f"Pass {source_beside(output.folder, manifest)} as it was at the conversion, or convert again."
        config = source.folder / "config.json"
        if file_digest(config) != manifest.source_config:
            what = f"{output.source} was made from another head or target: this config.json is not its source's"
            raise AnotherSource(what, where=config, fix=fix)
        held: dict[str, TensorRecord] = {s.name: s for step in manifest.tensors for s in step.sources}
        _same(source, held | {record.name: record for record in manifest.dropped}, fix, look)


def source_beside(folder: Path, manifest: Manifest) -> str:
    """Return the source's name; of a path, as it was seen where kconv ran, the folder that it leads to from above."""
    if Path(manifest.source).is_absolute():
        return manifest.source
    there = (above / manifest.source for above in folder.absolute().parents)
    return next((os.path.relpath(path) for path in there if (path / "config.json").exists()), manifest.source)


def _check_files(manifest: Manifest, folder: Path, look: Look) -> None:
    # Every size before the first digest.
    sizes = (record for record in manifest.files if not record.fits(folder / record.name))
    digests = (record for record in manifest.files if not _holds(folder / record.name, record, look))
    for record in chain(sizes, digests):
        file = folder / record.name
        why = "its bytes differ from those that kconv wrote" if file.exists() else "the file is missing"
        raise mismatch(file, why, AGAIN)
    recorded = {record.name for record in manifest.files}
    for file in sorted(folder.iterdir()):
        if file.name not in recorded and any(file.match(pattern) for pattern in READ_BY_ENGINES):
            raise mismatch(file, "engines read this file, but the manifest does not record it", ADDED)


# Actions that keep a tensor's bytes, and those that keep its values.
COPIES, EXACT = ("copied", "renamed"), ("copied", "renamed", "repacked", "added", "rebuilt", "zeros")
# Vocabulary maps are not weights: those of an exact head may be computed.
MAPS = ("BOOL", "I64", "I32")


def _agrees_with_itself(manifest: Manifest) -> None:
    """Raise ManifestMismatch for a manifest that contradicts itself."""
    for what, records in (("file", manifest.files), ("tensor", [step.output for step in manifest.tensors])):
        if twice := sorted(name for name, count in Counter(record.name for record in records).items() if count > 1):
            raise mismatch(MANIFEST, f"it records the {what} {twice[0]} twice", AGAIN)
    for step in manifest.tensors:
        own = (step.output.dtype, step.output.shape, step.output.blake3)
        if step.action in COPIES and [(s.dtype, s.shape, s.blake3) for s in step.sources] != [own]:
            raise mismatch(MANIFEST, f"it records {step.output.name} as {step.action}, but with other bytes", AGAIN)
    # A target's manifest has none of a head's steps, and is never exact.
    changed = [s.output.name for s in manifest.tensors if s.action not in EXACT and s.output.dtype not in MAPS]
    if manifest.spec.get("kind") != "target" and manifest.exact == bool(changed):
        said = f"exact, but {changed[0]} is not" if changed else "not exact, but every tensor is"
        raise mismatch(MANIFEST, f"it says that the weights are {said}", AGAIN)
    if manifest.parameters != manifest.parameters_by_origin.total:
        raise mismatch(MANIFEST, "its two parameter counts differ", AGAIN)


def _holds(file: Path, record: FileRecord, look: Look) -> bool:
    try:
        return look.sha256(file) == record.sha256
    except NotACheckpoint:
        return False


def _same(checkpoint: Checkpoint, records: Mapping[str, TensorRecord], fix: str, look: Look) -> None:
    for name in sorted(records.keys() - checkpoint.tensors.keys()):
        raise mismatch(name, f"{checkpoint.folder.name} does not hold this tensor", fix)
    for name in sorted(checkpoint.tensors.keys() - records.keys()):
        raise mismatch(name, f"{checkpoint.folder.name} holds this tensor, but the manifest does not record it", fix)
    for name, record in records.items():
        info = checkpoint.tensors[name]
        if (info.dtype, info.shape) != (record.dtype, record.shape) or look.digest(info) != record.blake3:
            raise mismatch(name, f"its bytes in {checkpoint.folder.name} differ from the manifest", fix)


def mismatch(where: object, what: str, fix: str) -> ManifestMismatch:
    """Return the error for a folder that does not match its manifest."""
    return ManifestMismatch(f"the folder does not match its manifest: {what}", where=where, fix=fix)
