"""A publication from end to end.

The checks; the repository, private if it is new; one commit; every byte read back; then the tag; and last, if
requested, the repository becomes public. So the tag never points to anything that was not read back. Each step first
checks whether it was done before: a repeated call does nothing, and an interrupted one resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ...checkpoint.manifest import MANIFEST
from ...errors import HubMoved, HubRefused, PublishRefused, RequestInvalid
from ...rule import Rule
from ...validate.report import Finding
from ..facts import read_facts
from .floor import read_floor, recipe_facts, stated_floor
from .gate import Allowance, allowable, checks_of, judge, let_pass, record_exceptions
from .options import MAIN, PublishOptions
from .release import Candidate, Upload, digest_release, open_candidate, uploads
from .remote import Remote, RepositoryState, differing, read_back, same, surplus, writing

Say = Callable[[str], None]
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx")


@dataclass(frozen=True)
class ApprovedRelease:
    """A candidate that passed the checks: its files, the checks that were made, all findings, and the allowed ones."""

    files: tuple[Upload, ...]
    asked: tuple[Rule[Any], ...]
    findings: tuple[Finding, ...]
    passed: tuple[tuple[Finding, Allowance], ...]

    @property
    def checks(self) -> tuple[Rule[Any], ...]:
        """The release checks that found nothing."""
        failed = {finding.rule for finding in self.findings}
        return tuple(check for check in self.asked if check.id not in failed)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that stop no publication."""
        allowed = [finding for finding, _ in self.passed]
        return tuple(finding for finding in self.findings if finding not in allowed)

    @property
    def digest(self) -> str:
        """16 hex digits that identify exactly these files."""
        return digest_release(self.files)

    @property
    def title(self) -> str:
        """The commit's message, the same for the same files."""
        return f"kconv release {self.digest}"


@dataclass(frozen=True)
class Published:
    """The result of a publication, or its preview if nothing was done.

    Attributes:
        commit: the commit with the files; empty if not made yet.
        uploaded, deleted: names of files that the commit changes; none if it existed before.
        private: whether the repository is private now.
        done: what was done, in order; empty if everything had been done before.
        files: sha256 by name.
    """

    repo: str
    revision: str
    tag: str
    commit: str
    digest: str
    uploaded: tuple[str, ...]
    deleted: tuple[str, ...]
    private: bool
    done: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)


def approve(folder: Path, options: PublishOptions, say: Say = lambda _: None) -> ApprovedRelease:
    """Run the release checks on a folder, without the Hub.

    Args:
        folder: a head with its card and evidence. Its recipe states the facts and the minimum acceptance that the
            options do not.

    Raises:
        RequestInvalid: an option names a check that cannot be allowed, or states a minimum acceptance and the recipe
            does too.
        PublishRefused: a check fails without an allowance, or the request cannot be met whatever the Hub holds.
        NotACheckpoint, ReportInvalid, AcceptanceInvalid, RecipeInvalid: a file is missing, or does not match its
        schema.
    """
    if unknown := set(options.allow) - allowable():
        raise RequestInvalid(
            f"--allow {', '.join(sorted(unknown))}: these are not checks that can be allowed",
            fix=f"Allow one of {', '.join(sorted(allowable()))}.",
        )
    floor, recorded = stated_floor(options), read_floor(folder)
    if floor and recorded:
        raise RequestInvalid(
            f"the recipe in {folder} already states the minimum acceptance", fix="Remove --min-acceptance."
        )
    facts = read_facts(Path(options.facts)) if options.facts else recipe_facts(folder)
    refuse_contradictions(options)
    say("checking every byte")
    report = Path(options.report) if options.report else None
    figures = [Path(file) for file in options.acceptance]
    candidate = open_candidate(folder, report, figures, floor or recorded, facts, options.repo)
    return prepare(candidate, [Allowance(rule, why) for rule, why in options.allow.items()])


def prepare(candidate: Candidate, allowances: Sequence[Allowance] = ()) -> ApprovedRelease:
    """Run the release checks on a folder; PublishRefused if one fails without an allowance."""
    findings = judge(candidate)
    passed = let_pass(findings, allowances)
    files = uploads(candidate, record_exceptions(candidate.card, passed))
    return ApprovedRelease(files, checks_of(candidate), tuple(findings), tuple(passed))


