"""Training in bounded memory, and over packed rows, has ModelOpt's loss and gradients."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kconv.checkpoint.source import Folder
from kconv.errors import RecipeInvalid
from kconv.targets.config import read_target_config
from kconv.targets.dialogues import Sample
from kconv.targets.forward import run_target
from kconv.targets.model import find_ends, load_ends
from kconv.targets.rows import OPEN, arrange
from kconv.train import lean
from kconv.train.data import pack_samples
from kconv.train.evaluate import LOGIT_BYTES, draft_head, evaluate, head_state
from kconv.train.feed import Feed, Offline, Online
from kconv.train.lean import find_documents
from kconv.train.module import FAMILY, build_module, draft_logits, reduce_vocab, run_eagle, save_module
from kconv.train.recipe import TEST_GQA, TEST_MLA, EagleRecipe, check_recipe

KINDS = {
    "mla": TEST_MLA,
    "gqa": TEST_GQA,
    "reduced": dataclasses.replace(TEST_MLA, draft_vocab=96),
    "four steps": dataclasses.replace(TEST_GQA, ttt_steps=4),
    "stock": dataclasses.replace(TEST_GQA, decoder_layer="stock"),
}
LENGTHS = (11, 24, 7, 9, 5)


@pytest.fixture(scope="module")
def ends(tiny_target):
    return find_ends(Folder(tiny_target))


def batch(rows: int, length: int, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)

    def draw(width: int) -> Tensor:
        return torch.randn(rows, length, width, generator=generator)

    return {
        "input_ids": torch.randint(3, 512, (rows, length), generator=generator),
        "loss_mask": torch.rand(rows, length, generator=generator) > 0.3,
        "base_model_outputs": {"aux_hidden_states": draw(192), "base_model_hidden_states": draw(64)},
    }


def learn(ends, recipe: EagleRecipe, batches: list[dict]):
    """Return the loss and accuracies of each batch, and the gradients of their sum, weighted by what counts."""
    model = build_module(load_ends(ends, torch.float32), recipe)
    if recipe.draft_vocab:
        reduce_vocab(model, torch.arange(recipe.draft_vocab) * 3)
    model.train()
    outputs = []
    for one in batches:
        # Unlike the model's own cache of masks, which it keys by the draft step alone.
        model._cached_attn_blk_masks.clear()
        outputs.append(run_eagle(model, one, recipe))
    return outputs, model


def gradients(model) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.eagle_module.named_parameters() if weight.grad is not None}


def assert_alike(one: dict[str, Tensor], other: dict[str, Tensor], share: float = 1e-5) -> None:
    assert one.keys() == other.keys() and len(one) > 10
    for name, tensor in one.items():
        scale = float(tensor.abs().max())
        assert scale > 0, name
        assert float((tensor - other[name]).abs().max()) <= share * scale, name


@pytest.mark.parametrize("kind", list(KINDS))
def test_loss_accuracy_and_gradients_are_modelopts(ends, kind, monkeypatch):
    # A few tokens at a time, so that there is more than one part, and a last one of few.
    monkeypatch.setattr(lean, "LOGIT_BYTES", 4 * 512 * 20)
    monkeypatch.setattr(lean, "QUERIES", 7)
    found = {}
    for kernel in ("eager", "sdpa"):
        [output], model = learn(ends, dataclasses.replace(KINDS[kind], kernel=kernel), [batch(3, 24)])
        output.loss.backward()
        found[kernel] = (float(output.loss), output.train_acc, gradients(model))
    assert found["sdpa"][0] == pytest.approx(found["eager"][0], rel=1e-6)
    assert torch.tensor(found["sdpa"][1]) == pytest.approx(torch.tensor(found["eager"][1]))
    assert_alike(found["eager"][2], found["sdpa"][2])


@pytest.mark.parametrize("queries", [4, 256])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_packed_row_has_the_loss_of_its_documents_by_themselves(ends, kind, queries, monkeypatch):
    monkeypatch.setattr(lean, "QUERIES", queries)
    recipe, eager = dataclasses.replace(KINDS[kind], kernel="sdpa", pack=True), KINDS[kind]
    alone = [batch(1, length, seed) for seed, length in enumerate(LENGTHS)]
    padding = 3
    packed = {
        name: torch.nn.functional.pad(torch.cat([one[name] for one in alone], 1), (0, padding))
        for name in ("input_ids", "loss_mask")
    }
    packed["base_model_outputs"] = {
        name: torch.nn.functional.pad(
            torch.cat([one["base_model_outputs"][name] for one in alone], 1), (0, 0, 0, padding)
        )
        for name in ("aux_hidden_states", "base_model_hidden_states")
    }
    numbers = [number for number, length in enumerate(LENGTHS) for _ in range(length)] + [-1] * padding
    packed["documents"] = torch.tensor([numbers], dtype=torch.int32)
    [whole], model = learn(ends, recipe, [packed])
    whole.loss.backward()

    # ModelOpt's mean of each step is over what counts in it: put together, each step by its own count.
    steps = recipe.ttt_steps
    counts = torch.tensor([[int(one["loss_mask"][:, 1 + k :].sum()) for k in range(steps)] for one in alone])
    parts, unpacked = learn_by_step(ends, eager, alone)
    weights = counts / (counts.sum(0) + 1e-5)
    expected = (parts * weights).sum()
    expected.backward()
    assert float(whole.loss) == pytest.approx(float(expected), rel=1e-5)
    assert_alike(gradients(unpacked), gradients(model))


def learn_by_step(ends, recipe: EagleRecipe, batches: list[dict]):
    """Return the loss of each draft step of each batch, [batches, steps], of ModelOpt's own forward."""
    model = build_module(load_ends(ends, torch.float32), recipe)
    if recipe.draft_vocab:
        reduce_vocab(model, torch.arange(recipe.draft_vocab) * 3)
    model.train()
    losses: list[Tensor] = []
    plain = model._eagle_loss

    def noted(*args):
        loss, accuracy = plain(*args)
        # ModelOpt multiplies it in place.
        losses.append(loss.clone())
        return loss, accuracy

    model._eagle_loss = noted
    for one in batches:
        model._cached_attn_blk_masks.clear()
        run_eagle(model, one, recipe)
    decay = recipe.loss_decay ** torch.arange(recipe.ttt_steps)
    return torch.stack(losses).view(len(batches), -1) * decay, model


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_lk_loss_is_that_of_modelopts_own_probabilities(ends, kind, monkeypatch):
    monkeypatch.setattr(lean, "LOGIT_BYTES", 4 * 512 * 20)
    eager, weight = KINDS[kind], 0.7
    model = build_module(load_ends(ends, torch.float32), eager)
    if eager.draft_vocab:
        reduce_vocab(model, torch.arange(eager.draft_vocab) * 3)
    model.train()
    expected, plain = [], model._eagle_loss

    def with_lk_loss(wanted, tops, logits, mask):
        loss, accuracy = plain(wanted, tops, logits, mask)
        counts = mask[:, : logits.shape[1]].bool()
        accepted = torch.minimum(wanted, logits.softmax(-1)).sum(-1)
        expected.append(-accepted[counts].log().mean())
        return loss + weight * expected[-1], accuracy

    model._eagle_loss = with_lk_loss
    run_eagle(model, batch(3, 24), eager).loss.backward()
    assert len(expected) == eager.ttt_steps and all(0.01 < one < 10 for one in expected)

    [output], own = learn(ends, dataclasses.replace(eager, kernel="sdpa", lk_loss=weight), [batch(3, 24)])
    output.loss.backward()
    [without], _ = learn(ends, dataclasses.replace(eager, kernel="sdpa"), [batch(3, 24)])
    decayed = sum(one * eager.loss_decay**k for k, one in enumerate(expected))
    assert float(output.loss - without.loss) == pytest.approx(weight * float(decayed), rel=1e-4)
    assert_alike(gradients(model), gradients(own))


