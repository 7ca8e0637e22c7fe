"""Files by a schema: whatever a stranger sends, the error is the one that the caller names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict
from support.fuzzing import LINEAR, growth

from kconv.checkpoint import schema
from kconv.checkpoint.schema import load_json, load_yaml, parse_yaml
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
    "many by its aliases, and a date that is none": b"".join(
        b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 10) if i else b"1") for i in range(30)
    )
    + b"rows: [2024-13-45]",
    "in itself": b"rows: &rows [*rows]",
    "a date that is none": b"rows: [2024-13-45]",
    "half a surrogate pair": b'rows: ["\\ud800"]',
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
    assert "figures.yaml" in caught.value.where and caught.value.fix == WORDS["fix"]


@pytest.mark.parametrize("load", [load_json, load_yaml])
def test_what_is_of_the_schema_is_read(load, tmp_path):
    (tmp_path / "file").write_text('{"rows": [1, 2]}')
    assert load(Figures, tmp_path / "file", RecipeInvalid, **WORDS).rows == [1, 2]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 0.0001),
        ("1.e3", 1000.0),
        ("-2E+1", -20.0),
        ("1.5", 1.5),
        ("e1", "e1"),
        ("7e1234", "7e1234"),
        ("12", 12),
    ],
)
def test_numbers_of_a_yaml_are_those_of_its_version_1_2(text, value):
    """https://yaml.org/spec/1.2.2/#1032-tag-resolution"""
    assert parse_yaml(f"a: {text}", RecipeInvalid, where="", **WORDS) == {"a": value}


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


MANY = {
    "lists": b"[" + b"[]," * 33_000_000 + b"[]]",
    "objects": b'{"a": [' + b"{}," * 33_000_000 + b"{}]}",
    "keys": b"{" + b",".join(b'"%d":0' % i for i in range(4_000_000)) + b"}",
}
MEASURED = """
import resource, sys
from pathlib import Path
from kconv.checkpoint.folder import read_json
from kconv.checkpoint.manifest import read_manifest
from kconv.errors import KconvError
folder = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_json(folder / "config.json") if sys.argv[2] == "config" else read_manifest(folder)
except KconvError as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10, error.what)
"""


@pytest.mark.slow
@pytest.mark.parametrize("which, name", [("config", "config.json"), ("manifest", "kconv.json")])
@pytest.mark.parametrize("kind", MANY)
def test_99_mb_of_json_take_no_4_gb(tmp_path, kind, which, name):
    (tmp_path / name).write_bytes(MANY[kind])
    command = [sys.executable, "-c", MEASURED, str(tmp_path), which]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown, _, what = said.partition(" ")
    # The text itself, and, of what is not refused for its number of values, what a schema that wants others takes.
    assert int(grown) < 700 << 20, (int(grown) >> 20, what)


def test_what_holds_many_values_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(schema, "MAX_JSON_VALUES", 5)
    monkeypatch.setattr(schema.json, "loads", None)
    for text in (b"[[], [], [], [], []]", b'{"a": 1, "b": 2, "c": [3, 4, 5]}'):
        with pytest.raises(ValueError, match="more than 5 values"):
            schema.parse_json(text)
        with pytest.raises(ValueError, match="more than 5 values"):
            schema.parse_object(text)


KEYS = {
    "plain": b'{"a": "b", "c": "d", "e": "f", "g" : 1}',
    "behind strings that look like keys": b'{"a": "\\"x\\": ", "b": "\\\\", "c": [":"], "d":{"a":"f"}}',
    "with quotes": b'{"\\"": 1, "\\\\": 2, "\\u0022": 3, "": 4}',
}


@pytest.mark.parametrize("text", KEYS.values(), ids=KEYS)
def test_the_different_keys_are_counted_and_no_other_strings(tmp_path, monkeypatch, text):
    (tmp_path / "file").write_bytes(text)
    for most, what in ((3, "more than 3 different keys"), (4, "not a known key")):
        monkeypatch.setattr(schema, "MAX_KEYS", most)
        with pytest.raises(RecipeInvalid, match=what):
            load_json(Figures, tmp_path / "file", RecipeInvalid, **WORDS)


@pytest.mark.parametrize("end", [b'"}', b"", b"\\"], ids=["whole", "without an end", "cut in an escape"])
def test_a_string_of_quotes_takes_linear_time(tmp_path, monkeypatch, end):
    monkeypatch.setattr(schema, "MAX_KEYS", 3)

    def write(count):
        file = tmp_path / str(count)
        file.write_bytes(b'{"source": "' + rb"\"" * count + end)
        return file

    def read(file):
        with pytest.raises(RecipeInvalid):
            load_json(Figures, file, RecipeInvalid, **WORDS)

    assert growth(read, write, 2000) < LINEAR


READERS = ("read_bounded", "read_text", "read_lines")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/dev/null"])
def test_a_device_is_named_and_not_read(reader, device, tmp_path):
    (tmp_path / "config.json").symlink_to(device)
    limit = {"limit": 100} if reader != "read_lines" else {}
    with pytest.raises(NotACheckpoint):
        list(getattr(schema, reader)(tmp_path / "config.json", NotACheckpoint, fix="x", **limit))


def test_no_descriptor_is_left_open(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(NotACheckpoint):
            schema.read_bounded(path, NotACheckpoint, limit=10, fix="x")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_lines_come_one_by_one_with_their_numbers(tmp_path, monkeypatch):
    (tmp_path / "lines").write_bytes("\ufeffone\n\n  \nfour\r\nfive".encode())
    assert list(schema.read_lines(tmp_path / "lines", NotACheckpoint, fix="x")) == [
        (1, "one\n"), (4, "four\r\n"), (5, "five"),
    ]  # fmt: skip
    monkeypatch.setattr(schema, "MAX_LINE", 6)
    (tmp_path / "lines").write_bytes(b"one\n\nthe third")
    with pytest.raises(NotACheckpoint, match="line 3 is longer"):
        list(schema.read_lines(tmp_path / "lines", NotACheckpoint, fix="x"))
