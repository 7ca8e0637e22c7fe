"""DFlash and DSpark: drafters that fill a block of slots in one pass, from the target's states.

The object `DFLASH` is at the end. The block begins with the newest token, the anchor, and goes on with mask tokens. A
DFlash drafter's slot i predicts the token i places after the anchor, so its first slot predicts nothing. A DSpark
drafter samples from the anchor: its slot i predicts the token after that, and a Markov head adds a bias that depends on
the token drafted one place before. The heads of both read the target's embedding and lm_head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..checkpoint.formats import CONFIG_KEY
from ..checkpoint.schema import Json
from ..errors import ConfigInvalid, ConfigUnsupported, in_config
from ..options import A_FLAG, A_TOKEN
from ..rule import Rule
from .base import Config, Drafter, Kind, Names
from .contract import Problems
from .dflash_captured import CONVENTION, LISTS, NESTED, guesses, read_captured, stated
from .facts import BASES, DEPTH, Candidate, Fact, captured_layers, rope_base
from .keys import ABSENT, GQA, MAX_LAYERS, Key, architectures, check_fixed, check_full_attention, find, off
from .rope_keys import DEFAULT_THETA, PLACES
from .slots import INTEGER, Slot
from .spec import Gqa, Rope

if TYPE_CHECKING:
    from torch import Tensor

    from .dflash_forward import BlockDrafter

VANILLA, GATED, RNN = "vanilla", "gated", "rnn"


@dataclass(frozen=True)
class Markov:
    """A bias of the logits from the token drafted one place before.

    Attributes:
        rank: of its two matrices; 0 for none.
        kind: "vanilla", or "gated" or "rnn" if it reads the slot's state too.
    """

    rank: int = 0
    kind: str = VANILLA


@dataclass(frozen=True)
class Confidence:
    """An estimate of whether a draft is accepted.

    Attributes:
        present: whether there is one.
        with_markov: whether it reads the Markov head's embedding of the previous token beside the slot's state.
    """

    present: bool = False
    with_markov: bool = False


@dataclass(frozen=True)
class DFlashSpec:
    """What a DFlash or DSpark drafter is; see `HeadSpec` for the fields that the families share.

    Attributes:
        block: slots of a block, the anchor's among them.
        mask: the token in all slots but the first.
        shift: whether the anchor's slot predicts too, so that a block drafts as many tokens as it has slots.
        causal: whether a slot sees no later ones.
        markov: its Markov head.
        confidence: its confidence head.
    """

    attention: Gqa
    hidden: int
    target_hidden: int
    intermediate: int
    layers: int
    vocab: int
    draft_vocab: int
    rope: Rope
    captured: tuple[int, ...]
    eps: float
    dtype: str
    max_positions: int
    block: int
    mask: int
    shift: bool = False
    causal: bool = False
    markov: Markov = field(default_factory=Markov)
    confidence: Confidence = field(default_factory=Confidence)

    @property
    def kind(self) -> str:
        """`"mha"` or `"gqa"`."""
        return "mha" if self.attention.kv_heads == self.attention.heads else "gqa"

    @property
    def places(self) -> int:
        """The number of tokens that a block drafts, at most K."""
        return self.block if self.shift else self.block - 1

    @property
    def is_dspark(self) -> bool:
        """Whether engines must serve it as DSpark."""
        return self.shift or self.markov.rank > 0

    @property
    def drafter(self) -> Drafter:
        """Its family."""
        return DFLASH


# Tensors


def _shares(spec: DFlashSpec) -> bool:
    return spec.hidden == spec.target_hidden


def _is_reduced(spec: DFlashSpec) -> bool:
    return spec.draft_vocab != spec.vocab


def _has_bias(spec: DFlashSpec) -> bool:
    return spec.attention.bias


def _has_markov(spec: DFlashSpec) -> bool:
    return spec.markov.rank > 0


def _is_gated(spec: DFlashSpec) -> bool:
    return _has_markov(spec) and spec.markov.kind == GATED


def _is_rnn(spec: DFlashSpec) -> bool:
    return _has_markov(spec) and spec.markov.kind == RNN


SLOTS = (
    Slot("fc", "hidden, captured*target_hidden"),
    Slot("hidden_norm", "hidden"),
    Slot("{i}.input_layernorm", "hidden", layers="all"),
    Slot("{i}.q_proj", "heads*head_dim, hidden", layers="all"),
    Slot("{i}.k_proj", "kv_heads*head_dim, hidden", layers="all"),
    Slot("{i}.v_proj", "kv_heads*head_dim, hidden", layers="all"),
    Slot("{i}.q_proj.bias", "heads*head_dim", _has_bias, layers="all"),
    Slot("{i}.k_proj.bias", "kv_heads*head_dim", _has_bias, layers="all"),
    Slot("{i}.v_proj.bias", "kv_heads*head_dim", _has_bias, layers="all"),
    Slot("{i}.q_norm", "head_dim", layers="all"),
    Slot("{i}.k_norm", "head_dim", layers="all"),
    Slot("{i}.o_proj", "hidden, heads*head_dim", layers="all"),
    Slot("{i}.o_proj.bias", "hidden", _has_bias, layers="all"),
    Slot("{i}.post_attention_layernorm", "hidden", layers="all"),
    Slot("{i}.gate_proj", "intermediate, hidden", layers="all"),
    Slot("{i}.up_proj", "intermediate, hidden", layers="all"),
    Slot("{i}.down_proj", "hidden, intermediate", layers="all"),
    Slot("norm", "hidden"),
    # kconv writes zeros for a drafter that has none and needs one in engines.
    Slot("markov_w1", "vocab, rank", _has_markov, may_be_zero=True),
    Slot("markov_w2", "draft_vocab, rank", _has_markov, may_be_zero=True),
    Slot("markov_gate", "rank, hidden+rank", _is_gated),
    Slot("markov_gate.bias", "rank", _is_gated),
    Slot("markov_joint", "3*rank, 2*rank+hidden", _is_rnn),
    Slot("markov_joint.bias", "3*rank", _is_rnn),
    Slot("confidence", "1, hidden+confidence_rank", lambda s: s.confidence.present),
    Slot("confidence.bias", "1", lambda s: s.confidence.present),
    Slot("lm_head", "draft_vocab, hidden", absent_when=lambda s: _shares(s) and not _is_reduced(s)),
    Slot("embed_tokens", "vocab, hidden", absent_when=_shares),
    Slot("d2t", "draft_vocab", _is_reduced, dtype=INTEGER),
    Slot("t2d", "vocab", _is_reduced, absent_when=_is_reduced, dtype=("BOOL",)),  # follows from d2t
)


def dims(spec: DFlashSpec, layer: int = 0) -> dict[str, int]:
    """Return the numbers that the shape formulas use."""
    return {
        "hidden": spec.hidden,
        "target_hidden": spec.target_hidden,
        "captured": len(spec.captured),
        "intermediate": spec.intermediate,
        "vocab": spec.vocab,
        "draft_vocab": spec.draft_vocab,
        "heads": spec.attention.heads,
        "kv_heads": spec.attention.kv_heads,
        "head_dim": spec.attention.head_dim,
        "rank": spec.markov.rank,
        "confidence_rank": spec.markov.rank if spec.confidence.with_markov else 0,
    }


# Config keys

ANCHOR, MASK, WITH_MARKOV = "sample_from_anchor", "mask_token_id", "confidence_head_with_markov"
# Engines look at the top level, in `dflash_config`, or in both: what is written stands in both.
KEYS = (
    Key("hidden", ("hidden_size",), "count"),
    Key("target_hidden", ("target_hidden_size",), "count", lambda v: v["hidden"]),
    Key("intermediate", ("intermediate_size",), "count"),
    Key("layers", ("num_hidden_layers",), "depth"),
    Key("vocab", ("vocab_size",), "vocabulary"),
    Key("draft_vocab", ("draft_vocab_size",), "vocabulary", lambda v: v["lm_head_rows"] or v["vocab"]),
    Key("eps", ("rms_norm_eps",), "fraction"),
    Key("block", ("block_size",), "count", also=(f"{NESTED}.block_size",)),
    Key("mask", (MASK, f"{NESTED}.{MASK}"), "whole"),
    # ModelOpt calls it shift_label.
    Key("shift", (ANCHOR,), "flag", also=(f"{NESTED}.{ANCHOR}", f"{NESTED}.shift_label", "shift_label")),
    # SGLang reads the first only, ModelOpt writes the second only.
    Key("causal", ("is_causal", f"{NESTED}.causal"), "flag", off),
    # vLLM reads the first only, ModelOpt and SpecForge write the second only.
    Key("markov.rank", ("markov_rank", f"{NESTED}.markov_rank"), "whole", lambda _: 0),
    Key("markov.kind", ("markov_head_type", f"{NESTED}.markov_head_type"), "word", lambda _: VANILLA),
    Key(
        "confidence.present",
        ("enable_confidence_head", f"{NESTED}.use_confidence_head"),
        "flag",
        off,
        also=(f"{NESTED}.enable_confidence_head", "use_confidence_head"),
    ),
    Key(
        "confidence.with_markov",
        (WITH_MARKOV, f"{NESTED}.{WITH_MARKOV}"),
        "flag",
        # SGLang's and SpecForge's default; ModelOpt has no key, and no other kind. vLLM's default is false.
        lambda v: v["confidence.present"] and v["markov.rank"] > 0,
    ),
)
# What only a DSpark drafter's config states.
OF_DSPARK = tuple(name for key in KEYS if key.field.startswith(("markov.", "confidence.")) for name in key.names)

# Keys that change what a drafter computes, and the only values that kconv supports; any other value is refused.
# Those of MiMo's, Laguna's and Gemma's drafters are read here:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/qwen3_dflash.py
FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    CONFIG_KEY: (None,),
    "logit_scale": (1, None),
    "output_multiplier": (1, None),
    "final_logit_softcapping": (None,),
    "use_sliding_window": (False, None),
    "qkv_bias": (False, None),
    "is_neox_style": (True, None),
    "rope_is_neox_style": (True, None),
    "rotary_pct": (1, None),
    "rotary_emb_fraction": (1, None),
    "rotary_dim": (None,),
    "rotary_emb_base": (None,),
    "add_swa_attention_sink_bias": (False, None),
    "attention_sink_bias": (False, None),
    "dspark_config": (None,),
    "use_gemma_norm": (False, None),  # SGLang's norms
    "use_aux_hidden_state": (True, None),
    f"{NESTED}.use_aux_hidden_state": (True, None),
    # SpecForge's kinds of attention; the layers of a drafter of "gqa" or "mha" are the same here.
    f"{NESTED}.attention_mode": ("gqa", "mha", None),
    f"{NESTED}.attention_modes": (None,),
    f"{NESTED}.use_swa": (False, None),
    f"{NESTED}.attention_sink_bias": (False, None),
    f"{NESTED}.attention_value_scale": (1, None),
    f"{NESTED}.output_multiplier": (1, None),
    f"{NESTED}.final_logit_softcapping": (None,),
    f"{NESTED}.projector_type": ("dflash", "dspark", None),
    "projector_type": ("dflash", "dspark", None),
}
# The classes of these drafters. Others with such names, as Gemma's, have other norms, another RoPE or other targets.
CLASSES = frozenset(
    "DFlashDraftModel Qwen3DFlashDraftModel DFlashSpeculator DSparkDraftModel Qwen3DSparkModel DSparkSpeculator".split()
)
# vLLM's word for the opposite of `ANCHOR`.
BONUS = "dspark_bonus_anchor"

# Read elsewhere, or without effect: the target's embedding and lm_head are shared, tied or not.
ELSEWHERE = frozenset(
    (
        *"architectures model_type dtype torch_dtype rope_theta rope_scaling rope_parameters".split(),
        *"partial_rotary_factor max_position_embeddings sliding_window layer_types tie_word_embeddings".split(),
        *LISTS,
        CONVENTION,
        f"{NESTED}.{CONVENTION}",
        BONUS,
    )
)

# The mask's embedding of XiaomiMiMo's drafters, in a file of its own:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/qwen3_dflash.py
MASK_FILE = "mask_embedding.pt"


def _check_keys(config: Config, tensors: Names, problems: Problems) -> None:
    nested: Json = config.get(NESTED)
    if nested is not None and not isinstance(nested, Mapping):
        problems.add(ConfigInvalid, f"{NESTED} is not an object", in_config(NESTED), "Export it again.", "K012")
    for name, allowed in FIXED.items():
        code = "K198" if name == CONFIG_KEY else "K013"
        check_fixed(name, allowed, config, problems, what="DFlash drafters", code=code)
    samples = _stated_anchor(config)
    check_fixed(BONUS, (None,) if samples is None else (None, not samples), config, problems, what="DFlash drafters")
    for name in architectures(config).split():
        if any(word in name.lower() for word in ("dflash", "dspark")) and name not in CLASSES:
            problems.add(
                ConfigUnsupported,
                f"kconv does not know the class {name} of block drafters",
                in_config("architectures"),
                NOT_YET,
                "K013",
            )
    for place in ("", *(f"{place}." for place in PLACES)):
        check_fixed(
            f"{place}partial_rotary_factor",
            (1, None),
            config,
            problems,
            what="DFlash drafters",
            fix="Remove the key if it was copied from the target: trainers rotate whole heads, whatever it says.",
            code="K509",
        )
    check_full_attention(config, problems)
    kind = next(
        (v for n in ("markov_head_type", f"{NESTED}.markov_head_type") if (v := find(config, n)) is not ABSENT), ""
    )
    if kind not in ("", None, VANILLA, GATED, RNN):
        problems.add(
            ConfigUnsupported,
            f"markov_head_type is {kind!r}; kconv knows {VANILLA}, {GATED} and {RNN}",
            in_config("markov_head_type"),
            "Serve it with the engine that it was made for.",
            "K013",
        )
    mask, vocab = stated(config, MASK), config.get("vocab_size")
    if isinstance(mask, int) and isinstance(vocab, int) and mask >= vocab:
        problems.add(
            ConfigInvalid,
            f"{MASK} is {mask}, but the embedding has {vocab} rows",
            in_config(MASK),
            "Correct the key: the mask is a token of the target's own embedding.",
            "K503",
        )
    if stated(config, "block_size") == 1 and samples is False:
        problems.add(
            ConfigInvalid,
            "block_size is 1, and the anchor's slot predicts nothing: a block drafts no token",
            in_config("block_size"),
            "Correct the key.",
            "K012",
        )
    folders = {info.file.parent for info in tensors.values()}
    if any((folder / MASK_FILE).is_file() for folder in folders):
        problems.add(
            ConfigUnsupported,
            f"{MASK_FILE} holds an embedding of the mask token, which kconv would leave out",
            MASK_FILE,
            "Serve the folder as it is with vLLM, which reads that file.",
            "K504",
        )


def _room(tensors: Names, values: Config) -> int | None:
    fc, width = tensors.get("fc.weight") or tensors.get("context_proj.weight"), values.get("target_hidden")
    return min(max(fc.shape[1] // width, 1), MAX_LAYERS) if fc and len(fc.shape) == 2 and width else None


def _derived(values: Config, config: Config, tensors: Names) -> dict[str, Any]:
    """Return what a stored confidence head reads, if the config does not say it."""
    head = next((tensors[n] for n in ("confidence_head.proj.weight", "confidence_proj.weight") if n in tensors), None)
    if not values["confidence.present"] or head is None or stated(config, WITH_MARKOV) is not None:
        return {}
    return {"confidence.with_markov": head.shape[-1:] != (values["hidden"],)}


# What is one, and what is a relative


def said_to_be(config: Config) -> str:
    """Return what a config says that it is, in lower case: its class, its type, and the kind of its projector."""
    return f"{_named(config)} {stated(config, 'projector_type')}".lower()


def _named(config: Config) -> str:
    return f"{architectures(config)} {config.get('speculators_model_type')}".lower()


def _stated_anchor(config: Config) -> Any:
    shift = next(key for key in KEYS if key.field == "shift")
    return next((v for n in shift.names + shift.also if (v := find(config, n)) not in (ABSENT, None)), None)


def anchor(config: Config) -> dict[str, Any]:
    """Return whether a drafter samples from the anchor, as its class says it, if no key of its config does.

    DeepSpec gives its DFlash drafters, which do, the class of DSpark and a Markov head of rank 0:
    https://github.com/vllm-project/vllm/issues/49614
    """
    if _stated_anchor(config) is not None:
        return {}
    named, said = _named(config), said_to_be(config)
    if "dspark" in named or ("dspark" in said and "dflash" not in named):
        return {ANCHOR: True}
    # Such a projector and a Markov head belong to a drafter that samples from the anchor, DFlash's class to one that
    # does not: together they leave it open.
    return {ANCHOR: False} if "dflash" in said and "dspark" not in said and not stated(config, "markov_rank") else {}


# Of the backbone, outside the layers: in an Eagle3 head the norm of the states is inside the layer.
_NORM = re.compile(r"(?:^|\.)(?:hidden_norm|context_norm)\.weight$")
_IN_LAYER = re.compile(r"(?:^|\.)(?:midlayer|layers)\.")
SIGNS = ("fc.weight", "context_proj.weight")


def _looks_like(names: Names) -> bool:
    """Return whether tensor names are a block drafter's, under any prefix."""
    outside = [name for name in names if not _IN_LAYER.search(name)]
    return (
        any(name.endswith(SIGNS) for name in outside)
        and any(map(_NORM.search, outside))
        and any(name.endswith(".self_attn.k_norm.weight") for name in names)
    )


