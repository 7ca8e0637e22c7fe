"""SmolLM2's MLP in NVFP4: what lm_eval says of it and of its source, served by vLLM, and the card of its release."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

from kconv.tiny.text import read_corpus

from .vllm_nvfp4 import serve_nvfp4

TASK = "python_docs"
RECIPE = """name: nvfp4-mlp-four-over-six
about: the MLP in NVFP4 with the better of two scales for each block, attention as it is
quantize: ["model.layers.*.mlp.*_proj"]
weight_scales: four-over-six
"""
FACTS = """name: your-org/SmolLM2-135M-Instruct-NVFP4
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
license: {id: apache-2.0}
notes:
  performance:
    - >-
      `python_docs` asks which of four pieces of Python's own documentation continues some twenty words of it; the other
      three are of other texts. vLLM 0.32.0 served both models for it, in bfloat16 on a CPU, where it emulates NVFP4.
      Perplexity, by kconv itself, is of such texts too. The source's weights were read from a GGUF file, most of them
      Q4_1.
"""
DESCRIBED = """task: python_docs
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 1.0}
"""


def write_texts(calibration: Path, held_out: Path) -> None:
    """Write the texts that input scales are calibrated on, and those that perplexity is measured on."""
    corpus = read_corpus()
    fit = [text for text in corpus.train if len(text) > 400]
    random.Random(0).shuffle(fit)
    rest = [text for text in corpus.held_out if len(text) > 300]
    for file, texts in ((calibration, [text[:2000] for text in fit[:128]]), (held_out, rest)):
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def write_task(folder: Path) -> None:
    """Write lm_eval's task over held-out text."""
    pairs: list[tuple[str, str]] = []
    for text in (" ".join(text.split()) for text in read_corpus().held_out):
        at = 0
        while len(text) - at >= 200:
            cut = text.find(" ", at + 120)
            end = text.find(" ", cut + 60)
            if cut < 0 or end < 0:
                break
            pairs.append((text[at:cut], text[cut:end]))
            at = end + 1
    lines = []
    for i, (asked, right) in enumerate(pairs):
        count, place = len(pairs), i % 4
        others = [pairs[(i + step) % count][1] for step in (count // 4, count // 2, 3 * count // 4)]
        choices = [*others[:place], right, *others[place:]]
        lines.append(json.dumps({"text": asked, "choices": choices, "answer": place}) + "\n")
    folder.mkdir(exist_ok=True)
    (folder / f"{TASK}.jsonl").write_text("".join(lines))
    (folder / f"{TASK}.yaml").write_text(DESCRIBED.replace("QUESTIONS", str(folder / f"{TASK}.jsonl")))


def ask_lm_eval(lm_eval: Path, python: Path, target: Path, tasks: Path, out: Path) -> Path:
    """Have lm_eval ask vLLM about a target, unless it was asked, and return the file that it wrote."""
    if not out.exists():
        with serve_nvfp4(python, target, max_model_len=2048) as url:
            words = ["--model", "local-completions", "--tasks", TASK, "--include_path", tasks, "--num_fewshot", "0"]
            asked = f"model={target},base_url={url}/v1/completions,num_concurrent=8,timeout=3600"
            home = {"HF_HOME": str(tasks / "hf"), "HF_HUB_OFFLINE": "1"}
            command = [lm_eval, *words, "--output_path", out, "--model_args", asked]
            subprocess.run(command, check=True, env=os.environ | home, cwd=tasks)
    [found] = out.rglob("results_*.json")
    return found
