"""DFlash and DSpark drafters as trainers save them and engines read them.

Loaders: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/qwen3_dflash.py,
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/dflash.py, and the files that `VLLM_DSPARK`,
`TRT` and `TRT_DSPARK` link to. All three engines share the target's embedding and lm_head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from ..drafters.dflash import DFLASH, OF_DSPARK, VANILLA, DFlashSpec, Markov, anchor, said_to_be
from ..drafters.dflash_captured import CONVENTION, NESTED
from ..drafters.dflash_rules import last_layer
from ..drafters.keys import ABSENT, OUTPUTS, ConfigTable, find
from ..errors import ConfigInvalid
from ..rule import Found, Rule
from .base import Drafts
from .common import VLLM_SOURCE
from .config import write_keys
from .layout import Layout, Limit, Row, TargetFacts, TargetLimit
from .trainers import SPECULATORS_SOURCE

SGLANG_SOURCE = "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt"
# Files at one commit each, read in parts; comments name the functions.
VLLM_DSPARK = (
    "https://github.com/vllm-project/vllm/blob/0302ff40439493d0db2e3bbfd509211703375d08/"
    "vllm/model_executor/models/qwen3_dspark.py"
)
TRT = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/009d8fa431bd3de92245aab80f8b57dc70da1ac4/"
    "tensorrt_llm/_torch/models/modeling_dflash.py"
)
TRT_DSPARK = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/008b54fe0ce45214810a9e78853900f0f468de66/"
    "tensorrt_llm/_torch/models/modeling_dspark.py"
)
SPECULATORS_CORE = (
    "https://github.com/vllm-project/speculators/blob/021e21b9d52eff24632b9be78e09206ee025ebc8/"
    "src/speculators/models/dflash/core.py"
)
READ_IN_PARTS = (VLLM_DSPARK, TRT, TRT_DSPARK, SPECULATORS_CORE)
IDS = "target_layer_ids"

# Tensors

LAYERS = (
    *(
        Row(f"layers.{{i}}.{name}.weight", (f"{{i}}.{name}",))
        for name in ("input_layernorm", "post_attention_layernorm")
    ),
    *(
        Row(f"layers.{{i}}.self_attn.{part}.{kind}", (f"{{i}}.{part}" + ("" if kind == "weight" else ".bias"),))
        for part in ("q_proj", "k_proj", "v_proj", "o_proj")
        for kind in ("weight", "bias")
    ),
    *(Row(f"layers.{{i}}.self_attn.{part}.weight", (f"{{i}}.{part}",)) for part in ("q_norm", "k_norm")),
    *(Row(f"layers.{{i}}.mlp.{part}.weight", (f"{{i}}.{part}",)) for part in ("gate_proj", "up_proj", "down_proj")),
)


def _rows(fc: str = "fc", hidden_norm: str = "hidden_norm", norm: str = "norm") -> tuple[Row, ...]:
    """Return the rows of a drafter's backbone, under a maker's names of the three tensors outside the layers."""
    return (
        Row(f"{fc}.weight", ("fc",)),
        Row(f"{hidden_norm}.weight", ("hidden_norm",)),
        *LAYERS,
        Row(f"{norm}.weight", ("norm",)),
        Row("lm_head.weight", ("lm_head",)),
        Row("embed_tokens.weight", ("embed_tokens",)),
        Row("d2t", ("d2t",)),
        Row("t2d", ("t2d",)),
    )


def _heads(markov: str, confidence: str) -> tuple[Row, ...]:
    """Return the rows of the heads of DSpark."""
    return (
        Row(f"{markov}markov_w1.weight", ("markov_w1",)),
        Row(f"{markov}markov_w2.weight", ("markov_w2",)),
        *(
            Row(f"{name}.{kind}", (slot + ("" if kind == "weight" else ".bias"),))
            for name, slot in (
                (f"{markov}gate_proj", "markov_gate"),
                (f"{markov}joint_proj", "markov_joint"),
                (confidence, "confidence"),
            )
            for kind in ("weight", "bias")
        ),
    )


ROWS = (*_rows(), *_heads("markov_head.", "confidence_head.proj"))
FLAT = _heads("", "confidence_proj")

# What is written


def _config(spec: DFlashSpec) -> dict[str, Any]:
    """Return the config in which each engine finds every key where it looks; layouts add the captured layers."""
    config = write_keys(spec)
    nested: dict[str, Any] = config[NESTED]
    if spec.is_dspark:
        nested |= {"projector_type": "dspark", "shift_label": spec.shift}
    else:
        for path in OF_DSPARK:
            (nested if path.startswith(NESTED) else config).pop(path.removeprefix(f"{NESTED}."))
    # vLLM decides by the class, and knows no DSpark by the name DFlashDraftModel.
    return config | {
        "architectures": ["Qwen3DSparkModel" if spec.is_dspark else "DFlashDraftModel"],
        "model_type": "qwen3",
        "layer_types": ["full_attention"] * spec.layers,
    }


def _listed(spec: DFlashSpec, *places: str, states: Iterable[str] = ()) -> dict[str, Any]:
    """Return a config that lists the captured layers in these places, and states in some of them what is listed."""
    config, ids = _config(spec), list(spec.captured)
    for place in places:
        (config[NESTED] if place == NESTED else config)[IDS] = ids
    for place in states:
        (config[NESTED] if place == NESTED else config)[CONVENTION] = OUTPUTS
    return config


def _for_vllm(spec: DFlashSpec) -> dict[str, Any]:
    return _listed(spec, "", NESTED, states=("",))


def _for_sglang(spec: DFlashSpec) -> dict[str, Any]:
    return _listed(spec, NESTED, states=(NESTED,))


def _for_trtllm(spec: DFlashSpec) -> dict[str, Any]:
    config = _listed(spec, NESTED, states=(NESTED,))
    del config["is_causal"]
    return config


def _portable(spec: DFlashSpec) -> dict[str, Any]:
    return _listed(spec, "", NESTED, states=("", NESTED))


def _states(*places: str) -> Callable[[Mapping[str, Any], Iterable[str]], bool]:
    """Return the mark of a layout that kconv writes: where its config states what the captured layers count."""

    def told_by(config: Mapping[str, Any], names: Iterable[str]) -> bool:
        paths = {"": CONVENTION, NESTED: f"{NESTED}.{CONVENTION}"}
        return all((find(config, path) == OUTPUTS) is (place in places) for place, path in paths.items())

    return told_by


def _with_zeros(spec: DFlashSpec) -> DFlashSpec:
    """Return what engines serve for a drafter that samples from the anchor without a Markov head: DSpark with zeros.

    No engine serves it as it is: vLLM's and TensorRT-LLM's DFlash does not sample from the anchor, and SGLang's DSpark
    requires a rank above 0. A Markov head of zeros adds 0 to each logit.
    """
    return replace(spec, markov=Markov(1, VANILLA)) if spec.shift and not spec.markov.rank else spec


NO_MARKOV = Limit(
    "K520",
    "dspark-without-markov",
    lambda s: s.shift and not s.markov.rank,
    "It samples from the anchor and has no Markov head. Engines serve such a drafter, DeepSpec's DFlash, one place off:"
    " fewer than 1% of its drafts are accepted",
    "Convert it with kconv, which adds a Markov head of zeros; it drafts the same.",
    f"{VLLM_SOURCE}/v1/worker/gpu/spec_decode/dflash/speculator.py#L80-L85",
)


def _runs_past_block(spec: DFlashSpec) -> bool:
    """Return whether SGLang fills one slot more than the drafter's block has: there a block's size is its drafts'."""
    return spec.markov.rank > 0 and not spec.shift


