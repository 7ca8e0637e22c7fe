"""Text of strangers where it is shown: each function by an outside reader, and nothing printed around them."""

import json
import re
import subprocess

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from support.listing import PRODUCT, ROOT, calls

from kconv import escape
from kconv.errors import KconvError

HOSTILE = (
    "\x1b[2J\x1b[H\x1b]0;title\x07", "\x9b31m", "a\r\nb", "\u202egnp.exe", "\x00\x08\x7f", "\ud800", "| a | b |",
    "# Acceptance", "[link](https://evil)", "![x](https://evil/x.png)", "<script>alert(1)</script>", "`code`", "```",
    "[r]: https://evil", "> quoted", "---", "a\n\n## Acceptance\n\n| drafter | sampled |", "$(touch x)", "; rm -rf ~",
    "a: b", "no", "2026-01-01", "1e3", "*x", "&a", "!!python/object:os", "{{ 7*7 }}", "'", '"', "", " ", "é\U0001f600",
)  # fmt: skip
TEXTS = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40), st.text("#|[]()<>`~-=!\\\n\r\x1b ab", max_size=30))


@given(TEXTS)
def test_a_terminal_is_given_nothing_to_obey(text):
    shown = escape.terminal(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    assert escape.terminal(shown.encode().decode()) == shown


@given(TEXTS)
def test_json_that_is_shown_is_still_that_json(text):
    assert json.loads(escape.terminal(json.dumps(text, ensure_ascii=False))) == text


@given(TEXTS)
def test_a_shells_word_is_that_word(text):
    text = text.replace("\0", "").encode(errors="ignore").decode()
    said = subprocess.run(["/bin/sh", "-c", f"printf %s {escape.command([text])}"], capture_output=True, check=True)
    assert said.stdout.decode() == text


@given(TEXTS)
def test_a_yaml_value_is_that_text(text):
    text = text.encode(errors="ignore").decode()
    assert yaml.safe_load(f"key: {escape.yaml(text)}") == {"key": text}


def kinds(markdown):
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(markdown)
    return [t.type for t in tokens], [c.type for t in tokens for c in t.children or ()]


@given(TEXTS)
def test_text_in_markdown_is_one_cell_of_text(text):
    blocks, inline = kinds(f"| a | b |\n|---|---|\n| {escape.markdown(text)} | {escape.code(text)} |\n\nend")
    assert blocks.count("td_open") == 2 and blocks.count("table_open") == 1 and "heading_open" not in blocks
    assert not {"link_open", "image", "html_inline"} & set(inline), inline


@given(TEXTS)
@example("-\n#")
@example("1. > a")
@example("* * *")
@example("___")
def test_text_at_the_start_of_a_line_of_markdown_begins_no_block(text):
    blocks, inline = kinds(f"before\n\n{escape.markdown(text)}\n\nafter")
    assert not {"heading_open", "fence", "blockquote_open", "hr", "html_block", "table_open"} & set(blocks)
    assert not {"link_open", "image", "html_inline"} & set(inline), inline


CLI = sorted((ROOT / "cli").glob("*.py"))


@pytest.mark.parametrize("file", [file for file in CLI if file.name != "terminal.py"], ids=lambda file: file.name)
def test_the_command_line_prints_through_the_one_place(file):
    assert not {"click.echo", "print", "Console", "sys.stdout.write", "sys.stderr.write"} & set(calls(file))


def test_what_else_prints_is_known():
    printing = {str(f.relative_to(ROOT)) for f in PRODUCT if {"click.echo", "print", "Console"} & set(calls(f))}
    assert printing == {"cli/terminal.py"}


def test_shell_words_and_commands_are_quoted_in_one_place():
    quoting = {
        str(file.relative_to(ROOT)) for file in PRODUCT if {"shlex.quote", "shlex.join"} & set(calls(file))
    }  # fmt: skip
    assert quoting == {"escape.py"}
    for file in PRODUCT:
        assert "shell=True" not in file.read_text(), file
        assert not {"eval", "exec", "os.system", "os.popen"} & set(calls(file)), file


@pytest.mark.parametrize("name", ["made", "measured", "performance"])
def test_what_evidence_says_goes_into_a_card_escaped(name):
    """Evidence is another's; facts are the owner's own words, of which `said` makes one line."""
    text = (ROOT / "cards" / "templates" / f"{name}.jinja").read_text()
    own = {"verified", "chart", "steps", "steps + 1", '"%.0f" | format(100 * text.distinct_4grams)'}
    own |= {
        "grid(table)",
        "grid(folded, legend=not alike)",
    }  # a macro of the same file, whose cells are looked at here too
    for shown in re.findall(r"\{\{-?\s*(.*?)\s*-?\}\}", text):
        assert shown in own or re.search(r"\| (cell|code)$", shown), shown


@pytest.mark.parametrize("place", ["what", "where", "fix"])
def test_no_error_shows_a_password(place):
    said = {"what": "it fails", "where": "here", "fix": "Do so."} | {place: "see https://me:s3cret@host:80/x and on"}
    fault = KconvError(said["what"], where=said["where"], fix=said["fix"])
    assert "s3cret" not in str(fault) + repr(fault) + repr(fault.problem())
    assert "https://***@host:80/x and on" in str(fault)


def test_an_address_without_a_password_stays_as_it_is():
    for text in ("https://huggingface.co/org/name@main", "https://host/a@b", "org/name@rev: http://[::1]:80"):
        assert KconvError(text).what == text


@pytest.mark.parametrize("text", ["a\\|b", "|", "\\\\|x", "a|b\\", "x|\\|y"])
@pytest.mark.parametrize("shown", [escape.markdown, escape.code])
def test_a_bar_ends_no_cell_whatever_stands_before_it(text, shown):
    """Readers differ on two backslashes before a bar: to some they are one, which leaves the bar to end its cell."""
    assert re.fullmatch(r"(?:\\[|\\]|[^|])*", re.sub(r"\\\\", "", shown(text)))
