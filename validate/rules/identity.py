"""What a head calls itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...engines import sglang, trtllm, vllm
from ...head.spec import Gqa, Mla
from .head import HeadSubject
from .rule import ENGINES, SGLANG, TRTLLM, VLLM, Found, rule


def first_architecture(subject: HeadSubject) -> str | None:
    """Return the class that a head names first, which is the one that engines look up."""
    names = subject.config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


@rule(
    "K183",
    "model-type-rewritten",
    "error",
    "vLLM rewrites this model_type to DeepSeek's MTP draft, for which no Eagle3 class exists: the head never loads.",
    fix="Set model_type to kimi_k2, as ModelOpt and kconv do.",
    engines=VLLM,
    seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L679",
)
def model_type_rewritten(subject: HeadSubject) -> Iterator[Found]:
    if subject.config.get("model_type") in vllm.ENGINE.rewritten:
        yield Found("config.json: model_type", f"{subject.config['model_type']!r}")


@rule(
    "K184",
    "not-seen-as-mla",
    "info",
    "vLLM does not count kimi_k2 among the drafts with latent attention (use_mla); the layer has it all the same, and"
    " only context-parallel prefill asks.",
    fix="Nothing to do, or set model_type to deepseek_v2 for vLLM alone.",
    engines=VLLM,
    seen_in="https://github.com/vllm-project/vllm/issues/45760",
)
def not_seen_as_mla(subject: HeadSubject) -> Iterator[Found]:
    if subject.is_mla and subject.config.get("model_type") == "kimi_k2":
        yield Found("config.json: model_type", "kimi_k2")


@rule(
    "K185",
    "architecture-unnamed",
    "error",
    "The config names no architecture, by which every engine chooses its class.",
    fix='Write ["LlamaForCausalLMEagle3"], or ["Eagle3DeepseekV2ForCausalLM"] for an MLA head.',
    engines=ENGINES,
)
def architecture_unnamed(subject: HeadSubject) -> Iterator[Found]:
    if first_architecture(subject) is None:
        yield Found("config.json: architectures", f"{subject.config.get('architectures')!r}")


def _other_class(subject: HeadSubject, known: Mapping[type, frozenset[str]]) -> Iterator[Found]:
    name, classes = first_architecture(subject), known[Mla if subject.is_mla else Gqa]
    if name is not None and subject.layout is not None and name not in classes:
        kind = "an MLA" if subject.is_mla else "a GQA"
        yield Found("config.json: architectures", f"{name} has no class for {kind} head; {', '.join(sorted(classes))}")


@rule(
    "K186",
    "architecture-unknown-to-vllm",
    "error",
    "vLLM has no Eagle3 class of this name with the head's attention.",
    fix="Convert the head (kconv to-vllm), which names the class.",
    engines=VLLM,
    seen_in="https://github.com/sgl-project/SpecForge/pull/640",
)
def architecture_unknown_to_vllm(subject: HeadSubject) -> Iterator[Found]:
    # In speculators' format the class follows from the inner config's model_type.
    if not is_speculators(subject):
        yield from _other_class(subject, vllm.ENGINE.architectures)


@rule(
    "K187",
    "architecture-unknown-to-sglang",
    "error",
    "SGLang knows one name for each kind of head; LlamaForCausalLM it loads as a plain Llama, and DeepseekV3ForCausalLM"
    " it rewrites to NextN.",
    fix="Convert the head (kconv to-sglang), which names the class.",
    engines=(SGLANG,),
    seen_in="https://github.com/sgl-project/sglang/pull/33966",
)
def architecture_unknown_to_sglang(subject: HeadSubject) -> Iterator[Found]:
    yield from _other_class(subject, sglang.ENGINE.architectures)


@rule(
    "K188",
    "latent-by-class",
    "error",
    "TensorRT-LLM takes a head for MLA where the config has a kv_lora_rank, which this model_type's class has by"
    " default; the head's attention is not latent.",
    fix="Set model_type to llama.",
    engines=(TRTLLM,),
    seen_in="https://github.com/NVIDIA/TensorRT-LLM/pull/9677",
)
def latent_by_class(subject: HeadSubject) -> Iterator[Found]:
    if not subject.is_mla and subject.config.get("model_type") in trtllm.ENGINE.latent_by_default:
        yield Found("config.json: model_type", f"{subject.config['model_type']!r}, of a head without kv_b_proj")


@rule(
    "K189",
    "q-lora-absent",
    "error",
    "An MLA head without q_lora_rank: vLLM finds no parameter, SGLang refuses it, TensorRT-LLM builds another shape.",
    fix="Train a head with a q_lora_rank; no engine serves one without.",
    engines=ENGINES,
    seen_in="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/kimi_k25_eagle3.py",
)
def q_lora_absent(subject: HeadSubject) -> Iterator[Found]:
    if subject.flat.get("kv_lora_rank") and subject.flat.get("q_lora_rank") is None:
        yield Found("config.json: q_lora_rank", "absent or null")


@rule(
    "K190",
    "experts-null",
    "error",
    "vLLM parses an MLA head's config as DeepSeek's, whose counts of experts must be whole numbers: null is refused.",
    fix="Remove the key: the head's MLP is dense.",
    engines=VLLM,
    seen_in="https://github.com/vllm-project/vllm/pull/36361",
)
def experts_null(subject: HeadSubject) -> Iterator[Found]:
    for key in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"):
        if subject.is_mla and key in subject.config and subject.config[key] is None:
            yield Found(f"config.json: {key}", "null")


def is_speculators(subject: HeadSubject) -> bool:
    """Say whether a head is in speculators' format."""
    return subject.layout is not None and subject.layout.name == "speculators"


@rule(
    "K191",
    "speculators-mla",
    "error",
    "vLLM reads a speculators config for llama and qwen3 only: an MLA head in it never loads.",
    fix="Convert the head (kconv to-vllm).",
    engines=VLLM,
    seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/configs/speculators/algos.py",
)
def speculators_mla(subject: HeadSubject) -> Iterator[Found]:
    if is_speculators(subject) and subject.is_mla:
        yield Found("config.json: transformer_layer_config", "an MLA head in speculators' format")


@rule(
    "K192",
    "speculators-not-read",
    "error",
    "SGLang and TensorRT-LLM have no reader of speculators' format.",
    fix="Convert the head (kconv to-sglang, to-trtllm or to-portable).",
    engines=(SGLANG, TRTLLM),
    seen_in="https://github.com/vllm-project/speculators/issues/610",
)
def speculators_not_read(subject: HeadSubject) -> Iterator[Found]:
    if is_speculators(subject):
        yield Found("config.json: speculators_model_type", "the head is in speculators' format")


RULES = (
    model_type_rewritten,
    not_seen_as_mla,
    architecture_unnamed,
    architecture_unknown_to_vllm,
    architecture_unknown_to_sglang,
    latent_by_class,
    q_lora_absent,
    experts_null,
    speculators_mla,
    speculators_not_read,
)
