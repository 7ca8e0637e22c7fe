"""Eagle3: a decoder layer that reads three of the target's hidden states and then its own output.

P-EAGLE is a variant: its later steps read a learned state and a mask token instead, so that one pass drafts all tokens.

The object `EAGLE3` is at the end. What a head is stands in `spec.HeadSpec`, its forward in `forward`, its chain in
`chain`, and how its captured layers are read in `captured`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

from ..checkpoint.formats import CONFIG_KEY
from ..checkpoint.manifest import Hints
from ..checkpoint.schema import Json
from ..errors import ConfigInvalid, LayoutCannot, Problem, in_config
from ..options import A_FLAG, A_TOKEN
from ..rule import Rule
from .base import Config, Drafter, Kind, Names, Spec
from .captured import EAGLE, Captured, default_formula, read_captured, readings
from .contract import Problems
from .facts import DEPTH, Candidate, Fact, captured_layers, rope_base, stored_layers
from .keys import MAX_LAYERS, NESTED, TOP, Key, architectures, check_fixed, check_full_attention, find, none, off
from .rope_keys import DEFAULT_THETA
from .slots import INTEGER, Slot
from .spec import Gqa, HeadSpec, Mla, Norms, Tokens

if TYPE_CHECKING:
    from torch import Tensor

    from .forward import DraftHead


# Tensors


def _is_gqa(spec: HeadSpec) -> bool:
    return isinstance(spec.attention, Gqa)


def _is_mla(spec: HeadSpec) -> bool:
    return isinstance(spec.attention, Mla)


def _has_bias(spec: HeadSpec) -> bool:
    return isinstance(spec.attention, Gqa) and spec.attention.bias


def _norms_qk(spec: HeadSpec) -> bool:
    return isinstance(spec.attention, Gqa) and spec.norms.qk


def is_parallel(spec: HeadSpec | None) -> bool:
    """Return whether it is a P-EAGLE head, as far as it is known what it is."""
    return spec is not None and spec.mask is not None


def _is_reduced(spec: HeadSpec) -> bool:
    return spec.draft_vocab != spec.vocab


def _shares_lm_head(spec: HeadSpec) -> bool:
    """Engines share the target's lm_head, which covers the full vocabulary, so the widths must agree."""
    return not _is_reduced(spec) and _shares_embedding(spec)


def _shares_embedding(spec: HeadSpec) -> bool:
    """Engines share the target's embedding if the widths agree."""
    return spec.hidden == spec.target_hidden


