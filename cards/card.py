"""The model card of a head."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.acceptance import AcceptanceFile, read_acceptance
from ..bench.tables import Table, draw_bars
from ..checkpoint.bytes import file_digest
from ..checkpoint.folder import read_json
from ..checkpoint.manifest import MANIFEST, Manifest, read_manifest
from ..checkpoint.schema import read_text
from ..checkpoint.source import Source
from ..checkpoint.staging import PARTIAL, refuse_existing, writing
from ..engines.base import needs_code
from ..engines.registry import titles_of, writable
from ..errors import LayoutCannot, NotACheckpoint, OutputExists, ReportInvalid
from ..escape import command
from ..validate.report import Report, read_report
from .evidence import CONFIG, Evidence, HeadIdentity, Said, foreign, identify
from .facts import Facts
from .front_matter import CARD, front_matter, read_card, read_front_matter
from .licenses import (
    LICENSES,
    OWN_LICENSE,
    SOURCE_LICENSE,
    find,
    find_texts,
    given_texts,
    license_files,
    of_target,
    unstated_text,
)
from .quickstart import starts
from .sections import CHART, attribution, changed, figures, known, render, shown, subcards
from .target_card import TEMPLATE, is_target

# A card has no other name, and kconv must not replace what a person wrote into it.
REWRITE = "Keep it (kconv card --check shows whether it is still correct), or pass --force to write it again."
# A folder that is empty and stays empty.
NOWHERE = Path("/dev/null")
STYLES = ("short", "compact", "nvidia")


@dataclass(frozen=True)
class RenderedCard:
    """A card, not yet written.

    Attributes:
        files: texts of the files that go with it, by name: licenses and a notice.
        missing: facts that it needs and nobody stated: dotted name, and the question.
    """

    text: str
    files: Mapping[str, str]
    missing: Mapping[str, str]
    table: Table | None


def gather(
    folder: Path,
    report: Report | None,
    facts: Facts,
    acceptance: Sequence[AcceptanceFile] = (),
    license_files: Sequence[Path] = (),
    target: Path | None = None,
    source: Path | None = None,
) -> Evidence:
    """Collect what is known about a head.

    Args:
        folder: an output of kconv, or any folder if facts name the head.
        license_files: license texts, in addition to those in the source's and the target's folder; see `given_texts`.
        source: a folder with the source's license; the one that the manifest names if None.

    Raises:
        NotACheckpoint: kconv did not write the folder, and no facts name the head.
        LayoutCannot: the head is in a trainer's layout, which no engine serves.
        ReportInvalid: the report, or a figure that names weights, does not belong to exactly the folder's weights and
            config.json; or the report has errors.
        LicenseUnknown: kconv does not know the license in a file, or it is neither the head's nor the target's.
        ConfigInvalid: config.json, the head's or the target's, is not a JSON object.
    """
    manifest = None
    if (folder / MANIFEST).exists() or not facts.name:
        try:
            manifest = read_manifest(folder)
        except NotACheckpoint as fault:
            fix = (
                f"{fault.fix} For a card without a manifest, pass --facts FILE with the head's name; "
                f"{command(('kconv', 'card', str(folder), '--init', 'FILE'))} writes such a file."
            )
            raise NotACheckpoint(fault.what, where=fault.where, fix=fix) from fault
        if not titles_of(manifest.layout) and not is_target(manifest):
            raise LayoutCannot(
                f"the head is in {manifest.layout}'s layout, which no engine reads",
                where=folder,
                fix=f"Convert it first (kconv {', '.join(f'to-{name}' for name in writable())}), then write its card.",
            )
    if report is not None:
        _refuse_unfit(report)
    # Quoted figures name no weights.
    bound = [*([report] if report is not None else []), *(found for found in acceptance if found.weights)]
    if bound:
        head = identify(folder, manifest)
        for evidence in bound:
            _refuse_foreign(evidence, head, folder)
    targets = find_texts([target]) if target else ()
    stated = facts.license.target or (targets[0].license.id if targets else _named(target) if target else None)
    # The target's folder shows which license it has, or its name, or a text that the user names.
    given, theirs = given_texts(license_files, facts.license.id, of_target(stated, facts.base_model))
    if theirs:
        own = facts.license.model_copy(update={"target": theirs.id if theirs else None})
        facts = facts.model_copy(update={"license": own})
    source = source or (_stated_source(manifest) if manifest else folder)
    licenses = (facts.license.id, facts.license.target)
    texts = find_texts([source, *([target] if target else [])], given, licenses)
    unstated = unstated_text(source, licenses)
    # A quantized target is its own target.
    of_the_target = _config(folder if is_target(manifest) else target)
    own_code = needs_code(of_the_target, _config(folder) or {}, facts.base_model or "")
    return Evidence(folder, facts, manifest, report, tuple(acceptance), own_code, texts, unstated)


def _named(folder: Path) -> str | None:
    """Return the license that a folder's own card names, if kconv knows it."""
    front = read_front_matter(read_card(folder))
    named = find(front.license_name or front.license)
    return named.id if named else None


