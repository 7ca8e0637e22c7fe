"""Write the address of kconv's repository into every place that needs it. Run it once, when the repository has one.

scripts/docs address https://github.com/ORG/NAME
"""

import argparse
import re
import sys
from pathlib import Path

# What stands for the address until it is known, in workflows that name kconv by its repository.
UNKNOWN = "your-org/kconv"
FIRST_BLOCK = "```sh\n"


def written(name: str, text: str, url: str) -> str:
    """Return a file's text with the address in it; the same text if it is there already."""
    repository = url.removeprefix("https://github.com/")
    if url in text or (UNKNOWN not in text and repository in text):
        return text
    match name.rpartition("/")[2]:
        case "pyproject.toml":
            urls = f'Repository = "{url}"\nIssues = "{url}/issues"\nChangelog = "{url}/blob/main/CHANGELOG.md"\n'
            return text.replace("[project.scripts]\n", f"[project.urls]\n{urls}\n[project.scripts]\n", 1)
        case "mkdocs.yml":
            return text.replace("docs_dir:", f"repo_url: {url}\ndocs_dir:", 1)
        case "CITATION.cff":
            return text.replace("authors:", f'repository-code: "{url}"\nauthors:', 1)
        case "README.md":
            clone = f"git clone {url} && cd {repository.rpartition('/')[2]}\n"
            return text.replace(FIRST_BLOCK, FIRST_BLOCK + clone, 1)
    return text.replace(UNKNOWN, repository)


PLACES = (
    "pyproject.toml", "mkdocs.yml", "CITATION.cff", "README.md", "examples/workflows/check.yml",
    "examples/workflows/release.yml",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="https://github.com/ORG/NAME")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2], help="the repository")
    given = parser.parse_args()
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", given.url):
        sys.exit(f"error: {given.url} is not of the form https://github.com/ORG/NAME")
    for name in PLACES:
        file = given.root / name
        text = file.read_text()
        new = written(name, text, given.url)
        if new != text:
            file.write_text(new)
        if new == text and given.url not in text and given.url.removeprefix("https://github.com/") not in text:
            sys.exit(f"error: {name} has no place for the address")
        print(f"{name} {'written' if new != text else 'has it'}")


if __name__ == "__main__":
    main()
