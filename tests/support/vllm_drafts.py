"""Run by the engine's python, not by the tests': serve one target with several heads and write down what they draft.

    python vllm_drafts.py request.json answer.json

The request is {"llm": keyword arguments of vllm.LLM, "steps": K, "new_tokens": N, "prompts": lists of token ids,
"heads": folder or null by name}. The answer gives by name {"outputs": ids per prompt, "drafts": K ids per draft per
prompt}, or {"error": text}. A server counts what was accepted, which of a head of random weights is next to nothing.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer  # pyright: ignore[reportMissingImports]

drafted: list[list[int]] = []
propose = SpecDecodeBaseProposer.propose


def note(self, *args, **kwargs):
    tokens = propose(self, *args, **kwargs)
    drafted.extend(tokens.tolist())
    return tokens


def generate(request: dict, head: str | None) -> dict:
    settings = dict(request["llm"])
    if head:
        settings["speculative_config"] = {
            "model": head,
            "method": "eagle3",
            "num_speculative_tokens": request["steps"],
        }
    llm = LLM(**settings)
    sampling = SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True)
    answer: dict = {"outputs": [], "drafts": []}
    for prompt in request["prompts"]:
        drafted.clear()
        [completion] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs
        answer["outputs"].append(list(completion.token_ids))
        answer["drafts"].append(list(drafted))
    return answer


def main(request_file: str, answer_file: str) -> None:
    request = json.loads(Path(request_file).read_text())
    SpecDecodeBaseProposer.propose = note
    answers = {}
    for name, head in request["heads"].items():
        print(f"== HEAD {name}", flush=True)
        try:
            answers[name] = generate(request, head)
        except Exception as fault:
            answers[name] = {"error": f"{type(fault).__name__}: {fault}"}
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(answer_file).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