SLOTS = (
    Slot("fc", "hidden, captured*target_hidden"),
    Slot("fc.bias", "hidden", lambda s: s.fc_bias),
    Slot("fc_norm.{a}", "target_hidden", lambda s: s.norms.fc),
    Slot("input_norm", "captured*target_hidden", lambda s: s.norms.before_fc),
    Slot("mask_hidden", "1, 1, captured*target_hidden", is_parallel),
    Slot("{i}.input_layernorm", "hidden", layers="all"),
    Slot("{i}.hidden_norm", "hidden", layers="first"),
    Slot("{i}.q_proj", "heads*head_dim, attn_in", _is_gqa, layers="all"),
    Slot("{i}.k_proj", "kv_heads*head_dim, attn_in", _is_gqa, layers="all"),
    Slot("{i}.v_proj", "kv_heads*head_dim, attn_in", _is_gqa, layers="all"),
    Slot("{i}.q_proj.bias", "heads*head_dim", _has_bias, layers="all"),
    Slot("{i}.k_proj.bias", "kv_heads*head_dim", _has_bias, layers="all"),
    Slot("{i}.v_proj.bias", "kv_heads*head_dim", _has_bias, layers="all"),
    Slot("{i}.q_norm", "head_dim", _norms_qk, layers="all"),
    Slot("{i}.k_norm", "head_dim", _norms_qk, layers="all"),
    Slot("{i}.q_a_proj", "q_lora_rank, attn_in", _is_mla, layers="all"),
    Slot("{i}.q_a_layernorm", "q_lora_rank", _is_mla, layers="all"),
    Slot("{i}.q_b_proj", "heads*qk_nope_head_dim+heads*qk_rope_head_dim, q_lora_rank", _is_mla, layers="all"),
    Slot("{i}.kv_a_proj_with_mqa", "kv_lora_rank+qk_rope_head_dim, attn_in", _is_mla, layers="all"),
    Slot("{i}.kv_a_layernorm", "kv_lora_rank", _is_mla, layers="all"),
    Slot("{i}.kv_b_proj", "heads*qk_nope_head_dim+heads*v_head_dim, kv_lora_rank", _is_mla, layers="all"),
    Slot("{i}.o_proj", "hidden, attn_out", layers="all"),
    Slot("{i}.o_proj.bias", "hidden", _has_bias, layers="all"),
    Slot("{i}.post_attention_layernorm", "hidden", layers="all"),
    Slot("{i}.gate_proj", "intermediate, hidden", layers="all"),
    Slot("{i}.up_proj", "intermediate, hidden", layers="all"),
    Slot("{i}.down_proj", "hidden, intermediate", layers="all"),
    Slot("{i}.gate_proj.bias", "intermediate", lambda s: s.mlp_bias, layers="all"),
    Slot("{i}.up_proj.bias", "intermediate", lambda s: s.mlp_bias, layers="all"),
    Slot("{i}.down_proj.bias", "hidden", lambda s: s.mlp_bias, layers="all"),
    Slot("norm", "hidden"),
    Slot("lm_head", "draft_vocab, hidden", absent_when=_shares_lm_head),
    Slot("embed_tokens", "vocab, hidden", absent_when=_shares_embedding),
    Slot("d2t", "draft_vocab", _is_reduced, dtype=INTEGER),
    Slot("t2d", "vocab", _is_reduced, absent_when=_is_reduced, dtype=("BOOL",)),  # follows from d2t,
)


def dims(spec: HeadSpec, layer: int = 0) -> dict[str, int]:
    """Return the numbers that the shape formulas use, for one layer of a head."""
    attention = spec.attention
    known = {
        "hidden": spec.hidden,
        "target_hidden": spec.target_hidden,
        "captured": len(spec.captured),
        "intermediate": spec.intermediate,
        "vocab": spec.vocab,
        "draft_vocab": spec.draft_vocab,
        "attn_in": (2 if layer == 0 else 1) * spec.hidden,
    }
    if isinstance(attention, Mla):
        return known | vars(attention) | {"attn_out": attention.heads * attention.v_head_dim}
    return known | vars(attention) | {"attn_out": attention.heads * attention.head_dim}


# Config keys

MASK = "mask_token_id"

KEYS = (
    Key("hidden", ("hidden_size",), "count"),
    Key("target_hidden", ("target_hidden_size",), "count", lambda v: v["hidden"]),
    Key("intermediate", ("intermediate_size",), "count"),
    Key("layers", ("num_hidden_layers",), "depth"),
    Key("vocab", ("vocab_size",), "vocabulary"),
    # ModelOpt's kimik2 template omits the key even when it exports a reduced vocabulary:
    # https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/plugins/hf_spec_configs.py#L58
    Key("draft_vocab", ("draft_vocab_size",), "vocabulary", lambda v: v["lm_head_rows"] or v["vocab"]),
    Key("eps", ("rms_norm_eps",), "fraction"),
    Key("mlp_bias", ("mlp_bias",), "flag", off),
    Key("fc_bias", ("bias",), "flag", off),
    Key("norms.before_residual", ("norm_before_residual",), "flag", off),
    # TensorRT-LLM reads it inside eagle_config only, vLLM in either place.
    Key("norms.before_fc", ("norm_before_fc", "eagle_config.norm_before_fc"), "flag", off),
    # The second name is SGLang's older one.
    Key("norms.fc", ("fc_norm",), "flag", off, also=("use_aux_norm",)),
    # The second name is TensorRT-LLM's older one.
    Key("norms.output", ("norm_output", "eagle_config.return_hidden_post_norm"), "flag", off),
    # The other names are those that vLLM reads too.
    Key("mask", (MASK,), "token", none, also=("pard_token", "ptd_token_id")),
    Key("tokens.bos", ("bos_token_id",), "token", none),
    Key("tokens.eos", ("eos_token_id",), "token", none),
    Key("tokens.pad", ("pad_token_id",), "token", none),
)