def _marks(config: Config, names: Names) -> bool:
    said = said_to_be(config)
    return isinstance(config.get(NESTED), Mapping) or "dflash" in said or "dspark" in said or _looks_like(names)


def _says(word: str) -> Callable[[Config, Names], bool]:
    return lambda config, _: word in said_to_be(config)


NOT_YET = "Serve it with the engine that it was made for; kconv does not support these."
RELATIVES = (
    Kind(
        "DFlash2",
        "a DFlash2 draft (with convolutions and a candidate selector), not a DFlash drafter",
        NOT_YET,
        lambda config, names: (
            "dflash2" in said_to_be(config)
            or any(".attention_conv." in name or name.startswith("candidate_selector.") for name in names)
        ),
    ),
    Kind(
        "Domino",
        "a Domino draft (a block drafter with a recurrent head), not a DFlash drafter",
        NOT_YET,
        lambda config, names: "domino" in said_to_be(config) or any(name.startswith("prefix_gru.") for name in names),
    ),
    Kind("XPress", "an XPress draft, not a DFlash drafter", NOT_YET, _says("xpress")),
    Kind("JetSpec", "a JetSpec draft, not a DFlash drafter", NOT_YET, _says("jetspec")),
    Kind(
        "DSpark of Kimi-K3",
        "a DSpark draft with latent attention, for Kimi-K3",
        NOT_YET,
        lambda config, names: (
            _marks(config, names)
            and ("kimik3" in said_to_be(config) or bool(config.get("kv_lora_rank")))
        ),
    ),
    Kind(
        "DSpark of DeepSeek-V4",
        "a DSpark draft of DeepSeek-V4, which is part of its target",
        "Serve the target with the engine's own dspark method; kconv has nothing to convert.",
        lambda config, names: "dspark_target_layer_ids" in config and any(name.startswith("mtp.") for name in names),
    ),
)  # fmt: skip