SGLANG_SHARES = f"{SGLANG_SOURCE}/models/dflash.py#L944-L946"


def _own_vocabulary(id_: str, engine: str, name: str, source: str) -> Limit:
    return Limit(
        id_,
        f"{name}-dflash-own-vocabulary",
        lambda s: s.draft_vocab != s.vocab or s.hidden != s.target_hidden,
        f"{engine} drafts with the target's embedding and lm_head, so with its width and its whole vocabulary",
        "Serve this drafter with vLLM.",
        source,
    )


def _shared(engine: str, source: str) -> dict[str, str]:
    return {
        "embed_tokens": f"{engine} uses the target's embedding instead of the drafter's own ({source})",
        "lm_head": f"{engine} uses the target's lm_head instead of the drafter's own ({source})",
    }


DFLASH_VLLM = Layout(
    name="dflash-vllm",
    called="vllm",
    drafter=DFLASH,
    engine="vLLM 0.32 or newer (DFlashDraftModel, Qwen3DSparkModel)",
    rows=ROWS,
    told_by=_states(""),
    write_config=_for_vllm,
    becomes=_with_zeros,
    limits=(
        NO_MARKOV,
        Limit(
            "K521",
            "vllm-markov-kind",
            lambda s: s.markov.rank > 0 and s.markov.kind != VANILLA,
            "vLLM has no place for the gate of a gated or recurrent Markov head, and refuses it",
            "Serve this drafter with SGLang.",
            VLLM_DSPARK,  # Qwen3DSparkModel
        ),
    ),
)

