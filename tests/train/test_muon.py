"""Muon in float32 goes where torch's goes in bfloat16, up to bfloat16's rounding."""

import torch

from kconv.muon import Muon


def test_a_step_is_torchs_up_to_the_rounding_of_bfloat16():
    torch.manual_seed(0)
    start, gradient, ended = torch.randn(12, 20), torch.randn(12, 20), []
    for kind in (torch.optim.Muon, Muon):
        weight = torch.nn.Parameter(start.clone())
        weight.grad = gradient.clone()
        kind([weight], lr=0.1, weight_decay=0.0).step()
        ended.append(weight.detach() - start)
    torchs, ours = ended
    assert 0 < float((ours - torchs).norm() / torchs.norm()) < 0.03


def test_a_small_change_of_the_gradient_is_not_rounded_away():
    """Float32 keeps a change that bfloat16 would round away."""
    gradient, ended = torch.eye(8) + 0.1 * torch.arange(64.0).reshape(8, 8) / 64, []
    for by in (0.0, 1e-4):
        weight = torch.nn.Parameter(torch.zeros(8, 8))
        weight.grad = gradient * 1.0
        weight.grad[0, 0] += by
        Muon([weight], lr=1.0, weight_decay=0.0).step()
        ended.append(weight.detach())
    assert weight.dtype == torch.float32 and 0 < float((ended[0] - ended[1]).abs().max()) < 1e-2
