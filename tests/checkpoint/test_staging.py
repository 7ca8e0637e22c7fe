"""Write beside, rename last: an output is absent or whole, and nothing that was there is touched."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.listing import names

from kconv.checkpoint.staging import is_partial, keep_staging, refuse_existing, staged, write_new, writing
from kconv.errors import OutputExists, OutputFailed


def fill(out, *, then=None):
    with staged(out) as folder:
        (folder / "weights").write_text("w")
        (folder / "config.json").write_text("{}")
        if then:
            then(folder)


def test_the_output_is_what_was_written_and_nothing_is_left_beside_it(tmp_path):
    fill(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["config.json", "weights"]


def test_the_output_is_not_there_until_it_is_whole(tmp_path):
    def look(folder):
        assert not (tmp_path / "out").exists()
        assert folder.parent == tmp_path and is_partial(folder)

    fill(tmp_path / "out", then=look)


def test_parents_are_made(tmp_path):
    fill(tmp_path / "a" / "b" / "out")
    assert (tmp_path / "a" / "b" / "out" / "weights").exists()


@pytest.mark.parametrize("mask, mode", [(0o022, 0o755), (0o077, 0o700), (0o002, 0o775)])
def test_the_output_has_the_rights_that_the_user_gives_to_new_folders(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        fill(tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("length", [250, 255])
def test_a_long_name_that_the_file_system_allows_is_allowed(tmp_path, length):
    fill(tmp_path / ("n" * length))
    assert names(tmp_path) == ["n" * length]


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_fault_inside_leaves_nothing(tmp_path, fault):
    def fail(_):
        raise fault

    with pytest.raises(fault):
        fill(tmp_path / "out", then=fail)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("number", "fix"), [(errno.ENOSPC, "Free some space"), (errno.EACCES, "is writable")])
def test_a_copy_that_failed_is_told_by_its_first_error(tmp_path, number, fix):
    """As shutil.copytree raises it, with every file that it could not copy."""
    errors = [(name, f"{tmp_path}/{name}", str(OSError(number, os.strerror(number)))) for name in ("a", "b")]
    with pytest.raises(OutputFailed, match=os.strerror(number)) as caught, writing(tmp_path / "out"):
        raise shutil.Error(errors)
    assert fix in caught.value.fix and "[(" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_slow(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OutputFailed, match="Not a directory") as caught:
        refuse_existing(tmp_path / "file" / "new" / "out")
    assert caught.value.where == str(tmp_path / "file")
    refuse_existing(tmp_path / "new" / "out")
    assert names(tmp_path) == ["file"]
    # Root may write anywhere.
    monkeypatch.setattr("os.access", lambda place, how: str(place) != str(tmp_path))
    with pytest.raises(OutputFailed, match="Permission denied") as caught:
        refuse_existing(tmp_path / "new" / "out")
    assert caught.value.where == str(tmp_path) and "writable" in caught.value.fix


FULL = {errno.ENOSPC: "Free some space", errno.EDQUOT: "Free some space", errno.EIO: "writable"}


@pytest.mark.parametrize("number, phrase", FULL.items())
def test_a_failing_disk_is_a_named_fault_and_leaves_nothing(tmp_path, number, phrase):
    def fail(folder):
        raise OSError(number, os.strerror(number), str(folder / "weights"))

    with pytest.raises(OutputFailed) as caught:
        fill(tmp_path / "out", then=fail)
    assert phrase in caught.value.fix and "out" in caught.value.what
    assert names(tmp_path) == []


def _existing(out, kind):
    match kind:
        case "a file":
            out.write_text("mine")
        case "an empty folder":
            out.mkdir()
        case "a folder":
            out.mkdir()
            (out / "mine").write_text("mine")
        case "a link to nowhere":
            out.symlink_to("nowhere")
        case "a loop":
            out.symlink_to(out.name)


EXISTING = ["a file", "an empty folder", "a folder", "a link to nowhere", "a loop"]


@pytest.mark.parametrize("kind", EXISTING)
def test_what_is_there_is_refused_and_left_alone(tmp_path, kind):
    out = tmp_path / "out"
    _existing(out, kind)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputExists):
        refuse_existing(out)
    with pytest.raises(OutputExists):
        fill(out)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", EXISTING)
def test_what_appears_meanwhile_is_left_alone(tmp_path, kind):
    out = tmp_path / "out"
    with pytest.raises(OutputExists):
        fill(out, then=lambda _: _existing(out, kind))
    assert names(tmp_path) == ["out"] and not (out / "weights").exists()


def test_a_parent_that_is_a_file_is_a_named_fault(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputFailed):
        fill(tmp_path / "file" / "out")
    with pytest.raises(OutputFailed):
        fill(tmp_path / ("n" * 300))
    assert names(tmp_path) == ["file"]


def test_a_folder_that_cannot_be_flushed_after_the_rename_does_not_make_a_whole_output_a_failure(tmp_path, monkeypatch):
    real = os.fsync

    def refuse_parent(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_parent)
    fill(tmp_path / "out")
    assert names(tmp_path / "out") == ["config.json", "weights"]


def test_every_file_is_flushed_before_the_rename(tmp_path, monkeypatch):
    real, flushed = os.fsync, []

    def note(descriptor):
        flushed.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, (tmp_path / "out").exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    fill(tmp_path / "out")
    assert {("weights", False), ("config.json", False), (tmp_path.name, True)} <= set(flushed)


DIE = "import os, sys, time; from pathlib import Path; from kconv.checkpoint.staging import heed_sigterm, staged\n"


def start(code):
    """Run a program, and return it once it has said something."""
    running = subprocess.Popen([sys.executable, "-c", DIE + code], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stdout.readline() == "in\n"
    return running


def test_what_a_killed_run_left_is_removed_by_the_next_one_of_the_same_output(tmp_path):
    writes = "(f / 'w').write_text('w'); print('in', flush=True); time.sleep(99)"
    body = f"with staged(Path({str(tmp_path / 'out')!r})) as f: {writes}"
    running = start(body)
    running.kill()
    running.wait()
    [left] = names(tmp_path)
    assert left.startswith(".kconv-partial-out-")
    fill(tmp_path / "another")
    assert left in names(tmp_path)
    fill(tmp_path / "out")
    assert names(tmp_path) == ["another", "out"]


def test_what_another_run_is_at_and_what_a_long_job_left_stay(tmp_path):
    place = keep_staging(tmp_path / "out", "0123456789abcdef")
    with staged(tmp_path / "out") as mine:
        (mine / "weights").write_text("w")
        with pytest.raises(RuntimeError), staged(tmp_path / "out") as theirs:
            assert mine.exists() and theirs != mine
            raise RuntimeError
        assert (mine / "weights").exists()
    assert place.exists() and (tmp_path / "out" / "weights").exists()


def test_sigterm_leaves_nothing(tmp_path):
    running = start(
        f"with heed_sigterm(), staged(Path({str(tmp_path / 'out')!r})): print('in', flush=True); time.sleep(99)"
    )
    running.terminate()
    assert running.wait() == 128 + signal.SIGTERM
    assert names(tmp_path) == []


def test_of_two_that_write_one_file_the_second_is_refused(tmp_path):
    write_new(tmp_path / "a" / "out.json", "first")
    with pytest.raises(OutputExists):
        write_new(tmp_path / "a" / "out.json", "second")
    assert (tmp_path / "a" / "out.json").read_text() == "first" and names(tmp_path / "a") == ["out.json"]
