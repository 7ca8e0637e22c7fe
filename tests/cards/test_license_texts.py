"""License texts: which are recognised, and what they say."""

from __future__ import annotations

import pytest
from support.releases import APACHE, KIMI, MIT, NVIDIA, TEXTS

from kconv.cards.facts import LicenseFacts
from kconv.cards.licenses import (
    LICENSES,
    attribution_in,
    by_id,
    copyright_in,
    digest_text,
    given_texts,
    recognise,
    unstated_text,
)
from kconv.errors import LicenseUnknown


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_known_by_its_marks(name):
    found = recognise(TEXTS[name])
    assert found is not None and found.id == name


@pytest.mark.parametrize("text", ["", "All rights reserved.", "MIT", "Kimi K3 License"])
def test_any_other_text_is_not(text):
    assert recognise(text) is None


def test_a_text_says_whose_it_is_and_what_name_to_show():
    assert attribution_in(KIMI) == "Kimi K2.6" and copyright_in(KIMI) == "Copyright (c) 2025 Moonshot AI"
    assert attribution_in(MIT) is None
    for line in ("Copyright 2025 Tiny Labs", "Copyright © 2023-2025, Tiny Labs", "copyright (c) 2024 Tiny Labs"):
        assert copyright_in(f"MIT License\n\n{line}\n\nPermission") == line
    assert copyright_in("Copyright [yyyy] [name of copyright owner]") is None
    assert digest_text(KIMI) == digest_text(KIMI.replace("\n", "  \n").replace("“", '"').replace("”", '"'))


def test_a_license_that_kconv_does_not_know_is_named():
    with pytest.raises(LicenseUnknown, match="gpl"):
        by_id("gpl-9")


@pytest.mark.parametrize("name", ["Apache-2.0", "APACHE-2.0", "apache-2.0"])
def test_a_license_is_known_by_its_spdx_spelling(name):
    assert by_id(name).id == "apache-2.0"
    assert LicenseFacts(id=name, target=name) == LicenseFacts(id="apache-2.0", target="apache-2.0")


def test_a_file_that_is_no_license_is_named(tmp_path):
    (tmp_path / "terms.txt").write_text("Do as you like.")
    for file in (tmp_path / "terms.txt", tmp_path / "nowhere"):
        with pytest.raises(LicenseUnknown):
            given_texts([file], "mit", None)


def test_each_given_text_is_used_or_refused_by_its_name(tmp_path):
    def given(own: str | None, target: str | None, **files: str):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        texts, theirs = given_texts([tmp_path / name for name in files], own, LICENSES[target] if target else None)
        return [(text.origin.name, text.license.id) for text in texts], theirs and theirs.id

    assert given("apache-2.0", "modified-mit", A=KIMI, B=APACHE) == (
        [("A", "modified-mit"), ("B", "apache-2.0")], "modified-mit",
    )  # fmt: skip
    assert given("apache-2.0", None, **{"A": APACHE, "LICENSE-TARGET": MIT})[1] == "mit"
    assert given("mit", "mit", A=MIT, B=MIT.replace("\n", " \n")) == ([("A", "mit")], "mit"), "one text, twice"
    with pytest.raises(LicenseUnknown, match="A is the text of the MIT License, which is not stated") as fault:
        given("apache-2.0", "modified-mit", B=APACHE, A=MIT)
    assert "--license mit" in fault.value.fix and "LICENSE-TARGET" in fault.value.fix
    with pytest.raises(LicenseUnknown, match="A is the text of the Apache License"):
        given(None, None, A=APACHE)
    with pytest.raises(LicenseUnknown, match="A and B are different texts of the MIT License"):
        given("mit", "mit", A=MIT, B=MIT.replace("2025", "2026"))


@pytest.mark.parametrize("license", LICENSES.values(), ids=LICENSES)
def test_each_license_says_how_the_hub_is_told(license):
    assert license.identifier in ("other", license.id)
    assert not license.url or license.url.startswith("https://")


HELD = {
    "all are stated": ({"LICENSE": MIT, "LICENSE-TARGET": KIMI}, ""),
    "the target's beside it": ({"LICENSE": NVIDIA, "LICENSE-TARGET": KIMI}, NVIDIA),
    "the target's beside it, first by its name": ({"COPYING": KIMI, "LICENSE": NVIDIA}, NVIDIA),
    "the one that a first card stated": ({"LICENSE": MIT, "LICENSE-SOURCE": NVIDIA}, NVIDIA),
    "the source's own is stated": ({"LICENSE": APACHE, "LICENSE-SOURCE": MIT}, ""),
    "under another name": ({"LICENSE": MIT, "COPYING": NVIDIA}, NVIDIA),
    "in lower case": ({"LICENSE": MIT, "license.txt": NVIDIA}, NVIDIA),
    "one that kconv does not know": ({"LICENSE": MIT, "LICENSE-MODEL": "All rights reserved."}, "All rights reserved."),
}


@pytest.mark.parametrize(("held", "unstated"), HELD.values(), ids=HELD)
def test_a_stated_license_does_not_hide_another_of_the_sources(tmp_path, held, unstated):
    for name, text in held.items():
        (tmp_path / name).write_text(text)
    assert unstated_text(tmp_path, ("mit", "modified-mit")) == unstated
