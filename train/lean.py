"""ModelOpt's Eagle3 loss meant for less memory, over rows that may hold several documents.

ModelOpt's forward holds the attention scores of all heads and the logits of all tokens, for each draft step: at
Kimi-K2's dims tens of gigabytes for a row of 4,096 tokens. What is put in its place here computes the same sums:

* attention by torch's scaled_dot_product_attention, which holds no scores;
* the loss over some tokens at a time, and only over those that count; their logits are computed again for the gradient;
* the MLP's inner activations are computed again for the gradient;
* masks that keep attention, draft chains and loss inside a document, so that a packed row has the loss of its
  documents by themselves.

What it saves is not shown yet: at 512 tokens and 64 heads its peak was no lower than eager attention's.

The layout of draft steps is ModelOpt's own; see `module` for what stands where.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SDPA = "kconv_sdpa"
# ModelOpt's forward leaves torch cuDNN's kernel and the one that holds all scores, which CPUs then take.
# https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/utils.py#L570-L584
KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]
# Bytes of float32 logits that are held at a time, and never fewer tokens than these.
LOGIT_BYTES, FEWEST_TOKENS = 256 << 20, 16


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' eager attention does, without its scores; the arguments are its own.

    https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/models/deepseek_v3/modeling_deepseek_v3.py
    """
    width = value.shape[-1]
    # The kernels that hold no scores take one width alone: MLA's values are narrower than its keys.
    value = F.pad(value, (0, query.shape[-1] - width))
    # Nor do they share keys among heads.
    shared = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shared, 1) if shared > 1 else part for part in (key, value))
    mask = None if attention_mask is None else attention_mask[..., : key.shape[-2]].to(query.dtype)
    with sdpa_kernel(KERNELS):
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return found[..., :width].transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(SDPA, attend)


def make_lean(model: Any) -> None:
    """Let ModelOpt's Eagle model, in place, compute its loss as this module says.

    Args:
        model: as `build_module` makes it, of a recipe whose `kernel` is "sdpa".
    """
    for name, method in METHODS.items():
        # On the object alone: its class, which ModelOpt makes, is every Eagle model's.
        setattr(model, name, partial(method, model, getattr(model, name)))
    model.kconv_documents = None
    for layer in model.eagle_module.layers:
        layer.mlp.forward = partial(_again, layer.mlp.forward)


def run_lean(model: Any, inner: Any, batch: dict[str, Any]) -> Any:
    """Run ModelOpt's forward over a batch; see `make_lean`.

    Args:
        model: what is called: `inner`, or what shares it among processes.
        inner: ModelOpt's Eagle model.
        batch: as a `Feed` gives it; `documents` [B, T] numbers the documents of a row, -1 for padding.
    """
    values = dict(batch)
    documents = values.pop("documents", None)
    if documents is None:
        documents = torch.zeros_like(values["input_ids"])
    inner.kconv_documents = documents
    positions = local_positions(documents)
    try:
        return model(**values, position_ids=positions)
    finally:
        inner.kconv_documents = None


def local_positions(documents: Tensor) -> Tensor:
    """Return the place of each token in its document, [B, T]; a document's tokens stand side by side."""
    at = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return at - torch.where(begins, at, torch.zeros_like(at)).cummax(1).values


