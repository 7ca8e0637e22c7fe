"""The gate: each thing that must hold is broken once, and the check that is there for it says so."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import yaml
from support.releases import (
    FLOOR,
    FRONT,
    make_inexact,
    write_acceptance,
    write_card,
    write_release,
    write_report,
)

from kconv.cards.evidence import Evidence
from kconv.cards.front_matter import results
from kconv.cards.publish.allow import Allowance, record_exceptions
from kconv.cards.publish.floor import Floor, read_floor
from kconv.cards.publish.gate import CHECKS, MANIFEST_HOLDS, judge, written_for
from kconv.cards.publish.release import open_candidate
from kconv.cards.publish.run import prepare
from kconv.cards.sections import ENGINES as SERVED
from kconv.convert.layouts import by_name
from kconv.errors import KconvError, NotACheckpoint, PublishRefused, RecipeInvalid
from kconv.validate.acceptance import Acceptance, read_acceptance
from kconv.validate.report import Finding
from kconv.validate.rules.head import engines_of

ERROR = Finding(rule="K101", severity="error", where="lm_head", message="It is not there.", fix="Add it.")
WARNING = Finding(rule="K102", severity="warning", where="lm_head", message="It looks odd.", fix="Look.")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_release(tmp_path / "head")


def candidate(folder: Path, floor: Floor | None = None):
    return open_candidate(folder, None, (), floor or read_floor(folder))


def found(folder: Path, floor: Floor | None = None) -> list[str]:
    return [finding.rule for finding in judge(candidate(folder, floor))]


def said(candidate_: Path, floor: Floor | None = None) -> list[str]:
    return [finding.message for finding in judge(candidate(candidate_, floor))]


def flip(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def edit(file: Path, **changed) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def set_floor(folder: Path, **changed) -> None:
    (folder / "release.yaml").write_text(yaml.safe_dump({"min_acceptance": FLOOR | changed}))


def foreign_report(folder: Path) -> None:
    other = write_release(folder.parent / "other", seed=1)
    (folder / "report.json").write_bytes((other / "report.json").read_bytes())


def check_for(folder: Path, engine: str) -> None:
    edit(folder / "report.json", provenance={"dtype": "float32", "for": [engine]})


def name_other_layers(folder: Path) -> None:
    """Write figures of the same weights under a config of other captured layers."""
    config = json.loads((folder / "config.json").read_text())
    other = json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]})
    write_acceptance(folder, config=hashlib.sha256(other.encode()).hexdigest())


def alter_card(folder: Path, old: str, new: str) -> None:
    card = folder / "README.md"
    assert old in card.read_text()
    card.write_text(card.read_text().replace(old, new))


def index_figure(folder: Path, value: float) -> None:
    write_acceptance(folder)
    row = read_acceptance(folder / "acceptance.json").rows[0].model_copy(update={"value": value})
    held = Acceptance(head="h", rows=(row,))
    write_card(folder, FRONT | {"model-index": [{"name": "h", "results": results(Evidence(acceptance=(held,)))}]})


def link_out(folder: Path) -> None:
    (folder.parent / "NOTICE").write_text("elsewhere")
    (folder / "NOTICE").symlink_to(folder.parent / "NOTICE")


BROKEN = {
    "a weight's byte": ("P101", lambda f: flip(f / "model.safetensors")),
    "a config's byte": ("P101", lambda f: flip(f / "config.json", 20)),
    "no weights": ("P101", lambda f: (f / "model.safetensors").unlink()),
    "no manifest": ("P101", lambda f: (f / "kconv.json").unlink()),
    "a manifest of another schema": ("P101", lambda f: edit(f / "kconv.json", schema=99)),
    "a file of the user's own": ("P102", lambda f: (f / "notes.txt").write_text("to do")),
    "a second weight file": ("P102", lambda f: (f / "old.ckpt").write_bytes(b"weights")),
    "weights in a folder of a licence's name": (
        "P102", lambda f: (f / "LICENSE-x").mkdir() or (f / "LICENSE-x" / "pytorch_model.bin").write_bytes(b"weights"),
    ),
    "what a killed run left": ("P102", lambda f: (f / "sub").mkdir() or (f / "sub" / "x.safetensors").write_bytes(b"")),
    "a link to elsewhere": ("P103", link_out),
    "no report": ("P104", lambda f: (f / "report.json").unlink() or write_acceptance(f, dataset="sampled")),
    "a report of another head": ("P105", foreign_report),
    "a report of the same weights under another config": (
        "P105", lambda f: edit(f / "report.json", config="0" * 64),
    ),
    "a report that does not say under which config": ("P105", lambda f: edit(f / "report.json", config="")),
    "a report of no weights": ("P105", lambda f: write_report(f, weights={})),
    "a report of one file more": ("P105", lambda f: write_report(f, weights={"model.safetensors": "0" * 64})),
    "a report with an error": ("P106", lambda f: write_report(f, findings=[ERROR])),
    "a report for another engine": ("P106", lambda f: check_for(f, "sglang")),
    "a report for one of vLLM's two runners": ("P106", lambda f: check_for(f, "vllm-v1")),
    "not compared with the source": ("P107", lambda f: write_report(f, identical=None)),
    "found different from the source": ("P107", lambda f: write_report(f, identical=False)),
    "no floor": ("P108", lambda f: (f / "release.yaml").unlink()),
    "a recipe without a floor": ("P108", lambda f: (f / "release.yaml").write_text("name: test")),
    "below the floor": ("P109", lambda f: set_floor(f, at_least=2.6)),
    "a suite that was not measured": ("P109", lambda f: set_floor(f, suite="SPEED-Bench")),
    "a metric that was not measured": ("P109", lambda f: set_floor(f, metric="draft_accept_rate", at_least=0.5)),
    "measured at another K": ("P109", lambda f: set_floor(f, draft_tokens=5)),
    "measured on fewer prompts": ("P109", lambda f: set_floor(f, prompts=5)),
    "a part of the suite": (
        "P109", lambda f: set_floor(f, suite="MT-Bench", prompts=1) or write_acceptance(f, whole=False),
    ),
    "one prompt of the suite, at the largest K": (
        "P109", lambda f: set_floor(f, suite="MT-Bench") or write_acceptance(f, prompts=1, draft_tokens=16),
    ),
    "measured below the floor in a further file": (
        "P109", lambda f: write_acceptance(f, dataset="sampled", value=2.3, name="acceptance-1.json"),
    ),
    "measured below the floor elsewhere": ("P109", lambda f: write_acceptance(f, dataset="sampled", value=2.3)),
    "quoted, not measured": (
        "P109", lambda f: set_floor(f, suite="MT-Bench") or write_acceptance(f, measured_by="quoted", url="https://x"),
    ),
    "acceptance of other weights": ("P111", lambda f: write_acceptance(f, weights={"model.safetensors": "0" * 64})),
    "acceptance of the same weights under another config": ("P111", name_other_layers),
    "acceptance that does not say under which config": ("P111", lambda f: write_acceptance(f, config="")),
    "acceptance of other weights in a further file": (
        "P111", lambda f: write_acceptance(f, weights={"model.safetensors": "0" * 64}, name="acceptance-1.json"),
    ),
    "acceptance of unknown weights": ("P112", lambda f: write_acceptance(f, weights={})),
    "no card": ("P113", lambda f: (f / "README.md").unlink()),
    "a card without metadata": ("P113", lambda f: (f / "README.md").write_text("# A head\n")),
    "metadata that is no YAML": ("P113", lambda f: (f / "README.md").write_text("---\na: [\n---\n")),
    "a figure of the report that was put in by hand": ("P113", lambda f: alter_card(f, "2.500 ±", "3.875 ±")),
    "a figure of acceptance.json that was put in by hand": (
        "P113", lambda f: write_acceptance(f) or alter_card(f, " 2.610 ", " 3.875 "),
    ),
    "a card that claims more of its weights": ("P113", lambda f: alter_card(f, "identical, bit by bit", "better")),
    "another K in the card": ("P113", lambda f: write_acceptance(f) or alter_card(f, "K = 3", "K = 1")),
    "a figure that only the metadata say": ("P113", lambda f: index_figure(f, 3.875)),
    "an unknown licence": ("L2", lambda f: write_card(f, FRONT | {"license": "unknown"})),
    "no base model": ("L8", lambda f: write_card(f, {k: v for k, v in FRONT.items() if k != "base_model"})),
    "a licence that is not linked": (
        "L2", lambda f: write_card(f, FRONT | {"license": "other", "license_name": "x", "license_link": "TERMS"}),
    ),
    "a licence whose text is not there": ("L5", lambda f: (f / "LICENSE").unlink()),
    "a card that does not say what was changed": (
        "L6", lambda f: (f / "README.md").write_text((f / "README.md").read_text().replace("kconv.json", "it")),
    ),
    "metadata without a pipeline": (
        "P113", lambda f: write_card(f, {k: v for k, v in FRONT.items() if k != "pipeline_tag"}),
    ),
    "a picture that is not there": (
        "P113", lambda f: (f / "README.md").write_text((f / "README.md").read_text() + "![bars](acceptance.png)\n"),
    ),
    "a token in a file": ("P114", lambda f: (f / "NOTICE").write_text("hf_" + "a1B2" * 8)),
}  # fmt: skip


# A card that is not there does not say any of what it must.
ALONG = {"P104": {"P107", "P110"}, "P113": {"L2", "L6", "L8"}, "L2": {"L5"}, "L6": {"P113"}}


def test_a_proven_folder_passes(folder):
    assert found(folder) == []


@pytest.mark.parametrize("rule, break_it", BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_found_by_its_check(folder, rule, break_it):
    break_it(folder)
    assert rule in found(folder)
    assert {rule} | ALONG.get(rule, set()) >= set(found(folder))
    with pytest.raises(PublishRefused, match=rule):
        prepare(candidate(folder))


def test_the_documentation_lists_every_check():
    page = (Path(__file__).parent.parent.parent / "docs" / "release.md").read_text()
    for check in (MANIFEST_HOLDS, *CHECKS):
        assert f"| {check.rule} | {check.says} | {'yes' if check.allowable else 'never'} |" in page


@pytest.mark.parametrize("layout", SERVED)
def test_a_layouts_report_is_for_whom_kconv_validate_checks_it_by_itself(layout):
    assert set(written_for(layout)) == set(engines_of(by_name(layout)))


def test_every_check_is_broken_by_something():
    inexact = {"P110"}  # below
    rules = {rule for rule, _ in BROKEN.values() if rule.startswith("P")}
    assert rules | inexact == {check.rule for check in (MANIFEST_HOLDS, *CHECKS)}


def test_a_head_that_is_not_the_sources_must_have_been_measured(folder):
    make_inexact(folder)
    write_report(folder, identical=None, loss=0.004)
    assert found(folder) == []
    write_report(folder, identical=None, loss=0.02)
    assert found(folder) == ["P110"]
    held = json.loads((folder / "report.json").read_text())
    at_another_k = json.loads(json.dumps(held))
    at_another_k["figures"]["parity"][0]["steps"] = 5
    (folder / "report.json").write_text(json.dumps(at_another_k))
    assert found(folder) == ["P110"]
    held["figures"]["parity"] = []
    (folder / "report.json").write_text(json.dumps(held))
    assert found(folder) == ["P107", "P110"]


def test_a_warning_stops_nothing(folder):
    write_report(folder, findings=[WARNING])
    assert found(folder) == []


def test_a_suite_of_an_engine_is_a_floor_too(folder):
    write_acceptance(folder)
    floor = Floor(metric="al_incl_bonus", suite="MT-Bench", draft_tokens=3, prompts=80, at_least=2.6, max_loss=0.0)
    assert found(folder, floor) == []
    assert found(folder, floor.model_copy(update={"at_least": 2.62})) == ["P109"]


def test_figures_of_several_files_count_and_stand_on_the_card(folder):
    write_acceptance(folder)
    write_acceptance(folder, dataset="SPEED-Bench", value=2.7, name="acceptance-1.json")
    assert list(candidate(folder).acceptance) == ["acceptance.json", "acceptance-1.json"]
    set_floor(folder, suite="SPEED-Bench", prompts=80)
    assert found(folder) == []


def test_quoted_figures_alone_name_no_weights_and_need_none(folder):
    write_acceptance(folder, weights={}, config="", measured_by="quoted", url="https://x")
    assert found(folder) == []


def test_figures_in_the_metadata_are_those_of_the_file(folder):
    index_figure(folder, 2.61)
    assert found(folder) == []


def test_without_a_report_each_thing_that_it_would_show_is_to_be_allowed(folder):
    """One reason for a missing report is no reason for an unmeasured loss."""
    (folder / "report.json").unlink()
    write_acceptance(folder, dataset="sampled")
    assert found(folder) == ["P104", "P107", "P110"]
    with pytest.raises(PublishRefused, match="P107"):
        prepare(candidate(folder), [Allowance("P104", "none was made")])


def test_what_differs_on_the_card_is_shown(folder):
    alter_card(folder, "2.500 ±", "3.875 ±")
    [told] = said(folder)
    assert "| source | 2.500 ± 0.020 |" in told


def test_an_allowance_lets_pass_and_stands_on_the_card(folder):
    set_floor(folder, at_least=2.6)
    release = prepare(candidate(folder), [Allowance("P109", "a | first\ntry")])
    (card,) = [file for file in release.files if file.name == "README.md"]
    assert isinstance(card.content, bytes)
    text = card.content.decode()
    assert "| P109 | al_incl_bonus on sampled at K = 3 is 2.500, below the floor of 2.6 | a \\| first try |" in text
    assert text.startswith((folder / "README.md").read_text().rstrip("\n"))
    assert card.sha256 == hashlib.sha256(card.content).hexdigest()
    assert "P109" not in (folder / "README.md").read_text()


@pytest.mark.parametrize("rule", sorted(c.rule for c in (MANIFEST_HOLDS, *CHECKS) if not c.allowable))
def test_no_reason_overrides_what_is_not_these_bytes(folder, rule):
    for broken, break_it in BROKEN.values():
        if broken == rule:
            break_it(folder)
            break
    with pytest.raises(PublishRefused, match="no reason overrides"):
        prepare(candidate(folder), [Allowance(rule, "I know better")])


def test_an_allowance_that_nothing_needs_is_not_recorded(folder):
    release = prepare(candidate(folder), [Allowance("P109", "in case")])
    (card,) = [file for file in release.files if file.name == "README.md"]
    assert card.content == (folder / "README.md").read_bytes()


def test_exceptions_of_an_earlier_release_go():
    passed = [(ERROR, Allowance("K101", "why"))]
    once = record_exceptions("# A head\n", passed)
    assert record_exceptions(once, passed) == once
    assert record_exceptions(once, []) == "# A head\n"


def test_everything_that_is_published_has_its_files_hash(folder):
    write_acceptance(folder)
    for file in prepare(candidate(folder)).files:
        data = (folder / file.name).read_bytes()
        assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert file.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    names = {file.name for file in prepare(candidate(folder)).files}
    assert names == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    "floor",
    [
        {},
        {"suite": ""},
        {"metric": "al"},
        {"at_least": 0},
        {"max_loss": 1.0},
        {"max_loss": -0.1},
        {"least": 2},
        {"draft_tokens": 0},
        {"prompts": 0},
        {"draft_tokens": None},
    ],
)
def test_a_floor_that_cannot_be_is_refused(folder, floor):
    held = FLOOR | floor if floor else {"suite": "sampled"}
    (folder / "release.yaml").write_text(yaml.safe_dump({"min_acceptance": held}))
    with pytest.raises(RecipeInvalid, match=r"release\.yaml"):
        read_floor(folder)


def test_evidence_from_elsewhere_is_published_with_the_folder(folder, tmp_path):
    (folder / "report.json").rename(tmp_path / "elsewhere.json")
    made = open_candidate(folder, tmp_path / "elsewhere.json", (), read_floor(folder))
    files = {file.name: file for file in prepare(made).files}
    assert files["report.json"].content == tmp_path / "elsewhere.json"


def test_a_folder_or_a_report_that_is_not_there_is_named(folder):
    with pytest.raises(NotACheckpoint, match="no folder"):
        open_candidate(folder / "nowhere", None, (), None)
    with pytest.raises(KconvError, match=r"no nowhere\.json"):
        open_candidate(folder, folder / "nowhere.json", (), None)
