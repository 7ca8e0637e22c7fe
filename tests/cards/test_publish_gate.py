"""The gate: each thing that must hold is broken once, and the check that is there for it says so."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.release_faults import (
    ALONG,
    BROKEN,
    ERROR,
    alter_card,
    candidate,
    flip,
    found,
    index_figure,
    said,
    set_floor,
)
from support.releases import FLOOR, REPO, SUITE, make_inexact, write_acceptance, write_report
from support.releases import write_release as write_named

from kconv.cards.publish.floor import Floor, read_floor
from kconv.cards.publish.gate import (
    CHECKS,
    MANIFEST_HOLDS,
    Allowance,
    checks_of,
    judge,
    record_exceptions,
    written_for,
)
from kconv.cards.publish.options import PublishOptions
from kconv.cards.publish.release import open_candidate, write_release
from kconv.cards.publish.run import approve, prepare
from kconv.checkpoint.manifest import read_manifest, write_manifest
from kconv.engines import by_name
from kconv.engines.registry import writable
from kconv.errors import KconvError, NotACheckpoint, PublishRefused, RecipeInvalid, RequestInvalid
from kconv.validate.report import Finding
from kconv.validate.rules.head import engines_of

WARNING = Finding(rule="K102", severity="warning", where="lm_head", message="It looks odd.", fix="Look.")


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
    always, rest = page.split("\nAlways required:\n")[1].split("\nRequired unless allowed:\n")
    allowable = rest.split("\nThe floor comes from")[0]
    for check in (MANIFEST_HOLDS, *CHECKS):
        assert f"- {check.id}: {check.sentence}\n" in (allowable if check.allowable else always)


@pytest.mark.parametrize("layout", writable())
def test_a_layouts_report_is_for_whom_kconv_validate_checks_it_by_itself(layout):
    assert set(written_for(layout)) == set(engines_of(by_name(layout)))


def test_every_check_is_broken_by_something():
    inexact = {"P110"}  # below
    rules = {rule for rule, _ in BROKEN.values() if rule.startswith("P")}
    assert rules | inexact == {check.id for check in (MANIFEST_HOLDS, *CHECKS)}


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


@pytest.mark.parametrize("name", ["COPYING", "License.txt", "LICENCE", "notice", "THIRD_PARTY_NOTICES.md"])
def test_a_release_may_hold_what_licenses_and_notices_are_called(folder, name):
    (folder / name).write_text("terms")
    assert found(folder) == []


def test_a_warning_stops_nothing(folder):
    write_report(folder, findings=[WARNING])
    assert found(folder) == []


def test_a_suite_of_an_engine_is_a_floor_too(folder):
    write_acceptance(folder)
    floor = Floor.model_validate(FLOOR | SUITE | {"prompts": 80, "at_least": 2.6})
    assert found(folder, floor) == []
    assert found(folder, floor.model_copy(update={"at_least": 2.62})) == ["P109"]
    # As kconv bench --suite has it.
    assert Floor.model_validate(FLOOR | SUITE | {"suite": "mt-bench"}).suite == "MT-Bench"


def test_a_reports_target_may_be_named_too(folder):
    held = json.loads((folder / "report.json").read_text())
    held["provenance"]["target"] = "org/target@v2"
    (folder / "report.json").write_text(json.dumps(held))
    set_floor(folder, target="org/target@v2")
    assert "P109" not in found(folder)
    set_floor(folder, target="org/target@main")
    assert "P109" in found(folder)


def test_figures_of_the_demos_own_report_are_named_and_do_not_count(folder):
    held = json.loads((folder / "report.json").read_text())
    for row in held["figures"]["acceptance"]:
        row["drafter"] = "kconv, after"
    (folder / "report.json").write_text(json.dumps(held))
    assert "P109" in found(folder)
    assert any("as kconv demo writes one, has rows of 'kconv, after'" in message for message in said(folder))


def test_figures_of_several_files_count_and_stand_on_the_card(folder):
    write_acceptance(folder)
    write_acceptance(folder, dataset="SPEED-Bench", value=2.7, name="acceptance-1.json")
    assert list(candidate(folder).acceptance) == ["acceptance.json", "acceptance-1.json"]
    set_floor(folder, **SUITE | {"suite": "SPEED-Bench"}, prompts=80)
    assert found(folder) == []


def test_a_folder_on_which_figures_were_measured_is_no_witness_of_the_base_model(folder):
    asked = []
    for target in ("org/target@main", "target"):
        write_acceptance(folder, target=target)
        asked.append({check.id for check in checks_of(open_candidate(folder, None, (), None))})
    assert asked[0] - asked[1] == {"P117"}


def test_quoted_figures_alone_name_no_weights_and_need_none(folder):
    write_acceptance(folder, weights={}, config="", measured_by="quoted", url="https://x")
    assert found(folder) == []


def test_figures_in_the_metadata_are_those_of_the_file(folder):
    index_figure(folder, 2.61)
    assert found(folder) == []


def test_without_a_report_each_thing_that_it_would_show_is_to_be_allowed(folder):
    """One reason for a missing report is no reason for an unmeasured loss."""
    (folder / "report.json").unlink()
    write_acceptance(folder)
    set_floor(folder, **SUITE)
    assert found(folder) == ["P104", "P107", "P110"]
    with pytest.raises(PublishRefused, match="P107"):
        prepare(candidate(folder), [Allowance("P104", "none was made")])


def test_what_differs_on_the_card_is_shown(folder):
    alter_card(folder, "2.500 ±", "3.875 ±")
    [told] = said(folder)
    assert "| this head, and the one it came from | 2.500 ± 0.020 |" in told


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


@pytest.mark.parametrize("rule", sorted(c.id for c in (MANIFEST_HOLDS, *CHECKS) if not c.allowable))
def test_no_reason_overrides_what_is_not_these_bytes(folder, rule):
    for broken, break_it in BROKEN.values():
        if broken == rule:
            break_it(folder)
            break
    with pytest.raises(PublishRefused, match="None of them can be allowed"):
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


def test_a_manifest_is_published_without_the_path_of_its_source(folder, tmp_path):
    manifest = read_manifest(folder)
    here = tmp_path / manifest.source
    write_manifest(folder, manifest.model_copy(update={"source": str(here)}))
    [sent] = [file for file in prepare(candidate(folder)).files if file.name == "kconv.json"]
    told, stated = json.loads(sent.content), json.loads((folder / "kconv.json").read_bytes())
    assert (told["source"], stated["source"]) == (here.name, str(here))
    assert told | {"source": ""} == stated | {"source": ""}
    assert (sent.size, sent.sha256) == (len(sent.content), hashlib.sha256(sent.content).hexdigest())


def test_what_is_wrong_with_a_floor_is_said_with_its_key(folder):
    lacking = {key: value for key, value in FLOOR.items() if key != "draft_tokens"}
    wrong = {"draft_tokens is missing": lacking, "its top: a floor on MT-Bench": FLOOR | SUITE | {"target": ""}}
    for said_of_it, held in wrong.items():
        (folder / "release.yaml").write_text(yaml.safe_dump({"min_acceptance": held}))
        with pytest.raises(RecipeInvalid, match=said_of_it):
            read_floor(folder)


@pytest.mark.parametrize(
    "floor",
    [
        {},
        {"suite": ""},
        {"metric": "al"},
        {"at_least": 0},
        {"at_least": 1},
        {"at_least": 60},
        {"metric": "draft_accept_rate", "at_least": 1.5},
        {"max_loss": 1.0},
        {"max_loss": -0.1},
        {"least": 2},
        {"draft_tokens": 0},
        {"prompts": 0},
        {"draft_tokens": None},
        SUITE | {"target": ""},
        SUITE | {"temperature": None},
        SUITE | {"temperature": -1.0},
        {"temperature": 1.0},
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
    assert files["report.json"].content == (tmp_path / "elsewhere.json").read_bytes()


def test_a_report_is_published_from_the_folder_that_kconv_validate_wrote(folder, tmp_path):
    (tmp_path / "rep").mkdir()
    (folder / "report.json").rename(tmp_path / "rep" / "report.json")
    made = open_candidate(folder, tmp_path / "rep", (), read_floor(folder))
    files = {file.name: file for file in prepare(made).files}
    assert files["report.json"].content == (tmp_path / "rep" / "report.json").read_bytes()


def test_a_floor_of_another_name_is_shown_what_was_measured(folder):
    write_acceptance(folder)
    write_acceptance(folder, dataset="GSM8K", prompts=5, temperature=1, whole=False, name="acceptance-1.json")
    write_acceptance(folder, dataset="HumanEval", measured_by="quoted", url="https://x", name="acceptance-2.json")
    set_floor(folder, **SUITE | {"suite": "mtbench-2"}, prompts=80)
    [told] = [message for message in said(folder) if "not measured" in message]
    assert "al_incl_bonus on mtbench-2 at K = 3, temperature 0, for org/target@main, over 80 prompts or more" in told
    assert "al_incl_bonus on MT-Bench at K = 3, temperature 0, for org/target@main, 80 prompts, whole" in told
    assert "al_incl_bonus on GSM8K at K = 3, temperature 1, for org/target@main, 5 prompts, a part" in told
    assert "al_incl_bonus on sampled at K = 3, 4 prompts" in told
    assert "HumanEval" not in told


def test_a_folder_or_a_report_that_is_not_there_is_named(folder):
    with pytest.raises(NotACheckpoint, match="no folder"):
        open_candidate(folder / "nowhere", None, (), None)
    with pytest.raises(KconvError, match=r"no nowhere\.json"):
        open_candidate(folder, folder / "nowhere.json", (), None)


OPTIMIZED = """
import sys
from pathlib import Path
from kconv.cards.publish.gate import judge
from kconv.cards.publish.release import open_candidate
assert False, "python -O runs no assert"
for folder in map(Path, sys.argv[1:]):
    print(*sorted({one.rule for one in judge(open_candidate(folder, None, (), None)) if one.severity == "error"}))
