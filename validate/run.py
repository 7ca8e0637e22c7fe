"""Run a validation from end to end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.bytes import Look, Wanted, file_digest
from ..checkpoint.folder import Checkpoint
from ..checkpoint.manifest import DRAFTS, MANIFEST, READ_BY_ENGINES, Hints, Unverified, read_manifest
from ..checkpoint.source import Folder, Source
from ..convert.identify import WHOLE_MODEL, name_target
from ..convert.provenance import Origin
from ..convert.read import Head, read
from ..convert.shared import find_shared
from ..drafters.facts import measurable, phrase
from ..engines import registry
from ..engines.layout import Layout
from ..errors import ComparisonUnfit, KconvError, ManifestMismatch, NotACheckpoint, PromptsInvalid
from ..measure.figures import Figures
from ..rule import Found
from ..targets.config import read_target_config
from .options import DEFAULTS, ValidateOptions
from .report import UNREAD, Finding, Report, assemble, config_digest, figures
from .rules.captured import other_readings
from .rules.comparisons import RULE
from .rules.head import HeadSubject, engines_of, wanted_values
from .rules.subject import ENGINES, run_rules
from .rules.table import TARGET_RULES, check_head, of_error
from .rules.target import TargetSubject

if TYPE_CHECKING:
    from ..measure.held_out import HeldOut
    from .readings import ReadingsMeasured


def is_target(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is a target rather than a head."""
    return WHOLE_MODEL.marks(checkpoint.config, checkpoint.tensors)


def refuse_unfit(
    checkpoint: Checkpoint, whole: bool, source: Head | None, quantized_from: Checkpoint | None, *, measured: bool
) -> None:
    """Refuse comparisons that could only be skipped: the report would be clean of a comparison that nobody made.

    Raises:
        ComparisonUnfit: a target and a head are to be compared, or a target's acceptance is requested.
    """
    kind, other = ("target", "head") if whole else ("head", "target")
    if (source if whole else quantized_from) is not None:
        raise ComparisonUnfit(
            f"this is a {kind}, but --source is a {other}",
            where=checkpoint.source,
            fix=f"Pass the {kind} that it was made from.",
        )
    if whole and measured:
        raise ComparisonUnfit(
            "this is a target, but only a head has an acceptance to measure",
            where=checkpoint.source,
            fix="Validate the head with this as its --target. For a target's perplexity, pass --source.",
        )


def check_manifest(checkpoint: Checkpoint, weights: Mapping[str, str], *, whole: bool) -> Iterator[Finding]:
    """Find files that differ from those that kconv wrote; nothing without a manifest.

    No weights are read again: files with the recorded sha256 hold the recorded tensors.

    Args:
        checkpoint: a head or a target.
        weights: sha256 of each of its weight files, by name.
        whole: whether every recorded file must exist; from a repository only the needed files are downloaded.
    """
    folder = checkpoint.folder
    if not (folder / MANIFEST).exists():
        return
    try:
        records = {record.name: record for record in read_manifest(folder).files}
    except (ManifestMismatch, NotACheckpoint) as fault:
        yield _broken(MANIFEST, fault.what)
        return
    for file in sorted(folder.iterdir()):
        if file.name not in records and any(file.match(pattern) for pattern in READ_BY_ENGINES):
            yield _broken(file.name, f"engines read it, but {MANIFEST} does not record it")
    for name, record in sorted(records.items()):
        if Path(name).name != name:
            yield _broken(MANIFEST, f"it records {name!r}, which is not in its folder")
        elif not (folder / name).is_file():
            if whole or name in weights:
                yield _broken(name, f"{MANIFEST} records it, but it is missing")
        elif not record.fits(folder / name) or (weights.get(name) or _sha256(folder / name)) != record.sha256:
            yield _broken(name, f"its bytes differ from those that {MANIFEST} records")


def _sha256(file: Path) -> str:
    try:
        return file_digest(file)
    except OSError:
        return ""  # like no recorded file's


def _broken(where: str, message: str) -> Finding:
    return RULE["K301"].finding(Found(where, message))


