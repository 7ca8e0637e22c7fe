"""Launch snippets: how each engine is told about a head. What belongs here: what cannot be said in config.json.

TensorRT-LLM takes the captured layers from its serving YAML only, as layer outputs.
"""

from __future__ import annotations

import json

import yaml

from ..head.spec import HeadSpec

DRAFT_TOKENS = 3
TRTLLM_YAML = "serve-trtllm.yaml"
HEAD, TARGET = "PATH_OR_ID_OF_THIS_HEAD", "PATH_OR_ID_OF_THE_TARGET"


def launch_files(spec: HeadSpec, layout: str) -> dict[str, str]:
    """Return the files, by name, that show how to serve a head from the layout's engine."""
    command = serve_command(layout)
    if layout == "vllm":
        return {"serve-vllm.sh": f"{command}\n"}
    options = {
        "speculative_config": {
            "decoding_type": "Eagle3",
            "max_draft_len": DRAFT_TOKENS,
            "speculative_model": HEAD,
            "eagle3_layers_to_capture": list(spec.captured),
        }
    }
    return {TRTLLM_YAML: f"# {command}\n" + yaml.safe_dump(options, sort_keys=False)}


def serve_command(layout: str) -> str:
    """Return the shell command that serves a target with a head in the layout's engine."""
    speculative = json.dumps({"model": HEAD, "method": "eagle3", "num_speculative_tokens": DRAFT_TOKENS})
    return {
        "vllm": f"vllm serve {TARGET} --trust-remote-code --speculative-config '{speculative}'",
        "trtllm": f"trtllm-serve {TARGET} --backend pytorch --trust_remote_code --config {TRTLLM_YAML}",
    }[layout]