LAST_LAYER = (
    TargetLimit(
        lambda _spec, _target: False,
        "SGLang captures before a layer runs, so it never captures the output of the last layer",
        "Serve this drafter with vLLM.",
        f"{SGLANG_SOURCE}/models/qwen3.py#L793-L804",  # set_dflash_layers_to_capture
        "K537",
        at_depth=lambda spec, depth: depth == spec.captured[-1] + 1,
    ),
)

DFLASH_SGLANG = Layout(
    name="dflash-sglang",
    called="sglang",
    drafter=DFLASH,
    engine="SGLang 0.5.23 or newer (DFLASH, DSPARK)",
    rows=ROWS,
    told_by=lambda config, names: _states(NESTED)(config, names) and "is_causal" in config,
    write_config=_for_sglang,
    becomes=_with_zeros,
    replaces=_shared("SGLang", SGLANG_SHARES),
    target_limits=LAST_LAYER,
    limits=(
        NO_MARKOV,
        _own_vocabulary("K522", "SGLang", "sglang", SGLANG_SHARES),
        Limit(
            "K528",
            "sglang-markov-without-anchor",
            _runs_past_block,
            "SGLang takes block_size as the number of drafts: beside a Markov head it fills one slot more if the anchor"
            " predicts nothing, so one more than this drafter was trained with",
            "Serve this drafter with vLLM.",
            f"{SGLANG_SOURCE}/speculative/dspark_components/dspark_worker_v2.py#L266-L269",
        ),
    ),
)

DFLASH_TRTLLM = Layout(
    name="dflash-trtllm",
    called="trtllm",
    drafter=DFLASH,
    engine="TensorRT-LLM 1.4 (DFlash, DSpark)",
    # It reads ModelOpt's flat names too (_DSPARK_HEAD_WEIGHT_ALIASES in `TRT_DSPARK`).
    rows=(*ROWS, *(replace(row, role="instead") for row in FLAT if row.name.startswith(("markov", "confidence")))),
    told_by=_states(NESTED),
    write_config=_for_trtllm,
    becomes=_with_zeros,
    replaces=_shared("TensorRT-LLM", TRT),
    limits=(
        NO_MARKOV,
        _own_vocabulary("K523", "TensorRT-LLM", "trtllm", TRT),  # load_weights_from_target_model
        Limit(
            "K524",
            "trtllm-markov-kind",
            lambda s: s.markov.rank > 0 and s.markov.kind != VANILLA,
            "TensorRT-LLM reads only a plain Markov head, and refuses a gated or recurrent one",
            "Serve this drafter with SGLang.",
            TRT_DSPARK,  # GQADSparkForCausalLM
        ),
        Limit(
            "K525",
            "trtllm-dflash-causal",
            lambda s: s.causal,
            "TensorRT-LLM lets each slot of a block see all others",
            "Serve this drafter with vLLM or SGLang.",
            TRT,  # _get_attention_mask_args
        ),
    ),
)

