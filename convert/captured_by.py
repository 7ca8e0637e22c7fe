"""Who wrote a head's list of captured layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys of eagle_config that ModelOpt's exporter writes and engines do not:
# https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/plugins/hf_spec_configs.py#L52-L53
MODELOPT_MARKS = ("next_layer_regular", "parallel_draft_step")
# TorchSpec's configs have the first one alone of these keys, and its exporter writes the second one. It counts outputs,
# of every target; where it renames `midlayer` for vLLM, it adds 1 to the lists of a kimi_k2 head, and of no other:
# https://github.com/lightseekorg/TorchSpec/blob/6f21829cd0e333c3b54d9d2706a0b0c8dc10de9d/torchspec/inference/engine/vllm_engine.py#L155-L166
# https://github.com/lightseekorg/TorchSpec/blob/6f21829cd0e333c3b54d9d2706a0b0c8dc10de9d/tools/convert_to_hf.py#L145-L158
TORCHSPEC_MARK, TORCHSPEC_VERSION = "use_mtp_layernorm", "_torchspec_version"

TRAINER, FOR_VLLM, AS_TRAINED = "trainer", "for vllm", "as trained"
# Why a list where vLLM looks for inputs may hold outputs.
DOUBTS = {
    TRAINER: "beside the trainer's own tensor names, maybe layer outputs",
    AS_TRAINED: "of TorchSpec, which counts outputs and adds 1 for vLLM to a kimi_k2 head's list alone",
}


def saved_by(config: Mapping[str, Any], eagle_config: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return who may have shifted a list.

    Args:
        config: in the keys of `convert.keys`.
        eagle_config: the config's own.
        names: of the head's tensors.

    Returns:
        TRAINER with its own tensor names; where the layer is renamed for vLLM, FOR_VLLM if TorchSpec then shifts the
        list and AS_TRAINED if it does not; empty for neither.
    """
    if any(name.startswith("midlayer.") for name in names):
        return TRAINER
    if not any(name.startswith("layers.0.") for name in names):
        return ""
    if config.get("model_type") == "kimi_k2":
        return FOR_VLLM
    torchspecs = TORCHSPEC_MARK in eagle_config and not is_modelopts(eagle_config)
    return AS_TRAINED if torchspecs or TORCHSPEC_VERSION in config else ""


def is_modelopts(eagle_config: Mapping[str, Any]) -> bool:
    """Say whether ModelOpt's exporter wrote an eagle_config."""
    return any(mark in eagle_config for mark in MODELOPT_MARKS)
