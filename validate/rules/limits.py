"""What an engine has no place for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...engines import BY_NAME
from ...engines.layout import Limit
from .head import ENGINE_LAYOUT, HeadSubject
from .rule import ENGINES, Found, Rule

# Ids of the limits by the sentences that state them; a limit without one here is reported as K300.
IDS: Mapping[str, tuple[str, str]] = {
    "engines take each scaled RoPE of an MLA head for DeepSeek's YaRN, and read no attention_factor":
        ("K310", "mla-rope-no-deepseek-yarn"),
    "the config states one of mscale and mscale_all_dim, and engines put different values for the other":
        ("K311", "mla-one-mscale"),
    "vLLM's MLA head has no norm before fc (norm_before_fc)": ("K320", "vllm-mla-norm-before-fc"),
    "vLLM's MLA head drops the biases of its MLP in silence": ("K321", "vllm-mla-mlp-bias"),
    "vLLM drops fc.bias in silence": ("K322", "vllm-fc-bias"),
    "vLLM's MLA head has a plain lm_head, and fails on the scales of a quantized one":
        ("K323", "vllm-mla-lm-head-quantized"),
    "SGLang cannot be told to capture the output of layer 0 of a DeepSeek or Kimi target":
        ("K330", "sglang-captures-layer-0"),
    "SGLang skips fc where what it reads is as wide as the head": ("K331", "sglang-skips-fc"),
    "SGLang takes the residual before hidden_norm, always (norm_before_residual is not read)":
        ("K332", "sglang-norm-before-residual"),
    "SGLang's MLA head has one layer": ("K333", "sglang-mla-layers"),
    "SGLang's MLA head has no norm before fc (norm_before_fc)": ("K334", "sglang-mla-norm-before-fc"),
    "SGLang drops the biases of q_proj, k_proj and v_proj in silence": ("K335", "sglang-attention-bias"),
    "SGLang drops the biases of the MLP in silence": ("K336", "sglang-mlp-bias"),
    "SGLang reads no attention_factor of YaRN, and takes an mscale of 0 otherwise than the trainer does":
        ("K337", "sglang-yarn"),
    "SGLang needs kv_b_proj of an MLA head unquantized": ("K338", "sglang-kv-b-quantized"),
    "SGLang drops an MLA head's NVFP4 config, and would take its packed bytes for weights":
        ("K339", "sglang-mla-nvfp4"),
    "SGLang builds a bias of o_proj too where a GQA head's config asks for fc.bias, and leaves it unfilled":
        ("K350", "sglang-fc-bias"),
    "SGLang's fc of a GQA head is a plain linear: it drops the scales of a quantized one in silence":
        ("K351", "sglang-fc-quantized"),
    "TensorRT-LLM takes the residual before hidden_norm, always (norm_before_residual is not read)":
        ("K340", "trtllm-norm-before-residual"),
    "TensorRT-LLM builds no fc for a single captured layer": ("K341", "trtllm-one-captured-layer"),
    "TensorRT-LLM cannot load an MLA head with a reduced vocabulary": ("K342", "trtllm-mla-reduced-vocabulary"),
    "TensorRT-LLM reads this YaRN's attention_factor, mscale or mscale_all_dim otherwise than the trainer does":
        ("K343", "trtllm-yarn"),
    "TensorRT-LLM drops the norm before fc (norm_before_fc) where there is one for each state (fc_norm)":
        ("K344", "trtllm-two-norms-before-fc"),
    "TensorRT-LLM skips fc where what it reads is as wide as the head": ("K345", "trtllm-skips-fc"),
}  # fmt: skip
UNNUMBERED = ("K300", "layout-limit")
LIMITS = tuple(dict.fromkeys(limit for engine in ENGINES for limit in BY_NAME[ENGINE_LAYOUT[engine]].limits))


def _rule(limit: Limit) -> Rule[HeadSubject]:
    concerned = tuple(engine for engine in ENGINES if limit in BY_NAME[ENGINE_LAYOUT[engine]].limits)

    def check(subject: HeadSubject) -> Iterator[Found]:
        if subject.spec is not None and limit.applies(subject.spec, subject.slots):
            yield Found("config.json", limit.what)

    id_, name = IDS.get(limit.what, UNNUMBERED)
    sentence = f"{limit.what[0].upper()}{limit.what[1:]}."
    return Rule(id_, name, "error", sentence, limit.fix, check, concerned, limit.source)


RULES = tuple(map(_rule, LIMITS))
