"""ModelOpt's Eagle3 loss in memory that grows with the tokens, over rows that may hold several documents.

For each draft step, ModelOpt's forward holds the attention scores of all heads and the logits of all tokens: at
Kimi-K2's dims tens of gigabytes for a row of 4,096 tokens. The replacements here compute the same sums:

* attention for a block of queries at a time, by torch's scaled_dot_product_attention; a block gets only the keys of its
  documents and chains, and is recomputed for the gradient;
* keys and values of the draft steps kept separately, where a cache would join them into a copy per step;
* the loss of all draft steps for a block of tokens at a time, and only for those that count: the target's probabilities
  once for all steps, and the gradient with the loss, so that no logits are kept or recomputed;
* the target's output matrix cast once, where autocast casts a frozen matrix anew at each use;
* the MLP's inner activations recomputed for the gradient;
* masks that keep attention, draft chains and loss inside a document, so that a packed row has the same loss as its
  documents separately;
* only the chains of which a draft counts go on behind the first draft step.

scripts/bench train-memory measures the peak. The layout of draft steps is ModelOpt's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SDPA = "kconv_sdpa"
# ModelOpt's forward disables all of torch's kernels but cuDNN's and the one that holds all scores; CPUs use the latter.
# https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/utils.py#L570-L584
KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]
# Bytes of float32 logits to hold at a time, and the fewest and most tokens.
LOGIT_BYTES, FEWEST_TOKENS, MOST_TOKENS = 256 << 20, 16, 512


# Of an accepted share: less than this counts as this, and has a logarithm.
SMALLEST = 1e-6
# Queries per block: smaller blocks get fewer keys that they may not see, larger ones need fewer calls.
QUERIES = 256


@dataclass(frozen=True)
class Chains:
    """The chains that go through a draft step: those of which this draft or a later one counts.

    Attributes:
        starts: [N], the tokens that they start from; the first step goes through all tokens, whose keys others see.
        spans: for each block of queries and each draft step so far, which of its keys to look at.
    """

    starts: Tensor
    spans: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Documents:
    """The documents of a batch, whose rows stand one behind the other, and what counts in them.

    Attributes:
        numbers: [T], another one for each document, -1 for padding.
        positions: [T], of each token in its document.
        chains: those of each draft step.
        places: [N], the tokens whose next one counts.
        counts: [K, N], whether it counts at each draft step, which its chain may not reach within the document.
        drafted: [K, N], where each step has its draft at these places, among its chains.
    """

    numbers: Tensor
    positions: Tensor
    chains: tuple[Chains, ...]
    places: Tensor
    counts: Tensor
    drafted: Tensor


def find_documents(numbers: Tensor, mask: Tensor, steps: int) -> Documents:
    """Return what a batch's draft steps go through.

    All of it is found on the CPU, so a device is waited for once.

    Args:
        numbers: [B, T] of each row's documents, -1 for padding; a document's tokens are consecutive.
        mask: [B, T], which tokens count.
        steps: draft steps.
    """
    device, (rows, length) = numbers.device, numbers.shape
    numbers, mask = numbers.long().cpu(), mask.bool().cpu().flatten()
    numbers = torch.where(numbers < 0, -1, numbers + torch.arange(rows)[:, None] * (length + 1)).flatten()
    at = torch.arange(len(numbers))
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[1:] = numbers[1:] != numbers[:-1]
    begins[::length] = True
    firsts = torch.where(begins, at, 0).cummax(0).values
    positions = at - firsts
    # The draft of step k for the token behind `at` ends a chain that started k tokens before, in the same document.
    reached = [mask[1:] & (numbers[1:] >= 0) & (positions[1:] > step) for step in range(steps)]
    places = reached[0].nonzero().flatten()
    starts, going = [at], torch.zeros(len(at), dtype=torch.bool)
    for step in range(steps - 1, 0, -1):
        going[: len(at) - 1 - step] |= reached[step][step:]
        # One at least, so that no step is empty.
        starts.insert(1, going.nonzero().flatten() if going.any() else at[:1])
    chains = tuple(Chains(one.to(device), _spans(starts[: step + 1], firsts)) for step, one in enumerate(starts))
    counts = torch.stack([one[places] for one in reached])
    found = [torch.searchsorted(one, places - step) for step, one in enumerate(starts)]
    drafted = torch.stack([one.clamp(max=len(of) - 1) for one, of in zip(found, starts, strict=True)])
    return Documents(numbers.to(device), positions.to(device), chains, *(
        one.to(device) for one in (places, counts, drafted)
    ))  # fmt: skip


def _spans(starts: Sequence[Tensor], firsts: Tensor) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the spans of the last of some steps' chains; `firsts` says where each token's document begins."""
    lots = starts[-1].split(QUERIES)
    edges = torch.tensor([(int(lot[0]), int(lot[-1])) for lot in lots])
    spans = [torch.stack([firsts[edges[:, 0]], edges[:, 1] + 1], 1)]
    spans += [torch.searchsorted(one, edges) + torch.tensor([0, 1]) for one in starts[1:]]
    return tuple(tuple((a, b) for a, b in lot) for lot in torch.stack(spans, 1).tolist())


