"""The five example cards: made from the facts and the quoted figures beside them, and from nothing else."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData

from kconv.bench.acceptance import suite_name
from kconv.cards.facts import EXPLAINABILITY, SUBCARDS, read_facts
from kconv.cards.license_checks import check_folder

ROOT = Path(__file__).parent.parent.parent
CARDS = ROOT / "docs" / "cards"
# The card of scripts/real's release is of measured figures, and needs its head to be made again.
NAMES = sorted(file.parent.name for file in CARDS.glob("*/facts.yaml"))
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
    subprocess.run([ROOT / "scripts" / "docs", "cards", out], check=True, cwd=ROOT)
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
        suite = suite_name(row["dataset"])
        benchmark = f"{suite} ({category})" if domain and category else suite
        counted = any("prompts" in one for one in quoted["rows"])
        prompts = [str(row.get("prompts", ""))] if counted else []
        figure = f"{row['value']:.{row['decimals']}f}"
        assert [domain or category or "all", benchmark, *prompts, figure] in lines
        assert row["measured_by"] == "quoted" and row["url"] in read(name)
    text = read(name)
    for name in {row["published_as"] for row in quoted["rows"]}:
        assert f'"{name}"' in text.split("where it is called")[1]


# What the published cards print, read by hand: each figure of each table, in its order.
PRINTED = {
    "kimi-k2.6-eagle3": ["2.41", "2.29", "2.62", "3.23", "2.84", "2.62", "2.67"],
    "kimi-k2-thinking-eagle3": ["2.282", "2.181", "2.862", "3.340", "2.76", "3.104", "2.343", "2.135"],
    "kimi-k2.5-thinking-eagle3": [],
    "kimi-k2.6-eagle3-mla": ["2.624", "2.494", "2.987", "3.241", "3.245", "2.982", "2.706", "3.006"],
    "kimi-k2.5-eagle3-mla": ["2.940", "2.829", "3.017", "2.969", "3.051", "3.139", "2.597"],
}


# What the published cards state of a drafting chain (one of them: topk=1) and of the bonus token (none of them).
@pytest.mark.parametrize("name", [name for name in NAMES if PRINTED[name]])
def test_a_quoted_figure_states_what_its_source_states(name):
    (method,) = [line for line in read(name).splitlines() if line.startswith("Acceptance length in tokens per")]
    unsaid = method.split("not stated: ")[1].split(";")[0].split(", ")
    assert "bonus token" in unsaid and "with the bonus token" not in method
    assert ("tree" in unsaid) == ("a chain of drafts" not in method) == (name != "kimi-k2.5-eagle3-mla")


@pytest.mark.parametrize("name", NAMES)
def test_the_table_holds_the_published_figures_and_no_other(name):
    figures = [line[-1] for line in cells(read(name)) if len(line) > 2 and re.fullmatch(r"\d\.\d+", line[-1])]
    assert figures == PRINTED[name]


def test_what_an_excerpt_does_not_show_is_left_out_and_nowhere_called_unpublished():
    lines = [line[0] for line in cells(read("kimi-k2.6-eagle3")) if line[1:2] == ["MT-Bench"]]
    assert lines == ["writing", "roleplay", "reasoning", "math", "coding", "all"]
    assert not any("not published" in read(name) for name in NAMES)
    assert "Only a part of the source was read" in read("kimi-k2.6-eagle3")


# What reviews found lost from, or added to, the published cards.
STATED = {
    "kimi-k2.6-eagle3": [
        "with `serve-trtllm.yaml` being\n\n```yaml\nspeculative_config:\n  decoding_type: Eagle\n  max_draft_len: 3\n"
        "  speculative_model_dir: nvidia/Kimi-K2.6-Eagle3\n```",
        '"MT Bench Acceptance Rate", and "average acceptance length" of MT-Bench and SPEED-Bench',
        "designed for systems with NVIDIA GPUs", "V-model", "--host 0.0.0.0",
    ],
    "kimi-k2-thinking-eagle3": [
        "trtllm-serve PATH_OF_THE_Kimi-K2-Thinking-NVFP4_CHECKPOINT", "Built with Kimi-K2-Thinking.",
        "  speculative_model_dir: nvidia/Kimi-K2-Thinking-Eagle3", "NVIDIA sees trustworthy AI as a responsibility",
    ],
    "kimi-k2.5-thinking-eagle3": [
        "an article on the release, after HuggingPapers on X\n", "a reasoning model that keeps its accuracy",
        "research tools of several steps of reasoning, education and decision support",
        "Hugging Face; the article gives no date.", "says itself that the announcement names no figures",
    ],
    "kimi-k2.6-eagle3-mla": [
        "- Tensor type: BF16\n", "2e-5, cosine schedule", "@misc{torchspec2026,",
        "which relieves the memory of a server",
        "not yet supported there, and to be updated once it is", "| Initialized from | kimi-k2.5-eagle3-mla |",
    ],
    "kimi-k2.5-eagle3-mla": [
        "points to the official vLLM recipes", "--tasks gsm8k", "about 14 hours per phase",
        "served by an engine, wrote every answer anew, so the tokens follow the target's own distribution",
        "which relieves the memory of a server", "(PD disaggregation)", "32 GPUs", "topk=1, num_steps=3",
        "not yet supported there, and to be updated once it is",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_the_seed_states_has_its_place(name):
    for said in STATED[name]:
        assert said in read(name)


# What the seeds do not state, and a card of theirs would invent.
UNSTATED = {
    "kimi-k2.5-thinking-eagle3": ["Runtime engine", "Data modality", "--speculative-config", "MLA", "TensorRT-LLM"],
    "kimi-k2.5-eagle3-mla": ["Data modality", "Data collection", "Requirements", "Parameters", "Iterations", "BF16"],
}


@pytest.mark.parametrize("name", UNSTATED)
def test_what_no_seed_states_is_not_said(name):
    assert not [said for said in UNSTATED[name] if said in read(name)]


@pytest.mark.parametrize("name", NAMES)
def test_no_section_row_or_item_is_empty(name):
    text = read(name)
    blocks = re.split(r"\n(?=#+ )", re.sub(r"```.*?```", "code", text.split("---\n", 2)[2], flags=re.DOTALL))
    levels = [len(block) - len(block.lstrip("#")) for block in blocks[1:]]
    for block, level, after in zip(blocks[1:], levels, [*levels[1:], 0], strict=True):
        # A heading has text of its own, or a deeper heading.
        assert block.split("\n", 1)[1].strip() or after > level or level == 1, block
    assert all(cell for line in cells(text) for cell in line if line != ["", ""] and len(line) == 2)
    assert "not stated" not in re.sub(r"not stated: [^;]+;", "", text).replace(
        "The license of this head is not stated.", ""
    )


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
    # Nor do the two published cards.
    "kimi-k2.6-eagle3-mla": ("unknown", None, False),
    "kimi-k2.5-eagle3-mla": ("unknown", None, False),
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
        ("warning", "L3", "LICENSE-TARGET"),
    },
    "kimi-k2.5-eagle3-mla": {
        ("error", "L2", "README.md"),
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
    held = [head for head in found if head in heads]
    # The whole card has all of them; of the others those that their source says something of, in the same order.
    assert held == [head for head in heads if head in held]
    if name == "kimi-k2-thinking-eagle3":
        assert held == heads
        labels = [line[0] for line in cells(text) if len(line) == 2]
        for rows in SUBCARDS.values():
            assert set(rows.values()) <= set(labels)


@pytest.mark.parametrize("name", NVIDIA)
def test_no_card_says_itself_that_nvidia_verified_it(name):
    answers = [line[1] for line in cells(read(name)) if line[0] == EXPLAINABILITY["quality_standards"]]
    assert answers == ["As NVIDIA states: Yes"] * (name == "kimi-k2-thinking-eagle3")
