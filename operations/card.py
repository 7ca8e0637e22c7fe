"""`kconv card`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator

from ..checkpoint.source import HUB_ID
from ..lines import Line, Part, Result, counted
from ..options import Name, argument, option
from .base import Context, Operation
from .publish import repository_in
from .reading import refuse_existing_output

if TYPE_CHECKING:
    from ..cards.facts import Facts
    from ..validate.report import Finding


@dataclass(frozen=True, repr=False)
class CardWritten(Result):
    """A written card, or the findings of a check.

    Attributes:
        folder: the head's.
        file: the card; None if none was written.
        missing: facts that the card needs and nobody stated, with their meaning; only if requested.
        findings: problems with the card and its licenses.
        checked: whether the card was only checked.
        unsaid: how many facts the written card lacks.
        started: whether `file` is a facts file, not a card.
    """

    folder: Path
    file: Path | None = None
    missing: Mapping[str, str] | None = None
    findings: Sequence[Finding] = field(default=())
    checked: bool = False
    unsaid: int = 0
    started: bool = False

    def to_json(self) -> Any:
        """Return it as plain values."""
        return {
            "folder": str(self.folder),
            "card": str(self.file) if self.file and not self.started else None,
            "facts": str(self.file) if self.started else None,
            "missing": dict(self.missing) if self.missing is not None else None,
            "findings": [finding.model_dump(mode="json") for finding in self.findings],
        }

    def lines(self) -> Iterator[Part]:
        """Yield the file that was written, or what was asked for; the rest goes to stderr."""
        if self.missing is not None:
            yield from (f"{name}: {asked}" if asked else name for name, asked in self.missing.items())
            if self.missing:
                count = len(self.missing)
                yield Line(
                    f"missing: {counted(count, 'fact')}; kconv card --init writes a file to state them", err=True
                )
            return
        if self.file is not None:
            yield str(self.file)
        if self.started:
            return
        if self.unsaid:
            yield Line(f"missing: {counted(self.unsaid, 'fact')}; kconv card --missing lists what to state", err=True)
        said = [f"{one.severity} {one.rule} {one.where}: {one.message}\n  fix: {one.fix}" for one in self.findings]
        count = sum(one.severity != "note" for one in self.findings)
        found = f"{count} finding{'s' * (count != 1)} about licenses and origins" if count else "license checks passed"
        yield from (Line(line, err=not self.checked) for line in (*said, f"{self.folder}: {found}"))


class Card(Operation):
    """Write HEAD's model card from its manifest, reports, figures and facts.

    Empty sections are left out. --missing lists the facts that they need, and --init writes a facts file to fill in.
    License texts are copied from the source, the target and --license-file; Apache-2.0's kconv brings itself. A folder
    that kconv did not write also gets a card, if --name or the facts name the head. Exit 1 if --missing or --check find
    something, or if a license requires more than the card has. --out copies HEAD, the evidence and the card into a new
    folder for kconv publish.
    """

    EXAMPLES = (
        "kconv card my-head-vllm --init facts.yaml",
        "kconv card my-head-vllm --report report/report.json --name my-org/my-head --base-model moonshotai/Kimi-K2.6",
        "kconv card my-head-vllm --style nvidia --facts facts.yaml --acceptance acceptance.json --license-file LICENSE",
        "kconv card my-head-vllm --report report/report.json --acceptance acceptance.json --out my-release",
    )

    OF_RELEASE = True

    head: Name = argument("The head's folder.", kind="checkpoint")
    report: Name | None = option(None, "report.json of kconv validate.", kind="file")
    acceptance: tuple[Name, ...] = option((), "acceptance.json of kconv bench, or quoted; repeatable.", kind="file")
    facts: Name | None = option(None, "YAML with facts that no file states; see --init.", kind="file")
    style: Literal["short", "compact", "nvidia"] = option("short", "Sections and their order.")
    name: str = option("", "Hub id under which the head will be published.")
    base_model: str = option("", "Hub id of the target.")
    license: str = option("unknown", "License of the head: an SPDX id, or its name on the Hub.")
    license_file: tuple[Name, ...] = option((), "Text of a license; repeatable.", kind="file")
    target: Name | None = option(None, "The target, for its license.", kind="checkpoint")
    source: Name | None = option(None, "The checkpoint that HEAD was made from, for its license.", kind="checkpoint")
    model_index: bool = option(False, "Also write the figures into the front matter.")
    chart: bool = option(True, "Draw no chart.")
    init: Name | None = option(None, "Write a facts file to fill in, with comments, and no card.", metavar="FILE")
    force: bool = option(False, "Overwrite an existing card, licenses and facts file.")
    missing: bool = option(False, "List the missing facts; write nothing.")
    check: bool = option(False, "Check HEAD's card and licenses; write nothing.")
    out: Name | None = option(None, "A new folder for the head, its evidence and its card.", kind="output")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.missing and self.check:
            raise ValueError("--missing and --check exclude each other; use one of them")
        if self.out is not None and (self.missing or self.check or self.init):
            raise ValueError("--missing, --check and --init write no card; remove --out")
        if self.init is not None and (self.missing or self.check):
            raise ValueError("--init writes a facts file; remove --missing and --check")
        for name, given in (("--name", self.name), ("--base-model", self.base_model)):
            if given and not HUB_ID.fullmatch(given):
                raise ValueError(f"{name} {given} is no Hub id (org/name)")
        return self

    def run(self, context: Context) -> CardWritten:
        """Write the card, or return what is missing or wrong.

        Raises:
            FactsInvalid, ReportInvalid, AcceptanceInvalid: a file with evidence cannot be read.
            ManifestMismatch: the head does not match its manifest.
            OutputExists, OutputFailed: the folder exists, or cannot be written.
        """
        from ..cards.card import gather_files, make_card, write
        from ..cards.license_checks import check_folder

        facts = self._facts(context)
        about: dict[str, Any] = {
            "report": context.path(self.report) if self.report else None,
            "acceptance": [context.path(file) for file in self.acceptance],
            "facts": facts,
            "license_files": [context.path(file) for file in self.license_file],
            "target": context.maybe(self.target),
            "source": context.maybe(self.source),
        }
        style: dict[str, Any] = {"style": self.style, "model_index": self.model_index, "chart": self.chart}
        if self.out is not None:
            from ..cards.publish.release import write_release
            from ..checkpoint.manifest import MANIFEST
            from ..errors import NotACheckpoint

            out, release = Path(self.out), context.release
            refuse_existing_output(self.out)
            head = context.source(self.head).open_weights().folder
            if not (head / MANIFEST).is_file():
                raise NotACheckpoint(
                    f"--out copies a folder that kconv wrote, and {self.head} has no {MANIFEST}",
                    where=head,
                    fix="Without --out, the card is written into the folder. Or convert the head first.",
                )
            # The repository to which the recipe publishes it; else its card would name a folder.
            title = (repository_in(release.text) or release.title) if release else ""
            write_release(
                head, out, recipe=release.text if release else "", title=title,
                **style, **about,
            )  # fmt: skip
            return CardWritten(out, out / "README.md", findings=tuple(check_folder(out, facts)))
        head = context.path(self.head)
        if self.init is not None:
            from ..cards.facts_file import write_facts

            file = Path(self.init)
            return CardWritten(head, write_facts(file, facts, head, force=self.force), started=True)
        if self.check:
            return CardWritten(head, findings=tuple(check_folder(head, facts)), checked=True)
        made = make_card(gather_files(head, **about), **style)
        if self.missing:
            return CardWritten(head, missing=made.missing)
        file = write(head, made, force=self.force)
        return CardWritten(head, file, findings=tuple(check_folder(head, facts)), unsaid=len(made.missing))

    def passed(self, result: CardWritten) -> bool:
        """Return whether nothing is missing, and no finding is an error."""
        if result.missing is not None:
            return not result.missing
        return not any(finding.severity == "error" for finding in result.findings)

    def _facts(self, context: Context) -> Facts:
        """Return the facts from a file or from the release, overridden by the options."""
        from ..cards.facts import Facts, read_facts
        from ..cards.licenses import by_id

        facts = read_facts(context.path(self.facts)) if self.facts else Facts()
        if not self.facts and context.release:
            facts = context.release.facts
        if self.license != "unknown":
            facts = facts.model_copy(
                update={"license": facts.license.model_copy(update={"id": by_id(self.license).id})}
            )
        stated = {"name": self.name, "base_model": self.base_model}
        return facts.model_copy(update={key: value for key, value in stated.items() if value})
