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
  documents separately.

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
# Bytes of float32 logits to hold at a time, and a minimum number of tokens.
LOGIT_BYTES, FEWEST_TOKENS = 256 << 20, 16


# Of an accepted share: less than this counts as this, and has a logarithm.
SMALLEST = 1e-6
# Queries per block: smaller blocks get fewer keys that they may not see, larger ones need fewer calls.
QUERIES = 256


@dataclass(frozen=True)
class Documents:
    """The documents of a batch's rows.

    Attributes:
        numbers: [B, T], -1 for padding.
        positions: [B, T], of each token in its document.
        firsts: for each block of queries, where the first of its documents begins.
    """

    numbers: Tensor
    positions: Tensor
    firsts: tuple[int, ...]


def find_documents(numbers: Tensor) -> Documents:
    """Return where the documents of rows begin; a document's tokens are consecutive."""
    at = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    first = torch.where(begins, at, torch.zeros_like(at)).cummax(1).values
    return Documents(numbers, at - first, tuple(first[:, ::QUERIES].amin(0).tolist()))


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

    A query sees the first step's keys of its document up to `step` tokens before it, and step i's key at `step - i`
    tokens before it, which belongs to its own chain.
    https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/utils.py#L556-L567

    Args:
        query: [B, heads, T, D].
        key, value: of each draft step so far, [B, key heads, T, D or the values' width].
    """
    step, found = len(key) - 1, []
    for lot, first in enumerate(documents.firsts):
        begin, end = lot * QUERIES, min((lot + 1) * QUERIES, query.shape[2])
        # For each step, counted from 0, the keys that any of these queries sees.
        spans = [(first, max(first, end - step))]
        spans += [(max(0, begin - step + i), end - step + i) for i in range(1, step + 1)]
        parts = [part[:, :, a:b] for steps in (key, value) for part, (a, b) in zip(steps, spans, strict=True)]
        seen = _seen(documents.numbers, range(begin, end), spans)
        found.append(_again(partial(_attend_lot, scaling, seen), query[:, :, begin:end], *parts))
    return torch.cat(found, 1), None


def _seen(numbers: Tensor, queries: range, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return which keys the queries of `spans` see, [B, 1, queries, keys]; each sees at least its own step's key."""
    step, at = len(spans) - 1, torch.arange(numbers.shape[1], device=numbers.device)
    own = slice(queries.start, queries.stop)
    behind = [at[own, None] - at[None, begin:end] for begin, end in spans]
    same = numbers[:, own, None] == numbers[:, None, slice(*spans[0])]
    blocks = [same & (behind[0] >= step)]
    blocks += [(behind[i] == step - i).expand(len(numbers), -1, -1) for i in range(1, step + 1)]
    return torch.cat(blocks, -1).unsqueeze(1)


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
    # Of a forward: the target's final states, and each draft step's. Of all: the target's output matrix as it is used.
    model.kconv_target, model.kconv_drafted, model.kconv_known = None, [], None
    for layer in model.eagle_module.layers:
        layer.mlp.forward = partial(_again, layer.mlp.forward)


def run_lean(model: Any, inner: Any, batch: dict[str, Any]) -> Any:
    """Run ModelOpt's forward over a batch from a `Feed`; `model` is `inner`, or what shares it among processes."""
    values = dict(batch)
    documents = values.pop("documents", None)
    if documents is None:
        documents = torch.zeros_like(values["input_ids"])
    inner.kconv_documents = find_documents(documents)
    # ModelOpt would compute the target's logits of all tokens at once if none are given.
    hidden = values["base_model_outputs"]["base_model_hidden_states"]
    values["base_model_outputs"] = values["base_model_outputs"] | {
        "base_model_logits": hidden.new_zeros(*hidden.shape[:2], 1)
    }
    try:
        return model(**values, position_ids=inner.kconv_documents.positions)
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
    """Replace `_eagle_forward`: return the head's final states where ModelOpt returns its logits."""
    cache = cache if isinstance(cache, Steps) else Steps()
    normed, residual, cache = model.eagle_module(
        hidden, embeds, attention_mask=mask, position_ids=places, use_cache=True, past_key_values=cache
    )
    return normed, residual, normed, cache


def _keep(model: Any, original: Any, target: Tensor, _: Tensor, head: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Replace `_eagle_loss`: keep a draft step's final states for `_forward`, which computes the losses of all."""
    if not model.kconv_drafted:
        model.kconv_target = target
    model.kconv_drafted.append((head, mask))
    return head.new_zeros(()), head.new_zeros(())


def _forward(model: Any, original: Any, **values: Any) -> Any:
    """Replace `forward`: give the output its loss, and the share of equal tops at each draft step.

    The loss is the soft cross-entropy and, with the recipe's weight, the LK loss: each step's mean over the tokens that
    count, decayed by step.
    """
    try:
        output = original(**values)
        loss, equal = _loss(model, model.kconv_target, model.kconv_drafted)
    finally:
        model.kconv_target, model.kconv_drafted = None, []
    output["loss"] = output["eagle_loss"] = loss
    output["train_acc"] = [equal.tolist()]
    return output


def _loss(model: Any, target: Tensor, drafted: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the loss, and the share of equal tops at each draft step."""
    documents: Documents = model.kconv_documents
    places = documents.positions[:, 1:]
    # Step k's first state predicts the same token as step 0's k-th. The position predicted from and the chain's start
    # must be in one document.
    counted = [
        F.pad(mask.bool(), (step, 0)) & (places > step) & (documents.numbers[:, 1:] >= 0)
        for step, (_, mask) in enumerate(drafted)
    ]
    # What counts at a step counts at those before it.
    rows, at = counted[0].nonzero(as_tuple=True)
    counts = torch.stack([one[rows, at] for one in counted]).float()
    totals = counts.sum(1, keepdim=True)
    decay = model.eagle_loss_decay_factor ** torch.arange(len(drafted), device=counts.device)[:, None]
    heads = [head[rows, (at - step).clamp_min(0)] for step, (head, _) in enumerate(drafted)]
    known = _known(model)
    own = getattr(model.eagle_module, "lm_head", None)
    own = known if own is None else (own.weight, own.bias)
    # An evaluation asks for no gradients, which torch does not tell the function.
    matrix = own[0] if torch.is_grad_enabled() else own[0].detach()
    weights = decay * counts / (totals + 1e-5)
    loss, equal = _JointLoss.apply(model.kconv_lk_loss, known, own[1], target[rows, at], weights, matrix, *heads)  # pyright: ignore[reportGeneralTypeIssues]
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
        size = max(FEWEST_TOKENS, LOGIT_BYTES // (4 * len(own)))
        for begin in range(0, len(target), size):
            block = slice(begin, begin + size)
            logits = F.linear(target[block].to(dtype), known[0], known[1])
            tops, wanted = logits.argmax(-1), logits.softmax(-1, torch.float32)
            for step, head in enumerate(heads):
                states, share = head[block].to(dtype), weights[step, block, None]
                logits = F.linear(states, matrix, own_bias)
                equal[step, block] = (logits.argmax(-1) == tops).float()
                drafted = logits.log_softmax(-1, torch.float32)
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
    "_eagle_loss": _keep,
    "forward": _forward,
}
