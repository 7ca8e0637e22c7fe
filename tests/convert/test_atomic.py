"""A conversion that is killed, at whatever moment: its output is absent or whole, and the next run is not disturbed."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner
from support import kill
from support.heads import MLA, random_slots, write_head
from support.listing import names

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import verify
from kconv.cli import main as kconv
from kconv.engines import BY_NAME
from kconv.errors import NotACheckpoint

WHOLE = {"model.safetensors", "config.json", "kconv.json"}
# Some ten megabytes, so that a kill finds the conversion at work.
LARGE = replace(MLA, vocab=60_000, draft_vocab=60_000)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return write_head(tmp_path_factory.mktemp("large") / "source", BY_NAME["vllm"], LARGE, random_slots(LARGE))


@pytest.fixture(scope="module")
def kills(large, tmp_path_factory):
    """What each kill of a conversion left: at every call that changes the disk, and at random moments."""
    root = tmp_path_factory.mktemp("kills")
    small = write_head(tmp_path_factory.mktemp("small") / "source", BY_NAME["vllm"], MLA, random_slots(MLA))
    command = [sys.executable, kill.__file__, str(small), str(large), str(root), str(time.time_ns())]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.slow
def test_a_kill_at_any_call_leaves_the_output_absent_or_whole(kills):
    assert len([left for left in kills if left["kill"].startswith("call")]) > 30
    assert len([left for left in kills if left["kill"] == "random"]) == kill.RANDOM_KILLS
    for left in kills:
        if left["out"] is not None:
            assert set(left["out"]) >= WHOLE and left["holds"], left


@pytest.mark.slow
def test_what_a_kill_leaves_beside_is_marked_as_such(kills):
    for left in kills:
        assert all(name.startswith(".kconv-partial-") for name in left["beside"]), left
        assert not (left["beside"] and left["out"]), "the folder is renamed, not copied"


@pytest.mark.slow
def test_no_reader_takes_what_a_kill_leaves_beside_for_a_head(kills):
    assert any(left["beside"] for left in kills if left["kill"] == "random"), "a random kill came amid the work"
    for left in kills:
        assert left["accepted"] == [], left


@pytest.mark.slow
def test_an_engine_that_is_shown_it_all_the_same_finds_nothing_or_the_whole(kills):
    seen = [what for left in kills for what in left["engines"]]
    assert set(seen) <= {"nothing", "whole"} and "nothing" in seen


@pytest.mark.slow
def test_kills_come_both_before_and_after_the_rename(kills):
    calls = [left for left in kills if left["kill"].startswith("call")]
    assert calls[0]["out"] is None
    (end,) = [left for left in kills if left["kill"] == "none"]
    assert end["out"] is not None and end["beside"] == []
    assert any(left["out"] is None and left["beside"] for left in calls)


def test_a_real_run_that_was_killed_does_not_disturb_the_next(large, tmp_path):
    command = ["to-trtllm", str(large), str(tmp_path / "out")]
    start = [sys.executable, "-c", "from kconv.cli import main; main()"]
    run = subprocess.Popen([*start, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while run.poll() is None and not names(tmp_path):
        time.sleep(0.001)
    run.send_signal(signal.SIGKILL)
    run.wait()
    (left,) = names(tmp_path)
    if left != "out":
        with pytest.raises(NotACheckpoint):
            open_checkpoint(tmp_path / left)
        assert CliRunner().invoke(kconv, command).exit_code == 0
    verify(tmp_path / "out", open_checkpoint(large))
