"""Where it is computed: what a pass makes lies where the head and the texts do. Here, a device that only knows shapes.

It tells a tensor made elsewhere from one that is there, and nothing of values; no GPU has run a conversion.
"""

from dataclasses import replace

import pytest
import torch

from kconv.convert.attention.heal import loss_by_piece
from kconv.convert.attention.latents import factorize
from kconv.convert.attention.moments import Moments, factor, root
from kconv.convert.attention.rotary import find_ladders, split_rotary
from kconv.convert.attention.swap import Latents, Shape, attention_of, with_attention
from kconv.convert.attention.to_mha import assemble_mha
from kconv.convert.attention.to_mla import Distances, as_gqa, assemble_mla, pad_mla
from kconv.drafters.forward import DraftHead
from kconv.measure.trace import run_both, trace

META = torch.device("meta")


def there(head):
    return DraftHead(head.spec, {name: weight.to(META) for name, weight in head.weights.items()})


@pytest.fixture
def texts(states):
    return replace(states, lm_head=states.lm_head.to(META))


def test_the_passes_over_the_texts(gqa, mla, texts):
    one, other = there(gqa), there(mla)
    moments, distances = Moments(32, device=META), Distances()
    for step in trace(one, texts.part("choose")):
        moments.add(step.rows)
        one.attend(0, step.x, step.positions, distances)
    assert moments.xx.device == distances.weight.device == META
    for pair in run_both(one, other, texts.part("choose")):
        assert {pair.original.device, pair.output.device, pair.heads.device} == {META}
    leaves = {name: weight.requires_grad_() for name, weight in other.weights.items()}
    for part in loss_by_piece(one, DraftHead(mla.spec, leaves), texts, texts.batch(0)):
        part.total.backward()
    assert all(leaf.grad is not None and leaf.grad.device == META for name, leaf in leaves.items())


def test_the_algebra_of_gqa_to_mla(gqa):
    head = there(gqa)
    attention, dims = attention_of(head), gqa.spec.attention
    cholesky = factor(torch.empty(32, 32, dtype=torch.float64, device=META))
    weight_by_distance = torch.empty(dims.heads, 24, dtype=torch.float64, device=META)
    [ladder] = find_ladders(attention.rope, 4, 4)
    split = split_rotary(attention, ladder, cholesky, weight_by_distance)
    value = attention.weights["0.v_proj"].unflatten(0, (dims.kv_heads, dims.head_dim))
    output = attention.weights["0.o_proj"].unflatten(1, (dims.heads, dims.head_dim))
    assert as_gqa(split, value, output, ladder).weights["0.q_proj"].device == META
    keys_values = torch.cat([split.key_nope, value], dim=1)
    square, inverse = root(keys_values @ keys_values.mT)
    kv = factorize(keys_values, square, inverse, cholesky, 6)
    queries = torch.cat([split.query_nope, split.query_rope], dim=1)
    query = factorize(queries, *root(queries @ queries.mT), cholesky, 12)
    latents = Latents(query.down, query.up.unflatten(0, queries.shape[:2]),
                      kv.down, kv.up.unflatten(0, keys_values.shape[:2]))  # fmt: skip
    mla = pad_mla(assemble_mla(split, latents, output, ladder, dims.heads), Shape(kv_lora_rank=16, qk_rope_head_dim=16))
    converted = with_attention(head, mla)
    assert {weight.device for weight in converted.weights.values()} == {META}


def test_the_algebra_of_mla_to_mha(mla):
    attention, dims = attention_of(there(mla)), mla.spec.attention
    maps = [torch.empty(rank, 32, dtype=torch.float64, device=META) for rank in (dims.q_lora_rank, dims.kv_lora_rank)]
    mha = assemble_mha(attention, *maps, head_dim=20)
    assert {weight.device for weight in mha.weights.values()} == {META}
