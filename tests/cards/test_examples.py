"""The five example cards: made from the facts and the quoted figures beside them, and from nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData

from kconv.cards.facts import EXPLAINABILITY, SUBCARDS, read_facts
from kconv.cards.license_checks import check_folder

ROOT = Path(__file__).parent.parent.parent
CARDS = ROOT / "docs" / "cards"
NAMES = sorted(folder.name for folder in CARDS.iterdir() if folder.is_dir())
NVIDIA = ["kimi-k2-thinking-eagle3", "kimi-k2.5-thinking-eagle3", "kimi-k2.6-eagle3"]
NOTICE = "Licensed by NVIDIA Corporation under the NVIDIA Open Model License"


def cells(text: str) -> list[list[str]]:
    """Return the cells of every table line of a card."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def read(name: str) -> str:
    return (CARDS / name / "README.md").read_text()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("docs")
    subprocess.run([sys.executable, ROOT / "scripts" / "card-examples", out], check=True, cwd=ROOT)
    return out


def test_there_are_five():
    assert len(NAMES) == 5 and set(NVIDIA) < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_card_in_the_docs_is_what_its_facts_give(name, written):
    for file in ("README.md", "NOTICE"):
        assert (CARDS / name / file).read_text() == (written / "cards" / name / file).read_text()
    png = "acceptance.png"
    assert (written / "cards" / name / png).exists() == (CARDS / name / "acceptance.json").exists()
    if (CARDS / name / png).exists():
        assert (CARDS / name / png).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", [name for name in NAMES if (CARDS / name / "acceptance.json").exists()])
def test_every_published_figure_stands_in_its_line(name):
    quoted = json.loads((CARDS / name / "acceptance.json").read_text())
    lines = cells(read(name))
    for row in quoted["rows"]:
        category, domain = row.get("category", ""), row.get("domain", "")
        benchmark = f"{row['dataset']} ({category})" if domain and category else row["dataset"]
        prompts = str(row.get("prompts", "not stated"))
        figure = f"{row['value']:.{row['decimals']}f}"
        assert [domain or category or "all", benchmark, prompts, figure] in lines
        assert row["measured_by"] == "quoted" and row["url"] in read(name)
    text = read(name)
    assert f'there called "{quoted["rows"][0]["published_as"]}"' in text


@pytest.mark.parametrize("name", NAMES)
def test_what_was_not_published_stands_as_that_and_is_nowhere_filled_in(name):
    facts = read_facts(CARDS / name / "facts.yaml")
    file = CARDS / name / "acceptance.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    held = {(row["dataset"], row.get("category", "")) for row in rows}
    wanted = {(dataset, c) for dataset, categories in facts.expected.items() for c in categories or ("",)}
    lines = [line for line in cells(read(name)) if len(line) == 4 and line[0] != "Category" and "-" not in line[0]]
    absent = {(line[1], line[0].replace("all", "")) for line in lines if line[3] == "not published"}
    assert absent == wanted - held
    assert len(lines) == len(held) + len(absent)


def test_the_cut_off_table_shows_three_categories_as_not_published():
    lines = [line for line in cells(read("kimi-k2.6-eagle3")) if line[1:2] == ["MT-Bench"]]
    assert [line[0] for line in lines if line[3] == "not published"] == ["extraction", "stem", "humanities"]


@pytest.mark.parametrize("name", NAMES)
def test_the_hubs_own_classes_read_the_card(name):
    card = ModelCard(read(name))
    facts = read_facts(CARDS / name / "facts.yaml")
    assert isinstance(card.data, ModelCardData)
    assert card.data.base_model == [facts.base_model]
    assert card.data.pipeline_tag == "text-generation" and "eagle3" in card.data.tags
    again = ModelCardData(**yaml.safe_load(str(card.data)))
    assert again.to_dict() == card.data.to_dict()


LICENSES = {
    "kimi-k2.6-eagle3": ("other", "nvidia-open-model-license", True),
    "kimi-k2-thinking-eagle3": ("other", "nvidia-open-model-license", True),
    # The article that it is made from states no license.
    "kimi-k2.5-thinking-eagle3": ("unknown", None, False),
    "kimi-k2.6-eagle3-mla": ("other", None, False),
    "kimi-k2.5-eagle3-mla": ("other", None, False),
}


@pytest.mark.parametrize("name", NAMES)
def test_licenses_and_notices_are_the_published_ones(name):
    identifier, license, prescribed = LICENSES[name]
    data, notice = ModelCard(read(name)).data, (CARDS / name / "NOTICE").read_text()
    assert (data.license, data.license_name) == (identifier, license)
    assert bool(data.license_link) == prescribed and (NOTICE in notice.splitlines()) == prescribed
    assert "Modified MIT License" in notice
    attribution = read_facts(CARDS / name / "facts.yaml").license.attribution
    assert (f'"{attribution}"' in notice) == (attribution is not None)


# The examples hold no license's text, which is others' to give; so the checks ask for it.
FOUND = {
    "kimi-k2.6-eagle3": {("error", "L1", "LICENSE"), ("warning", "L3", "LICENSE-TARGET")},
    "kimi-k2-thinking-eagle3": {
        ("error", "L1", "LICENSE"),
        ("warning", "L3", "LICENSE-TARGET"),
        ("warning", "L3", "NOTICE"),
    },
    "kimi-k2.5-thinking-eagle3": {
        ("error", "L1", "LICENSE"),
        ("error", "L1", "NOTICE"),
        ("error", "L2", "README.md"),
        ("warning", "L3", "LICENSE-TARGET"),
    },
    "kimi-k2.6-eagle3-mla": {
        ("error", "L2", "README.md"),
        ("error", "L4", "README.md"),
        ("warning", "L3", "LICENSE-TARGET"),
    },
    "kimi-k2.5-eagle3-mla": {
        ("error", "L2", "README.md"),
        ("error", "L4", "README.md"),
        ("warning", "L3", "LICENSE-TARGET"),
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_kconvs_checks_say_what_is_still_owed(name):
    found = check_folder(CARDS / name, read_facts(CARDS / name / "facts.yaml"))
    assert {(f.severity, f.rule, f.where) for f in found} == FOUND[name]


@pytest.mark.parametrize("name", NVIDIA)
def test_the_nvidia_style_has_its_sections_in_order_and_all_subcards(name):
    text = read(name)
    heads = ["Model Overview", "Description", "License/Terms of Use", "Deployment Geography", "Use Case",
             "Release Date", "Reference(s)", "Model Architecture", "Input", "Output", "Software Integration",
             "Model Version(s)", "Training and Evaluation Datasets", "Inference", "Eagle Speculative Decoding", "Usage",
             "Evaluation", "Ethical Considerations", "SUBCARDS", "Explainability", "Bias", "Safety & Security",
             "Privacy"]  # fmt: skip
    found = [line.lstrip("# ") for line in text.splitlines() if line.startswith(("# ", "## "))]
    assert [head for head in found if head in heads] == heads
    labels = [line[0] for line in cells(text) if len(line) == 2]
    for rows in SUBCARDS.values():
        assert set(rows.values()) <= set(labels)


@pytest.mark.parametrize("name", NVIDIA)
def test_no_card_says_that_nvidia_verified_it(name):
    [answer] = [line[1] for line in cells(read(name)) if line[0] == EXPLAINABILITY["quality_standards"]]
    assert answer == "Not evaluated by kconv"
