"""Launch snippets: how each engine is told about a head.

TensorRT-LLM takes the captured layers from its serving YAML only, as layer outputs.
"""

from __future__ import annotations

import json

import yaml

from ..head.spec import HeadSpec, Mla

DRAFT_TOKENS = 3
TRTLLM_YAML = "serve-trtllm.yaml"
HEAD, TARGET = "PATH_OR_ID_OF_THIS_HEAD", "PATH_OR_ID_OF_THE_TARGET"
# Layouts that more engines than the one of their name read.
ENGINES = {"portable": ("trtllm", "vllm", "sglang")}
# NVIDIA's own deployment test serves its Kimi heads with false; which of the two a release takes is its own matter.
ONE_MODEL = "# eagle3_one_model: true is the default; some releases load an MLA head with false only"
# https://github.com/sgl-project/sglang/issues/23490
OWN_BACKEND = (
    "# This head's attention is not the latent one of a Kimi target, whose backend it would inherit:\n"
    "# add --speculative-draft-attention-backend, e.g. trtllm_mha or fa3"
)

# Without these a server shows no counters of drafts (bench/counters.py has the lines that decide it).
TRTLLM_COUNTERS = (
    "# counters for kconv bench and kconv validate --url:\n# return_perf_metrics: true\n# enable_iter_perf_stats: true"
)
SGLANG_COUNTERS = "# counters for kconv bench and kconv validate --url: add --enable-metrics"


def launch_files(spec: HeadSpec, layout: str) -> dict[str, str]:
    """Return the files, by name, that show how to serve a head from the layout's engines."""
    return dict(_FILES[engine](spec) for engine in ENGINES.get(layout, (layout,)))


def serve_command(layout: str) -> str:
    """Return the shell command that serves a target with a head in the layout's engine, a line for each of several."""
    return "\n".join(_command(engine) for engine in ENGINES.get(layout, (layout,)))


def _command(engine: str) -> str:
    speculative = json.dumps({"model": HEAD, "method": "eagle3", "num_speculative_tokens": DRAFT_TOKENS})
    return {
        "vllm": f"vllm serve {TARGET} --trust-remote-code --speculative-config '{speculative}'",
        "trtllm": f"trtllm-serve {TARGET} --backend pytorch --trust_remote_code --config {TRTLLM_YAML}",
        # A chain of 3 steps verifies 4 tokens, the last accepted one among them.
        "sglang": f"python -m sglang.launch_server --model-path {TARGET} --trust-remote-code"
        f" --speculative-algorithm EAGLE3 --speculative-draft-model-path {HEAD}"
        f" --speculative-num-steps {DRAFT_TOKENS} --speculative-eagle-topk 1"
        f" --speculative-num-draft-tokens {DRAFT_TOKENS + 1}",
    }[engine]


def _trtllm(spec: HeadSpec) -> tuple[str, str]:
    options = {
        "speculative_config": {
            "decoding_type": "Eagle3",
            "max_draft_len": DRAFT_TOKENS,
            "speculative_model": HEAD,
            "eagle3_layers_to_capture": list(spec.captured),
        }
    }
    notes = [f"# {_command('trtllm')}", *([ONE_MODEL] if isinstance(spec.attention, Mla) else [])]
    return TRTLLM_YAML, "\n".join([*notes, yaml.safe_dump(options, sort_keys=False) + TRTLLM_COUNTERS, ""])


def _vllm(spec: HeadSpec) -> tuple[str, str]:
    return "serve-vllm.sh", f"{_command('vllm')}\n"


def _sglang(spec: HeadSpec) -> tuple[str, str]:
    notes = [SGLANG_COUNTERS] if isinstance(spec.attention, Mla) else [SGLANG_COUNTERS, OWN_BACKEND]
    return "serve-sglang.sh", "\n".join([*notes, _command("sglang")]) + "\n"


_FILES = {"trtllm": _trtllm, "vllm": _vllm, "sglang": _sglang}
