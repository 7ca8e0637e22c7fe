"""Published forms of draft heads: config keys and tensor names as their makers write them, and dims small.

A row says what a checkpoint is, which layout's marks it bears, what its files leave open, and which options of kconv
decide that. Facts only: keys, names and values; each row names where they are published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support import heads
from support.heads import MODELOPT_KIMIK2, MODELOPT_LLAMA, TORCHSPEC_MHA, TORCHSPEC_MLA, cut

from kconv.checkpoint.folder import Checkpoint, open_checkpoint

MLA = replace(heads.MLA, captured=(1, 29, 57))
MHA = replace(heads.MHA, captured=(1, 29, 57), rope=MLA.rope)
GQA = replace(heads.GQA, captured=(1, 29, 57))
MLA_PARTS = {
    "q_a_proj": (24, 96), "q_a_layernorm": (24,), "q_b_proj": (80, 24), "kv_a_proj_with_mqa": (40, 96),
    "kv_a_layernorm": (32,), "kv_b_proj": (112, 32), "o_proj": (48, 64),
}  # fmt: skip
MHA_PARTS = {"q_proj": (32, 96), "k_proj": (32, 96), "v_proj": (32, 96), "o_proj": (48, 32)}
GQA_PARTS = {"q_proj": (64, 96), "k_proj": (32, 96), "v_proj": (32, 96), "o_proj": (48, 64)}
REST = {
    "input_layernorm": (48,), "hidden_norm": (48,), "post_attention_layernorm": (48,),
    "mlp.gate_proj": (40, 48), "mlp.up_proj": (40, 48), "mlp.down_proj": (48, 40),
}  # fmt: skip
OUTSIDE = {"fc.weight": (48, 144), "norm.weight": (48,)}
EMBED, LM_HEAD = {"embed_tokens.weight": (64, 48)}, {"lm_head.weight": (64, 48)}


Shapes = dict[str, tuple[int, ...]]


def layer(prefix: str, attention: Shapes) -> Shapes:
    """Return the shapes of a decoder layer by name."""
    shapes = {f"{prefix}.self_attn.{part}.weight": shape for part, shape in attention.items()}
    return shapes | {f"{prefix}.{part}.weight": shape for part, shape in REST.items()}


def fill(shapes: Shapes, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return random tensors of these shapes."""
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def maps(kept: int = 40, vocab: int = 64) -> dict[str, torch.Tensor]:
    """Return the two maps of a head that drafts every token from number `vocab - kept` on."""
    marks = torch.arange(vocab) >= vocab - kept
    return {"d2t": torch.full((kept,), vocab - kept, dtype=torch.int64), "t2d": marks}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Checkpoint:
    """Write a checkpoint folder and open it."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return a dict without some of its keys."""
    return {key: value for key, value in config.items() if key not in keys}


