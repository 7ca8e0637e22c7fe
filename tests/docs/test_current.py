"""The pages: those that are made of the code are current, and every link leads somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kconv.cli import main
from kconv.convert.layouts import LAYOUTS
from kconv.validate.rules.table import all_rules

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"(?<!\\)\]\(<?([^)#\s>]+)(?:#[^)\s>]*)?>?\)")


def test_the_reference_is_current():
    script = [sys.executable, ROOT / "scripts" / "docs-reference", "--check"]
    ran = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, ""), f"run scripts/docs: {ran.stdout}{ran.stderr}"


def test_the_readmes_figures_are_those_of_the_benchmarks():
    script = [sys.executable, ROOT / "scripts" / "docs-figures", "--check"]
    ran = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, ""), f"run scripts/docs: {ran.stdout}{ran.stderr}"


@pytest.mark.slow
def test_the_tutorial_prints_what_it_says():
    script = [sys.executable, ROOT / "scripts" / "docs-tutorial", "--check"]
    ran = subprocess.run(script, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"run scripts/docs-tutorial: {ran.stdout}{ran.stderr}"


def test_the_reference_has_everything():
    reference = {page.stem: page.read_text() for page in (DOCS / "reference").glob("*.md")}
    assert all(f"### kconv {name}\n" in reference["cli"] for name in main.commands)
    assert all(f"### {rule.id} {rule.name}\n" in reference["rules"] for rule in all_rules().values())
    assert all(f"| `{layout.name}` |" in reference["layouts"] for layout in LAYOUTS)
    names = {f"`{row.name}`" for layout in LAYOUTS for row in layout.rows}
    assert not {name for name in names if name not in reference["layouts"]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    # Cards stand in their own repository on the Hub, beside a LICENSE that is not here.
    inside = [link for link in LINK.findall(page.read_text()) if ":" not in link and link != "LICENSE"]
    assert not [link for link in inside if not (page.parent / link).exists()]


def entries(nav):
    for entry in nav:
        for target in entry.values() if isinstance(entry, dict) else (entry,):
            yield from entries(target) if isinstance(target, list) else (target,)


def test_the_navigation_is_whole():
    pages = set(entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    cards = {page for page in there if re.fullmatch(r"cards/.+/README\.md", page)}
    assert pages == there - cards
