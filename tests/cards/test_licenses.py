"""Licenses: which files follow, and each check from L1 to L12."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.heads import MLA, random_slots, write_head
from support.releases import APACHE, KIMI, MIT, NVIDIA

from kconv.cards.card import gather, make_card, write
from kconv.cards.facts import Facts, LicenseFacts
from kconv.cards.license_checks import check_folder
from kconv.cards.licenses import of_target
from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Parameters, read_manifest, write_manifest
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import by_name
from kconv.errors import OutputExists

NOTICE = "Licensed by NVIDIA Corporation under the NVIDIA Open Model License"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Return a converted head; its source's folder has no license yet."""
    source = write_head(tmp_path / "source", by_name("trtllm"), MLA, random_slots(MLA))
    execute(plan(read_head(open_checkpoint(source)), by_name("vllm")), tmp_path / "my-head")
    return tmp_path / "my-head"


def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir(exist_ok=True)
    (folder / "LICENSE").write_text(KIMI)
    return folder


FACTS = Facts(
    name="me/head-vllm",
    base_model="moonshotai/Kimi-K2.6",
    source_head="nvidia/Kimi-K2.6-Eagle3",
    license=LicenseFacts(id="nvidia-open-model-license", target="modified-mit"),
)


def make(output: Path, facts: Facts = FACTS, *, with_target: bool = True, **texts: str) -> Path:
    """Write a head's card with the licenses that lie in its source's folder."""
    for name, text in texts.items():
        (output.parent / "source" / name).write_text(text)
    evidence = gather(output, None, facts, target=target(output.parent) if with_target else None)
    return write(output, make_card(evidence, "compact"))


def found(output: Path, facts: Facts = FACTS) -> set[tuple[str, str, str]]:
    return {(f.severity, f.rule, f.where) for f in check_folder(output, facts)}


def copied(output: Path, count: int) -> None:
    manifest = read_manifest(output)
    origin = Parameters(trained=manifest.parameters - count, copied_from_target=count, unknown=0)
    write_manifest(output, manifest.model_copy(update={"parameters_by_origin": origin}))


def test_texts_are_copied_whole_and_the_notice_follows(output):
    text = make(output, LICENSE=NVIDIA).read_text()
    assert (output / "LICENSE").read_text() == NVIDIA and (output / "LICENSE-TARGET").read_text() == KIMI
    notice = (output / "NOTICE").read_text()
    assert NOTICE in notice.splitlines()
    assert "Copyright (c) 2025 Moonshot AI, Modified MIT License" in notice and '"Kimi K2.6"' in notice
    assert "Modified: kconv" in notice and "kconv.json" in notice
    assert "license_name: nvidia-open-model-license\nlicense_link: LICENSE\n" in text
    assert "- moonshotai/Kimi-K2.6\n- nvidia/Kimi-K2.6-Eagle3\n" in text
    # The agreement's edition is not one that kconv has the digest of.
    assert found(output) == {("warning", "L1", "LICENSE")}


def test_a_file_of_the_users_comes_first(output, tmp_path):
    (tmp_path / "agreement.txt").write_text(NVIDIA)
    evidence = gather(output, None, FACTS, license_files=[tmp_path / "agreement.txt"])
    assert make_card(evidence).files["LICENSE"] == NVIDIA


def test_a_license_that_is_there_and_says_something_else_is_kept(output):
    (output / "LICENSE").write_text("mine")
    with pytest.raises(OutputExists):
        make(output, LICENSE=NVIDIA)
    assert (output / "LICENSE").read_text() == "mine" and not (output / "README.md").exists()


def test_l1_nvidias_heads_go_with_the_agreement_and_its_notice(output):
    make(output)
    assert ("error", "L1", "LICENSE") in found(output)
    (output / "NOTICE").write_text("me/head")
    assert ("error", "L1", "NOTICE") in found(output)


def test_l1_is_of_the_source_whatever_its_license_is_said_to_be(output):
    make(output, FACTS.model_copy(update={"license": LicenseFacts(id="mit")}), LICENSE=MIT)
    assert ("error", "L1", "LICENSE") in found(output, FACTS.model_copy(update={"license": LicenseFacts(id="mit")}))


def test_l2_a_license_is_stated_with_its_name_and_a_link_that_leads_somewhere(output):
    make(output, Facts(name="me/h"))
    assert ("error", "L2", "README.md") in found(output, Facts(name="me/h"))
    for file in (output / "README.md", output / "NOTICE", output / "LICENSE-TARGET"):
        file.unlink()
    make(output, LICENSE=NVIDIA)
    (output / "LICENSE").unlink()
    assert ("error", "L2", "README.md") in found(output)


