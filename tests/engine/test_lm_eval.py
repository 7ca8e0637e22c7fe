"""lm_eval asks vLLM about a target and its NVFP4, by the guide's own commands, and kconv reads what it wrote."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from real_parts.vllm_nvfp4 import serve_nvfp4
from support.families import write_target

from kconv.cards.card import gather, make_card
from kconv.cards.facts import Facts
from kconv.cli import main
from kconv.operations.base import Context
from kconv.operations.validate import Validate
from kconv.tiny.text import read_corpus

pytestmark = [pytest.mark.slow, pytest.mark.release, pytest.mark.engine]

GUIDE = Path(__file__).parent.parent.parent / "docs" / "guides" / "quantize.md"
TASKS = ("order", "word")
# What a tiny model knows of its corpus: more often than not in which order words stand, and at times the next one.
ORDERED = """
task: order
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
WRITTEN = """
task: word
output_type: generate_until
doc_to_target: "{{word}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
filter_list:
  - {name: strict, filter: [{function: regex, regex_pattern: "^ (\\\\w+)\\\\b"}, {function: take_first}]}
  - {name: flexible, filter: [{function: regex, regex_pattern: "(\\\\w+)"}, {function: take_first}]}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
BOTH = """
dataset_path: json
dataset_kwargs: {data_files: {train: TRAIN, test: TEST}}
test_split: test
fewshot_split: train
doc_to_text: "{{text}}"
target_delimiter: ""
metadata: {version: 1.0}
"""


@pytest.fixture(scope="module")
def pair(tiny_target, tmp_path_factory) -> dict[str, Path]:
    """Return the folders of a dense target, all of whose linears vLLM serves in NVFP4 on a CPU, and of its NVFP4."""
    root = tmp_path_factory.mktemp("pair")
    source = write_target(root / "source", "llama", tiny_target)
    words = ["quantize", source, root / "nvfp4", "--recipe", "nvfp4", "--input-scale", "data-free"]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return {"source": source, "nvfp4": root / "nvfp4"}


def write_tasks(folder: Path) -> None:
    """Write two tasks over held-out text, and the text of their few-shot examples."""
    folder.mkdir()
    for split, texts in (("train", read_corpus().train), ("test", read_corpus().held_out)):
        lines = []
        for text in texts:
            words = text.split()
            if len(words) > 16 and all(word.isascii() for word in words[:16]) and words[12].isalpha():
                rest = words[12:16]
                orders = (rest, rest[::-1], [*rest[1:], rest[0]])
                choices = ["".join(f" {word}" for word in order) for order in orders]
                lines.append({"text": " ".join(words[:12]), "choices": choices, "word": words[12]})
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines[:60]))
    both = BOTH.replace("TRAIN", str(folder / "train.jsonl")).replace("TEST", str(folder / "test.jsonl"))
    for name, task in zip(TASKS, (ORDERED, WRITTEN), strict=True):
        (folder / f"{name}.yaml").write_text(task + both)


def command(name: str, model: Path, url: str, out: Path) -> list[str]:
    """Return the guide's command for one of the two, with this test's tasks, model and server."""
    lines = GUIDE.read_text().replace("\\\n", " ").splitlines()
    [found] = [line for line in lines if line.startswith("lm_eval ") and f"results/{name}" in line]
    changed, count = re.subn(
        r"model=\S+?,base_url=\S+?/v1/completions", f"model={model},base_url={url}/v1/completions", found
    )
    assert count == 1
    changed = changed.replace("gsm8k", ",".join(TASKS)).replace(f"results/{name}", str(out))
    return shlex.split(changed)


def ask(lm_eval: Path, words: list[str], folder: Path) -> None:
    done = subprocess.run(
        [lm_eval, *words[1:], "--include_path", folder / "tasks"],
        env=os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_what_lm_eval_measured_on_vllm_stands_in_report_and_card(engine_python, lm_eval, pair, tmp_path):
    write_tasks(tmp_path / "tasks")
    written = {}
    for name, folder in pair.items():
        with serve_nvfp4(engine_python, folder, max_model_len=512) as url:
            words = command(name, folder, url, tmp_path / name)
            ask(lm_eval, words, tmp_path)
        [written[name]] = (tmp_path / name).rglob("results_*.json")
    asked = {"results": [str(written["nvfp4"])], "source_results": [str(written["source"])]}
    report = Validate(head=str(pair["nvfp4"]), source=str(pair["source"]), **asked).run(Context())
    rows = report.figures.accuracy
    keys = {
        "acc": ("order", "acc"),
        **{f"exact_match, {kept}": ("word", "exact_match") for kept in ("strict", "flexible")},
    }
    assert {row.metric: row.task for row in rows} == {metric: task for metric, (task, _) in keys.items()}
    told = {name: json.loads(file.read_text())["results"] for name, file in written.items()}
    for row in rows:
        task, metric = keys[row.metric]
        kept = row.metric.partition(", ")[2] or "none"
        values = [
            told[name][task][f"{metric}{what},{kept}"] for name in ("nvfp4", "source") for what in ("", "_stderr")
        ]
        assert [row.output, row.output_error, row.source, row.source_error] == values
        assert (row.shots, row.harness) == ("5", "lm_eval 0.4.13")
        print(f"\n{row.task}, {row.metric}: {row.source:.1%}, in NVFP4 {row.output:.1%}, of {row.questions}")
    ordered = rows[0]
    # Of three, by chance a third.
    assert ordered.source > 0.5 and ordered.output > 0.5
    assert 0 < rows[2].source < 1
    card = make_card(gather(pair["nvfp4"], report, Facts())).text
    assert f"| order | 5 | acc | {ordered.questions} | {ordered.output:.2%} ± {ordered.output_error:.2%} |" in card
