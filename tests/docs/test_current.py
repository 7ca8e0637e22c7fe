"""The pages: those that are made of the code are current, and every link leads somewhere."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from kconv.cli import main
from kconv.engines import LAYOUTS
from kconv.validate.rules.table import all_rules

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
ROOMS = {folder.parent.name for folder in ROOT.glob("*/__init__.py")} | {"docs", "examples", "scripts", "tests"}
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\\)\]\(<?([^)#\s>]*)(?:#([^)\s>]*))?>?\)")


@pytest.mark.parametrize("part", ["reference", "stub"])
def test_what_is_made_of_the_operations_is_current(part):
    script = [ROOT / "scripts" / "docs", part, "--check"]
    ran = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, ""), f"run scripts/docs: {ran.stdout}{ran.stderr}"


def test_the_page_of_witnesses_says_what_was_measured():
    script = [ROOT / "scripts" / "docs", "witnesses", "--check"]
    assert subprocess.run(script, check=False).returncode == 0, "run scripts/docs"


def test_the_readmes_figures_are_those_of_the_benchmarks():
    script = [ROOT / "scripts" / "docs", "figures", "--check"]
    ran = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, ""), f"run scripts/docs: {ran.stdout}{ran.stderr}"


def test_the_readme_is_short_and_says_first_what_it_is_for():
    text = (ROOT / "README.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(re.findall(r"\S*\w\S*", text)) <= 900
    first, *_ = [line for line in text.splitlines()[1:] if line]
    assert all(word in first for word in re.findall(r"[A-Z][\w-]*[A-Z0-9]\w*", project["description"])), first


def test_the_page_of_the_cluster_follows_from_the_benchmarks():
    script = [ROOT / "scripts" / "docs", "cluster", "--check"]
    ran = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, ""), f"run scripts/docs: {ran.stdout}{ran.stderr}"


def test_the_benchmarks_repeat_other_pages_as_they_are():
    script = [sys.executable, ROOT / "scripts" / "bench", "--check"]
    ran = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, ""), f"run scripts/docs: {ran.stdout}{ran.stderr}"


def test_the_page_of_training_says_what_its_script_writes_around_its_figures():
    [written] = re.findall(
        r'PAGE_TEXT = """(.*?)"""', (ROOT / "scripts" / "docs_parts" / "train.py").read_text(), re.DOTALL
    )
    around = [re.escape(part) for part in re.split(r"\{[^}]*\}", written)]
    assert re.fullmatch(".*".join(around), (DOCS / "train.md").read_text(), re.DOTALL), "run scripts/docs train"


@pytest.mark.slow
@pytest.mark.demo
def test_the_tutorial_prints_what_it_says(demo_lock):
    script = [ROOT / "scripts" / "docs", "tutorial", "--check"]
    with demo_lock:
        ran = subprocess.run(script, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"run scripts/docs tutorial: {ran.stdout}{ran.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_command_prints_is_printed_in_the_tutorial(page):
    # There scripts/docs tutorial runs it.
    made = (DOCS / "tutorial.md").read_text()
    assert [block for block in CONSOLE.findall(page.read_text()) if block not in made] == []


def test_the_reference_has_everything():
    reference = {page.stem: page.read_text() for page in (DOCS / "reference").glob("*.md")}
    assert all(f"### kconv {name}\n" in reference["cli"] for name in main.commands)
    assert all(f"### {rule.id} {rule.name}\n" in reference["rules"] for rule in all_rules().values())
    assert all(f"| `{layout.name}` |" in reference["layouts"] for layout in LAYOUTS)
    assert tensor_names(reference["layouts"]) == {row.name for layout in LAYOUTS for row in layout.rows}


def tensor_names(page: str) -> set[str]:
    """Return the names on the page of layouts: each form of a name, with each part that its `*` stands for."""
    names: set[str] = set()
    [part] = re.findall(r"^## Tensors\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    for forms, slots in re.findall(r"((?:^`.*\n)+)\n((?:^- .*\n)+)", part, re.MULTILINE):
        for form in re.findall(r"^`(.*?)`", forms, re.MULTILINE):
            names |= {form.replace("*", own) for own in re.findall(r": `(\S+)`$", slots, re.MULTILINE)}
    return names


def anchors(page: Path) -> set[str]:
    """Return what a page's headings are linked by."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def leads_somewhere(page: Path, path: str, anchor: str) -> bool:
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    # Cards stand in their own repository on the Hub, beside a LICENSE that is not here.
    inside = [link for link in LINK.findall(page.read_text()) if ":" not in link[0] and link[0] != "LICENSE"]
    assert [link for link in inside if not leads_somewhere(page, *link)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_rules_that_a_page_names_exist(page):
    assert set(re.findall(r"\bK\d{3}\b", page.read_text())) <= all_rules().keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_files_that_a_page_names_exist(page):
    named = {name for name in re.findall(r"`([\w.-]+/[\w./*-]*)`", page.read_text()) if name.split("/")[0] in ROOMS}
    assert {name for name in named if not list(ROOT.glob(name))} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_by_name_have_an_address(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)
    assert set(re.findall(r"\]\[([^\]]+)\]", text)) == set(re.findall(r"^\[([^\]]+)\]: \S+$", text, re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_into_code_are_pinned(page):
    # A branch moves on, and the line with it.
    assert re.findall(r"https://github\.com/[\w.-]+/[\w.-]+/blob/(?:main|master)/\S+", page.read_text()) == []


@pytest.mark.parametrize(
    "path, anchor, leads",
    [
        ("how/captured-layers.md", "where-engines-look", True),
        ("how/captured-layers.md", "where-nobody-looks", False),
        ("how/captured-layers.md", "", True),
        ("how/gone.md", "", False),
        ("", "kconv", True),
    ],
)
def test_a_link_that_leads_nowhere_is_seen(path, anchor, leads):
    assert leads_somewhere(DOCS / "index.md", path, anchor) is leads


def entries(nav):
    for entry in nav:
        for target in entry.values() if isinstance(entry, dict) else (entry,):
            yield from entries(target) if isinstance(target, list) else (target,)


def test_the_navigation_is_whole():
    pages = set(entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    cards = {page for page in there if re.fullmatch(r"cards/.+/README\.md", page)}
    assert pages == there - cards
