"""A head held against an engine: with stand-ins that answer what the target would, and some that do not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.heads import random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.source import Folder
from kconv.convert.execute import execute
from kconv.convert.layouts import MODELOPT, TRTLLM, by_name
from kconv.convert.plan import plan
from kconv.convert.read import Head, read_head
from kconv.errors import CountersMissing, EngineFailed, PromptsInvalid
from kconv.head.spec import Gqa, HeadSpec, Rope
from kconv.target.generate import generate_greedy
from kconv.target.model import load_target
from kconv.target.tokenizer import load_tokenizer
from kconv.tiny.text import read_corpus
from kconv.validate.engines.check import FORWARD, WITHOUT, Engined, check_engine
from kconv.validate.engines.judge import COUNTS, OUTPUT, judge
from kconv.validate.engines.simulate import simulate
from kconv.validate.figures import EngineFigures

SPEC = HeadSpec(
    attention=Gqa(4, kv_heads=2, head_dim=16), hidden=64, target_hidden=64, intermediate=96, layers=1, vocab=512,
    draft_vocab=2, rope=Rope(1e4), captured=(1, 3, 5), eps=1e-5, dtype="F32", max_positions=512,
)  # fmt: skip
STEPS, PROMPT_TOKENS, NEW_TOKENS = 3, 12, 10

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


def metrics(drafts: int, accepted: tuple[int, ...], base: int = 0) -> str:
    """Return vLLM's counters in Prometheus' text, `base` above what was counted."""
    name = "vllm:spec_decode_num_"
    lines = [
        f"{name}drafts_total {drafts + base}",
        f"{name}draft_tokens_total {STEPS * drafts + base}",
        f"{name}accepted_tokens_total {sum(accepted) + base}",
    ]
    places = [
        f'{name}accepted_tokens_per_pos_total{{position="{i}"}} {count + base}' for i, count in enumerate(accepted)
    ]
    return "\n".join(lines + places) + "\n"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = [text[:200] for text in read_corpus().held_out if len(text) > 200][:5]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="module")
def model(tiny_target):
    return load_target(tiny_target, torch.float32)


@pytest.fixture(scope="module")
def own(tiny_target, model, prompts) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts' ids, and the target's continuations."""
    tokenizer = load_tokenizer(tiny_target)
    rows = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    ids = [tokenizer.encode(row)[:PROMPT_TOKENS] for row in rows]
    return ids, generate_greedy(model, ids, NEW_TOKENS + STEPS - 1)


@pytest.fixture(scope="module")
def head(own, tmp_path_factory) -> Head:
    """Return a head that always drafts the token that the target says most often, so that some are accepted."""
    root = tmp_path_factory.mktemp("head")
    [(often, _)] = Counter(token for row in own[1] for token in row).most_common(1)
    slots = random_slots(SPEC, seed=0, without=("t2d",))
    slots |= {"lm_head": torch.zeros(2, SPEC.hidden), "d2t": torch.tensor([often, often])}
    write_head(root / "trained", MODELOPT, SPEC, slots, TRTLLM.write_config(SPEC))
    execute(plan(read_head(open_checkpoint(root / "trained"), layout=MODELOPT), by_name("vllm")), root / "vllm")
    return read_head(open_checkpoint(root / "vllm"))


@pytest.fixture(scope="module")
def known(tiny_target, model, head, own):
    """Return the prompts' ids, the target's continuations, and what kconv's chain accepts on them."""
    ids, rows = own
    expected = simulate(head, model, tiny_target, ids, rows, STEPS)
    assert sum(expected.accepted) > 3
    return ids, rows, expected


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
            "before": metrics(0, (0,) * STEPS, base=7),
            "after": metrics(expected.drafts, (places[0] - fewer, *places[1:]), base=7),
            "wrong": wrong,
            "log": str(tmp_path / "starts"),
        }
        (tmp_path / "table.json").write_text(json.dumps(table))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
        monkeypatch.setenv("STAND_IN_TABLE", str(tmp_path / "table.json"))
        return tmp_path / "starts"

    return play


