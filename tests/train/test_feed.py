import dataclasses
import threading

import pytest
import torch

from kconv.errors import StatesInvalid
from kconv.targets.forward import run_target
from kconv.train.data import Rows
from kconv.train.feed import Feed, Kept, Offline, Online, online_states
from kconv.train.loop import EpochOrder
from kconv.train.recipe import TEST_GQA

CAPTURED = (1, 3, 5)


def test_a_batch_holds_the_targets_states_and_the_target_runs_once(target, text):
    ids = text[:96].view(4, 24)
    feed = Feed(Rows(ids, torch.ones_like(ids, dtype=torch.bool)), 2, Kept(Online(target, CAPTURED)))
    runs = []
    hook = target.model.register_forward_hook(lambda *_: runs.append(1))
    first, again = feed[1], feed[1]
    hook.remove()
    assert len(feed) == 2
    assert len(runs) == 1
    expected = run_target(target, ids[2:], CAPTURED)
    assert torch.equal(first["input_ids"], ids[2:])
    torch.testing.assert_close(first["base_model_outputs"]["aux_hidden_states"], expected.captured)
    torch.testing.assert_close(first["base_model_outputs"]["base_model_hidden_states"], expected.hidden)
    assert again["base_model_outputs"]["aux_hidden_states"] is first["base_model_outputs"]["aux_hidden_states"]


def test_states_that_have_no_room_are_made_anew(target, text):
    ids = text[:96].view(4, 24)
    one = Online(target, CAPTURED).read(torch.tensor([0, 1]), ids[:2])
    size = sum(part.numel() * part.element_size() for part in one)
    states = Kept(Online(target, CAPTURED), size)
    kept, made = (states.read(torch.tensor(rows), ids[rows]) for rows in ([0, 1], [2, 3]))
    assert states.read(torch.tensor([0, 1]), ids[:2])[0] is kept[0]
    assert states.read(torch.tensor([2, 3]), ids[2:])[0] is not made[0]


def test_states_are_kept_where_they_are_read_again(target, text):
    ids = text[:48].view(2, 24)
    once = dataclasses.replace(TEST_GQA, batches=4, steps=4)
    for recipe, kept in ((once, False), (dataclasses.replace(once, accumulate=2), True)):
        states = online_states(target, recipe)[0]
        first, again = (states.read(torch.tensor([0, 1]), ids)[0] for _ in range(2))
        assert (first is again) == kept


def test_each_pass_takes_every_batch_once_in_another_order():
    passes = [list(EpochOrder(50, 3, iter([epoch]).__next__)) for epoch in range(3)]
    assert all(sorted(one) == list(range(50)) for one in passes)
    assert len(set(map(tuple, passes))) == 3
    assert list(EpochOrder(50, 3, iter([2]).__next__)) == passes[2]


class Stored(Offline):
    """States that note which rows are read, and by whom."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def read(self, rows, ids):
        self.seen.append((int(rows[0]), threading.current_thread() is threading.main_thread()))
        if int(rows[0]) == 5:
            raise StatesInvalid("gone", where="here", fix="Fetch it.")
        return torch.zeros(len(rows), ids.shape[1], 6), torch.full((len(rows), ids.shape[1], 2), float(rows[0]))


def test_stored_batches_are_read_ahead_in_the_order_that_is_followed():
    ids, states = torch.zeros(8, 4, dtype=torch.int64), Stored()
    feed = Feed(Rows(ids, ids.bool()), 1, states)
    feed.follow([3, 1, 6, 2, 5, 7])
    got = [float(feed[index]["base_model_outputs"]["base_model_hidden_states"][0, 0, 0]) for index in (3, 1, 6)]
    assert got == [3, 1, 6]
    feed._reader.shutdown()
    # The first when it is asked for; the others before, each once, two in advance.
    assert sorted(states.seen) == sorted([(3, True), (1, False), (6, False), (2, False), (5, False)])
    # What a damaged file is comes where it is asked for.
    with pytest.raises(StatesInvalid, match="gone"):
        feed._coming[5].result()


def test_a_pass_that_goes_on_in_its_middle_reads_nothing_that_was_done():
    ids, states = torch.zeros(8, 4, dtype=torch.int64), Stored()
    feed = Feed(Rows(ids, ids.bool()), 1, states)
    feed.follow([3, 1, 6, 2])
    assert feed[6]["input_ids"].shape == (1, 4)
    feed._reader.shutdown()
    assert sorted(row for row, _ in states.seen) == [2, 6]