def preview(release: ApprovedRelease, to: PublishOptions, say: Say) -> Published:
    """Return what publishing would do, after looking at the repository without changing anything."""
    with writing(to.repo, say) as remote:
        seen = remote.look()
        if seen is None:
            named = tuple(file.name for file in release.files)
            return _published(release, to, commit="", uploaded=named, deleted=(), private=True, done=())
        if (at := _tagged(remote, seen, release, to)) is not None:
            return _published(release, to, commit=at, uploaded=(), deleted=(), private=seen.private, done=())
        parent = seen.heads.get(to.branch, seen.heads[MAIN])
        listed = remote.list(parent)
        changed, gone = tuple(differing(release.files, listed)), tuple(surplus(release.files, listed))
        if changed or gone:
            refuse_moved(to, parent)
            refuse_replacing(to, parent, listed)
        commit = "" if changed or gone else parent
        return _published(release, to, commit=commit, uploaded=changed, deleted=gone, private=seen.private, done=())


def publish(release: ApprovedRelease, to: PublishOptions, say: Say) -> Published:
    """Publish a release that passed the checks, or resume an interrupted call.

    Raises:
        HubRefused: there is no token, or it is expired or not allowed to do this.
        HubMoved: the branch is not on the expected commit or moved in the meantime, or the tag has other files.
        PublishRefused: the repository is public and a private one was requested, or holds weights that kconv did not
            publish.
        ReadBackFailed: the Hub returns other bytes; then nothing is tagged or made public.
        HubUnreachable: there is no connection, or the Hub stays busy.
    """
    done: list[str] = []
    with writing(to.repo, say) as remote:
        seen = remote.look()
        if seen is None:
            say("creating the repository, private")
            remote.create()
            done.append("created the repository, private")
            seen = remote.look()
            if seen is None:
                raise HubRefused(
                    f"{to.repo} was created, but the Hub does not show it", fix="Check the token's access to it."
                )
        refuse_public(to, seen)
        uploaded, deleted = (), ()
        commit = _tagged(remote, seen, release, to)
        if commit is None:
            commit, uploaded, deleted = _commit(remote, seen, release, to, say)
            if uploaded or deleted:
                done.append("opened a pull request" if to.create_pr else "committed")
            _check_listing(remote, commit, release)
            read_back(to.repo, commit, release.files, say)
            done += ["read every file back"] if done or to.tag else []
            if to.tag:
                _tag(remote, release, to, commit, say)
                done.append(f"tagged {to.tag}")
        if to.public and seen.private:
            say("making the repository public")
            remote.make_public()
            done.append("made the repository public")
        after = remote.look()
        private = after.private if after else seen.private
    return _published(release, to, commit=commit, uploaded=uploaded, deleted=deleted, private=private, done=tuple(done))


