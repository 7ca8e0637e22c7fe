"""Rows from the index's tables are those that are cut from the whole index, and nothing else of it is read."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from kconv.checkpoint.folder import open_checkpoint
from kconv.errors import StatesInvalid, TrainingDataInvalid
from kconv.targets.config import read_target_config
from kconv.targets.options import StatesOptions
from kconv.targets.states import INDEX, open_states
from kconv.targets.tokenizer import load_tokenizer
from kconv.targets.write_states import write_states
from kconv.tiny.text import read_corpus
from kconv.train.data import TableRows, place_rows, place_sequences
from kconv.train.feed import Offline
from kconv.train.job import TrainJob, draft_coverage, job_parts, offline_job
from kconv.train.run import train

from .test_offline import VALUES

CAPTURED, HIDDEN, SEQ = (1, 3, 5), 64, 24
TEXT = " ".join(read_corpus().train)


class Drawn:
    """States that no target has: what is read back shows where it was."""

    dtype, at_once = "F32", 1

    def capture(self, tokens, captured):
        drawn = torch.randn(1, tokens.shape[1], (len(captured) + 1) * HIDDEN)
        return drawn[..., :-HIDDEN].contiguous(), drawn[..., -HIDDEN:].contiguous()


def store(target: Path, folder: Path, count: int, **wanted) -> Path:
    """Store states of dialogues with one to three answers, of various lengths."""
    rng, rows = random.Random(count), []
    for _ in range(count):
        turns = []
        for _ in range(rng.randint(1, 3)):
            for role, longest in (("user", 120), ("assistant", 400)):
                at = rng.randrange(len(TEXT) - longest)
                turns.append({"role": role, "content": TEXT[at : at + rng.randint(10, longest)]})
        rows.append(json.dumps({"messages": turns}))
    return write(target, folder, rows, **wanted)


def write(target: Path, folder: Path, rows: list[str], seq: int = SEQ, shard_bytes: int = 1 << 20, **wanted) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "dialogues.jsonl").write_text("\n".join(rows) + "\n")
    asked = StatesOptions(data=str(folder / "dialogues.jsonl"), captured=CAPTURED, **wanted)
    checkpoint, config = open_checkpoint(target), read_target_config(target)
    torch.manual_seed(0)
    write_states(
        Drawn(),  # pyright: ignore[reportArgumentType]
        *(checkpoint, config, load_tokenizer(target), asked, folder / "states"),
        shard_bytes=shard_bytes,
        seq=seq,
    )
    return folder / "states"


def answers(count: int) -> list[str]:
    """Return dialogues of two turns, of more than two hundred tokens each."""
    texts = [TEXT[at : at + 700] for at in range(0, count * 700, 700)]
    assert len(texts[-1]) == 700
    both = ([("user", f"Say {number}."), ("assistant", text)] for number, text in enumerate(texts))
    return [json.dumps({"messages": [{"role": role, "content": text} for role, text in row]}) for row in both]


def job_of(target: Path, states: Path, **values) -> TrainJob:
    config, tokenizer = read_target_config(target), load_tokenizer(target)
    return offline_job(target, config, tokenizer, VALUES | {"seq": SEQ} | values, states, None)


@pytest.mark.parametrize("seq", [12, SEQ, 200, 4096])
def test_rows_of_a_table_are_those_cut_from_the_whole(tiny_target, tmp_path, seq):
    states = open_states(store(tiny_target, tmp_path, 60, seq=seq))
    assert states.record.shards > 3
    for held_out, pack, processes in ((False, False, 1), (False, True, 1), (False, True, 3), (True, False, 2)):
        how = {"held_out": held_out, "pack": pack, "processes": processes}
        table, cut = place_rows(states, seq, **how), place_sequences(states, seq, **how)
        assert isinstance(table.rows, TableRows) and not isinstance(cut.rows, TableRows)
        assert table.rows.shares == cut.rows.shares
        assert (table.rows.usable, table.rows.size) == (cut.rows.usable, cut.rows.size)
        for rank in range(processes):
            own = table.rows.own(rank, processes, 2)
            assert torch.equal(own, cut.rows.own(rank, processes, 2))
            if not len(own):
                continue
            one, other = table.rows.take(own), cut.rows.take(own)
            assert torch.equal(one.ids, other.ids) and torch.equal(one.mask, other.mask)
            assert (one.documents is None) == (other.documents is None) == (not pack)
            assert one.documents is None or torch.equal(one.documents, other.documents)
            read = [Offline(part.states, part.places).read(own, one.ids) for part in (table, cut)]
            assert all(torch.equal(*parts) for parts in zip(*read, strict=True))
            assert set(cut.files_of(rank, states)) <= set(table.files_of(rank, states))
        if not held_out:
            assert torch.equal(table.rows.count(states.record.target.vocab), cut.rows.count(states.record.target.vocab))
            assert sorted(table.prompts()) == sorted({digest[:16] for digest in cut.prompts()})


def test_a_process_of_several_needs_a_part_of_the_files(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr("kconv.targets.rows.OPEN", 2)
    states = open_states(store(tiny_target, tmp_path, 120))
    for pack in (False, True):
        alone, placed = (place_rows(states, SEQ, held_out=False, pack=pack, processes=count) for count in (1, 3))
        files = [set(placed.files_of(rank, states)) for rank in range(3)]
        assert set.union(*files) == set(alone.files_of(0, states)) and max(map(len, files)) < states.record.shards


@pytest.mark.parametrize("name", ["packed.rows", "packed.pieces", "input_ids", "loss_mask"])
def test_a_row_whose_entry_was_changed_is_refused(tiny_target, tmp_path, name):
    folder = store(tiny_target, tmp_path, 40)
    states = open_states(folder)
    table = place_rows(states, SEQ, held_out=False, pack=True)
    first = table.places[0]
    assert first
    info = states.index[name]
    at = info.begin + (0 if "." in name else int(table.places.read_row(0).pieces[0, 0]) * info.size // info.shape[0])  # pyright: ignore
    data = bytearray((folder / INDEX).read_bytes())
    data[at] ^= 1
    (folder / INDEX).write_bytes(data)
    changed = place_rows(open_states(folder), SEQ, held_out=False, pack=True)
    with pytest.raises(StatesInvalid, match=f"row 0 of {INDEX}, packed, differs from what kconv states wrote"):
        changed.rows.take(torch.tensor([0]))
    # Of a row elsewhere nothing was changed.
    assert changed.rows.take(torch.tensor([len(changed.places) - 1])).mask.any()


def test_an_index_or_a_shard_of_other_states_is_refused(tiny_target, tmp_path):
    rows = answers(80)
    one, other = (write(tiny_target, tmp_path / name, part, text_tokens=96) for name, part in
                  (("one", rows[:40]), ("other", rows[40:])))  # fmt: skip
    assert (one / INDEX).stat().st_size == (other / INDEX).stat().st_size
    shards = sorted(one.glob("states-*"))
    assert len(shards) > 2 and shards[0].stat().st_size == shards[1].stat().st_size
    shards[0].rename(tmp_path / "held")
    shards[1].rename(shards[0])
    (tmp_path / "held").rename(shards[1])
    placed = place_rows(open_states(one), SEQ, held_out=False)
    with pytest.raises(StatesInvalid, match=f"{shards[0].name} differs from what kconv states wrote"):
        placed.states.read_span(placed.places[0][0][0], 0, 1)
    (one / INDEX).write_bytes((other / INDEX).read_bytes())
    with pytest.raises(StatesInvalid, match=r"row 0 .* differs"):
        place_rows(open_states(one), SEQ, held_out=False).rows.take(torch.tensor([0]))
    (one / INDEX).write_bytes((other / INDEX).read_bytes()[:-1])
    with pytest.raises(StatesInvalid, match=r"bytes, but .* were written"):
        place_rows(open_states(one), SEQ, held_out=False).rows.take(torch.tensor([0]))


def test_a_hole_in_a_shard_is_told(tiny_target, tmp_path):
    """A copy that was cut off has its size and zeros at its end on many disks."""
    folder = write(tiny_target, tmp_path / "states", answers(40), text_tokens=96)
    for shard in folder.glob("states-*"):
        data = shard.read_bytes()
        shard.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))
    placed = place_rows(open_states(folder), SEQ, held_out=False)
    with pytest.raises(StatesInvalid, match="states are all zero"):
        for row in range(len(placed.places)):
            for number, start, length in placed.places[row]:
                placed.states.read_span(number, start, start + length)


def test_counts_that_were_changed_are_refused(tiny_target, tmp_path):
    folder = store(tiny_target, tmp_path, 40)
    info = open_states(folder).index["counts"]
    data = bytearray((folder / INDEX).read_bytes())
    data[info.begin] ^= 1
    (folder / INDEX).write_bytes(data)
    with pytest.raises(StatesInvalid, match="counts in"):
        draft_coverage(job_of(tiny_target, folder, draft_vocab=64))


def test_too_few_dialogues_are_refused(tiny_target, tmp_path):
    with pytest.raises(TrainingDataInvalid, match="0 rows for training"):
        job_of(tiny_target, store(tiny_target, tmp_path, 3))


class AtOnce:
    """What is read ahead is read now, so that as much of it is read at each step."""

    def __init__(self, *_, **__):
        pass

    def submit(self, call, *args):
        done = Future()
        done.set_result(call(*args))
        return done


def bytes_read() -> int:
    """Return what this process has asked the kernel to read, whatever the page cache held."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # pyright: ignore