# torch is imported where needed: headers are checked in less time than the import takes.
Say = Callable[[str], None]


def validate(
    subject: Source,
    options: ValidateOptions = DEFAULTS,
    *,
    layout: Layout | None = None,
    hints: Hints | None = None,
    target: Source | None = None,
    source: Origin | None = None,
    quantized_from: Checkpoint | None = None,
    prompts: HeldOut | None = None,
    say: Say = print,
) -> Report:
    """Check a head or a target, optionally against its source, and a head with its target.

    Args:
        subject: the checkpoint to check.
        options: what to check, and how to measure.
        layout: a head's layout; None to detect it from its marks.
        hints: the user's options where a head's config is silent.
        target: a head's target.
        source: what a head was converted from.
        quantized_from: what a target was quantized from.
        prompts: the options' held-out prompts.
        say: called with progress messages.

    Returns:
        The report. Errors of the checkpoint are findings in it, even if it cannot be read; errors in the user's other
        inputs are raised.

    Raises:
        ComparisonUnfit: a target and a head are to be compared, or a target's acceptance is requested.
    """
    say("reading headers" if options.headers_only else "reading every weight")
    try:
        with _uncollected():
            checkpoint = subject.open_headers() if options.headers_only else subject.open_weights()
    except KconvError as error:
        about = {"for": list(options.runners or ENGINES), UNREAD: "the folder cannot be read"}
        return assemble(subject.name, {}, [of_error(error)], Figures(), about)
    whole = is_target(checkpoint) and layout is None
    measured = target is not None and options.measures
    refuse_unfit(checkpoint, whole, source.recorded if source else None, quantized_from, measured=measured)
    unread = options.headers_only or checkpoint.headers_only
    files = [] if unread else [Wanted(file, whole=True) for file in checkpoint.files]
    if whole:
        with Look(files) as look:
            return _check_target(subject, checkpoint, options, quantized_from, prompts, look, say)
    rules = HeadSubject(
        checkpoint,
        frozenset(options.runners or ENGINES),
        not options.headers_only,
        named_layout=layout,
        hints=hints or Hints(),
        target=read_target_config(target.fetch_config()) if target else None,
        # Called only if a rule needs a tensor, since it may download.
        lent=partial(find_shared, target) if target and not options.headers_only else None,
    )
    with Look(files + ([] if unread else _wanted(rules, source))) as look:
        return _check_head(subject, replace(rules, look=look), options, source, target, prompts, look, say)


def _wanted(rules: HeadSubject, source: Origin | None) -> list[Wanted]:
    """Return what to read of the weights of a head and its source, so that each byte is read once."""
    values = wanted_values(rules.checkpoint)
    if source is None:
        return values
    from .structure import wanted

    reading = read(rules.checkpoint, layout=rules.named_layout, hints=rules.hints, values=False)
    return values if reading.head is None or reading.errors else [*values, *wanted(reading.head, source.recorded)]


