"""Heads as each layout's maker writes them: a config for any spec, and which specs the maker knows."""

from __future__ import annotations

from typing import Any

from kconv.drafters.keys import TOP
from kconv.drafters.spec import HeadSpec, Mla, Norms, Yarn
from kconv.engines.config import identity, write_keys
from kconv.engines.layout import Layout

ONE_LAYER = {"torchspec", "specforge", "safeailab", "automodel", "deepspec"}
NO_MLA = {"specforge", "safeailab", "speculators", "deepspec"}
# Both are told by the maps that they save with a reduced vocabulary.
REDUCED = {"specforge", "safeailab"}


def can_make(layout: Layout, spec: HeadSpec) -> bool:
    """Say whether a layout's maker makes such heads."""
    if layout.write_config is not None and layout.name != "speculators":
        beside = any(limit.hits(spec, None) for limit in layout.target_limits)
        return not beside and not any(limit.applies(spec, ()) for limit in layout.limits)
    if layout.name in NO_MLA and isinstance(spec.attention, Mla):
        return False
    if layout.name in ONE_LAYER and spec.layers != 1:
        return False
    yarn = spec.rope.scaling
    if layout.name == "automodel" and isinstance(spec.attention, Mla) and isinstance(yarn, Yarn) and yarn.mscale != 0:
        return False
    if layout.name == "automodel" and spec.norms.qk:
        return False
    is_reduced = spec.draft_vocab != spec.vocab
    if layout.name == "deepspec" and (spec.norms != Norms(qk=True) or is_reduced):
        return False
    if layout.name == "torchspec" and (spec.norms != Norms() or is_reduced):
        return False
    return not (layout.name in REDUCED and (not is_reduced or spec.norms.output))


def make_config(layout: Layout, spec: HeadSpec) -> dict[str, Any]:
    """Return a config in which the captured layers stand as the layout's maker has them."""
    if layout.write_config is not None and layout.name != "speculators":
        return layout.write_config(spec)
    config = identity(spec) | write_keys(spec)
    ids = {"eagle_aux_hidden_state_layer_ids": list(spec.captured)}
    match layout.name:
        case "modelopt":
            config["eagle_config"] |= ids | {"next_layer_regular": True, "parallel_draft_step": 1}
        case "torchspec":
            config["eagle_config"] |= ids | {"use_mtp_layernorm": False}
            del config["norm_output"]
        case "specforge":
            config["eagle_config"] |= ids
            config["norm_output"] = True
            del config["eagle_config"]["return_hidden_post_norm"]
        case "automodel":
            config |= {"architectures": ["LlamaEagle3DraftModel"]}
        case "deepspec":
            config |= {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": list(spec.captured)}
        case "safeailab":
            config |= {"architectures": ["LlamaForCausalLM"]}
        case "speculators":
            outer = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm")
            config = {
                "architectures": ["Eagle3DraftModel"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.3.0",
                "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/target"}},
                "norm_output": config.pop("norm_output"),
                TOP: [i + 1 for i in spec.captured],
                **{key: config.pop(key) for key in outer},
                "transformer_layer_config": config,
            }
    return config
