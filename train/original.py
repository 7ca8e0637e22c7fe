"""The program before any conversion: ModelOpt's own module drafts, on its own weights.

Nothing of kconv's own forward takes part, so what kconv computes from an exported or converted head can be
held against it.

How ModelOpt's training-time test lays out its draft steps
(https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/plugins/hf_eagle.py#L765-L855),
for a text x of T tokens, at step k = 1, 2, ... and index q:

* token: x[q+1] at every step; the embeddings are rolled by one, once.
* hidden state: at step 1 `fc` of the target's captured states at q; later the step before's output at q-1, before
  the final norm (the outputs are rolled by one after each step).
* rotary position: q, at every step.
* keys seen: step 1's at indices <= q-(k-1); of each step i = 2..k the one at index q-(k-i)
  (https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/utils.py#L556-L567).
* prediction: x[q+2].

So index q at step k belongs to the chain that began at t = q-(k-1): with t, the step takes token x[t+k] at rotary
position t+k-1, sees step 1's keys at positions <= t and its own chain's, and predicts x[t+1+k]. Indices that a
roll wrapped around belong to no chain: neither q < k-1 nor the last, whose token is x[0].
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..errors import PromptsInvalid, TrainingFailed
from ..targets.states import States
from .module import EagleModel, load_module, offline_inputs


def draft_logits(module_folder: Path, target_folder: Path, tokens: Tensor, states: States, steps: int) -> Tensor:
    """Load ModelOpt's module and run K draft steps of all chains of a text.

    Args:
        module_folder: what `save_module` wrote (`modelopt/` in the folder of a trained head).
        target_folder: the target that the head was trained for.
        tokens: the text `[B, T]`; step k takes its tokens, whatever step k-1 drafted (teacher forcing).
        states: of that target, over the same tokens, with the recipe's captured layers.
        steps: K.

    Returns:
        `[K, B, T', draft_vocab]` with T' = T-1-K; `result[k-1, b, t]` predicts `tokens[b, t+1+k]` given the
        true tokens up to x[t+k] and the target's states up to t.

    Raises:
        PromptsInvalid: the text is too short for one chain.
        NotACheckpoint, RecipeInvalid, TargetInvalid: a folder cannot be loaded.
    """
    return run_module(load_module(module_folder, target_folder), tokens, states, steps)


def run_module(model: EagleModel, tokens: Tensor, states: States, steps: int) -> Tensor:
    """Run K draft steps as `draft_logits` does, with a module that is already loaded.

    Args:
        model: as `load_module` gives it.
    """
    chains = tokens.shape[1] - 1 - steps
    if chains < 1:
        raise PromptsInvalid(
            f"a text of {tokens.shape[1]} tokens is too short for {steps} draft steps",
            fix=f"Give at least {steps + 2} tokens, or fewer steps.",
        )
    outputs = _listen(model, tokens, states, steps)
    # Chain t of step k stands at index t+k-1.
    return torch.stack([logits[:, k : k + chains] for k, logits in enumerate(outputs)])


@torch.no_grad()
def _listen(model: EagleModel, tokens: Tensor, states: States, steps: int) -> list[Tensor]:
    """Return what the head's lm_head puts out at each draft step of one ModelOpt forward, each `[B, T, V]`."""
    outputs: list[Tensor] = []
    # The target's logits are given, so nothing but the head's steps calls this matrix.
    lm_head = getattr(model.eagle_module, "lm_head", model.lm_head)
    hook = lm_head.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    trained_steps = model.eagle_ttt_steps
    try:
        _forget_masks(model)
        model.eagle_ttt_steps = steps
        # Only in training mode does ModelOpt take more than one step; there is no dropout in it.
        model.train()
        model(input_ids=tokens, base_model_outputs=offline_inputs(states))
    finally:
        hook.remove()
        model.eagle_ttt_steps = trained_steps
        model.eval()
        _forget_masks(model)
    if len(outputs) != steps:
        raise TrainingFailed(
            f"ModelOpt's module took {len(outputs)} draft steps where {steps} were asked for",
            fix="Use the ModelOpt version that kconv's constraints name.",
        )
    return outputs


def _forget_masks(model: EagleModel) -> None:
    """Drop ModelOpt's cached attention masks, which it keys by draft step, whatever the length of the text.

    https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/plugins/hf_eagle.py#L431-L437
    """
    model._cached_attn_blk_masks.clear()
