"""SGLang: its layout of an Eagle3 head, and everything else that kconv knows about it.

Loaders: https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama_eagle3.py and
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/kimi_k25_eagle3.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from ..checkpoint.formats import NVFP4
from ..drafters.base import Spec
from ..drafters.eagle3 import EAGLE3, is_parallel
from ..drafters.keys import CONVENTION, IDS, INPUTS, NESTED, OUTPUTS, TOP
from ..drafters.spec import Gqa, HeadSpec, Mla
from ..drafters.yarn import cos_sin_factor, m
from ..errors import AcceptanceInvalid, CountersDisturbed, CountersMissing
from ..escape import Word
from ..rule import Found, Rule
from . import dflash
from .base import (
    HOST,
    Benchmark,
    Capture,
    Config,
    Deployment,
    Drafting,
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
from .checks import HeadFacts, fed_otherwise, other_class
from .common import (
    HIDDEN,
    INPUT,
    MIDLAYER,
    MLA_ROPE,
    as_outputs,
    beside,
    eagle_config,
    head_rows,
    instead,
    is_mla,
    later_norm,
    listed_ids,
    norms_qk,
    yarn_of,
)
from .config import identity, write_keys
from .counters import NO_DRAFTS, Counters, Counts, PerRequest, Totals, totals
from .layout import Layout, Limit, Row, TargetFacts, TargetLimit
from .start_server import start
from .vllm import BASE, FC_WIDTH, NO_NORM, TYPED, built_layers

SGLANG_SOURCE = "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt"
MLA_LOADER = f"{SGLANG_SOURCE}/models/kimi_k25_eagle3.py"
GQA_LOADER = f"{SGLANG_SOURCE}/models/llama_eagle3.py"
# SGLang's older names of fc_norm.
AUX_NORMS = tuple(Row(f"aux_norm_{level}.weight", (f"fc_norm.{a}",)) for a, level in enumerate(("low", "mid", "high")))
LM_HEAD = {
    "lm_head": "SGLang serves a random lm_head if draft_vocab_size is set and the tensor is missing "
    "(https://github.com/sgl-project/sglang/issues/27829)"
}

MODELS = f"{SGLANG_SOURCE}/models"
DEEPSEEK_CLASS = f"{MODELS}/deepseek_v2.py#L3470-L3473"


def _outputs(captured: tuple[int, ...], layers: int | None) -> tuple[int, ...] | None:
    """Every list counts outputs, captured before the next layer runs: never the last layer's."""
    return None if layers is not None and captured[-1] >= layers - 1 else captured


def _outputs_or_all(captured: tuple[int, ...], layers: int | None) -> tuple[int, ...] | None:
    """Like `_outputs`, but a list that contains the number of layers counts inputs, including the last one."""
    return tuple(i + 1 for i in captured) if layers is not None and captured[-1] == layers - 1 else captured


def _outputs_from_1(captured: tuple[int, ...], layers: int | None) -> tuple[int, ...] | None:
    """A list that begins with 1 counts outputs, any other one inputs: no list can express layer 0's output."""
    if captured[0] == 0 or _outputs(captured, layers) is None:
        return None
    return captured if captured[0] == 1 else tuple(i + 1 for i in captured)


