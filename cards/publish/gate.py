"""The checks that a release must pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...checkpoint.bytes import file_digest
from ...checkpoint.source import HUB_ID, resolve
from ...engines.registry import runners_of
from ...errors import KconvError, PublishRefused
from ...rule import Found, Rule
from ...validate.report import REPORT, STOPS, Finding
from ..evidence import Evidence, cell, foreign
from ..front_matter import CARD, INDEX, read_front_matter, results
from ..license_checks import CHECKS as LICENSE_CHECKS
from ..license_checks import check_folder
from ..quickstart import served_names
from ..sections import not_repeated
from ..target_card import is_target, lost
from .floor import find_measurements, largest_loss, list_measured
from .release import IMAGES, Candidate, naming_originals
from .secrets import find_secrets

# Keys of the card's front matter; the license checks cover the license and the base models.
NEEDED = ("pipeline_tag",)
# Marks around the exceptions on a card.
BEGIN, END = "<!-- kconv: exceptions -->", "<!-- kconv: end of exceptions -->"
TITLE = "## Published with exceptions"

# A warning of validation that its user may have intended, but nobody who downloads the release can know that.
# K307: the head was read differently from what its own files say.
AS_ERRORS = frozenset({"K307"})
# Code that a target may include if its source has it: its own tokenizer, e.g. Kimi-K2's tokenization_kimi.py.
CODE = re.compile(r"[A-Za-z]\w*\.py", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
NOTHING = "nothing by kconv validate or kconv bench"
KIND = "a release must not contain files of this kind: they may be code, a pickle, or private"


def written_for(layout: str) -> tuple[str, ...]:
    """Return the engines that a report on a layout must cover, by their names in kconv validate."""
    # For an unknown layout nothing can have been checked.
    return runners_of(layout) or (layout,)


@dataclass(frozen=True)
class Allowance:
    """A rule that is allowed to fail, and the reason that the card gives."""

    rule: str
    why: str


@dataclass(frozen=True)
class Check(Rule[Candidate]):
    """A release check: a rule whose sentence holds if it finds nothing.

    Attributes:
        allowable: whether --allow may let it pass.
        asked_of: whether a candidate is one that it asks anything of. What was not asked did not pass.
    """

    allowable: bool = True
    asked_of: Callable[[Candidate], bool] = lambda _: True


def _drafts(candidate: Candidate) -> bool:
    return not is_target(candidate.manifest)


def _has_acceptance(candidate: Candidate) -> bool:
    return bool(candidate.acceptance)


def _names_a_target(candidate: Candidate) -> bool:
    """Whether the acceptance says on which Hub model it was measured: a folder's name says nothing."""
    rows = (row for found in candidate.acceptance.values() for row in found.rows if row.measured_by == "self")
    return any(HUB_ID.fullmatch(row.target or "") for row in rows)


def _manifest(candidate: Candidate) -> Iterator[Found]:
    try:
        with naming_originals(candidate.folder, candidate.origin, {}):
            _ = candidate.manifest  # reads every byte, and may raise
    except KconvError as fault:
        yield Found(fault.where or str(candidate.origin), fault.what)


def _unaccounted(candidate: Candidate) -> Iterator[Found]:
    for name in candidate.unaccounted:
        yield Found(name, "this file is neither in the manifest nor a known part of a release")


def _links(candidate: Candidate) -> Iterator[Found]:
    for name in candidate.odd:
        yield Found(name, "it is not a regular file; it leads out of the folder")


def _unfit(candidate: Candidate) -> Iterator[Found]:
    for name in candidate.unfit:
        why = _not_the_sources(candidate, name) if CODE.fullmatch(name) and is_target(candidate.manifest) else KIND
        if why:
            yield Found(name, why)


