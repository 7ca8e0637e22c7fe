"""A head as ModelOpt's own module: export and save any, build, load and run an Eagle3 head.

`mtsp.convert` adds a head to a target in ModelOpt's offline mode: the target's layers are dropped, and each
forward takes their outputs as input (https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/examples/speculative_decoding/README.md).
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
from ..drafters.chain import unroll
from ..drafters.eagle3 import EAGLE3
from ..drafters.rope_keys import read_rope
from ..drafters.spec import Mla
from ..engines.config import write_rope
from ..errors import NotACheckpoint, PromptsInvalid, RecipeInvalid, TrainingFailed
from ..targets.forward import States
from ..targets.model import CausalLM, load_target
from .decoder import served_decoders
from .drafter_recipe import DrafterRecipe
from .family import Family, Model, family_of
from .lean import SDPA, make_lean, run_lean
from .recipe import EagleRecipe, check_fit, parse_recipe

RECIPE = "recipe.json"


def build_module(target: CausalLM, recipe: EagleRecipe) -> Model:
    """Turn a target, in place, into ModelOpt's Eagle model with an untrained head, its `eagle_module`.

    The target's layers are dropped; embedding, final norm and `lm_head` stay, frozen.
    """
    check_fit(recipe.unfit(target.config.num_hidden_layers, target.config.vocab_size))
    settings = eagle_settings(recipe, target)
    decoders = contextlib.nullcontext() if recipe.decoder_layer == "stock" else served_decoders()
    # ModelOpt prints three lines per head to stdout about the target's parts, which are not results.
    with torch.random.fork_rng(devices=[]), decoders, contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(recipe.seed)
        try:
            model: Model = mtsp.convert(target, [(EAGLE3.trainer, settings)])
        except (AssertionError, ValueError) as fault:
            raise RecipeInvalid(
                f"ModelOpt refuses this recipe: {fault}", fix="Correct the dims that the message names."
            ) from fault
    if recipe.kernel == "sdpa":
        make_lean(model, recipe.lk_loss)
    return model


def eagle_settings(recipe: EagleRecipe, target: CausalLM) -> dict[str, Any]:
    """Return ModelOpt's EagleConfig for a recipe.

    Values that ModelOpt would take from its own templates or config class defaults (RoPE, special tokens, dtype) are
    explicit, so that the exported config states how the head was trained.
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
        # ModelOpt reads these like the target's config class, e.g. gpt-oss with a window in every other layer.
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
        # By default, the export of an unscaled head claims YaRN of factor 32, which it never used.
        "eagle_export_rope_scaling": {},
        "eagle_architecture_config": architecture,
    }


def reduce_vocab(model: Model, d2t: torch.Tensor) -> None:
    """Set a head's draft vocabulary, offsets [draft_vocab] int64, and start with the target's rows of these tokens.

    ModelOpt leaves its map zero and its `lm_head` random.
    """
    model.eagle_module.d2t.copy_(d2t)
    kept = d2t + torch.arange(len(d2t))
    model.eagle_module.lm_head.weight.data.copy_(model.lm_head.weight[kept])


def run_eagle(model: Any, batch: Mapping[str, Any], recipe: EagleRecipe) -> Any:
    """Run ModelOpt's Eagle model, or what shares it among processes, with matrix products in the recipe's precision."""
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


