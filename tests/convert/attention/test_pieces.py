"""A large vocabulary's logits are held for a few texts at a time, and no figure is another for it."""

from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from kconv.convert.attention.convert import fit_attention
from kconv.convert.attention.heal import HIDDEN, heal, loss_by_piece
from kconv.convert.attention.swap import Shape
from kconv.drafters.chain import overlap, unroll
from kconv.drafters.forward import DraftHead
from kconv.measure.batches import STEPS, in_pieces
from kconv.measure.compare import compare

pytestmark = pytest.mark.usefixtures("short_gauges")
SHAPE = Shape(latent=6, rotary=8, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=16)


@pytest.fixture
def one_text_at_a_time(monkeypatch):
    monkeypatch.setattr("kconv.measure.batches.PIECE_BYTES", 1)


@pytest.fixture
def student(gqa):
    """The same head with some of its weights disturbed."""
    generator = torch.Generator().manual_seed(1)
    near = {n: w + 0.05 * torch.randn(w.shape, generator=generator, dtype=w.dtype) for n, w in gqa.weights.items()}
    return DraftHead(gqa.spec, near)


@pytest.mark.parametrize(("size", "texts"), [(1, [1, 1, 1, 1]), (4 * 24 * 23 * 3, [3, 1]), (4 * 24 * 23 * 4, [4])])
def test_a_piece_is_of_whole_texts_within_the_size(states, monkeypatch, size, texts):
    monkeypatch.setattr("kconv.measure.batches.PIECE_BYTES", size)
    batch = states.batches[0]
    pieces = list(in_pieces([batch], vocab=23))
    assert [len(piece.tokens) for piece in pieces] == texts
    for name in ("tokens", "captured", "hidden"):
        assert torch.equal(torch.cat([getattr(piece, name) for piece in pieces]), getattr(batch, name))


def gradients(original, student, states, batch) -> tuple[float, dict]:
    leaves = {name: weight.clone().requires_grad_() for name, weight in student.weights.items()}
    total = 0.0
    for part in loss_by_piece(original, DraftHead(student.spec, leaves), states, batch):
        part.total.backward()
        total += part.total.item()
    return total, {name: leaf.grad for name, leaf in leaves.items()}


def test_the_gradient_of_the_pieces_is_that_of_the_whole(gqa, student, states, monkeypatch):
    batch = states.batches[0]
    whole, wanted = gradients(gqa, student, states, batch)
    monkeypatch.setattr("kconv.measure.batches.PIECE_BYTES", 1)
    total, found = gradients(gqa, student, states, batch)
    assert total == pytest.approx(whole, rel=1e-6)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("one_text_at_a_time")
def test_the_loss_is_the_mean_over_the_whole_batch(gqa, student, states):
    """By torch's own KL divergence, the hidden state's error relative to its size over all texts, and the acceptance
    that is measured."""
    batch = states.batches[0]
    with torch.no_grad():
        ran = [list(unroll(head, batch.tokens, batch.captured, STEPS)) for head in (gqa, student)]
        apart = 0.0
        for goal, step in zip(*ran, strict=True):
            p, q = goal.logits.float().log_softmax(-1), step.logits.float().log_softmax(-1)
            apart += F.kl_div(q.flatten(0, 1), p.flatten(0, 1), log_target=True, reduction="batchmean").item()
            apart += HIDDEN * float((step.returned - goal.returned).norm() / goal.returned.norm()) ** 2
        drafted = torch.stack([step.logits for step in ran[1]])
        accepted = overlap(drafted, states.logits(batch), student.target_ids)
        found = list(loss_by_piece(gqa, student, states, batch))
    assert len(found) == 4
    assert sum(float(one.apart) for one in found) == pytest.approx(apart / STEPS, rel=1e-5)
    assert sum(float(one.refused) for one in found) == pytest.approx(-float(accepted.log().mean()), rel=1e-5)


def test_healing_and_measuring_give_the_same_in_pieces(gqa, student, states, monkeypatch):
    whole = heal(gqa, student, states, 3)
    figures = compare(gqa, whole, states, trained=student)
    monkeypatch.setattr("kconv.measure.batches.PIECE_BYTES", 1)
    healed = heal(gqa, student, states, 3)
    assert not torch.equal(healed.weights["fc"], student.weights["fc"])
    for name, weight in whole.weights.items():
        torch.testing.assert_close(healed.weights[name], weight, rtol=1e-4, atol=1e-6)
    for name, figure in asdict(compare(gqa, whole, states, trained=student)).items():
        assert figure == pytest.approx(getattr(figures, name), rel=1e-9), name


@pytest.mark.usefixtures("one_text_at_a_time")
def test_no_pass_of_a_conversion_drafts_on_more_than_one_piece(gqa, states, monkeypatch):
    seen: set[int] = set()
    step = DraftHead.step

    def watched(self, tokens, *arguments):
        seen.add(len(tokens))
        return step(self, tokens, *arguments)

    monkeypatch.setattr(DraftHead, "step", watched)
    fit_attention(gqa, "mla", states, dtype="F32", shape=replace(SHAPE, latent=16), steps=2, min_retention=0.3)
    assert seen == {1}
