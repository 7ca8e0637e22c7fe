"""One validation from end to end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..checkpoint.folder import Checkpoint
from ..checkpoint.source import Folder, Source
from ..convert.captured import Hints
from ..convert.provenance import Origin
from ..convert.read import Head
from ..convert.shared import SharedTensors
from ..engines.layout import Layout
from ..errors import KconvError, PromptsInvalid
from ..targets.config import TargetConfig
from .assemble import assemble, config_digest, digests, figures
from .figures import Figures
from .kinds import is_target, refuse_unfit
from .recorded import check_manifest
from .report import Report
from .rules.captured_readings import other_readings
from .rules.head import HeadSubject, engines_of
from .rules.rule import ASKED, ENGINES, run_rules
from .rules.table import TARGET_RULES, check_head
from .rules.target import TargetSubject
from .rules.unreadable import of_fault

if TYPE_CHECKING:
    from .engines.check import Engined
    from .parity import Parity
    from .perplexity import HeldOutText

# What imports torch is imported where it is needed: headers are checked in less time than that takes.
Say = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
    """What a checkpoint is checked for.

    Attributes:
        engines: names of `rules.rule.ENGINES`; None for those that its layout was written for.
        layout: the layout that a head is in, None to go by its marks.
        hints: what the user says where a head's config is silent.
        target: the target that a head is for, where it is known.
        headers_only: no value is read, and none downloaded.
        lent: finds what it is asked for of the target's embedding and lm_head, by slot; called where a rule needs one,
            as it may take a download. None where there is no target to ask.
    """

    engines: tuple[str, ...] | None = None
    layout: Layout | None = None
    hints: Hints = field(default_factory=Hints)
    target: TargetConfig | None = None
    headers_only: bool = False
    lent: Callable[[Iterable[str]], SharedTensors] | None = None


def validate(
    subject: Source,
    wish: Wish | None = None,
    *,
    source: Origin | None = None,
    quantized_from: Checkpoint | None = None,
    parity: Parity | None = None,
    engined: Engined | None = None,
    held_out: HeldOutText | None = None,
    say: Say = print,
) -> Report:
    """Check a head or a target, a head against its source and a target too where they are given.

    Args:
        subject: what is checked.
        wish: for whom, and what the user says of it.
        source: what a head was converted from.
        quantized_from: what a target was quantized from.
        parity: how to measure logits and acceptance; nothing is measured if None.
        engined: how to ask an engine that serves the head; none is asked if None.
        held_out: what to run a quantized target and its source over; neither is run if None.
        say: told what is going on.

    Returns:
        The report. Faults of the checkpoint are findings in it, also where it cannot be read; faults of what else
        the user gave are raised.

    Raises:
        ComparisonUnfit: a target is to be held against a head or the other way round, or a target's acceptance
            is asked for.
    """
    wish = wish or Wish()
    say("reading headers" if wish.headers_only else "reading every weight")
    try:
        with _uncollected():
            checkpoint = subject.open_headers() if wish.headers_only else subject.open_weights()
    except KconvError as fault:
        return assemble(subject.name, {}, [of_fault(fault)], Figures(), {"for": list(wish.engines or ENGINES)})
    whole = is_target(checkpoint) and wish.layout is None
    refuse_unfit(
        checkpoint, whole, source.recorded if source else None, quantized_from, measured=bool(parity or engined)
    )
    if whole:
        return _check_target(subject, checkpoint, wish, quantized_from, held_out, say)
    rules = HeadSubject(
        checkpoint,
        frozenset(wish.engines or ENGINES),
        not wish.headers_only,
        named_layout=wish.layout,
        hints=wish.hints,
        target=wish.target,
        lent=wish.lent,
    )
    if wish.engines is None:
        rules = _written_for(rules, engined.engine if engined else None)
    findings = list(check_head(rules))
    about = _digests(checkpoint, wish)
    if about and (source is None or rules.head is None):  # the comparison with a source holds the manifest too
        findings += check_manifest(checkpoint, about, whole=isinstance(subject, Folder))
    provenance = _about(rules, source, wish)
    identical, measured = None, ()
    if rules.head is None:
        provenance |= {"not_measured": "the head cannot be read"} if source or parity or engined else {}
        return assemble(checkpoint.source, about, findings, Figures(), provenance, config_digest(checkpoint))
    if source is not None:
        from .structure import check_origin, check_source, is_identical

        say("comparing with the source, bit by bit")
        held = check_source(rules.head, source.recorded) + check_origin(source)
        identical = is_identical(rules.head, held)
        findings += held
    if parity is not None:
        from .parity import measure_parity

        if source is not None:
            _refuse_other_layers(rules.head, source)

        found = measure_parity(rules.head, source.alone if source else None, parity, say)
        measured = found.measured
        provenance |= found.provenance
    all_figures = figures(identical, measured)
    if engined is not None:
        from .engines.check import check_engine

        witness = check_engine(rules.head, engined, say, readings=other_readings(rules))
        findings += witness.findings
        all_figures = all_figures.model_copy(update={"engine": witness.figures})
        by = {} if wish.engines else {"for_by": f"{provenance['for_by']}, and the one that served it"}
        provenance |= by | witness.provenance
    return assemble(checkpoint.source, about, findings, all_figures, provenance, config_digest(checkpoint))


def _refuse_other_layers(output: Head, source: Origin) -> None:
    if source.recorded.spec.captured != output.spec.captured:
        raise PromptsInvalid(
            f"the source reads layers {source.recorded.spec.captured} and the output {output.spec.captured}",
            where=output.checkpoint.folder,
            fix="Put the captured layers right (--captured-are) before the two are compared.",
        )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Leave garbage be: a target's headers are millions of objects without a cycle, and looking costs a quarter."""
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
    wish: Wish,
    source: Checkpoint | None,
    held_out: HeldOutText | None,
    say: Say,
) -> Report:
    engines = wish.engines or ENGINES
    subject = TargetSubject(checkpoint, frozenset(engines), not wish.headers_only)
    provenance: dict[str, object] = {
        "for": list(engines),
        "for_by": "asked" if wish.engines else "every engine",
        "checked": "target",
        "headers_only": wish.headers_only,
    }
    ready = None
    if held_out is not None:
        from .perplexity import prepare_text

        # First, as its faults are the user's to mend, and a large target is read for hours.
        say("reading the prompts")
        ready = prepare_text(held_out)
    findings = list(run_rules(TARGET_RULES, subject))
    about = _digests(checkpoint, wish)
    if about:
        findings += check_manifest(checkpoint, about, whole=isinstance(named, Folder))
    noise = perplexity = None
    if source is not None:
        from .quantized import check_quantized
        from .structure import from_fault

        provenance["source"] = source.source
        try:
            held, noise = check_quantized(checkpoint, source, say)
            findings += held
        except KconvError as fault:
            findings.append(from_fault(fault, rule="K392"))
    if ready is not None:
        from .perplexity import measure_perplexity

        if any(finding.severity == "error" for finding in findings):
            provenance["not_measured"] = "perplexity: a target with errors is not run"
        else:
            perplexity = measure_perplexity(named, ready, say)
            provenance |= ready.about
    measured = Figures(noise=noise, perplexity=perplexity)
    return assemble(checkpoint.source, about, findings, measured, provenance, config_digest(checkpoint))


def _written_for(rules: HeadSubject, served_by: str | None) -> HeadSubject:
    """Check a head for whom its layout is written, and for the engine that it is served by here."""
    return replace(rules, engines=frozenset(engines_of(rules.layout)) | set(ASKED.get(served_by or "", ())))


def _about(rules: HeadSubject, source: Origin | None, wish: Wish) -> dict[str, object]:
    """Say what was checked, for whom and why for them."""
    return {
        "for": [engine for engine in ENGINES if engine in rules.engines],
        "for_by": "asked" if wish.engines else "the engines that the layout is written for",
        "checked": "head",
        "layout": rules.layout.name if rules.layout else None,
        "headers_only": wish.headers_only,
        "source": source.alone.checkpoint.source if source else None,
    }


def _digests(checkpoint: Checkpoint, wish: Wish) -> dict[str, str]:
    return {} if wish.headers_only or checkpoint.headers_only else digests(checkpoint)
