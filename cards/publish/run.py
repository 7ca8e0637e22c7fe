"""A publication from end to end.

The gate; the repository, private where it is new; one commit; every byte read back; then the tag; and last, if that
is asked for, the repository is made public. So nothing that was not read back is ever found under the tag. Each step
looks first whether it was done before: a repeated call does nothing, and an interrupted one goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ...checkpoint.manifest import MANIFEST
from ...errors import HubMoved, HubRefused, PublishRefused
from ...validate.report import Finding
from ..facts import Facts
from .floor import RECIPE, Floor, read_floor, recipe_facts
from .gate import Allowance, allowable, judge, let_pass, record_exceptions
from .release import Candidate, Upload, digest_release, open_candidate, refuse_absent, uploads
from .remote import MAIN, Remote, RepositoryState, differing, read_back, same, surplus, writing

Say = Callable[[str], None]
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx")


@dataclass(frozen=True)
class Publication:
    """How a folder is to be published.

    Attributes:
        repo: org/name.
        tag: what to call this release; no tag if empty.
        revision: the branch to commit to.
        private: whether the repository must not be public.
        public: whether to make it public once everything was read back; as it is if neither is asked for.
        create_pr: whether to open a pull request in place of moving the branch.
        expect_parent: the commit that the branch must be on; any if empty.
    """

    repo: str
    tag: str = ""
    revision: str = MAIN
    private: bool = False
    public: bool = False
    create_pr: bool = False
    expect_parent: str = ""


@dataclass(frozen=True)
class ApprovedRelease:
    """A candidate that has passed the gate.

    Attributes:
        files: what is published.
        findings: everything that the checks found.
        passed: those that an allowance has let pass.
    """

    files: tuple[Upload, ...]
    findings: tuple[Finding, ...]
    passed: tuple[tuple[Finding, Allowance], ...]

    @property
    def digest(self) -> str:
        """16 hex digits that name these very files."""
        return digest_release(self.files)

    @property
    def title(self) -> str:
        """The commit's message, the same for the same files."""
        return f"kconv release {self.digest}"


