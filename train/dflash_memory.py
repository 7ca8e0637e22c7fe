"""What training a block drafter takes beyond weights and optimizer: what ModelOpt's forward pass keeps, and its most.

ModelOpt computes the layers as they are, so what autograd keeps can be counted:
https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/plugins/modeling_dflash.py
"""

from __future__ import annotations

from ..drafters.dflash_forward import AT_ONCE
from ..targets.config import TargetConfig
from .dflash_recipe import BlockRecipe, DFlashRecipe, DSparkRecipe
from .drafter_recipe import WIDTHS, Sizes
from .evaluate import count_rows

# Norms, RoPE's angles, and probabilities are in fp32 whatever is trained in.
FP32 = 4
# Rows of logits whose distance from the target's probabilities is computed, and computed again, at a time:
# https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/plugins/hf_dspark.py
AT_A_TIME = 1024


def block_sizes(recipe: BlockRecipe, config: TargetConfig, rows: int) -> Sizes:
    """Return what a batch of so many rows takes."""
    full, half = WIDTHS[recipe.dtype], WIDTHS[recipe.compute or recipe.dtype]
    hidden, vocab, layers = config.hidden, config.vocab, len(recipe.captured)
    cast = recipe.compute is not None
    slots = min(recipe.anchors, recipe.seq - recipe.block) * recipe.block
    # The layers see the row's states and all its blocks as keys; the mask has a row for each slot.
    keys = recipe.seq + slots
    mask = slots * keys
    attention = recipe.attention
    queries, pairs = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    # Of a norm: its input in fp32 and that by its own size. Autocast casts an input anew for each matrix.
    context = hidden * (FP32 + half) + hidden * half * (3 * layers if cast else 1)
    key = layers * (pairs * (FP32 + half) + 2 * queries * half) + 2 * attention.head_dim * full
    stream = hidden * (2 * layers * FP32 + (2 * layers + 1) * full + layers * half * (5 if cast else 2))
    slot = layers * (queries * (FP32 + 3 * half) + attention.heads * FP32 + 4 * recipe.intermediate * half)
    kept = recipe.seq * context + keys * key + slots * (stream + slot) + mask * (layers * half if cast else full)
    lost, at_loss = _of_loss(recipe, config, rows, slots, half)
    # Gradients of keys and values, or these before they are cast and as a CPU's kernels sort them.
    at_layer = rows * keys * (queries * (2 * half + (full if cast else 0)) + pairs * full)
    # The mask before it is cast, until the loss is there.
    uncast = rows * mask * full if cast else 0
    measured = min(rows, count_rows(recipe.seq, vocab))
    logits = FP32 * measured * recipe.seq * vocab
    # Of the blocks that are computed at once.
    scores = FP32 * measured * attention.heads * AT_ONCE * recipe.block * recipe.seq
    # Beside the target's probabilities: scores as they are, without what is hidden, with the block's own, and as
    # probabilities; or a place's logits, these as probabilities, and the smaller of these and the target's.
    evaluation = logits + max(4 * scores, 3 * logits)
    return Sizes(rows * (kept + slots * lost), max(at_layer, at_loss) + uncast, evaluation)


def _of_loss(recipe: BlockRecipe, config: TargetConfig, rows: int, slots: int, half: int) -> tuple[int, int]:
    """Return what the loss keeps of a slot, and the most beyond that of all."""
    vocab = config.vocab
    target, every = rows * recipe.seq * vocab * half, rows * slots * vocab
    if isinstance(recipe, DSparkRecipe):
        # Log-probabilities for the cross-entropy, and both logits from which the distance is computed again.
        rank = recipe.markov_rank
        kept = vocab * (FP32 + 2 * half) + (config.hidden + rank) * half * (1 if recipe.confidence_loss > 0 else 0)
        return kept, target + every * 2 * half + 3 * FP32 * min(rows * slots, AT_A_TIME) * vocab
    if isinstance(recipe, DFlashRecipe) and recipe.distill:
        # The target's probabilities and the drafter's; the logits of both, and the product.
        return 2 * FP32 * vocab, target + every * (2 * half + FP32)
    return FP32 * vocab, every * (half + FP32)
