"""Changes what the Hub answers at random, for everything that reads from it or publishes to it.

Run as a program, in tests/: python -m support.fuzz_hub ROOT SEED EXAMPLES. It prints what `support.fuzz` prints, under
the same bounds. Weights that were changed on the way and are taken are a fault too, and so is anything under a tag that
is not the folder's, byte for byte.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kconv.cards.publish.floor import read_floor
from kconv.cards.publish.options import PublishOptions
from kconv.cards.publish.release import open_candidate
from kconv.cards.publish.run import prepare, preview, publish
from kconv.checkpoint.hub import fetch_dataset_file
from kconv.checkpoint.source import resolve
from kconv.errors import KconvError

from .fuzzing import change_bytes, change_json, run_examples
from .hub import Hub, client_env
from .hub import head as published_head
from .hub_routes import Call, Reply
from .releases import write_release

REPO, TOKEN = "org/head", "hf_" + "aVerySecretTokenOfNobody"
SHAPES = (
    b"null",
    b"{}",
    b"[]",
    b"[[]]",
    b"1",
    b'"x"',
    b"",
    b"<html>login</html>",
    b"[" * 4000,
    b'{"a": ' * 4000,
    b"\xff\xfe",
)
HEADERS = ("ETag", "X-Repo-Commit", "X-Linked-Size", "X-Linked-Etag", "Content-Type", "Location", "Link", "Retry-After")
WORDS = ("", "x", "-1", "99999999999999999999", "../../x", '"0"', "\x80", "https://127.0.0.1:1/x", "0" * 64, 'W/"a"')
STATUSES = (200, 201, 204, 206, 301, 400, 401, 403, 404, 409, 412, 416, 418, 429, 500, 503)


def spoil(reply: Reply, rng: random.Random) -> Reply:
    """Return an answer with its body, a header or its status changed."""
    kind = rng.random()
    if kind < 0.25:
        return replace(reply, body=rng.choice(SHAPES))
    if kind < 0.6:
        try:
            return replace(reply, body=change_json(reply.body, rng))
        except (ValueError, RecursionError):
            return replace(reply, body=change_bytes(reply.body, rng))
    if kind < 0.75:
        # Of the same length, which sizes do not tell.
        data = bytearray(reply.body or b"\0")
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return replace(reply, body=bytes(data))
    if kind < 0.9:
        name = rng.choice([*HEADERS, *reply.headers])
        value = rng.choice(WORDS).encode("ascii", "replace").decode()
        return replace(reply, headers={**reply.headers, name: value})
    return replace(reply, status=rng.choice(STATUSES))


def read_headers() -> None:
    resolve(REPO).open_headers()


def read_weights() -> dict[str, bytes]:
    folder = resolve(REPO).open_weights().folder
    return {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}


def read_tensor() -> None:
    resolve(REPO).open_tensors(["fc.weight"])


def read_license() -> None:
    resolve(f"{REPO}@main").fetch_license()


def read_data() -> None:
    fetch_dataset_file(REPO, "config.json", "main")


READS: tuple[Callable[[], dict[str, bytes] | None], ...] = (
    read_headers, read_weights, read_weights, read_tensor, read_license, read_data,
)  # fmt: skip


class Spoiled(Hub):
    """The stand-in, of whose answers some are spoiled."""

    rng: random.Random | None = None
    # The number of the answer from which on answers are spoiled, and how many.
    first, left = 0, 0

    def answer(self, call: Call) -> Reply:
        reply = super().answer(call)
        self.first -= 1
        if self.rng is None or self.first >= 0 or self.left <= 0:
            return reply
        self.left -= 1
        return spoil(reply, self.rng)


def forget() -> None:
    """Empty the Hub's cache: what one example downloaded, or was told of a commit, is not the next one's."""
    from huggingface_hub import _tree_cache, constants

    shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()


def run_one(hub: Spoiled, release: Path, work: Path, seed: str) -> tuple[str, str, str]:
    """Run one example; return what was changed, "taken", "refused" or "wrong", and what went wrong."""
    rng = random.Random(seed)
    shutil.copytree(release, work)
    hub.repos.clear(), hub.objects.clear(), hub.served.clear()
    forget()
    hub.rng, hub.first, hub.left = None, 0, 0
    publishing = rng.random() < 0.5
    files = published_head()
    kind = "the Hub's answers while publishing" if publishing else "the Hub's answers while reading"
    if not publishing:
        hub.commit(REPO, files)
    candidate = prepare(open_candidate(work, None, (), read_floor(work))) if publishing else None
    hub.rng, hub.first, hub.left = rng, rng.randrange(24 if publishing else 6), rng.choice((1, 1, 2, 50))
    try:
        if candidate is not None:
            (preview if rng.random() < 0.2 else publish)(candidate, PublishOptions(repo=REPO, tag="v1"), lambda _: None)
        elif (got := rng.choice(READS)()) and any(data != files[name] for name, data in got.items()):
            return kind, "wrong", "files were taken that are not the repository's"
        how, why = "taken", ""
    except KconvError as fault:
        how, why = (
            ("refused", "") if fault.fix and TOKEN not in str(fault) else ("wrong", f"no fix, or a token: {fault}")
        )
    except Exception as fault:
        how, why = "wrong", "".join(traceback.format_exception(fault))[-1500:]
    finally:
        hub.rng = None
    for held in hub.repos.values() if publishing else ():
        for commit in held.tags.values():
            kept = held.commits[commit]
            if any(kept.get(file.name) != file.read_bytes() for file in work.iterdir()):
                return kind, "wrong", "what stands under the tag is not the folder's"
    return kind, how, why


def main(root: Path, seed: str, examples: int) -> None:
    """Run examples, and print what they came to."""
    release, work, hub = write_release(root / "head"), root / "work", Spoiled()
    hub.tokens = {TOKEN}
    os.environ |= client_env(hub, root / "home") | {"HF_TOKEN": TOKEN, "KCONV_CACHE": str(root / "cache")}
    point_to(hub, root / "home")
    for number in (-2, -1):
        run_one(hub, release, work, f"warm{number}")
        shutil.rmtree(work)

    def run(name: str) -> tuple[str, str, str]:
        shutil.rmtree(root / "home", ignore_errors=True)
        return run_one(hub, release, work, name)

    run_examples(work, seed, examples, run)
    hub.close()


def point_to(hub: Hub, home: Path) -> None:
    """Point this process's client to the stand-in, and have it wait for nothing."""
    import time

    from huggingface_hub import close_session, constants

    patch = pytest.MonkeyPatch()
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_URL_HOSTS", frozenset({"127.0.0.1"}), raising=False)
    for name, value in {"HF_HOME": home, "HF_HUB_CACHE": home / "hub", "HF_TOKEN_PATH": home / "token"}.items():
        patch.setattr(constants, name, str(value))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 3)
    patch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 3)
    patch.setattr(time, "sleep", lambda seconds: None)
    close_session()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2], int(sys.argv[3]))