@dataclass(frozen=True)
class Published:
    """What became of a publication; also what one would do, where nothing was done.

    Attributes:
        repo, revision, tag: where.
        commit: the commit that holds the files; empty where it is not made yet.
        digest: of the files.
        uploaded, deleted: names of files that the commit changes; none where it was there before.
        private: whether the repository is private now.
        done: what was done, in order; nothing where all was done before.
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


def publish_folder(
    folder: Path,
    to: Publication,
    *,
    report: Path | None = None,
    acceptance: Sequence[Path] = (),
    facts: Facts | None = None,
    floor: Floor | None = None,
    allowances: Sequence[Allowance] = (),
    dry_run: bool = False,
    say: Say = lambda _: None,
) -> tuple[ApprovedRelease, Published]:
    """Put a folder through the gate and publish it, or return what that would do.

    Args:
        folder: a head with its card and evidence.
        to: where to, and how.
        report: report.json that lies elsewhere, or its folder; the folder's own if None.
        acceptance: acceptance.json files that lie elsewhere; the folder's own if empty.
        facts: what no file says, for the license checks; those of the folder's recipe if None.
        floor: what the acceptance must reach; that of the folder's recipe if None.
        allowances: checks that are let pass, and why.
        dry_run: whether to look at the repository and change nothing.
        say: receives progress messages.

    Returns:
        What has passed the gate, and what became of it.

    Raises:
        PublishRefused: a check fails and no allowance lets it pass, an allowance names no check that can be let pass,
            or the floor differs from the recipe's; and as `publish`.
        HubMoved, HubRefused, HubUnreachable, ReadBackFailed: see `publish`.
        NotACheckpoint, ReportInvalid, AcceptanceInvalid, RecipeInvalid: a file is missing, or not of its schema.
    """
    refuse_contradictions(to)
    if unknown := sorted({allowance.rule for allowance in allowances} - allowable()):
        raise PublishRefused(
            f"{unknown[0]} is not a check that may be allowed",
            fix=f"Name one of {', '.join(sorted(allowable()))}.",
        )
    refuse_absent(folder)
    stated = read_floor(folder)
    if floor and stated and floor != stated:
        raise PublishRefused(
            "the recipe states another floor", where=folder / RECIPE, fix="Leave the floor out, or change the recipe."
        )
    say("checking every byte")
    candidate = open_candidate(folder, report, acceptance, floor or stated, facts or recipe_facts(folder))
    release = prepare(candidate, allowances)
    return release, (preview if dry_run else publish)(release, to, say)


def prepare(candidate: Candidate, allowances: Sequence[Allowance] = ()) -> ApprovedRelease:
    """Put a folder through the gate.

    Raises:
        PublishRefused: a check speaks against it, and no allowance lets that pass.
    """
    findings = judge(candidate)
    passed = let_pass(findings, allowances)
    files = uploads(candidate, record_exceptions(candidate.card, passed))
    return ApprovedRelease(files, tuple(findings), tuple(passed))


def preview(release: ApprovedRelease, to: Publication, say: Say) -> Published:
    """Return what publishing would do, having looked at the repository and changed nothing.

    Raises:
        HubMoved, HubRefused, HubUnreachable, PublishRefused: as `publish`.
    """
    refuse_contradictions(to)
    with writing(to.repo, say) as remote:
        seen = remote.look()
        if seen is None:
            named = tuple(file.name for file in release.files)
            return _published(release, to, commit="", uploaded=named, deleted=(), private=True, done=())
        if (at := _tagged(remote, seen, release, to)) is not None:
            return _published(release, to, commit=at, uploaded=(), deleted=(), private=seen.private, done=())
        parent = seen.heads.get(to.revision, seen.heads[MAIN])
        listed = remote.list(parent)
        changed, gone = tuple(differing(release.files, listed)), tuple(surplus(release.files, listed))
        if changed or gone:
            refuse_moved(to, parent)
            refuse_replacing(to, parent, listed)
        commit = "" if changed or gone else parent
        return _published(release, to, commit=commit, uploaded=changed, deleted=gone, private=seen.private, done=())


def publish(release: ApprovedRelease, to: Publication, say: Say) -> Published:
    """Publish what has passed the gate, or go on where an interrupted call stopped.

    Args:
        release: what `prepare` returned.
        to: where to, and how.
        say: told what is going on.

    Raises:
        HubRefused: no token, an expired one, or one that may not do this.
        HubMoved: the branch is not on the expected commit, moved on meanwhile, or the tag holds other files.
        PublishRefused: the repository is public and a private one was asked for, or holds weights that kconv did not
            publish.
        ReadBackFailed: the Hub gives back other bytes; nothing is tagged then, nor made public.
        HubUnreachable: no connection, or a Hub that stays busy.
    """
    refuse_contradictions(to)
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
    remote: Remote, seen: RepositoryState, release: ApprovedRelease, to: Publication, say: Say
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the commit that holds the files, with what it had to change."""
    if to.revision not in seen.heads:
        remote.create_branch(to.revision, seen.heads[MAIN])
    parent = seen.heads.get(to.revision, seen.heads[MAIN])
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
        head = now.heads.get(to.revision) if now else None
        return head if head and head != parent and same(release.files, remote.list(head)) else None

    if to.create_pr and (found := landed()):
        return found, (), ()
    size = sum(file.size for file in release.files if file.name in changed)
    say(f"uploading {len(changed)} files, {size / 1e6:,.1f} MB")
    commit = remote.commit(
        [file for file in release.files if file.name in changed],
        gone,
        title=release.title,
        branch=to.revision,
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


def _tagged(remote: Remote, seen: RepositoryState, release: ApprovedRelease, to: Publication) -> str | None:
    """Return the commit under the tag, if it is there with these files; a tag is never moved."""
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


def _tag(remote: Remote, release: ApprovedRelease, to: Publication, commit: str, say: Say) -> None:
    say(f"tagging {to.tag}")
    remote.tag(to.tag, commit, release.title)
    now = remote.look()
    if now is None or now.tags.get(to.tag) != commit:
        raise HubMoved(
            f"the tag {to.tag} of {to.repo} was given to another commit meanwhile", where=commit,
            fix="Find out who else publishes there, and choose another tag.",
        )  # fmt: skip


def _published(release: ApprovedRelease, to: Publication, **found) -> Published:
    files = {file.name: file.sha256 for file in release.files}
    return Published(to.repo, to.revision, to.tag, digest=release.digest, files=files, **found)


def refuse_contradictions(to: Publication) -> None:
    """Raise PublishRefused for a publication that cannot be, whatever the folder and the repository are."""
    if not _is_repository(to.repo):
        raise PublishRefused(
            f"{to.repo!r} is not a valid repository name",
            fix="Name it org/name, of letters, digits, '-', '_' and '.'; a branch is given with --revision.",
        )
    if to.create_pr and (to.tag or to.revision != MAIN or to.public):
        raise PublishRefused(
            "a pull request is against the main branch, and is neither tagged nor made public before it is merged",
            fix="Leave out the tag, the revision and --public; publish with the tag once it is merged.",
        )
    if to.private and to.public:
        raise PublishRefused("a repository cannot be both private and public", fix="Choose one of the two.")


def _is_repository(repo: str) -> bool:
    """Say whether the Hub takes a name; it takes some without an owner too, of which it makes the account's own."""
    try:
        validate_repo_id(repo)
    except HFValidationError:
        return False
    return "/" in repo


def refuse_public(to: Publication, seen: RepositoryState) -> None:
    """Raise PublishRefused where the repository is public and must not be."""
    if to.private and not seen.private:
        raise PublishRefused(
            f"{to.repo} is public, but --private was given",
            fix="Make it private in its settings, or leave out --private.",
        )


def refuse_replacing(to: Publication, parent: str, listed: Collection[str]) -> None:
    """Raise PublishRefused where a release would take the place of weights that kconv did not publish.

    One commit holds exactly a release's files, so a repository's name that was mistyped would lose all that it shows.

    Args:
        to: how to publish.
        parent: the commit that the branch is on.
        listed: the files in it.
    """
    weights = sorted(name for name in listed if name.endswith(WEIGHTS))
    if weights and MANIFEST not in listed and to.expect_parent != parent:
        raise PublishRefused(
            f"{to.repo} holds weights that kconv did not publish, {weights[0]} among them; they would be replaced",
            where=f"{to.repo}@{parent}",
            fix=f"Check the name of the repository; if it is the right one, give --expect-parent {parent}.",
        )


def refuse_moved(to: Publication, parent: str) -> None:
    """Raise HubMoved where the branch is not on the commit that is expected."""
    if to.expect_parent and parent != to.expect_parent:
        raise HubMoved(
            f"{to.repo} is at {parent[:10]}, not at {to.expect_parent[:10]}",
            where=to.revision,
            fix="Check what was committed meanwhile, then give the new --expect-parent.",
        )
