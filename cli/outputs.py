"""What each command prints with `--json`: one type per command, from which docs/schemas is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from ..bench.acceptance import AcceptanceFile
from ..checkpoint.manifest import Manifest, Unverified
from ..convert.shared import Copies
from ..drafters.facts import Undecided
from ..operations.env import Environment
from ..pipeline.preview import Planned
from ..pipeline.run import Outcome
from ..quantize.calibration import CalibrationPrompts
from ..quantize.recipe import Recipe
from ..rule import Finding
from ..strict import StrictModel
from ..targets.states import StatesRecord
from ..train.plan import TrainPlan
from ..validate.report import Report


class Failure(StrictModel):
    """An error: with `--json` it is printed on stdout, whatever the command.

    Attributes:
        error: the error.
    """

    error: FailureFacts


class FailureFacts(StrictModel):
    """What went wrong.

    Attributes:
        code: the class of the error, in docs/reference/errors.md.
        what: one sentence.
        where: the file, tensor or key; empty if none is concerned.
        fix: what to do.
        see: a page or line that explains it, or empty.
        needs: the option that decides a fact left open, or empty.
    """

    code: str
    what: str
    where: str
    fix: str
    see: str
    needs: str


class FoundProblem(StrictModel):
    """A problem found while a checkpoint was read as a drafter.

    Attributes:
        code: the id of its rule, as `kconv validate --explain` takes it.
        where: the tensor or key.
        what: one sentence.
        fix: what to do.
    """

    code: str
    severity: str | None = None
    where: str
    what: str
    fix: str | None = None


class StoredTensor(StrictModel):
    """A tensor in a file.

    Attributes:
        dtype: by its safetensors name, e.g. "BF16".
        bytes: its size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int | None = None


class InspectOutput(StrictModel):
    """What a checkpoint is.

    Attributes:
        source: the folder, or the Hub id with its commit.
        kind: e.g. "Eagle3 head".
        layout: the layout by name; null if unknown.
        spec: the drafter's dims and facts; null if they cannot be read. A fact that is left open is null.
        captured_by: how the captured layers are known.
        undecided: facts that its files leave open.
        unverified: facts that rest on a default, or on the user's word.
        convertible: whether a conversion needs no further option.
        targets: Hub ids of targets that its files name.
        parameters: the number of weights.
    """

    source: str
    kind: str
    layout: str | None
    spec: dict[str, Any] | None
    captured_by: str | None
    undecided: tuple[Undecided, ...]
    unverified: tuple[Unverified, ...]
    problems: tuple[FoundProblem, ...]
    convertible: bool
    targets: tuple[str, ...]
    parameters: int
    tensors: tuple[StoredTensor, ...]


class ComparedDrafter(StrictModel):
    """One side of a comparison.

    Attributes:
        family: of drafters; null if unknown.
        undecided: names of the facts that its files leave open.
        problems: the errors found while it was read.
    """

    source: str
    family: str | None
    layout: str | None
    undecided: tuple[str, ...]
    problems: tuple[FoundProblem, ...]


class ComparedValue(StrictModel):
    """A value that differs.

    Attributes:
        name: its dotted path.
        a, b: the values; absent where a side does not have it.
        decides: whether the drafters differ for it.
    """

    name: str
    a: Any = None
    b: Any = None
    decides: bool | None = None


class ComparedTensor(StrictModel):
    """A weight that differs.

    Attributes:
        what: its slot, or the tensor's name.
        how: "only in A", "only in B", "dtype", "shape", "dtype and shape" or "bytes".
        note: why no engine reads it; empty if one does.
        a, b: where each side stores it.
    """

    what: str
    how: str
    note: str
    a: tuple[StoredTensor, ...]
    b: tuple[StoredTensor, ...]


class EngineOutcome(StrictModel):
    """An engine's verdict.

    Attributes:
        rules: the ids of the rules that decide it.
    """

    outcome: str
    rules: tuple[str, ...]


class ComparedEngine(StrictModel):
    """An engine whose verdicts on both sides differ."""

    engine: str
    a: EngineOutcome
    b: EngineOutcome


