import torch

from kconv.target.states import run_target
from kconv.train.feed import Feed, Online
from kconv.train.order import EpochOrder

CAPTURED = (1, 3, 5)


def test_a_batch_holds_the_targets_states_and_the_target_runs_once(target, text):
    ids = text[:96].view(4, 24)
    feed = Feed(ids, torch.ones_like(ids, dtype=torch.bool), 2, Online(target, CAPTURED))
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
    states = Online(target, CAPTURED, keep=size)
    kept, made = (states.read(torch.tensor(rows), ids[rows]) for rows in ([0, 1], [2, 3]))
    assert states.read(torch.tensor([0, 1]), ids[:2])[0] is kept[0]
    assert states.read(torch.tensor([2, 3]), ids[2:])[0] is not made[0]


def test_each_pass_takes_every_batch_once_in_another_order():
    order = EpochOrder(50, seed=3)
    passes = []
    for epoch in range(3):
        order.set_epoch(epoch)
        passes.append(list(order))
    assert all(sorted(one) == list(range(50)) for one in passes)
    assert len(set(map(tuple, passes))) == 3
    later = EpochOrder(50, seed=3)
    later.set_epoch(2)
    assert list(later) == passes[2]
