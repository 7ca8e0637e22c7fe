"""Run a head's validation from end to end."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..checkpoint.bytes import Look, Wanted
from ..checkpoint.folder import Checkpoint
from ..checkpoint.manifest import DRAFTS, Hints, Unverified, read_manifest
from ..checkpoint.source import Folder, Source
from ..convert.identify import name_target
from ..convert.provenance import Origin
from ..convert.read import Head, read
from ..convert.shared import find_shared
from ..drafters.facts import measurable, phrase
from ..engines import registry
from ..engines.layout import Layout
from ..errors import ManifestMismatch, NotACheckpoint, PromptsInvalid
from ..measure.figures import Figures
from ..rule import Found
from ..targets.config import read_target_config
from .claims import check_spec
from .files import Say, check_config, check_manifest, digests, weight_files
from .options import DEFAULTS, ValidateOptions
from .report import UNREAD, Finding, Report, assemble, config_digest, figures
from .rules.captured import other_readings
from .rules.comparisons import RULE
from .rules.head import HeadSubject, engines_of, wanted_values
from .rules.subject import ENGINES
from .rules.table import check_head

if TYPE_CHECKING:
    from ..measure.held_out import HeldOut
    from .readings import ReadingsMeasured


def validate_head(
    named: Source,
    checkpoint: Checkpoint,
    options: ValidateOptions = DEFAULTS,
    *,
    layout: Layout | None = None,
    hints: Hints | None = None,
    target: Source | None = None,
    source: Origin | None = None,
    prompts: HeldOut | None = None,
    say: Say = print,
) -> Report:
    """Check a head, optionally against its source, and measure it with its target.

    Args:
        named: the head as the user named it.
        checkpoint: the same, opened.
        options: what to check, and how to measure.
        layout: its layout; None to detect it from its marks.
        hints: the user's options where its config is silent.
        target: its target.
        source: what it was converted from.
        prompts: the options' held-out prompts.
        say: called with progress messages.

    Returns:
        The report. Errors of the head are findings in it, even if it cannot be read; errors in the user's other inputs
        are raised.
    """
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
    files = weight_files(checkpoint, options)
    with Look([*files, *(_wanted(rules, source) if files else ())]) as look:
        return _check(named, replace(rules, look=look), options, source, target, prompts, look, say)


def _wanted(rules: HeadSubject, source: Origin | None) -> list[Wanted]:
    """Return what to read of the weights of a head and its source, so that each byte is read once."""
    values = wanted_values(rules.checkpoint)
    if source is None:
        return values
    from .structure import wanted

    reading = read(rules.checkpoint, layout=rules.named_layout, hints=rules.hints, values=False)
    return values if reading.head is None or reading.errors else [*values, *wanted(reading.head, source.recorded)]


def _stated_otherwise(checkpoint: Checkpoint, head: Head) -> Iterator[Finding]:
    """Find a manifest that says of the head what its config does not; nothing without a manifest."""
    with suppress(NotACheckpoint):
        try:
            check_spec(read_manifest(checkpoint.folder), head.spec)
        except ManifestMismatch as fault:
            yield RULE["K301"].of_problem(fault.problem("K301"))


def _check(
    subject: Source,
    rules: HeadSubject,
    options: ValidateOptions,
    source: Origin | None,
    target: Source | None,
    prompts: HeldOut | None,
    look: Look,
    say: Say,
) -> Report:
    checkpoint, measured_on = rules.checkpoint, target if options.prompts or options.states else None
    if not options.for_:
        rules = _written_for(rules, options.engine)
    findings = [_naming_target(finding, subject, checkpoint) for finding in check_head(rules)]
    about = digests(checkpoint, options, look)
    if about and (source is None or rules.head is None):  # the comparison with a source checks the manifest too
        findings += check_manifest(checkpoint, about, whole=isinstance(subject, Folder))
    if options.headers_only:
        findings += check_config(checkpoint)
    # That config.json was changed is one thing, what that makes of the head another.
    if rules.head is not None and {f.where for f in findings if f.rule == "K301"} <= {"config.json"}:
        findings += _stated_otherwise(checkpoint, rules.head)
    if measured_on is None:
        findings += _not_verified(rules)
    provenance = _about(rules, source, options, target)
    identical, measured, told, gains = None, (), None, ()
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
    if options.asks_engine and target is not None and prompts is not None:
        from .engines.check import refuse_start

        refuse_start(rules.head, options)
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
        measured, told, gains = found.measured, found.readings, found.gains
        findings += found.findings
        provenance |= found.provenance
    all_figures = figures(identical, measured)
    if told is not None:
        from .readings import decide_readings, judge_mistakes, judge_readings
        from .verdict import without_network

        decided = decide_readings(told, still_open)
        findings += judge_readings(told, decided)
        otherwise = told.behind(0, decided.winner)[0] if decided.beaten else 0.0
        findings += judge_mistakes(gains, otherwise, without_network(all_figures.acceptance))
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
    opened = {fact.rule.id: fact for fact in measurable(facts)}
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
            fix="Convert the source again; or, if its list is wrong, correct that in its config.json first.",
        )


def _written_for(rules: HeadSubject, served_by: str | None) -> HeadSubject:
    """Check a head for the engines of its layout, and for the engine that serves it here."""
    return replace(rules, engines=frozenset(engines_of(rules.layout)) | set(registry.asked().get(served_by or "", ())))


def _about(
    rules: HeadSubject, source: Origin | None, options: ValidateOptions, target: Source | None
) -> dict[str, object]:
    """Describe what was checked, and for which engines and why."""
    # A target's depth is no option.
    stated = rules.hints.model_dump(exclude_none=True, exclude={"target_layers"} if target else set())
    return (
        {
            "for": [engine for engine in ENGINES if engine in rules.engines],
            "for_by": "as requested" if options.for_ else "the engines that the layout is written for",
            "checked": "head",
            "layout": rules.layout.name if rules.layout else None,
            "headers_only": options.headers_only,
            "source": source.alone.checkpoint.source if source else None,
        }
        | _draft(rules.checkpoint)
        | ({"stated": stated} if stated else {})
        | ({"target": target.name} if target else {})
    )


def _draft(checkpoint: Checkpoint) -> dict[str, object]:
    """Return whether a head is the draft that it started from, according to its manifest; nothing without one."""
    with suppress(ManifestMismatch, NotACheckpoint):
        return {"draft": DRAFTS[read_manifest(checkpoint.folder).as_it_ships]}
    return {}