CAPTURES = (
    Capture(("llama", "phi3"), f"{MODELS}/llama.py#L937-L941", _outputs),
    Capture(("llama4_text",), f"{MODELS}/mllama4.py#L971-L973", _outputs),
    Capture(("qwen2",), f"{MODELS}/qwen2.py#L794", _outputs),
    Capture(("qwen2_5_vl_text",), f"{MODELS}/qwen2_5_vl.py#L1001", _outputs),
    Capture(("qwen3",), f"{MODELS}/qwen3.py#L791", _outputs),
    Capture(("qwen3_moe",), f"{MODELS}/qwen3_moe.py#L1143", _outputs),
    Capture(("qwen3_vl_text", "qwen3_vl_moe_text"), f"{MODELS}/qwen3_vl.py#L1790-L1795", _outputs),
    Capture(("gpt_oss",), f"{MODELS}/gpt_oss.py#L1347-L1352", _outputs_or_all),
    Capture(("glm4_moe",), f"{MODELS}/glm4_moe.py#L1281", _outputs),
    Capture(("minimax_m2",), f"{MODELS}/minimax_m2.py#L1080", _outputs),
    # Kimi K2.5 and later wrap such a model, and GLM-5's class is derived from it.
    Capture(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa"), DEEPSEEK_CLASS, _outputs_from_1),
    Capture(("glm4_moe_lite",), f"{MODELS}/glm4_moe_lite.py#L817-L820", _outputs_from_1),
)
# Targets for which SGLang reads a list by DeepSeek's rule.
DEEPSEEKS = frozenset(name for one in CAPTURES if one.listed is _outputs_from_1 for name in one.model_types)


def _listed(spec: HeadSpec, target: TargetFacts | None) -> tuple[int, ...] | None:
    """Return the list that SGLang needs for a head's captured layers; None if no list expresses them.

    If the target is unknown, the list is one that every class reads the same way, or, for an MLA head, one for a
    DeepSeek or Kimi target.
    """
    if target is not None and target.model_type:
        found = ENGINE.capture(target.model_type)
        return found.listed(spec.captured, target.layers) if found else None
    layers = target.layers if target else None
    return _outputs_from_1(spec.captured, layers) if is_mla(spec) or spec.captured[0] == 1 else None


def _type_of(target: TargetFacts | None) -> str:
    return (target.model_type or "") if target is not None else ""


TARGET_LIMITS = (
    TargetLimit(
        lambda spec, target: not _type_of(target) and not is_mla(spec) and spec.captured[0] != 1,
        "SGLang reads a list of captured layers that does not begin with 1 as layer inputs for DeepSeek and Kimi"
        " targets, and as layer outputs for others",
        "Pass --target: the model that the head drafts for.",
        DEEPSEEK_CLASS,
    ),
    TargetLimit(
        lambda spec, target: bool(_type_of(target)) and ENGINE.capture(_type_of(target)) is None,
        "SGLang 0.5.23 has no class for this target's model_type that captures hidden states",
        "Pass the target that the head was trained on, or serve this head with vLLM or TensorRT-LLM.",
        f"{SGLANG_SOURCE}/model_executor/model_runner_components/attention_backend_setup.py#L55-L61",
        "K156",
    ),
    TargetLimit(
        lambda spec, target: spec.captured[0] == 0 and (_type_of(target) in DEEPSEEKS or not _type_of(target)),
        "SGLang cannot capture the output of layer 0 of a DeepSeek or Kimi target",
        "Serve this head with vLLM or TensorRT-LLM.",
        DEEPSEEK_CLASS,
        "K330",
    ),
    TargetLimit(
        lambda spec, target: target is not None and _listed(spec, target) is None,
        "SGLang captures before a layer runs, so it never captures the output of the last layer",
        "Serve this head with vLLM or TensorRT-LLM.",
        f"{MODELS}/deepseek_v2.py#L3193-L3194",
        "K154",
    ),
)
EMBEDDING = {
    "embed_tokens": "SGLang uses the target's embedding instead of the head's own "
    f"({SGLANG_SOURCE}/speculative/eagle_worker_v2.py#L353-L363)"
}


def captured_keys(spec: HeadSpec, target: TargetFacts | None = None) -> dict[str, Any]:
    """Return the keys of eagle_config that tell SGLang the captured layers.

    For an MLA head, an unknown target counts as a DeepSeek or Kimi one.
    """
    listed = _listed(spec, target) or _outputs_from_1(spec.captured, None) or spec.captured
    return {
        IDS: list(listed),
        CONVENTION: OUTPUTS if listed == spec.captured else INPUTS,
        "use_aux_hidden_state": True,
    }


def _write(spec: HeadSpec, target: TargetFacts | None = None) -> dict[str, Any]:
    config: dict[str, Any] = identity(spec) | write_keys(spec)
    config["num_aux_hidden_states"] = len(spec.captured)
    config["eagle_config"] |= captured_keys(spec, target)
    return config


def _scales_otherwise(spec: HeadSpec) -> bool:
    """Return whether SGLang scales cos and sin of a GQA head by a different factor than transformers and vLLM.

    It uses the quotient if both values are set, even if one is 0, and ignores `attention_factor`:
    https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/layers/rotary_embedding/yarn.py
    """
    yarn = yarn_of(spec)
    if yarn is None or not isinstance(spec.attention, Gqa):
        return False
    one, all_dim = yarn.mscale, yarn.mscale_all_dim
    factor = m(yarn, 1.0) if one is None or all_dim is None else m(yarn, one) / m(yarn, all_dim)
    return factor != cos_sin_factor(spec.rope, spec.attention)


SGLANG = Layout(
    name="sglang",
    drafter=EAGLE3,
    engine="SGLang 0.5.23 or newer (MHA/GQA: LlamaForCausalLMEagle3; MLA: Eagle3DeepseekV2ForCausalLM)",
    rows=head_rows("layers.{i}", later=(HIDDEN,)) + instead(MIDLAYER, AUX_NORMS) + beside(later_norm(INPUT)),
    told_by=lambda config, names: (
        "aux_norm_low.weight" in names
        or (CONVENTION in eagle_config(config) and TOP not in config and "num_aux_hidden_states" in config)
    ),
    write_config=_write,
    write_beside=_write,
    needs=LM_HEAD,
    replaces=EMBEDDING,
    target_limits=TARGET_LIMITS,
    limits=(
        *MLA_ROPE,
        Limit(
            "K354",
            "sglang-parallel",
            is_parallel,
            "SGLang has no parallel drafting: it skips mask_hidden, and drafts a token a step",
            "Serve this head with vLLM.",
            f"{GQA_LOADER}#L370-L377",
        ),
        Limit(
            "K331",
            "sglang-skips-fc",
            lambda s: len(s.captured) * s.target_hidden == s.hidden,
            "SGLang skips fc if its input is as wide as the head",
            "Serve this head with vLLM.",
            f"{GQA_LOADER}#L238",
        ),
        Limit(
            "K332",
            "sglang-norm-before-residual",
            lambda s: s.norms.before_residual,
            "SGLang always takes the residual before hidden_norm and ignores norm_before_residual",
            "Serve this head with vLLM.",
            f"{GQA_LOADER}#L99",
        ),
        Limit(
            "K333",
            "sglang-mla-layers",
            lambda s: is_mla(s) and s.layers != 1,
            "SGLang's MLA head supports only one layer",
            "Serve this head with vLLM or TensorRT-LLM.",
            f"{MLA_LOADER}#L243",
        ),
        Limit(
            "K334",
            "sglang-mla-norm-before-fc",
            lambda s: is_mla(s) and s.norms.before_fc,
            "SGLang's MLA head does not support a norm before fc (norm_before_fc)",
            "Serve this head with TensorRT-LLM, or train one without norm_before_fc.",
            f"{MLA_LOADER}#L286-L295",
        ),
        Limit(
            "K335",
            "sglang-attention-bias",
            lambda s: isinstance(s.attention, Gqa) and s.attention.bias,
            "SGLang silently drops the biases of q_proj, k_proj and v_proj",
            "Serve this head with vLLM or TensorRT-LLM.",
            f"{GQA_LOADER}#L72",
        ),
        Limit(
            "K350",
            "sglang-fc-bias",
            lambda s: isinstance(s.attention, Gqa) and s.fc_bias,
            "SGLang also builds a bias of o_proj if a GQA head's config asks for fc.bias, and leaves it unfilled",
            "Serve this head with TensorRT-LLM, or train one without the bias.",
            f"{SGLANG_SOURCE}/models/llama.py#L337-L341",
        ),
        Limit(
            "K352",
            "sglang-qk-norm",
            norms_qk,
            "SGLang's Eagle3 classes do not support query and key norms, and silently skip them",
            "Serve this head with vLLM.",
            f"{GQA_LOADER}#L376-L383",
        ),
        Limit(
            "K336",
            "sglang-mlp-bias",
            lambda s: s.mlp_bias,
            "SGLang silently drops the biases of the MLP",
            "Serve this head with TensorRT-LLM, or train one without mlp_bias.",
            f"{SGLANG_SOURCE}/models/llama.py#L101-L109",
        ),
        Limit(
            "K337",
            "sglang-yarn",
            _scales_otherwise,
            "SGLang ignores YaRN's attention_factor, and reads an mscale of 0 differently from the trainer",
            "Serve this head with vLLM.",
            f"{SGLANG_SOURCE}/layers/rotary_embedding/yarn.py#L122-L131",
        ),
        Limit(
            "K338",
            "sglang-kv-b-quantized",
            is_mla,
            "SGLang needs an unquantized kv_b_proj in an MLA head",
            "Leave kv_b_proj unquantized, or serve the head with vLLM.",
            f"{MLA_LOADER}#L511-L515",
            holds="*.kv_b_proj.weight_scale*",
        ),
        Limit(
            "K351",
            "sglang-fc-quantized",
            lambda s: isinstance(s.attention, Gqa),
            "SGLang's fc of a GQA head is an unquantized linear layer, and SGLang silently drops its scales",
            "Leave fc unquantized, or serve the head with vLLM or TensorRT-LLM.",
            f"{GQA_LOADER}#L163-L167",
            holds="fc.weight_scale*",
        ),
        Limit(
            "K339",
            "sglang-mla-nvfp4",
            is_mla,
            "SGLang ignores an MLA head's NVFP4 config, and would read its packed bytes as weights",
            "Serve the unquantized head, or serve this one with vLLM or TensorRT-LLM.",
            f"{MLA_LOADER}#L335-L340",
            holds=f"*.{NVFP4.mark}",
        ),
    ),
)


def _in_sglang(config: Config, target: str | None) -> tuple[int, ...] | None:
    """The list in eagle_config: https://github.com/sgl-project/sglang/pull/25454"""
    place = eagle_config(config)
    nested = listed_ids(place.get(IDS))
    if not nested:
        return None
    # DeepSeek's class, which a Kimi target has, reads a list that begins with 1 as outputs. Other classes read every
    # list so, and gpt-oss's class reads one that contains its number of layers as inputs. kconv notes this next to the
    # list.
    if target == "gpt_oss" and place.get(CONVENTION) == INPUTS:
        return as_outputs(nested)
    if target is None:
        others = not config.get("kv_lora_rank") and place.get(CONVENTION) == OUTPUTS
        return nested if nested[0] == 1 or others else as_outputs(nested)
    return nested if nested[0] == 1 or target not in DEEPSEEKS else as_outputs(nested)


def _states(config: Config, mla: bool) -> Any:
    nested, top = listed_ids(eagle_config(config).get(IDS)), listed_ids(config.get(TOP))
    by_lists = len(nested) if nested else None
    if mla:
        return by_lists or (len(top) if top else None)
    return config.get("num_aux_hidden_states") or by_lists


def _eagle3(drafts: Drafts) -> dict[str, str]:
    return {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-num-steps": str(drafts.draft_tokens),
        "--speculative-eagle-topk": str(drafts.branches),
        # The last accepted token is verified together with a chain.
        "--speculative-num-draft-tokens": str(drafts.nodes or drafts.draft_tokens + 1),
    }


FAMILIES = {EAGLE3.name: _eagle3, dflash.DFLASH.name: dflash.in_sglang}


def _speculative(head: str, drafts: Drafts) -> dict[str, str]:
    return {"--speculative-draft-model-path": head} | FAMILIES[family_of(drafts.spec)](drafts)


def _words(served: Deployment) -> list[Word]:
    words: list[Word] = ["python", "-m", "sglang.launch_server", "--model-path", served.target, *served.arguments]
    if served.own_code and "--trust-remote-code" not in words:
        words.append("--trust-remote-code")
    if served.head is not None:
        words += chain.from_iterable(_speculative(served.head, served).items())
    return words


# Without it a server shows no draft counters.
SHOW_COUNTERS = "kconv bench and kconv validate --url read counters, which --enable-metrics shows."
# https://github.com/sgl-project/sglang/issues/23490
OWN_BACKEND = (
    "Beside a target with latent attention, as Kimi-K2, this head would inherit a backend that it cannot use: "
    "add --speculative-draft-attention-backend, e.g. trtllm_mha or fa3."
)


def _notes(spec: Spec) -> tuple[str, ...]:
    inherits = isinstance(spec, HeadSpec) and not is_mla(spec)
    return (SHOW_COUNTERS, OWN_BACKEND) if inherits else (SHOW_COUNTERS,)


# Verify calls, generated tokens and requests, all counted when a request ends. A verify call produces the accepted
# tokens and a bonus token; the first token of each request comes from the prefill.
# https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/observability/metrics_collector.py#L2109-L2112
VERIFY = "sglang:spec_verify_calls_total"
GENERATED, REQUESTS = "sglang:generation_tokens_total", "sglang:num_requests_total"


HISTOGRAM = "spec_correct_drafts_histogram"
# A marker next to the package if scripts/engine-env sglang made the environment.
STAND_IN = "lib/python3*/site-packages/sglang_on_cpu.py"


def _kernels(python: Path) -> str:
    made = any(python.absolute().parent.parent.glob(STAND_IN))
    return "SGLang's own code, except for the kernels, which plain torch replaces" if made else ""


def speculation(serving: Serving) -> dict[str, str]:
    """Return the options by which SGLang is told about a drafter; none without one."""
    if serving.head is None:
        return {}
    return _speculative(str(serving.head.absolute()), serving)


def _command(serving: Serving, port: int) -> list[str]:
    """Return SGLang's command line; on a CPU, its environment adds more options (scripts/sglang_cpu)."""
    options = {
        "--model-path": str(serving.target.absolute()),
        "--host": HOST,
        "--port": str(port),
        "--dtype": serving.dtype,
        "--context-length": str(serving.max_model_len),
    }
    words = [word for option in (options | speculation(serving) | dict(serving.options)).items() for word in option]
    flags = ["--enable-metrics", "--disable-radix-cache", "--skip-server-warmup"]
    return [*start(serving.python, "watch_sglang.py", "sglang.launch_server"), *flags, *words]


def _read(metrics: str) -> Totals:
    names = (VERIFY, GENERATED, REQUESTS)
    # A counter that was never raised has no sample yet.
    return Totals(dict.fromkeys(names, 0.0) | totals(metrics, names))


def _count(d: Mapping[str, float], _k: int, requests: int, prompts: int) -> Counts:
    if not d[VERIFY] and d[GENERATED] > d[REQUESTS]:
        raise CountersMissing(
            f"the server answered {d[REQUESTS]:.0f} requests without a verify step, so it does not speculate",
            where=VERIFY,
            fix="Start SGLang with --speculative-algorithm EAGLE3 and --enable-metrics.",
        )
    if d[REQUESTS] != requests:
        raise CountersDisturbed(
            f"the server counted {d[REQUESTS]:.0f} requests, but {requests} were sent",
            where=REQUESTS,
            fix="Make sure that nobody else uses the server, then run the command again.",
        )
    return Counts(d[VERIFY], d[GENERATED] - requests - d[VERIFY], None, prompts)


def _chat_histogram(answer: Any) -> list[int] | None:
    meta: Mapping[str, Any] = answer["choices"][0].get("meta_info") or {}
    return meta.get(HISTOGRAM)


def _quote(result: Mapping[str, Any], where: object) -> dict[str, Any]:
    """https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/benchmark/serving.py#L1649-L1656"""
    if not result["accept_length"]:
        raise AcceptanceInvalid(NO_DRAFTS, where=where, fix="Run it against a server that speculates.")
    server: Mapping[str, Any] = result.get("server_info") or {}
    topk, nodes = server.get("speculative_eagle_topk"), server.get("speculative_num_draft_tokens")
    simulated = [name for name in server if "simulate_acc" in name.lower() and server[name]]
    if simulated:
        raise AcceptanceInvalid(
            f"the server forged its acceptance: {simulated[0]} was set", where=where, fix="Measure without it."
        )
    return {
        "metric": "al_incl_bonus", "averaging": "micro_steps", "value": round(float(result["accept_length"]), 6),
        "draft_tokens": server.get("speculative_num_steps"), "engine": "sglang",
        "engine_version": server.get("version"), "target": server.get("model_path"), "dataset": result["dataset_name"],
        "tree": None if topk is None else "chain" if topk == 1 else f"topk={topk},nodes={nodes}",
        "published_as": "accept_length",
        "note": "a mean over everything the server did since it started, up to its last log line",
    }  # fmt: skip


def captured_layer_0(head: HeadFacts) -> Iterator[Found]:
    if head.captured and head.captured[0] == 0 and (head.target is None or head.target.model_type in DEEPSEEKS):
        yield Found("config.json", "the head reads the output of layer 0")


def captured_misread(head: HeadFacts) -> Iterator[Found]:
    # A list with layer 0 has no right form to convert it to: K330 says what to do.
    if not any(captured_layer_0(head)):
        yield from fed_otherwise(head, ENGINE.runners, NESTED)


def lm_head_random(head: HeadFacts) -> Iterator[Found]:
    stated = head.flat.get("draft_vocab_size")
    if head.spec and not head.misfits and "lm_head" not in head.slots and stated is not None:
        yield Found("lm_head.weight", f"lm_head is missing, and draft_vocab_size is {stated!r}")


RULES: tuple[Rule[HeadFacts], ...] = (
    Rule(
        "K141",
        "captured-misread",
        "error",
        "SGLang reads the list in eagle_config as other layers than the head was trained on. It reads layer outputs "
        "if the list begins with 1 or if the target is not a DeepSeek or Kimi. Otherwise it reads layer inputs.",
        fix="Convert the head with kconv to-sglang --target, which writes the list as SGLang reads it for that target.",
        seen_in="https://github.com/sgl-project/sglang/pull/25454",
        check=captured_misread,
        subject="Captured layers",
    ),
    Rule(
        "K330",
        "sglang-captures-layer-0",
        "error",
        "SGLang cannot capture the output of layer 0 of a DeepSeek or Kimi target. An unknown target counts as one.",
        fix="Serve it with vLLM or TensorRT-LLM, or give --target if the head drafts for a model of another kind.",
        seen_in="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/deepseek_v2.py#L3470-L3473",
        check=captured_layer_0,
        subject="Captured layers",
    ),
    Rule(
        "K187",
        "architecture-unknown-to-sglang",
        "error",
        "SGLang does not know this class name for this kind of head. It loads LlamaForCausalLM as a plain Llama, and"
        " rewrites DeepseekV3ForCausalLM to NextN.",
        fix="Convert the head (kconv to-sglang), which names the class.",
        seen_in="https://github.com/sgl-project/sglang/pull/33966",
        check=lambda s: other_class(s, ENGINE.architectures),
        subject="Model type and class",
    ),
    Rule(
        "K133",
        "lm-head-random",
        "error",
        "lm_head is missing and draft_vocab_size is set. SGLang then serves a random lm_head, and the"
        " acceptance length is 1.00.",
        fix="Add the target's lm_head (kconv to-sglang HEAD OUT --target T), or set draft_vocab_size to null.",
        seen_in="https://github.com/sgl-project/sglang/pull/27908",
        check=lm_head_random,
        subject="Tensors",
    ),
    Rule(
        "K171",
        "draft-vocab-key",
        "error",
        "The config has no draft_vocab_size. SGLang cannot build a GQA head without it.",
        fix="State it: the number of rows of lm_head, or null for the target's vocabulary.",
        seen_in="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama_eagle3.py#L306",
        check=lambda s: (
            [Found("config.json: draft_vocab_size", "the key is absent")]
            if s.layout is not None and not s.is_mla and "draft_vocab_size" not in s.flat
            else ()
        ),
        subject="Vocabulary",
    ),
)


ENGINE = Engine(
    name="sglang",
    title="SGLang",
    layouts=(SGLANG, dflash.DFLASH_SGLANG),
    release="0.5.23",
    runners=(Runner("sglang", _in_sglang, _states),),
    packages=("sglang", "sglang_cpu"),
    captures=CAPTURES,
    launch=Launch(
        _words,
        "serve-sglang.sh",
        _notes,
        drafters=tuple(FAMILIES),
        spread=("--tp-size", "8"),
        # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py
        packed=True,
        # The tokenizer follows it:
        # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/managers/tokenizer_manager.py#L646
        revision="--revision",
    ),
    counters=Counters(
        marks="sglang:",
        metrics="/metrics",
        version="/server_info",
        read=_read,
        count=_count,
        speculates=lambda d: bool(d[VERIFY]),
        needs="--enable-metrics",
        note="accepted tokens are generated tokens minus one per request, for its prefill, and one per verify call; "
        "drafted tokens cut off by an answer's limit are not counted",
        cuts=True,
    ),
    # spec_accept_length next to them is not the acceptance length: it divides all tokens, including the prefill's first
    # one, by the verify calls: https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/managers/tokenizer_manager.py#L3166-L3168
    per_request=PerRequest(
        "/generate",
        lambda _, prompt, new_tokens: {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        },
        lambda answer: (answer["output_ids"], answer["meta_info"].get(HISTOGRAM)),
        {"return_meta_info": True},
        _chat_histogram,
        beside="/server_info",
    ),
    sampling=Sampling(("/server_info",), {"SGLANG_SIMULATE_ACC_LEN": (), "simulate_acc_len": ()}),
    benchmark=Benchmark("sglang.bench_serving", ("accept_length", "backend"), _quote),
    starter=Starter(
        _command,
        lambda _: {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        # The last line of a traceback.
        re.compile(r"([A-Za-z_.]*(?:Error|Exception): .+)"),
        note=_kernels,
        trees=True,
    ),
    # It repeats the arguments that it was started with; for vLLM and TensorRT-LLM only counters tell.
    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/entrypoints/http_server.py#L863-L885
    drafting=Drafting(
        "/server_info",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        (
            "speculative_num_steps",
            "speculative_eagle_topk",
            "speculative_num_draft_tokens",
            "speculative_draft_model_path",
        ),
        "speculative_algorithm",
        (dflash.SGLANG_DFLASH, dflash.SGLANG_DSPARK),
    ),
    rules=(*RULES, *dflash.SGLANG_RULES),
    shared_rules=("K154", "K163", "K182", "K192", "K194", "K410", "K412", "K414"),
    # https://github.com/sgl-project/sglang/pull/33966
    architectures={
        Gqa: frozenset(("LlamaForCausalLMEagle3",)),
        Mla: frozenset(("Eagle3DeepseekV2ForCausalLM",)),
    },
    flags={"norms.output": ("norm_output",)},
    null_keys=(
        *TYPED,
        # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama_eagle3.py#L151
        NullKey("target_hidden_size", FC_WIDTH, "gqa"),
        # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/deepseek_v2.py#L2166
        NullKey("rope_interleave", "the rotary dims are assumed to be half-split", "mla"),
        # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama.py#L199-L200
        NullKey("partial_rotary_factor", "the number of rotary dims is computed from it", "gqa"),
        # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama_eagle3.py#L173-L175
        NullKey("eagle_config.norm_before_fc", NO_NORM, "normed"),
    ),
    taken={
        "rope_theta": BASE,
        "num_hidden_layers": Taken(built_layers, f"{GQA_LOADER}#L202"),
    },
)
