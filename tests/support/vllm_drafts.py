"""Run by the engine's python, not by the tests': serve one target with several heads and write down what they draft.

    python vllm_drafts.py request.json answer.json START_SERVER

The request is {"llm": keyword arguments of vllm.LLM, "new_tokens": N, "look_ahead": how many tokens more are generated
without a head (0 if absent), "prompts": lists of token ids, "together": whether they go side by side, "heads":
speculative config or null by name, "more": further arguments of vllm.LLM by a head's name}. The answer gives by name
{"outputs": ids per prompt, "drafts": K ids per draft per prompt, or of all in one list, "counters": what the engine
counted meanwhile, by its names, "unreached": the head's parameters that no tensor reached, found by kconv's own file
START_SERVER}, or {"error": text}. In one process a head takes seconds, where a server takes half a minute. vLLM has an
emulation of NVFP4 matrices, which its CPU build does not consider until it is told to:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/kernels/linear/nvfp4/emulation.py#L14

With TRITON_INTERPRET set, Triton's kernels run in its interpreter, on a CPU too. vLLM's CPU build takes Triton only if
that has a backend for CPUs, so an entry without a driver stands in Triton's list of them:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/triton_utils/importing.py#L36-L43
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

if os.environ.get("TRITON_INTERPRET"):
    from triton.backends import backends  # pyright: ignore[reportMissingImports]

    backends["cpu"] = SimpleNamespace(driver=None)

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]
from vllm.model_executor.kernels.linear import register_linear_kernel  # pyright: ignore[reportMissingImports]
from vllm.model_executor.kernels.linear.nvfp4.emulation import (  # pyright: ignore[reportMissingImports]
    EmulationNvFp4LinearKernel,
)
from vllm.platforms import PlatformEnum  # pyright: ignore[reportMissingImports]
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer  # pyright: ignore[reportMissingImports]

# Of keys and values, of 16 tokens or more each: sixteen prompts of 256 tokens.
BLOCKS = 256

drafted: list[list[int]] = []
propose = SpecDecodeBaseProposer.propose


def note(self, *args, **kwargs):
    tokens = propose(self, *args, **kwargs)
    drafted.extend(tokens.tolist())
    return tokens


def counters(llm: LLM) -> dict[str, list[float]]:
    """Return the engine's counters of speculation; a plain one as a list of one."""
    found = {m.name: m for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode")}
    return {name: list(m.values) if hasattr(m, "values") else [m.value] for name, m in found.items()}


def generate(request: dict, head: dict | None, more: dict) -> dict:
    # Without its statistics an engine in one's own process counts nothing. Without a number of blocks it clears a GiB.
    settings = {"disable_log_stats": False, "num_gpu_blocks_override": BLOCKS} | request["llm"] | more
    if head:
        settings["speculative_config"] = head
    llm = LLM(**settings)
    # Without a head some tokens more, where a head's last drafts are looked up.
    new_tokens = request["new_tokens"] + (0 if head else request.get("look_ahead", 0))
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    before = counters(llm)
    answer: dict = {"outputs": [], "drafts": []}
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    for batch in [prompts] if request.get("together") else [[prompt] for prompt in prompts]:
        drafted.clear()
        answer["outputs"] += [list(one.outputs[0].token_ids) for one in llm.generate(batch, sampling, use_tqdm=False)]
        answer["drafts"].append(list(drafted))
    # Of heads that were served before in this process the counters may go on.
    answer["counters"] = {
        name: [now - then for now, then in zip(values, before.get(name, [0] * len(values)), strict=True)]
        for name, values in counters(llm).items()
    }
    return answer


def watch(start_server: str) -> None:
    """Let kconv's own file watch what each head's tensors reach."""
    spec = importlib.util.spec_from_file_location("start_server", start_server)
    assert spec and spec.loader
    starting = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(starting)
    starting.prepare(str(Path(start_server).with_name("watch_vllm.py")))


def zero_memory() -> None:
    """Let fresh memory hold zeros, so that what no tensor reaches counts the same in each run."""
    import torch

    empty = torch.empty
    torch.empty = lambda *size, **options: empty(*size, **options).zero_()


def keep_frozen() -> Callable[[], None]:
    """Return what hides from garbage collection all that is alive; vLLM, which thaws it for each engine, no longer can.

    vLLM collects a dozen times per engine, and each time looked through every module that it has imported.
    """
    freeze = gc.freeze
    gc.freeze = gc.unfreeze = lambda: None
    freeze()
    return freeze


def main(request_file: str, answer_file: str, start_server: str) -> None:
    watch(start_server)
    zero_memory()
    unreached = Path(f"{answer_file}.unreached")
    os.environ["KCONV_UNREACHED"] = str(unreached)
    request = json.loads(Path(request_file).read_text())
    SpecDecodeBaseProposer.propose = note
    register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    answers, freeze = {}, keep_frozen()
    for name, head in request["heads"].items():
        print(f"== HEAD {name}", flush=True)
        unreached.unlink(missing_ok=True)
        try:
            answers[name] = generate(request, head, request.get("more", {}).get(name, {}))
            answers[name]["unreached"] = json.loads(unreached.read_text()) if unreached.exists() else None
        except Exception as fault:
            answers[name] = {"error": f"{type(fault).__name__}: {fault}"}
        gc.collect()
        cleanup_dist_env_and_memory()
        freeze()
    Path(answer_file).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