def test_l3_the_targets_license_is_owed_where_its_weights_are_in_the_file(output):
    make(output, with_target=False, LICENSE=NVIDIA)
    owed = {("LICENSE-TARGET"), ("NOTICE")}
    assert {where for severity, rule, where in found(output) if (severity, rule) == ("warning", "L3")} == owed
    copied(output, 3072)
    assert {where for severity, rule, where in found(output) if (severity, rule) == ("error", "L3")} == owed


def test_l3_says_that_a_targets_license_is_not_known(output):
    bare = FACTS.model_copy(update={"base_model": "me/target", "license": LicenseFacts(id="nvidia-open-model-license")})
    make(output, bare, with_target=False, LICENSE=NVIDIA)
    assert ("note", "L3", "NOTICE") in found(output, bare)


def test_l3_asks_for_the_license_that_the_card_states_of_the_target(output):
    stated = FACTS.model_copy(update={"base_model": "me/target"})
    make(output, stated, LICENSE=NVIDIA)
    assert not {one for one in found(output, Facts()) if one[1] == "L3"}
    (output / "LICENSE-TARGET").unlink()
    card = (output / "README.md").read_text()
    (output / "README.md").write_text(card.replace("\n# ", "\nThe target serves two engines.\n# ", 1))
    assert ("warning", "L3", "LICENSE-TARGET") in found(output, Facts())


def test_a_targets_text_is_no_license_of_the_head(output, tmp_path):
    (tmp_path / "LICENSE-TARGET").write_text(APACHE)
    own = FACTS.model_copy(update={"base_model": "me/target", "license": LicenseFacts(id="mit")})
    files = make_card(gather(output, None, own, license_files=[tmp_path / "LICENSE-TARGET"])).files
    assert "LICENSE" not in files and "Apache License" in files["LICENSE-TARGET"]


def test_a_target_without_a_license_text_has_the_license_that_its_own_card_names(output):
    folder = target(output.parent)
    (folder / "LICENSE").unlink()
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A target\n")
    unstated = FACTS.model_copy(update={"license": LicenseFacts(id="nvidia-open-model-license")})
    assert gather(output, None, unstated, target=folder).facts.license.target == "apache-2.0"
    (folder / "LICENSE").write_text(KIMI)
    assert gather(output, None, unstated, target=folder).facts.license.target == "modified-mit"


def test_l3_the_name_is_the_targets_own(output):
    make(output, LICENSE=NVIDIA)
    notice = (output / "NOTICE").read_text()
    (output / "NOTICE").write_text(notice.replace("Kimi K2.6", "Kimi K2"))
    assert ("warning", "L3", "NOTICE") in found(output)


def test_l4_an_unnamed_license_is_no_license(output):
    facts = FACTS.model_copy(
        update={"source_head": "lightseekorg/kimi-k2.6-eagle3-mla", "license": LicenseFacts(id="other")}
    )
    make(output, facts, with_target=False)
    assert ("error", "L4", "README.md") in found(output, facts)
    known = facts.model_copy(update={"license": LicenseFacts(id="other", acknowledged=True)})
    assert ("error", "L4", "README.md") not in found(output, known)


@pytest.mark.parametrize(("license", "text"), [("mit", MIT), ("apache-2.0", APACHE)])
def test_l5_a_permissive_license_keeps_its_notice(output, license, text):
    facts = FACTS.model_copy(update={"source_head": "AQ-MedAI/head", "license": LicenseFacts(id=license)})
    make(output, facts)
    # Of Apache's kconv has the text itself, which is another than this one.
    (output / "LICENSE").unlink(missing_ok=True)
    assert ("error", "L5", "LICENSE") in found(output, facts)
    for name in ("README.md", "NOTICE", "LICENSE-TARGET"):
        (output / name).unlink()
    make(output, facts, LICENSE=text)
    assert found(output, facts) == set() and (output / "LICENSE").read_text() == text


LLAMA = (
    "LLAMA 3.1 COMMUNITY LICENSE AGREEMENT\nLlama 3.1 Version Release Date: July 23, 2024 ... Meta Platforms, Inc.\n"
)
# https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/LICENSE, section 1.b.iii
OF_META = (
    "Llama 3.1 is licensed under the Llama 3.1 Community License, Copyright © Meta Platforms, Inc. All Rights Reserved."
)


def test_l5_a_llama_license_needs_its_text_and_its_notice(output):
    facts = FACTS.model_copy(update={"source_head": "org/head", "license": LicenseFacts(id="Llama3.1")})
    make(output, facts)
    assert ("error", "L5", "LICENSE") in found(output, facts)
    for name in ("README.md", "NOTICE", "LICENSE-TARGET"):
        (output / name).unlink()
    text = make(output, facts, LICENSE=LLAMA).read_text()
    assert found(output, facts) == set() and "\nlicense: llama3.1\n" in text and "Llama 3.1 Community License" in text
    assert OF_META in (output / "NOTICE").read_text().splitlines()
    (output / "NOTICE").write_text("mine")
    assert ("error", "L5", "NOTICE") in found(output, facts)