def _check_head(
    subject: Source,
    rules: HeadSubject,
    options: ValidateOptions,
    source: Origin | None,
    target: Source | None,
    prompts: HeldOut | None,
    look: Look,
    say: Say,
) -> Report:
    checkpoint, measured_on = rules.checkpoint, target if prompts or options.states else None
    if not options.for_:
        rules = _written_for(rules, options.engine)
    findings = [_naming_target(finding, subject, checkpoint) for finding in check_head(rules)]
    about = _digests(checkpoint, options, look)
    if about and (source is None or rules.head is None):  # the comparison with a source checks the manifest too
        findings += check_manifest(checkpoint, about, whole=isinstance(subject, Folder))
    if measured_on is None:
        findings += _not_verified(rules)
    provenance = _about(rules, source, options)
    identical, measured, told = None, (), None
    still_open = _still_open(rules)
    if rules.head is None:
        if measured_on is not None and (assumed := _assume(rules)) is not None:
            from .parity import measure_parity

            found = measure_parity(assumed, None, options, measured_on, prompts, say, still_open)
            findings, figured = _judge_open(found.readings, findings, still_open)
            provenance |= {"not_measured": "the head itself, since it can be read in several ways; only its readings"}
            return assemble(checkpoint.source, about, findings, figured, provenance, config_digest(checkpoint))
        provenance |= {UNREAD: "the head cannot be read"}
        provenance |= {"not_measured": "the head cannot be read"} if source or measured_on else {}
        return assemble(checkpoint.source, about, findings, Figures(), provenance, config_digest(checkpoint))
    if source is not None:
        from .structure import check_origin, check_source, is_identical

        say("comparing with the source, bit by bit")
        held = check_source(rules.head, source.recorded, look) + check_origin(source)
        identical = is_identical(rules.head, held)
        findings += held
    if measured_on is not None:
        from .parity import measure_parity

        if source is not None:
            _refuse_other_layers(rules.head, source)

        before = source.alone if source else None
        found = measure_parity(rules.head, before, options, measured_on, prompts, say, still_open)
        measured, told = found.measured, found.readings
        findings += found.findings
        provenance |= found.provenance
    all_figures = figures(identical, measured)
    if told is not None:
        from .readings import decide_readings, judge_readings

        decided = decide_readings(told, still_open)
        findings += judge_readings(told, decided)
        all_figures = all_figures.model_copy(update={"readings": told.figures(), "decided": decided})
    if options.asks_engine and target is not None and prompts is not None:
        from .engines.check import check_engine

        witness = check_engine(rules.head, options, target, prompts, say, readings=other_readings(rules))
        findings += witness.findings
        all_figures = all_figures.model_copy(update={"engine": witness.figures})
        by = {} if options.for_ else {"for_by": f"{provenance['for_by']}, and the one that served it"}
        provenance |= by | witness.provenance
    return assemble(checkpoint.source, about, findings, all_figures, provenance, config_digest(checkpoint))


def _naming_target(finding: Finding, subject: Source, checkpoint: Checkpoint) -> Finding:
    needs, fix = name_target(finding.needs, finding.fix, subject, checkpoint.config)
    return finding.model_copy(update={"needs": needs, "fix": fix})


def _unverified(rules: HeadSubject) -> list[Unverified]:
    """Return the facts about a head that rest on the user's word or on a default, now or at its conversion."""
    found = list(rules.reading.read.unverified if rules.reading.read else ())
    # A head that kconv did not write has no manifest, and another finding reports a broken one.
    with suppress(ManifestMismatch, NotACheckpoint):
        found += read_manifest(rules.checkpoint.folder).unverified
    return found


def _not_verified(rules: HeadSubject) -> Iterator[Finding]:
    """Find facts that rest on the user's word, or on a default that trainers do not share, and are not measured."""
    for one in _unverified(rules):
        against = f"; {one.against}" if one.against else ""
        message = f"{phrase(one.fact, one.value)}, by {one.word}, is not verified{against}"
        yield RULE["K315" if one.against else "K316"].finding(Found(f"config.json: {one.fact}", message))


def _still_open(rules: HeadSubject) -> frozenset[str]:
    """Return the facts about a head that its files leave open, or that rest on the user's word, now or earlier."""
    named = {one.fact for one in rules.reading.undecided} | {one.fact for one in _unverified(rules)}
    return frozenset(named)


def _assume(rules: HeadSubject) -> Head | None:
    """Return a head with several readings in the first of them; None if there is any other error."""
    reading, hints = rules.reading, rules.hints
    facts = reading.layout.drafter.facts if reading.layout else {}
    opened = {fact.code: fact for fact in measurable(facts)}
    if not rules.with_values or any(problem.code not in opened for problem in reading.errors):
        return None
    for code in {problem.code for problem in reading.errors}:
        candidates = opened[code].candidates(reading.config, rules.hints, rules.checkpoint.tensors)
        if candidates[0].value is None:
            return None
        hints = hints.model_copy(update=opened[code].hints(candidates[0].value))
    assumed = read(rules.checkpoint, layout=rules.named_layout, hints=hints)
    return None if assumed.errors else assumed.head