class DiffOutput(StrictModel):
    """What differs between two drafters.

    Attributes:
        equal: whether an engine drafts the same with both.
        bytes_compared: whether the weights were compared, not only headers.
        compared_by: "slot" for two drafters of one family, otherwise "name".
        values: facts that differ, and keys whose meaning kconv does not know.
        keys: keys of config.json that differ.
    """

    equal: bool
    bytes_compared: bool
    compared_by: Literal["slot", "name"]
    a: ComparedDrafter
    b: ComparedDrafter
    values: tuple[ComparedValue, ...]
    keys: tuple[ComparedValue, ...]
    tensors: tuple[ComparedTensor, ...]
    engines: tuple[ComparedEngine, ...]


class CoverageOutput(StrictModel):
    """How much of a text a draft vocabulary covers.

    Attributes:
        covered: how many of the tokens can be drafted.
        distinct, distinct_covered: the same, each token counted once.
    """

    tokens: int
    covered: int
    distinct: int
    distinct_covered: int
    share: float


class VocabOutput(StrictModel):
    """A head's draft vocabulary; with an option that changes it, the manifest of the new head.

    Attributes:
        kind: what d2t holds.
        order: "ascending" or "unsorted"; empty without a map.
        lm_head_rows: rows on disk; null if the head shares the target's lm_head.
        duplicates, outside: of the map's ids.
        t2d: "absent", "agrees", or how it disagrees.
        copies: rows that are the target's; null without a target.
        kept, lost: the special tokens that can and cannot be drafted.
        coverage: null without a text.
        faults: errors with which no engine serves the head rightly.
        warnings: points that only the user can decide.
    """

    kind: str
    order: str
    vocab: int
    draft_vocab: int
    lm_head_rows: int | None
    duplicates: int
    outside: int
    t2d: str
    copies: Copies | None
    kept: tuple[str, ...]
    lost: tuple[str, ...]
    coverage: CoverageOutput | None
    faults: tuple[dict[str, str], ...]
    warnings: tuple[str, ...]


class PlannedStep(StrictModel):
    """A tensor of an output.

    Attributes:
        action: "copied", "renamed", "repacked", or how it is computed.
        sources: the tensors that it is made from.
    """

    tensor: str
    action: str
    sources: tuple[str, ...] = Field(alias="from")


class ConvertPlan(StrictModel):
    """What a conversion would write; all null with `--attention`, which decides after it has measured.

    Attributes:
        dropped: source tensors that are left out, with the reason.
        config: the output's config.json.
    """

    layout: str | None
    steps: tuple[PlannedStep, ...] | None
    dropped: dict[str, str] | None
    config: dict[str, Any] | None


class VerifyOutput(StrictModel):
    """What matches its manifest; what does not is an error.

    Attributes:
        source_compared: whether the source's tensors were compared too.
        tensors, files: how many match.
    """

    out: str
    matches: Literal[True]
    source_compared: bool
    tensors: int
    files: int


class GenerateOutput(StrictModel):
    """How many prompts were answered.

    Attributes:
        counts: answered, failed and skipped ones.
    """

    out: str
    prompts: int
    counts: dict[str, int]


class TrainOutput(StrictModel):
    """A trained drafter.

    Attributes:
        training: the record of the run, as in kconv.json.
    """

    out: str
    layout: str
    training: dict[str, Any]


class CalibrateOutput(StrictModel):
    """Activation ranges that were collected.

    Attributes:
        modules: how many have a range.
    """

    out: str
    modules: int
    prompts: CalibrationPrompts


class QuantizeOutput(StrictModel):
    """A quantized target.

    Attributes:
        form: of the source.
        input_scale: where the activations' scales are from.
        modules, fp8_modules: how many became NVFP4, and FP8 in blocks.
        files: with weights; null if their number is unknown before.
        bytes_in, bytes_out: of the source's weights and the output's.
    """

    source: str
    form: str
    recipe: Recipe
    input_scale: str
    modules: int
    fp8_modules: int
    files: int | None
    bytes_in: int
    bytes_out: int
    out: str | None = None


class QuantizePlan(QuantizeOutput):
    """What a quantization would write, and what it takes.

    Attributes:
        becomes: what happens to each part of the model, with tensors and bytes before and after.
        disk: bytes needed and free.
        estimate: processes, bytes per second and seconds; null if no sample could be packed.
    """

    becomes: tuple[dict[str, Any], ...]
    disk: dict[str, int]
    estimate: dict[str, float] | None