# What files leave open

FACTS = {
    fact.name: fact
    for fact in (
        captured_layers(guesses),
        rope_base(
            Candidate(DEFAULT_THETA, "the default of Qwen3Config"),
            Candidate(BASES[-1], "vLLM's default for this family"),
        ),
        Fact(
            MASK,
            Rule(
                "K501",
                "mask-token-unstated",
                "undecided",
                "The config does not state the mask token. SGLang takes the tokenizer's, or an untrained row.",
                fix="State mask_token_id as it was trained.",
                seen_in="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/speculative/dflash_utils.py",
                says_fix=True,
            ),
            hint="mask_token",
            line="block",
            path="mask",
            candidates=lambda config, hints, names: [
                Candidate(None, "the id of the tokenizer's mask token, if it was trained with one"),
                Candidate(config.get("vocab_size"), "what SGLang takes for it, if the tokenizer has no mask token"),
            ],
            stated=lambda config: stated(config, MASK) is not None,
            answer=A_TOKEN,
            words="mask token {}",
        ),
        Fact(
            ANCHOR,
            Rule(
                "K502",
                "anchor-unstated",
                "undecided",
                "Nothing says whether the anchor's slot predicts a token. Read otherwise, the drafts are one place"
                " off.",
                fix="State sample_from_anchor as it was trained.",
                seen_in="https://github.com/vllm-project/vllm/issues/56792",
                says_fix=True,
            ),
            hint="sample_from_anchor",
            line="block",
            path="shift",
            candidates=lambda config, hints, names: [
                Candidate(True, "DSpark: the anchor's slot predicts too"),
                Candidate(False, "DFlash: the anchor's slot predicts nothing"),
            ],
            stated=lambda config: _stated_anchor(config) is not None,
            answer=A_FLAG,
            words="sample from the anchor: {}",
        ),
        DEPTH,
    )
}


