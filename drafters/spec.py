"""What an Eagle3 draft head *is*, independent of any file layout, and the parts that other drafters share with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Drafter


@dataclass(frozen=True)
class Gqa:
    """Multi-head or grouped-query attention; MHA is `kv_heads == heads`.

    RoPE rotates the first `rope.partial_rotary_factor * head_dim` dims of a head, half-split (neox).
    """

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False


@dataclass(frozen=True)
class Mla:
    """DeepSeek's multi-head latent attention.

    The rotary dims of `q_b_proj` (the last `qk_rope_head_dim` rows of each head) and of
    `kv_a_proj_with_mqa` (its last rows) are in DeepSeek's interleaved order: pairs are adjacent.
    """

    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class Yarn:
    """YaRN's context extension, with every value explicit, since engines disagree on the defaults.

    `mscale` and `mscale_all_dim` are DeepSeek's: cos and sin are scaled by
    `m(mscale) / m(mscale_all_dim)`, and MLA's softmax by `m(mscale_all_dim) ** 2`, with
    `m(s) = 0.1 * s * ln(factor) + 1`. `attention_factor`, where set, replaces the first of the two.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    @property
    def reach(self) -> int:
        """The number of tokens that the extension covers, `factor * original_max_positions`; at most 2**31.

        vLLM's table of angles has this many rows, whatever the config's max_position_embeddings:
        https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/yarn_scaling_rope.py#L78-L80
        """
        return math.ceil(min(self.factor * self.original_max_positions, 2**31))


@dataclass(frozen=True)
class Llama3:
    """Llama-3.1's wavelength-dependent scaling."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Linear:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding as the head was trained with it."""

    theta: float
    scaling: Yarn | Llama3 | Linear | None = None
    partial_rotary_factor: float = 1.0

    def within(self, context: int) -> int:
        """Return how many positions of a context it covers: all of them, but for YaRN."""
        return min(context, self.scaling.reach) if isinstance(self.scaling, Yarn) else context

    def __str__(self) -> str:
        stated = {} if self.scaling is None else {k: v for k, v in vars(self.scaling).items() if v is not None}
        kind = "no scaling" if self.scaling is None else f"{SCALINGS[type(self.scaling)]} scaling"
        whole = {} if self.partial_rotary_factor == 1 else {"partial_rotary_factor": self.partial_rotary_factor}
        values = [f"{name} {value!r}" for name, value in (stated | whole).items()]
        return ", ".join([f"theta {self.theta!r}", kind, *values])


SCALINGS = {Yarn: "YaRN", Llama3: "Llama-3", Linear: "linear"}


@dataclass(frozen=True)
class Norms:
    """Which norms a head has, beyond those that each head has.

    Attributes:
        before_residual: the residual of layer 0 is `hidden_norm(h)` instead of `h`.
        before_fc: one RMSNorm over the concatenated captured states, before `fc` (`input_norm`).
        fc: one RMSNorm per captured state, before `fc` (EAGLE-3.1's `fc_norm`).
        output: the next draft step is fed the state after the final norm (EAGLE-3.1's `norm_output`).
        qk: one RMSNorm over the dims of each query head and one of each key head, before RoPE (Qwen3's `q_norm` and
            `k_norm`); GQA only.
    """

    before_residual: bool = False
    before_fc: bool = False
    fc: bool = False
    output: bool = False
    qk: bool = False


@dataclass(frozen=True)
class Tokens:
    """Special token ids from the config; None for those that it lacks."""

    bos: int | None = None
    eos: int | tuple[int, ...] | None = None
    pad: int | None = None


@dataclass(frozen=True)
class HeadSpec:
    """An Eagle3 draft head.

    Attributes:
        attention: `Gqa` or `Mla` with its dims.
        hidden: width of the head's residual stream.
        target_hidden: width of the target's hidden states that `fc` reads.
        intermediate: width of the dense SwiGLU MLP.
        layers: number of decoder layers; layer 0 attends over `[embedding, hidden]`, 2 x `hidden` wide.
        vocab: rows of the target's vocabulary.
        draft_vocab: rows of the head's `lm_head`; if below `vocab`, `d2t` maps them to the target's.
        rope: rotary embedding as trained.
        norms: the optional norms and the residual's order.
        captured: target layers whose states are fed to `fc`, in ascending order, as *outputs of the
            0-based decoder layer i* (the residual stream after it). Engines that count layer inputs
            get `i + 1` instead.
        eps: epsilon of each RMSNorm.
        dtype: safetensors name of the weights' dtype, e.g. "BF16".
        max_positions: tokens that the head may read; an engine's RoPE table has this many rows, except for YaRN in vLLM
            (`Yarn.reach`).
        tokens: special token ids.
        mask: the token of a P-EAGLE head's entries after a chain's first, which takes `fc(mask_hidden)` for its hidden
            state; None for a head of which each step reads what the step before returned.
        mlp_bias, fc_bias: whether these linear layers have a bias.
    """

    attention: Gqa | Mla
    hidden: int
    target_hidden: int
    intermediate: int
    layers: int
    vocab: int
    draft_vocab: int
    rope: Rope
    captured: tuple[int, ...]
    eps: float
    dtype: str
    max_positions: int
    norms: Norms = field(default_factory=Norms)
    tokens: Tokens = field(default_factory=Tokens)
    mask: int | None = None
    mlp_bias: bool = False
    fc_bias: bool = False

    @property
    def kind(self) -> str:
        """`"mla"`, `"mha"` or `"gqa"`."""
        if isinstance(self.attention, Mla):
            return "mla"
        return "mha" if self.attention.kv_heads == self.attention.heads else "gqa"

    @property
    def drafter(self) -> Drafter:
        """Its family."""
        from .eagle3 import EAGLE3

        return EAGLE3
