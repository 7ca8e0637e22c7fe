"""The plain torch that stands in for SGLang's CPU kernels, held against torch's own attention and a tree by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

FILE = Path(__file__).parent.parent.parent / "scripts" / "sglang_cpu" / "sgl_kernel" / "__init__.py"
HEADS, GROUPS, WIDTH = 4, 2, 8


@pytest.fixture(scope="module")
def kernels():
    spec = importlib.util.spec_from_file_location("sgl_kernel_stand_in", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attention(q, k, v, mask):
    """Return torch's own attention over `[T, heads, D]`."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5, enable_gqa=True).transpose(0, 1)


@pytest.mark.parametrize("tree", [False, True])
def test_new_tokens_attend_to_the_cache_and_to_each_other(kernels, tree):
    generator = torch.Generator().manual_seed(0)
    k_buffer, v_buffer = torch.randn(2, 32, GROUPS, WIDTH, generator=generator)
    known, new = 5, 3
    slots = torch.randperm(32, generator=generator)[: known + new]
    table = torch.zeros(4, 16, dtype=torch.int32)
    table[2, : known + new] = slots.int()
    q, o = torch.randn(new, HEADS, WIDTH, generator=generator), torch.empty(new, HEADS, WIDTH)
    k, v = torch.randn(2, new, GROUPS, WIDTH, generator=generator)
    seen = torch.ones(new, known + new, dtype=torch.bool).tril(known)
    branches = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    if tree:
        seen[:, known:] = branches
    one = torch.tensor([new])
    torch.ops.sgl_kernel.extend_attention_cpu(
        q, k, v, o, k_buffer, v_buffer, 1.0, 1.0, table, torch.tensor([2]), torch.tensor([known + new]), one,
        torch.tensor([0]), new, 0.5, 0.0, False, 0, None, None, branches.flatten() if tree else None, True,
    )  # fmt: skip
    keys, values = torch.cat([k_buffer[slots[:known]], k]), torch.cat([v_buffer[slots[:known]], v])
    torch.testing.assert_close(o, attention(q, keys, values, seen))


def test_a_new_token_is_stored_and_attends_to_all(kernels):
    generator = torch.Generator().manual_seed(0)
    k_buffer, v_buffer = torch.randn(2, 32, GROUPS, WIDTH, generator=generator)
    slots = torch.randperm(32, generator=generator)[:6]
    table = slots.int()[None].repeat(3, 1)
    q, o = torch.randn(1, HEADS, WIDTH, generator=generator), torch.empty(1, HEADS, WIDTH)
    k, v = torch.randn(2, 1, GROUPS, WIDTH, generator=generator)
    torch.ops.sgl_kernel.decode_attention_cpu(
        q, k_buffer, v_buffer, 1.0, 1.0, o, k, v, slots[5:], torch.empty(0), table, torch.tensor([1]),
        torch.tensor([6]), 0.5, 0.0, False, 0, None, None,
    )  # fmt: skip
    torch.testing.assert_close(k_buffer[slots[5:]], k)
    torch.testing.assert_close(o, attention(q, k_buffer[slots], v_buffer[slots], None))


def test_what_it_has_not_fails_by_its_name(kernels):
    with pytest.raises(NotImplementedError, match="rotate_input_ids_cpu"):
        kernels.rotate_input_ids_cpu()


def test_a_tree_is_laid_out_and_walked(kernels):
    """Two branches: the root's children 1 and 2, and 3 behind 2; the target goes along 2 and 3."""
    nodes, topk = 4, 2
    # Places in the table of all drafts: 0 and 1 of the first block, whose parent is the root; 4 of the block behind 1.
    parents, chosen = torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 4]])
    mask, positions = torch.zeros(nodes * nodes, dtype=torch.bool), torch.zeros(nodes, dtype=torch.int64)
    index, child, sibling = (torch.full((1, nodes), -1) for _ in range(3))
    kernels.build_tree_kernel_efficient_cpu(
        parents, chosen, torch.tensor([10]), mask, positions, index, child, sibling, topk, 2, nodes, 1
    )
    assert mask.view(nodes, nodes).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert positions.tolist() == [10, 11, 11, 12]
    assert child.tolist() == [[1, -1, 3, -1]]
    assert sibling.tolist() == [[-1, 2, -1, -1]]
    tokens, target = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[7, 0, 8, 9]])
    predicts, accepted, count = torch.zeros(4, dtype=torch.int32), torch.full((1, 3), -1), torch.zeros(1)
    kernels.verify_tree_greedy_cpu(predicts, accepted, count, tokens, index, child, sibling, target)
    assert (accepted.tolist(), count.tolist()) == ([[0, 2, 3]], [2.0])
    assert predicts.tolist() == [7, 0, 8, 9]