def export_module(model: Model, folder: Path, recipe: DrafterRecipe, dtype: torch.dtype | None = None) -> None:
    """Write a head as ModelOpt's exporter does, model.safetensors and config.json, and check the RoPE it states."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            export_speculative_decoding(model, dtype, folder)
    except (AssertionError, KeyError) as fault:
        raise TrainingFailed(f"ModelOpt cannot export this head: {fault}") from fault
    rope = read_rope(read_json(folder / "config.json"))
    if rope != recipe.rope:
        raise TrainingFailed(
            f"the head was trained with {recipe.rope}, but ModelOpt's export says {rope}",
            fix="Train with a RoPE that ModelOpt can export.",
        )


def save_module(model: Model, folder: Path, recipe: DrafterRecipe) -> None:
    """Write a head's weights under ModelOpt's own names, and the recipe that rebuilds the module."""
    part = family_of(recipe).part
    state = getattr(model, part).state_dict()
    write_safetensors(folder / f"{part}.safetensors", [entry(name, tensor) for name, tensor in state.items()])
    (folder / RECIPE).write_text(json.dumps(dataclasses.asdict(recipe), indent=2) + "\n", encoding="utf-8")


def load_module(folder: Path, target_folder: Path) -> Model:
    """Build ModelOpt's module again for the head's target, with the weights that `save_module` wrote.

    Raises:
        NotACheckpoint, RecipeInvalid: the folder does not hold a module.
        TargetInvalid: the target cannot be loaded.
    """
    recipe = parse_recipe(read_json(folder / RECIPE))
    if not isinstance(recipe, EagleRecipe):
        raise NotACheckpoint("this is no Eagle3 head's module", where=folder, fix="Pass the folder of an Eagle3 head.")
    state = {name: read_tensor(info) for name, info in read_header(folder / f"{FAMILY.part}.safetensors").items()}
    # As ModelOpt computes it: a module is used for the logits of every token.
    plain = dataclasses.replace(recipe, kernel="eager", pack=False)
    model = build_module(load_target(target_folder, TORCH[recipe.dtype]), plain)
    try:
        model.eagle_module.load_state_dict(state)
    except RuntimeError as fault:
        raise NotACheckpoint(
            f"the weights do not match the recipe in their folder: {fault}",
            where=folder,
            fix="Train the head again.",
        ) from fault
    return model.eval()


# Drafting with ModelOpt's own module and weights, before any conversion.
#
# It uses nothing of kconv's own forward, so it can check what kconv computes from an exported or converted head.
#
# How ModelOpt's training-time test lays out its draft steps
# (https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/plugins/hf_eagle.py#L765-L855),
# for a text x of T tokens, at step k = 1, 2, ... and index q:
#
# * token: x[q+1] at every step; the embeddings are rolled by one, once.
# * hidden state: at step 1 `fc` of the target's captured states at q; later the previous step's output at q-1, before
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
        module_folder: a folder that `save_module` wrote (`modelopt/` in the folder of a trained head).
        tokens: the text `[B, T]`; step k uses its tokens, whatever step k-1 drafted (teacher forcing).
        states: of that target, for the same tokens, with the recipe's captured layers.

    Returns:
        `[K, B, T', draft_vocab]` with T' = T-1-K; `result[k-1, b, t]` predicts `tokens[b, t+1+k]` given the
        true tokens up to x[t+k] and the target's states up to t.

    Raises:
        PromptsInvalid: the text is too short for one chain.
        NotACheckpoint, RecipeInvalid, TargetInvalid: a folder cannot be loaded.
    """
    return run_module(load_module(module_folder, target_folder), tokens, states, steps)


def run_module(model: Model, tokens: Tensor, states: States, steps: int) -> Tensor:
    """Run K draft steps like `draft_logits`, with a module from `load_module`."""
    chains = tokens.shape[1] - 1 - steps
    if chains < 1:
        raise PromptsInvalid(
            f"a text of {tokens.shape[1]} tokens is too short for {steps} draft steps",
            fix=f"Use a text of at least {steps + 2} tokens, or fewer draft steps.",
        )
    outputs = _listen(model, tokens, states, steps)
    # Chain t of step k is at index t+k-1.
    return torch.stack([logits[:, k : k + chains] for k, logits in enumerate(outputs)])


@torch.no_grad()
def _listen(model: Model, tokens: Tensor, states: States, steps: int) -> list[Tensor]:
    """Return the output of the head's lm_head at each draft step of one ModelOpt forward, each `[B, T, V]`."""
    outputs: list[Tensor] = []
    # The target's logits are given, so only the head's steps call this matrix.
    lm_head = getattr(model.eagle_module, "lm_head", model.lm_head)
    hook = lm_head.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    trained_steps = model.eagle_ttt_steps
    try:
        _forget_masks(model)
        model.eagle_ttt_steps = steps
        # ModelOpt runs more than one step only in training mode; it has no dropout.
        model.train()
        model(input_ids=tokens, base_model_outputs=offline_inputs(states))
    finally:
        hook.remove()
        model.eagle_ttt_steps = trained_steps
        model.eval()
        _forget_masks(model)
    if len(outputs) != steps:
        raise TrainingFailed(
            f"ModelOpt's module ran {len(outputs)} draft steps instead of {steps}",
            fix="Use the ModelOpt version in kconv's constraints.",
        )
    return outputs


def _forget_masks(model: Model) -> None:
    """Drop ModelOpt's cached attention masks, which it stores by draft step, whatever the length of the text.

    https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/plugins/hf_eagle.py#L431-L437
    """
    model._cached_attn_blk_masks.clear()


# The layer class by decoder, and by whose its layer is.
LAYERS = {
    ("llama", "served"): "GqaLayer",
    ("llama", "stock"): "LlamaDecoderLayer",
    ("kimik2", "served"): "MlaLayer",
}

FAMILY = Family(
    part="eagle_module",
    build=build_module,
    run=run_eagle,
    drafts=lambda head, tokens, captured, steps: (step.logits for step in unroll(head, tokens, captured, steps)),
    exported=lambda spec: "modelopt",
    layer=lambda recipe: LAYERS[recipe.decoder, recipe.decoder_layer],
    by_token=frozenset(("lm_head.weight",)),
)
