"""Heads as their trainers save them: layouts that kconv reads. It writes only the one of speculators.

Those with one decoder layer called `midlayer` differ in marks and in the meaning of one config key, not in names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..checkpoint.schema import Json
from ..drafters.eagle3 import EAGLE3, MASK, is_parallel
from ..drafters.keys import CONVENTION, IDS, INPUTS, OUTPUTS, TOP, ConfigTable
from ..drafters.spec import HeadSpec
from .common import HIDDEN, MIDLAYER, MIDLAYERS, OUTSIDE, beside, has_midlayer, head_rows, instead, is_mla, later_norm
from .config import identity, write_keys
from .layout import Layout, Limit, Row, TargetFacts, TargetLimit

ROWS = OUTSIDE + MIDLAYER


def _has_vocabulary(names: Iterable[str]) -> bool:
    """Return whether the head has both maps of its vocabulary, as trainers that keep buffers for them save it."""
    return {"d2t", "t2d"} <= set(names)


# The trainer uses RoPE base 10000, and its own config has no rope_theta:
# https://github.com/SafeAILab/EAGLE/blob/cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b/eagle/traineagle3/cnets.py#L207-L209
# https://github.com/SafeAILab/EAGLE/blob/cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b/eagle/traineagle3/config.json
SAFEAILAB = Layout(
    name="safeailab",
    drafter=EAGLE3,
    engine="SafeAILab's EAGLE-3",
    rows=ROWS,
    told_by=lambda config, names: (
        has_midlayer(names) and _has_vocabulary(names) and config.get("architectures") == ["LlamaForCausalLM"]
    ),
    config=ConfigTable(trained={"rope_theta": 10000.0}),
)

# Here `norm_output` says whether the final norm comes before lm_head, and defaults to true; it does not change what the
# next draft step is fed.
# https://github.com/sgl-project/SpecForge/blob/a6b6b0230009d15ec2a97a57384e6f53f0f96946/specforge/modeling/draft/llama3_eagle.py#L1690
SPECFORGE = Layout(
    name="specforge",
    drafter=EAGLE3,
    engine="SpecForge",
    rows=ROWS,
    told_by=lambda config, names: has_midlayer(names) and _has_vocabulary(names) and not config.get("kv_lora_rank"),
    config=ConfigTable(otherwise={"norm_output": (True, None)}),
)

# Its P-EAGLE heads have several layers, and maps of a whole vocabulary too. Their config has neither the mask token nor
# the captured layers.
# https://github.com/sgl-project/SpecForge/blob/1cfba9707edb55fa594e09be3d2b3c394ffd5cc6/specforge/modeling/draft/peagle.py
SPECFORGE_PEAGLE = Layout(
    name="specforge-peagle",
    drafter=EAGLE3,
    engine="SpecForge (P-EAGLE)",
    rows=head_rows("layers.{i}"),
    told_by=lambda config, names: (
        "PEagleDraftModel" in str(config.get("architectures")) and "speculators_model_type" not in config
    ),
)

# TorchSpec had no `norm_output`; its MLA heads later got EAGLE-3.1's. A GQA head with the key and without any mark of
# SpecForge could mean either, and fits no layout until the user names one.
TORCHSPEC = Layout(
    name="torchspec",
    drafter=EAGLE3,
    engine="TorchSpec",
    rows=ROWS,
    told_by=lambda config, names: (
        has_midlayer(names) and (bool(config.get("kv_lora_rank")) or "norm_output" not in config)
    ),
)

# TensorRT-LLM loads what ModelOpt exports.
MODELOPT = Layout(
    name="modelopt",
    drafter=EAGLE3,
    engine="ModelOpt's export_speculative_decoding",
    rows=head_rows("layers.{i}") + instead(MIDLAYERS) + beside(later_norm(HIDDEN)),
    told_by=lambda config, names: "eagle_config" in config and not has_midlayer(names),
    written_for=("trtllm",),
)


def _automodel_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that Automodel copies from the target's config and reads differently from engines.

    Its MLA heads are trained with YaRN's frequencies but without its factors of cos, sin and the softmax. Engines
    compute these from mscale and mscale_all_dim; a value of 0 keeps them at 1:
    https://github.com/NVIDIA-NeMo/Automodel/blob/v0.7.0/nemo_automodel/components/speculative/eagle/draft_deepseek.py
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/deepseek_scaling_rope.py#L18-L21
    """
    if not config.get("kv_lora_rank"):
        return {}
    value: Json
    return {
        place: {**value, "mscale": 0.0, "mscale_all_dim": 0.0}
        for place in ("rope_scaling", "rope_parameters")
        if isinstance(value := config.get(place), Mapping) and "yarn" in (value.get("type"), value.get("rope_type"))
    }


def _inside(row: Row) -> Row:
    outside = row.name.startswith(("lm_head.", "d2t", "t2d", "mask_hidden"))
    return row if outside else replace(row, name=f"model.{row.name}")


# NeMo Automodel gives each of its heads, MLA ones too, a Llama class name, and does not write the captured layers.
AUTOMODEL = Layout(
    name="automodel",
    drafter=EAGLE3,
    engine="NeMo Automodel",
    rows=tuple(map(_inside, head_rows("layers.{i}"))),
    told_by=lambda config, names: (
        "model.fc.weight" in names and "LlamaEagle3DraftModel" in str(config.get("architectures"))
    ),
    config=ConfigTable(adapt=_automodel_keys, ballast=frozenset(("attn_implementation",))),
)

