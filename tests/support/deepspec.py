"""What DeepSpec's own class computes, recorded in tests/drafters/deepspec.safetensors, since pip does not install it.

    python tests/support/deepspec.py CHECKOUT

records it again from a checkout of https://github.com/deepseek-ai/DeepSpec (MIT) at `COMMIT`, in kconv's environment.
Of drafters with each of its Markov heads and with none it has the config and the tensors' shapes as the class has them,
and the tokens and logits of some blocks. Weights and states are computed by `wave`, so the file holds none.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

COMMIT = "afdfa7c9382a3341a3e6f17756dd816da79f132c"
RECORD = Path(__file__).parents[1] / "drafters" / "deepspec.safetensors"
WITH_CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
KINDS: dict[str, dict[str, Any]] = {
    "none": {"markov_rank": 0},
    "vanilla": {"markov_rank": 8, "markov_head_type": "vanilla"} | WITH_CONFIDENCE,
    "gated": {"markov_rank": 8, "markov_head_type": "gated"},
    "rnn": {"markov_rank": 8, "markov_head_type": "rnn"} | WITH_CONFIDENCE | {"confidence_head_with_markov": False},
}
VOCAB, HIDDEN, BLOCK, MASK, IDS = 64, 32, 4, 60, [0, 2, 5]
# The tokens before each block's anchor.
LENGTHS = (1, 9, 20)


def wave(shape: tuple[int, ...], start: float) -> Tensor:
    """Return numbers between -1 and 1 that look random, and are the same everywhere."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(start + 1.7 * count + 0.13 * count.sqrt()).reshape(shape).float()


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return a drafter's weights, by name."""
    made = {name: wave(shape, 10.0 * number) for number, (name, shape) in enumerate(sorted(shapes.items()))}
    return {name: 1 + 0.3 * w if "norm" in name else 0.3 * w for name, w in made.items()}


def states(length: int) -> Tensor:
    """Return the captured states of a text of so many tokens."""
    return wave((length, HIDDEN * len(IDS)), 5.0)


def record(checkout: Path) -> None:
    """Record what the class computes."""
    # Its packages import what only a GPU has; its modules do not.
    for name in ("deepspec", "deepspec.modeling", "deepspec.modeling.dspark", "deepspec.modeling.dspark.qwen3"):
        package = types.ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules[name] = package
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel  # pyright: ignore[reportMissingImports]
    from transformers import Qwen3Config

    found: dict[str, Tensor] = {}
    about = {"made_by": f"https://github.com/deepseek-ai/DeepSpec/tree/{COMMIT}", "class": "Qwen3DSparkModel"}
    about |= {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    for kind, more in KINDS.items():
        config = Qwen3Config(
            architectures=["Qwen3DSparkModel"], vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=40, rope_theta=10000.0,
            max_position_embeddings=256, tie_word_embeddings=False, dtype="float32", block_size=BLOCK,
            mask_token_id=MASK, target_layer_ids=IDS, num_target_layers=6, num_anchors=4,
            **{"enable_confidence_head": False} | more,
        )  # fmt: skip
        config._attn_implementation = "eager"
        model = Qwen3DSparkModel(config).eval()
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        model.load_state_dict(weights(shapes))
        about[kind] = json.dumps({"config": json.loads(config.to_json_string(use_diff=False)), "tensors": shapes})
        for length in LENGTHS:
            anchor = torch.tensor([length % VOCAB])
            block = torch.cat([anchor, torch.full((BLOCK - 1,), MASK)])[None]
            with torch.no_grad():
                hidden = model._forward_backbone(
                    position_ids=torch.arange(length + BLOCK)[None], noise_embedding=model.embed_tokens(block),
                    target_hidden_states=states(length)[None], is_causal=False,
                )  # fmt: skip
                tokens, logits = model.sample_draft_tokens(
                    model.compute_logits(hidden), first_prev_token_ids=anchor, hidden_states=hidden
                )
            found |= {f"{kind}.{length}.tokens": tokens[0], f"{kind}.{length}.logits": logits[0]}
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, RECORD, metadata=about)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
