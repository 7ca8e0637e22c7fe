"""In which order batches are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler


class EpochOrder(Sampler[int]):
    """Every batch once a pass, in an order that hangs on the seed and the pass alone.

    So it is the same after a restart, and on each of several processes, which take turns in it. The pass is asked for:
    accelerate would tell it, but not to a sampler behind the batches that a run of several processes skips when it goes
    on (https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/data_loader.py#L622-L640).

    Args:
        length: number of batches.
        seed: of the orders.
        epoch: gives the pass that begins, from 0.
    """

    def __init__(self, length: int, seed: int, epoch: Callable[[], int]) -> None:
        self._length, self._seed, self._epoch = length, seed, epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed)
        orders = [torch.randperm(self._length, generator=generator) for _ in range(self._epoch() + 1)]
        yield from orders[-1].flip(0).tolist()
