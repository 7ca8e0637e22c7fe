"""Run a target's validation from end to end."""

from __future__ import annotations

from collections.abc import Sequence

from ..checkpoint.bytes import Look
from ..checkpoint.folder import Checkpoint
from ..checkpoint.source import Folder, Source
from ..errors import KconvError
from ..measure.figures import AccuracyFigures, Figures
from ..measure.held_out import HeldOut, refuse_overlap
from .accuracy import judge_accuracy
from .files import Say, check_manifest, check_origin, digests, uncollected, weight_files
from .options import DEFAULTS, ValidateOptions
from .report import Report, assemble, config_digest
from .rules.comparisons import RULE
from .rules.subject import ENGINES, run_rules
from .rules.table import TARGET_RULES
from .rules.target import TargetSubject


def validate_target(
    named: Source,
    checkpoint: Checkpoint,
    options: ValidateOptions = DEFAULTS,
    *,
    source: Checkpoint | None = None,
    prompts: HeldOut | None = None,
    accuracy: Sequence[AccuracyFigures] = (),
    say: Say = print,
) -> Report:
    """Check a target, optionally against its source; see `validate_head`.

    Args:
        named: the target as the user named it.
        checkpoint: the same, opened.
        options: what to check.
        source: what it was quantized from.
        prompts: the options' held-out prompts.
        accuracy: what a harness measured of both.
        say: called with progress messages.

    Raises:
        PromptsInvalid: the target was calibrated on one of the prompts.
    """
    if prompts is not None:
        refuse_overlap((prompt.digest for prompt in prompts.prompts), checkpoint.folder)
    engines = options.runners or ENGINES
    subject = TargetSubject(checkpoint, frozenset(engines), not options.headers_only)
    provenance: dict[str, object] = {
        "for": list(engines),
        "for_by": "as requested" if options.for_ else "every engine",
        "checked": "target",
        "headers_only": options.headers_only,
    }
    noise = perplexity = None
    with Look(weight_files(checkpoint, options)) as look:
        with uncollected():
            findings = list(run_rules(TARGET_RULES, subject))
        about = digests(checkpoint, options, look)
        if about:
            findings += check_manifest(checkpoint, about, whole=isinstance(named, Folder))
        if source is not None:
            from .quantized import check_quantized

            provenance["source"] = source.source
            other = list(check_origin(checkpoint, source))
            findings += other
            try:
                # Of another target, each tensor differs.
                held, noise = check_quantized(checkpoint, source, say) if not other else ([], None)
                findings += held
            except KconvError as fault:
                findings.append(RULE["K392"].of_problem(fault.problem("K392")))
        if source is not None and prompts is not None:
            from .perplexity import PRECISION, judge_perplexity, measure_perplexity

            if any(finding.severity == "error" for finding in findings):
                provenance["not_measured"] = "perplexity: a target with errors is not run"
            else:
                perplexity = measure_perplexity(checkpoint, source, prompts, say)
                findings += judge_perplexity(perplexity)
                provenance |= {"prompts": prompts.describe() | {"text_tokens": options.text_tokens}, "dtype": PRECISION}
    if accuracy:
        findings += judge_accuracy(accuracy)
        provenance["results"] = {"output": list(options.results), "source": list(options.source_results)}
    measured = Figures(noise=noise, perplexity=perplexity, accuracy=tuple(accuracy))
    return assemble(checkpoint.source, about, findings, measured, provenance, config_digest(checkpoint))