class Casts(TorchDispatchMode):
    """Counts what is cast, by its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.count[tuple(args[0].shape)] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("drafted", [None, 96])
def test_the_targets_output_matrix_is_cast_once_for_all_steps(ends, drafted, monkeypatch):
    monkeypatch.setattr(lean, "LOGIT_BYTES", 4 * 512 * 20)
    recipe = dataclasses.replace(TEST_MLA, kernel="sdpa", compute="BF16", draft_vocab=drafted)
    with Casts() as casts:
        (one, other), model = learn(ends, recipe, [batch(3, 24), batch(3, 24, seed=1)])
        (one.loss + other.loss).backward()
    assert not drafted or casts.count[drafted, 64] == 1 + 2  # and the head's own in each forward
    assert casts.count[tuple(model.lm_head.weight.shape)] == (0 if drafted else 1)


def test_a_head_is_measured_alike_in_rows_and_together(ends, tiny_target, target, monkeypatch):
    recipe = dataclasses.replace(TEST_GQA, kernel="sdpa")
    model = build_module(load_ends(ends, torch.float32), recipe)
    samples = [Sample(torch.randint(3, 512, (24,)), torch.rand(24) > 0.3) for _ in range(6)]
    feed = Feed(pack_samples(samples, 24, pack=False), 3, Online(target, recipe.captured))
    spec = recipe.spec(read_target_config(tiny_target))
    found = []
    for size in (1, LOGIT_BYTES):
        monkeypatch.setattr("kconv.train.evaluate.LOGIT_BYTES", size)
        found.append(evaluate(model, draft_head(head_state(model, FAMILY), model, spec, FAMILY), feed, recipe, list))
    assert 1 < found[0]["acceptance"] < 4 and found[0] == pytest.approx(found[1], rel=1e-5)


def test_what_stands_in_another_document_changes_nothing(ends):
    recipe = dataclasses.replace(TEST_MLA, kernel="sdpa", pack=True)
    one, other = batch(1, 20), batch(1, 20, seed=1)
    for values in (one, other):
        values["documents"] = torch.tensor([[0] * 10 + [1] * 10])
        values["loss_mask"] = torch.tensor([[False] * 10 + [True] * 10])
    for name, tensor in other["base_model_outputs"].items():
        tensor[:, 10:] = one["base_model_outputs"][name][:, 10:]
    other["input_ids"][:, 10:] = one["input_ids"][:, 10:]
    [first, second], _ = learn(ends, recipe, [one, other])
    assert float(first.loss) == pytest.approx(float(second.loss), rel=1e-6)


def test_only_chains_of_which_a_draft_counts_go_on(ends):
    recipe = dataclasses.replace(TEST_GQA, kernel="sdpa", ttt_steps=3, pack=True)
    one, length = batch(2, 20), 20
    one["documents"] = torch.tensor([[0] * 12 + [1] * 8, [0] * 17 + [-1] * 3])
    model, went = build_module(load_ends(ends, torch.float32), recipe), []
    model.train()
    model.eagle_module.layers[0].mlp.gate_proj.register_forward_hook(lambda _m, _i, out: went.append(out.shape[1]))
    run_eagle(model, one, recipe)

    def counts(row: int, start: int, step: int) -> bool:
        end, documents = start + step + 1, one["documents"][row].tolist()
        return end < length and documents[start] == documents[end] >= 0 and bool(one["loss_mask"][row, end])

    starts = [(row, start) for row in range(2) for start in range(length)]
    going = [sum(any(counts(*at, later) for later in range(step, 3)) for at in starts) for step in (1, 2)]
    assert went == [2 * length, *going] and 0 < going[1] < going[0] < 2 * length


def test_a_batch_in_which_nothing_counts_has_no_loss(ends):
    recipe, one = dataclasses.replace(TEST_GQA, kernel="sdpa"), batch(2, 20)
    one["loss_mask"][:] = False
    [output], model = learn(ends, recipe, [one])
    output.loss.backward()
    assert float(output.loss) == 0 and not any(float(grad.abs().max()) for grad in gradients(model).values())


def test_positions_begin_anew_with_each_document():
    documents = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 1, 2, 2, 2, 2]])
    positions = find_documents(documents, torch.ones_like(documents), 2).positions
    assert positions.tolist() == [0, 1, 2, 0, 1, 0, 0, 0, 0, 1, 2, 3]


def test_packing_fills_rows_and_loses_nothing():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 60, (2000,), generator=generator).tolist()
    rows = arrange(lengths, 64, pack=True)
    assert sorted(piece for row in rows for piece in row) == list(range(len(lengths)))
    filled = [sum(lengths[piece] for piece in row) for row in rows]
    assert max(filled) <= 64
    assert sum(filled) / (64 * len(rows)) > 0.9 and len(rows) <= math.ceil(len(lengths) / 1.5)
    # What stands together in the data is read together.
    assert max(max(row) - min(row) for row in rows) < 16 * OPEN
    assert arrange([3, 4], 64, pack=False) == [[0], [1]]


def test_packed_rows_name_their_documents():
    samples = [Sample(torch.arange(1, n + 1), torch.ones(n, dtype=torch.bool)) for n in (5, 3, 9)]
    rows = pack_samples(samples, 8, pack=True)
    assert rows.ids.tolist() == [[1, 2, 3, 4, 5, 1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert rows.documents.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1], [0] * 8]


def test_the_target_runs_over_each_document_by_itself(target):
    samples = [Sample(torch.randint(3, 512, (n,)), torch.ones(n, dtype=torch.bool)) for n in (5, 3, 9)]
    rows = pack_samples(samples, 12, pack=True)
    online = Online(target, (1, 3, 5), documents=rows.documents)
    feed = Feed(rows, 2, online)
    states = feed[0]["base_model_outputs"]["base_model_hidden_states"]
    alone = Online(target, (1, 3, 5)).read(torch.tensor([0]), samples[1].ids[None])[1]
    torch.testing.assert_close(states[0, 5:8], alone[0])
    assert feed[0]["documents"].tolist() == [[0] * 5 + [1] * 3 + [-1] * 4, [0] * 9 + [-1] * 3]
    assert not states[0, 8:].any()


def test_stored_spans_are_laid_side_by_side():
    class Stored:
        def read_span(self, sequence, begin, end):
            at = torch.arange(begin, end).float()[:, None] + 100 * sequence
            return at.repeat(1, 2), at

    captured, hidden = Offline(Stored(), [((3, 0, 4), (1, 2, 3))]).read(torch.tensor([0]), torch.zeros(1, 9))
    assert hidden[0, :, 0].tolist() == [300, 301, 302, 303, 102, 103, 104, 0, 0]
    assert captured.shape == (1, 9, 2)


def test_packing_wants_masks_that_keep_documents_apart():
    with pytest.raises(RecipeInvalid, match="pack is true"):
        check_recipe(dataclasses.replace(TEST_MLA, pack=True))


def test_a_head_that_was_trained_so_drafts_as_modelopts_module(ends, tiny_target, target, tmp_path):
    recipe = dataclasses.replace(TEST_GQA, kernel="sdpa", pack=True)
    model = build_module(load_ends(ends, torch.float32), recipe)
    save_module(model, tmp_path, recipe)
    tokens = torch.randint(3, 512, (1, 20), generator=torch.Generator().manual_seed(0))
    logits = draft_logits(tmp_path, tiny_target, tokens, run_target(target, tokens, recipe.captured), 3)
    assert logits.shape == (3, 1, 16, 512) and bool(logits.any())
