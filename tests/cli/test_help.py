"""Help: each command has an example that the command itself can parse, and every option says what it does."""

import ast
import re

import click
import pytest
from click.testing import CliRunner
from support.commands import COMMANDS, fault_of
from support.listing import PRODUCT, ROOT

from kconv.cli import main
from kconv.drafters.eagle3 import EAGLE3
from kconv.engines import LAYOUTS
from kconv.operations import OPERATIONS, load
from kconv.options import flag

NAMES = sorted(COMMANDS)


def text(*arguments, width=80):
    """Return what a help says, line by line."""
    result = CliRunner().invoke(main, [*arguments, "--help"], terminal_width=width)
    assert result.exit_code == 0 and result.stderr == ""
    return result.stdout.splitlines()


def examples(name):
    lines = [line.strip() for line in "\n".join(text(name)).replace(" \\\n", "").splitlines()]
    lines = [" ".join(line.split()) for line in lines]
    return [line for line in lines if line.startswith((f"kconv {name} ", "torchrun "))]


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_an_example_that_parses(name):
    assert any(line.strip().startswith("Example") for line in text(name))
    assert any(line.startswith(f"kconv {name}") for line in examples(name))
    for example in examples(name):
        assert fault_of(example) == "", example


# Options of other programs that kconv names or passes on.
FOREIGN = {
    "vLLM": "--compilation-config --disable-log-stats --dtype --enforce-eager --host --kv-transfer-config "
    "--max-model-len --model --model-impl --per-request-spec-decode-metrics --port --speculative-config "
    "--tensor-parallel-size",
    "SGLang": "--context-length --disable-radix-cache --enable-metrics --model-path --skip-server-warmup "
    "--speculative-algorithm --speculative-draft-attention-backend --speculative-draft-model-path "
    "--speculative-eagle-topk --speculative-num-draft-tokens --speculative-num-steps --tp-size",
    "TensorRT-LLM": "--backend --config --tp_size --trust_remote_code",
    "torchrun": "--no-python --nproc-per-node",
    "ModelOpt": "--cast_mxfp4_to_nvfp4",
    "git": "--always --dirty --exclude",
    "hf": "--local-dir --repo-type",
    "scripts/real": "--quick --work",
    # What users try; kconv answers with its own name for it.
    "other converters": "--output --output-dir --overwrite --layer-ids --aux-layers --aux-hidden-state-layers --size",
    "engines": "--backend --model --draft --drafter --draft-model --verifier --k --num-speculative-tokens "
    "--num-draft-tokens",
    "other trainers": "--dataset --epochs --num-epochs --passes --lr --learning-rate --batch-size --batch --steps "
    "--seq-len --max-length",
    "click": "--help",
}
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def options() -> set[str]:
    """Return the options of all commands, and of the steps of recipes, which errors name the same way."""
    params = [param for command in (main, *COMMANDS.values()) for param in command.params]
    steps = {flag(field) for name in OPERATIONS for field in load(name).model_fields}
    return {name for param in params for name in (*param.opts, *param.secondary_opts)} | steps


def test_every_option_that_a_text_names_is_one():
    known = options() | {option for foreign in FOREIGN.values() for option in foreign.split()}
    texts = {
        f"{file.relative_to(ROOT)}:{node.lineno}:{node.col_offset}": node.value
        for file in PRODUCT
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    texts |= {str(file.relative_to(ROOT)): file.read_text() for file in ROOT.glob("cards/templates/*.jinja")}
    assert len(texts) > 1000
    dead = {where: gone for where, text in texts.items() if (gone := set(OPTION.findall(text)) - known)}
    assert dead == {}


@pytest.mark.parametrize("name", NAMES)
def test_every_option_says_what_it_does(name):
    for option in COMMANDS[name].params:
        if isinstance(option, click.Option):
            assert option.help and option.help.partition("  [")[0].endswith("."), option.name


@pytest.mark.parametrize("name", NAMES)
def test_every_operand_is_spoken_of(name):
    words = " ".join(text(name)[1:])
    for operand in COMMANDS[name].params:
        if isinstance(operand, click.Argument):
            shown = operand.make_metavar(click.Context(COMMANDS[name])).strip("[].…{}")
            assert shown.split("|")[0] in words, shown


@pytest.mark.parametrize("name", ["", *NAMES])
def test_help_fits_80_columns(name):
    lines = text(*filter(None, [name]))
    # JSON and an address have no place to break.
    verbatim = [
        line for line in lines if line.startswith("    --") or "https://" in line or "eagle_" in line or "kv_" in line
    ]
    assert not [line for line in lines if len(line) > 80 and line not in verbatim]
    assert not [line for line in lines if re.search(r"default: \(|<=x|x>", line)], "defaults and ranges are in words"


@pytest.mark.parametrize(
    "layout",
    [layout for layout in LAYOUTS if layout.write_config and layout.drafter is EAGLE3],
    ids=lambda layout: layout.name,
)
def test_a_conversion_says_that_an_lm_head_is_added_where_one_is_needed(layout):
    said = "If HEAD has no lm_head, --target adds its own." in " ".join(" ".join(text(f"to-{layout.name}")).split())
    assert said is ("lm_head" in layout.needs)


def test_help_shows_last_what_decides_an_open_fact():
    lines = text("to-vllm")
    heading = lines.index("If HEAD's files leave a fact open:")
    own, rare = "\n".join(lines[:heading]), "\n".join(lines[heading:])
    assert "--captured IDS" in rare and "--captured IDS" not in own
    assert "--target PATH" in own and "--json" in own


def test_every_option_of_the_group_says_what_it_does():
    assert all(option.help for option in main.params if isinstance(option, click.Option))


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["inspect"], ["inspect", "a", "b"], ["to-vllm", "a"], ["inspect", "x", "--what"]]
)
def test_misuse_is_exit_2_and_names_the_help(arguments):
    result = CliRunner().invoke(main, arguments, prog_name="kconv")
    assert result.exit_code == 2 and result.stdout == ""
    assert "Usage:" in result.stderr and "--help' for help" in result.stderr


@pytest.mark.parametrize("ids", ["", "1,", "a", "3,1", "1,1", "-1,2", "1 2", "9" * 5000])
def test_captured_layers_that_are_no_ascending_list_are_misuse(ids, tmp_path):
    result = CliRunner().invoke(main, ["inspect", str(tmp_path), "--captured", ids])
    assert result.exit_code == 2 and "ascending" in result.stderr
