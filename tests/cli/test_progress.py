"""What a terminal and a log show while a command works."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from kconv.cli import progress
from kconv.cli.progress import Terminal


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch):
    """Return a stream; between a fixture and its test pytest sets stderr again, so kconv's own look at it is bent."""
    monkeypatch.setenv("TERM", "xterm-256color")
    made = Screen()
    monkeypatch.setattr(progress, "make_console", lambda stderr: Console(file=made, width=80))
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=made))
    return made


def awaited(screen, text):
    """Say whether a text comes: spinners are drawn by a thread."""
    for _ in range(500):
        if text in screen.getvalue():
            return True
        time.sleep(0.02)
    return False


def test_a_terminal_shows_at_once_that_an_operation_loads(screen, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    context = Terminal()
    with context.waiting("train: loading"):
        assert awaited(screen, "train: loading")
        with context.status("training"):
            assert context._spinner is None and awaited(screen, "training")
    assert context._spinner is None


def test_an_operation_that_is_done_soon_shows_nothing(screen):
    with Terminal().waiting("inspect: loading"):
        pass
    assert screen.getvalue() == ""


def test_a_bar_begins_with_the_first_step_that_says_how_many_there_are(screen):
    with Terminal().steps("training") as advance:
        assert awaited(screen, "training: preparing")
        advance(1, 20, 5.0)
        advance(20, 20, 2.5)
    shown = screen.getvalue()
    assert "20/20" in shown and "loss 2.500" in shown and "/?" not in shown


def test_steps_without_a_first_one_leave_no_bar(screen):
    with Terminal().steps("healing"):
        pass
    assert not re.search(r"\d/", screen.getvalue())


def test_a_line_stands_above_the_spinner(screen):
    context = Terminal()
    with context.status("publishing") as say:
        say("checking")
        context.log("passed [P101]")
    assert re.search(r"passed \[P101\]\s*\n", screen.getvalue())


def test_a_line_stands_above_a_bar_and_not_in_it(screen, capsys):
    context = Terminal()
    with context.bytes("quantizing", 10) as advance:
        advance(4)
        context.log("writing the index")
    assert "writing the index" in screen.getvalue() and capsys.readouterr().err == ""
    with context.steps("training") as step:
        step(1, 2, 5.0)
        context.log("a checkpoint")
    assert "a checkpoint" in screen.getvalue() and capsys.readouterr().err == ""


def test_a_log_has_a_line_for_the_last_step(capsys):
    with Terminal().steps("training") as advance:
        advance(1, 2, 5.0)
        advance(2, 2, 2.5)
    assert capsys.readouterr().err == "training: step 2 of 2, loss 2.500\n"
