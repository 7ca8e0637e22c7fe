"""A head as ModelOpt's own module: built, exported, kept, loaded again, run.

A target is given a head by `mtsp.convert` in ModelOpt's offline mode: the target's layers are dropped, and each
forward is fed what they would have put out (https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/examples/speculative_decoding/README.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import modelopt.torch.speculative as mtsp
import torch
from modelopt.torch.export import export_speculative_decoding
from torch import Tensor

from ..checkpoint.bytes import write_safetensors
from ..checkpoint.folder import read_json
from ..checkpoint.header import read_header
from ..checkpoint.tensors import TORCH, entry, read_tensor
from ..convert.rope import read_rope
from ..engines.config import write_rope
from ..errors import NotACheckpoint, PromptsInvalid, RecipeInvalid, TrainingFailed
from ..head.spec import Mla
from ..targets.forward import States
from ..targets.model import CausalLM, load_target
from .decoder import served_decoders
from .lean import SDPA, make_lean, run_lean
from .recipe import EagleRecipe, check_fit, parse_recipe

EagleModel = Any
"""A target that `build_module` turned into ModelOpt's Eagle model; ModelOpt makes its class at run time."""

WEIGHTS, RECIPE = "eagle_module.safetensors", "recipe.json"


def build_module(target: CausalLM, recipe: EagleRecipe) -> EagleModel:
    """Turn a target, in place, into ModelOpt's Eagle model with an untrained head.

    Args:
        target: as `load_target` gives it. Its layers are dropped; embedding, final norm and `lm_head` stay,
            frozen.
        recipe: the head's.

    Returns:
        The same object, now ModelOpt's; its head is `eagle_module`.

    Raises:
        RecipeInvalid: the recipe does not fit the target, or ModelOpt refuses it.
    """
    check_fit(recipe, target.config.num_hidden_layers, target.config.vocab_size)
    settings = eagle_settings(recipe, target)
    # ModelOpt tells on stdout where it finds the target's parts: three lines a head, and no result.
    with torch.random.fork_rng(devices=[]), served_decoders(), contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(recipe.seed)
        try:
            model: EagleModel = mtsp.convert(target, [("eagle", settings)])
        except (AssertionError, ValueError) as fault:
            raise RecipeInvalid(
                f"ModelOpt refuses this recipe: {fault}", fix="Correct the dims that it names."
            ) from fault
    if recipe.kernel == "sdpa":
        make_lean(model)
    return model


def eagle_settings(recipe: EagleRecipe, target: CausalLM) -> dict[str, Any]:
    """Return ModelOpt's EagleConfig for a recipe.

    What ModelOpt would fill in from its own templates or from config class defaults (RoPE, special tokens,
    dtype) is spelled out, so that the exported config says how the head was trained.
    """
    attention = dataclasses.asdict(recipe.attention)
    heads = attention.pop("heads")
    if isinstance(recipe.attention, Mla):
        kv_heads = heads
    else:
        kv_heads = attention.pop("kv_heads")
        attention["attention_bias"] = attention.pop("bias")
    architecture = attention | {
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": recipe.intermediate,
        "rms_norm_eps": recipe.eps,
        "rope_theta": recipe.rope.theta,
        "rope_scaling": write_rope(recipe.rope)["rope_parameters"],
        "torch_dtype": str(TORCH[recipe.dtype]).removeprefix("torch."),
        "use_aux_hidden_state": True,
        "use_last_layernorm": True,
        "eagle_aux_hidden_state_layer_ids": list(recipe.captured),
        "_attn_implementation": "eager" if recipe.kernel == "eager" else SDPA,
    }
    if getattr(target.config, "sliding_window", None):
        # ModelOpt reads these as the target's class of config does, gpt-oss' with a window in every other layer.
        architecture |= {"layer_types": ["full_attention"], "sliding_window": None}
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        architecture[token] = getattr(target.config, token)
    if recipe.draft_vocab is not None:
        architecture["draft_vocab_size"] = recipe.draft_vocab
    return {
        "eagle_decoder_type": recipe.decoder,
        "eagle_offline": True,
        "eagle_ttt_steps": recipe.ttt_steps,
        "eagle_loss_decay_factor": recipe.loss_decay,
        "eagle_use_torch_compile": False,
        # By default the export of an unscaled head claims YaRN of factor 32, which it never saw.
        "eagle_export_rope_scaling": {},
        "eagle_architecture_config": architecture,
    }


def reduce_vocab(model: EagleModel, d2t: torch.Tensor) -> None:
    """Give a head its draft vocabulary, and the target's rows of these tokens to start from.

    Args:
        model: of a recipe with a `draft_vocab`; ModelOpt leaves its map at zeros and its `lm_head` random.
        d2t: offsets, [draft_vocab] int64.
    """
    model.eagle_module.d2t.copy_(d2t)
    kept = d2t + torch.arange(len(d2t))
    model.eagle_module.lm_head.weight.data.copy_(model.lm_head.weight[kept])