class Steps:
    """Keys and values of the draft steps so far, each step's separately; replaces transformers' cache."""

    def __init__(self) -> None:
        self.keys: tuple[Tensor, ...] = ()
        self.values: tuple[Tensor, ...] = ()

    def get_seq_length(self, layer: int = 0) -> int:
        """Return how many positions are held."""
        return sum(key.shape[-2] for key in self.keys)

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Add a step's, and return those of all steps."""
        # MLA's values are a slice of a larger projection, which should not be kept alive for them.
        self.keys, self.values = (*self.keys, key), (*self.values, value.contiguous())
        return self.keys, self.values


def attend(
    module: Any,
    query: Tensor,
    key: tuple[Tensor, ...],
    value: tuple[Tensor, ...],
    documents: Documents,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend in a draft step like transformers' eager attention under ModelOpt's mask, a block of queries at a time.

    A query sees the first step's keys of its document up to where its chain starts, and its own chain's.
    https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/utils.py#L556-L567

    Args:
        query: [1, heads, N, D].
        key, value: of each draft step so far, [1, key heads, its own N, D or the values' width].
    """
    step, found = len(key) - 1, []
    for lot, spans in enumerate(documents.chains[step].spans):
        queries = slice(lot * QUERIES, (lot + 1) * QUERIES)
        parts = [part[:, :, a:b] for steps in (key, value) for part, (a, b) in zip(steps, spans, strict=True)]
        seen = _seen(documents, documents.chains[step].starts[queries], spans)
        found.append(_again(partial(_attend_lot, scaling, seen), query[:, :, queries], *parts))
    return torch.cat(found, 1), None


def _seen(documents: Documents, starts: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return which keys of `spans` the queries of some chains see, [1, 1, queries, keys]; each sees its start's."""
    own, (begin, end), starts = documents.chains[1 : len(spans)], spans[0], starts[:, None]
    at = torch.arange(begin, end, device=starts.device)
    blocks = [(documents.numbers[starts] == documents.numbers[at]) & (at <= starts)]
    blocks += [chains.starts[a:b] == starts for chains, (a, b) in zip(own, spans[1:], strict=True)]
    return torch.cat(blocks, -1)[None, None]


def _attend_lot(scaling: float, seen: Tensor, query: Tensor, *parts: Tensor) -> Tensor:
    """Return the attention output of queries, [B, queries, heads, the values' width]."""
    key, value = (torch.cat(half, 2) for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :]))
    width = value.shape[-1]
    # The kernels that hold no scores accept only one width, but MLA's values are narrower than its keys.
    value = F.pad(value, (0, query.shape[-1] - width))
    # They do not share keys among heads either.
    shared = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shared, 1) if shared > 1 else part for part in (key, value))
    with sdpa_kernel(KERNELS):
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)
    return found[..., :width].transpose(1, 2)


ALL_ATTENTION_FUNCTIONS.register(SDPA, attend)


def make_lean(model: Any, lk_loss: float) -> None:
    """Change ModelOpt's Eagle model in place so that it computes its loss as described above."""
    for name, method in METHODS.items():
        # Only on this object: ModelOpt's class is shared by all Eagle models.
        setattr(model, name, partial(method, model, getattr(model, name)))
    model.kconv_documents, model.kconv_lk_loss = None, lk_loss
    # Of a forward: each draft step's final states. Of all: the target's output matrix as it is used.
    model.kconv_drafted, model.kconv_known = [], None
    for layer in model.eagle_module.layers:
        layer.mlp.forward = partial(_again, layer.mlp.forward)


