"""`kconv publish`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from ..cards.publish.options import PublishOptions
from ..errors import RequestInvalid
from ..lines import Part, Result, Table
from ..options import Name, argument
from .base import Context, Operation

if TYPE_CHECKING:
    from ..cards.publish.run import ApprovedRelease, Published

PUBLISHED = "published.json"
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Where and how to publish: what the folder's recipe may state.
PLACE = ("tag", "private", "public", "revision", "create_pr", "expect_parent")
# The options that define a minimum acceptance, and those only for a suite.
ABOUT = ("suite", "draft_tokens", "min_prompts", "max_loss")
MORE = ("target_name", "temperature")


@dataclass(frozen=True, repr=False)
class PublishResult(Result):
    """What was published, or would be.

    Attributes:
        release: the folder, its findings and the allowed checks.
        made: what was done, or would be; None if the Hub was not asked.
        dry_run: whether nothing was done.
    """

    release: ApprovedRelease
    made: Published | None
    dry_run: bool = False

    def to_json(self) -> Any:
        """Return it as plain values."""
        passed = [{"rule": f.rule, "where": f.where, "found": f.message, "why": a.why} for f, a in self.release.passed]
        findings = [finding.model_dump(mode="json") for finding in self.release.findings]
        checks = {"passed": [check.id for check in self.release.checks], "findings": findings, "allowed": passed}
        return {"dry_run": self.dry_run} | (asdict(self.made) if self.made else {}) | checks

    def lines(self) -> Iterator[Part]:
        """Yield the allowed checks, the files, and what was done."""
        made = self.made
        for finding, allowance in self.release.passed:
            yield f"allowed {finding.rule} {finding.where}: {finding.message} ({allowance.why})"
        for finding in self.release.warnings:
            yield f"{finding.severity} {finding.rule} {finding.where}: {finding.message}\n  fix: {finding.fix}"
        if made is None:
            yield f"{len(self.release.checks)} release checks passed; the Hub was not asked, and nothing was changed"
            return
        files = [
            (one.name, f"{one.size:,}", made.files[one.name][:16], "new" if one.name in made.uploaded else "unchanged")
            for one in {file.name: file for file in self.release.files}.values()
        ]
        yield Table(("file", "bytes", "sha256", ""), files + [(name, "", "", "deleted") for name in made.deleted])
        at = f"{made.repo}@{made.tag or made.commit or made.revision}"
        if self.dry_run:
            yield f"{at}: every check passed; dry run, nothing was changed"
        else:
            yield f"{at}: {', '.join(made.done) or 'nothing to do, the same files are already there'}"
        yield f"commit {made.commit or 'not made yet'}, {'private' if made.private else 'public'}"


class Publish(Operation, PublishOptions):
    """Publish DIR, a head with its card, as the repository REPO (org/name) on the Hub.

    Refused unless the manifest matches, the report has no errors and belongs to these weights, the acceptance reaches
    the floor, the card agrees with them, and its licenses are complete. Then kconv makes one commit, reads every file
    back, and sets the tag. A repeated call does nothing; an interrupted one resumes. The token comes from HF_TOKEN, hf
    auth login, or, if HF_OIDC_RESOURCE is set, the CI job's identity.

    Options that you omit come from DIR's recipe: the floor, the facts, and, from its publish step for REPO or its
    only publish step, the repository, tag, branch, visibility and allowed checks. With --create-pr, the recipe's tag,
    branch and --public wait until the pull request is merged.
    """

    EXAMPLES = (
        "kconv publish my-release my-org/my-head --tag v1 --dry-run",
        "kconv publish my-release my-org/my-head --offline",
        "kconv publish my-release --min-acceptance 2.5 --suite sampled --draft-tokens 3 --min-prompts 80 "
        "--max-loss 0.01",
    )
    PLANS = True
    OF_RELEASE = True

    folder: Name = argument("The folder to publish.", kind="file", metavar="DIR")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.repo and not REPO.fullmatch(self.repo):
            swapped = REPO.fullmatch(self.folder) and Path(self.repo).is_dir() and not Path(self.folder).exists()
            more = f"; did you mean kconv publish {quote(self.repo)} {self.folder}?" if swapped else ""
            raise ValueError(f"REPO {self.repo!r} is not of the form org/name{more}")
        for name in ("tag", "revision"):
            if (ref := getattr(self, name)) and not _is_ref(ref):
                raise ValueError(
                    f"--{name} {ref!r} cannot name a tag or branch in git; use letters, digits, '.', '-' and '/'"
                )
        if self.expect_parent:
            from ..checkpoint.hub import COMMIT

            if not COMMIT.fullmatch(self.expect_parent):
                raise ValueError(f"--expect-parent {self.expect_parent!r} is no commit; pass its 40 hex digits")
        if self.offline:
            self.refuse("out", unless="without --offline, which publishes nothing")
        if self.min_acceptance is None:
            self.refuse("metric", *ABOUT, *MORE, unless="with --min-acceptance")
        else:
            self._refuse_lacking()
        return self

    def _refuse_lacking(self) -> None:
        """Refuse a minimum acceptance without all that defines it, in one message."""
        from ..cards.publish.floor import TEXTS

        about, more = (
            [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is None] for names in (ABOUT, MORE)
        )
        if self.suite in TEXTS:
            more = []
        elif self.suite:
            about, more = [*about, *more], []
        if about:
            also = f", and for a suite of prompts {' and '.join(more)}" if more else ""
            raise ValueError(f"--min-acceptance also needs {', '.join(about)}{also}")

    def run(self, context: Context) -> PublishResult:
        """Publish the folder; with `offline` only run the release checks.

        Raises:
            PublishRefused: a release check does not pass, or the repository is not as requested.
            HubMoved: the branch moved, or the tag exists with other files.
            ReadBackFailed: the Hub returns other bytes.
            HubRefused, HubUnreachable: the Hub refuses this account, or cannot be reached.
        """
        return self._run(context, dry_run=self.offline)

    def preview(self, context: Context) -> PublishResult:
        """Run the release checks and look at the repository; change nothing."""
        return self._run(context, dry_run=True)

    def _run(self, context: Context, *, dry_run: bool) -> PublishResult:
        from ..cards.publish.release import refuse_absent

        folder = context.path(self.folder)
        refuse_absent(folder)
        from ..cards.publish.run import approve, preview, publish

        options = self._with(None if context.release else self._step(folder)).located(context)
        with context.status("publishing") as say:
            release = approve(folder, options, say)
            if dry_run:
                # Before the Hub, which may not answer.
                for line in _passed(release, asks=not self.offline):
                    context.log(line)
            made = None if self.offline else (preview if dry_run else publish)(release, options, say)
        done = PublishResult(release, made, dry_run)
        if self.out is not None and made and not dry_run:
            _write(made, Path(self.out))
        return done

    def _step(self, folder: Path) -> Publish | None:
        """Return the step of the folder's own recipe that publishes to the repository, or its only one."""
        steps = [step for step in recorded_steps(folder) if self.repo in ("", step.repo)]
        if not (self.repo or steps):
            raise RequestInvalid(f"REPO is required: no recipe in {folder} has a publish step")
        if len(steps) > 1:
            several = f"{len(steps)} steps of {folder}'s recipe publish{f' to {self.repo}' if self.repo else ''}"
            raise RequestInvalid(
                f"{several}; run one with kconv run --only STEP{'' if self.repo else ', or name REPO'}"
            )
        return steps[0] if steps else None

    def _with(self, step: Publish | None) -> Self:
        """Return the request, with what it omits of where and how to publish taken from a step of the folder's recipe.

        With --create-pr, the step's tag, branch and --public wait until the pull request is merged.
        """
        if step is None:
            return self
        stated = step.model_dump(include={"repo", *PLACE})
        later = {"tag": "", "revision": "", "public": False} if self.create_pr else {}
        own = {name: value for name in PLACE if (value := getattr(self, name))}
        return self.model_copy(update=stated | later | own | {"allow": step.allow | self.allow})


