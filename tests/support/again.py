"""Publishes, or carries a release out, again and again, each time in a process of its own. Run as a program.

Usage: python again.py publish FOLDER REPO TAG
       python again.py release RECIPE ROOT

For each line on stdin it forks, prints the child's id, and then the child's exit status, which is 0 where the work was
done. It loads its libraries once; the tests kill the children.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from kconv.cards.publish.floor import read_floor
from kconv.cards.publish.options import PublishOptions
from kconv.cards.publish.release import Candidate, open_candidate
from kconv.cards.publish.run import prepare as prepare_publication
from kconv.cards.publish.run import publish as run_publish
from kconv.operations import OPERATIONS, load
from kconv.pipeline.prepare import Selection, prepare
from kconv.pipeline.recipe import read_release
from kconv.pipeline.run import run_release


def again(work: Callable[[], object]) -> None:
    """Do the work once for each line on stdin."""
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                # Held until it exits, which removes nothing that is left then.
                _held = work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def publish(folder: str, repo: str, tag: str) -> None:
    def work() -> Candidate:
        candidate = open_candidate(Path(folder), None, (), read_floor(Path(folder)))
        run_publish(prepare_publication(candidate), PublishOptions(repo=repo, tag=tag, public=True), lambda _: None)
        return candidate

    again(work)


def release(recipe: str, root: str) -> None:
    found, text = read_release(Path(recipe))
    for operation in OPERATIONS:  # loaded before the forks
        load(operation)
    again(lambda: run_release(prepare(found, text, Path(root), Selection()), lambda _: None, lambda _: None))


if __name__ == "__main__":
    {"publish": publish, "release": release}[sys.argv[1]](*sys.argv[2:])
