"""What each of several processes reads of a target and its states, as the kernel counts it: run under torchrun."""

import json
import os
import re
import sys
from pathlib import Path

from kconv.targets.config import read_target_config
from kconv.targets.tokenizer import load_tokenizer
from kconv.train.job import offline_job
from kconv.train.run import train


def read_so_far() -> int:
    """Return what this process has asked the kernel to read, whatever the page cache held."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # pyright: ignore


def main(target: Path, states: Path, values: Path, folder: Path) -> None:
    config, tokenizer = read_target_config(target), load_tokenizer(target)
    # Once before, for what libraries read when they are first used.
    for name in ("first", "second"):
        counts = [read_so_far()]
        job = offline_job(target, config, tokenizer, json.loads(values.read_text()), states, None)
        counts.append(read_so_far())
        train(job, folder / name, progress=lambda *_: counts.append(read_so_far()))  # noqa: B023
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps([later - counts[0] for later in counts]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
