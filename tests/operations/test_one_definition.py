"""An operation is defined once: its command, its recipe step and its Python function take the same, and do the same."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from pydantic import Field
from support.heads import GQA, TARGET, random_slots, write_head
from support.releases import carry_out

import kconv
from kconv.checkpoint.manifest import MANIFEST
from kconv.cli import main
from kconv.cli.group import JOBS
from kconv.engines import by_name, writable
from kconv.errors import ConfigInvalid, KconvError, RequestInvalid
from kconv.operations import OPERATIONS, load
from kconv.options import flag, in_call, in_recipe, marks, plain_name, spell
from kconv.pipeline.recipe import kinds, read_step
from kconv.strict import StrictModel

COMMANDS = {name: name.replace("_", "-") for name in OPERATIONS} | {"convert": "to-vllm"}
# What each command has beside its operation's options.
BESIDE = {"as_json", "dry_run", "explain", "verbose"}


def command(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None, name
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_three_ways_take_the_same_with_the_same_defaults(name):
    cls = load(name)
    fixed = {"to"} if name == "convert" else set()
    params = {param.name: param for param in command(COMMANDS[name]).params if param.name not in BESIDE}
    parameters = inspect.signature(getattr(kconv, name)).parameters
    assert params.keys() | fixed == set(cls.model_fields) == parameters.keys()
    for field, info in cls.model_fields.items():
        default = inspect.Parameter.empty if info.is_required() else info.default
        assert parameters[field].default == default
        by_place = parameters[field].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert by_place is marks(info).argument
        if field not in fixed:
            assert isinstance(params[field], click.Argument) is marks(info).argument
            assert params[field].required is info.is_required()
            if not marks(info).argument:
                assert params[field].opts == [flag(field, info)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_recipe_takes_each_option_but_the_output(name):
    cls, known = load(name), set()
    for field in cls.model_fields:
        # A value of no type that any option has tells a key that is known from one that is not.
        try:
            read_step({"do": name.replace("_", "-"), plain_name(field): object()})
        except ValueError as error:
            if "is not a known key" not in str(error) and "the run sets it" not in str(error):
                known.add(field)
    assert known == set(cls.model_fields) - {cls.output()}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_option_has_a_sentence_and_every_command_an_example_and_json(name):
    cls = load(name)
    assert OPERATIONS[name].summary.endswith(".") and cls.EXAMPLES and OPERATIONS[name].job in JOBS
    assert all((info.description or "").endswith(".") for info in cls.model_fields.values())
    assert {param.name for param in command(COMMANDS[name]).params} >= {"as_json"}


def test_every_command_has_json():
    context = click.Context(main)
    without = [n for n in main.list_commands(context) if "as_json" not in {p.name for p in command(n).params}]
    assert without == []


def test_each_command_but_four_is_a_function():
    made = {COMMANDS[name] for name in OPERATIONS} | {f"to-{layout}" for layout in writable()}
    assert set(main.list_commands(click.Context(main))) - made == {"run", "serve", "demo", "completion"}
    assert all(callable(getattr(kconv, name)) for name in OPERATIONS)


@pytest.mark.parametrize("layout", writable())
def test_the_same_conversion_gives_the_same_bytes_in_each_way(layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_head(Path("source"), by_name("vllm"), GQA, random_slots(GQA))
    (target := Path("target")).mkdir()
    (target / "config.json").write_text(json.dumps(TARGET))
    # The library whose layout it is loads the target that a config names.
    more = {"target": str(target)} if layout == "speculators" else {}
    words = [word for name, value in more.items() for word in (f"--{name}", value)]
    done = CliRunner().invoke(main, [f"to-{layout}", str(source), "by-command", *words])
    assert done.exit_code == 0, done.output
    kconv.convert(source, Path("by-python"), to=layout, **more)
    step = {"do": "convert", "head": str(source), "to": layout} | more
    carry_out({"name": "r", "steps": {"head": step}}, Path("by-recipe"))
    folders = [read_folder(Path(folder)) for folder in ("by-command", "by-python", "by-recipe/head")]
    assert folders[0] == folders[1] == folders[2] and MANIFEST in folders[0]


def read_folder(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


WRONG: dict[str, tuple[str, tuple[str, ...], dict[str, Any], str]] = {
    "option does not exist": ("inspect", ("head",), {"speed": 1}, "no option speed="),
    "a recipe's key": ("train", ("target", "out"), {"recipe": "dflash", "steps": 2}, "steps, a key of set="),
    "a value that cannot be": ("validate", ("head",), {"draft_tokens": 99}, "invalid value for draft_tokens=:"),
    "an option without the one it goes with": ("convert", ("head", "out"), {"to": "vllm", "heal": 3}, "heal=: only"),
    "a layout that is none": ("convert", ("head", "out"), {"to": "gguf"}, "to='gguf' is not one of"),
    "a layout that is only read": ("convert", ("head", "out"), {"to": "modelopt"}, "to='modelopt' is not one of"),
    "an engine that is none": ("validate", ("head",), {"for_": "llamacpp"}, "for_="),
    "what is required": ("train", ("target", "out"), {"data": "x"}, "recipe= is required"),
}


@pytest.mark.parametrize("name, args, options, said", WRONG.values(), ids=WRONG)
def test_a_wrong_request_is_a_named_error_under_the_options_own_name(name, args, options, said):
    with pytest.raises(RequestInvalid, match=said) as error:
        getattr(kconv, name)(*args, **options)
    assert isinstance(error.value, KconvError) and error.value.code == "request-invalid"
    assert error.value.fix == f"See help(kconv.{name})." and "--" not in str(error.value)


def test_an_error_names_options_as_the_command_a_recipe_or_python_takes_them(tmp_path):
    source = write_head(tmp_path / "head", by_name("vllm"), GQA, random_slots(GQA))
    config = json.loads((source / "config.json").read_text())
    left = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_parameters")}
    (source / "config.json").write_text(json.dumps(left))
    said = CliRunner().invoke(main, ["to-vllm", str(source), str(tmp_path / "out")])
    assert said.exit_code == 1 and "Pass --rope-theta from" in said.output
    with pytest.raises(ConfigInvalid) as error:
        kconv.convert(source, tmp_path / "out", to="vllm")
    assert "Pass rope_theta= from" in error.value.fix and "--" not in str(error.value)
    recipe = tmp_path / "recipe.yaml"
    steps = {"converted": {"do": "convert", "head": str(source), "to": "vllm"}}
    recipe.write_text(json.dumps({"name": "one", "steps": steps}))
    said = CliRunner().invoke(main, ["run", str(recipe), "--out", str(tmp_path / "run")])
    assert said.exit_code == 1 and "Pass `rope_theta` from" in said.output


SPELLED = {
    "a value": ("Pass --layers 2.", "Pass layers=2."),
    "settings": (
        "or smaller rows, e.g. --set seq=512 --set x=1,3.",
        "or smaller rows, e.g. set={'seq': 512, 'x': [1, 3]}.",
    ),
    "a name with a word of Python's": ("name it with --from: vllm", "name it with from_=: vllm"),
    "a switch": ("Pass --no-card.", "Pass card=False."),
    "a quoted command": (
        "Run kconv to-vllm A.b --layers 2, then pass --layers.",
        "Run kconv to-vllm A.b --layers 2, then pass layers=.",
    ),
    "an option of an engine": ("Start it with --enable-metrics.", "Start it with --enable-metrics."),
}


@pytest.mark.parametrize("said, python", SPELLED.values(), ids=SPELLED)
def test_only_options_of_the_request_itself_are_spelled_otherwise(said, python):
    class Some(StrictModel):
        layers: int = 1
        from_: str = ""
        card: bool = True
        set: dict[str, str] = Field(default={})

    assert spell(said, Some, in_call) == python


def test_settings_are_one_mapping_in_a_recipe():
    class Some(StrictModel):
        set: dict[str, str] = Field(default={})

    said = "Pass --set seq=512 --set captured=1,3, or --set lr=1e-4."
    assert spell(said, Some, in_recipe) == "Pass `set: {seq: 512, captured: [1,3]}`, or `set: {lr: 1e-4}`."
    assert spell(said, Some, in_call) == "Pass set={'seq': 512, 'captured': [1, 3]}, or set={'lr': 0.0001}."
    quoted = "Run kconv train T OUT --set seq=512."
    assert spell(quoted, Some, in_recipe) == quoted


def test_a_result_in_place_of_its_file_is_told_where_that_is(tmp_path):
    report = kconv.validate(write_head(tmp_path / "head", by_name("vllm"), GQA, random_slots(GQA)))
    with pytest.raises(
        RequestInvalid, match=r"report=: .* is of type Report; pass what it was written to, as out= says"
    ):
        kconv.card(tmp_path / "head", report=report)


def test_a_step_is_any_operation():
    assert set(kinds()) == {name.replace("_", "-") for name in OPERATIONS}


def test_a_result_is_shown_by_its_own_lines_and_its_repr_is_short(tmp_path):
    source, out = write_head(tmp_path / "head", by_name("vllm"), GQA, random_slots(GQA)), tmp_path / "out"
    done = kconv.convert(source, out, to="vllm")
    assert repr(done) == f"Converted(out='{out}')"
    checked = kconv.verify(out)
    said = CliRunner().invoke(main, ["verify", str(out)], catch_exceptions=False)
    assert said.stdout.splitlines() == list(checked.lines())