def _config(folder: Path | None) -> Mapping[str, Any] | None:
    return read_json(folder / CONFIG) if folder and (folder / CONFIG).is_file() else None


def _stated_source(manifest: Manifest) -> Path:
    """Return the folder that a manifest names as its source, if it really is that, since the manifest is untrusted."""
    config = Path(manifest.source) / CONFIG
    is_source = config.is_file() and file_digest(config) == manifest.source_config
    return Path(manifest.source) if is_source else NOWHERE


def gather_files(
    folder: Path,
    *,
    report: Path | None = None,
    acceptance: Sequence[Path] = (),
    facts: Facts | None = None,
    license_files: Sequence[Path] = (),
    target: Source | None = None,
    source: Source | None = None,
) -> Evidence:
    """Read what is known about a head from its files.

    Args:
        report: report.json, or its folder.
        target, source: folders or hub ids with licenses; from a hub id only these files are downloaded.

    Raises:
        KconvError: see `gather`; or a file cannot be read or downloaded, or does not match its schema.
    """
    return gather(
        folder,
        read_report(report) if report else None,
        facts or Facts(),
        [read_acceptance(file) for file in acceptance],
        license_files,
        target.fetch_license() if target else None,
        source.fetch_license() if source else None,
    )


def make_card(
    evidence: Evidence, style: str = "short", *, model_index: bool = False, chart: bool = True
) -> RenderedCard:
    """Create a card without writing it.

    Args:
        model_index: whether figures also go into the front matter.
    """
    facts, manifest, said = evidence.facts, evidence.manifest, Said(evidence.facts, known(evidence.manifest))
    files = dict(
        license_files(
            LICENSES.get(facts.license.id or ""),
            evidence.licenses,
            evidence.texts,
            about=evidence.name,
            attribution=facts.license.attribution,
            changed=changed(manifest),
        )
    )
    if evidence.source_license:
        files[SOURCE_LICENSE] = evidence.source_license
    repeated = figures(evidence, chart=chart)
    template = TEMPLATE if is_target(manifest) else f"{style}.md.jinja"
    link = ""
    if evidence.license_is_named:
        own = evidence.licenses[0]
        link = OWN_LICENSE if any(text.license.id == own.id for text in evidence.texts) else own.url
    values = {
        "front_matter": front_matter(evidence, link=link, model_index=model_index),
        "name": evidence.name,
        "shown": shown(evidence),
        "lead": evidence.drafter.lead(evidence.spec),
        "said": said,
        "listed": said.listed,
        "licenses": evidence.licenses,
        "attribution": attribution(evidence),
        "files": list(files),
        "starts": () if is_target(manifest) else starts(evidence),
        "noted": said.noted,
        # Only one style has them, and only that one needs them.
        "subcards": lambda: subcards(said),
        **repeated,
    }
    text = render(template, values)
    return RenderedCard(
        "\n".join(_single(text.rstrip().split("\n"))) + "\n", files, said.missing, repeated.get("table")
    )