@pytest.fixture
def asked(tiny_target, prompts) -> Callable[..., Engined]:
    def asked(**how) -> Engined:
        sizes = {"steps": STEPS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
        return Engined(how.pop("engine", "vllm"), Folder(tiny_target), str(prompts), **sizes | how)

    return asked


def running(starts: Path) -> list[int]:
    found = []
    for line in starts.read_text().splitlines():
        state = Path(f"/proc/{line.split()[0]}/stat")
        if state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            found.append(int(line.split()[0]))
    return found


def test_an_engine_that_does_what_the_chain_says_has_no_findings(head, play, asked, known):
    starts = play()
    found = check_engine(head, asked(python=Path(sys.executable)), lambda _: None)
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
def test_one_that_does_not_is_found(head, play, asked, how, rule):
    play(**how)
    [finding] = check_engine(head, asked(python=Path(sys.executable)), lambda _: None).findings
    assert (finding.rule, finding.severity, finding.engines) == (rule, "error", ("vllm",))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_stop_what_was_started(play, tiny_target, tmp_path, number):
    starts = play()
    # Never ready: its answers to /health are errors.
    module = tmp_path / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.write_text(PROGRAM.replace("send_response(200)", "send_response(503)"))
    program = (
        "import sys; from pathlib import Path; from kconv.validate.engines.vllm import Serving, serve\n"
        "with serve(Serving(Path(sys.executable), Path(sys.argv[1]))): pass"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tiny_target)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not starts.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(starts)
    process.send_signal(number)
    # Not of the signal itself, which would have left the rest running.
    assert process.wait(30) != -signal.SIGTERM
    assert running(starts) == []


@pytest.fixture
def server(stand_in, known, tiny_target):
    """Return a function that has the stand-in server answer as an engine that was given these counters."""
    ids, own, _ = known
    inner = load_tokenizer(tiny_target).inner

    def server(engine: str, before: str, after: str, *, wrong: bool = False) -> str:
        rows = {tuple(prompt): row[:NEW_TOKENS] for prompt, row in zip(ids, own, strict=True)}
        path = {"vllm": "/metrics", "sglang": "/metrics", "trtllm": "/prometheus/metrics"}[engine]

        def complete(body):
            row = rows[tuple(body["prompt"])]
            choice = {"text": inner.decode(row, skip_special_tokens=True) + ("!" if wrong else "")}
            if engine == "vllm":
                choice["token_ids"] = [*row[:-1], row[-1] + 1] if wrong else row
            return 200, json.dumps({"choices": [choice]})

        def count(_):
            return 200, after if any(where == "/v1/completions" for where, _ in stand_in.asked) else before

        stand_in.asked.clear()
        # Of another engine that it stood for before, nothing is left.
        stand_in.answers.clear()
        stand_in.answers |= {
            "/v1/models": (200, json.dumps({"data": [{"id": "tiny"}]})),
            "/v1/completions": complete,
            path: count,
        }
        return stand_in.url

    return server


def sglang(verified: int, generated: int, requests: int) -> str:
    return (
        f'sglang:spec_verify_calls_total{{model_name="tiny"}} {verified}.0\n'
        f'sglang:generation_tokens_total{{model_name="tiny"}} {generated}.0\n'
        f'sglang:num_requests_total{{model_name="tiny"}} {requests}.0\n'
    )


def trtllm(drafted: int, accepted: int) -> str:
    names = ("num_draft_tokens", "num_accepted_tokens")
    return "".join(
        f"trtllm_spec_decode_{name}_total {value}.0\n" for name, value in zip(names, (drafted, accepted), strict=True)
    )


def test_a_vllm_that_is_reached_is_held_against_the_targets_own_forward(head, server, asked, known):
    expected = known[2]
    places = tuple(int(count) for count in expected.accepted)
    url = server("vllm", metrics(0, (0, 0, 0), base=3), metrics(expected.drafts, places, base=3))
    found = check_engine(head, asked(url=url, engine=None), lambda _: None)
    assert found.findings == ()
    assert (found.figures.url, found.figures.reference, found.figures.same_output) == (url, FORWARD, 5)


def test_sglang_and_tensorrt_llm_are_read_by_their_own_counters(head, server, asked, known):
    expected = known[2]
    accepted = int(sum(expected.accepted))
    drafts = expected.drafts
    pages = {
        # A first token of each of the five requests comes from its prefill, and each verify call gives a bonus token.
        "sglang": (sglang(4, 20, 2), sglang(4 + drafts, 20 + 5 + drafts + accepted, 2 + 5)),
        "trtllm": (trtllm(30, 9), trtllm(30 + STEPS * drafts, 9 + accepted)),
    }
    for engine, (before, after) in pages.items():
        found = check_engine(head, asked(url=server(engine, before, after), engine=engine), lambda _: None)
        assert found.findings == (), engine
        assert (found.figures.engine, found.figures.drafts, found.figures.accepted) == (engine, drafts, accepted)
        assert found.figures.per_position is None
        assert found.figures.length == pytest.approx(expected.length)
        assert found.figures.same_output == 5


def test_a_reached_server_that_differs_is_a_warning(head, server, asked, known):
    """Its dtype may decide a near tie otherwise; only the user can tell."""
    expected = known[2]
    url = server("trtllm", trtllm(0, 0), trtllm(STEPS * expected.drafts, 1), wrong=True)
    found = check_engine(head, asked(url=url, engine=None), lambda _: None)
    assert [(f.rule, f.severity, f.engines) for f in found.findings] == [
        (OUTPUT, "warning", ("trtllm",)),
        (COUNTS, "warning", ("trtllm",)),
    ]


def test_what_cannot_be_asked_is_told(head, server, asked, known, tmp_path):
    with pytest.raises(EngineFailed, match="no environment with vLLM"):
        check_engine(head, asked(), lambda _: None)
    with pytest.raises(EngineFailed, match="does not answer"):
        check_engine(head, asked(url="http://127.0.0.1:1"), lambda _: None)
    url = server("trtllm", trtllm(0, 0), trtllm(3, 1))
    with pytest.raises(EngineFailed, match="sglang is asked for, and this is trtllm"):
        check_engine(head, asked(url=url, engine="sglang"), lambda _: None)
    empty = tmp_path / "absent.jsonl"
    with pytest.raises(PromptsInvalid):
        check_engine(head, Engined("vllm", Folder(tmp_path), str(empty)), lambda _: None)


def test_a_server_that_drafts_nothing_is_told(head, server, asked):
    nothing = metrics(0, (0, 0, 0))
    with pytest.raises(CountersMissing, match="drafted nothing"):
        check_engine(head, asked(url=server("vllm", nothing, nothing)), lambda _: None)


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
    assert {finding.severity for finding in found} <= {"error" if strict else "warning"}