# Section 1.b.i of the same, and section 5.b of the Qwen license: https://huggingface.co/Qwen/Qwen2.5-72B/blob/main/LICENSE
SHOWS = (
    LLAMA + "(B) prominently display “Built with Llama” on a related website, ... also include “Llama” at the\n"
    "beginning of any such AI model name.",
    "Qwen LICENSE AGREEMENT ... prominently display “Built with Qwen” or “Improved using Qwen” in the related product",
)


def test_l11_words_that_a_license_wants_shown_are_shown(output):
    for text, license, word in zip(SHOWS, ("llama3.1", "qwen"), ("Built with Llama", "Built with Qwen"), strict=True):
        facts = FACTS.model_copy(update={"source_head": "org/head", "license": LicenseFacts(id=license)})
        (output / "LICENSE-TARGET").unlink(missing_ok=True)
        for name in ("README.md", "NOTICE", "LICENSE"):
            (output / name).unlink(missing_ok=True)
        card = make(output, facts, LICENSE=text)
        assert f"\n**{word}**\n" in card.read_text()
        assert "L11" not in {rule for _, rule, _ in found(output, facts)}
        card.write_text(card.read_text().replace(word, ""))
        assert ("error", "L11", "README.md") in found(output, facts)
    card.write_text(card.read_text() + "Improved using Qwen")
    assert "L11" not in {rule for _, rule, _ in found(output, facts)}


@pytest.mark.parametrize(("name", "warned"), [("me/head-vllm", True), ("me/Llama-3.1-8B-Eagle3", False)])
def test_l12_a_model_of_llamas_is_named_after_it(output, name, warned):
    facts = FACTS.model_copy(update={"name": name, "source_head": "org/head", "license": LicenseFacts(id="llama3.1")})
    make(output, facts, LICENSE=SHOWS[0])
    assert (("warning", "L12", "README.md") in found(output, facts)) == warned


@pytest.mark.parametrize(
    ("target", "license"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1"),
        ("meta-llama/Meta-Llama-3-8B", "llama3"),
        ("meta-llama/Llama-4-Scout-17B-16E", "llama4"),
        ("moonshotai/Kimi-K2.6", "modified-mit"),
        ("meta-llama/Llama-9-8B", None),
        ("someone/Llama-3.1-8B", None),
    ],
)
def test_a_publishers_license_is_known_by_the_targets_name(target, license):
    found = of_target(None, target)
    assert (found and found.id) == license


def test_l3_a_llama_target_wants_its_line_in_the_notice(output):
    facts = FACTS.model_copy(update={"base_model": "meta-llama/Llama-3.1-8B", "license": LicenseFacts(id="mit")})
    make(output, facts, with_target=False)
    assert OF_META in (output / "NOTICE").read_text().splitlines()
    (output / "NOTICE").write_text(NOTICE)
    assert ("warning", "L3", "NOTICE") in found(output, facts)


@pytest.mark.parametrize(
    ("name", "front"),
    {
        "Apache-2.0": "license: apache-2.0", "AGPL-3.0-only": "license: agpl-3.0", "CC-BY-4.0": "license: cc-by-4.0",
        "Gemma": "license: gemma", "llama-3.3": "license: llama3.3",
        "Qwen": "license: other\nlicense_name: qwen", "DeepSeek": "license: other\nlicense_name: deepseek",
    }.items(),
)  # fmt: skip
def test_a_license_has_the_hubs_name_for_it(output, name, front):
    facts = FACTS.model_copy(update={"source_head": "org/head", "license": LicenseFacts(id=name)})
    assert f"\n{front}\n" in make(output, facts).read_text()


def test_a_text_that_kconv_cannot_know_is_that_of_the_license_that_is_stated(output, tmp_path):
    (tmp_path / "mine").write_text("Creative Commons Attribution 4.0 International\n")
    facts = FACTS.model_copy(update={"source_head": "org/head", "license": LicenseFacts(id="cc-by-4.0")})
    write(output, make_card(gather(output, None, facts, license_files=[tmp_path / "mine"])))
    assert (output / "LICENSE").read_text().startswith("Creative Commons")


def test_l5_mit_without_its_copyright_line_is_not_kept(output):
    facts = FACTS.model_copy(update={"source_head": "AQ-MedAI/head", "license": LicenseFacts(id="mit")})
    make(output, facts, LICENSE=MIT.replace("Copyright (c) 2025 Someone", ""))
    assert ("error", "L5", "LICENSE") in found(output, facts)