def run_lean(model: Any, inner: Any, batch: dict[str, Any]) -> Any:
    """Run ModelOpt's forward over a batch from a `Feed`; `model` is `inner`, or what shares it among processes.

    The rows stand one behind the other, as the documents of one.
    """
    base = {name: states.flatten(0, 1)[None] for name, states in batch["base_model_outputs"].items()}
    ids, mask = batch["input_ids"], batch["loss_mask"]
    numbers = batch.get("documents")
    inner.kconv_documents = find_documents(
        torch.zeros_like(ids) if numbers is None else numbers, mask, inner.eagle_ttt_steps
    )
    # ModelOpt would compute the target's logits of all tokens at once if none are given.
    base["base_model_logits"] = base["base_model_hidden_states"].new_zeros(1, ids.numel(), 1)
    try:
        return model(
            input_ids=ids.flatten()[None],
            loss_mask=mask.flatten()[None],
            base_model_outputs=base,
            position_ids=inner.kconv_documents.positions[None],
        )
    finally:
        inner.kconv_documents = None


def _again(function: Any, *inputs: Tensor) -> Tensor:
    """Call a function whose inner values are recomputed for the gradient."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportReturnType]


def _no_mask(model: Any, *_: Any) -> Documents:
    """Replace `_prepare_decoder_attention_mask` and `_get_ttt_attention_mask`; `attend` builds its own masks."""
    return model.kconv_documents


def _inputs(
    model: Any, original: Any, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any, base: Any
) -> tuple[Any, ...]:
    """Replace `_prepare_eagle_inputs`: return the target's final states where ModelOpt returns its probabilities."""
    embeds, hiddens, seen, places, *_ = original(ids, mask, positions, cache, base)
    return embeds, hiddens, seen, places, base.out_hiddens, base.out_hiddens


def _logits_of_nothing(model: Any, original: Any, logits: Tensor) -> Tensor:
    """Replace `_map_logits_to_draft_vocab`, which `_inputs` leaves nothing to map."""
    return logits


def _draft(model: Any, original: Any, hidden: Tensor, embeds: Tensor, mask: Any, places: Any, cache: Any = None) -> Any:
    """Replace `_eagle_forward`: keep a draft step's final states for `_forward`, which computes the losses of all.

    Behind the first step, only chains of which a draft counts go on.
    """
    cache = cache if isinstance(cache, Steps) else Steps()
    step = len(cache.keys)
    at, every = model.kconv_documents.chains[step].starts + step, torch.zeros_like(hidden)
    if step:
        hidden, embeds, places = (one[:, at] for one in (hidden, embeds, places))
    normed, residual, cache = model.eagle_module(
        hidden, embeds, attention_mask=mask, position_ids=places, use_cache=True, past_key_values=cache
    )
    model.kconv_drafted.append(normed[0])
    residual = every.index_copy(1, at, residual.to(every.dtype)) if step else residual
    return residual, residual, residual, cache


def _no_loss(model: Any, original: Any, *values: Tensor) -> tuple[Tensor, Tensor]:
    """Replace `_eagle_loss`, as `_forward` computes all."""
    return values[2].new_zeros(()), values[2].new_zeros(())


def _forward(model: Any, original: Any, **values: Any) -> Any:
    """Replace `forward`: give the output its loss, and the share of equal tops at each draft step.

    The loss is the soft cross-entropy and, with the recipe's weight, the LK loss: each step's mean over the tokens that
    count, decayed by step.
    """
    try:
        output = original(**values)
        loss, equal = _loss(model, values["base_model_outputs"]["base_model_hidden_states"][0], model.kconv_drafted)
    finally:
        model.kconv_drafted = []
    output["loss"] = output["eagle_loss"] = loss
    output["train_acc"] = [equal.tolist()]
    return output