DFLASH_PORTABLE = Layout(
    name="dflash-portable",
    called="portable",
    drafter=DFLASH,
    engine="TensorRT-LLM, vLLM and SGLang from one folder",
    rows=ROWS,
    told_by=_states("", NESTED),
    write_config=_portable,
    becomes=_with_zeros,
    replaces={**DFLASH_TRTLLM.replaces, **DFLASH_SGLANG.replaces},
    target_limits=LAST_LAYER,
    limits=tuple(dict.fromkeys(DFLASH_TRTLLM.limits + DFLASH_VLLM.limits + DFLASH_SGLANG.limits)),
    written_for=("trtllm", "vllm", "sglang"),
)

# Trainers


DSPARK_MODELOPT = Layout(
    name="dspark-modelopt",
    drafter=DFLASH,
    engine="ModelOpt (DSpark, with flat names)",
    rows=(*_rows(), *FLAT),
    told_by=lambda config, names: "markov_w1.weight" in names,
    config=ConfigTable(adapt=anchor),
)

# Here num_target_layers is the number of captured layers.
DFLASH_TORCHSPEC = Layout(
    name="dflash-torchspec",
    drafter=DFLASH,
    engine="TorchSpec",
    rows=(*_rows("context_proj", "context_norm", "final_norm"), *_heads("markov_head.", "confidence_head.proj")),
    told_by=lambda config, names: "context_proj.weight" in names,
    config=ConfigTable(adapt=anchor, ballast=frozenset(("num_target_layers",))),
)

# https://github.com/deepseek-ai/DeepSpec/blob/afdfa7c9382a3341a3e6f17756dd816da79f132c/deepspec/modeling/dspark/qwen3/config.py
DSPARK_DEEPSPEC = Layout(
    name="dspark-deepspec",
    drafter=DFLASH,
    engine="DeepSpec (DSpark, and its DFlash, which samples from the anchor)",
    rows=ROWS,
    told_by=lambda config, names: NESTED not in config and "qwen3dsparkmodel" in said_to_be(config),
    config=ConfigTable(adapt=anchor, ballast=frozenset(("num_anchors", "target_model_name_or_path"))),
)

# The keys of speculators' config beside those of its layers:
# https://github.com/vllm-project/speculators/blob/v0.9.0/src/speculators/models/dspark/config.py
OF_THE_SPECULATOR = (
    "block_size", "mask_token_id", "sample_from_anchor", "draft_vocab_size", "target_hidden_size",
    *(path for path in OF_DSPARK if not path.startswith(NESTED)),
)  # fmt: skip
NON_CAUSAL = "sliding_window_non_causal"