def _not_the_sources(candidate: Candidate, name: str) -> str:
    """Return why a code file cannot be part of a target's release; "" for one that is byte-identical in its source.

    The source is downloaded at the manifest's commit, and only if the card names it too, since the manifest may be
    untrusted.
    """
    manifest = candidate.manifest
    source = HUB_ID.fullmatch(manifest.source)
    if source is None or not COMMIT.fullmatch(source["revision"] or ""):
        return f"it is code, but {manifest.source} is not a Hub commit with which to compare it"
    if source["repo"] not in read_front_matter(candidate.card).base_models:
        return f"it is code from {source['repo']}, which the card does not name as base_model"
    upstream = resolve(manifest.source).fetch_tokenizer() / name
    recorded = {file.name: file for file in manifest.files}.get(name)
    if recorded is None or not recorded.fits(upstream) or file_digest(upstream) != recorded.sha256:
        return f"it is code that differs from {manifest.source}"
    return ""


def _report(candidate: Candidate) -> Iterator[Found]:
    if candidate.report is None:
        yield Found(REPORT, "there is no validation report")


def _report_of_these(candidate: Candidate) -> Iterator[Found]:
    if candidate.report is not None and (other := foreign(candidate.report, candidate.identity)):
        yield Found(REPORT, f"the report is about {other}")


def _report_clean(candidate: Candidate) -> Iterator[Found]:
    if (report := candidate.report) is None:
        return
    for finding in report.findings:
        if finding.severity in STOPS or finding.rule in AS_ERRORS:
            yield Found(finding.where, f"validation found {finding.rule}: {finding.message}")
    if is_target(candidate.manifest):
        if report.provenance.get("checked") != "target":
            yield Found(REPORT, "the folder is a target, but was not checked as one")
        return
    layout = candidate.manifest.layout
    unchecked = [engine for engine in written_for(layout) if engine not in report.provenance.get("for", ())]
    if unchecked:
        what = f"the folder has the layout of {layout}, but was not checked for {', '.join(unchecked)}"
        yield Found(REPORT, what, VALIDATE)


def _nothing_lost(candidate: Candidate) -> Iterator[Found]:
    if candidate.report is None:
        yield Found(REPORT, "without a report the difference from the source's weights is unknown")
        return
    if is_target(candidate.manifest):
        for what in lost(candidate.report):
            yield Found(REPORT, what)
        return
    figures = candidate.report.figures
    if candidate.manifest.exact and figures.identical is not True:
        yield Found(REPORT, "the manifest says that the weights are the source's, but they were not compared")
    if not candidate.manifest.exact and not figures.parity:
        yield Found(REPORT, "the weights differ from the source's, and the difference was not measured")


def _floor_named(candidate: Candidate) -> Iterator[Found]:
    if candidate.floor is None:
        yield Found("min_acceptance", "no minimum acceptance is stated for this head")


def _floor_reached(candidate: Candidate) -> Iterator[Found]:
    if (floor := candidate.floor) is None:
        return
    found = find_measurements(floor, candidate.report, candidate.acceptance)
    if not found:
        measured = "; ".join(list_measured(candidate.report, candidate.acceptance))
        if not measured:
            rows = () if candidate.report is None else candidate.report.figures.acceptance
            drafters = ", ".join(dict.fromkeys(repr(row.drafter) for row in rows))
            measured = NOTHING + f" (the report, as kconv demo writes one, has rows of {drafters})" * bool(rows)
        least = f"{floor.name}, over {floor.prompts} prompts or more"
        fix = "Measure that (kconv bench, kconv validate), or state the floor of what was measured."
        yield Found(floor.suite, f"{least}, was not measured; measured: {measured}", fix)
    for one in found:
        if not one.value >= floor.at_least:
            yield Found(one.where, f"{floor.name} is {one.value:.3f}, below the floor of {floor.at_least!r}")