def _commit(
    remote: Remote, seen: RepositoryState, release: ApprovedRelease, to: PublishOptions, say: Say
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the commit with the files, and what it had to change."""
    if to.branch not in seen.heads:
        remote.create_branch(to.branch, seen.heads[MAIN])
    parent = seen.heads.get(to.branch, seen.heads[MAIN])
    listed = remote.list(parent)
    changed, gone = tuple(differing(release.files, listed)), tuple(surplus(release.files, listed))
    if not changed and not gone:
        return parent, (), ()
    refuse_moved(to, parent)
    refuse_replacing(to, parent, listed)

    def landed() -> str | None:
        if to.create_pr:
            found = remote.find_pull(release.title)
            return found if found and same(release.files, remote.list(found)) else None
        now = remote.look()
        head = now.heads.get(to.branch) if now else None
        return head if head and head != parent and same(release.files, remote.list(head)) else None

    if to.create_pr and (found := landed()):
        return found, (), ()
    size = sum(file.size for file in release.files if file.name in changed)
    say(f"uploading {len(changed)} files, {size / 1e6:,.1f} MB")
    commit = remote.commit(
        [file for file in release.files if file.name in changed],
        gone,
        title=release.title,
        branch=to.branch,
        parent=parent,
        pull=to.create_pr,
        landed=landed,
    )
    return commit, changed, gone


def _check_listing(remote: Remote, commit: str, release: ApprovedRelease) -> None:
    listed = remote.list(commit)
    wrong = [*differing(release.files, listed), *surplus(release.files, listed)]
    if wrong:
        raise HubMoved(
            f"{remote.repo} does not list what was committed: {', '.join(wrong)}",
            where=commit,
            fix="Nothing was tagged. Find out who else writes to it, then run the command again.",
        )


def _tagged(remote: Remote, seen: RepositoryState, release: ApprovedRelease, to: PublishOptions) -> str | None:
    """Return the commit under the tag, if it exists with these files; a tag is never moved."""
    if not to.tag or to.tag not in seen.tags:
        return None
    commit = seen.tags[to.tag]
    if same(release.files, remote.list(commit)):
        return commit
    raise HubMoved(
        f"the tag {to.tag} of {to.repo} already exists with other files",
        where=commit,
        fix="Choose another tag; a published one is never moved.",
    )


def _tag(remote: Remote, release: ApprovedRelease, to: PublishOptions, commit: str, say: Say) -> None:
    say(f"tagging {to.tag}")
    remote.tag(to.tag, commit, release.title)
    now = remote.look()
    if now is None or now.tags.get(to.tag) != commit:
        raise HubMoved(
            f"the tag {to.tag} of {to.repo} was given to another commit in the meantime", where=commit,
            fix="Find out who else publishes there, and choose another tag.",
        )  # fmt: skip


def _published(release: ApprovedRelease, to: PublishOptions, **found) -> Published:
    files = {file.name: file.sha256 for file in release.files}
    return Published(to.repo, to.branch, to.tag, digest=release.digest, files=files, **found)


def refuse_contradictions(to: PublishOptions) -> None:
    """Raise PublishRefused for a publication that is impossible whatever the folder and the repository are."""
    if not _is_repository(to.repo):
        raise PublishRefused(
            f"{to.repo!r} is not a valid repository name",
            fix="Use org/name with letters, digits, '-', '_' and '.'; set a branch with --revision.",
        )
    if to.create_pr and (to.tag or to.branch != MAIN or to.public):
        raise PublishRefused(
            "a pull request targets the main branch, and cannot be tagged or made public before it is merged",
            fix="Remove the tag, the revision and --public; publish with the tag once it is merged.",
        )
    if to.private and to.public:
        raise PublishRefused("a repository cannot be both private and public", fix="Choose one of the two.")


def _is_repository(repo: str) -> bool:
    """Return whether the Hub accepts a name; it also accepts names without an owner, and adds the account's."""
    try:
        validate_repo_id(repo)
    except HFValidationError:
        return False
    return "/" in repo


def refuse_public(to: PublishOptions, seen: RepositoryState) -> None:
    """Raise PublishRefused if the repository is public and must not be."""
    if to.private and not seen.private:
        raise PublishRefused(
            f"{to.repo} is public, but --private was given",
            fix="Make it private in its settings, or remove --private.",
        )


def refuse_replacing(to: PublishOptions, parent: str, listed: Collection[str]) -> None:
    """Raise PublishRefused if a release would replace weights that kconv did not publish.

    One commit holds exactly a release's files, so a mistyped repository name would replace everything in it.
    """
    weights = sorted(name for name in listed if name.endswith(WEIGHTS))
    if weights and MANIFEST not in listed and to.expect_parent != parent:
        raise PublishRefused(
            f"{to.repo} holds weights that kconv did not publish and would replace, {weights[0]} among them",
            where=f"{to.repo}@{parent}",
            fix=f"Check the name of the repository; if it is right, pass --expect-parent {parent}.",
        )


def refuse_moved(to: PublishOptions, parent: str) -> None:
    """Raise HubMoved if the branch is not on the expected commit."""
    if to.expect_parent and parent != to.expect_parent:
        raise HubMoved(
            f"{to.repo} is at {parent[:10]}, not at {to.expect_parent[:10]}",
            where=to.branch,
            fix="Check what was committed in the meantime, then pass the new --expect-parent.",
        )
