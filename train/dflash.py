"""A DFlash or DSpark drafter as ModelOpt's own module: build and run.

ModelOpt's mode is called offline if each forward takes the target's states as input, as here:
https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/plugins/hf_dflash.py
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import modelopt.torch.speculative as mtsp
import torch
from torch import Tensor

from ..drafters.dflash import DFLASH, DFlashSpec
from ..errors import RecipeInvalid
from ..targets.model import CausalLM
from .dflash_recipe import BlockRecipe, DFlashRecipe, DSparkRecipe
from .family import Family, Model
from .recipe import check_fit


def build_block(target: CausalLM, recipe: BlockRecipe) -> Model:
    """Turn a target, in place, into ModelOpt's DFlash model with an untrained drafter, its `dflash_module`."""
    config = target.config
    check_fit(recipe.unfit(config.num_hidden_layers, config.vocab_size))
    # ModelOpt reads the depth from here, as it expects a target without its layers.
    config.num_orig_hidden_layers = config.num_hidden_layers
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(recipe.seed)
        try:
            model: Model = mtsp.convert(target, [(DFLASH.trainer, block_settings(recipe))])
        except (AssertionError, ValueError) as fault:
            raise RecipeInvalid(
                f"ModelOpt refuses this recipe: {fault}", fix="Correct the dims that the message names."
            ) from fault
    # It replaces the base by an attribute of the target's config, which transformers 5 keeps elsewhere.
    trained = model.dflash_config.rope_parameters["rope_theta"]
    if trained != recipe.rope.theta:
        raise RecipeInvalid(
            f"ModelOpt would train with RoPE base {trained:g}, not the recipe's {recipe.rope.theta:g}",
            fix="Leave out rope, and check that the target's config states its base once.",
        )
    return model


def block_settings(recipe: BlockRecipe) -> dict[str, Any]:
    """Return ModelOpt's DFlashConfig for a recipe.

    All dims are explicit: ModelOpt would take those that are not from Qwen3Config's defaults.
    """
    architecture: dict[str, Any] = {
        "num_hidden_layers": len(recipe.captured),
        "target_layer_ids": list(recipe.captured),
        "num_attention_heads": recipe.attention.heads,
        "num_key_value_heads": recipe.attention.kv_heads,
        "head_dim": recipe.attention.head_dim,
        "attention_bias": recipe.attention.bias,
        "intermediate_size": recipe.intermediate,
        "rms_norm_eps": recipe.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope.theta},
    }
    settings: dict[str, Any] = {
        "dflash_offline": True,
        "dflash_use_torch_compile": False,
        "dflash_block_size": recipe.block,
        "dflash_num_anchors": recipe.anchors,
        "dflash_mask_token_id": recipe.mask,
        "dflash_draft_attention": "causal" if recipe.causal else "bidirectional",
        "dflash_loss_objective": "decay",
        "dflash_loss_decay_factor": recipe.decay,
        "dflash_architecture_config": architecture,
    }
    if isinstance(recipe, DFlashRecipe):
        settings |= {
            "dflash_self_logit_distillation": recipe.distill,
            "dflash_loss_objective": recipe.objective,
            "dflash_dpace_alpha": recipe.dpace_alpha,
        }
    if isinstance(recipe, DSparkRecipe):
        settings |= {
            "dflash_ce_loss_alpha": recipe.ce_loss,
            "dflash_l1_loss_alpha": recipe.l1_loss,
            "dflash_confidence_head_alpha": recipe.confidence_loss,
        }
        architecture |= {
            "projector_type": "dspark",
            "markov_rank": recipe.markov_rank,
            "markov_head_type": recipe.markov_kind,
            "use_confidence_head": recipe.confidence_loss > 0,
        }
    return settings


def run_block(model: Any, batch: Mapping[str, Any], recipe: BlockRecipe) -> Any:
    """Run ModelOpt's DFlash model, or what shares it among processes, with matrix products in the recipe's precision.

    The random state decides the places of the blocks.
    """
    given = dict(batch)
    documents: Tensor | None = given.pop("documents", None)
    device = given["input_ids"].device.type
    kept_apart = contextlib.nullcontext() if documents is None else _apart(getattr(model, "module", model), documents)
    with torch.autocast(device, torch.bfloat16, enabled=recipe.compute == "BF16"), kept_apart:
        return model(**given)


@contextmanager
def _apart(model: Model, documents: Tensor) -> Iterator[None]:
    """Keep documents of a row apart: no block reads another one's states, nor runs into it.

    Args:
        documents: the number of each token's document, [B, T].
    """
    sample, mask = model._sample_anchor_positions, model._build_draft_attention_mask
    # How far the last token is from the anchor that a block predicts.
    reach = model.dflash_block_size - (not getattr(model.dflash_module, "shift_label", False))

    def sample_inside(length: int, loss_mask: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        inside = torch.zeros_like(loss_mask)
        inside[:, : length - reach] = documents[:, reach:] == documents[:, : length - reach]
        return sample(length, loss_mask * inside, device)

    def mask_others(length: int, anchors: Tensor, *rest: Any, **more: Any) -> Tensor:
        found: Tensor = mask(length, anchors, *rest, **more)
        own = documents.gather(1, anchors).repeat_interleave(model.dflash_block_size, dim=1)
        others = documents[:, None, None, :] != own[:, None, :, None]
        found[..., :length].masked_fill_(others, torch.finfo(found.dtype).min)
        return found

    model._sample_anchor_positions, model._build_draft_attention_mask = sample_inside, mask_others
    try:
        yield
    finally:
        del model._sample_anchor_positions, model._build_draft_attention_mask


def _exported(spec: DFlashSpec) -> str:
    return "dspark-modelopt" if spec.markov.rank else "dflash"


FAMILY = Family(
    part="dflash_module",
    build=build_block,
    run=run_block,
    drafts=lambda head, tokens, captured, steps: head.each_place(tokens, captured, steps),
    exported=_exported,
    layer=lambda recipe: "DFlashDecoderLayer",
    by_token=frozenset(("markov_w1.weight", "markov_w2.weight")),
)