def _loss(candidate: Candidate) -> Iterator[Found]:
    if (floor := candidate.floor) is None:
        return
    if (report := candidate.report) is not None and candidate.manifest.exact and report.figures.identical:
        return
    loss = largest_loss(report, floor.draft_tokens) if report is not None else None
    if loss is None:
        yield Found(REPORT, f"the loss of acceptance against the source was not measured at K = {floor.draft_tokens}")
    elif not loss <= floor.max_loss:
        most = f"at most {floor.max_loss:.2%} is allowed"
        yield Found(REPORT, f"{loss:.2%} of the source's acceptance is lost, but {most}")


def _acceptance_of_these(candidate: Candidate) -> Iterator[Found]:
    for name, acceptance in candidate.acceptance.items():
        if acceptance.weights and (other := foreign(acceptance, candidate.identity)):
            yield Found(name, f"the acceptance was measured on {other}")


def _acceptance_says(candidate: Candidate) -> Iterator[Found]:
    for name, acceptance in candidate.acceptance.items():
        if acceptance.measured and not acceptance.weights:
            yield Found(name, "it does not state on which weights the acceptance was measured")


def _card(candidate: Candidate) -> Iterator[Found]:
    # A card's prose belongs to its owner. The parts that kconv wrote from the manifest, the report and acceptance.json
    # are rendered again and must match, so that no figure was edited by hand or is left from an earlier head.
    first = (
        "Make a release folder first, and publish that: kconv card DIR --report REPORT --name REPO --base-model ID"
        " --license ID --out RELEASE."
    )
    if not candidate.card:
        yield Found(CARD, "there is no card", first)
        return
    front = read_front_matter(candidate.card)
    if front.problem:
        yield Found(CARD, front.problem)
        return
    for key in NEEDED:
        if not getattr(front, key):
            yield Found(f"{CARD}: {key}", f"the card does not state its {key}")
    for image in IMAGES.findall(candidate.card):
        if "://" not in image and image not in candidate.files:
            yield Found(CARD, f"the card shows {image}, which is not in the folder")
    acceptance = tuple(candidate.acceptance.values())
    evidence = Evidence(candidate.folder, candidate.facts, candidate.manifest, candidate.report, acceptance)
    absent = list(not_repeated(evidence, candidate.card))
    if absent and not front.base_models and front.license in ("", "unknown"):
        yield Found(CARD, "the card states neither license nor base model, as kconv demo writes it", first)
        return
    for line in absent:
        yield Found(CARD, f"the card does not match its evidence; this line is missing: {line}")
    if front.results and list(front.results) != results(evidence):
        yield Found(f"{CARD}: {INDEX}", "the figures in the front matter differ from acceptance.json")


def _names(candidate: Candidate) -> Iterator[Found]:
    # Who downloads the release has no such folder, and a folder may be named like a Hub id. The card's own name is the
    # folder's where nothing else names the head.
    evidence = Evidence(candidate.folder, candidate.facts, candidate.manifest, candidate.report)
    own, targets = served_names(evidence, candidate.card)
    bases = read_front_matter(candidate.card).base_models
    for name in sorted(own | targets):
        if not HUB_ID.fullmatch(name):
            yield Found(CARD, f"a serve line names {name}, which is no Hub id")
        elif name in own and candidate.repo and name != candidate.repo:
            yield Found(CARD, f"a serve line names {name}, but this is published as {candidate.repo}")
        elif name in targets and bases and name not in bases:
            yield Found(CARD, f"a serve line names the target {name}, which base_model does not list")


def _measured_on(candidate: Candidate) -> Iterator[Found]:
    # A base model's quantized copy has its name in its own. What is no Hub id says nothing to compare.
    bases = [base.rpartition("/")[2].lower() for base in read_front_matter(candidate.card or "").base_models]
    for name, acceptance in candidate.acceptance.items():
        for target in dict.fromkeys(row.target or "" for row in acceptance.rows if row.measured_by == "self"):
            found = HUB_ID.fullmatch(target)
            own = found["repo"].rpartition("/")[2].lower() if found else ""
            if own and bases and not any(base in own or own in base for base in bases):
                yield Found(name, f"it was measured on {target}, but the card's base_model is {', '.join(bases)}")


