"""Files by a schema: whatever a stranger sends, the error is the one that the caller names."""

import os

import pytest
from pydantic import BaseModel, ConfigDict

from kconv.checkpoint import schema
from kconv.checkpoint.schema import load_json, load_yaml
from kconv.errors import NotACheckpoint, RecipeInvalid

WORDS = {"what": "list of figures", "fix": "Write it again."}


class Figures(BaseModel):
    model_config = ConfigDict(extra="forbid")

    rows: list[int] = []


BAD_JSON = {
    "no JSON": b"{",
    "nothing": b"",
    "another key": b'{"row": []}',
    "another type": b'{"rows": ["x"]}',
    "no object": b"[]",
    "no UTF-8": b'{"rows\xff": []}',
    "nested too deeply": b'{"rows": ' + b"[" * 100_000,
}
BAD_YAML = {
    "no YAML": b"rows: [",
    "another key": b"row: []",
    "no mapping": b"- 1",
    "no UTF-8": b"rows: \xff\xfe\xff",
    "nested too deeply": b"rows: " + b"[" * 1000 + b"]" * 1000,
    "many by its aliases": b"".join(
        b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 10) if i else b"1") for i in range(9)
    ),
    "in itself": b"rows: &rows [*rows]",
    "a date that is none": b"rows: [2024-13-45]",
    "a number that is none": b'rows: [!!int ""]',
    "a Python object": b"rows: !!python/object/apply:os.getcwd []",
}


@pytest.mark.parametrize("text", BAD_JSON.values(), ids=BAD_JSON)
def test_json_that_is_not_of_the_schema_is_named(text, tmp_path):
    (tmp_path / "figures.json").write_bytes(text)
    with pytest.raises(RecipeInvalid) as caught:
        load_json(Figures, tmp_path / "figures.json", RecipeInvalid, **WORDS)
    assert caught.value.where.endswith("figures.json") and caught.value.fix == WORDS["fix"]


@pytest.mark.parametrize("text", BAD_YAML.values(), ids=BAD_YAML)
def test_yaml_that_is_not_of_the_schema_is_named(text, tmp_path):
    (tmp_path / "figures.yaml").write_bytes(text)
    with pytest.raises(RecipeInvalid) as caught:
        load_yaml(Figures, tmp_path / "figures.yaml", RecipeInvalid, **WORDS)
    assert caught.value.where.endswith("figures.yaml") and caught.value.fix == WORDS["fix"]


@pytest.mark.parametrize("load", [load_json, load_yaml])
def test_what_is_of_the_schema_is_read(load, tmp_path):
    (tmp_path / "file").write_text('{"rows": [1, 2]}')
    assert load(Figures, tmp_path / "file", RecipeInvalid, **WORDS).rows == [1, 2]


def test_an_empty_yaml_has_no_keys(tmp_path):
    (tmp_path / "file").touch()
    assert load_yaml(Figures, tmp_path / "file", RecipeInvalid, **WORDS).rows == []


@pytest.mark.parametrize("load", [load_json, load_yaml])
def test_what_is_no_file_is_named(load, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "absent", tmp_path / "a\0b"):
        with pytest.raises(RecipeInvalid):
            load(Figures, path, RecipeInvalid, **WORDS)
    with pytest.raises(NotACheckpoint, match="there is none"):
        load(Figures, tmp_path / "absent", RecipeInvalid, **WORDS, missing=NotACheckpoint("there is none"))


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "file").write_text('{"rows": [1, 2]}')
    monkeypatch.setattr(schema, "MAX_JSON", 5)
    with pytest.raises(RecipeInvalid, match="more than 5"):
        load_json(Figures, tmp_path / "file", RecipeInvalid, **WORDS)
