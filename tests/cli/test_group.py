"""The group: its jobs, what a mistyped command is answered with, versions, colours, completion, width."""

import errno
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.commands import COMMANDS, fault_of
from support.heads import MLA, random_slots, write_head
from support.published import EAGLE3

from kconv.cli import main
from kconv.cli.group import JOBS, OTHER_WORDS, REST, Kconv, likely, sections
from kconv.cli.versions import version_lines
from kconv.engines.trtllm import TRTLLM
from kconv.installed import LIBRARIES, install_command

KCONV = [sys.executable, "-c", "from kconv.cli import main; main(prog_name='kconv')"]
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]")


def say(*arguments, **options):
    return CliRunner().invoke(main, list(arguments), prog_name="kconv", **options)


def on_terminal(*arguments, **variables):
    """Return what a command prints where stdout and stderr are a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    own = {"TERM": "xterm-256color", "COLUMNS": "80", "NO_COLOR": "", **variables}
    with subprocess.Popen([*KCONV, *arguments], stdout=theirs, stderr=theirs, env=os.environ | own) as running:
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux says so where the other side has closed
                break
            if not part:
                break
            said += part
    os.close(ours)
    return running.returncode, said.decode()


def test_every_command_has_one_job():
    placed = sections(list(COMMANDS))
    assert sorted(name for names in placed.values() for name in names) == sorted(COMMANDS)
    assert list(placed) == list(JOBS), "an operation names its job, one of cli/group.py's"


def test_a_command_of_no_job_is_listed_all_the_same():
    assert sections(["demo", "new"]) == {"Try it": ["demo"], REST: ["new"]}


def test_the_group_lists_every_command_under_its_job_with_a_sentence():
    lines = say("--help", terminal_width=80).stdout.splitlines()
    for job, names in sections(list(COMMANDS)).items():
        start = lines.index(f"{job}:")
        for name in names:
            (at,) = [i for i, line in enumerate(lines) if line.split(" ")[2:3] == [name] and line[:2] == "  "]
            assert at > start and len(lines[at].split()) > 3


def test_nothing_at_all_is_answered_with_where_to_start():
    result = say()
    assert result.exit_code == 2 and result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) < 10 and max(map(len, lines)) <= 80
    calls = [re.split(r"  +", line.strip())[0] for line in lines if line.startswith("  kconv")]
    assert len(calls) >= 3 and [fault_of(call) for call in calls] == [""] * len(calls)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_slip_of_the_finger_is_understood(name):
    for slip in (name[:-1], name + name[-1], name[1] + name[0] + name[2:], name.upper()):
        if slip not in COMMANDS:
            result = say(slip)
            assert result.exit_code == 2 and result.stdout == ""
            assert re.search(rf"Did you mean .*\b{name}\b", result.stderr), slip


@pytest.mark.parametrize("word, names", OTHER_WORDS.items())
def test_other_words_are_understood(word, names):
    assert set(names) <= set(likely(word, list(COMMANDS)))
    assert set(names) <= COMMANDS.keys() and word not in COMMANDS


def test_another_layout_is_answered_with_those_that_kconv_writes():
    assert "Did you mean to-vllm, to-sglang, to-trtllm" in say("to-nemo", "head", "out").stderr


@pytest.mark.parametrize("word, said", {"--epochs": "--set passes=N", "--learning-rate": "--set lr=RATE"}.items())
def test_a_setting_of_a_recipe_that_is_given_as_an_option_is_understood(word, said):
    result = say("train", "target", "out", word, "3")
    assert result.exit_code == 2 and f"Did you mean {said}?" in result.stderr
    assert said not in say("inspect", "head", word, "3").stderr


def test_a_word_that_is_nothing_like_a_command_gets_no_guess():
    result = say("qwertz")
    assert result.exit_code == 2 and "qwertz" in result.stderr and "mean" not in result.stderr


def test_the_version_names_what_results_depend_on():
    lines = say("--version").stdout.splitlines()
    assert lines[0] == f"kconv, version {version('kconv')}"
    assert lines[1].startswith(f"Python {sys.version.split()[0]} on ")
    assert lines[2:] == [f"{name} {version(name)}" for name in LIBRARIES]


def test_the_version_names_what_is_not_there(monkeypatch):
    monkeypatch.setitem(LIBRARIES, "no-such-library", "optimize")
    assert version_lines()[-1] == f"no-such-library is not installed; {install_command('optimize')}"


def test_the_version_imports_nothing_heavy():
    code = (
        "import sys; from kconv.cli import main; main(['--version'], standalone_mode=False);"
        "print({'torch', 'transformers', 'modelopt', 'safetensors', 'huggingface_hub'} & sys.modules.keys())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell):
    script = say("completion", shell).stdout
    assert f"_KCONV_COMPLETE={shell}_complete" in script and "kconv" in script


def test_bash_completes_commands():
    asked = {"_KCONV_COMPLETE": "bash_complete", "COMP_WORDS": "kconv to-", "COMP_CWORD": "1"}
    ran = subprocess.run(KCONV, env=os.environ | asked, capture_output=True, text=True, check=False)
    names = {line.partition(",")[2] for line in ran.stdout.splitlines()}
    assert names == {name for name in COMMANDS if name.startswith("to-")}


@pytest.mark.parametrize(
    "words, some",
    [
        ("validate head --for v", {"vllm", "vllm-v1", "vllm-v2"}),
        ("validate --explain k10", {"K101", "K104", "K108"}),
        ("train target out --recipe eagle3", {"eagle3-gqa", "eagle3-mla"}),
        ("quantize target out --recipe nvfp4-m", {"nvfp4-mlp"}),
        ("inspect head --from m", {"modelopt"}),
        ("serve head --target target --engine ", {"vllm", "sglang"}),
        ("bench --engine s", {"sglang"}),
        ("card head --license apache", {"apache-2.0"}),
    ],
)
def test_bash_completes_values(words, some):
    asked = {
        "_KCONV_COMPLETE": "bash_complete",
        "COMP_WORDS": f"kconv {words}",
        "COMP_CWORD": str(words.count(" ") + 1),
    }
    ran = subprocess.run(KCONV, env=os.environ | asked, capture_output=True, text=True, check=False)
    found = {line.partition(",")[2] for line in ran.stdout.splitlines()}
    begun = words.rpartition(" ")[2]
    assert found >= some and all(value.lower().startswith(begun) for value in found)


def test_faults_are_red_on_a_terminal_and_plain_with_no_color(tmp_path):
    missing = str(tmp_path / "gone")
    code, coloured = on_terminal("inspect", missing)
    assert code == 1 and "error: " in coloured.replace("\x1b[0m", "") and COLOUR.search(coloured)
    code, plain = on_terminal("inspect", missing, NO_COLOR="1")
    assert code == 1 and "error: " in plain and "\x1b" not in plain


@pytest.mark.parametrize("wrong", [("inspect", "gone"), ("serving", "head"), ("train", "a", "b", "--epochs", "3"),
                                   ("to-vllm", "{head}", "out", "--captured", "1,2")])  # fmt: skip
def test_errors_are_folded_between_words_on_a_terminal(tmp_path, monkeypatch, wrong):
    monkeypatch.chdir(tmp_path)
    write_head(Path("some-head"), TRTLLM, MLA, random_slots(MLA))
    words = [word.format(head="some-head") for word in wrong]
    code, shown = on_terminal(*words, NO_COLOR="1", COLUMNS="50")
    lines = shown.replace("\r\n", "\n").splitlines()
    assert code and len(lines) > 2
    assert [line for line in lines if len(line) > 50] == []
    piped = say(*words).stderr
    assert piped.split() == shown.split() and len(piped.splitlines()) < len(lines)


def test_the_next_command_stays_one_line_on_a_terminal(tmp_path):
    head = str(write_head(tmp_path / "head", TRTLLM, MLA, random_slots(MLA)))
    out = str(tmp_path / "a folder with a longer name")
    code, shown = on_terminal("to-vllm", head, out, NO_COLOR="1", COLUMNS="50")
    assert code == 0 and f"next: kconv validate '{out}' --source {head}" in shown.splitlines()


def test_what_is_not_verified_is_folded_between_words(tmp_path):
    head = EAGLE3["SafeAILab, Llama-3.1"].write(tmp_path / "head")
    words = ("to-portable", str(head), str(tmp_path / "out"), "--target-layers", "32")
    _, shown = on_terminal(*words, NO_COLOR="1", COLUMNS="50")
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in shown.splitlines()]
    lines = lines[next(at for at, line in enumerate(lines) if line.startswith("not verified: captured")) :]
    assert all(len(line) <= 50 or line.startswith("next:") for line in lines), lines
    assert "not verified: captured: outputs of layers [1, 15, 28] (each" in " ".join(lines)


@pytest.mark.parametrize("arguments", [("inspect", "{head}"), ("to-vllm", "{head}", "{out}", "--dry-run"),
                                       ("validate", "{head}", "--for", "all")])  # fmt: skip
def test_tables_fit_80_columns_and_lose_nothing(tmp_path, arguments):
    head = write_head(tmp_path / "head", TRTLLM, MLA, random_slots(MLA))
    places = {"head": str(head), "out": str(tmp_path / "out")}
    _, said = on_terminal(*(word.format(**places) for word in arguments), NO_COLOR="1")
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in said.splitlines()]
    assert not [line for line in lines if len(line) > 80]
    assert "…" not in said


def test_severities_have_colors_and_the_verdict_of_each_engine_stands_last(tmp_path):
    head = str(write_head(tmp_path / "head", TRTLLM, MLA, random_slots(MLA)))
    code, shown = on_terminal("validate", head, "--for", "all")
    assert code == 1 and "\x1b[1;31merror K140\x1b[0m" in shown and "\x1b[1;33mwarning K143\x1b[0m" in shown
    assert "note K" not in shown and re.search(r"\d notes; -v shows them", shown)
    last = shown.splitlines()[-1]
    assert last.startswith("\x1b[1;31mFAIL\x1b[0m vLLM (1) · \x1b[1;32mPASS\x1b[0m SGLang · ")
    _, plain = on_terminal("validate", head, "--for", "all", "-v", NO_COLOR="1", COLUMNS="60")
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in plain.splitlines()]
    assert lines[-1] == "FAIL vLLM (1) · PASS SGLang · PASS TensorRT-LLM"
    assert "note K144" in plain and "-v shows" not in plain and not [line for line in lines if len(line) > 60]
    # What continues a fix stands below its beginning.
    fixes = [(line, after) for line, after in pairwise(lines) if line.startswith("  fix: ")]
    more = [after for _, after in fixes if not after.startswith(("error", "warning", "note", "checked"))]
    assert more and all(re.match(r" {7}\S", line) for line in more)


def test_a_link_stands_behind_its_label_and_is_never_folded(tmp_path):
    spec = replace(MLA, dtype="F32")
    head = write_head(tmp_path / "head", TRTLLM, spec, random_slots(spec))
    code, shown = on_terminal("to-trtllm", str(head), str(tmp_path / "out"), NO_COLOR="1", COLUMNS="50")
    assert code == 1 and re.search(r"^  see:   https://\S{60,}\s*$", shown, re.MULTILINE)


@pytest.mark.parametrize(("package", "extra"), [("transformers", "optimize"), ("matplotlib", "plots")])
def test_a_package_of_an_extra_that_is_missing_is_named_with_the_extra(package, extra):
    group = Kconv("kconv")

    @group.command()
    def go() -> None:
        raise ModuleNotFoundError(f"No module named '{package}.deep'", name=f"{package}.deep")

    done = CliRunner().invoke(group, ["go"])
    assert done.exit_code == 1
    assert f"fix:   Run {install_command(extra)}." in done.stderr


def test_a_module_that_no_extra_brings_is_a_bug_and_is_not_hidden():
    group = Kconv("kconv")

    @group.command()
    def go() -> None:
        raise ModuleNotFoundError("No module named 'kconv.gone'", name="kconv.gone")

    assert isinstance(CliRunner().invoke(group, ["go"]).exception, ModuleNotFoundError)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [("inspect", "{head}"), ("validate", "{head}", "--json"), ("--help",)])
def test_a_full_disk_under_stdout_is_a_named_fault(tmp_path, arguments, unbuffered):
    head = write_head(tmp_path / "head", TRTLLM, MLA, random_slots(MLA))
    words, own = [word.format(head=head) for word in arguments], {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run([*KCONV, *words], stdout=full, stderr=subprocess.PIPE, text=True, env=os.environ | own)
    assert ran.returncode == 1
    assert ran.stderr.splitlines() == [
        "error: the output could not be written: No space left on device",
        "  where: stdout, or the file of a report",
        "  fix:   Free some space, or write to another disk. A finished checkpoint is complete and stays.",
    ]


def test_another_fault_of_the_system_is_not_taken_for_a_full_disk(monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(COMMANDS["completion"], "callback", fail)
    assert isinstance(say("completion", "bash").exception, OSError)


def test_a_missing_choice_is_said_in_two_sentences():
    done = CliRunner().invoke(main, ["quantize-head", "a", "b", "--target", "t", "--states", "s"])
    assert done.exit_code == 2 and "Number format of the linear layers. Choose from:" in done.stderr