def run_eagle(model: Any, batch: Mapping[str, Any], recipe: EagleRecipe) -> Any:
    """Run ModelOpt's forward, with its matrix products in the recipe's precision.

    Args:
        model: ModelOpt's Eagle model, or what shares it among processes.
        batch: as a `Feed` gives it, on the model's device.
        recipe: the head's.
    """
    device = batch["input_ids"].device.type
    with torch.autocast(device, torch.bfloat16, enabled=recipe.compute == "BF16"):
        if recipe.kernel == "sdpa":
            return run_lean(model, getattr(model, "module", model), dict(batch))
        return model(**batch)


def offline_inputs(states: States) -> dict[str, torch.Tensor]:
    """Return a target's states under the names that ModelOpt's offline forward reads."""
    return {
        "aux_hidden_states": states.captured,
        "base_model_hidden_states": states.hidden,
        "base_model_logits": states.logits,
    }


def export_module(model: EagleModel, folder: Path, recipe: EagleRecipe) -> None:
    """Write a head as ModelOpt's exporter does: model.safetensors and config.json.

    Raises:
        TrainingFailed: ModelOpt refuses to export, or the exported config states another RoPE than the trained.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            export_speculative_decoding(model, export_dir=folder)
    except (AssertionError, KeyError) as fault:
        raise TrainingFailed(f"ModelOpt cannot export this head: {fault}") from fault
    rope = read_rope(read_json(folder / "config.json"))
    if rope != recipe.rope:
        raise TrainingFailed(
            f"the head was trained with {recipe.rope}, but ModelOpt's export says {rope}",
            fix="Train with a RoPE that ModelOpt exports.",
        )


def save_module(model: EagleModel, folder: Path, recipe: EagleRecipe) -> None:
    """Write a head's weights under ModelOpt's own names, and the recipe that builds the module for them."""
    state = model.eagle_module.state_dict()
    write_safetensors(folder / WEIGHTS, [entry(name, tensor) for name, tensor in state.items()])
    (folder / RECIPE).write_text(json.dumps(dataclasses.asdict(recipe), indent=2) + "\n")


def load_module(folder: Path, target_folder: Path) -> EagleModel:
    """Build ModelOpt's module again, with the weights that `save_module` wrote.

    Args:
        folder: where they are.
        target_folder: the target that the head was trained for.

    Raises:
        NotACheckpoint, RecipeInvalid: the folder does not hold a module.
        TargetInvalid: the target cannot be loaded.
    """
    recipe = parse_recipe(read_json(folder / RECIPE))
    state = {name: read_tensor(info) for name, info in read_header(folder / WEIGHTS).items()}
    # As ModelOpt computes it: what is asked of a module is the logits of every token.
    plain = dataclasses.replace(recipe, kernel="eager", pack=False)
    model = build_module(load_target(target_folder, TORCH[recipe.dtype]), plain)
    try:
        model.eagle_module.load_state_dict(state)
    except RuntimeError as fault:
        raise NotACheckpoint(
            f"the weights do not match the recipe beside them: {fault}",
            where=folder,
            fix="Train the head again.",
        ) from fault
    return model.eval()


# The program before any conversion: ModelOpt's own module drafts, on its own weights.
#
# Nothing of kconv's own forward takes part, so what kconv computes from an exported or converted head can be
# held against it.
#
# How ModelOpt's training-time test lays out its draft steps
# (https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/plugins/hf_eagle.py#L765-L855),
# for a text x of T tokens, at step k = 1, 2, ... and index q:
#
# * token: x[q+1] at every step; the embeddings are rolled by one, once.
# * hidden state: at step 1 `fc` of the target's captured states at q; later the step before's output at q-1, before
#   the final norm (the outputs are rolled by one after each step).
# * rotary position: q, at every step.
# * keys seen: step 1's at indices <= q-(k-1); of each step i = 2..k the one at index q-(k-i)
#   (https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/utils.py#L556-L567).
# * prediction: x[q+2].
#
# So index q at step k belongs to the chain that began at t = q-(k-1): with t, the step takes token x[t+k] at rotary
# position t+k-1, sees step 1's keys at positions <= t and its own chain's, and predicts x[t+1+k]. Indices that a
# roll wrapped around belong to no chain: neither q < k-1 nor the last, whose token is x[0].


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
            f"ModelOpt's module made {len(outputs)} draft steps instead of {steps}",
            fix="Use the ModelOpt version that kconv's constraints name.",
        )
    return outputs


def _forget_masks(model: EagleModel) -> None:
    """Drop ModelOpt's cached attention masks, which it keys by draft step, whatever the length of the text.

    https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/plugins/hf_eagle.py#L431-L437
    """
    model._cached_attn_blk_masks.clear()
