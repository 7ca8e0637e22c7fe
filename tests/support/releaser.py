"""Carries a release out again and again, each time in a process of its own. Run as a program; the tests kill those.

Usage: python releaser.py RECIPE ROOT. For each line on stdin it forks, prints the child's id, and then the child's
exit status, which is 0 where the release was carried out. It loads its libraries once.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from kconv.operations import OPERATIONS, load
from kconv.pipeline.recipe import read_release
from kconv.pipeline.run import Selection, run_release


def main(recipe: Path, root: Path) -> None:
    """Carry the release out once for each line on stdin."""
    release, text = read_release(recipe)
    for operation in OPERATIONS:  # loaded before the forks
        load(operation)
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                run_release(release, text, root, Selection(), lambda _: None, lambda _: None)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
