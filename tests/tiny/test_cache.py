"""Cache names: the same recipe finds what it made, and any change of it does not."""

import dataclasses
from pathlib import Path

import pytest

from kconv.tiny.recipe import DEMO, TEST, TinyRecipe, cache_root, recipe_key


def test_the_environment_names_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KCONV_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("KCONV_CACHE")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_root() == Path("/somewhere/.cache/kconv")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(TinyRecipe)])
def test_each_field_of_a_recipe_counts(field):
    changed = dataclasses.replace(DEMO, **{field: getattr(DEMO, field) * 2 + 1})
    assert recipe_key(changed, source="1") != recipe_key(DEMO, source="1")


def test_equal_recipes_share_a_key_until_the_code_changes():
    assert recipe_key(dataclasses.replace(TEST), source="1") == recipe_key(TEST, source="1")
    assert recipe_key(TEST, source="2") != recipe_key(TEST, source="1")


def test_another_version_of_a_library_counts(monkeypatch):
    before = recipe_key(TEST, source="1")
    monkeypatch.setattr("kconv.tiny.recipe.version", lambda name: "99.0")
    assert recipe_key(TEST, source="1") != before
