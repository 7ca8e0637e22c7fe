"""What `--json` prints has a schema; `conftest.py` checks every object that any test prints."""

import inspect
import json

import pytest
from click.testing import CliRunner
from support.heads import GQA, random_slots, write_head

from kconv import errors
from kconv.cli import main
from kconv.cli.group import operation_commands
from kconv.engines import by_name

ERRORS = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, errors.KconvError)]


def test_each_command_has_a_schema(schemas):
    commands = {"to-vllm" if name.startswith("to-") else name for name in (*operation_commands(), *main.commands)}
    assert commands | {"error"} == schemas.keys()
    for one in schemas.values():
        one.check_schema(one.schema)


@pytest.mark.parametrize("kind", ERRORS)
def test_each_error_is_one_object(schemas, kind):
    printed = kind("a tensor is missing", where="model.safetensors", fix="Export it again.").as_json()
    schemas["error"].validate(json.loads(json.dumps(printed)))


def test_a_key_too_many_or_too_few_is_seen(schemas, tmp_path):
    write_head(tmp_path / "head", by_name("vllm"), GQA, random_slots(GQA))
    printed = json.loads(CliRunner().invoke(main, ["inspect", str(tmp_path / "head"), "--json"]).stdout)
    assert schemas["inspect"].is_valid(printed)
    assert not schemas["inspect"].is_valid(printed | {"unknown": 1})
    assert not schemas["inspect"].is_valid({key: value for key, value in printed.items() if key != "layout"})
