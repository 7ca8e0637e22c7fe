"""Run every command of docs/tutorial.md in an empty folder, and write its output below it.

    scripts/docs tutorial            run, and write the page
    scripts/docs tutorial --check    run, and exit 1 where the page says something else

A command is a line of a `console` block that begins with `$ `, followed by its output; for a command that fails,
also its stderr and exit code. Numbers with a decimal point or an exponent come from training, and differ from
processor to processor: they only have to be of similar size. Everything else must be equal.
"""

import argparse
import difflib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
FENCE, PROMPT = "```", "$ "
MEASURED = re.compile(r"[-+]?\d[\d,]*(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+|(?= ?%))")
# Which tensor is rounded worst follows from training too.
WORST = re.compile(r"\(model\.layers\.\d+\.\S+\.weight\)")
# The standard error of a few texts is an estimate too: on another machine it may be twice as large.
ERROR, SPREAD = re.compile(r"(?<=± )[\d.]+"), 0.7
# Rounding errors are of an order of magnitude, and no more than that.
NOISE, NEAR = 1e-3, 0.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page differs")
    check = parser.parse_args().check
    old = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        new = played(old, Path(folder))
    if not check:
        PAGE.write_text(new)
        return 0
    apart = differences(old.splitlines(), new.splitlines())
    print("\n".join(apart))
    return 1 if apart else 0


def played(page: str, folder: Path) -> str:
    """Return the page with what its commands print now, run one after the other in a folder.

    A command may fail only where the page says so; else something is broken, and the page is not to learn it.
    """
    lines: list[str] = []
    old = page.splitlines()
    inside = False
    for at, line in enumerate(old):
        if line.startswith(FENCE):
            inside = line == f"{FENCE}console"
            lines.append(line)
        elif not inside:
            lines.append(line)
        elif line.startswith(PROMPT):
            print(line, file=sys.stderr)
            said = run(line.removeprefix(PROMPT), folder)
            below = itertools.takewhile(lambda later: not later.startswith((PROMPT, FENCE)), old[at + 1 :])
            if failures(said) != failures(below):
                sys.exit("\n".join(["this did not end as the page says:", line, *said]))
            lines += [line, *said]
    return "\n".join(lines) + "\n"


def failures(lines: Iterable[str]) -> list[str]:
    """Return the lines that state an exit code."""
    return [line for line in lines if re.fullmatch(r"\[exit code \d+\]", line)]


def run(command: str, folder: Path) -> list[str]:
    """Return what a shell command prints where lines are 80 columns wide."""
    own = {"COLUMNS": "80", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    own["PATH"] = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    own["KCONV_CACHE"] = os.environ.get("KCONV_CACHE", str(ROOT / ".cache"))
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=os.environ | own, capture_output=True, text=True, check=False
    )
    failed = [*done.stderr.splitlines(), f"[exit code {done.returncode}]"] if done.returncode else []
    return [line.rstrip() for line in done.stdout.splitlines() + failed]


def differences(old: list[str], new: list[str]) -> list[str]:
    """Return a diff of the lines that do not agree; empty where all do."""
    if len(old) == len(new) and all(map(agree, old, new)):
        return []
    return list(difflib.unified_diff(old, new, "docs/tutorial.md", "what is printed now", lineterm=""))


def agree(old: str, new: str) -> bool:
    """Say whether two lines are equal, but for how exactly measured numbers are."""
    figures = (MEASURED.findall(ERROR.sub("", line)) for line in (old, new))
    errors = (ERROR.findall(line) for line in (old, new))
    if words(old) != words(new):
        return False
    return all(map(near, *figures)) and all(near(a, b, SPREAD) for a, b in zip(*errors, strict=True))


def words(line: str) -> list[str]:
    """Return a line's words, with a mark for each measured number; the padding of tables follows from the numbers."""
    return re.sub(r"─+|━+", "-", MEASURED.sub("#", WORST.sub("#", line))).split()


def near(old: str, new: str, apart: float = NEAR) -> bool:
    a, b = (float(number.strip("%").replace(",", "")) for number in (old, new))
    # A standard error of 0.002 may be 0.003 elsewhere: its last digit is rounded.
    if "e" not in old + new and abs(a - b) < 1.5 * 10.0 ** -len(new.partition(".")[2]) and "." in old and "." in new:
        return True
    return abs(a - b) <= apart * max(abs(a), abs(b)) or max(abs(a), abs(b)) < NOISE


if __name__ == "__main__":
    sys.exit(main())
