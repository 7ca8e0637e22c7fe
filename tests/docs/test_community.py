"""What GitHub and Zenodo read of the repository, against their own schemas; and the recording."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from support.commands import fault_of

ROOT = Path(__file__).parent.parent.parent
SCHEMAS = {
    "CITATION.cff": "citation-file-format",
    ".github/ISSUE_TEMPLATE/wrong.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/layout.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("file, schema", SCHEMAS.items())
def test_a_file_is_of_its_readers_schema(file, schema):
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", file]
    ran = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_citation_is_of_this_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version("kconv")


def test_hooks_run_what_scripts_test_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    tools = {hook["entry"].split()[0] for hook in hooks}
    test = (ROOT / "scripts" / "test").read_text()
    assert tools - {"scripts/docs"} == set(re.findall(r"\.venv/bin/(?:ruff|basedpyright)", test))


def recorded() -> list[str]:
    """Return the recording's lines."""
    lines: dict[float, str] = {}
    for text in ElementTree.parse(ROOT / "docs" / "demo.svg").iter(f"{SVG}text"):
        y = float(text.get("y", "0"))
        lines[y] = lines.get(y, "") + "".join(text.itertext()).replace("\xa0", " ")
    return [lines[y] for y in sorted(lines)]


def test_the_recording_shows_commands_that_there_are():
    calls = [line.removeprefix("$ ").strip() for line in recorded() if line.startswith("$ kconv")]
    assert len(calls) >= 3
    # A long one is folded, so its last option may lack its value.
    assert not [call for call in calls if "no command" in fault_of(call) or "o such option" in fault_of(call)]


def test_the_recording_shows_a_silent_fault_and_the_head_that_has_it_no_more():
    text = " ".join(recorded())
    assert text.count("error K") == 1 and "error K140" in text and text.count("FAIL") == 1
    assert "byte-identical to the source" in text and "head: no errors" in text and "PASS vLLM" in text


def test_the_recording_loads_nothing_from_elsewhere():
    text = (ROOT / "docs" / "demo.svg").read_text()
    assert not re.search(r"url\((?!#)|@import|<script|href=\"http", text)


URL = "https://github.com/example-org/kconv-fork"
PLACES = ("pyproject.toml", "mkdocs.yml", "CITATION.cff", "README.md", "examples/workflows/check.yml",
          "examples/workflows/release.yml")  # fmt: skip


def fill_in(root: Path) -> None:
    script = [ROOT / "scripts" / "docs", "address", URL, "--root", root]
    subprocess.run(script, check=True, capture_output=True)


def test_the_projects_address_is_filled_in_at_one_place(tmp_path):
    for name in PLACES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    fill_in(tmp_path)
    texts = {name: (tmp_path / name).read_text() for name in PLACES}
    assert tomllib.loads(texts["pyproject.toml"])["project"]["urls"]["Repository"] == URL
    assert yaml.safe_load(texts["CITATION.cff"])["repository-code"] == URL
    assert f"\nrepo_url: {URL}\n" in texts["mkdocs.yml"]
    assert f"```sh\ngit clone {URL} && cd kconv-fork\n" in texts["README.md"]
    uses = [re.findall(r"uses: (\S*kconv\S*)@", texts[name]) for name in PLACES[4:]]
    assert uses == [["example-org/kconv-fork"], ["example-org/kconv-fork/.github/workflows/release-head.yml"]]
    fill_in(tmp_path)
    assert texts == {name: (tmp_path / name).read_text() for name in PLACES}
