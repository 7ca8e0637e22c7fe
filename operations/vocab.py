"""`kconv vocab`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from ..lines import Part, Result, filename, next_command
from ..options import Name, argument, option
from .base import Context
from .convert import changes
from .reading import Reading, check_trusted, refuse_existing_output

if TYPE_CHECKING:
    from ..checkpoint.manifest import Manifest
    from ..convert.plan import Plan
    from ..convert.vocab import VocabReport
    from ..targets.tokenizer import Vocabulary

CHANGES = ("rebuild_t2d", "absolute", "expand", "prune")


@dataclass(frozen=True, repr=False)
class VocabChanged(Result):
    """A head written with another draft vocabulary."""

    out: str
    draft_vocab: int
    vocab: int
    manifest: Manifest

    def to_json(self) -> Any:
        """Return the manifest as plain values."""
        return self.manifest.model_dump(mode="json", by_alias=True)

    def lines(self) -> Iterator[Part]:
        """Yield what changed."""
        count = len(self.manifest.tensors)
        yield f"{filename(self.out)}: {self.draft_vocab} of {self.vocab} tokens, {count} tensors"
        yield from changes(self.manifest)
        exact = self.manifest.exact
        yield "weights: " + ("byte-identical to the source" if exact else "lm_head differs from the source")
        yield next_command("vocab", self.out)


@dataclass(frozen=True, repr=False)
class VocabExamined(Result):
    """A head's draft vocabulary."""

    report: VocabReport

    def to_json(self) -> Any:
        """Return the report as plain values."""
        report = self.report
        faults = [{"where": fault.where, "what": fault.what, "fix": fault.fix} for fault in report.faults]
        coverage = asdict(report.coverage) | {"share": report.coverage.share} if report.coverage else None
        copies = asdict(report.copies) if report.copies else None
        return vars(report) | {"copies": copies, "coverage": coverage, "faults": faults}

    def lines(self) -> Iterator[Part]:
        """Yield what the map holds, then its errors and warnings."""
        report = self.report
        facts = {
            "map": report.kind + (f", {report.order}" if report.order else ""),
            "tokens": f"{report.draft_vocab} of {report.vocab}",
            "ids": f"{report.duplicates} duplicates, {report.outside} out of range",
            "t2d": report.t2d,
            "lm_head": "shared with the target" if report.lm_head_rows is None else f"{report.lm_head_rows} rows",
            "special tokens": f"{len(report.kept)} kept, {len(report.lost)} lost",
        }
        if (copies := report.copies) is not None:
            facts["target's rows"] = f"{copies.by_offset} of {copies.rows} rows equal the target's" + (
                f"; {copies.by_id} if d2t holds absolute ids" if copies.by_id != copies.by_offset else ""
            )
        if (coverage := report.coverage) is not None:
            distinct = f"{coverage.distinct_covered} of {coverage.distinct} distinct ones"
            facts["coverage"] = f"{coverage.share:.2%} of {coverage.tokens} tokens, {distinct}"
        yield from (f"{name:<15} {fact}" for name, fact in facts.items())
        for fault in report.faults:
            yield f"error {fault.where}: {fault.what}\n  fix: {fault.fix}"
        yield from (f"warning {warning}" for warning in report.warnings)