# DeepSpec lists the layers under its own key, as outputs, and trains with Qwen3's norms of queries and keys:
# https://github.com/deepseek-ai/DeepSpec/blob/afdfa7c9382a3341a3e6f17756dd816da79f132c/deepspec/modeling/eagle3/common.py
# https://github.com/deepseek-ai/DeepSpec/blob/afdfa7c9382a3341a3e6f17756dd816da79f132c/deepspec/modeling/eagle3/qwen3/config.py
DEEPSPEC_LIST = "target_layer_ids"
DEEPSPEC = Layout(
    name="deepspec",
    drafter=EAGLE3,
    engine="DeepSpec",
    rows=head_rows("layers.{i}"),
    told_by=lambda config, names: (
        DEEPSPEC_LIST in config and "Qwen3Eagle3Model" in str(config.get("architectures"))
    ),
    config=ConfigTable(
        adapt=lambda config: {IDS: config[DEEPSPEC_LIST], CONVENTION: OUTPUTS} if DEEPSPEC_LIST in config else {},
        ballast=frozenset(
            (DEEPSPEC_LIST, "num_target_layers", "target_model_name_or_path", "ttt_length", "step_loss_decay",
             "draft_num_hidden_layers")
        ),
    ),
)  # fmt: skip

# The parts of a layer of the speculators library, and which keys of its config are its own:
# https://github.com/vllm-project/speculators/blob/v0.9.0/src/speculators/models/eagle3/config.py
SPECULATORS_SOURCE = "https://github.com/vllm-project/speculators/blob/v0.9.0/src/speculators"
SPECULATORS_CORE = f"{SPECULATORS_SOURCE}/models/eagle3/core.py"
OF_THE_SPECULATOR = (
    "draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size", MASK,
)  # fmt: skip


def _speculators_config(spec: HeadSpec, target: TargetFacts | None = None) -> dict[str, Any]:
    """Return the config as speculators 0.9 writes it: the layer's keys in a nested object, and the target by name."""
    config = write_keys(spec)
    del config["eagle_config"]
    outer = {key: config.pop(key) for key in OF_THE_SPECULATOR if key in config}
    # https://github.com/vllm-project/speculators/blob/v0.9.0/src/speculators/models/peagle/config.py
    algorithm, named = ("peagle", "PEagleSpeculator") if is_parallel(spec) else ("eagle3", "Eagle3DraftModel")
    layer = config | {"model_type": identity(spec)["model_type"]}
    verifier = {"architectures": [target.architecture] if target and target.architecture else []}
    method = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    return outer | {
        "architectures": [named],
        # Layer inputs, as in vLLM.
        TOP: [i + 1 for i in spec.captured],
        CONVENTION: INPUTS,
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier | {"name_or_path": target.name if target else None},
        },
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "torch_dtype": config["torch_dtype"],
        "transformer_layer_config": layer,
    }


# Reader: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/configs/speculators/algos.py#L15-L50
SPECULATORS = Layout(
    name="speculators",
    drafter=EAGLE3,
    engine="the speculators library",
    rows=head_rows("layers.{i}"),
    write_config=_speculators_config,
    write_beside=_speculators_config,
    needs={"lm_head": f"the speculators library fills a missing one with NaN ({SPECULATORS_SOURCE}/model.py#L74)"},
    target_limits=(
        TargetLimit(
            lambda spec, target: target is None,
            "the speculators library loads the target that a head's config names, and none is known",
            "Pass --target: the model that the head drafts for.",
            f"{SPECULATORS_CORE}#L176-L181",
        ),
    ),
    limits=(
        Limit(
            "K325",
            "speculators-mla",
            is_mla,
            "the speculators library has layers of Llama and Qwen3, and no latent attention",
            "Convert the head for an engine (kconv to-vllm).",
            f"{SPECULATORS_SOURCE}/models/eagle3/model_definitions.py#L1-L12",
        ),
        Limit(
            "K326",
            "speculators-two-norms-before-fc",
            lambda s: s.norms.before_fc and s.norms.fc,
            "the speculators library takes one of norm_before_fc and fc_norm, not both",
            "Convert the head for an engine (kconv to-vllm).",
            f"{SPECULATORS_SOURCE}/models/eagle3/config.py#L89-L96",
        ),
        Limit(
            "K327",
            "speculators-target-width",
            lambda s: s.target_hidden != s.hidden,
            "the speculators library's fc requires states as wide as the head",
            "Convert the head for an engine (kconv to-vllm).",
            f"{SPECULATORS_CORE}#L68-L76",
        ),
        Limit(
            "K328",
            "speculators-fc-bias",
            lambda s: s.fc_bias,
            "the speculators library's fc has no bias",
            "Convert the head for an engine that has it (kconv to-trtllm).",
            f"{SPECULATORS_CORE}#L74-L76",
        ),
        Limit(
            "K329",
            "speculators-vocabulary-marks",
            lambda s: s.draft_vocab != s.vocab,
            "the speculators library requires t2d as well as d2t, but the head has no t2d",
            "Write it first (kconv vocab HEAD --rebuild-t2d OUT), then convert OUT.",
            f"{SPECULATORS_SOURCE}/model.py#L173-L177",
            lacks="t2d",
        ),
    ),
    told_by=lambda config, names: "speculators_model_type" in config or "transformer_layer_config" in config,
    config=ConfigTable(
        nested="transformer_layer_config",
        ballast=frozenset(
            (
                "speculators_config",
                "speculators_model_type",
                "speculators_version",
                "num_depths",
                "down_sample_ratio",
                "down_sample_ratio_min",
            )
        ),
        must_state={
            "norm_before_residual": "if the key is absent, vLLM assumes true and the speculators library false"
            " (https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/configs/speculators/algos.py#L33)"
        },
    ),
    written_for=("vllm",),
)
