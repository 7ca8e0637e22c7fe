"""How far two drafters' logits are from each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import TargetInvalid

# Rows of what `differ` returns for a sequence; the first two are maxima, the others sums over places.
LARGEST, SCALE, SQUARES, SOURCE_SQUARES, KL, SAME, PLACES = range(7)


def differ(source: Tensor, output: Tensor, source_ids: Tensor, output_ids: Tensor) -> list[Tensor]:
    """Compare two drafters' logits on one batch.

    Where the two have other draft vocabularies, the tokens that both have are compared.

    Args:
        source, output: `[K, B, T', draft_vocab]`.
        source_ids, output_ids: `[draft_vocab]`, the target's id of each.

    Returns:
        For each of the B sequences `[7, K]` float64; see the rows' names.

    Raises:
        TargetInvalid: no token is in both vocabularies.
    """
    if not torch.equal(source_ids, output_ids):
        source, output = _common(source, output, source_ids, output_ids)
    found = []
    for row in range(source.shape[1]):
        a, b = source[:, row].float(), output[:, row].float()
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        difference = (b - a).double()
        found.append(
            torch.stack(
                [
                    difference.abs().amax((1, 2)),
                    a.double().abs().amax((1, 2)),
                    difference.square().sum((1, 2)),
                    a.double().square().sum((1, 2)),
                    (p.exp() * (p - q)).sum(-1).double().sum(1),
                    (a.argmax(-1) == b.argmax(-1)).double().sum(1),
                    torch.full((len(a),), a.shape[1], dtype=torch.float64),
                ]
            )
        )
    return found


def add_up(rows: Sequence[Tensor]) -> Tensor:
    """Add up sequences: `[7, K]`, maxima of the maxima and sums of the sums."""
    stacked = torch.stack(list(rows))
    return torch.cat([stacked[:, :SQUARES].amax(0), stacked[:, SQUARES:].sum(0)])


def over_steps(total: Tensor) -> Tensor:
    """Add up the draft steps: `[7, K]` to `[7, 1]`."""
    return torch.cat([total[:SQUARES].amax(1, keepdim=True), total[SQUARES:].sum(1, keepdim=True)])


def name_figures(total: Tensor, step: int = 0) -> dict[str, float]:
    """Return the figures of one column by the names that the report has for them."""
    column = total[:, step].tolist()
    # A source whose logits are all zero is no head; the differences then stand for themselves.
    return {
        "relative_error": column[LARGEST] / (column[SCALE] or 1.0),
        "rms_error": (column[SQUARES] / (column[SOURCE_SQUARES] or 1.0)) ** 0.5,
        "kl": column[KL] / column[PLACES],
        "top1": column[SAME] / column[PLACES],
    }


def _common(source: Tensor, output: Tensor, source_ids: Tensor, output_ids: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.isin(source_ids, output_ids)
    if not both.any():
        raise TargetInvalid(
            "the two heads' draft vocabularies have no token in common", fix="Compare heads of one target."
        )
    places = {int(token): place for place, token in enumerate(output_ids)}
    own = torch.tensor([places[int(token)] for token in source_ids[both]])
    return source[..., both], output[..., own]