def _judge_open(
    told: ReadingsMeasured | None, findings: list[Finding], still_open: Collection[str]
) -> tuple[list[Finding], Figures]:
    """Judge the readings of a head that its files leave open; without options the head itself is not measured."""
    from .readings import decide_readings, judge_readings

    if told is None:
        return findings, Figures()
    decided = decide_readings(told, still_open, taken=False)
    rows = tuple(row.model_copy(update={"taken": False}) for row in told.figures())
    return [*findings, *judge_readings(told, decided)], Figures(readings=rows, decided=decided)


def _refuse_other_layers(output: Head, source: Origin) -> None:
    if source.recorded.spec.captured != output.spec.captured:
        raise PromptsInvalid(
            f"the source reads layers {source.recorded.spec.captured}, but this head reads {output.spec.captured}",
            where=output.checkpoint.folder,
            fix="Correct the captured layers of one of them (--captured-are), then compare again.",
        )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection: a target's headers are millions of objects without cycles, slow to scan."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _check_target(
    named: Source,
    checkpoint: Checkpoint,
    options: ValidateOptions,
    source: Checkpoint | None,
    prompts: HeldOut | None,
    look: Look,
    say: Say,
) -> Report:
    engines = options.runners or ENGINES
    subject = TargetSubject(checkpoint, frozenset(engines), not options.headers_only)
    provenance: dict[str, object] = {
        "for": list(engines),
        "for_by": "as requested" if options.for_ else "every engine",
        "checked": "target",
        "headers_only": options.headers_only,
    }
    with _uncollected():
        findings = list(run_rules(TARGET_RULES, subject))
    about = _digests(checkpoint, options, look)
    if about:
        findings += check_manifest(checkpoint, about, whole=isinstance(named, Folder))
    noise = perplexity = None
    if source is not None:
        from .quantized import check_quantized

        provenance["source"] = source.source
        try:
            held, noise = check_quantized(checkpoint, source, say)
            findings += held
        except KconvError as fault:
            findings.append(RULE["K392"].of_problem(fault.problem("K392")))
    if source is not None and prompts is not None:
        from .perplexity import PRECISION, measure_perplexity

        if any(finding.severity == "error" for finding in findings):
            provenance["not_measured"] = "perplexity: a target with errors is not run"
        else:
            perplexity = measure_perplexity(checkpoint, source, prompts, say)
            provenance |= {"prompts": prompts.describe() | {"text_tokens": options.text_tokens}, "dtype": PRECISION}
    measured = Figures(noise=noise, perplexity=perplexity)
    return assemble(checkpoint.source, about, findings, measured, provenance, config_digest(checkpoint))


def _written_for(rules: HeadSubject, served_by: str | None) -> HeadSubject:
    """Check a head for the engines of its layout, and for the engine that serves it here."""
    return replace(rules, engines=frozenset(engines_of(rules.layout)) | set(registry.asked().get(served_by or "", ())))


def _about(rules: HeadSubject, source: Origin | None, options: ValidateOptions) -> dict[str, object]:
    """Describe what was checked, and for which engines and why."""
    return {
        "for": [engine for engine in ENGINES if engine in rules.engines],
        "for_by": "as requested" if options.for_ else "the engines that the layout is written for",
        "checked": "head",
        "layout": rules.layout.name if rules.layout else None,
        "headers_only": options.headers_only,
        "source": source.alone.checkpoint.source if source else None,
    } | _draft(rules.checkpoint)


def _draft(checkpoint: Checkpoint) -> dict[str, object]:
    """Return whether a head is the draft that it started from, according to its manifest; nothing without one."""
    with suppress(ManifestMismatch, NotACheckpoint):
        return {"draft": DRAFTS[read_manifest(checkpoint.folder).as_it_ships]}
    return {}


def _digests(checkpoint: Checkpoint, options: ValidateOptions, look: Look) -> dict[str, str]:
    unread = options.headers_only or checkpoint.headers_only
    return {} if unread else {file.name: look.sha256(file) for file in checkpoint.files}