class Vocab(Reading):
    """Examine HEAD's draft vocabulary and exit 1 on any error; or write OUT with another vocabulary.

    Shows whether d2t holds offsets or absolute ids, their order and errors, and whether t2d agrees. --target adds lost
    special tokens and whether the rows are the target's (from a Hub id only its tokenizer and lm_head are downloaded).
    --text adds the share of the text's tokens that the head can draft; of dialogues (JSONL), those of the answers.
    """

    EXAMPLES = (
        "kconv vocab my-head --target my-target --text prompts.jsonl",
        "kconv vocab my-head --rebuild-t2d my-head-marked",
        "kconv vocab my-head --absolute my-head-offsets",
        "kconv vocab my-head --expand my-head-full",
        "kconv vocab my-head --prune 32000 --text prompts.jsonl --target my-target my-head-32k",
    )

    head: Name = argument("The head: a folder or a Hub id.", kind="checkpoint")
    out: Name | None = argument("The folder to write, if the vocabulary changes.", kind="output", default=None)
    text: Name | None = option(None, "Text, dialogues or prompts, for the coverage and --prune.", kind="file")
    rebuild_t2d: bool = option(False, "Write OUT with a t2d rebuilt from d2t.")
    absolute: bool = option(False, "Write OUT with offsets, from a d2t with absolute ids.")
    expand: bool = option(False, "Write OUT with the full vocabulary.")
    prune: Annotated[int, Field(ge=1)] | None = option(None, "Write OUT with the N most frequent tokens.", metavar="N")
    trust_remote_code: bool = option(False, "Run the tokenizer's own Python code; the target must be pinned.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        asked = self.given(*CHANGES)
        if len(asked) > 1:
            raise ValueError(" and ".join(asked) + " exclude each other; make one change at a time")
        if asked and self.out is None:
            raise ValueError(f"{asked[0]} needs OUT, the folder to write")
        if self.out is not None and not asked:
            raise ValueError("OUT also needs one of " + ", ".join("--" + name.replace("_", "-") for name in CHANGES))
        if self.text and asked and not self.prune:
            raise ValueError(f"--text has no effect on {asked[0]}")
        if self.prune and not self.text:
            raise ValueError("--prune needs --text, to count tokens, and --target, for its tokenizer")
        if self.text and not self.target:
            raise ValueError("--text needs --target, for its tokenizer")
        return self

    def run(self, context: Context) -> VocabChanged | VocabExamined:
        """Write the head with another vocabulary, or return a report on its own.

        Raises:
            OutputExists, OutputFailed: the folder exists, or cannot be written.
            KconvError: the head, the target or the text cannot be read.
        """
        check_trusted(context, self.trust_remote_code, self.target)
        refuse_existing_output(self.out, self.head)
        if self.out is None:
            with context.status("examining the vocabulary"):
                return VocabExamined(self._examine(context))
        from ..convert.execute import execute

        with context.status("planning the vocabulary"):
            plan = self._plan(context)
        with context.bytes("writing", sum(step.size for step in plan.steps)) as advance:
            manifest = execute(plan, Path(self.out), advance)
        return VocabChanged(self.out, plan.spec.draft_vocab, plan.spec.vocab, manifest)

    def passed(self, result: VocabChanged | VocabExamined) -> bool:
        """Return whether the vocabulary has no errors."""
        return isinstance(result, VocabChanged) or not result.report.faults

    def _known(self, context: Context) -> Vocabulary | None:
        if self.target is None:
            return None
        from ..targets.tokenizer import read_vocabulary

        return read_vocabulary(context.source(self.target), trust_remote_code=self.trust_remote_code)

    def _examine(self, context: Context) -> VocabReport:
        known, head = self._known(context), context.source(self.head).open_weights()
        from ..convert.vocab import examine  # loads torch, so a wrong path is refused first

        if known is None:
            return examine(head, layout=self.layout())
        counts = known.count_tokens(context.path(self.text)) if self.text else None
        return examine(head, layout=self.layout(), reference=known.lm_head, specials=known.specials, counts=counts)

    def _plan(self, context: Context) -> Plan:
        from ..checkpoint.bytes import file_digest
        from ..convert.vocab import CountedText, expand, prune, rebuild_t2d, write_offsets

        known, head, layout = self._known(context), context.source(self.head).open_weights(), self.layout()
        hints = self.hints().model_copy(update={"target_layers": known.layers}) if known else self.hints()
        if self.rebuild_t2d:
            return rebuild_t2d(head, layout, hints, known.lm_head if known else None)
        if self.absolute:
            return write_offsets(head, layout, hints, known.lm_head if known else None)
        if self.expand or known is None or self.text is None or self.prune is None:
            return expand(head, layout, hints)
        text = context.path(self.text)
        chosen_by = CountedText(known.count_tokens(text), f"{text.name} (sha256 {file_digest(text)})")
        return prune(head, layout, hints, self.prune, chosen_by, known.specials)
