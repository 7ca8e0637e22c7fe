"""Run by the engine's python, not by the tests': the logarithm of each prompt token's probability, in vLLM.

    python vllm_logprobs.py request.json answer.json

The request is {"llm": keyword arguments of vllm.LLM without a model, "prompts": lists of token ids, "models": folder by
name}; the answer gives by name a list per prompt, of its tokens but the first. vLLM has an emulation of NVFP4 matrices
in plain PyTorch, which its CPU build does not consider until it is told to:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/kernels/linear/nvfp4/emulation.py#L14
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]
from vllm.model_executor.kernels.linear import register_linear_kernel  # pyright: ignore[reportMissingImports]
from vllm.model_executor.kernels.linear.nvfp4.emulation import (  # pyright: ignore[reportMissingImports]
    EmulationNvFp4LinearKernel,
)
from vllm.platforms import PlatformEnum  # pyright: ignore[reportMissingImports]


def measure(settings: dict, folder: str, prompts: list[list[int]]) -> list[list[float]]:
    llm = LLM(model=folder, **settings)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for prompt, answer in zip(prompts, llm.generate(asked, sampling, use_tqdm=False), strict=True):
        places = zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
        found.append([place[token].logprob for token, place in places])
    return found


def main(request_file: str, answer_file: str) -> None:
    request = json.loads(Path(request_file).read_text())
    register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    answers = {}
    for name, folder in request["models"].items():
        print(f"== MODEL {name}", flush=True)
        answers[name] = measure(request["llm"], folder, request["prompts"])
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(answer_file).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
