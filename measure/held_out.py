"""Prompts that a head or a quantized target has not seen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.bytes import file_digest
from ..checkpoint.folder import read_json
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.source import Source
from ..errors import PromptsInvalid
from ..targets.prompts import KEPT, Prompt, digest_prompts, read_prompts, refuse_repeated
from ..targets.states import CONTENTS, RECORD
from ..targets.suites import SUITES, load_suite

DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{16}")
COMMIT = re.compile(r"[0-9a-f]{40}")
SHOWN = 3


@dataclass(frozen=True)
class HeldOut:
    """Held-out prompts as a target reads them.

    Attributes:
        file: the file's name, or the suite's name and its commit.
        revision: the suite's commit, or the file's sha256.
        tokens: token ids of each prompt's first turn, in the same order; empty for a prompt without tokens.
    """

    file: str
    revision: str
    prompts: tuple[Prompt, ...]
    tokens: tuple[list[int], ...]

    def describe(self) -> dict[str, object]:
        """Return their description for a report: digests rather than texts."""
        return {"file": self.file, "revision": self.revision, "sha256_of_turns": digest_prompts(self.prompts)}


def encode_held_out(name: str, target: Source, limit: int, *, trust_remote_code: bool = False) -> HeldOut:
    """Read held-out prompts, and encode their first turns as plain text; only the target's tokenizer is downloaded.

    Args:
        name: as in `read_held_out`.
        limit: texts are cut to this many tokens.

    Raises:
        PromptsInvalid, SuiteInvalid, HubRefused, HubUnreachable: see `read_held_out`; or no prompt has a token.
        TargetInvalid: the tokenizer cannot be loaded.
    """
    # Imported here: it needs transformers, which measuring a server does not.
    from ..targets.tokenizer import load_tokenizer

    prompts, revision = read_held_out(name)
    tokenizer = load_tokenizer(target.fetch_tokenizer(), trust_remote_code=trust_remote_code)
    tokens = tuple(tokenizer.encode(prompt.turns[0], limit) for prompt in prompts)
    if not any(tokens):
        raise PromptsInvalid("no prompt has any tokens", where=name, fix="Use prompts with text.")
    return HeldOut(Path(name).name, revision, prompts, tokens)


def read_held_out(name: str) -> tuple[tuple[Prompt, ...], str]:
    """Read held-out prompts.

    Args:
        name: a JSONL file, or a suite on the Hub at a commit, e.g. mt-bench@<40 hex digits>.

    Returns:
        The prompts, and their revision: a commit, or a file's sha256.

    Raises:
        PromptsInvalid: they cannot be read, one of a file repeats another, or a suite is named without a commit.
        SuiteInvalid, HubRefused, HubUnreachable: see `load_suite`.
    """
    suite, _, revision = name.partition("@")
    if suite in SUITES and not Path(name).exists():
        if not COMMIT.fullmatch(revision):
            raise PromptsInvalid(
                f"{name} is not pinned, so its prompts may change",
                fix=f"Pin a commit of {SUITES[suite].repo}: --prompts {suite}@<40 hex digits>.",
            )
        found = load_suite(suite, revision=revision)
        return found.prompts, found.revision
    file = Path(name)
    return refuse_repeated(read_prompts(file), file), f"sha256:{file_digest(file)}"


def refuse_overlap(digests: Iterable[str], folder: Path, calibrated_on: Iterable[Path] = ()) -> None:
    """Refuse prompts that a head or a target was trained or calibrated on: figures on them do not generalize.

    Args:
        digests: of the prompts, from `Prompt.digest`; "" if a prompt's text is unknown.
        folder: of the head or target, whose manifest may record its training and its calibration.
        calibrated_on: further records of its calibration: states.json, kconv.json, any JSON with prompts' digests, or
            folders with one of the first two.

    Raises:
        PromptsInvalid: a prompt is in such a record, or a record has no digests.
        NotACheckpoint, ConfigInvalid: a record cannot be read.
    """
    held_out = {digest[:KEPT] for digest in digests if digest}
    manifest = folder / MANIFEST
    for file in (*([manifest] if manifest.exists() else []), *find_records(calibrated_on)):
        value = read_json(file)
        own = file == manifest
        found = _digests([value.get(part) for part in ("training", "conversion", "spec")] if own else value)
        known = {digest[:KEPT] for digest in found}
        if not known and not own:
            raise PromptsInvalid(
                "this file records no prompts to compare with",
                where=file,
                fix="Pass the folder of states that the head was calibrated on.",
            )
        both = sorted(held_out & known)
        if both:
            raise PromptsInvalid(
                f"{len(both)} of {len(held_out)} prompts are among those that this was trained or calibrated on "
                f"({', '.join(digest[:12] for digest in both[:SHOWN])})",
                where=file,
                fix="Use other prompts.",
            )


def find_records(calibrated_on: Iterable[Path]) -> Iterator[Path]:
    """Find the records of a calibration; see `refuse_overlap`.

    Raises:
        PromptsInvalid: one does not exist, or is a folder without a record.
    """
    for path in calibrated_on:
        found = [path / name for name in (RECORD, MANIFEST) if (path / name).exists()] if path.is_dir() else [path]
        if not found or not path.exists():
            what = f"holds neither {RECORD} nor {MANIFEST}" if path.exists() else "does not exist"
            raise PromptsInvalid(f"{path} {what}", where=path, fix="Pass the record of the calibration.")
        for file in found:
            # A record of states lists its prompts in a file beside it.
            beside = file.with_name(CONTENTS)
            yield beside if file.name == RECORD and beside.exists() else file


def _digests(value: Any) -> Iterator[str]:
    """Yield the digests of prompts in a record: the values of "digest", and the lists of "prompts" or "digests"."""
    if isinstance(value, list):
        for item in value:
            yield from _digests(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key == "digest" and isinstance(item, str) and DIGEST.fullmatch(item):
                yield item
            elif key in ("prompts", "digests", "prompt_digests") and isinstance(item, list):
                yield from (text for text in item if isinstance(text, str) and DIGEST.fullmatch(text))
            yield from _digests(item)