# Keys that change what a head computes, and the only values that kconv supports. Any other value is refused.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False, None),
    "quantization_config": (None,),
    "logit_scale": (1, None),
    "use_sliding_window": (False, None),
    "qkv_bias": (False, None),
    "rope_interleave": (True, None),
    # Kimi K3's draft heads are trained without RoPE; vLLM's and SGLang's Eagle3 classes ignore the key and apply RoPE:
    # https://github.com/lightseekorg/TorchSpec/blob/a31111ee47e5815638d9a830d79c34eb4f5c4502/configs/draft_models/kimi_k3_eagle3_mla.json#L19
    "mla_use_nope": (False, None),
    # RoPE under names that vLLM or TensorRT-LLM reads (RopeParams.from_config). TensorRT-LLM even takes rotary_emb_base
    # for the number of rotary dims, and lets a top-level original_max_position_embeddings win:
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/config.py#L627-L637
    # https://github.com/NVIDIA/TensorRT-LLM/blob/b386a7fff981548964f58eb5f7e2a8e015c661bb/tensorrt_llm/_torch/attention/backends/interface.py
    "rotary_pct": (1, None),
    "rotary_emb_fraction": (1, None),
    "rotary_dim": (None,),
    "rotary_emb_base": (None,),
    "original_max_position_embeddings": (None,),
    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama.py#L335
    "rope_is_neox_style": (True,),
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama.py#L280
    "is_causal": (True,),
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1138
    "index_topk": (None,),
    "eagle_config.use_aux_hidden_state": (True, None),
    "eagle_config.use_input_layernorm_in_first_layer": (True, None),
    "eagle_config.use_last_layernorm": (True, None),
    "eagle_config.use_mtp_layernorm": (False, None),
    "eagle_config.next_layer_regular": (True, None),
    "eagle_config.eh_proj_before_attn": (False, None),
    "eagle_config.parallel_draft_step": (1, None),
    "eagle_config.parallel_draft_heads_num_layers": (1, None),
}

# Read elsewhere: RoPE (rope_keys), captured layers (captured), identity, dtype.
ELSEWHERE = frozenset(
    """
    architectures model_type dtype torch_dtype rope_theta rope_scaling rope_parameters
    partial_rotary_factor max_position_embeddings num_aux_hidden_states
    eagle_aux_hidden_state_layer_ids eagle_config.eagle_aux_hidden_state_layer_ids
    eagle_config.aux_hidden_state_layer_ids_are aux_hidden_state_layer_ids_are kv_lora_rank sliding_window layer_types
    parallel_drafting
    """.split()
)

# Keys of `FIXED` with a rule of their own; K013 covers the others.
TIED = "tie_word_embeddings"
OF_FIXED = {TIED: "K170", CONFIG_KEY: "K198"}
# What to do about a value of `FIXED` that is more than a key without effect.
OF_K3 = "This is a Kimi-K3 head, whose attention has no RoPE; kconv does not support these yet."
FIXES = {"mla_use_nope": OF_K3}
# Classes of heads with Qwen3's attention; those for Qwen-VL targets have Llama's.
QWEN3 = re.compile(r"Eagle3Qwen3ForCausalLM|Qwen3ForCausalLM(Eagle3)?|Qwen3Eagle3Model")


