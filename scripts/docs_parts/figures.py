"""Write the figures of README.md from docs/evidence/benchmarks.md, whose sections the benchmarks write.

    scripts/docs figures            write them
    scripts/docs figures --check    exit 1 where README.md says something else

A figure whose section is missing or has another form is an error.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "evidence" / "benchmarks.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
# A section's name, what is taken from it, and the sentence it makes.
FIGURES = (
    (
        "convert",
        r"(?P<size>[\d.]+ GB).*?\| warm \|.*?\*\*(?P<warm>[\d.]+)\*\*.*?(?P<peak>\d+ MiB)"
        r".*?\| cold \|.*?\*\*(?P<cold>[\d.]+)\*\*",
        "`kconv to-vllm` converts a synthetic {size} head in {warm} times the time of `cp` ({cold} from a cold cache), "
        "with {peak} of memory.",
    ),
    (
        "validate",
        r"(?P<tensors>[\d,]+) tensors.*?seem to hold (?P<size>\d+ GB).*?: (?P<wall>[\d.]+ s)",
        "`kconv validate --headers-only` checks a target of {size} and {tensors} tensors in {wall}.",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something would change")
    check = parser.parse_args().check
    old = README.read_text()
    before, _, rest = old.partition(BEGIN)
    new = "\n".join([before + BEGIN, *sentences(PAGE.read_text()), END]) + rest.partition(END)[2]
    if new == old:
        return 0
    print(f"README.md {'is not current' if check else 'written'}")
    if not check:
        README.write_text(new)
    return 1 if check else 0


def sentences(page: str) -> list[str]:
    """Return the figures' sentences, as a list in Markdown."""
    return [f"- {sentence.format(**taken(page, name, pattern))}" for name, pattern, sentence in FIGURES]


def taken(page: str, name: str, pattern: str) -> dict[str, str]:
    """Return what a pattern takes from a section of the page."""
    section = page.partition(f"<!-- bench-{name}: begin -->")[2].partition(f"<!-- bench-{name}: end -->")[0]
    found = re.search(pattern, section, re.DOTALL)
    if found is None:
        sys.exit(f"error: docs/evidence/benchmarks.md has no such figures of {name}: run scripts/bench --only {name}")
    return found.groupdict()


if __name__ == "__main__":
    sys.exit(main())
