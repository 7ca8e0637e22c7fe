"""Published forms of DFlash and DSpark drafters: config keys and tensor names as their makers write them, dims small.

Facts only: keys, names and values; each row names where they are published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kconv.drafters.dflash import Confidence, DFlashSpec, Markov
from kconv.drafters.spec import Gqa, Rope

DFLASH = DFlashSpec(
    Gqa(4, 2, 16), 48, 48, 40, layers=2, vocab=64, draft_vocab=64, rope=Rope(10000.0), captured=(1, 3, 5), eps=1e-5,
    dtype="BF16", max_positions=1024, block=4, mask=60,
)  # fmt: skip
DSPARK = replace(DFLASH, shift=True, markov=Markov(8), confidence=Confidence(True, True))
Shapes = dict[str, tuple[int, ...]]
HUB, GIT = "https://huggingface.co/", "https://github.com/"
# Hidden 48, four heads of 16 that share two, vocabulary 64, rank 8.
LAYER: Shapes = {
    "input_layernorm.weight": (48,), "post_attention_layernorm.weight": (48,),
    "self_attn.q_proj.weight": (64, 48), "self_attn.k_proj.weight": (32, 48), "self_attn.v_proj.weight": (32, 48),
    "self_attn.o_proj.weight": (48, 64), "self_attn.q_norm.weight": (16,), "self_attn.k_norm.weight": (16,),
    "mlp.gate_proj.weight": (40, 48), "mlp.up_proj.weight": (40, 48), "mlp.down_proj.weight": (48, 40),
}  # fmt: skip
OWN: Shapes = {"embed_tokens.weight": (64, 48), "lm_head.weight": (64, 48)}
FLAT: Shapes = {"markov_w1.weight": (64, 8), "markov_w2.weight": (64, 8)}
NESTED: Shapes = {f"markov_head.{name}": shape for name, shape in FLAT.items()}
CONFIDENCE: Shapes = {"confidence_head.proj.weight": (1, 56), "confidence_head.proj.bias": (1,)}
TORCHSPEC_NAMES = {"fc.weight": "context_proj.weight", "hidden_norm.weight": "context_norm.weight",
                   "norm.weight": "final_norm.weight"}  # fmt: skip


def backbone(states: int, layers: int = 2, names: Mapping[str, str] = {}) -> Shapes:
    """Return the shapes of a drafter without heads, by name."""
    shapes = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in LAYER.items()}
    outside = {"fc.weight": (48, 48 * states), "hidden_norm.weight": (48,), "norm.weight": (48,)}
    return shapes | {names.get(name, name): shape for name, shape in outside.items()}


@dataclass(frozen=True)
class Form:
    """One published form.

    Attributes:
        source: where its keys and names are published.
        config: its config.json, dims cut.
        tensors: shapes by name.
        layout: the layout whose marks it bears.
        kind: what it is; "DSpark" or "DFlash", or what `kconv inspect` calls a relative.
        leaves_open: what its files do not decide.
        options: what decides that.
        target_layers, model_type: of the target that it is for.
        refused: why kconv converts it for an engine to nothing, a part of the message by engine; "" for all engines.
    """

    source: str
    config: Mapping[str, Any]
    tensors: Shapes
    layout: str | None = None
    kind: str = "DFlash"
    leaves_open: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    target_layers: int = 36
    model_type: str = "qwen3"

    def write(self, folder: Path) -> Path:
        """Write it, with random weights."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        generator = torch.Generator().manual_seed(7)
        maps = {"d2t": torch.full((40,), 24), "t2d": torch.arange(64) >= 24}
        tensors = {
            name: maps[name] if name in maps else torch.randn(shape, generator=generator).to(torch.bfloat16)
            for name, shape in self.tensors.items()
        }
        save_file(tensors, folder / "model.safetensors")
        return folder


