"""No card claims what was not measured: every number on it stands in the manifest, a report, figures or facts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.heads import MLA, random_slots, write_head

from kconv.bench.acceptance import AcceptanceFile, AcceptanceRow, Interval, Sanity, SuiteRecord, read_acceptance
from kconv.cards.card import STYLES, gather, make_card
from kconv.cards.facts import read_facts
from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import ConversionRecord, read_manifest, write_manifest
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import by_name
from kconv.measure.figures import AcceptanceFigures, Figures, TextFigures
from kconv.validate.report import make_report

CARDS = Path(__file__).parent.parent.parent / "docs" / "cards"
DIGEST = re.compile(r"\b[0-9a-f]{40,}\b")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
# What kconv itself says, whatever the head: counts from 0, 4-grams, temperature 1, lengths that begin at 1.
OWN_WORDS = ("0-based", "4-grams", "temperature 1", "(1 to", "Eagle3", "eagle3", "EAGLE3", "PAGE_3")


def numbers(text: str) -> list[str]:
    """Return the numbers of a text, without commas between thousands."""
    for words in OWN_WORDS:
        text = text.replace(words, "")
    return [found.replace(",", "") for found in NUMBER.findall(text)]


def leaves(value) -> list:
    """Return every number and text within a JSON value, but for digests, whose digits say nothing."""
    if isinstance(value, dict):
        return [leaf for pair in value.items() for part in pair for leaf in leaves(part)]
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [] if value is None or isinstance(value, bool) or DIGEST.search(str(value)) else [value]


def foreign(card: str, origins: list, texts: list[str]) -> list[str]:
    """Return the numbers of a card that stand in none of its origins, rounded as they are shown."""
    known = [leaf for origin in origins for leaf in leaves(origin)]
    words = [*texts, *(leaf for leaf in known if isinstance(leaf, str))]
    written = {number for text in words for number in numbers(text)}
    held = [leaf for leaf in known if not isinstance(leaf, str)]
    lost = []
    for shown in numbers(card):
        digits = len(shown.partition(".")[2])
        # A share may be shown in per cent.
        if shown not in written and not any(f"{n * scale:.{digits}f}" == shown for n in held for scale in (1, 100)):
            lost.append(shown)
    return lost


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Of odd sizes, so that a number is hardly right by chance.
    spec = replace(MLA, captured=(7, 29, 57))
    source = write_head(tmp_path / "source", by_name("trtllm"), spec, random_slots(spec))
    execute(plan(read_head(open_checkpoint(source)), by_name("portable")), tmp_path / "my-head")
    return tmp_path / "my-head"


def evidence(folder: Path):
    head = read_head(open_checkpoint(folder))
    row = AcceptanceFigures(
        drafter="output", text="sampled", steps=5, drafts=641, length=2.517934, standard_error=0.021377,
        rates=(0.81, 0.52, 0.2, 0.0, 0.0), note="n",
    )  # fmt: skip
    text = TextFigures(kind="sampled", sequences=23, tokens=1289, distinct_4grams=0.9713)
    report = make_report(head, [], Figures(identical=True, texts=(text,), acceptance=(row,)), {"dtype": "float32"})
    common = {
        "metric": "al_incl_bonus", "draft_tokens": 5, "tree": "chain", "engine": "vllm", "engine_version": "0.32.0",
        "target": "moonshotai/Kimi-K2.6", "precision": "NVFP4", "temperature": 0.7, "dataset": "MT-Bench",
        "revision": "sha256:99", "max_tokens": 777, "date": "2026-11-21", "measured_by": "self", "prompts": 83,
        "sanity": Sanity(distinct_4grams=0.9345, mean_tokens=512.7, cut=0.0625),
    }  # fmt: skip
    band = Interval(low=2.71828, high=3.14159, over="prompts", units=83)
    trained = {
        "recipe": {"steps": 7321, "lr": 0.00031, "schedule": "cosine", "seq": 4093},
        "tokens": {"counted": 918273},
        "libraries": {"nvidia-modelopt": "0.47.0"},
        "started_from": "org/start",
    }
    made = ConversionRecord(
        method="MHA to MLA", calibration="text", calibration_sha256="0" * 64, sequences=61, context=2039, rows=5077,
        heal_steps=211,
        held_out={
            "before": 2.4321, "after": 2.40987, "trained": 2.4507, "kept": 0.98334, "kept_error": 0.00385,
            "greedy_kept": 0.97713, "greedy_kept_error": 0.01128, "sequences": 137, "kl": [0.1],
        },
    )  # fmt: skip
    write_manifest(folder, read_manifest(folder).model_copy(update={"training": trained, "conversion": made}))
    rows = (
        AcceptanceRow(averaging="macro_request", value=2.903, category="math", interval=band, **common),
        AcceptanceRow(averaging="macro_request", value=2.864, interval=band, **common),
    )
    suite = SuiteRecord(dataset="MT-Bench", categories=("math", "stem"))
    figures = AcceptanceFile(head="my-head", suites=(suite,), rows=rows)
    facts = folder.parent / "facts.yaml"
    facts.write_text(
        "name: org/head\nbase_model: moonshotai/Kimi-K2.6\ntraining: {samples: 48K, iterations: '9,279'}\n"
    )
    return gather(folder, report, read_facts(facts), [figures]), facts


@pytest.mark.parametrize("style", STYLES)
def test_every_number_of_a_card_has_its_origin(folder, style):
    known, facts = evidence(folder)
    card = make_card(known, style, model_index=True)
    origins = [
        json.loads((folder / "kconv.json").read_text()),
        json.loads(known.report.to_json()),
        *(json.loads(file.to_json()) for file in known.acceptance),
        # K drafted tokens accept K + 1 at most.
        [6],
    ]
    texts = [facts.read_text(), *(file.read_text() for file in folder.glob("serve-*"))]
    assert len(numbers(card.text)) > 30
    assert foreign(card.text, origins, texts) == []


def test_what_kconv_trained_and_approximated_is_told_without_facts(folder):
    known, _ = evidence(folder)
    text = make_card(known, "compact").text
    assert "| Framework | nvidia-modelopt 0.47.0 |" in text and "| Initialized from | org/start |" in text
    assert "| Learning rate | 0.00031, cosine |" in text
    assert (
        "**approximate**: MHA to MLA, calibrated on text. On 137 held-out texts its sampled acceptance length is "
        "2.410, 98.3% ± 0.4% of the 2.451 that the original has after the same steps (2.432 before them); greedy "
        "it keeps 97.7% ± 1.1%"
    ) in text


def test_answers_that_are_the_same_at_every_k_are_told_once(folder):
    known, _ = evidence(folder)
    [file] = known.acceptance
    shorter = file.model_copy(update={"rows": tuple(row.model_copy(update={"draft_tokens": 3}) for row in file.rows)})
    text = make_card(replace(known, acceptance=(file, shorter)), "compact").text
    assert "<details>" in text and text.count("Answers: 513 tokens on average") == 1


def test_a_card_shows_the_figures_of_one_k_and_folds_the_others(folder):
    known, _ = evidence(folder)
    [file] = known.acceptance
    own = {row.draft_tokens for row in file.rows}
    others = [
        file.model_copy(update={"rows": tuple(row.model_copy(update={"draft_tokens": k}) for row in file.rows)})
        for k in (3, 7)
    ]
    several = replace(known, acceptance=(file, *others))

    def heads(chosen):
        facts = known.facts.model_copy(update={"draft_tokens": chosen})
        shown, _, folded = make_card(replace(several, facts=facts)).text.partition("<details>")
        return [[line.count("K = ") for line in part.splitlines() if line.startswith("| Category")]
                for part in (shown, folded)]  # fmt: skip

    assert own == {5}
    # One K needs no name in its heading: its sentence says it.
    assert heads(()) == [[0], [2]] and heads((3, 5)) == [[2], [0]] and heads((3, 5, 7)) == [[3], []]
    text = make_card(several).text
    assert ", K = 3, " in text.partition("<details>")[0] and "as before" not in text
    # What was measured alike is explained once.
    assert text.count("per verify step with the bonus token,") == 1 == text.count("In brackets: ")
    rows = tuple(row.model_copy(update={"temperature": 0.0}) for row in others[1].rows)
    colder = others[1].model_copy(update={"rows": rows})
    assert make_card(replace(several, acceptance=(others[0], colder))).text.count("In brackets: ") == 2
    # Without a figure at the usual K, the card shows what there is.
    assert "<details>" not in make_card(known).text and "| Category" in make_card(known).text


def test_a_suite_that_was_run_in_part_is_called_so_and_has_one_figure_for_all_of_it(folder):
    known, _ = evidence(folder)
    [file] = known.acceptance
    mean = file.rows[1].model_copy(update={"averaging": "macro_category", "value": 2.8, "interval": None})
    for whole, name in {False: "part of MT-Bench", True: "MT-Bench"}.items():
        suite = file.suites[0].model_copy(update={"whole": whole})
        run = file.model_copy(update={"rows": (*file.rows, mean), "suites": (suite,)})
        text = make_card(replace(known, acceptance=(run,))).text
        assert f"| math | {name} | 83 | 2.903" in text and f"| all | {name} | 83 | 2.864" in text
        assert "mean of the categories" not in text
        alone = run.model_copy(update={"rows": (mean,)})
        assert f"| all | {name} | 83 | 2.800 |" in make_card(replace(known, acceptance=(alone,))).text


def test_the_search_finds_a_number_that_was_made_up(folder):
    known, facts = evidence(folder)
    card = make_card(known, "short").text + "\nUp to 2.35x faster on 171 GPUs.\n"
    origins = [json.loads((folder / "kconv.json").read_text()), json.loads(known.report.to_json()), [6]]
    origins += [json.loads(file.to_json()) for file in known.acceptance]
    texts = [facts.read_text(), *(file.read_text() for file in folder.glob("serve-*"))]
    assert foreign(card, origins, texts) == ["2.35", "171"]


@pytest.mark.parametrize("name", sorted(file.parent.name for file in CARDS.glob("*/facts.yaml")))
def test_every_number_of_an_example_is_quoted(name):
    folder = CARDS / name
    figures = folder / "acceptance.json"
    known = [json.loads(read_acceptance(figures).to_json())] if figures.exists() else []
    texts = [(folder / "facts.yaml").read_text()]
    assert read_facts(folder / "facts.yaml")
    # A launch snippet's own: K.
    assert foreign((folder / "README.md").read_text(), [*known, yaml.safe_load(texts[0]), [3]], texts) == []
