"""Run by the engine's python, not by the tests': write down which class vLLM takes for a name, and a table's length.

    python vllm_reads.py request.json answer.json

The request is {"names": architectures of heads on disk, "angles": [{"rows": max_position_embeddings, "rope":
rope_parameters}], "gpt_oss": names of that model's tensors}. The answer gives {"classes": by name the module and class
that vLLM builds, or null, "rows": the table's rows per request, "gpt_oss": by name that of vLLM's parameter}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import LlamaConfig
from vllm.config import VllmConfig, set_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.rotary_embedding import get_rope  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.registry import ModelRegistry  # pyright: ignore[reportMissingImports]
from vllm.transformers_utils.configs.eagle import EAGLEConfig  # pyright: ignore[reportMissingImports]

HEAD_DIM = 64


def main(request_file: str, answer_file: str) -> None:
    request = json.loads(Path(request_file).read_text())
    classes = {}
    for name in request["names"]:
        (looked_up,) = EAGLEConfig(LlamaConfig(architectures=[name]), method="eagle3", model_type="eagle").architectures
        model = ModelRegistry.models.get(looked_up)
        classes[name] = [model.module_name, model.class_name] if model else None
    with set_current_vllm_config(VllmConfig()):
        rows = [
            get_rope(HEAD_DIM, max_position=one["rows"], rope_parameters=one["rope"]).cos_sin_cache.shape[0]
            for one in request["angles"]
        ]
    mapped = {name: GptOssForCausalLM.hf_to_vllm_mapper._map_name(name) for name in request["gpt_oss"]}
    Path(answer_file).write_text(json.dumps({"classes": classes, "rows": rows, "gpt_oss": mapped}))


if __name__ == "__main__":
    main(*sys.argv[1:])
