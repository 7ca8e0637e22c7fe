"""Preview a release before running it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..cards.license_checks import CHECKS, check_folder
from ..cards.licenses import LICENSES, OWN_LICENSE, TARGET_LICENSE, find_texts, given_texts, of_target
from ..checkpoint.folder import LICENSE_TEXTS
from ..checkpoint.staging import free_bytes
from ..errors import OutputFailed, ReleaseStateInvalid
from ..operations.base import Operation
from ..operations.card import Card
from ..options import in_recipe
from ..rule import Found
from ..validate.report import Finding
from .prepare import PreparedRelease, Standing, StepContext
from .record import State, read_state


@dataclass(frozen=True)
class Planned:
    """The preview of a step.

    Attributes:
        runs: whether it would run; None if that depends on an earlier step's result.
        why: the reason, or what it waits for.
        size: bytes that it would write; None if not known yet.
        heavy: whether it is too large for a hosted CI machine.
    """

    name: str
    do: str
    runs: bool | None
    why: str
    size: int | None
    heavy: bool


@dataclass(frozen=True)
class Preview:
    """The preview of a release.

    Attributes:
        steps: the selected ones, in order.
        needed, free: bytes of disk. What it needs is as far as known; `whole` says whether all is.
        findings: what the license checks will find, as far as known.
    """

    steps: tuple[Planned, ...]
    needed: int
    whole: bool
    free: int
    findings: tuple[Finding, ...]

    @property
    def heavy(self) -> bool:
        """Whether a step that may run needs a machine of your own."""
        return any(step.heavy and step.runs is not False for step in self.steps)


def preview_release(prepared: PreparedRelease) -> Preview:
    """Return what running a release would do; writes nothing and downloads no weights.

    Raises:
        KconvError: an input cannot be read, or a hub id cannot be resolved.
    """
    root, state = prepared.root, read_state(prepared.root)
    pending: set[str] = set()
    steps, findings = [], []
    for name, step in prepared.release.steps.items():
        if not prepared.selected[name]:
            continue
        planned = _plan(name, prepared, state, pending)
        if planned.runs is not False:
            pending.add(name)
        steps.append(planned)
        if isinstance(step.request, Card):
            findings += _licenses(step.request, prepared.context(), planned)
    sizes = [step.size for step in steps if step.runs is not False]
    return Preview(
        tuple(steps),
        needed=sum(size for size in sizes if size is not None),
        whole=None not in sizes,
        free=free_bytes(root),
        findings=tuple(findings),
    )


def check_disk(preview: Preview, root: Path) -> None:
    """Raise OutputFailed if a release is known to need more disk space than is free."""
    if preview.needed > preview.free:
        raise OutputFailed(
            f"the steps need {'' if preview.whole else 'at least '}{preview.needed / 1e9:.2f} GB, "
            f"but only {preview.free / 1e9:.2f} GB are free",
            where=root.absolute().parent,
            fix="Free some space, or choose an --out on another disk.",
        )


def _plan(name: str, prepared: PreparedRelease, state: State, pending: set[str]) -> Planned:
    step = prepared.release.steps[name]
    heavy = step.request.HEAVY
    waits = [other for other in step.needed() if other in pending]
    if waits:
        size = 0 if type(step.request).estimate is Operation.estimate else None
        return Planned(name, step.do, None, f"waits for {', '.join(waits)}", size, heavy)
    try:
        found = Standing(name, prepared, state)
    except ReleaseStateInvalid as fault:
        return Planned(name, step.do, None, fault.what, None, heavy)
    # An existing output will be made again.
    with step.request.spelled(in_recipe):
        planned = step.at(prepared.root / f".{name}.planned")
        size = planned.estimate(found.context).bytes if found.why else 0
    return Planned(name, step.do, bool(found.why), found.why, size, heavy)


def _licenses(step: Card, context: StepContext, planned: Planned) -> Iterator[Finding]:
    """Yield the findings of the license checks for a card's folder; or, before it exists, what they will miss."""
    assert context.release
    facts = context.release.facts
    if planned.runs is False:
        yield from check_folder(context.root / planned.name, facts)
        return
    if not facts.license.id:
        yield _missing("L2", "facts.license.id", "the head's license is not stated")
    if not facts.base_model:
        yield _missing("L8", "facts.base_model", "the head's target is not stated")
    if planned.runs is None:
        return
    folders = [source.fetch_license() for name in (step.source, step.target) if (source := context.maybe(name))]
    files = [context.path(file) for file in step.license_file]
    given, _ = given_texts(files, facts.license.id, of_target(facts.license.target, facts.base_model))
    texts = find_texts(folders, given, (facts.license.id, facts.license.target))
    at_hand = {one.license.id for one in texts}
    for rule, license, file in (
        ("L1", facts.license.id, OWN_LICENSE),
        ("L3", facts.license.target, TARGET_LICENSE),
    ):
        wanted = LICENSES.get(license or "")
        if wanted and wanted.marks and wanted.text and wanted.id not in at_hand:
            at = ", ".join(LICENSE_TEXTS)
            yield _missing(rule, file, f"the text of the {wanted.title} is missing ({at}, license_file)")


def _missing(rule: str, where: str, message: str) -> Finding:
    fix = "State it in the recipe, or pass the file; otherwise kconv publish refuses the folder."
    return CHECKS[rule].finding(Found(where, message, fix))
