"""Launch snippets: how each engine is told about a head. What belongs here: what cannot be said in config.json.

TensorRT-LLM takes the captured layers from its serving YAML only, as layer outputs.
"""

from __future__ import annotations

import json

import yaml

from ..head.spec import HeadSpec

DRAFT_TOKENS = 3
HEAD, TARGET = "PATH_OR_ID_OF_THIS_HEAD", "PATH_OR_ID_OF_THE_TARGET"


def launch_files(spec: HeadSpec, layout: str) -> dict[str, str]:
    """Return the files, by name, that show how to serve a head from the layout's engine."""
    return {"vllm": _vllm, "trtllm": _trtllm}[layout](spec)


def _vllm(spec: HeadSpec) -> dict[str, str]:
    speculative = json.dumps({"model": HEAD, "method": "eagle3", "num_speculative_tokens": DRAFT_TOKENS})
    return {"serve-vllm.sh": f"vllm serve {TARGET} --trust-remote-code --speculative-config '{speculative}'\n"}


def _trtllm(spec: HeadSpec) -> dict[str, str]:
    options = {
        "speculative_config": {
            "decoding_type": "Eagle3",
            "max_draft_len": DRAFT_TOKENS,
            "speculative_model": HEAD,
            "eagle3_layers_to_capture": list(spec.captured),
        }
    }
    command = f"# trtllm-serve {TARGET} --backend pytorch --trust_remote_code --config serve-trtllm.yaml\n"
    return {"serve-trtllm.yaml": command + yaml.safe_dump(options, sort_keys=False)}