def _again(forward: Any, hidden: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(hidden)
    return checkpoint(forward, hidden, use_reentrant=False)  # pyright: ignore[reportReturnType]


def _first_mask(model: Any, _: Any, __: Any, shape: tuple[int, int], past: int, device: Any, dtype: Any) -> Tensor:
    """Stand for `_prepare_decoder_attention_mask`: what the first draft step sees."""
    return _additive(_seen(model.kconv_documents, 0), dtype)


def _later_mask(model: Any, _: Any, batch: int, length: int, step: int) -> Tensor:
    """Stand for `_get_ttt_attention_mask`: what draft step `step`, counted from 0, sees."""
    dtype = model.eagle_module.layers[0].input_layernorm.weight.dtype
    return _additive(_seen(model.kconv_documents, step), dtype)


def _seen(documents: Tensor, step: int) -> Tensor:
    """Return which keys a token's query sees, [B, 1, T, T * (1 + step)].

    Of the first step's keys those of its document up to `step` tokens before it; of step i's the one at `step - i`
    tokens before it: its own chain's.
    https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/utils.py#L556-L567
    """
    length = documents.shape[1]
    at = torch.arange(length, device=documents.device)
    behind = at[:, None] - at[None, :]
    blocks = [(documents[:, :, None] == documents[:, None, :]) & (behind >= step)]
    blocks += [(behind == step - i).expand_as(blocks[0]) for i in range(1, step + 1)]
    return torch.cat(blocks, dim=-1).unsqueeze(1)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    # The smallest number rather than -inf, as ModelOpt has it: a query of no chain may see nothing.
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def _inputs(
    model: Any, original: Any, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any, base: Any
) -> tuple[Any, ...]:
    """Stand for `_prepare_eagle_inputs`: give the target's final states where ModelOpt gives its probabilities."""
    hidden = base.out_hiddens
    base.logits = hidden.new_zeros(*hidden.shape[:2], 1)
    embeds, hiddens, seen, places, *_ = original(ids, mask, positions, cache, base)
    return embeds, hiddens, seen, places, hidden, hidden


def _logits_of_nothing(model: Any, original: Any, logits: Tensor) -> Tensor:
    """Stand for `_map_logits_to_draft_vocab`, which `_inputs` leaves nothing to map."""
    return logits


def _draft(model: Any, original: Any, hidden: Tensor, embeds: Tensor, mask: Any, places: Any, cache: Any = None) -> Any:
    """Stand for `_eagle_forward`: give the head's final states where ModelOpt gives its logits."""
    normed, residual, cache = model.eagle_module(
        hidden, embeds, attention_mask=mask, position_ids=places, use_cache=True, past_key_values=cache
    )
    return normed, residual, normed, cache


def _loss(model: Any, original: Any, target: Tensor, _: Tensor, head: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Stand for `_eagle_loss`: the mean soft cross-entropy over the tokens that count, and the share of equal tops."""
    length = model.kconv_documents.shape[1]
    step = length - 1 - mask.shape[1]
    # The place that is predicted from, and that of which the chain begins, are of one document.
    inside = local_positions(model.kconv_documents)[:, 1 + step :] > step
    counted = mask[:, : head.shape[1]].bool() & inside & (model.kconv_documents[:, 1 + step :] >= 0)
    known, drafted = target[counted], head[counted]
    size = max(FEWEST_TOKENS, LOGIT_BYTES // (4 * model.config.vocab_size))
    # A sum of none still hangs on the head.
    total, equal = head.sum() * 0.0, torch.zeros((), device=head.device)
    for own, other in zip(known.split(size), drafted.split(size), strict=True):
        part, same = checkpoint(_part, model, own, other, use_reentrant=False)  # pyright: ignore[reportGeneralTypeIssues]
        total, equal = total + part, equal + same
    count = counted.sum()
    return total / (count + 1e-5), equal / count.clamp_min(1)


def _part(model: Any, target: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        known, rows = model._base_model_lm_head, slice(None)
        if hasattr(model.eagle_module, "d2t"):
            # Of the target's tokens those that the head drafts: the others cost as much, and nothing looks at them.
            d2t = model.eagle_module.d2t
            rows = torch.arange(len(d2t), device=d2t.device) + d2t
        logits = F.linear(target, known.weight[rows], None if known.bias is None else known.bias[rows])
    own = getattr(model.eagle_module, "lm_head", model._base_model_lm_head)(head)
    loss = -(logits.softmax(-1) * own.log_softmax(-1)).sum()
    return loss, (logits.argmax(-1) == own.argmax(-1)).sum().float().detach()


METHODS = {
    "_prepare_decoder_attention_mask": _first_mask,
    "_get_ttt_attention_mask": _later_mask,
    "_prepare_eagle_inputs": _inputs,
    "_map_logits_to_draft_vocab": _logits_of_nothing,
    "_eagle_forward": _draft,
    "_eagle_loss": _loss,
}