def _is_untied(config: Config, tensors: Names) -> bool:
    """Return whether a head's lm_head has other rows than its embedding, so that the two cannot be tied."""
    lm_head = tensors.get("lm_head.weight")
    return lm_head is not None and lm_head.shape[:1] != (config.get("vocab_size"),)


def _check_unsupported(config: Config, tensors: Names, problems: Problems) -> None:
    """Find keys of a config (`drafters.keys`) that ask for something that kconv does not support."""
    # Two of these keys have their rule's meaning only for some heads.
    codes = OF_FIXED | ({"rope_interleave": "K168"} if config.get("kv_lora_rank") else {})
    codes |= {f"{EAGLE}.use_aux_hidden_state": "K151"} if "fc.weight" in tensors else {}
    for name, allowed in FIXED.items():
        if name == TIED and config.get(TIED) is True and _is_untied(config, tensors):
            what = f"{TIED} is true, but lm_head has its own rows, so it is not tied; engines may believe the key"
            problems.append(Problem(OF_FIXED[TIED], "warning", in_config(TIED), what, "Convert the head."))
            continue
        check_fixed(name, allowed, config, problems, fix=FIXES.get(name, ""), code=codes.get(name, "K013"))
    check_full_attention(config, problems)
    mask, vocab = _stated_mask(config), config.get("vocab_size")
    if mask is None and _says_parallel(config, tensors):
        problems.add(
            ConfigInvalid,
            f"this is a P-EAGLE head, and the config has no {MASK}: the token of the entries after a draft's first",
            in_config(MASK),
            "Pass --mask-token, as the head was trained.",
            "K025",
            "--mask-token",
        )
    if isinstance(mask, int) and isinstance(vocab, int) and mask >= vocab:
        problems.add(
            ConfigInvalid,
            f"{MASK} is {mask}, but the embedding has {vocab} rows",
            in_config(MASK),
            "Correct the key: the mask is a token of the embedding that the head reads.",
            "K012",
        )


def _stated_mask(config: Config) -> Json:
    key = next(key for key in KEYS if key.field == "mask")
    return next((v for name in key.names + key.also if (v := config.get(name)) is not None), None)


def _says_parallel(config: Config, names: Names) -> bool:
    """Return whether a head's files are those of P-EAGLE, whatever the mask token."""
    return _has(names, "mask_hidden") or config.get("parallel_drafting") is True


def _check_count(
    config: Config, captured: Captured | None, hints: Hints, states: int | None, problems: Problems
) -> None:
    """Find a count of captured layers that differs from fc's width or from the number of listed layers."""
    if captured and hints.captured is not None and states not in (None, len(captured.ids)):
        problems.add(
            ConfigInvalid,
            f"fc.weight takes {states} states, but --captured names {len(captured.ids)}",
            "--captured",
            "Pass one layer per state, in ascending order.",
        )
        return
    count = config.get("num_aux_hidden_states")
    ids: Json
    if captured:
        lengths = {"": len(captured.ids)}
    else:
        lengths = {
            f" in {path}": len(ids) for path in (TOP, NESTED) if isinstance(ids := find(config, path), list) and ids
        }
    for place, length in lengths.items() if count is not None else ():
        if count != length:
            problems.add(
                ConfigInvalid,
                f"num_aux_hidden_states is {count!r}, but {length} captured layers are listed{place}",
                in_config("num_aux_hidden_states"),
                "Correct whichever contradicts fc.weight's width.",
                "K149",
            )


def _asks_for_qk_norms(config: Mapping[str, Any], tensors: Iterable[str]) -> bool:
    """Return whether a config asks for query and key norms: by a class with Qwen3's attention, or by its model_type.

    The model_type may be there only because the target is a Qwen3, so without such norms it does not ask for them.
    """
    named: Json = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str) and QWEN3.fullmatch(named[0]):
        return True
    return config.get("model_type") == "qwen3" and any(name.endswith(".q_norm.weight") for name in tensors)


