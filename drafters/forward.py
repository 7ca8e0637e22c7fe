"""The reference forward of an Eagle3 head in plain torch, equal to what engines run.

One draft step takes a token and a hidden state (the target's fused states, or the output of the previous step), and
returns the hidden state for the next step and the logits of the next token:

    x        = [ input_layernorm(embed(token)) ; hidden_norm(hidden) ]
    a        = attention(x) + residual      residual: hidden, or hidden_norm(hidden) with norms.before_residual
    out      = mlp(post_attention_layernorm(a)) + a
    logits   = lm_head(norm(out))
    returned = out, or norm(out) with norms.output

Later layers are ordinary: `input_layernorm(out)` in, `out` as the residual
(https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama_eagle3.py#L131-L151).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import TensorMissing, TensorShape, TensorUnknown
from .attention import Context, project_gqa, project_mla, rms_norm
from .base import Spec
from .chain import draft_logits
from .contract import check_d2t
from .rope import cos_sin
from .slots import needs
from .spec import Gqa, HeadSpec
from .yarn import softmax_scale


class DraftHead:
    """A head that can run.

    Args:
        spec: what the head is.
        weights: each tensor of the head by slot name. `embed_tokens` and `lm_head` are required: if the head shares
            them, the
        caller adds the target's. They are cast to the dtype of `fc`, as engines cast a checkpoint to theirs; norms and
        softmax always compute in fp32.

    Attributes:
        target_ids: `[draft_vocab]`, the target id of each row of `lm_head`.

    Raises:
        TensorMissing, TensorUnknown, TensorShape, TensorValue: the weights do not match this spec.
    """

    def __init__(self, spec: HeadSpec, weights: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.weights, self.target_ids = ready(spec, weights)

    def altered(self, spec: HeadSpec | None = None, weights: Mapping[str, Tensor] | None = None) -> DraftHead:
        """Return the same head with another spec, or with some weights replaced."""
        return DraftHead(spec or self.spec, {**self.weights, **(weights or {})})

    def fuse(self, captured: Tensor) -> Tensor:
        """Turn the target's captured states into the hidden state of the first draft step.

        Args:
            captured: `[B, T, A * target_hidden]`, the outputs of the captured layers side by side, in
                ascending order of layer.

        Returns:
            `[B, T, hidden]`.
        """
        spec, weights = self.spec, self.weights
        captured = captured.to(weights["fc"].dtype)
        if spec.norms.before_fc:
            captured = rms_norm(captured, weights["input_norm"], spec.eps)
        if spec.norms.fc:
            states = torch.split(captured, spec.target_hidden, dim=-1)
            normed = [rms_norm(s, weights[f"fc_norm.{a}"], spec.eps) for a, s in enumerate(states)]
            captured = torch.cat(normed, dim=-1)
        return F.linear(captured, weights["fc"], weights.get("fc.bias"))

    def attention_input(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the input of layer 0's attention: the normed embedding and the normed hidden state.

        Args:
            tokens: `[B, T]` target ids.
            hidden: `[B, T, hidden]`.

        Returns:
            `[B, T, 2 * hidden]`, the embedding first.
        """
        embedding = F.embedding(tokens, self.weights["embed_tokens"])
        normed = self._norm(embedding, "0.input_layernorm"), self._norm(hidden, "0.hidden_norm")
        return torch.cat(normed, dim=-1)

    def attend(self, layer: int, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        """Return the output of one layer's attention, without the residual.

        Args:
            layer: draft layer, from 0.
            x: `[B, T, attn_in]`, normed.
            positions: `[T]` or `[B, T]` rotary positions.
            context: what each entry sees; it stores the new keys and values.

        Returns:
            `[B, T, hidden]`.
        """
        spec, weights = self.spec, self.weights
        cos, sin = cos_sin(spec.rope, spec.attention, positions.expand(x.shape[:2]))
        cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
        if isinstance(spec.attention, Gqa):
            query, key, value = project_gqa(spec.attention, weights, layer, x, cos, sin, spec.eps)
        else:
            query, key, value = project_mla(spec.attention, weights, layer, x, cos, sin, spec.eps)
        output = context.attend(layer, query, key, value, softmax_scale(spec.rope, spec.attention))
        output = output.transpose(1, 2).flatten(2)
        return F.linear(output, weights[f"{layer}.o_proj"], weights.get(f"{layer}.o_proj.bias"))

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Run one draft step on T entries.

        Args:
            tokens: `[B, T]` target ids.
            hidden: `[B, T, hidden]`: `fuse`'s output, or the hidden states that the previous step returned.
            positions: `[T]` or `[B, T]` rotary positions.
            context: what each entry sees; it stores the new keys and values.

        Returns:
            The hidden states for the next step `[B, T, hidden]`, and the logits over the draft vocabulary
            `[B, T, draft_vocab]` (`target_ids` maps them to target ids).
        """
        x = self.attention_input(tokens, hidden)
        residual = self._norm(hidden, "0.hidden_norm") if self.spec.norms.before_residual else hidden
        for layer in range(self.spec.layers):
            if layer > 0:
                x = self._norm(residual, f"{layer}.input_layernorm")
            residual = residual + self.attend(layer, x, positions, context)
            residual = residual + self.mlp(layer, self._norm(residual, f"{layer}.post_attention_layernorm"))
        normed = self._norm(residual, "norm")
        return (normed if self.spec.norms.output else residual), F.linear(normed, self.weights["lm_head"])

    def draft(self, tokens: Tensor, captured: Tensor, steps: int) -> Tensor:
        """See `base.RunningDrafter.draft`."""
        return draft_logits(self, tokens, captured, steps)

    def _norm(self, x: Tensor, slot: str) -> Tensor:
        return rms_norm(x, self.weights[slot], self.spec.eps)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """Return the output of one layer's SwiGLU MLP `[B, T, hidden]`, without the residual, of a normed x."""

        def linear(name: str, x: Tensor) -> Tensor:
            slot = f"{layer}.{name}"
            return F.linear(x, self.weights[slot], self.weights.get(f"{slot}.bias"))

        return linear("down_proj", F.silu(linear("gate_proj", x)) * linear("up_proj", x))


def ready(spec: Spec, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Return a drafter's weights in the dtype of `fc`, once they match its spec, and the target id of each draft id."""
    check_tensors(spec, weights)
    if "d2t" in weights:
        for breach in check_d2t(spec, weights["d2t"].cpu().numpy()):
            raise breach.error()
    dtype = weights["fc"].dtype
    cast = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
    rows = torch.arange(spec.draft_vocab, device=weights["lm_head"].device)
    return cast, rows + weights["d2t"].long() if "d2t" in weights else rows


def check_tensors(spec: Spec, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that do not match the spec: an extra norm would be ignored silently."""
    known = needs(spec)
    # t2d adds nothing to d2t.
    missing = [name for name in known if name != "t2d" and name not in weights]
    if missing:
        raise TensorMissing(
            f"the head lacks {', '.join(missing)}",
            where=missing[0],
            fix="Pass each tensor of the spec, and the target's embed_tokens and lm_head if they are shared.",
        )
    unknown = [name for name in weights if name not in known]
    if unknown:
        raise TensorUnknown(
            f"the spec has no place for {', '.join(unknown)}",
            where=unknown[0],
            fix="Correct the spec's flags, or remove the tensors.",
        )
    for name, tensor in weights.items():
        if tuple(tensor.shape) != known[name].shape:
            raise TensorShape(
                f"{name} is {list(tensor.shape)}, but the spec needs {list(known[name].shape)}",
                where=name,
                fix="Correct the dims of the spec, or pass this head's own tensor.",
            )
