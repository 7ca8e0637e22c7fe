"""Run by SGLang's python, not by the tests': serve one target with several heads and write down what they draft.

    python sglang_drafts.py request.json answer.json START_SERVER

The request is {"prompts": lists of token ids, "new_tokens": N, "jobs": {name: {"engine": keyword arguments of
sgl.Engine, "look_ahead": how many tokens more are generated}}}. The answer gives by name {"outputs": ids per prompt,
"meta": what SGLang says of each request, "captured": the layers whose inputs the target's class was told to keep,
"unreached": names of parameters that no tensor reached}, or {"error": text}. SGLang is imported once and each engine
forked from here, so a head takes seconds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path

CAPTURED = "SGLANG_DRAFTS_CAPTURED"
SETTINGS = {
    "device": "cpu",
    "attention_backend": "intel_amx",
    "tp_size": 1,
    "mem_fraction_static": 0.95,
    "max_total_tokens": 16384,
    "context_length": 256,
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "log_level": "warning",
}


def watch_captured() -> None:
    """Write down which streams a target's class keeps for the head."""
    from sglang.srt.models import deepseek_v2, llama  # pyright: ignore[reportMissingImports]

    for one in (deepseek_v2.DeepseekV2ForCausalLM, llama.LlamaForCausalLM):
        own = one.set_eagle3_layers_to_capture

        def told(self, layer_ids=None, own=own):
            own(self, layer_ids)
            Path(os.environ[CAPTURED]).write_text(json.dumps(list(self.model.layers_to_capture)))

        one.set_eagle3_layers_to_capture = told


def zero_memory() -> None:
    """Let fresh memory hold zeros, so that what no tensor reaches counts the same in each run."""
    import torch

    empty = torch.empty
    torch.empty = lambda *size, **options: empty(*size, **options).zero_()


def serve(request: dict, job: dict) -> dict:
    import sglang  # pyright: ignore[reportMissingImports]

    engine = sglang.Engine(**SETTINGS | {"max_running_requests": len(request["prompts"])} | job["engine"])
    sampling = {"temperature": 0, "max_new_tokens": request["new_tokens"] + job.get("look_ahead", 0)}
    done = engine.generate(input_ids=request["prompts"], sampling_params=sampling | {"ignore_eos": True})
    answer = {
        "outputs": [one["output_ids"] for one in done],
        "meta": [{k: v for k, v in one["meta_info"].items() if k.startswith("spec_")} for one in done],
    }
    engine.shutdown()
    return answer


def run(request: dict, job: dict, out: Path) -> None:
    """Serve one head in a process forked from this one, and write the answer."""
    os.environ["KCONV_UNREACHED"], os.environ[CAPTURED] = f"{out}.unreached", f"{out}.captured"
    with Path(f"{out}.log").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        answer = serve(request, job)
        for key in ("unreached", "captured"):
            file = Path(f"{out}.{key}")
            answer[key] = json.loads(file.read_text()) if file.exists() else None
    except BaseException:
        answer = {"error": traceback.format_exc()}
    out.write_text(json.dumps(answer))


def main(request_file: str, answer_file: str, start_server: str) -> None:
    spec = importlib.util.spec_from_file_location("start_server", start_server)
    assert spec and spec.loader
    starting = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(starting)
    starting.prepare(str(Path(start_server).with_name("watch_sglang.py")))
    zero_memory()
    import sglang.srt.entrypoints.engine  # pyright: ignore[reportMissingImports]
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401  # pyright: ignore[reportMissingImports]

    watch_captured()
    request, answer = json.loads(Path(request_file).read_text()), Path(answer_file)
    answers = {}
    for number, (name, job) in enumerate(request["jobs"].items()):
        out = answer.with_suffix(f".{number}")
        if not (process := os.fork()):
            os.setsid()
            run(request, job, out)
            os._exit(0)
        os.waitpid(process, 0)
        log = Path(f"{out}.log").read_text(errors="replace")
        found = json.loads(out.read_text()) if out.exists() else {"error": f"SGLang died\n{log[-3000:]}"}
        answers[name] = found | {"log": log}
    answer.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
