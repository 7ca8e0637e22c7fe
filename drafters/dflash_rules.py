"""The rules about DFlash and DSpark drafters that concern every engine, or kconv itself."""

from __future__ import annotations

from typing import Any

from ..checkpoint.header import FLOAT_DTYPES
from ..rule import Found, Rule
from .dflash import MASK
from .keys import architectures


def _special(subject: Any) -> list[Found]:
    if subject.spec is None:
        return []
    found: list[Found] = []
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = subject.flat.get(name)
        if subject.spec.mask in (ids if isinstance(ids, list) else [ids]):
            found.append(Found(f"config.json: {MASK}", f"the mask token {subject.spec.mask} is {name} too"))
    return found


def last_layer(subject: Any) -> list[Found]:
    """Find that a drafter reads the output of its target's last layer, if the depth of that is known."""
    captured = subject.reading.captured
    depth = subject.target.layers if subject.target else captured and captured.depth
    if captured is None or captured.ids[-1] + 1 != depth:
        return []
    what = f"it reads the output of layer {captured.ids[-1]}, the target's last one"
    return [Found("config.json: target_layer_ids", what)]


def _renamed(subject: Any) -> list[Found]:
    if subject.spec is None or subject.layout is None or not subject.spec.is_dspark:
        return []
    named = architectures(subject.config)
    if "dflash" not in named.lower() or "dspark" in named.lower():
        return []
    samples = "samples from the anchor" if subject.spec.shift else "does not sample from the anchor"
    has = "a Markov head" if subject.spec.markov.rank else "no Markov head"
    return [Found("config.json: architectures", f"{named}, but it {samples} and has {has}")]


def _dtype(subject: Any) -> list[Found]:
    stated = {name: subject.config.get(name) for name in ("dtype", "torch_dtype")}
    return [
        Found(f"config.json: {name}", f"{value!r} is no dtype")
        for name, value in stated.items()
        if value is not None and str(value).removeprefix("torch.") not in FLOAT_DTYPES
    ]


RULES: tuple[Rule[Any], ...] = (
    Rule(
        "K503",
        "mask-token-outside",
        "error",
        "The mask token has no row in the embedding.",
        fix="Correct mask_token_id.",
        says_fix=True,
    ),
    Rule(
        "K504",
        "mask-embedding-file",
        "error",
        "The mask's embedding is in a file of its own, which a copy would leave out.",
        fix="Serve the folder as it is.",
        says_fix=True,
    ),
    Rule(
        "K505",
        "mask-token-special",
        "warning",
        "The mask token is the token that begins, ends or pads a text. Few drafters are trained so.",
        fix="Compare mask_token_id with the training config. With another token almost nothing is accepted.",
        check=_special,
    ),
    Rule(
        "K506",
        "last-layer-captured",
        "warning",
        "The last layer's output is captured. DeepSpec and Automodel take it after the final norm, others before.",
        fix="Serve it with an engine that takes the state as its trainer did; SGLang takes none of the last layer.",
        seen_in="https://github.com/NVIDIA-NeMo/Automodel/pull/3082",
        check=last_layer,
    ),
    Rule(
        "K507",
        "dspark-named-dflash",
        "error",
        "It samples from the anchor, but its class is that of drafters that do not. Engines serve it as DFlash,"
        " in the wrong slots and without its Markov head: 1.27 tokens a step for 2.29, measured with SGLang.",
        fix="Convert it (kconv to-vllm, to-sglang or to-trtllm), which names the class.",
        seen_in="https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/plugins/hf_spec_export.py",
        check=_renamed,
    ),
    Rule(
        "K508",
        "dtype-not-one",
        "error",
        'A dtype of the config is none. ModelOpt writes "None" if it exports without a dtype; SGLang fails on it.',
        fix="State the weights' dtype, or export again with one.",
        seen_in="https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/plugins/hf_spec_export.py",
        check=_dtype,
    ),
    Rule(
        "K509",
        "partial-rotary-copied",
        "error",
        "The config asks for RoPE on a part of each head. Trainers copy the key from the target and rotate whole heads;"
        " engines obey it: about 1.4 tokens a step for 2.53, reported with vLLM.",
        fix="Remove partial_rotary_factor if it was copied from the target.",
        seen_in="https://github.com/deepseek-ai/DeepSpec/pull/72",
        says_fix=True,
    ),
)
