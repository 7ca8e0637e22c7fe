"""TensorRT-LLM: its layout of an Eagle3 head, and everything else that kconv knows about it.

Loader: Eagle3ForCausalLM.load_weights, lines 943 to 987 of the file that `MODEL` links to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from ..drafters.base import Spec
from ..drafters.eagle3 import EAGLE3, is_parallel
from ..drafters.keys import CONVENTION, IDS, OUTPUTS
from ..drafters.spec import Gqa, HeadSpec
from ..drafters.yarn import cos_sin_factor, m
from ..errors import CountersMissing, DefinitionsMixed
from ..escape import Word, command, terminal
from ..rule import Found, Rule
from . import dflash
from .base import Capture, Deployment, Drafts, Engine, Launch, NullKey, Sampling, Taken
from .checks import HeadFacts, first_architecture
from .common import (
    HIDDEN,
    INPUT,
    MIDLAYER,
    MIDLAYERS,
    MLA_ROPE,
    beside,
    eagle_config,
    head_rows,
    instead,
    is_mla,
    later_norm,
    norms_qk,
    yarn_of,
)
from .config import identity, write_keys
from .counters import SAY_K, Counters, Counts, Totals, totals
from .layout import Layout, Limit
from .vllm import FC_WIDTH, built_layers, default_theta

# Files at one commit each, between 1.3 and 1.4; comments name the lines.
MODEL = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/00679c66c3e38f6d2651ad0a5bef0f94d862e36c/"
    "tensorrt_llm/_torch/models/modeling_speculative.py"
)
ROPE = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/b386a7fff981548964f58eb5f7e2a8e015c661bb/"
    "tensorrt_llm/_torch/attention/backends/interface.py"
)
MLA_MODULE = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/047098b74c51f488abcfcd72f7d4a988a56442f6/"
    "tensorrt_llm/_torch/attention/mla.py"
)
# The keys that TensorRT-LLM reads in eagle_config, with the values that ModelOpt's exporter writes.
FLAGS = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
}

SOURCE = "https://github.com/NVIDIA/TensorRT-LLM/blob"


def _captured_in(commit: str, file: str, *model_types: str) -> Capture:
    """Return how decoder layers that call `maybe_capture_hidden_states` after the MLP capture: each output."""
    return Capture(model_types, f"{SOURCE}/{commit}/tensorrt_llm/_torch/models/{file}", lambda captured, _: captured)


# Targets whose class is derived from SpecDecOneEngineForCausalLM and whose decoder layers capture; each file at a
# commit between 1.3 and 1.4, except those of Qwen3 and gpt-oss, which are older. Those of Qwen2 and MiniMax-M2 were
# not derived from it then.
CAPTURES = (
    _captured_in("047098b74c51f488abcfcd72f7d4a988a56442f6", "modeling_llama.py", "llama", "llama4_text"),
    _captured_in("010bb95fbad3c678792a9edf659970299a1a320b", "modeling_qwen3.py", "qwen3"),
    _captured_in("03441af14b6675ec38275167cfd514595defb505", "modeling_qwen3_moe.py", "qwen3_moe"),
    _captured_in("050b6cb92871a4ed73486c5e5a573d4198d1a6d9", "modeling_gpt_oss.py", "gpt_oss"),
    # modeling_kimi_k25.py wraps it.
    _captured_in(
        "047098b74c51f488abcfcd72f7d4a988a56442f6", "modeling_deepseekv3.py", "deepseek_v3", "deepseek_v32", "kimi_k2"
    ),
)
EMBEDDING = {"embed_tokens": f"TensorRT-LLM uses the target's embedding instead of the head's own ({MODEL}#L793-L811)"}


def _write(spec: HeadSpec) -> dict[str, Any]:
    config = identity(spec) | write_keys(spec)
    config["eagle_config"] |= {
        IDS: list(spec.captured),
        CONVENTION: OUTPUTS,
        **FLAGS,
    }
    return config


def _scales_otherwise(spec: HeadSpec) -> bool:
    """Return whether TensorRT-LLM scales cos and sin of a GQA head by a different factor than transformers and vLLM.

    It reads every YaRN as DeepSeek's, `m(mscale) / m(mscale_all_dim)` with defaults of 1 and 0, and ignores
    `attention_factor`.
    """
    yarn = yarn_of(spec)
    if yarn is None or not isinstance(spec.attention, Gqa):
        return False
    factor = m(yarn, 1.0 if yarn.mscale is None else yarn.mscale) / m(yarn, yarn.mscale_all_dim or 0.0)
    return factor != cos_sin_factor(spec.rope, spec.attention)


TRTLLM = Layout(
    name="trtllm",
    drafter=EAGLE3,
    engine="TensorRT-LLM (PyTorch backend), one-model Eagle3",
    rows=head_rows("layers.{i}", later=(HIDDEN,)) + instead(MIDLAYER, MIDLAYERS) + beside(later_norm(INPUT)),
    told_by=lambda config, names: (
        CONVENTION in eagle_config(config)
        or (
            "eagle_config" in config
            and "layers.1.hidden_norm.weight" in names
            and "layers.1.input_layernorm.weight" not in names
        )
    ),
    write_config=_write,
    replaces=EMBEDDING,
    limits=(
        *MLA_ROPE,
        Limit(
            "K355",
            "trtllm-parallel",
            is_parallel,
            "TensorRT-LLM's Eagle3 has no parallel drafting: it skips mask_hidden, and drafts a token a step",
            "Serve this head with vLLM.",
            f"{MODEL}#L943-L987",
        ),
        Limit(
            "K346",
            "trtllm-qk-norm",
            norms_qk,
            "TensorRT-LLM's Eagle3 attention does not support query and key norms, and its loader silently skips them",
            "Serve this head with vLLM.",
            f"{MODEL}#L943-L987",
        ),
        Limit(
            "K340",
            "trtllm-norm-before-residual",
            lambda s: s.norms.before_residual,
            "TensorRT-LLM always takes the residual before hidden_norm and ignores norm_before_residual",
            "Serve this head with vLLM.",
            f"{MODEL}#L654-L656",
        ),
        Limit(
            "K341",
            "trtllm-one-captured-layer",
            lambda s: len(s.captured) == 1,
            "TensorRT-LLM builds no fc for a single captured layer",
            "Serve this head with vLLM.",
            f"{MODEL}#L719-L726",
        ),
        Limit(
            "K345",
            "trtllm-skips-fc",
            lambda s: len(s.captured) * s.target_hidden == s.hidden,
            "TensorRT-LLM skips fc if its input is as wide as the head",
            "Serve this head with vLLM.",
            f"{MODEL}#L1007-L1020",
        ),
        Limit(
            "K342",
            "trtllm-mla-reduced-vocabulary",
            lambda s: is_mla(s) and s.draft_vocab != s.vocab,
            "TensorRT-LLM cannot load an MLA head with a reduced vocabulary",
            "Expand it first with kconv vocab HEAD --expand OUT, and convert OUT. Or serve this head with vLLM.",
            # With d2t on the model itself (#L773-L778), the loader looks for the layer under names that no exporter
            # writes.
            f"{MODEL}#L971-L979",
        ),
        Limit(
            "K347",
            "trtllm-mla-dtype",
            lambda s: is_mla(s) and s.dtype != "BF16",
            "TensorRT-LLM loads an MLA head that is not in bfloat16, and fails at its second draft step",
            "Convert it with --dtype bfloat16 (before --attention, if you use both), or for vLLM or SGLang.",
            # In forward_absorption_generation. The parts of kv_b_proj have the config's dtype, unless they are FP8 in
            # blocks, for which create_weights asserts bfloat16 on Blackwell.
            MLA_MODULE,
        ),
        Limit(
            "K343",
            "trtllm-yarn",
            _scales_otherwise,
            "TensorRT-LLM reads YaRN's attention_factor, mscale or mscale_all_dim differently from the trainer",
            "Serve this head with vLLM.",
            f"{ROPE}#L750-L751",
        ),
        Limit(
            "K344",
            "trtllm-two-norms-before-fc",
            lambda s: s.norms.before_fc and s.norms.fc,
            "TensorRT-LLM drops the norm before fc (norm_before_fc) if there is one for each state (fc_norm)",
            "Serve this head with vLLM.",
            f"{MODEL}#L1009-L1018",
        ),
    ),
)

YAML = "serve-trtllm.yaml"
# NVIDIA's own deployment test serves its Kimi heads with false; releases differ in which of the two they accept.
ONE_MODEL = "eagle3_one_model: true is the default; some releases load an MLA head only with false"
# Without these a server shows no draft counters.
SHOW_COUNTERS = (
    "# counters for kconv bench and kconv validate --url:\n# return_perf_metrics: true\n# enable_iter_perf_stats: true"
)


def _notes(spec: Spec) -> tuple[str, ...]:
    return (ONE_MODEL,) if isinstance(spec, HeadSpec) and is_mla(spec) else ()


def _words(served: Deployment) -> list[Word]:
    words: list[Word] = ["trtllm-serve", served.target, *served.arguments, "--backend", "pytorch"]
    if served.own_code and "--trust_remote_code" not in words:
        words.append("--trust_remote_code")
    return [*words, "--config", YAML] if served.head is not None else words


def _eagle3(drafts: Drafts) -> dict[str, Any]:
    """The captured layers, as outputs: TensorRT-LLM takes them from its serving YAML only."""
    spec = cast(HeadSpec, drafts.spec)
    return {"decoding_type": "Eagle3", "eagle3_layers_to_capture": list(spec.captured)}


FAMILIES: Mapping[str, Callable[[Drafts], Mapping[str, Any]]] = {
    EAGLE3.name: _eagle3, dflash.DFLASH.name: dflash.in_trtllm
}  # fmt: skip


def _command(served: Deployment) -> str:
    """Return the command; it serves a pinned target from its folder.

    With `revision`, `_try_load_tokenizer` still takes the default branch's tokenizer:
    https://github.com/NVIDIA/TensorRT-LLM/blob/4c05a74891e4df8066f08ed4ce14b0972abe4e25/tensorrt_llm/llmapi/llm.py
    """
    program, target, *rest = map(command, zip(_words(served)))
    if served.revision:
        target = f'"$({command(["hf", "download", served.target, "--revision", served.revision])})"'
    return " ".join([program, target, *rest])


def _yaml(spec: Spec, served: Deployment) -> str:
    import yaml

    served = replace(served, spec=spec)
    told = dict(FAMILIES[spec.drafter.name](served))
    common = {"max_draft_len": served.draft_tokens, "speculative_model": served.head}
    options = {"speculative_config": {"decoding_type": told.pop("decoding_type")} | common | told}
    # YAML has no control characters, not even in a comment.
    shown = terminal(_command(served)).split("\n")
    notes = [f"# {line}" for line in (*shown, *_notes(spec))]
    return "\n".join([*notes, yaml.safe_dump(options, sort_keys=False) + SHOW_COUNTERS, ""])


# TensorRT-LLM counts the drafted and accepted tokens of each position when a request ends
# (log_request_metrics_dict), and, with enable_iter_perf_stats, the totals of each iteration (log_iteration_stats),
# where every step drafts K:
# https://github.com/NVIDIA/TensorRT-LLM/blob/050f80def8df236e326949c8bd9dee10fd896a83/tensorrt_llm/metrics/collector.py
# Positions came with https://github.com/NVIDIA/TensorRT-LLM/pull/12636, and until
# https://github.com/NVIDIA/TensorRT-LLM/pull/17082 each prefill counted as a rejected draft: the totals are used for a
# server that has no positions or counts this way. Totals may miss drafted tokens of id 0 (_update_iter_stats),
# positions do not:
# https://github.com/NVIDIA/TensorRT-LLM/blob/0004396720054fd8e205cbf616f21f0b57c6b412/tensorrt_llm/_torch/pyexecutor/py_executor.py
DRAFTED, ACCEPTED = "trtllm_spec_decode_num_draft_tokens_total", "trtllm_spec_decode_num_accepted_tokens_total"
DRAFTED_AT, ACCEPTED_AT = "trtllm_spec_decode_drafted_tokens_total", "trtllm_spec_decode_accepted_tokens_total"
ANSWERED = "trtllm_generation_tokens_total"  # tokens of all answers
NEEDS = "return_perf_metrics: true and enable_iter_perf_stats: true"


def _read(metrics: str) -> Totals:
    names = (DRAFTED, ACCEPTED, ANSWERED)
    # A counter that was never raised has no sample yet.
    return Totals(dict.fromkeys(names, 0.0) | totals(metrics, names, (DRAFTED_AT, ACCEPTED_AT), "token_position"))


def _read_iterations(metrics: str) -> Totals:
    names = (DRAFTED, ACCEPTED, ANSWERED)
    return Totals(dict.fromkeys(names, 0.0) | totals(metrics, names))


def _count(d: Mapping[str, float], k: int, requests: int, prompts: int) -> Counts:
    places = sum(name.startswith(f"{DRAFTED_AT} ") for name in d)
    if places:
        # A position whose token was never accepted has no sample.
        accepted = tuple(d.get(f"{ACCEPTED_AT} {place}", 0.0) for place in range(places))
        return Counts(d.get(f"{DRAFTED_AT} 0", 0.0), sum(accepted), accepted, prompts)
    return _count_iterations(d, k, requests, prompts)


def _count_iterations(d: Mapping[str, float], k: int, requests: int, prompts: int) -> Counts:
    if not d[DRAFTED] and d[ANSWERED] > requests:
        raise CountersMissing(
            f"the server gave {d[ANSWERED]:.0f} tokens to {requests} requests without counting a draft",
            where="/prometheus/metrics",
            fix=f"Serve with a speculative_config, {NEEDS}.",
        )
    if d[DRAFTED] % k:
        raise DefinitionsMixed(
            f"{d[DRAFTED]:.0f} drafted tokens are not a whole number of steps of {k}",
            where=DRAFTED,
            fix=f"{SAY_K} (its max_draft_len), and configure it to draft the same number in each step; "
            "a TensorRT-LLM that counts drafts by token_position does not need this number.",
        )
    return Counts(d[DRAFTED] / k, d[ACCEPTED], None, prompts)


_ITERATIONS = Counters(
    marks="trtllm_",
    metrics="/prometheus/metrics",
    version="/version",
    read=_read_iterations,
    count=_count_iterations,
    speculates=lambda d: any(d[name] for name in d if name.startswith((DRAFTED, DRAFTED_AT))),
    needs=NEEDS,
    note="verify steps are drafts of a first token; without counts by position, drafted tokens divided by K",
)

# Configs whose class has a kv_lora_rank by default.
LATENT_BY_DEFAULT = ("kimi_k2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
RULES: tuple[Rule[HeadFacts], ...] = (
    Rule(
        "K144",
        "captured-by-flag",
        "note",
        "TensorRT-LLM reads the captured layers only from its serving YAML.",
        fix="Serve with eagle3_layers_to_capture in speculative_config; kconv to-trtllm writes such a file.",
        seen_in="https://github.com/NVIDIA/TensorRT-LLM/issues/15182",
        check=lambda s: (
            [Found("config.json", f"serve with eagle3_layers_to_capture: {list(s.captured)}")]
            if s.captured is not None
            else ()
        ),
        subject="Captured layers",
    ),
    Rule(
        "K166",
        "positions-unstated",
        "error",
        "The config has no max_position_embeddings. TensorRT-LLM assumes 4,096 for an MLA head and reads past"
        " the end of its table of angles.",
        fix="State the longest context that you will serve. Conversions take --max-positions.",
        seen_in="https://github.com/sgl-project/sglang/issues/10787",
        check=lambda s: (
            [Found("config.json: max_position_embeddings", "the key is absent")]
            if s.layout is not None and s.flat.get("max_position_embeddings") is None
            else ()
        ),
        subject="RoPE",
    ),
    Rule(
        "K188",
        "latent-by-class",
        "error",
        "TensorRT-LLM builds MLA for this model_type, but the head's attention is not MLA. The model_type's config "
        "class has a default kv_lora_rank.",
        fix="Set model_type to llama.",
        seen_in="https://github.com/NVIDIA/TensorRT-LLM/pull/9677",
        check=lambda s: (
            [Found("config.json: model_type", f"{s.config['model_type']!r}, but the head has no kv_b_proj")]
            if not s.is_mla and s.config.get("model_type") in LATENT_BY_DEFAULT
            else ()
        ),
        subject="Model type and class",
    ),
    Rule(
        "K196",
        "one-model",
        "note",
        "TensorRT-LLM serves MLA heads as part of the target (eagle3_one_model, its default). NVIDIA's own"
        " deployment test serves its Kimi heads separately.",
        fix="Leave the flag out. Try eagle3_one_model: false if your release does not load the head.",
        seen_in="https://github.com/NVIDIA/TensorRT-LLM/pull/9677",
        check=lambda s: (
            [Found("config.json: architectures", f"{first_architecture(s)}, an MLA head")] if s.is_mla else ()
        ),
        subject="Model type and class",
    ),
)


ENGINE = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    layouts=(TRTLLM, dflash.DFLASH_TRTLLM),
    release="between 1.3 and 1.4",
    packages=("tensorrt_llm",),
    captures=CAPTURES,
    launch=Launch(
        _words,
        YAML,
        _notes,
        _yaml,
        drafters=tuple(FAMILIES),
        unwritten="Its YAML lists the captured layers, which are unknown.",
        spread=("--tp_size", "8"),
    ),
    counters=replace(_ITERATIONS, read=_read, count=_count, otherwise=_ITERATIONS),
    # https://github.com/NVIDIA/TensorRT-LLM/blob/2cbdaa0ffa36fbef7960a0ad9f0458373025fa9f/tensorrt_llm/_torch/speculative/interface.py#L1065-L1078
    sampling=Sampling(("/server_info",), {"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": ()}),
    latent_by_default=LATENT_BY_DEFAULT,
    rules=(*RULES, *dflash.TRTLLM_RULES),
    shared_rules=("K158", "K163", "K182", "K192", "K211", "K410", "K425", "K433", "K434", "K436", "K441"),
    # It sizes o_proj, and the attention over a prompt, by the second key (__init__ in `MLA_MODULE`), and its own config
    # class has a default for both:
    # https://github.com/NVIDIA/TensorRT-LLM/blob/65b31db1b401d3752b8ebe7c29093cbfb6af04b7/tensorrt_llm/_torch/configs/deepseek_v3.py#L24-L25
    head_counts=("num_attention_heads", "num_key_value_heads"),
    # It reads rope_scaling. With transformers 5 its own class for kimi_k2 overwrites that with rope_parameters, since
    # the two are one attribute there:
    # https://github.com/NVIDIA/TensorRT-LLM/blob/b386a7fff981548964f58eb5f7e2a8e015c661bb/tensorrt_llm/_torch/attention/backends/interface.py#L714-L716
    # https://github.com/NVIDIA/TensorRT-LLM/blob/65b31db1b401d3752b8ebe7c29093cbfb6af04b7/tensorrt_llm/_torch/configs/deepseek_v3.py#L92-L103
    # https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/configuration_utils.py#L584-L590
    rope_objects=("rope_scaling", "rope_parameters"),
    flags={"norms.before_fc": ("eagle_config.norm_before_fc",), "norms.fc": ("fc_norm",)},
    null_keys=(
        # Lines 707 to 710, 695 to 704, and 596 to 598, of the file that `MODEL` links to.
        NullKey("target_hidden_size", FC_WIDTH),
        NullKey("eagle_config", "keys are looked up in it"),
        NullKey("eagle_config.next_layer_regular", "later layers are built as wide as layer 0", "deep"),
    ),
    taken={
        "rope_theta": Taken(default_theta, f"{ROPE}#L718"),
        "num_hidden_layers": Taken(built_layers, f"{MODEL}#L701"),
    },
)
