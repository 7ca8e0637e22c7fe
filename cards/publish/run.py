"""A publication from end to end.

The gate; the repository, private where it is new; one commit; every byte read back; then the tag; and last, if that
is asked for, the repository is made public. So nothing that was not read back is ever found under the tag. Each step
looks first whether it was done before: a repeated call does nothing, and an interrupted one goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...errors import HubMoved, HubRefused
from ...validate.report import Finding
from .allow import Allowance, record_exceptions
from .gate import judge, let_pass
from .readback import differing, read_back, same, surplus
from .release import Candidate, Upload, digest_release, uploads
from .remote import Remote, Seen, writing
from .wish import MAIN, Wish, refuse_contradictions, refuse_moved, refuse_public, refuse_replacing

Say = Callable[[str], None]


@dataclass(frozen=True)
class Release:
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


def prepare(candidate: Candidate, allowances: Sequence[Allowance] = ()) -> Release:
    """Put a folder through the gate.

    Raises:
        PublishRefused: a check speaks against it, and no allowance lets that pass.
    """
    findings = judge(candidate)
    passed = let_pass(findings, allowances)
    files = uploads(candidate, record_exceptions(candidate.card, passed))
    return Release(files, tuple(findings), tuple(passed))


def preview(release: Release, wish: Wish, say: Say) -> Published:
    """Return what publishing would do, having looked at the repository and changed nothing.

    Raises:
        HubMoved, HubRefused, HubUnreachable, PublishRefused: as `publish`.
    """
    refuse_contradictions(wish)
    with writing(wish.repo, say) as remote:
        seen = remote.look()
        if seen is None:
            named = tuple(file.name for file in release.files)
            return _published(release, wish, commit="", uploaded=named, deleted=(), private=True, done=())
        if (at := _tagged(remote, seen, release, wish)) is not None:
            return _published(release, wish, commit=at, uploaded=(), deleted=(), private=seen.private, done=())
        parent = seen.heads.get(wish.revision, seen.heads[MAIN])
        listed = remote.list(parent)
        changed, gone = tuple(differing(release.files, listed)), tuple(surplus(release.files, listed))
        if changed or gone:
            refuse_moved(wish, parent)
            refuse_replacing(wish, parent, listed)
        commit = "" if changed or gone else parent
        return _published(release, wish, commit=commit, uploaded=changed, deleted=gone, private=seen.private, done=())


def publish(release: Release, wish: Wish, say: Say) -> Published:
    """Publish what has passed the gate, or go on where an interrupted call stopped.

    Args:
        release: what `prepare` returned.
        wish: where to, and how.
        say: told what is going on.

    Raises:
        HubRefused: no token, an expired one, or one that may not do this.
        HubMoved: the branch is not on the expected commit, moved on meanwhile, or the tag holds other files.
        PublishRefused: the repository is public and a private one was asked for, or holds weights that kconv did not
            publish.
        ReadBackFailed: the Hub gives back other bytes; nothing is tagged then, nor made public.
        HubUnreachable: no connection, or a Hub that stays busy.
    """
    refuse_contradictions(wish)
    done: list[str] = []
    with writing(wish.repo, say) as remote:
        seen = remote.look()
        if seen is None:
            say("creating the repository, private")
            remote.create()
            done.append("created the repository, private")
            seen = remote.look()
            if seen is None:
                raise HubRefused(f"{wish.repo} was created and is not shown", fix="Check the token's access to it.")
        refuse_public(wish, seen)
        uploaded, deleted = (), ()
        commit = _tagged(remote, seen, release, wish)
        if commit is None:
            commit, uploaded, deleted = _commit(remote, seen, release, wish, say)
            if uploaded or deleted:
                done.append("opened a pull request" if wish.create_pr else "committed")
            _check_listing(remote, commit, release)
            read_back(wish.repo, commit, release.files, say)
            done += ["read every file back"] if done or wish.tag else []
            if wish.tag:
                _tag(remote, release, wish, commit, say)
                done.append(f"tagged {wish.tag}")
        if wish.public and seen.private:
            say("making the repository public")
            remote.make_public()
            done.append("made the repository public")
        after = remote.look()
        private = after.private if after else seen.private
    return _published(
        release, wish, commit=commit, uploaded=uploaded, deleted=deleted, private=private, done=tuple(done)
    )


def _commit(
    remote: Remote, seen: Seen, release: Release, wish: Wish, say: Say
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the commit that holds the files, with what it had to change."""
    if wish.revision not in seen.heads:
        remote.create_branch(wish.revision, seen.heads[MAIN])
    parent = seen.heads.get(wish.revision, seen.heads[MAIN])
    listed = remote.list(parent)
    changed, gone = tuple(differing(release.files, listed)), tuple(surplus(release.files, listed))
    if not changed and not gone:
        return parent, (), ()
    refuse_moved(wish, parent)
    refuse_replacing(wish, parent, listed)

    def landed() -> str | None:
        if wish.create_pr:
            found = remote.find_pull(release.title)
            return found if found and same(release.files, remote.list(found)) else None
        now = remote.look()
        head = now.heads.get(wish.revision) if now else None
        return head if head and head != parent and same(release.files, remote.list(head)) else None

    if wish.create_pr and (found := landed()):
        return found, (), ()
    size = sum(file.size for file in release.files if file.name in changed)
    say(f"uploading {len(changed)} files, {size / 1e6:,.1f} MB")
    commit = remote.commit(
        [file for file in release.files if file.name in changed],
        gone,
        title=release.title,
        branch=wish.revision,
        parent=parent,
        pull=wish.create_pr,
        landed=landed,
    )
    return commit, changed, gone


def _check_listing(remote: Remote, commit: str, release: Release) -> None:
    listed = remote.list(commit)
    wrong = [*differing(release.files, listed), *surplus(release.files, listed)]
    if wrong:
        raise HubMoved(
            f"{remote.repo} does not list what was committed: {', '.join(wrong)}",
            where=commit,
            fix="Nothing was tagged. See who else writes to it, then run the command again.",
        )


def _tagged(remote: Remote, seen: Seen, release: Release, wish: Wish) -> str | None:
    """Return the commit under the tag, if it is there with these files; a tag is never moved."""
    if not wish.tag or wish.tag not in seen.tags:
        return None
    commit = seen.tags[wish.tag]
    if same(release.files, remote.list(commit)):
        return commit
    raise HubMoved(
        f"the tag {wish.tag} of {wish.repo} is there already, with other files",
        where=commit,
        fix="Choose another tag; a published one is never moved.",
    )


def _tag(remote: Remote, release: Release, wish: Wish, commit: str, say: Say) -> None:
    say(f"tagging {wish.tag}")
    remote.tag(wish.tag, commit, release.title)
    now = remote.look()
    if now is None or now.tags.get(wish.tag) != commit:
        raise HubMoved(
            f"the tag {wish.tag} of {wish.repo} was given to another commit meanwhile", where=commit,
            fix="See who else publishes there, and choose another tag.",
        )  # fmt: skip


def _published(release: Release, wish: Wish, **found) -> Published:
    files = {file.name: file.sha256 for file in release.files}
    return Published(wish.repo, wish.revision, wish.tag, digest=release.digest, files=files, **found)
