"""What training an Eagle3 head takes beyond weights and optimizer, with kernel "sdpa": what is kept, and its most."""

from __future__ import annotations

from ..drafters.attention import SCORE_BYTES
from ..drafters.spec import Mla
from ..targets.config import TargetConfig
from .drafter_recipe import WIDTHS, Sizes
from .evaluate import count_rows
from .lean import block_tokens
from .recipe import EagleRecipe


def eagle_sizes(recipe: EagleRecipe, config: TargetConfig, rows: int) -> Sizes:
    """Return what a batch of so many rows takes."""
    tokens = rows * recipe.seq
    kept = tokens * recipe.ttt_steps * token_bytes(recipe, config.hidden)
    return Sizes(kept, _at_once(recipe, config, tokens), _evaluation(recipe, config))


def _evaluation(recipe: EagleRecipe, config: TargetConfig) -> int:
    """Return what an evaluation holds at a time: the target's probabilities, and a step's scores or logits."""
    rows = min(recipe.batch, count_rows(recipe.seq, config.vocab))
    logits, scores = 4 * rows * recipe.seq * config.vocab, 4 * rows * recipe.seq**2
    scores = min(max(SCORE_BYTES, scores), recipe.attention.heads * scores)
    # As they are, without what is hidden, as probabilities, and as these are returned; or as they are, as
    # probabilities, and the smaller of these and the target's.
    return logits + max(4 * scores, 3 * logits)


def token_bytes(recipe: EagleRecipe, hidden: int) -> int:
    """Return what is kept per token and draft step for the gradient, with kernel "sdpa".

    That is the inputs of linear layers and norms, keys and values, and the gradient that comes with the loss.
    """
    full, half = WIDTHS[recipe.dtype], WIDTHS[recipe.compute or recipe.dtype]
    attention = recipe.attention
    # The stream into the layer, the two norms of its inputs, and the joined input of the attention's matrices; the
    # stream after the attention, its norm and the MLP's input; the same for the last norm; what counts.
    stream = hidden * (11 * full + 2 * half)
    # RoPE is computed in the stream's dtype, and leaves queries and keys in it.
    if isinstance(attention, Mla):
        keys = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        latents = 3 * attention.q_lora_rank + 3 * attention.kv_lora_rank + attention.qk_rope_head_dim
        heads = attention.heads * (2 * keys * full + 2 * attention.v_head_dim * half)
    else:
        latents = 0
        heads = attention.head_dim * (attention.heads + attention.kv_heads) * (full + half)
    return stream + latents * half + heads


def attention_bytes(recipe: EagleRecipe) -> int:
    """Return what the attention's gradient holds of a token at most, while what is kept for the others is still there.

    That is in the last draft step, which goes back first: gradients of all steps' keys and values and one that is added
    to them, and one lot's keys and values side by side, as wide as the keys, with their gradients, in what is computed
    in. A lot of a row of several documents has fewer.
    """
    full, half = WIDTHS[recipe.dtype], WIDTHS[recipe.compute or recipe.dtype]
    attention = recipe.attention
    if isinstance(attention, Mla):
        width = attention.heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
        keys, values = width, attention.heads * attention.v_head_dim
    else:
        width = attention.heads * attention.head_dim
        keys = values = attention.kv_heads * attention.head_dim
    return recipe.ttt_steps * (keys * full + values * half) + keys * full + 4 * width * half


def _at_once(recipe: EagleRecipe, config: TargetConfig, tokens: int) -> int:
    """Return the most that is computed again at a time with its gradients: attention, MLP, or some tokens' logits."""
    half = WIDTHS[recipe.compute or recipe.dtype]
    logits = 4 * min(block_tokens(config.vocab), tokens) * config.vocab
    parts = (attention_bytes(recipe) * tokens, 8 * tokens * recipe.intermediate * half)
    return max(*parts, 6 * logits)