def _secrets(candidate: Candidate) -> Iterator[Found]:
    for name in candidate.files:
        data = None if name.endswith(".safetensors") else candidate.held(name)
        if data is not None and (kinds := find_secrets(data)):
            yield Found(name, f"it contains what looks like a secret: {', '.join(kinds)}")


MANIFEST_HOLDS = Check(
    "P101",
    "manifest-holds",
    "error",
    "Every byte matches the manifest.",
    "Convert again. If you changed it on purpose, kconv diff DIR NEW shows what to change in the source.",
    _manifest,
    allowable=False,
)
VALIDATE = (
    "Run kconv validate on this folder, with --source, --target, --prompts and --out REPORT, and pass --report"
    " REPORT/report.json."
)
CHECKS = (
    Check(
        "P102",
        "every-file-is-known",
        "error",
        "Every file is in the manifest or a known part of a release.",
        "Remove it.",
        _unaccounted,
    ),
    Check(
        "P103",
        "every-file-is-regular",
        "error",
        "Every file is a regular file.",
        "Replace it with the file itself.",
        _links,
        allowable=False,
    ),
    Check("P104", "a-report-exists", "error", "There is a validation report.", VALIDATE, _report),
    Check(
        "P105",
        "the-report-is-of-these-weights",
        "error",
        "The report belongs to these weights and this config.json.",
        VALIDATE,
        _report_of_these,
        allowable=False,
    ),
    Check(
        "P106",
        "the-report-is-clean",
        "error",
        "The report has no errors or undecided facts, and covers every engine that the layout is written for.",
        "Fix what kconv validate found, and run it without --for.",
        _report_clean,
    ),
    Check(
        "P107",
        "nothing-lost-unmeasured",
        "error",
        "The weights are identical to the source's, or their difference was measured.",
        VALIDATE,
        _nothing_lost,
    ),
    Check(
        "P108",
        "a-floor-is-stated",
        "error",
        "A floor is stated, with its metric, suite, target, temperature, K and prompts.",
        "Put min_acceptance into the recipe, or pass --min-acceptance with --suite, --draft-tokens, --min-prompts and"
        " --max-loss, and for a suite of prompts --target-name and --temperature.",
        _floor_named,
        # A target drafts nothing: its perplexity counts instead, see P107.
        asked_of=_drafts,
    ),
    Check(
        "P109",
        "the-floor-is-reached",
        "error",
        "The acceptance reaches the floor.",
        "Train longer, or state a floor that this head is to reach.",
        _floor_reached,
        asked_of=_drafts,
    ),
    Check(
        "P110",
        "the-loss-is-small",
        "error",
        "The loss of acceptance against the source is within the limit.",
        VALIDATE,
        _loss,
        asked_of=_drafts,
    ),
    Check(
        "P111",
        "acceptance-of-these-weights",
        "error",
        "Any acceptance.json was measured on these weights and this config.json.",
        "Run kconv bench on this folder.",
        _acceptance_of_these,
        allowable=False,
        asked_of=_has_acceptance,
    ),
    Check(
        "P112",
        "acceptance-states-its-weights",
        "error",
        "The acceptance states its weights.",
        "Run kconv bench with the head's files.",
        _acceptance_says,
        asked_of=_has_acceptance,
    ),
    Check(
        "P113",
        "the-card-agrees",
        "error",
        "The card is complete and agrees with manifest, report and acceptance.",
        "Write it again: kconv card DIR --force with DIR's report and figures (--report, --acceptance) and the same "
        "other options as before (--name, --base-model, --license, --facts; the old card states them).",
        _card,
    ),
    Check(
        "P114",
        "no-secrets",
        "error",
        "No file except the weights contains a token, a key or a password.",
        "Remove it, and revoke it.",
        _secrets,
        allowable=False,
    ),
    Check(
        "P115",
        "every-file-is-of-a-fit-kind",
        "error",
        "Every file is of a kind that a release may contain: no pickle, nothing hidden, no code but the target's own.",
        "Remove it. A target's code may stay if it was quantized from the hub id and is identical.",
        _unfit,
        allowable=False,
    ),
    Check(
        "P116",
        "serve-lines-name-hub-ids",
        "error",
        "The card's serve lines name REPO, and the target by its Hub id.",
        "Write the card again: kconv card DIR --force --name REPO --base-model ID, with the same other options as "
        "before.",
        _names,
    ),
    Check(
        "P117",
        "measured-on-the-base-model",
        "error",
        "The acceptance was measured on the card's base model.",
        "Write the card again with the right --base-model, or measure on that target.",
        _measured_on,
        asked_of=_names_a_target,
    ),
)