# Pieces of 24 tokens, and for packing of 12 too, of which two fill a row.
@pytest.mark.parametrize(("pack", "length"), [(False, 120), (True, 132)])
def test_until_the_first_step_ends_no_more_is_read_of_eight_times_the_states(
    tiny_target, tmp_path, monkeypatch, pack, length
):
    monkeypatch.setattr("kconv.train.feed.ThreadPoolExecutor", AtOnce)
    rows = answers(320)
    # As many evaluation rows of each: a process evaluates on sixteen batches at most.
    values = {"pack": pack, "kernel": "sdpa", "batch": 1, "draft_vocab": 64, "steps": 4, "batches": 4}
    found = []
    # Once before, for what libraries read when they are first used.
    for name, count in (("first", 40), ("few", 40), ("many", 320)):
        # In one file each, as of each file that is touched the beginning is read too.
        states = write(tiny_target, tmp_path / name, rows[:count], shard_bytes=1 << 30, text_tokens=length)
        counts = [bytes_read()]
        job = job_of(tiny_target, states, **values)
        train(job, tmp_path / name / "head", progress=lambda *_: counts.append(bytes_read()))  # noqa: B023
        found.append((counts[1] - counts[0], states))
    (few, small), (many, large) = found[1:]
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in (small, large)]
    index = [(folder / INDEX).stat().st_size for folder in (small, large)]
    assert sizes[1] > 7 * sizes[0] and index[1] - index[0] > 200_000
    # Numbers with more digits, in JSON.
    assert abs(many - few) < 500, (few, many)
    assert job_parts(job_of(tiny_target, small, **values)) != job_parts(job_of(tiny_target, large, **values))