def _loss(model: Any, target: Tensor, drafted: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss, and the share of equal tops at each draft step."""
    documents: Documents = model.kconv_documents
    counts = documents.counts[: len(drafted)].float()
    totals = counts.sum(1, keepdim=True)
    decay = model.eagle_loss_decay_factor ** torch.arange(len(drafted), device=counts.device)[:, None]
    heads = [head[at] for head, at in zip(drafted, documents.drafted[: len(drafted)], strict=True)]
    known = _known(model)
    own = getattr(model.eagle_module, "lm_head", None)
    own = known if own is None else (own.weight, own.bias)
    # An evaluation asks for no gradients, which torch does not tell the function.
    matrix = own[0] if torch.is_grad_enabled() else own[0].detach()
    weights = decay * counts / (totals + 1e-5)
    wanted = target[documents.places + 1]
    loss, equal = _JointLoss.apply(model.kconv_lk_loss, known, own[1], wanted, weights, matrix, *heads)  # pyright: ignore[reportGeneralTypeIssues]
    return loss, (equal * counts).sum(1) / totals[:, 0].clamp_min(1)


def _compute(device: torch.device) -> torch.dtype | None:
    """Return what matrix products are computed in; None for their inputs' dtype."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@torch.no_grad()
def _known(model: Any) -> tuple[Tensor, Tensor | None]:
    """Return the target's output matrix and bias as they are used: of the tokens that the head drafts, and cast."""
    known, dtype = model._base_model_lm_head, _compute(model.device)
    d2t = getattr(model.eagle_module, "d2t", None)
    if d2t is None and dtype in (None, known.weight.dtype):
        return known.weight, known.bias
    if model.kconv_known is None:
        # Only the target's tokens that the head drafts: the others cost as much, and nothing uses them.
        rows = slice(None) if d2t is None else torch.arange(len(d2t), device=d2t.device) + d2t
        bias = None if known.bias is None else known.bias[rows].to(dtype)
        model.kconv_known = known.weight[rows].to(dtype), bias
    return model.kconv_known


def block_tokens(vocab: int) -> int:
    """Return of how many tokens the loss holds the logits at a time."""
    return max(FEWEST_TOKENS, min(MOST_TOKENS, LOGIT_BYTES // (4 * vocab)))


class _JointLoss(torch.autograd.Function):
    """The weighted loss of all draft steps, a block of tokens at a time, with its gradient.

    The gradient of the cross-entropy with respect to logits is the head's probabilities less the target's. Of the LK
    loss, -log a with a the sum of min(p, q), it is q (g - sum of g q), where g is -1/a if q < p, else 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        lk_loss: float,
        known: tuple[Tensor, Tensor | None],
        own_bias: Tensor | None,
        target: Tensor,
        weights: Tensor,
        own: Tensor,
        *heads: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss and its gradient; return the loss, and whether both tops are equal [K, N].

        Args:
            known: the target's output matrix [V, hidden] and bias, frozen.
            target: the target's final states [N, hidden].
            weights: of each draft step's loss at each token [K, N].
            own: the head's output matrix [V, hidden].
            heads: each draft step's final states [N, hidden].
        """
        dtype = _compute(own.device) or own.dtype
        matrix = own.to(dtype)
        grads = [torch.zeros_like(head) for head in heads if head.requires_grad]
        own_grad = torch.zeros_like(own) if own.requires_grad else None
        total, equal = weights.new_zeros(()), torch.zeros_like(weights)
        size = block_tokens(len(own))
        for begin in range(0, len(target), size):
            block = slice(begin, begin + size)
            logits = F.linear(target[block].to(dtype), known[0], known[1])
            wanted = logits.softmax(-1, torch.float32)
            tops = wanted.argmax(-1, keepdim=True)
            for step, head in enumerate(heads):
                states, share = head[block].to(dtype), weights[step, block, None]
                logits = F.linear(states, matrix, own_bias)
                drafted = logits.log_softmax(-1, torch.float32)
                # On a CPU argmax takes seven times as long as amax; of two tops, either counts.
                equal[step, block] = (drafted.gather(1, tops)[:, 0] == drafted.amax(-1)).float()
                total -= (share * (wanted * drafted).sum(-1, True)).sum()
                drafted = drafted.exp_()
                found = drafted - wanted
                if lk_loss:
                    accepted = torch.minimum(wanted, drafted).sum(-1, True)
                    total -= lk_loss * (share * accepted.clamp(min=SMALLEST).log()).sum()
                    slope = (found < 0).float().mul_((accepted > SMALLEST) * -lk_loss / accepted.clamp(min=SMALLEST))
                    found += drafted * (slope - (slope * drafted).sum(-1, True))
                if grads:
                    found = found.mul_(share).to(dtype)
                    grads[step][block] = found @ matrix
                if own_grad is not None:
                    own_grad += found.T @ states
        ctx.grads = (own_grad, *grads)
        ctx.mark_non_differentiable(equal)
        return total, equal

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients, which `forward` computed, times that of the loss."""
        given, grads, ctx.grads = grad_outputs[0], ctx.grads, None
        return None, None, None, None, None, *(None if one is None else one.mul_(given) for one in grads)


METHODS = {
    "_prepare_decoder_attention_mask": _no_mask,
    "_get_ttt_attention_mask": _no_mask,
    "_prepare_eagle_inputs": _inputs,
    "_map_logits_to_draft_vocab": _logits_of_nothing,
    "_eagle_forward": _draft,
    "_eagle_loss": _no_loss,
    "forward": _forward,
}
