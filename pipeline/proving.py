"""Steps that prove and publish.

A function makes its job's `out`, whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..cards.publish.floor import RECIPE
from ..checkpoint.manifest import MANIFEST, verify
from ..checkpoint.staging import staged
from ..errors import ReportInvalid
from .heads import open_origin
from .job import Job, open_step_head, told
from .kinds import Bench, Card, Publish, Validate
from .making import find_shared

if TYPE_CHECKING:
    from ..cards.publish.gate import Allowance
    from ..cards.publish.release import Candidate
    from ..cards.publish.run import Publication

PUBLISHED = "published.json"
SHOWN = 5


def validate(step: Validate, job: Job) -> None:
    """Check a head or a target; the report is there even where it says that something is wrong."""
    from ..targets.config import read_target_config
    from ..validate.held_out import encode_held_out
    from ..validate.markdown import write_report
    from ..validate.parity import Parity
    from ..validate.rules.rule import ASKED
    from ..validate.run import Wish, is_target
    from ..validate.run import validate as run

    target, source = job.maybe("target"), job.maybe("source")
    trusted = job.trusts(step.trust_remote_code)
    config = read_target_config(target.fetch_config()) if target else None
    layout, hints = told(step.reading)
    wish = Wish(
        ASKED[step.engines] if step.engines else None,
        layout,
        replace(hints, target_layers=config.layers if config else None),
        config,
        lent=partial(find_shared, target) if target else None,
    )
    prompts, limit = job.word("prompts"), step.prompt_tokens + step.new_tokens
    parity = None
    if target and prompts:
        parity = Parity(
            target,
            encode_held_out(prompts, target, limit, trust_remote_code=trusted),
            steps=step.steps,
            prompt_tokens=step.prompt_tokens,
            new_tokens=step.new_tokens,
        )
    opened = source.open_weights() if source else None
    quantized_from = opened if opened and is_target(opened) else None
    head = job.source("head")
    # What the step says of reading is said of the head; of its source the conversion was told.
    original = open_origin(opened, head, target) if opened and not quantized_from else None
    report = run(head, wish, source=original, quantized_from=quantized_from, parity=parity, say=job.say)
    with staged(job.out) as folder:
        write_report(report, folder)
    if not report.clean:
        errors = [f for f in report.findings if f.severity == "error"]
        lines = "".join(f"\n  {f.rule} {f.where}: {f.message}" for f in errors[:SHOWN])
        more = f"\n  and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
        raise ReportInvalid(
            f"validation found {len(errors)} error(s) in {report.subject}:{lines}{more}",
            where=job.out,
            fix="Mend what they name; the report there says how.",
        )


def bench(step: Bench, job: Job) -> None:
    """Measure acceptance on a server, or by kconv's own forward."""
    from ..bench.acceptance import ACCEPTANCE
    from ..bench.suites import load_suite
    from ..validate.assemble import config_digest, digests

    head, target, trusted = job.source("head"), job.maybe("target"), job.trusts(step.trust_remote_code)
    suite = load_suite(job.word("suite") or step.suite, limit=step.limit)
    if step.url:
        from ..bench.measure import ServerRun, measure_server

        opened = head.open_weights()
        wish = ServerRun(
            draft_tokens=step.draft_tokens, head=head.name, concurrency=step.concurrency, max_tokens=step.max_tokens,
            temperature=step.temperature, target=step.target_name, precision=step.precision,
            weights=digests(opened), config=config_digest(opened), folder=opened.folder,
        )  # fmt: skip
        found = measure_server(step.url, suite, wish, job.say)
    else:
        from ..bench.offline import measure_head

        assert target is not None, "the recipe's check asks for it"
        found = measure_head(
            open_step_head(head, step.reading, target), target.fetch_model(), suite, draft_tokens=step.draft_tokens,
            max_tokens=step.max_tokens, temperature=step.temperature, target_name=step.target_name or target.name,
            trust_remote_code=trusted, say=job.say,
        )  # fmt: skip
    with staged(job.out) as folder:
        (folder / ACCEPTANCE).write_text(found.to_json())


def write_card(step: Card, job: Job) -> None:
    """Put a head, its evidence, its licenses and its card into one folder, which can be published."""
    from ..bench.acceptance import read_acceptance
    from ..cards.card import gather, make_card, write
    from ..cards.publish.release import acceptance_name
    from ..validate.report import REPORT, read_report, report_file

    target, source, reports = job.maybe("target"), job.maybe("source"), job.files("report")
    acceptance = job.files("acceptance")
    head = job.source("head").open_weights().folder
    manifest = verify(head)
    with staged(job.out) as folder:
        for record in manifest.files:
            _link(head / record.name, folder / record.name)
        _link(head / MANIFEST, folder / MANIFEST)
        for report in reports:
            shutil.copyfile(report_file(report), folder / REPORT)
        for number, file in enumerate(acceptance):
            shutil.copyfile(file, folder / acceptance_name(number))
        (folder / RECIPE).write_text(job.recipe, encoding="utf-8")
        evidence = gather(
            folder,
            read_report(reports[0]) if reports else None,
            # A card is named after its folder otherwise, which has a name of chance while it is made.
            job.facts if job.facts.name else job.facts.model_copy(update={"name": job.title}),
            [read_acceptance(file) for file in acceptance],
            job.files("license_files"),
            target.fetch_license() if target else None,
            source.fetch_license() if source else None,
        )
        write(folder, make_card(evidence, step.style, model_index=step.model_index, chart=step.chart))


def publish(step: Publish, job: Job) -> None:
    """Publish a folder, and keep the record of what is on the Hub."""
    from ..cards.publish.run import prepare
    from ..cards.publish.run import publish as run

    candidate, allowances, wish = publication(step, job)
    made = run(prepare(candidate, allowances), wish, job.say)
    with staged(job.out) as folder:
        # What was done this time is no part of the outcome: a second run of the step finds it done.
        outcome = {k: v for k, v in asdict(made).items() if k not in ("done", "uploaded", "deleted")}
        (folder / PUBLISHED).write_text(json.dumps(outcome, indent=1) + "\n")


def publication(step: Publish, job: Job) -> tuple[Candidate, list[Allowance], Publication]:
    """Return what a step publishes, what it lets pass, and where to."""
    from ..cards.publish.release import open_candidate

    folder = job.source("folder").fetch_config()
    candidate = open_candidate(folder, None, (), job.floor, job.facts)
    return candidate, allowances_of(step), wish_of(step)


def wish_of(step: Publish) -> Publication:
    """Return how and where to a step publishes."""
    from ..cards.publish.run import Publication

    return Publication(
        step.repo, step.tag, step.revision, step.private, step.public, step.create_pr, step.expect_parent
    )


def allowances_of(step: Publish) -> list[Allowance]:
    """Return what a step lets pass."""
    from ..cards.publish.gate import Allowance

    return [Allowance(one.rule, one.why) for one in step.allow]


def _link(file: Path, to: Path) -> None:
    """Give a file a second name, or a copy where the disk cannot; nothing changes a step's output in place."""
    try:
        os.link(file, to)
    except FileExistsError:
        raise
    except OSError:
        with file.open("rb") as source, to.open("xb") as copy:
            shutil.copyfileobj(source, copy)
