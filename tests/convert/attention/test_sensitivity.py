"""The Fisher information foretells what small errors in keys and values cost."""

import pytest
import torch

from kconv.convert.attention.latents import measure_sensitivity
from kconv.drafters.attention import ChainContext
from kconv.drafters.chain import along_chains

SIZE = 0.03


class Noisy(ChainContext):
    """A chain's context with random errors in what it takes in."""

    def __init__(self, key: float, value: float, seed: int) -> None:
        super().__init__()
        self._sizes, self._generator = (key, value), torch.Generator().manual_seed(seed)

    def attend(self, layer, query, key, value, scale):
        key, value = (
            entry + size * torch.randn(entry.shape, generator=self._generator, dtype=entry.dtype)
            for entry, size in zip((key, value), self._sizes, strict=True)
        )
        return super().attend(layer, query, key, value, scale)


def drafts(head, batch, context) -> torch.Tensor:
    """Return log q of each draft step, the hidden states handed on as the head made them."""
    inputs = along_chains(batch.tokens, 3)
    hidden, found = head.fuse(batch.captured[:, : inputs.shape[2]]), []
    for k, tokens in enumerate(inputs):
        hidden, logits = head.step(tokens, hidden, torch.arange(inputs.shape[2]) + k, context)
        found.append(logits.log_softmax(-1))
    return torch.stack(found)


class Fixed(Noisy):
    """Keeps keys and values of an undisturbed run, so that errors reach later steps as the gradient's do."""

    def __init__(self, entries, key, value, seed):
        super().__init__(key, value, seed)
        self._kept = iter(entries)

    def attend(self, layer, query, key, value, scale):
        key, value = next(self._kept)
        return super().attend(layer, query, key, value, scale)


class Keeping(ChainContext):
    def __init__(self):
        super().__init__()
        self.entries = []

    def attend(self, layer, query, key, value, scale):
        self.entries.append((key, value))
        return super().attend(layer, query, key, value, scale)


@pytest.mark.parametrize("which", ["key", "value"])
def test_small_errors_cost_what_it_says(make_head, make_calibration, gqa_spec, which):
    head, calibration = make_head(gqa_spec), make_calibration(gqa_spec, batches=30)
    found = measure_sensitivity(head, calibration.batches)
    matrix = found.key if which == "key" else found.value
    assert matrix.shape == (2, 8, 8)
    cost = rows = 0.0
    with torch.no_grad():
        for seed, batch in enumerate(calibration.batches):
            kept = Keeping()
            p = drafts(head, batch, kept)
            sizes = (SIZE, 0.0) if which == "key" else (0.0, SIZE)
            q = drafts(head, batch, Fixed(kept.entries, *sizes, seed))
            cost += float((p.exp() * (p - q)).sum())
            rows += p[0, ..., 0].numel()
    foretold = SIZE**2 * float(matrix.diagonal(dim1=1, dim2=2).sum()) / 2
    assert cost / rows == pytest.approx(foretold, rel=0.15)