def _lines(spec: DFlashSpec) -> dict[str, str]:
    where = "the anchor's slot too" if spec.shift else "all but the anchor's slot"
    see = "causal" if spec.causal else "bidirectional"
    markov = f"Markov head {spec.markov.kind} of rank {spec.markov.rank}" if spec.markov.rank else "no Markov head"
    reads = " (with the Markov embedding)" if spec.confidence.with_markov else ""
    confidence = f"confidence head{reads}" if spec.confidence.present else "no confidence head"
    return {
        "variant": f"{'DSpark' if spec.is_dspark else 'DFlash'}: {markov}, {confidence}",
        "block": f"{spec.block} slots, {see}, mask token {spec.mask}; {where}: drafts up to {spec.places} tokens",
    }


def _rules() -> tuple[Rule[Any], ...]:
    from .dflash_rules import RULES

    return RULES


def _load(spec: DFlashSpec, weights: Mapping[str, Tensor]) -> BlockDrafter:
    from .dflash_forward import BlockDrafter

    return BlockDrafter(spec, weights)


DFLASH = Drafter(
    name="dflash",
    title="DFlash drafter",
    lead=lambda spec: f"A {'DSpark' if spec.is_dspark else 'DFlash'} drafter",
    spec=DFlashSpec,
    slots=SLOTS,
    dims=dims,
    marks=_marks,
    signs=SIGNS,
    captured=read_captured,
    room=_room,
    load=_load,
    keys=KEYS,
    attention={Gqa: GQA},
    parts={"markov": Markov, "confidence": Confidence},
    nested=NESTED,
    fixed=FIXED,
    derived=_derived,
    elsewhere=ELSEWHERE,
    check_keys=_check_keys,
    facts=FACTS,
    relatives=RELATIVES,
    looks_like=_looks_like,
    lines=_lines,
    rules=_rules,
    draft_tokens=lambda spec: spec.places,
    trainer="dflash",
)