def _is_ref(name: str) -> bool:
    """Say whether git takes a name for a tag or branch: https://git-scm.com/docs/git-check-ref-format."""
    parts = name.split("/")
    spelled = min(name) > " " and not set(name) & set("~^:?*[\\\x7f") and ".." not in name and "@{" not in name
    return spelled and all(part and part[0] != "." and not part.endswith((".", ".lock")) for part in parts)


def recorded_steps(folder: Path) -> list[Publish]:
    """Return the publish steps of the folder's own recipe; none without a recipe.

    Raises:
        RecipeInvalid: the recipe is not a YAML mapping, or such a step does not match its schema.
    """
    from ..cards.publish.floor import RECIPE, read_parts
    from ..errors import RecipeInvalid

    file, steps = folder / RECIPE, read_parts(folder).get("steps")
    own = [step for step in steps.values() if isinstance(step, dict)] if isinstance(steps, dict) else []
    try:
        return [
            Publish.checked({key: value for key, value in step.items() if key != "do"})
            for step in own
            if step.get("do") == "publish"
        ]
    except RequestInvalid as error:
        raise RecipeInvalid(f"{RECIPE} cannot be read: {error.what}", where=file, fix="Correct it there.") from error


def repository_in(recipe: str) -> str:
    """Return the only repository to which a recipe publishes, "" if there is none or several."""
    from ..checkpoint.schema import parse_yaml
    from ..errors import RecipeInvalid

    held = parse_yaml(recipe, RecipeInvalid, where="", what="recipe", fix="Correct it there.")
    steps = held.get("steps") if isinstance(held, dict) else None
    own = [step for step in steps.values() if isinstance(step, dict)] if isinstance(steps, dict) else []
    repositories = {str(step["repo"]) for step in own if step.get("do") == "publish" and step.get("repo")}
    return repositories.pop() if len(repositories) == 1 else ""


def _passed(release: ApprovedRelease, asks: bool) -> Iterator[str]:
    """Yield the release checks that passed, and how many they are if this asks the Hub next."""
    from ..cards.publish.gate import Check

    # A release check's sentence says what holds, a license check's what would be wrong.
    licenses = [check.id for check in release.checks if not isinstance(check, Check)]
    yield from (f"passed {check.id}: {check.sentence}" for check in release.checks if isinstance(check, Check))
    if licenses:
        yield f"passed {', '.join(licenses)}: licenses and origins"
    if asks:
        yield f"{len(release.checks)} release checks passed, now asking the Hub"


def _write(made: Published, out: Path) -> None:
    from ..checkpoint.staging import staged

    with staged(out) as folder:
        # What was done this time is not part of the result: a second run of the step finds it done.
        outcome = {k: v for k, v in asdict(made).items() if k not in ("done", "uploaded", "deleted")}
        (folder / PUBLISHED).write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