TORCHSPEC = layer("midlayer", MLA_PARTS) | OUTSIDE | LM_HEAD | EMBED
NVIDIA = layer("layers.0", MLA_PARTS) | OUTSIDE | LM_HEAD
SPEC_FORGE = layer("midlayer", GQA_PARTS) | OUTSIDE | EMBED | {"lm_head.weight": (40, 48)}
LLAMA = without(cut(TORCHSPEC_MHA, GQA), "use_sliding_window", "rope_scaling") | {
    "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip


IDS = "eagle_aux_hidden_state_layer_ids"
HUB = "https://huggingface.co/"
SPECFORGE = "https://github.com/sgl-project/SpecForge/blob/"
SPECULATORS = "https://github.com/vllm-project/speculators/blob/c05b95b3/src/speculators/models/eagle3/config.py"
AUTOMODEL = "https://github.com/NVIDIA-NeMo/Automodel/tree/36044ad3d/nemo_automodel/components/speculative/eagle"
DEEPSPEC = (
    "https://github.com/deepseek-ai/DeepSpec/blob/afdfa7c9382a3341a3e6f17756dd816da79f132c/"
    "deepspec/modeling/eagle3/qwen3/config.py"
)
EAGLE = "https://github.com/SafeAILab/EAGLE/blob/cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b/eagle/"
# What the facts that a config can leave open are called, in `kconv inspect` and its JSON.
CAPTURED, THETA, RESIDUAL, LAYERS = "captured", "rope_theta", "norm_before_residual", "num_hidden_layers"
MASK = "mask_token_id"


@dataclass(frozen=True)
class Form:
    """One published form.

    Attributes:
        source: where its config keys and tensor names are published.
        config: its config.json, dims cut.
        tensors: shapes by name.
        layout: the layout whose marks it bears; None where none of kconv's does yet.
        kind: what it is: "eagle3", or what `kconv inspect` calls it.
        leaves_open: what its files do not decide.
        options: what decides that, as options of kconv.
        target_layers: the depth of the target that it is for.
        model_type: of that target's text model.
        refused: why kconv converts it to nothing, whatever is said; "" where it converts.
        pickled: its weights are a pytorch_model.bin.
        readme: its README.md, "" for none.
    """

    source: str
    config: Mapping[str, Any]
    tensors: Shapes
    layout: str | None = None
    kind: str = "eagle3"
    leaves_open: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    target_layers: int = 32
    model_type: str = "llama"
    refused: str = ""
    pickled: bool = False
    readme: str = ""

    def write(self, folder: Path) -> Path:
        """Write it, with random weights."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.readme:
            (folder / "README.md").write_text(self.readme)
        tensors = fill({name: shape for name, shape in self.tensors.items() if name not in ("d2t", "t2d")})
        if "d2t" in self.tensors:
            tensors |= {name: values for name, values in maps(*self.tensors["d2t"]).items() if name in self.tensors}
        if self.pickled:
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / "model.safetensors")
        return folder

    def write_target(self, folder: Path) -> Path:
        """Write the config of the target that it is for, dims cut as the head's are."""
        inner = self.config.get("transformer_layer_config", self.config)
        folder.mkdir(parents=True)
        config = {
            "architectures": ["SomeForCausalLM"], "model_type": self.model_type, "hidden_size": 48, "vocab_size": 64,
            "num_hidden_layers": self.target_layers, "num_attention_heads": 4,
            "max_position_embeddings": inner.get("max_position_embeddings", 4096),
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        return folder


SMALL = {
    "hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 64, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "block_size": 4,
}  # fmt: skip


def cut(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a published config with small dims in the keys that it has; everything else stays."""
    small = {**config, **{key: value for key, value in SMALL.items() if key in config}}
    if "draft_vocab_size" in config:
        reduced = config["draft_vocab_size"] != config.get("vocab_size", config["draft_vocab_size"])
        small["draft_vocab_size"] = 40 if reduced or "vocab_size" not in config else 64
    if config.get("num_key_value_heads") == config.get("num_attention_heads"):
        small |= {"num_key_value_heads": 4} if "num_key_value_heads" in config else {}
    if isinstance(inner := config.get("transformer_layer_config"), Mapping):
        small["transformer_layer_config"] = cut(inner)
    return small


def head(
    config: Mapping[str, Any],
    prefix: str = "midlayer",
    *,
    states: int = 3,
    embed: bool = True,
    marks: bool = True,
    more: Shapes | None = None,
) -> Shapes:
    """Return the tensors of an Eagle3 head of a cut config by name.

    Args:
        config: its cut config.
        prefix: of its one decoder layer.
        states: captured states that fc has room for.
        embed: whether it has an embedding of its own.
        marks: whether a reduced vocabulary has t2d beside d2t.
        more: further tensors.
    """
    inner = config.get("transformer_layer_config", config)
    draft = config.get("draft_vocab_size", inner["vocab_size"])
    heads, kv = inner["num_attention_heads"], inner.get("num_key_value_heads", inner["num_attention_heads"])
    dim = inner.get("head_dim") or inner["hidden_size"] // heads
    gqa = {"q_proj": (heads * dim, 96), "k_proj": (kv * dim, 96), "v_proj": (kv * dim, 96), "o_proj": (48, heads * dim)}
    shapes = layer(prefix, MLA_PARTS if inner.get("kv_lora_rank") else gqa)
    shapes |= {"fc.weight": (48, 48 * states), "norm.weight": (48,), "lm_head.weight": (draft, 48)}
    shapes |= {"embed_tokens.weight": (64, 48)} if embed else {}
    if draft != inner["vocab_size"]:
        shapes |= {"d2t": (draft,)} | ({"t2d": (64,)} if marks else {})
    return shapes | (more or {})


# What SafeAILab, SpecForge and those who train with it write: transformers' LlamaConfig.
_LLAMA = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
    "intermediate_size": 32768, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 40,
    "num_key_value_heads": 8, "num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.52.3", "use_cache": True,
    "vocab_size": 202048, "draft_vocab_size": 32000,
}  # fmt: skip
_LLAMA31 = _LLAMA | {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "max_position_embeddings": 2048, "vocab_size": 128256, "torch_dtype": "float16",
    "transformers_version": "4.28.1", "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
_LLAMA70 = without(_LLAMA31, "architectures") | {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 8192, "num_attention_heads": 64, "head_dim": 128,
    "max_position_embeddings": 4096, "rope_theta": 500000.0, "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 4096,
        "rope_type": "llama3",
    },
}  # fmt: skip
_QWEN3 = {
    "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 80, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "intermediate_size": 25600, "max_position_embeddings": 40960, "max_window_layers": 64,
    "model_type": "llama", "num_attention_heads": 64, "num_hidden_layers": 1, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936, "draft_vocab_size": 32000,
}  # fmt: skip
_QWEN3_5TH = without(_QWEN3, "rope_theta", "rope_scaling", "torch_dtype") | {
    "dtype": "bfloat16", "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}  # fmt: skip
_AVIBE = _QWEN3 | {"num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128}
_QWEN25_VL = _QWEN3 | {
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "target_model_type": "qwen2_5_vl",
    "sliding_window": 32768, "vocab_size": 152064,
}  # fmt: skip
_GPT_OSS = without(_LLAMA, "num_key_value_heads") | {
    "architectures": ["GptOssForCausalLMEagle3"], "eagle_config": {IDS: [1, 11, 21]}, "head_dim": 64,
    "hidden_size": 2880, "intermediate_size": 17280, "num_local_experts": 16, "model_type": "gpt_oss",
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088, "experts_per_token": 4,
}  # fmt: skip
_GEMMA3 = _QWEN3 | {
    "bos_token_id": 2, "eos_token_id": 1, "hidden_size": 5376, "num_key_value_heads": 16, "sliding_window": 512,
    "vocab_size": 262208, "draft_vocab_size": 262208, "target_model_type": "gemma3_text", "additional_fc": False,
    "eagle_config": {IDS: [1, 29, 61]}, "reuse_target_lm_head": True,
}  # fmt: skip
_PHI4 = without(_LLAMA, "initializer_range") | {
    "attention_bias": False, "bos_token_id": 199999, "eos_token_id": 199999, "hidden_size": 3072,
    "max_position_embeddings": 131072, "model_type": "phi3", "num_attention_heads": 24, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "vocab_size": 200064,
}  # fmt: skip
_DEEPSEEK = _LLAMA | {
    "eagle_config": {IDS: [1, 29, 57], "use_aux_hidden_state": True}, "hidden_size": 7168, "num_attention_heads": 56,
    "max_position_embeddings": 163840, "vocab_size": 129280,
}  # fmt: skip
_KIMI_K2 = _QWEN3 | {
    "eagle_config": {IDS: [2, 30, 58], "use_aux_hidden_state": True}, "bos_token_id": 163584, "eos_token_id": 163585,
    "hidden_size": 7168, "head_dim": 128, "max_position_embeddings": 131072, "model_type": "kimi_k2",
    "num_attention_heads": 64, "num_key_value_heads": 64, "rope_theta": 1000000.0, "vocab_size": 163840,
}  # fmt: skip
_KIMI_K25 = without(_KIMI_K2, "torch_dtype") | {
    "dtype": "bfloat16", "model_type": "llama", "mlp_bias": False, "pretraining_tp": 1,
}  # fmt: skip
_QWEN3_31 = _QWEN3 | {"fc_norm": True, "norm_output": True, "num_key_value_heads": 4, "max_position_embeddings": 2048}
# As `AQ-MedAI/Kimi-K25-eagle3` and `k-l-lambda/Kimi-K2.5-Eagle3` list them.
_KIMI_MLA = TORCHSPEC_MLA | {"eagle_config": TORCHSPEC_MLA["eagle_config"] | {IDS: [2, 30, 58]}}
_KIMI_MLA_31 = TORCHSPEC_MLA | {"fc_norm": True, "norm_output": True}
_KIMI_K3 = TORCHSPEC_MLA | {
    "mla_use_nope": True, "max_position_embeddings": 1048576, "eos_token_id": 163586,
    "eagle_config": TORCHSPEC_MLA["eagle_config"] | {IDS: [1, 45, 89]},
}  # fmt: skip
_NVIDIA_GPT_OSS = MODELOPT_LLAMA | {
    "eagle_config": MODELOPT_LLAMA["eagle_config"] | {IDS: []}, "vocab_size": 201088, "draft_vocab_size": 201088,
}  # fmt: skip
_ANGELSLIM = without(_QWEN3, "max_window_layers") | {"architectures": ["Eagle3LlamaForCausalLM"]}
# speculators keeps a whole LlamaConfig, num_hidden_layers of the draft in it.
_INNER = without(_LLAMA31, "architectures", "draft_vocab_size", "torch_dtype", "transformers_version") | {
    "attention_bias": False, "mlp_bias": False, "head_dim": 128, "rope_theta": 500000.0, "rope_scaling": None,
}  # fmt: skip


def _verifier(name: str) -> dict[str, Any]:
    greedy = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    return {
        "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [greedy],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": name},
    }  # fmt: skip


_LLAMA31_ID, _LLAMA4_ID = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-4-Maverick-17B-128E-Instruct"
_SPECULATOR = {
    "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 32000, "norm_before_residual": True, "speculators_config": _verifier(_LLAMA31_ID),
    "speculators_model_type": "eagle3", "speculators_version": "0.1.0.dev42", "target_hidden_size": None,
    "torch_dtype": "bfloat16", "transformer_layer_config": _INNER, "transformers_version": "4.55.0",
}  # fmt: skip
_SPECULATOR_09 = _SPECULATOR | {
    "architectures": ["Eagle3DraftModel"], "norm_before_fc": True, "norm_output": True, "fc_norm": False,
    "speculators_version": "0.9.0", "embed_requires_grad": False, IDS: [2, 16, 29],
}  # fmt: skip
_Q_NORM = {"layers.0.self_attn.q_norm.weight": (16,), "layers.0.self_attn.k_norm.weight": (16,)}
_MASK_HIDDEN = {"mask_hidden": (1, 1, 144)}
_SPECFORGE_PEAGLE = _QWEN3 | {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 4, "draft_vocab_size": 151936}
_DEEPSPEC = without(_QWEN3, "draft_vocab_size", "max_window_layers") | {
    "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "target_layer_ids": [1, 9, 17, 25, 33],
    "num_target_layers": 36, "target_model_name_or_path": "Qwen/Qwen3-4B", "ttt_length": 7, "step_loss_decay": 0.8,
    "draft_num_hidden_layers": 1, "layer_types": ["full_attention"],
}  # fmt: skip
_AUTOMODEL = without(_LLAMA, "initializer_range") | {
    "architectures": ["LlamaEagle3DraftModel"], "rope_theta": 500000.0, "head_dim": 128,
}  # fmt: skip
_AUTOMODEL_MLA = without(TORCHSPEC_MLA, "eagle_config") | {
    "architectures": ["LlamaEagle3DraftModel"],
    "model_type": "deepseek_v3",
}


def _prefixed(shapes: Shapes) -> Shapes:
    """Return names as Automodel has them: all but lm_head and the maps under model."""
    return {
        name if name.startswith(("lm_head", "d2t", "t2d", "mask_hidden")) else f"model.{name}": s
        for name, s in shapes.items()
    }


def _form(source: str, config: Mapping[str, Any], prefix: str = "midlayer", **about: Any) -> Form:
    """Return a form of an Eagle3 head; what `head` takes goes there."""
    tensors = {key: about.pop(key) for key in ("states", "embed", "marks", "more") if key in about}
    small = cut(config)
    return Form(source, small, head(small, prefix, **tensors), **about)


def _later(count: int) -> Shapes:
    """Return the tensors of a GQA head's layers after the first, which read one hidden size."""
    gqa = {name: (rows, min(columns, 64 if name == "o_proj" else 48)) for name, (rows, columns) in GQA_PARTS.items()}
    every = {name: shape for i in range(1, count) for name, shape in layer(f"layers.{i}", gqa).items()}
    return {name: shape for name, shape in every.items() if not name.endswith("hidden_norm.weight")}


_FC_NORMS = {f"fc_norm.{i}.weight": (48,) for i in range(3)}
_K2 = {"target_layers": 61, "model_type": "kimi_k2"}
_LIST = {"leaves_open": (CAPTURED,)}
_DEPTH_32, _DEPTH_61 = {"options": {"target_layers": 32}}, {"options": {"target_layers": 61}}
_INPUTS = _LIST | {"options": {"captured_are": "inputs"}} | _K2

EAGLE3: dict[str, Form] = {
    "SafeAILab, Llama-3.1": _form(
        f"{HUB}yuhuili/EAGLE3-LLaMA3.1-Instruct-8B/blob/main/config.json", _LLAMA31, layout="safeailab",
        **_LIST, **_DEPTH_32),
    "SafeAILab, a pickle": _form(
        f"{HUB}yuhuili/EAGLE3-LLaMA3.1-Instruct-8B/tree/main", _LLAMA31, layout="safeailab", pickled=True,
        **_LIST, **_DEPTH_32, readme="---\nbase_model: meta-llama/Llama-3.1-8B-Instruct\n---\n# EAGLE\n"),
    "SafeAILab, Vicuna-13B with the target's depth": _form(
        f"{HUB}yuhuili/EAGLE3-Vicuna1.3-13B/blob/main/config.json",
        _LLAMA31 | {"num_hidden_layers": 40, "num_key_value_heads": 32}, layout="safeailab",
        leaves_open=(CAPTURED, LAYERS), options={"target_layers": 40, "layers": 1}, target_layers=40),
    "SpecForge, Llama-4 without rope_theta": _form(
        f"{SPECFORGE}64488c9196b647b96e8c826ac80689427ce0b404/configs/llama4-scout-17B-16E-eagle3.json", _LLAMA,
        layout="specforge", leaves_open=(CAPTURED, THETA), target_layers=48,
        options={"target_layers": 48, "rope_theta": 10000}),
    "SpecForge, Llama-3-70B with Llama-3 RoPE": _form(
        f"{SPECFORGE}82b62f6ebe950866925384d4c90f62aa3594934f/configs/llama3-70B-ealge3.json", _LLAMA70,
        layout="specforge", **_LIST, options={"target_layers": 80}, target_layers=80),
    "SpecForge, Qwen3-32B": _form(
        f"{SPECFORGE}b185edc04a516b4755c094a15492c4296ba92ed5/configs/qwen3-32b-eagle3.json", _QWEN3,
        layout="specforge", **_LIST, options={"target_layers": 64}, target_layers=64, model_type="qwen3"),
    "SpecForge, Qwen3-32B by transformers 5": _form(
        f"{SPECFORGE}a6b6b0230009d15ec2a97a57384e6f53f0f96946/configs/qwen3-32b-eagle3.json", _QWEN3_5TH,
        layout="specforge", **_LIST, options={"target_layers": 64}, target_layers=64, model_type="qwen3"),
    "SpecForge, Qwen3-8B with the target's depth": _form(
        f"{HUB}AvitoTech/avibe-eagle/blob/main/config.json", _AVIBE, layout="specforge", target_layers=36,
        leaves_open=(CAPTURED, LAYERS), options={"target_layers": 36, "layers": 1}, model_type="qwen3"),
    "SpecForge, Qwen2.5-VL": _form(
        f"{SPECFORGE}8b9d3e5de2804dd2674569b9e22c859cabb917aa/configs/qwen2-5-vl-7B-eagle3.json", _QWEN25_VL,
        layout="specforge", **_LIST, options={"target_layers": 28}, target_layers=28, model_type="qwen2_5_vl_text",
        refused="mrope"),
    "SpecForge, gpt-oss-20b without rope_theta": _form(
        f"{SPECFORGE}ca803a5b736f2b65e027f1c9d1ed232beaacc508/configs/gpt-oss-20B-eagle3.json", _GPT_OSS,
        layout="specforge", leaves_open=(THETA,), options={"rope_theta": 10000}, target_layers=24,
        model_type="gpt_oss"),
    "SpecForge, Gemma-3-27B": _form(
        f"{SPECFORGE}078d71c22d3d4f46524ba8009a31313970a9e34b/configs/gemma3-27b-eagle3.json", _GEMMA3,
        layout="torchspec", target_layers=62, model_type="gemma3_text"),
    "SpecForge, Phi-4-mini": _form(
        f"{SPECFORGE}169f9077d3ac81cfe4613f5d8401186046509367/configs/phi4-mini-eagle3.json", _PHI4,
        layout="specforge", **_LIST, **_DEPTH_32, model_type="phi3"),
    "SpecForge, DeepSeek-V3 without rope_theta": _form(
        f"{SPECFORGE}c02a09a66a83a8f2590a7a738b825f794fbceff3/configs/deepseek-v3-671b-eagle3.json", _DEEPSEEK,
        layout="specforge", leaves_open=(THETA,), options={"rope_theta": 10000}, target_layers=61,
        model_type="deepseek_v3"),
    "SpecForge, Kimi-K2 [2, 30, 58]": _form(
        f"{SPECFORGE}03ebe2cd6412a605cee345415b6eb18ffccc21f7/configs/kimi-k2-eagle3.json", _KIMI_K2,
        layout="specforge", **_INPUTS),
    "SpecForge, Kimi-K2.5 [2, 30, 58]": _form(
        f"{SPECFORGE}3f9b5fca8fe63c76795e5869bcc5c14e364f6db6/configs/kimi-k25-eagle3.json", _KIMI_K25,
        layout="specforge", **_INPUTS),
    "AQ-MedAI, Kimi-K2.5 MHA in vLLM's names": _form(
        f"{HUB}AQ-MedAI/Kimi-K25-eagle3/blob/main/config.json", _KIMI_K25, "layers.0", layout="modelopt", **_INPUTS),
    "SpecForge, EAGLE-3.1": _form(
        f"{SPECFORGE}581664ac7ae4a034c5d0327f321d47cecb0051f0/configs/qwen3-30B-A3B-eagle3.1.json", _QWEN3_31,
        layout="specforge", more=_FC_NORMS, **_LIST, options={"target_layers": 48}, target_layers=48,
        model_type="qwen3_moe"),
    "AngelSlim, Qwen3": _form(
        f"{HUB}AngelSlim/Qwen3-32B_eagle3/blob/main/config.json", _ANGELSLIM, layout="specforge", **_LIST,
        options={"target_layers": 64}, target_layers=64, model_type="qwen3"),
    "TorchSpec, Kimi-K2.5 MLA [1, 29, 57]": _form(
        "https://github.com/lightseekorg/TorchSpec/blob/6f21829c/configs/draft_models/kimi_k25_eagle3_mla.json",
        TORCHSPEC_MLA, layout="torchspec", **_K2),
    "TorchSpec, Kimi-K2.5 MHA without a list": _form(
        "https://github.com/lightseekorg/TorchSpec/blob/6f21829c/configs/draft_models/kimi_k25_eagle3.json",
        TORCHSPEC_MHA, layout="torchspec", **_LIST, **_DEPTH_61, **_K2),
    "k-l-lambda, Kimi-K2.5 MLA [2, 30, 58]": _form(
        f"{HUB}k-l-lambda/Kimi-K2.5-Eagle3/blob/main/config.json", _KIMI_MLA, "layers.0", layout="modelopt", **_INPUTS),
    "lightseekorg, Kimi-K2.7-Code EAGLE-3.1 MLA": _form(
        f"{HUB}lightseekorg/kimi-k2.7-coder-eagle3.1-mla/blob/main/config.json", _KIMI_MLA_31, layout="torchspec",
        more=_FC_NORMS, **_K2, readme="---\nbase_model: moonshotai/Kimi-K2.7-Code\n---\n"),
    "k-l-lambda, Kimi-K2.7-Code MLA [2, 30, 58]": _form(
        f"{HUB}k-l-lambda/kimi-k2.7-code-eagle3-mla/blob/main/config.json", _KIMI_MLA, "layers.0", layout="modelopt",
        **_INPUTS, readme="---\nlicense: mit\nbase_model: moonshotai/Kimi-K2.7-Code\n---\n"),
    "NVIDIA, Kimi-K2 MLA": _form(
        "https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/plugins/hf_spec_configs.py",
        MODELOPT_KIMIK2, "layers.0", embed=False, layout="modelopt", **_K2),
    "NVIDIA, a Llama head with a list": _form(
        "https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/plugins/hf_spec_configs.py",
        MODELOPT_LLAMA, "layers.0", embed=False, layout="modelopt", target_layers=61),
    "NVIDIA, gpt-oss-120b with an empty list": _form(
        f"{HUB}nvidia/gpt-oss-120b-Eagle3-v2/blob/main/config.json", _NVIDIA_GPT_OSS, "layers.0", embed=False,
        layout="modelopt", **_LIST, options={"target_layers": 36}, target_layers=36, model_type="gpt_oss"),
    "RedHatAI speculators, Llama-3.1": _form(
        f"{HUB}RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3/blob/main/config.json", _SPECULATOR, "layers.0",
        layout="speculators", **_LIST, **_DEPTH_32),
    "speculators, converted without norm_before_residual": _form(
        f"{HUB}nm-testing/EAGLE3-LLaMA3.1-Instruct-8B-converted/blob/main/config.json",
        without(_SPECULATOR, "norm_before_residual"), "layers.0", layout="speculators",
        leaves_open=(CAPTURED, RESIDUAL), options={"target_layers": 32, "norm_before_residual": "no"}),
    "speculators, Llama-4-Maverick [1, 23, 44]": _form(
        f"{HUB}nm-testing/Llama4-Maverick-Eagle3-Speculators/blob/main/config.json",
        _SPECULATOR | {IDS: [1, 23, 44], "speculators_config": _verifier(_LLAMA4_ID)}, "layers.0",
        layout="speculators", target_layers=48, model_type="llama4_text", **_LIST,
        options={"captured_are": "outputs"}),
    "speculators 0.9": _form(
        SPECULATORS, _SPECULATOR_09, "layers.0", layout="speculators", more={"input_norm.weight": (144,)}),
    "DeepSpec, Qwen3 with q and k norms and five states": _form(
        DEEPSPEC, _DEEPSPEC,
        "layers.0", states=5, more=_Q_NORM, target_layers=36, model_type="qwen3", layout="deepspec"),
    "SpecForge's P-EAGLE": _form(
        f"{SPECFORGE}a6a07bc47470fcee6441562726b0576cf10b8fe1/configs/qwen3-8b-peagle.json", _SPECFORGE_PEAGLE,
        "layers.0", more=_MASK_HIDDEN | _later(4) | {"d2t": (64,), "t2d": (64,)}, model_type="qwen3",
        layout="specforge-peagle", target_layers=36,
        leaves_open=(CAPTURED, MASK), options={"target_layers": 36, "mask_token": 3}),
    "P-EAGLE of speculators": _form(
        f"{SPECULATORS.rpartition('/eagle3/')[0]}/peagle/config.py",
        _SPECULATOR_09 | {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle",
                          "norm_before_fc": False, "mask_token_id": 3, "embed_requires_grad": True,
                          "transformer_layer_config": _INNER | {"num_hidden_layers": 2}},
        "layers.0", layout="speculators", more=_MASK_HIDDEN | _later(2)),
    "P-EAGLE of Automodel": Form(
        AUTOMODEL, cut(_AUTOMODEL | {"parallel_drafting": True, "mask_token_id": 3}),
        _prefixed(head(cut(_AUTOMODEL), "layers.0", more=_MASK_HIDDEN)), layout="automodel", **_LIST, **_DEPTH_32),
    "Automodel, Llama": Form(
        AUTOMODEL, cut(_AUTOMODEL), _prefixed(head(cut(_AUTOMODEL), "layers.0")), layout="automodel", **_LIST,
        **_DEPTH_32),
    "Automodel, DeepSeek-V3 MLA": Form(
        AUTOMODEL, cut(_AUTOMODEL_MLA), _prefixed(head(cut(_AUTOMODEL_MLA), "layers.0")), layout="automodel",
        target_layers=61, model_type="deepseek_v3", **_LIST, **_DEPTH_61),
}  # fmt: skip

_EAGLE1 = without(_LLAMA31, "draft_vocab_size") | {"architectures": ["LlamaForCausalLM"], "bias": True}
_PLAIN = {"q_proj": (64, 48), "k_proj": (32, 48), "v_proj": (32, 48), "o_proj": (48, 64)}


def _decoder(prefix: str, more: Shapes | None = None) -> Shapes:
    """Return a plain decoder layer: attention over one hidden size, two norms, an MLP."""
    shapes = {name: shape for name, shape in layer(prefix, _PLAIN).items() if not name.endswith("hidden_norm.weight")}
    return shapes | {f"{prefix}.{name}": shape for name, shape in (more or {}).items()}


_QK = {"self_attn.q_norm.weight": (16,), "self_attn.k_norm.weight": (16,)}

OTHERS: dict[str, Form] = {
    "EAGLE-1, Llama-2": Form(
        f"{HUB}yuhuili/EAGLE-llama2-chat-7B/blob/main/config.json", cut(_EAGLE1),
        {n: s for n, s in _decoder("layers.0").items() if "input_layernorm" not in n}
        | {"embed_tokens.weight": (64, 48), "fc.weight": (48, 96), "fc.bias": (48,)},
        kind="EAGLE-1/2"),
    "EAGLE by the speculators library": Form(
        f"{HUB}nm-testing/Eagle_Speculator_Llama_3_1_8B_TTT/blob/main/config.json",
        cut(_SPECULATOR | {"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle"}),
        _decoder("layers.0") | {"fc.weight": (48, 96), "lm_head.weight": (64, 48)}, kind="EAGLE-1/2"),
    "MTP of DeepSeek-V3": Form(
        f"{HUB}lmsys/DeepSeek-V3-NextN/blob/main/config.json",
        cut(_QWEN3 | {"architectures": ["DeepseekV3ForCausalLMNextN"], "model_type": "deepseek_v3"}),
        {f"model.{n}": s for n, s in _decoder("layers.0").items()}
        | {"model.layers.0.eh_proj.weight": (48, 96), "model.layers.0.enorm.weight": (48,),
           "model.layers.0.hnorm.weight": (48,), "model.layers.0.shared_head.norm.weight": (48,)},
        kind="MTP"),
    "Medusa": Form(
        f"{HUB}FasterDecoding/medusa-vicuna-7b-v1.3/blob/main/config.json",
        {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1,
         "transformers_version": "4.31.0"},
        {f"{i}.{n}": s for i in range(2) for n, s in
         {"0.linear.weight": (48, 48), "0.linear.bias": (48,), "1.weight": (64, 48)}.items()},
        kind="Medusa"),
    "Kimi-K3 MLA": _form(
        "https://github.com/lightseekorg/TorchSpec/blob/a31111ee47e5815638d9a830d79c34eb4f5c4502/configs/draft_models/"
        "kimi_k3_eagle3_mla.json", _KIMI_K3, kind="Kimi-K3 head"),
    "a whole Qwen3": Form(
        f"{HUB}Qwen/Qwen3-8B/blob/main/config.json",
        cut(without(_QWEN3, "draft_vocab_size")
            | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2}),
        {f"model.{n}": s for i in range(2) for n, s in _decoder(f"layers.{i}", _QK).items()}
        | {"model.embed_tokens.weight": (64, 48), "model.norm.weight": (48,), "lm_head.weight": (64, 48)},
        kind="target"),
    "a LoRA of Qwen3": Form(
        "https://huggingface.co/docs/peft/developer_guides/checkpoint",
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight": s
         for x, s in (("A", (8, 48)), ("B", (64, 8)))},
        kind="LoRA"),
}  # fmt: skip