def _states(tensors: Names, values: Config) -> int | None:
    """Return how many captured states fc has room for; None if unknown."""
    fc, width = tensors.get("fc.weight") or tensors.get("model.fc.weight"), values.get("target_hidden")
    return min(max(fc.shape[1] // width, 1), MAX_LAYERS) if fc and len(fc.shape) == 2 and width else None


# What is one, and what is a relative


def _has(names: Names, *ends: str) -> bool:
    return any(name.endswith(ends) for name in names)


# No whole model has a tensor whose name ends so.
SIGNS = ("fc.weight",)


def _has_fc(names: Names) -> bool:
    return _has(names, *SIGNS)


# Names that an Eagle3 head has but the drafts of EAGLE-1 and EAGLE-2 do not: the norm of the fed-back state.
# https://github.com/SafeAILab/EAGLE/blob/cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b/eagle/model/cnets1.py#L487
# https://github.com/SafeAILab/EAGLE/blob/cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b/eagle/model/cnets.py#L438
_IN_LAYER = re.compile(r"(?:^|\.)(?:midlayer|layers)\.(?:\d+\.)?hidden_norm\.weight$")


def _is_eagle1(config: Config, names: Names) -> bool:
    fc = names.get("fc.weight")
    two_wide = fc is not None and len(fc.shape) == 2 and fc.shape[1] == 2 * fc.shape[0]
    return two_wide and not any(map(_IN_LAYER.search, names)) and bool(stored_layers(names))


OTHER_METHOD = "Serve it with its own method (`method` in vLLM's --speculative-config); it does not need kconv."
RELATIVES = (
    Kind(
        "Medusa",
        "a Medusa draft (heads on the last hidden state), not an Eagle3 head",
        OTHER_METHOD,
        lambda config, _: "medusa_num_heads" in config or "medusa" in architectures(config).lower(),
    ),
    Kind(
        "MTP",
        "a multi-token-prediction (MTP) layer of a target, not an Eagle3 head",
        "Serve it with the engine's own mtp method; kconv has nothing to convert.",
        lambda _, names: _has(names, "eh_proj.weight", ".enorm.weight", "mtp.fc.weight") and stored_layers(names) < 3,
    ),
    Kind(
        "Kimi-K3 head",
        "an Eagle3 head for Kimi-K3, whose attention has no RoPE",
        "Serve it with the engine that it was made for; kconv does not support Kimi-K3 heads yet.",
        lambda config, _: config.get("mla_use_nope") is True,
        is_head=True,
    ),
    Kind(
        "EAGLE-1/2",
        "a draft of EAGLE-1 or EAGLE-2 (its fc takes two hidden sizes, and no layer has a hidden_norm)",
        "Serve it with the engine's eagle method; kconv converts Eagle3 heads.",
        _is_eagle1,
    ),
)


# What files leave open


def _captured(config: Config, hints: Hints, names: Names) -> Sequence[Candidate]:
    found = [Candidate(one.ids, one.how) for one in readings(config, hints, names)]
    return found or [Candidate(None, default_formula())]


FACTS = {
    fact.name: fact
    for fact in (
        captured_layers(_captured),
        rope_base(Candidate(DEFAULT_THETA, "the default of trainers and of LlamaConfig")),
        Fact(
            "norm_before_residual",
            Rule(
                "K015",
                "residual-unstated",
                "undecided",
                "A speculators config does not state norm_before_residual. vLLM assumes true, the speculators library"
                " false.",
                fix="State the value that the head was trained with, or give --norm-before-residual.",
                seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/configs/speculators/algos.py#L33",
                subject="Config",
            ),
            hint="norm_before_residual",
            line="norms",
            path="norms.before_residual",
            candidates=lambda config, hints, names: [
                Candidate(False, "the speculators library"),
                Candidate(True, "vLLM"),
            ],
            put=lambda spec, value: replace(spec, norms=replace(spec.norms, before_residual=value)),
            stated=lambda config: config.get("norm_before_residual") is not None,
            answer=A_FLAG,
        ),
        Fact(
            MASK,
            Rule(
                "K025",
                "parallel-mask-unstated",
                "undecided",
                "The config of a P-EAGLE head does not state its mask token. vLLM refuses it then.",
                fix="State mask_token_id as it was trained, or give --mask-token.",
                seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/spec_decode/llm_base_proposer.py#L363-L380",
                says_fix=True,
                subject="Config",
            ),
            hint="mask_token",
            line="variant",
            path="mask",
            candidates=lambda config, hints, names: [
                Candidate(None, "the id of the tokenizer's mask token, or of another that no text has")
            ],
            stated=lambda config: _stated_mask(config) is not None,
            answer=A_TOKEN,
            words="mask token {}",
        ),
        DEPTH,
    )
}


def _marks(config: Config, names: Names) -> bool:
    return "fc.weight" in names or "model.fc.weight" in names or EAGLE in config


def _looks_like(names: Names) -> bool:
    """Return whether tensor names are a head's, under any prefix: fc, and a norm in its layer."""
    return _has_fc(names) and any(map(_IN_LAYER.search, names))


def _derived(values: Config, config: Config, names: Names) -> dict[str, Any]:
    qk = "attention.kv_lora_rank" not in values and _asks_for_qk_norms(config, names)
    # A mask token that is not known is a problem by then, so nothing reads this one.
    unknown = {"mask": 0} if values["mask"] is None and _says_parallel(config, names) else {}
    return {"norms.qk": qk} | unknown


def _lines(spec: HeadSpec) -> dict[str, str]:
    variant = (
        {"variant": f"P-EAGLE: drafts all tokens in one pass, mask token {spec.mask}"} if is_parallel(spec) else {}
    )
    return {"norms": ", ".join(name for name, on in asdict(spec.norms).items() if on) or "plain"} | variant


def _load(spec: HeadSpec, weights: Mapping[str, Tensor]) -> DraftHead:
    from .forward import DraftHead

    return DraftHead(spec, weights)


def refuse_others(drafter: Drafter, does: str) -> None:
    """Refuse a drafter of another family.

    Args:
        drafter: any family.
        does: what kconv does for Eagle3 heads alone, e.g. "quantizes".

    Raises:
        LayoutCannot: it is not Eagle3.
    """
    if drafter is not EAGLE3:
        raise LayoutCannot(f"kconv {does} only Eagle3 heads, and this is {drafter.a_title}", fix="Use it as it is.")


def only_eagle3(spec: Spec, does: str) -> HeadSpec:
    """Return the spec of an Eagle3 head that drafts a token a step; see `refuse_others`."""
    refuse_others(spec.drafter, does)
    head = cast(HeadSpec, spec)
    if is_parallel(head):
        what = f"kconv {does} only Eagle3 heads that draft a token a step, and this is a P-EAGLE head"
        raise LayoutCannot(what, fix="Use it as it is.")
    return head


EAGLE3 = Drafter(
    name="eagle3",
    title="Eagle3 head",
    lead=lambda spec: f"{'A P-EAGLE' if is_parallel(spec) else 'An Eagle3'} draft head",
    spec=HeadSpec,
    slots=SLOTS,
    dims=dims,
    marks=_marks,
    signs=SIGNS,
    captured=read_captured,
    room=_states,
    load=_load,
    keys=KEYS,
    parts={"norms": Norms, "tokens": Tokens},
    nested=EAGLE,
    fixed=FIXED,
    elsewhere=ELSEWHERE,
    derived=_derived,
    check_keys=_check_unsupported,
    check_captured=_check_count,
    facts=FACTS,
    relatives=RELATIVES,
    looks_like=_looks_like,
    lines=_lines,
    norm_fix=(
        "Add what is missing to the config, as the head was trained: a trained norm cannot be left out. Norms of"
        ' queries and keys belong to model_type "qwen3" and architectures ["Eagle3Qwen3ForCausalLM"].'
    ),
    trainer="eagle",
)