class CompareOutput(StrictModel):
    """Acceptance figures side by side.

    Attributes:
        heads: in the order of the files, which is the order of `figures`.
        tables: one for each method that two or more heads share.
        incomparable: the other figures, with the reason.
    """

    heads: tuple[str, ...]
    tables: tuple[dict[str, Any], ...]
    incomparable: tuple[dict[str, str], ...]


class WrittenOutput(StrictModel):
    """A text that was written."""

    out: str
    text: str


class TinyOutput(StrictModel):
    """A folder with a tiny target and texts."""

    out: str


class CardOutput(StrictModel):
    """A card that was written or checked.

    Attributes:
        card: the card; null if none was written.
        facts: the file of facts that was started; null if none was.
        missing: facts that nobody stated, with their meaning; null unless asked for.
        findings: problems with the card and its licenses.
    """

    folder: str
    card: str | None
    facts: str | None
    missing: dict[str, str] | None
    findings: tuple[Finding, ...]


class PublishOutput(StrictModel):
    """A release; without the Hub, only its checks.

    Attributes:
        passed: ids of the checks.
        findings: what a check found.
        allowed: findings that the recipe allows, with the reason.
        commit: the commit with the files; empty if not made yet.
        digest: over the names and digests of all files.
        uploaded, deleted: names of files that the commit changes.
        done: what was done, in order.
        files: sha256 by name.
    """

    dry_run: bool
    passed: tuple[str, ...]
    findings: tuple[Finding, ...]
    allowed: tuple[dict[str, str], ...]
    repo: str | None = None
    revision: str | None = None
    tag: str | None = None
    commit: str | None = None
    digest: str | None = None
    uploaded: tuple[str, ...] | None = None
    deleted: tuple[str, ...] | None = None
    private: bool | None = None
    done: tuple[str, ...] | None = None
    files: dict[str, str] | None = None


class RunOutput(StrictModel):
    """What became of a recipe's steps.

    Attributes:
        out: the release's folder.
    """

    out: str
    steps: tuple[Outcome, ...]


class RunPlan(StrictModel):
    """What a recipe would do.

    Attributes:
        needed, free: bytes on the disk.
        whole: whether `needed` counts every step.
        heavy: whether a step needs more than a hosted CI machine has.
        findings: about licenses.
    """

    out: str
    steps: tuple[Planned, ...]
    needed: int
    free: int
    whole: bool
    heavy: bool
    findings: tuple[Finding, ...]


class ServePlan(StrictModel):
    """The command that would start an engine, with `--dry-run`."""

    engine: str
    command: tuple[str, ...]


class DemoHead(StrictModel):
    """A head of the demo.

    Attributes:
        rounded: whether TensorRT-LLM's copy was rounded.
    """

    name: str
    folder: str
    report: Report
    rounded: bool


class DemoOutput(StrictModel):
    """The demo's heads and what was measured of them."""

    out: str
    heads: tuple[DemoHead, ...]


class CompletionOutput(StrictModel):
    """A script for a shell."""

    shell: str
    script: str


class ExplainedRule(StrictModel):
    """A rule, with `--explain`."""

    rule: str
    name: str
    severity: str
    sentence: str
    fix: str
    engines: tuple[str, ...]
    versions: str
    seen_in: str


class Rules(StrictModel):
    """All rules, with `--explain all`."""

    rules: tuple[ExplainedRule, ...]


# By the name of an operation or another command: the objects that it may print.
OUTPUTS: Mapping[str, tuple[Any, ...]] = {
    "tiny": (TinyOutput,),
    "inspect": (InspectOutput,),
    "diff": (DiffOutput,),
    "env": (Environment,),
    "vocab": (VocabOutput, Manifest),
    "convert": (Manifest, ConvertPlan),
    "verify": (VerifyOutput,),
    "validate": (Report, ExplainedRule, Rules),
    "bench": (AcceptanceFile,),
    "compare": (CompareOutput,),
    "curve": (WrittenOutput,),
    "quote": (AcceptanceFile,),
    "states": (StatesRecord,),
    "generate": (GenerateOutput,),
    "train": (TrainOutput, TrainPlan),
    "calibrate": (CalibrateOutput,),
    "quantize": (QuantizeOutput, QuantizePlan),
    "quantize_head": (Manifest,),
    "card": (CardOutput,),
    "publish": (PublishOutput,),
    "run": (RunOutput, RunPlan),
    "serve": (ServePlan,),
    "demo": (DemoOutput,),
    "completion": (CompletionOutput,),
}
