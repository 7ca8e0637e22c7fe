"""Measure a head in training on text that it never trains on.

ModelOpt's own validation needs a GPU, and its trainer's hook reports nothing
(https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/plugins/hf_eagle.py#L950-L1010), so
acceptance comes from kconv's own forward and chain, as `kconv validate` measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..charts import COLOURS, INK, chart
from ..drafters.base import RunningDrafter, Spec
from ..drafters.chain import Acceptance, overlap_acceptance, overlap_at, pool, served_shares
from ..drafters.slots import needs
from ..engines import by_name
from ..engines.layout import stored
from .drafter_recipe import DrafterRecipe
from .family import Family, Model, family_of
from .feed import Batch, Feed

# Bytes of one step's logits to hold at a time: rows are measured together up to that, a longer one by itself.
LOGIT_BYTES = 256 << 20


def draft_head(state: Mapping[str, Tensor], model: Model, spec: Spec, family: Family) -> RunningDrafter:
    """Return kconv's forward over the whole state of ModelOpt's module.

    The model gives the device, and the embedding and output matrix that the head shares with its target.
    """
    shared = {"embed_tokens": model._base_model_embeddings.weight, "lm_head": model._base_model_lm_head.weight}
    weights = {slot: whole_tensor(weight) for slot, weight in shared.items()}
    device = weights["lm_head"].device
    known = needs(spec)
    for name, row in stored(by_name(family.exported(spec)), spec).items():
        if name in state:
            parts = torch.split(state[name], [known[slot].shape[0] for slot in row.slots])
            weights |= dict(zip(row.slots, parts, strict=True))
    return spec.drafter.load(spec, {slot: weight.detach().to(device) for slot, weight in weights.items()})


@torch.no_grad()
def evaluate(
    model: Model, head: RunningDrafter, unseen: Feed, recipe: DrafterRecipe, gather: Callable[[list[Any]], list[Any]]
) -> dict[str, float]:
    """Measure a head on batches that it never trains on; positions outside the loss mask do not count.

    Args:
        gather: returns the items of all processes, each of which measured the head on equally many batches of its own.

    Returns:
        `loss`: ModelOpt's training loss; `top1_k`: share of positions where step k's most likely token is the right
        one, `top1` if ModelOpt counts all steps together; `acceptance`: sampled acceptance length at K =
        `draft_steps`, including the bonus token; `rate_k`: share of drafts accepted up to position k.
    """
    steps, family = recipe.draft_steps, family_of(recipe)
    found: list[tuple[Tensor, Tensor, Acceptance]] = []
    model.train()  # only then does ModelOpt compute its loss
    device = head.weights["fc"].device
    # ModelOpt may take random places of a text: here always the same, and training those that it would have taken.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)
        for index in range(len(unseen)):
            batch: Batch = _to(unseen[index], device)
            output = family.run(model, batch, recipe)
            shares = torch.cat(list(_shares(model, head, batch, steps, family)), 1)
            # Chain t drafts after token t + 1; it counts if everything that it predicts from belongs to an answer.
            chains = shares.shape[2]
            counts = torch.stack([batch["loss_mask"][:, k : k + chains] for k in range(1, steps + 1)]).all(0)
            accepted = overlap_acceptance(shares[:, counts].unsqueeze(1))
            found.append((output.loss.detach().float().cpu(), torch.tensor(output.train_acc[0]), accepted))
    model.eval()
    losses, top1, parts = zip(*gather(found), strict=True)
    total = pool(parts)
    figures = {"loss": float(torch.stack(losses).mean()), "acceptance": total.length}
    right = torch.stack(top1).mean(0).tolist()
    figures |= (
        {f"top1_{k}": value for k, value in enumerate(right, start=1)} if len(right) == steps else {"top1": right[0]}
    )
    return figures | {f"rate_{k}": rate for k, rate in enumerate(total.rates, start=1)}


def count_rows(length: int, vocab: int) -> int:
    """Return how many rows of a batch an evaluation measures at a time."""
    return max(1, LOGIT_BYTES // (4 * length * vocab))


def _shares(model: Model, head: RunningDrafter, batch: Batch, steps: int, family: Family) -> Iterator[Tensor]:
    """Yield the share of each step's drafts that is accepted, [K, rows, T'], of some rows at a time."""
    ids, outputs = batch["input_ids"], batch["base_model_outputs"]
    lot = count_rows(ids.shape[1], head.spec.vocab)
    parts = (ids, outputs["aux_hidden_states"], outputs["base_model_hidden_states"])
    for tokens, captured, hidden in zip(*(part.split(lot) for part in parts), strict=True):
        served = served_shares(model._base_model_lm_head(hidden), head.target_ids)
        drafted = enumerate(family.drafts(head, tokens, captured, steps), start=1)
        yield torch.stack([overlap_at(served, k, logits.float().softmax(-1)) for k, logits in drafted])


def head_state(model: nn.Module, family: Family) -> dict[str, Tensor]:
    """Return the weights of ModelOpt's module, whole and under its own names; every process must call this."""
    state: dict[str, Tensor] = getattr(model, family.part).state_dict()
    return {name: whole_tensor(tensor.detach()) for name, tensor in state.items()}


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor whole that may be distributed over processes (FSDP2); every process must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {key: _to(part, device) for key, part in value.items()}
    return value.to(device)


def draw_curves(file: Path, history: Sequence[Mapping[str, Any]], steps: int) -> None:
    """Plot the loss of each step that the Trainer logged, and the evaluations' figures, as a PNG."""

    def series(key: str) -> tuple[list[int], list[float]]:
        rows = [row for row in history if key in row]
        return [row["step"] for row in rows], [row[key] for row in rows]

    with chart(file, panels=2, width=9.0) as (_, [left, right]):
        left.plot(*series("loss"), color=INK, linewidth=0.8, label="trained on")
        left.plot(*series("eval_loss"), color=COLOURS[0], marker="o", markersize=3, label="held out")
        left.set(xlabel="step", ylabel="loss, nats, over the draft steps")
        right.plot(*series("eval_acceptance"), color=COLOURS[0], marker="o", markersize=3, label="acceptance length")
        for k in range(1, steps + 1):
            colour = COLOURS[k % len(COLOURS)]
            right.plot(*series(f"eval_rate_{k}"), color=colour, linewidth=0.8, label=f"accepted up to position {k}")
        right.set(xlabel="step", ylabel=f"sampled, held out, K = {steps}")
        for axes in (left, right):
            axes.legend()