def judge(candidate: Candidate) -> list[Finding]:
    """Return the findings of the checks and the license checks; if the manifest does not match, only that."""
    broken = list(MANIFEST_HOLDS.findings(candidate))
    if broken:
        return broken
    with naming_originals(candidate.folder, candidate.origin, {}):
        found = [finding for check in CHECKS if check.asked_of(candidate) for finding in check.findings(candidate)]
        return [*found, *check_folder(candidate.folder, candidate.facts)]


def release_rules() -> dict[str, Rule[Any]]:
    """Return every check of a release and of its licenses by its id."""
    return {one.id: one for one in (MANIFEST_HOLDS, *CHECKS, *LICENSE_CHECKS.values())}


def checks_of(candidate: Candidate) -> tuple[Rule[Any], ...]:
    """Return the checks that are asked of a candidate, in the order in which they are made."""
    asked = [check for check in CHECKS if check.asked_of(candidate)]
    return (MANIFEST_HOLDS, *asked, *LICENSE_CHECKS.values())


def allowable() -> frozenset[str]:
    """Return the ids of the checks that can be allowed."""
    return frozenset({check.id for check in CHECKS if check.allowable} | LICENSE_CHECKS.keys())


def let_pass(findings: Iterable[Finding], allowances: Sequence[Allowance]) -> list[tuple[Finding, Allowance]]:
    """Return the findings that are allowed, each with its allowance; PublishRefused for any other error."""
    by_rule = {allowance.rule: allowance for allowance in allowances}
    never = {check.id for check in (MANIFEST_HOLDS, *CHECKS) if not check.allowable}
    errors = [finding for finding in findings if finding.severity == "error"]
    left = [finding for finding in errors if finding.rule not in by_rule or finding.rule in never]
    if left:
        lines = "".join(f"\n  {f.rule} {f.where}: {f.message}\n       {f.fix}" for f in left)
        may = sorted({finding.rule for finding in left} - never)
        raise PublishRefused(
            f"not published, because {len(left)} check{'s' * (len(left) != 1)} failed:{lines}",
            fix=f"Fix these, or allow one for a reason that the card states: --allow {may[0]}=REASON"
            if may
            else "Fix these. None of them can be allowed.",
        )
    return [(finding, by_rule[finding.rule]) for finding in errors]


def record_exceptions(card: str, passed: Sequence[tuple[Finding, Allowance]]) -> str:
    """Return the card with the allowed findings and the reasons, replacing those of an earlier publication."""
    head, _, rest = card.partition(BEGIN)
    tail = rest.partition(END)[2]
    plain = head.rstrip("\n") + ("\n" + tail.lstrip("\n") if tail.strip() else "\n") if rest else card
    if not passed:
        return plain
    rows = [f"| {f.rule} | {cell(f.message)} | {cell(a.why)} |" for f, a in passed]
    table = ["| check | what it found | why it was allowed |", "|---|---|---|", *rows]
    return plain.rstrip("\n") + "\n\n" + "\n".join([BEGIN, TITLE, "", *table, END]) + "\n"