"""


def refused(folder: Path) -> list[str]:
    return sorted({one.rule for one in judge(open_candidate(folder, None, (), None)) if one.severity == "error"})


def test_the_gate_refuses_the_same_under_python_o(tmp_path):
    kinds = ["a weight's byte", "no manifest", "a manifest of another schema", "no report", "no card"]
    folders = [write_named(tmp_path / f"broken-{number}") for number in range(len(kinds))]
    for kind, broken in zip(kinds, folders, strict=True):
        BROKEN[kind][1](broken)
    command = [sys.executable, "-O", "-c", OPTIMIZED, *map(str, folders)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = [refused(broken) for broken in folders]
    assert [line.split() for line in ran.stdout.splitlines()] == expected
    assert expected[:3] == [["P101"]] * 3


def test_a_release_folder_is_the_head_with_its_evidence(folder, tmp_path):
    out = tmp_path / "released"
    write_release(folder, out, recipe="name: test\n", report=folder, title="org/head", chart=False)
    assert (out / "release.yaml").read_text() == "name: test\n"
    assert (out / "model.safetensors").samefile(folder / "model.safetensors")
    # An editor may change a small file in place.
    assert not (out / "config.json").samefile(folder / "config.json")
    assert (out / "report.json").read_bytes() == (folder / "report.json").read_bytes()
    assert "# org/head" in (out / "README.md").read_text()
    assert not {"P101", "P102", "P105", "P113"} & set(refused(out))


def test_a_release_folder_is_not_made_of_a_head_whose_bytes_changed(folder, tmp_path):
    flip(folder / "model.safetensors")
    with pytest.raises(KconvError):
        write_release(folder, tmp_path / "released", recipe="")
    assert not (tmp_path / "released").exists()


def test_a_whole_publication_refuses_what_its_parts_refuse(folder):
    with pytest.raises(RequestInvalid, match="P999: these are not checks"):
        approve(folder, PublishOptions(repo=REPO, allow={"P999": "why"}))
    floor = {"min_acceptance": 1.1, "suite": "sampled", "draft_tokens": 3, "min_prompts": 4, "max_loss": 0.01}
    with pytest.raises(RequestInvalid, match="already states the minimum"):
        approve(folder, PublishOptions(repo=REPO, **floor))
    with pytest.raises(PublishRefused, match="both private and public"):
        approve(folder, PublishOptions(repo=REPO, private=True, public=True))
    with pytest.raises(PublishRefused, match=f"P116 README.md: a serve line names {REPO}, but this is published as"):
        approve(folder, PublishOptions(repo="org/another"))
    (folder / "README.md").unlink()
    with pytest.raises(PublishRefused, match="P113"):
        approve(folder, PublishOptions(repo=REPO))