def write_card(
    folder: Path,
    report: Report | None,
    facts: Facts,
    *,
    style: str = "short",
    acceptance: Sequence[AcceptanceFile] = (),
) -> Path:
    """Write a head's README.md from what is known; see `gather` and `write` for the errors."""
    evidence = gather(folder, report, facts, acceptance)
    return write(folder, make_card(evidence, style, chart=bool(acceptance)))


def write(folder: Path, card: RenderedCard, *, force: bool = False) -> Path:
    """Write a card and its files into a folder; overwrite existing files only with `force`.

    Raises:
        OutputExists: there is already a README.md, or a license or notice with another text, and no `force`.
        OutputFailed: the folder cannot be written to, or its disk is full.
        MissingExtra: its chart needs matplotlib, which is not installed.
    """
    charted = f"]({CHART})" in card.text and card.table is not None
    if not force:
        refuse_existing(folder / CARD, fix=REWRITE)
        for name, text in card.files.items():
            file = folder / name
            if os.path.lexists(file) and read_text(file, OutputExists, fix="Delete it.") != text:
                raise OutputExists(f"{file} already exists with other text", fix="Pass --force to overwrite it.")
        if charted:
            refuse_existing(folder / CHART, fix=REWRITE)
    if charted and card.table:
        draw_chart(folder / CHART, card.table)
    for name, text in {**card.files, CARD: card.text}.items():
        _write_whole(folder / name, text)
    return folder / CARD


def _write_whole(file: Path, text: str) -> None:
    """Write a text atomically: half a license on a full disk would block the next call."""
    beside = file.with_name(f"{PARTIAL}{file.name}")
    with writing(file):
        try:
            # A killed call may have left it.
            beside.unlink(missing_ok=True)
            # A folder's name need not be UTF-8; a card shows its bytes as \udcff.
            with beside.open("x", encoding="utf-8", errors="backslashreplace") as out:
                out.write(text)
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)


def draw_chart(file: Path, table: Table) -> None:
    bars = table.bars
    tops = [row.draft_tokens + 1.0 for line in table.lines for row in line.rows if row and row.draft_tokens]
    labels = list(dict.fromkeys(label for own in bars.values() for label in own))
    series = [(name, [own.get(label) for label in labels]) for name, own in bars.items()]
    said = all(row.metric == "al_incl_bonus" for line in table.lines for row in line.rows if row)
    title = "Acceptance length per category" + (" (bonus token included)" if said else "")
    draw_bars(file, title, labels, series, max(tops, default=None))


def _refuse_unfit(report: Report) -> None:
    if not report.weights:
        raise ReportInvalid(
            "the report names no weights, because kconv validate --headers-only reads none",
            where=report.subject,
            fix="Run kconv validate on this folder without --headers-only, and pass its report.",
        )
    if not report.clean:
        raise ReportInvalid(
            "the report has errors or undecided facts",
            where=report.subject,
            fix="Fix what kconv validate found, then write the card.",
        )


def _refuse_foreign(evidence: Report | AcceptanceFile, head: HeadIdentity, folder: Path) -> None:
    what, of = ("report", evidence.subject) if isinstance(evidence, Report) else ("acceptance", evidence.head)
    if other := foreign(evidence, head):
        raise ReportInvalid(
            f"the {what}, made of {of}, belongs to {other}",
            where=folder,
            fix="Run kconv validate or kconv bench on this folder, and pass its output.",
        )


def _single(lines: Sequence[str]) -> list[str]:
    """Collapse consecutive empty lines into one."""
    return [line for at, line in enumerate(lines) if line.strip() or not at or lines[at - 1].strip()]