def _speculators_config(spec: DFlashSpec, target: TargetFacts | None = None) -> dict[str, Any]:
    config = _config(spec)
    layer = {key: value for key, value in config.items() if key not in (*OF_THE_SPECULATOR, NESTED, "is_causal")}
    kind = "dspark" if spec.is_dspark else "dflash"
    verifier = {"architectures": [target.architecture] if target and target.architecture else []}
    method = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": spec.places,
        "verifier_accept_k": 1,
    }
    return {key: config[key] for key in OF_THE_SPECULATOR if key in config} | {
        "architectures": ["DSparkSpeculator" if spec.is_dspark else "DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [i + 1 for i in spec.captured],
        # vLLM makes every layer causal if it is false.
        NON_CAUSAL: True,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier | {"name_or_path": target.name if target else None},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "torch_dtype": layer["torch_dtype"],
        "transformer_layer_config": {key: value for key, value in layer.items() if key != "architectures"},
    }


DFLASH_SPECULATORS = Layout(
    name="dflash-speculators",
    called="speculators",
    drafter=DFLASH,
    engine="the speculators library (DFlash, DSpark)",
    rows=ROWS,
    told_by=lambda config, names: "speculators_model_type" in config or "transformer_layer_config" in config,
    write_config=_speculators_config,
    write_beside=_speculators_config,
    target_limits=(
        TargetLimit(
            lambda spec, target: target is None,
            "the speculators library loads the target that a drafter's config names, and none is known",
            "Pass --target: the model that it drafts for.",
            SPECULATORS_CORE,  # load_verifier_weights
        ),
    ),
    limits=(
        Limit(
            "K526",
            "speculators-dflash-causal",
            lambda s: s.causal,
            "in the speculators library each slot of a block sees all others",
            "Convert the drafter for an engine (kconv to-vllm).",
            f"{SPECULATORS_SOURCE}/models/dflash/config.py#L66-L71",
        ),
        Limit(
            "K527",
            "speculators-dflash-target-width",
            lambda s: s.target_hidden != s.hidden,
            "the speculators library's fc requires states as wide as the drafter",
            "Convert the drafter for an engine (kconv to-vllm).",
            SPECULATORS_CORE,  # DFlashDraftModel.__init__
        ),
    ),
    config=ConfigTable(
        nested="transformer_layer_config",
        adapt=anchor,
        ballast=frozenset(
            ("speculators_config", "speculators_model_type", "speculators_version", NON_CAUSAL, "num_anchors")
        ),
    ),
    ignored={"verifier_*.weight": "it copies the target's, for training"},
    written_for=("vllm",),
)

DFLASH_PLAIN = Layout(
    name="dflash",
    drafter=DFLASH,
    engine="z-lab, SpecForge, ModelOpt (DFlash) and NeMo Automodel",
    rows=(
        *ROWS,
        # Beside nested names of the Markov head, which NVIDIA's drafters have.
        *(replace(row, role="instead") for row in FLAT if row.name.startswith("confidence")),
    ),
    told_by=lambda config, names: True,
    config=ConfigTable(adapt=anchor),
)

# How each engine is told about a drafter


def _told(drafts: Drafts, whole: bool = False) -> DFlashSpec:
    """Return what a drafter is, if an engine can draft with it what is asked for.

    Args:
        whole: whether blocks of this engine draft as many tokens as they can, no fewer.

    Raises:
        ConfigInvalid: it cannot.
    """
    spec, steps = cast(DFlashSpec, drafts.spec), drafts.draft_tokens
    if steps > spec.places or (whole and steps < spec.places):
        raise ConfigInvalid(
            f"a block of {spec.block} slots drafts {spec.places} tokens, not {steps}",
            where="--draft-tokens",
            fix=f"Pass --draft-tokens {spec.places}{'' if whole else ' or less'}.",
        )
    if drafts.branches > 1 or drafts.nodes:
        raise ConfigInvalid("a block is a chain, not a tree", where="--tree", fix="Leave out --tree.")
    return spec


def in_vllm(drafts: Drafts) -> str:
    """Return vLLM's method, by which it chooses what a class of config.json means."""
    return V2_METHOD if _told(drafts).is_dspark else "dflash"


# Only vLLM's V2 runner has it, and that needs Triton, which has no backend for CPUs:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/vllm.py#L2978-L2979
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/vllm.py#L3189-L3190
V2_METHOD = "dspark"


SGLANG_DFLASH, SGLANG_DSPARK = "DFLASH", "DSPARK"


def in_sglang(drafts: Drafts) -> dict[str, str]:
    """Return SGLang's options. Its verify window holds the anchor and the drafts; DSPARK takes no smaller one."""
    spec = _told(drafts, whole=cast(DFlashSpec, drafts.spec).is_dspark)
    return {
        "--speculative-algorithm": SGLANG_DSPARK if spec.is_dspark else SGLANG_DFLASH,
        WINDOW: str(drafts.draft_tokens + 1),
    }


def in_trtllm(drafts: Drafts) -> dict[str, str]:
    """Return TensorRT-LLM's type of decoding; it reads layers, mask token and block in the drafter's config.json.

    https://nvidia.github.io/TensorRT-LLM/1.4.0rc4/llm-api/reference/DFlashDecodingConfig.html
    A block of DSpark is drafted whole (DSparkWorker._lazy_init):
    https://github.com/NVIDIA/TensorRT-LLM/blob/005c932d59e089c9dd9598f68eabd649eda7258e/tensorrt_llm/_torch/speculative/dspark.py
    """
    spec = _told(drafts, whole=cast(DFlashSpec, drafts.spec).is_dspark)
    return {"decoding_type": "DSpark" if spec.is_dspark else "DFlash"}


# What each engine does with these files


def _of_family(id_: str, name: str, severity: Any, sentence: str, fix: str, seen_in: str, check: Any) -> Rule[Any]:
    return Rule(
        id_, name, severity, sentence, fix, check, seen_in=seen_in, drafters=(DFLASH.name,), subject=DFLASH.title
    )


def _is_speculators(head: Any) -> bool:
    return head.layout is DFLASH_SPECULATORS


def _anchor_by_default(head: Any) -> Iterator[Found]:
    if _is_speculators(head) and head.spec and head.spec.shift and "sample_from_anchor" not in head.config:
        yield Found("config.json: sample_from_anchor", "absent: the speculators library takes true here, vLLM false")


def _causal_by_default(head: Any) -> Iterator[Found]:
    stated = head.config.get(NON_CAUSAL, True)
    if _is_speculators(head) and "dflash" in said_to_be(head.config) and not stated:
        yield Found(f"config.json: {NON_CAUSAL}", f"{json.dumps(stated)}, so vLLM lets no slot see a later one")


def _anchor_unread(*paths: str, default: str) -> Callable[[Any], Iterator[Found]]:
    """Return the check of a drafter that does not sample from the anchor, and must say so where its engine looks."""

    def check(head: Any) -> Iterator[Found]:
        # vLLM reads the speculators library's drafters in another way, in which false is the default.
        if head.spec is None or _is_speculators(head) or not _runs_past_block(head.spec):
            return
        if all(find(head.config, path) is ABSENT for path in paths):
            yield Found(f"config.json: {paths[0]}", f"absent, which means true in {default}; the drafter's is false")

    return check


def _not_at_top(asked: Callable[[DFlashSpec], Mapping[str, bool]]) -> Callable[[Any], Iterator[Found]]:
    """Return the check that keys are at the top level; `asked` says which ones a drafter needs there."""

    def check(head: Any) -> Iterator[Found]:
        for key, has in asked(head.spec).items() if head.spec else ():
            if has and key not in head.config:
                yield Found(f"config.json: {key}", "not at the top level, and read nowhere else")

    return check


def _read_by_vllm(spec: DFlashSpec) -> dict[str, bool]:
    return {
        "markov_rank": spec.markov.rank > 0,
        "enable_confidence_head": spec.confidence.present,
        "confidence_head_with_markov": spec.confidence.with_markov,
    }


def _read_by_sglang(spec: DFlashSpec) -> dict[str, bool]:
    # The default of the last is true.
    hidden_only = spec.confidence.present and not spec.confidence.with_markov
    return {
        "markov_rank": spec.markov.rank > 0,
        "markov_head_type": spec.markov.rank > 0 and spec.markov.kind != VANILLA,
        "confidence_head_with_markov": spec.markov.rank > 0 and hidden_only,
    }


def _causal_nested(head: Any) -> Iterator[Found]:
    if head.spec and head.spec.causal and "is_causal" not in head.config:
        yield Found("config.json: is_causal", f"only {NESTED}.causal is true, which SGLang does not read")


def _kind_unstated(head: Any) -> Iterator[Found]:
    if head.spec and head.spec.markov.rank and "markov_head_type" not in {*head.flat, *head.flat.get(NESTED, {})}:
        yield Found("config.json: markov_head_type", "absent")


def _lists_not_nested(head: Any) -> Iterator[Found]:
    if head.captured and find(head.config, f"{NESTED}.{IDS}") != list(head.captured):
        yield Found(
            f"config.json: {NESTED}.{IDS}", "absent, and TensorRT-LLM looks for the captured layers nowhere else"
        )


def _drafts(option: str, slots: Callable[[DFlashSpec], int], words: str) -> Callable[[Any], Iterator[Found]]:
    def check(head: Any) -> Iterator[Found]:
        if head.spec and not (option == WINDOW and _runs_past_block(head.spec)):
            yield Found("config.json: block_size", f"{option} {slots(head.spec)} {words}")

    return check


WINDOW = "--speculative-num-draft-tokens"
CONVERT = "Convert the drafter (kconv to-vllm, to-sglang, to-trtllm or to-portable)."
VLLM_RULES = (
    _of_family(
        "K530", "speculators-anchor-default", "error",
        "The speculators library lets a DSpark drafter sample from the anchor if its config does not say; vLLM does"
        " not.",
        CONVERT, "https://github.com/vllm-project/vllm/issues/56792", _anchor_by_default,
    ),
    _of_family(
        "K531", "speculators-causal-default", "error",
        "vLLM makes every layer of a DFlash drafter of the speculators library causal if a key about sliding windows is"
        " false. The library trains layers without a window bidirectional, whatever it says.",
        CONVERT, "https://github.com/vllm-project/vllm/issues/56692", _causal_by_default,
    ),
    _of_family(
        "K532", "dspark-keys-nested", "error",
        "vLLM reads the keys of DSpark's heads at the top level only. It fails, or builds no such head.",
        CONVERT, VLLM_DSPARK, _not_at_top(_read_by_vllm),
    ),
    _of_family(
        "K534", "vllm-anchor-default", "error",
        "vLLM looks for sample_from_anchor at the top level alone, and takes true if it is not there. A DSpark drafter"
        " that does not sample from the anchor is served one place off.",
        CONVERT, f"{VLLM_SOURCE}/v1/worker/gpu/spec_decode/dspark/speculator.py#L49-L55",
        _anchor_unread("sample_from_anchor", default="vLLM"),
    ),
    _of_family(
        "K533", "vllm-drafts-by-flag", "note",
        "How many tokens a block drafts is a launch option of vLLM.",
        "Pass it in --speculative-config. Fewer are possible; more are not.",
        f"{VLLM_SOURCE}/config/speculative.py",
        _drafts("num_speculative_tokens", lambda spec: spec.places, "drafts the whole block"),
    ),
)  # fmt: skip
SGLANG_RULES = (
    _of_family(
        "K535", "sglang-causal-nested", "error",
        "SGLang does not read whether slots see later ones from dflash_config. It serves a causal drafter as a"
        " bidirectional one.",
        CONVERT, f"{SGLANG_SOURCE}/models/dflash.py", _causal_nested,
    ),
    _of_family(
        "K536", "sglang-markov-kind-unstated", "error",
        "SGLang refuses a Markov head whose kind is not stated.",
        CONVERT, f"{SGLANG_SOURCE}/speculative/dspark_components/dspark_config.py", _kind_unstated,
    ),
    _of_family(
        "K541", "sglang-dspark-keys-nested", "error",
        "SGLang builds the heads of DSpark from the keys at the top level alone. It fails, or builds other heads.",
        CONVERT, f"{SGLANG_SOURCE}/models/dspark.py#L385-L405", _not_at_top(_read_by_sglang),
    ),
    _of_family(
        "K537", "sglang-dflash-last-layer", "error",
        "SGLang captures before a layer runs, so it never captures the last one's output.",
        "Serve it with vLLM.", f"{SGLANG_SOURCE}/models/qwen3.py#L793-L804", last_layer,
    ),
    _of_family(
        "K538", "sglang-drafts-by-flag", "note",
        "The size of SGLang's verify window is a launch option. SGLang refuses another than the drafter's for DSPARK.",
        "Pass it beside --speculative-algorithm DFLASH or DSPARK.",
        f"{SGLANG_SOURCE}/arg_groups/speculative_hook.py#L824-L834",
        _drafts(WINDOW, lambda spec: spec.places + 1, "is its verify window"),
    ),
)  # fmt: skip
TRTLLM_RULES = (
    _of_family(
        "K539", "trtllm-layers-not-nested", "error",
        "TensorRT-LLM looks for the captured layers in dflash_config.target_layer_ids alone.",
        CONVERT, TRT, _lists_not_nested,
    ),
    _of_family(
        "K540", "trtllm-anchor-default", "error",
        "TensorRT-LLM knows sample_from_anchor by the name shift_label alone, and takes true if it is not there. A"
        " DSpark drafter that does not sample from the anchor is served one place off.",
        CONVERT, TRT_DSPARK,  # GQADSparkForCausalLM
        _anchor_unread(f"{NESTED}.shift_label", "shift_label", default="TensorRT-LLM"),
    ),
)  # fmt: skip
