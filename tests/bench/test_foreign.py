"""Figures of other programs: read as their sources write them, with their origin, and with nothing added."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kconv.bench.acceptance import AcceptanceRow, read_acceptance
from kconv.cli import main

# vLLM 0.32, vllm/benchmarks/serve.py: result_json, without --save-detailed.
VLLM = {
    "date": "20261120-101500", "endpoint_type": "openai-chat", "backend": "openai-chat", "label": None,
    "model_id": "nvidia/Kimi-K2.6-NVFP4", "tokenizer_id": "nvidia/Kimi-K2.6-NVFP4", "num_prompts": 80,
    "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 16, "duration": 81.5, "completed": 80, "failed": 0,
    "total_input_tokens": 1000, "total_output_tokens": 9000, "output_throughput": 110.4,
    "spec_decode_acceptance_rate": 50.0, "spec_decode_acceptance_length": 2.5, "spec_decode_num_drafts": 4000,
    "spec_decode_draft_tokens": 12000, "spec_decode_accepted_tokens": 6000,
    "spec_decode_per_position_acceptance_rates": [0.75, 0.5, 0.25],
}  # fmt: skip
# AIPerf 0.13, JsonExportData; a histogram's keys are JSON's, so texts.
AIPERF = {
    "schema_version": "1.4", "aiperf_version": "0.13.0", "benchmark_id": "x",
    "request_count": {"unit": "requests", "avg": 80.0},
    "spec_decode_token_weighted_acceptance_length": {"unit": "ratio", "avg": 2.5},
    "pooled_spec_decode_acceptance_histogram": {"0": 1000, "1": 1000, "2": 1000, "3": 1000},
    "input_config": {"models": {"items": [{"name": "nvidia/Kimi-K2.6-NVFP4"}]},
                     "datasets": [{"format": "speed_bench_coding"}]},
    "start_time": "2026-11-20T10:15:00.123456", "was_cancelled": False,
}  # fmt: skip
# SGLang 0.5.23, sglang/benchmark/serving.py: a line of its JSONL.
SGLANG = {
    "tag": None, "backend": "sglang", "dataset_name": "speed-bench", "request_rate": "inf", "max_concurrency": 16,
    "duration": 10.0, "completed": 80, "accept_length": 2.5, "server_info": {
        "model_path": "nvidia/Kimi-K2.6-NVFP4", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4, "version": "0.5.23", "internal_states": [{"avg_spec_accept_length": 2.5}],
    },
}  # fmt: skip


def quoted(tmp_path: Path, result: Any, *options: object, name: str = "result.json") -> Result:
    file = tmp_path / name
    file.write_text(result if isinstance(result, str) else json.dumps(result))
    words = ["quote", file, "--head", "org/my-head", "--out", tmp_path / "a.json", *options]
    return CliRunner().invoke(main, [str(word) for word in words])


def row_of(tmp_path: Path, result: Any, *options: object) -> AcceptanceRow:
    ran = quoted(tmp_path, result, *options)
    assert ran.exit_code == 0, ran.output
    [row] = read_acceptance(tmp_path / "a.json").rows
    return row


@pytest.mark.parametrize(
    "result, options, told",
    [
        (VLLM, ("--dataset", "speed-bench", "--category", "coding"),
         {"engine": "vllm", "draft_tokens": 3, "prompts": 80, "date": "2026-11-20", "engine_version": None}),
        (AIPERF, ("--draft-tokens", 3),
         {"engine": None, "prompts": 80, "date": "2026-11-20", "category": "coding", "draft_tokens": 3}),
        (SGLANG, ("--category", "coding"),
         {"engine": "sglang", "engine_version": "0.5.23", "draft_tokens": 3, "tree": "chain", "prompts": None}),
    ],
    ids=["vllm", "aiperf", "sglang"],
)  # fmt: skip
def test_a_result_becomes_a_row_of_its_origin(tmp_path, result, options, told):
    row = row_of(tmp_path, result, *options)
    assert (row.value, row.averaging, row.metric) == (2.5, "micro_steps", "al_incl_bonus")
    assert row.target == "nvidia/Kimi-K2.6-NVFP4" and row.line["dataset"] == "SPEED-Bench"
    assert {name: row[name] for name in told} == told
    digest = hashlib.sha256((tmp_path / "result.json").read_bytes()).hexdigest()
    assert row.measured_by == "quoted" and row.url == f"result.json, sha256 {digest}"
    assert row.note.startswith("from a result of ")
    # Neither says these, so nothing makes them up.
    assert row.precision is None and row.temperature is None and row.revision is None


def test_what_the_user_says_fills_in_and_never_overrules(tmp_path):
    options = (
        "--dataset",
        "mt-bench",
        "--temperature",
        0,
        "--engine-version",
        "0.32.0",
        "--url",
        "https://x.org/r.json",
    )
    row = row_of(tmp_path, VLLM, *options, "--draft-sample-method", "greedy")
    assert (row.temperature, row.engine_version, row.draft_sample_method) == (0.0, "0.32.0", "greedy")
    assert row.url == "https://x.org/r.json"
    for option, value, said in (("--draft-tokens", 5, "3 in the file"), ("--engine", "sglang", "vllm in the file")):
        (tmp_path / "a.json").unlink(missing_ok=True)
        ran = quoted(tmp_path, VLLM, "--dataset", "mt-bench", option, value)
        assert ran.exit_code == 1 and said in ran.output and not (tmp_path / "a.json").exists()


def test_several_lines_are_several_rows(tmp_path):
    lines = [
        SGLANG | {"accept_length": 1.75, "server_info": SGLANG["server_info"] | {"speculative_num_steps": 1}},
        SGLANG,
    ]
    ran = quoted(tmp_path, "\n".join(map(json.dumps, lines)))
    assert ran.exit_code == 0, ran.output
    rows = read_acceptance(tmp_path / "a.json").rows
    assert [(row.draft_tokens, row.value) for row in rows] == [(1, 1.75), (3, 2.5)]


WRONG = {
    "a run without drafts": ({k: v for k, v in VLLM.items() if "spec" not in k}, "has no draft figures"),
    "failed requests": (VLLM | {"failed": 2}, "2 requests failed"),
    "a run that was cancelled": (AIPERF | {"was_cancelled": True}, "was not finished"),
    "no histogram": ({k: v for k, v in AIPERF.items() if "pooled" not in k}, "has no draft figures"),
    "forged": (SGLANG | {"server_info": {"SGLANG_SIMULATE_ACC_LEN": "2.5"}}, "forged its acceptance"),
    "something else": ({"a": 1}, "not a result of a program that kconv knows"),
    "no JSON": ("{", "is not valid JSON"),
    "a histogram of words": (AIPERF | {"pooled_spec_decode_acceptance_histogram": {"x": 1}}, "not a result of AIPerf"),
    "more than K + 1": (VLLM | {"spec_decode_accepted_tokens": 60000}, "is not from 1 to 4"),
}  # fmt: skip


@pytest.mark.parametrize("result, said", WRONG.values(), ids=WRONG)
def test_what_cannot_be_a_figure_is_refused(tmp_path, result, said):
    ran = quoted(tmp_path, result, "--dataset", "mt-bench")
    assert ran.exit_code == 1 and said in ran.output and not (tmp_path / "a.json").exists()


def test_a_result_that_names_no_suite_asks_for_it(tmp_path):
    ran = quoted(tmp_path, VLLM)
    assert ran.exit_code == 1 and "--dataset" in ran.output


# Found by changing results at random: each ended in a traceback, or took all memory.
HOSTILE = {
    "a place of ten thousand million": AIPERF | {"pooled_spec_decode_acceptance_histogram": {"9999999999": 1}},
    "an infinite place": AIPERF | {"pooled_spec_decode_acceptance_histogram": {"0": 1e999}},
    "fewer than no steps": AIPERF | {"pooled_spec_decode_acceptance_histogram": {"0": 5, "1": -4}},
    "an infinite number of requests": AIPERF | {"request_count": {"avg": 1e999}},
    "counts beyond a float": VLLM | {"spec_decode_num_drafts": 1, "spec_decode_accepted_tokens": 10**400},
    "nothing": "",
    "blank lines": "\n \n",
}


@pytest.mark.parametrize("result", HOSTILE.values(), ids=HOSTILE)
def test_a_result_that_nobody_measured_is_refused_and_takes_no_memory(tmp_path, result):
    ran = quoted(tmp_path, result, "--dataset", "speed-bench", "--draft-tokens", "3")
    assert ran.exit_code == 1 and "error: " in ran.output, ran.exception
    assert not (tmp_path / "a.json").exists()
