"""Publishes a folder again and again, each time in a process of its own. Run as a program; the tests kill those.

Usage: python publisher.py FOLDER REPO TAG. For each line on stdin it forks, prints the child's id, and then the
child's exit status, which is 0 where it has published and 1 where it said a named fault. It loads its libraries once.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from kconv.cards.publish.floor import read_floor
from kconv.cards.publish.options import PublishOptions
from kconv.cards.publish.release import open_candidate
from kconv.cards.publish.run import prepare, publish
from kconv.errors import KconvError


def main(folder: Path, repo: str, tag: str) -> None:
    """Publish once for each line on stdin."""
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                candidate = open_candidate(folder, None, (), read_floor(folder))
                publish(prepare(candidate), PublishOptions(repo=repo, tag=tag, public=True), lambda _: None)
            except KconvError as fault:
                print(fault, file=sys.stderr, flush=True)
                os._exit(1)
            except BaseException:
                traceback.print_exc()
                os._exit(2)
            os._exit(0)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