def test_l6_changes_are_stated(output):
    make(output, LICENSE=NVIDIA)
    card = (output / "README.md").read_text()
    (output / "README.md").write_text(card.replace("kconv.json", "a file"))
    assert ("error", "L6", "README.md") in found(output)


def test_l7_prompts_of_speed_bench_stay_out(output):
    make(output, LICENSE=NVIDIA)
    (output / "prompts").mkdir()
    (output / "prompts" / "qualitative.jsonl").write_text("{}")
    assert not [rule for _, rule, _ in found(output) if rule == "L7"]
    (output / "README.md").write_text((output / "README.md").read_text() + "\nMeasured on SPEED-Bench.\n")
    assert ("error", "L7", "prompts/qualitative.jsonl") in found(output)


def test_l8_target_and_source_are_base_models(output):
    make(output, LICENSE=NVIDIA)
    card = (output / "README.md").read_text()
    (output / "README.md").write_text(card.replace("- nvidia/Kimi-K2.6-Eagle3\n", ""))
    assert ("error", "L8", "README.md") in found(output)


@pytest.mark.parametrize(
    "claim",
    [
        "| Verified to have met prescribed NVIDIA quality standards: | Yes |",
        "This head is endorsed by Moonshot AI.",
        "An official NVIDIA release.",
    ],
)
def test_l9_no_endorsement(output, claim):
    make(output, LICENSE=NVIDIA)
    assert not [rule for _, rule, _ in found(output) if rule == "L9"]
    (output / "README.md").write_text(f"{(output / 'README.md').read_text()}\n{claim}\n")
    assert ("warning", "L9", "README.md") in found(output)


@pytest.mark.parametrize(
    ("text", "stated", "what"),
    [
        (NVIDIA, "mit", "is under the NVIDIA Open Model License"),
        (NVIDIA, None, "stated to be under none"),
        (APACHE, "mit", "is under the Apache License 2.0"),
        ("All rights reserved.", "mit", "a license that kconv does not know"),
    ],
    ids=["a restrictive one", "none stated", "another permissive one", "an unknown one"],
)
def test_l10_the_sources_license_is_not_replaced_by_another(output, tmp_path, text, stated, what):
    facts = FACTS.model_copy(update={"source_head": "AQ-MedAI/head", "license": LicenseFacts(id=stated)})
    (output.parent / "source" / "LICENSE").write_text(text)
    (tmp_path / "mine").write_text(MIT)
    write(output, make_card(gather(output, None, facts, license_files=[tmp_path / "mine"] * bool(stated))))
    assert (output / "LICENSE-SOURCE").read_text() == text
    # The source's folder is not needed to see it: the folder may be published elsewhere, and without these facts.
    for known in (facts, Facts()):
        [finding] = [one for one in check_folder(output, known) if one.rule == "L10"]
        assert finding.severity == "error" and what in finding.message


def test_l10_the_sources_licenses_are_all_stated(output):
    (output.parent / "source" / "LICENSE-TARGET").write_text(KIMI)
    make(output, LICENSE=NVIDIA)
    assert not (output / "LICENSE-SOURCE").exists()
    assert "L10" not in {rule for _, rule, _ in found(output)}


def test_a_folder_without_a_card_owes_one(tmp_path):
    assert {rule for _, rule, _ in found(tmp_path, Facts())} == {"L2", "L8"}


def test_trained_and_copied_parameters_stand_apart(output):
    copied(output, 3072)
    total = read_manifest(output).parameters
    text = make(output, LICENSE=NVIDIA).read_text()
    assert f"{total:,} ({total - 3072:,} trained; 3,072 copied from the target)" in text
    assert "covers the 3,072 parameters copied from it" in text


def test_card_and_notice_name_a_folder_without_the_path_that_leads_to_it(output, tmp_path):
    local = f"{tmp_path}/models/my-head"
    write_manifest(output, read_manifest(output).model_copy(update={"source": local}))
    texts = make(output, LICENSE=NVIDIA).read_text(), (output / "NOTICE").read_text()
    assert "| converted from | `my-head` (" in texts[0] and "from my-head (" in texts[1]
    assert str(tmp_path) not in "".join(texts)
    assert "files were changed" not in str([one.message for one in check_folder(output)])


def test_nothing_is_changed_in_a_head_that_kconv_did_not_make(tmp_path):
    facts = replace_name(FACTS)
    evidence = gather(tmp_path, None, facts)
    assert "Modified:" not in make_card(evidence, "nvidia").files["NOTICE"]


def replace_name(facts: Facts) -> Facts:
    return facts.model_copy(update={"name": "nvidia/Kimi-K2.6-Eagle3", "source_head": None})


def test_a_license_that_is_a_link_to_itself_is_none(output):
    (output / "LICENSE").symlink_to("LICENSE")
    assert any(severity == "error" for severity, _, _ in found(output, FACTS))