# What transformers' Qwen3Config writes.
QWEN3 = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu", "hidden_size": 48,
    "initializer_range": 0.02, "intermediate_size": 40, "max_position_embeddings": 1024, "max_window_layers": 2,
    "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "use_sliding_window": False, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 64,
    "torch_dtype": "bfloat16", "transformers_version": "4.57.1", "layer_types": ["full_attention"] * 2,
}  # fmt: skip
IDS = [1, 9, 17, 25, 33]
_ZLAB = QWEN3 | {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": IDS}, "num_target_layers": 36,
}  # fmt: skip
_MODELOPT = QWEN3 | {
    "architectures": ["DFlashDraftModel"], "block_size": 8, "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": IDS, "causal": False},
}  # fmt: skip
_MODELOPT_DSPARK = _MODELOPT | {
    "dflash_config": _MODELOPT["dflash_config"] | {
        "projector_type": "dspark", "shift_label": True, "markov_rank": 8, "markov_head_type": "vanilla",
        "use_confidence_head": True,
    },
}  # fmt: skip
_DEEPSPEC = QWEN3 | {
    "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 60, "target_layer_ids": IDS,
    "num_target_layers": 36, "num_anchors": 512, "markov_rank": 8, "markov_head_type": "vanilla",
    "enable_confidence_head": True, "confidence_head_with_markov": True, "_attn_implementation": "flex_attention",
}  # fmt: skip
_DEEPSPEC_DFLASH = {k: v for k, v in _DEEPSPEC.items() if k not in ("markov_head_type", "confidence_head_with_markov")}
_DEEPSPEC_DFLASH |= {"markov_rank": 0, "enable_confidence_head": False}
_SPECFORGE_DFLASH = {k: v for k, v in _ZLAB.items() if k != "dflash_config"}
_SPECFORGE_DSPARK = _ZLAB | {
    "architectures": ["DSparkDraftModel"], "block_size": 7,
    "dflash_config": {
        "projector_type": "dspark", "mask_token_id": 60, "target_layer_ids": IDS, "markov_rank": 8,
        "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
        "confidence_head_alpha": 1.0,
    },
}  # fmt: skip
_INNER = {k: v for k, v in QWEN3.items() if k not in ("torch_dtype", "transformers_version")}
_VERIFIER = {
    "algorithm": "dflash",
    "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
}
_SPECULATOR = {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "speculators_version": "0.9.0",
    "speculators_config": _VERIFIER, "transformer_layer_config": _INNER, "torch_dtype": "bfloat16",
    "aux_hidden_state_layer_ids": [i + 1 for i in IDS], "block_size": 8, "mask_token_id": 60, "draft_vocab_size": 64,
    "sample_from_anchor": False, "sliding_window_non_causal": False, "target_hidden_size": None,
}  # fmt: skip
_SPECULATOR_DSPARK = {k: v for k, v in _SPECULATOR.items() if k != "sliding_window_non_causal"} | {
    "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "sample_from_anchor": True,
    "markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
_TORCHSPEC = QWEN3 | {
    "architectures": ["DFlashDraftModel"], "block_size": 16, "mask_token_id": 60, "target_layer_ids": IDS,
    "num_target_layers": 5,
}  # fmt: skip
ZLAB = f"{GIT}z-lab/dflash/blob/44947fb/dflash/model.py"
MODELOPT = f"{GIT}NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/plugins/hf_spec_export.py"
DEEPSPEC = (
    f"{GIT}deepseek-ai/DeepSpec/blob/afdfa7c9382a3341a3e6f17756dd816da79f132c/deepspec/modeling/dspark/qwen3/config.py"
)
SPECFORGE = f"{GIT}sgl-project/SpecForge/blob"
SPECULATORS = f"{GIT}vllm-project/speculators/blob/c05b95b3/src/speculators/models"
VLLM = f"{GIT}vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models"
AUTOMODEL = f"{GIT}NVIDIA-NeMo/Automodel/pull/2913"
ONLY_VANILLA = {"vllm": "gated or recurrent", "trtllm": "gated or recurrent", "portable": "gated or recurrent"}
SHARES = {"sglang": "the target's embedding and lm_head", "trtllm": "the target's embedding and lm_head",
          "portable": "the target's embedding and lm_head"}  # fmt: skip
_GATE: Shapes = {"gate_proj.weight": (8, 56), "gate_proj.bias": (8,)}
_JOINT: Shapes = {"joint_proj.weight": (24, 64), "joint_proj.bias": (24,)}
_FLAT_CONFIDENCE: Shapes = {"confidence_proj.weight": (1, 56), "confidence_proj.bias": (1,)}


def _nested(config: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    return {**config, "dflash_config": {**config["dflash_config"], **keys}}


def _without(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {**config, "dflash_config": {k: v for k, v in config["dflash_config"].items() if k != key}}


FORMS: dict[str, Form] = {
    "z-lab, Qwen3": Form(ZLAB, _ZLAB, backbone(5), "dflash"),
    "z-lab, block size inside dflash_config": Form(
        ZLAB, _nested({k: v for k, v in _ZLAB.items() if k != "block_size"}, block_size=16), backbone(5), "dflash"),
    "z-lab, transformers 5's RoPE keys": Form(
        ZLAB, {k: v for k, v in _ZLAB.items() if k not in ("rope_theta", "rope_scaling")}
        | {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}, backbone(5), "dflash"),
    "z-lab, Gemma with sliding layers": Form(
        f"{VLLM}/qwen3_dflash.py", _ZLAB | {"layer_types": ["sliding_attention", "full_attention"],
                                            "sliding_window": 512}, backbone(5), "dflash", refused={"": "layer_types"}),
    "XiaomiMiMo, a window and sinks": Form(
        f"{VLLM}/qwen3_dflash.py",
        _nested(_ZLAB, use_swa=True, swa_window_size=128, attention_sink_bias=True), backbone(5), "dflash",
        refused={"": "use_swa"}),
    "ModelOpt, DFlash": Form(MODELOPT, _MODELOPT, backbone(5), "dflash"),
    "ModelOpt, a causal DFlash": Form(
        MODELOPT, _nested(_MODELOPT, causal=True), backbone(5), "dflash",
        refused={"trtllm": "each slot", "portable": "each slot", "speculators": "each slot"}),
    "ModelOpt, DSpark": Form(
        MODELOPT, _MODELOPT_DSPARK, backbone(5) | FLAT | _FLAT_CONFIDENCE, "dspark-modelopt", "DSpark"),
    "ModelOpt, a gated DSpark": Form(
        MODELOPT, _nested(_MODELOPT_DSPARK, markov_head_type="gated"), backbone(5) | FLAT | _FLAT_CONFIDENCE | _GATE,
        "dspark-modelopt", "DSpark", refused=ONLY_VANILLA),
    "ModelOpt, a recurrent DSpark": Form(
        MODELOPT, _nested(_MODELOPT_DSPARK, markov_head_type="rnn", use_confidence_head=False),
        backbone(5) | FLAT | _JOINT, "dspark-modelopt", "DSpark", refused=ONLY_VANILLA),
    "NVIDIA, Nemotron's DSpark with nested names": Form(
        f"{HUB}nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16-DSpark",
        _nested(_MODELOPT_DSPARK, use_confidence_head=False), backbone(5) | NESTED, "dflash", "DSpark"),
    "NVIDIA, Nemotron's DSpark with a confidence head": Form(
        f"{HUB}nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16-DSpark", _MODELOPT_DSPARK,
        backbone(5) | NESTED | CONFIDENCE, "dflash", "DSpark"),
    "ModelOpt, DSpark with nested names of the Markov head": Form(
        MODELOPT, _MODELOPT_DSPARK, backbone(5) | NESTED | _FLAT_CONFIDENCE, "dflash", "DSpark"),
    "SpecForge, a confidence head that does not say what it reads": Form(
        f"{SPECFORGE}/4e3f455544d496df5d425001090913eed1bd0619/configs/qwen3-8b-dspark.json",
        _without(_SPECFORGE_DSPARK, "confidence_head_with_markov"), backbone(5) | NESTED | CONFIDENCE, "dflash",
        "DSpark"),
    "DeepSpec, a confidence head that reads the state alone, and does not say it": Form(
        DEEPSPEC, {k: v for k, v in _DEEPSPEC.items() if k != "confidence_head_with_markov"},
        backbone(5) | NESTED | CONFIDENCE | {"confidence_head.proj.weight": (1, 48)}, "dspark-deepspec", "DSpark"),
    "DeepSpec, DSpark": Form(DEEPSPEC, _DEEPSPEC, backbone(5) | NESTED | CONFIDENCE | OWN, "dspark-deepspec", "DSpark"),
    "DeepSpec, DFlash": Form(
        f"{GIT}vllm-project/vllm/issues/49614", _DEEPSPEC_DFLASH, backbone(5) | OWN, "dspark-deepspec", "DSpark"),
    "DeepSpec, with the embedding captured": Form(
        DEEPSPEC, _DEEPSPEC | {"target_layer_ids": [-1, *IDS[1:]]}, backbone(5) | NESTED | CONFIDENCE | OWN,
        "dspark-deepspec", "DSpark", refused={"": "the target's embedding"}),
    "SpecForge, DFlash without lists": Form(
        f"{SPECFORGE}/b3d2401f34546e1a38dddc1c491af7724276b3cf/configs/qwen3-8b-dflash.json", _SPECFORGE_DFLASH,
        backbone(5), "dflash", leaves_open=("captured", "mask_token_id"),
        options={"captured": IDS, "mask_token": 60}),
    "SpecForge, DSpark": Form(
        f"{SPECFORGE}/4e3f455544d496df5d425001090913eed1bd0619/configs/qwen3-8b-dspark.json", _SPECFORGE_DSPARK,
        backbone(5) | NESTED | CONFIDENCE, "dflash", "DSpark"),
    "speculators, DFlash": Form(f"{SPECULATORS}/dflash/config.py", _SPECULATOR, backbone(5), "dflash-speculators"),
    "speculators, DFlash of a reduced vocabulary": Form(
        f"{SPECULATORS}/dflash/config.py", _SPECULATOR | {"draft_vocab_size": 40},
        backbone(5) | {"lm_head.weight": (40, 48), "d2t": (40,), "t2d": (64,), "verifier_norm.weight": (48,)},
        "dflash-speculators", refused=SHARES),
    "RedHatAI, DSpark of speculators": Form(
        f"{SPECULATORS}/dspark/config.py", _SPECULATOR_DSPARK, backbone(5) | NESTED | CONFIDENCE, "dflash-speculators",
        "DSpark"),
    "speculators, DSpark that does not say where it samples": Form(
        f"{GIT}vllm-project/vllm/issues/56792",
        {k: v for k, v in _SPECULATOR_DSPARK.items() if k != "sample_from_anchor"},
        backbone(5) | NESTED | CONFIDENCE, "dflash-speculators", "DSpark"),
    "TorchSpec, DFlash": Form(
        f"{GIT}lightseekorg/TorchSpec/pull/64", _TORCHSPEC, backbone(5, names=TORCHSPEC_NAMES), "dflash-torchspec"),
    "Automodel, DFlash": Form(AUTOMODEL, _ZLAB | {"architectures": ["Qwen3DFlashDraftModel"]}, backbone(5), "dflash"),
    "a Markov head under DFlash's class, with no word on the anchor": Form(
        f"{GIT}vllm-project/vllm/issues/56792", _nested(_ZLAB, markov_rank=8, markov_head_type="vanilla"),
        backbone(5) | NESTED, "dflash", "DSpark", leaves_open=("sample_from_anchor",),
        options={"sample_from_anchor": True}),
    "DFlash2": Form(
        f"{GIT}vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/configs/speculators/algos.py#L127-L153",
        _ZLAB | {"conv_kernel_size": 2, "selector_rank": 8, "selector_top_k": 4},
        backbone(5) | {"candidate_selector.hidden_projection.weight": (8, 48)}, None, "DFlash2"),
    "ModelOpt, Domino": Form(
        MODELOPT, _nested(_MODELOPT, projector_type="domino", emb_dim=8, gru_hidden_dim=8),
        backbone(5) | {"prefix_gru.weight_ih_l0": (24, 8)}, None, "Domino"),
    "Kimi-K3, DSpark with latent attention": Form(
        f"{GIT}vllm-project/vllm/blob/v0.32.0/vllm/models/kimi_k3/nvidia/dspark_mla.py#L150-L187",
        _DEEPSPEC | {"architectures": ["KimiK3DSparkModel"], "kv_lora_rank": 32, "num_target_layers": 5},
        {"context_proj.weight": (48, 240), "context_norm.weight": (48,), "final_norm.weight": (48,),
         "layers.0.self_attn.kv_b_proj.weight": (112, 32)}, None, "DSpark of Kimi-K3"),
}  # fmt: skip
