"""Answers from a server on the loopback that stands in for an engine's, and misbehaves where it is told to."""

from __future__ import annotations

import gzip
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from click.testing import CliRunner
from support.loopback import serving, trickling

from kconv.checkpoint import posix, staging
from kconv.cli import main
from kconv.errors import EngineFailed, OutputExists, PromptsInvalid, ServerUnreachable
from kconv.serving import client as http
from kconv.targets.dialogues import read_rows
from kconv.targets.prompts import Prompt, read_prompts
from kconv.train import generate as generating
from kconv.train.generate import generate
from kconv.train.options import GenerateOptions

Answer = tuple[int, Any]


@dataclass
class Server:
    """What the server says to the messages it is asked, how often each last turn was asked, and the requests.

    Attributes:
        raw: whole answers, by last turn, in place of what it says.
    """

    url: str = ""
    say: Callable[[list[dict[str, str]], int], Answer] = lambda messages, _: (200, messages[-1]["content"].upper())
    asked: Counter[str] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def server() -> Iterator[Server]:
    said = Server()

    def answer(_: str, body: Any) -> Any:
        if body is None:
            return 404, "there are prompts to ask"
        last = body["messages"][-1]["content"]
        said.asked[last] += 1
        status, text = said.say(body["messages"], said.asked[last])
        message = {"role": "assistant"} | (text if isinstance(text, dict) else {"content": text})
        said.bodies.append(body)
        if last in said.raw:
            found = said.raw[last]
            return found() if callable(found) else found
        choice = {"message": message, "finish_reason": "stop"}
        return status, json.dumps({"choices": [choice]} if status == 200 else {"error": text})

    with serving(answer) as said.url:
        yield said


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(generating, "LONGEST_PAUSE", 0.0)


PROMPTS = [Prompt("a", "math", ("one", "two")), Prompt("b", "", ("three",)), Prompt("c", "", ("four",))]


def lines(file) -> dict[str, dict]:
    return {line["id"]: line for line in map(json.loads, file.read_text().splitlines())}


def test_every_turn_is_answered_in_the_light_of_those_before(server, tmp_path):
    server.say = lambda messages, _: (200, f"{len(messages)}:{messages[0]['content']}")
    assert generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), tmp_path / "out.jsonl") == {
        "answered": 3,
        "skipped": 0,
    }
    said = [m["content"] for m in lines(tmp_path / "out.jsonl")["a"]["messages"]]
    assert said == ["one", "1:one", "two", "3:one"]


def test_what_comes_out_is_training_data(server, tmp_path):
    generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), tmp_path / "out.jsonl")
    assert all(row["messages"][-1]["role"] == "assistant" for _, row in read_rows(str(tmp_path / "out.jsonl")))


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_what_a_reasoning_parser_took_out_is_kept_and_not_sent_again(server, tmp_path, name):
    server.say = lambda messages, _: (200, {"content": "yes", name: f"thought {len(messages)}"})
    generate(PROMPTS[:1], http.Client(server.url, "m"), GenerateOptions(), tmp_path / "out.jsonl")
    said = lines(tmp_path / "out.jsonl")["a"]["messages"]
    assert [turn.get("reasoning_content") for turn in said] == [None, "thought 1", None, "thought 3"]
    assert all(turn.keys() == {"role", "content"} for body in server.bodies for turn in body["messages"])


def test_a_stopped_run_goes_on_and_asks_only_what_is_left(server, tmp_path):
    out = tmp_path / "out.jsonl"
    generate(PROMPTS[:2], http.Client(server.url, "m"), GenerateOptions(), out)
    # A kill in the middle of a line.
    out.write_text(out.read_text() + '{"id": "c", "digest": "')
    assert generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), out) == {
        "answered": 1,
        "skipped": 2,
    }
    assert server.asked == {"one": 1, "two": 1, "three": 1, "four": 1}
    assert lines(out).keys() == {"a", "b", "c"}


def test_a_run_that_was_stopped_leaves_the_same_bytes(server, tmp_path):
    # Whoever is answered first: the slowest prompt stands first.
    server.say = lambda messages, _: time.sleep(0.1 * (messages[-1]["content"] == "two")) or (200, "yes")
    generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), tmp_path / "whole.jsonl")
    generate(PROMPTS[2:], http.Client(server.url, "m"), GenerateOptions(), tmp_path / "out.jsonl")
    generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert [line["id"] for line in lines(tmp_path / "whole.jsonl").values()] == ["a", "b", "c"]
    # What other prompts were answered with is kept.
    generate([Prompt("d", "", ("five",))], http.Client(server.url, "m"), GenerateOptions(), tmp_path / "out.jsonl")
    assert list(lines(tmp_path / "out.jsonl")) == ["a", "b", "c", "d"]


def test_sigterm_waits_for_no_answer_and_keeps_what_was_written(server, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    texts = ["slow", "three", "four", "slower"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    ended = threading.Event()
    server.say = lambda messages, _: ("slow" not in messages[-1]["content"] or ended.wait()) and (200, "yes")
    words = ["generate", "--url", server.url, "--model", "m", "--prompts", prompts, "--out", out, "--concurrency", 3]
    program = [sys.executable, "-c", "from kconv.cli import main; main()", *map(str, words)]
    with subprocess.Popen(program, stderr=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None and not (out.exists() and len(out.read_text().splitlines()) == 2):
                time.sleep(0.01)
            process.terminate()
            # The two that are asked for are never answered.
            code = process.wait(60)
        finally:
            process.kill()
            ended.set()
    assert code == 128 + signal.SIGTERM
    assert [line["messages"][0]["content"] for line in map(json.loads, out.read_text().splitlines())] == texts[1:3]
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []
    assert generate(read_prompts(prompts), http.Client(server.url, "m"), GenerateOptions(), out) == {
        "answered": 2,
        "skipped": 2,
    }


def test_what_got_no_answer_is_no_training_data(server, tmp_path):
    out = tmp_path / "out.jsonl"
    server.say = lambda messages, _: (400, "no") if messages[-1]["content"] == "three" else (200, "yes")
    generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), out)
    assert [row["id"] for _, row in read_rows(str(out))] == ["a", "c"]


def test_a_failed_prompt_is_accounted_for_and_asked_again(server, tmp_path):
    out = tmp_path / "out.jsonl"
    server.say = lambda messages, _: (400, "no") if messages[-1]["content"] == "three" else (200, "yes")
    assert generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), out) == {
        "answered": 2,
        "failed": 1,
        "skipped": 0,
    }
    assert "400" in lines(out)["b"]["failed"]
    server.say = lambda *_: (200, "yes")
    assert generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), out) == {
        "answered": 1,
        "skipped": 2,
    }
    assert "messages" in lines(out)["b"]


def test_a_busy_server_is_asked_again(server, tmp_path):
    server.say = lambda _, times: (503, "busy") if times < 3 else (200, "yes")
    assert generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), tmp_path / "out.jsonl") == {
        "answered": 3,
        "skipped": 0,
    }
    assert set(server.asked.values()) == {3}


@pytest.mark.parametrize("answer", [(200, ""), (200, None), (429, "wait"), (401, "who are you")])
def test_a_server_that_answers_nothing_is_a_fault(server, tmp_path, answer):
    server.say = lambda *_: answer
    with pytest.raises(EngineFailed, match="none of 3 prompts"):
        generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), tmp_path / "out.jsonl")


def test_a_server_that_is_not_there_is_a_fault(tmp_path):
    with pytest.raises(EngineFailed, match="does not answer: Connection refused"):
        generate(PROMPTS, http.Client("http://127.0.0.1:9", "m"), GenerateOptions(), tmp_path / "out.jsonl")


def test_a_file_of_something_else_is_not_written_to(server, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text('{"question": "?"}\n[]\n')
    with pytest.raises(PromptsInvalid, match="other than answers"):
        generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), out)
    assert not server.asked


@pytest.mark.parametrize("other", [{"model": "tuned"}, {"temperature": 1.0}])
def test_answers_of_another_model_or_temperature_are_not_mixed_in(server, tmp_path, other):
    out = tmp_path / "dialogues.jsonl"

    def ask(**changed):
        name = changed.pop("model", "target")
        return generate(PROMPTS[:2], http.Client(server.url, name, 10), GenerateOptions(**changed), out)

    ask()
    before, asked = out.read_bytes(), server.asked.total()
    (key,) = other
    with pytest.raises(OutputExists, match=f"holds answers with the {key}"):
        ask(**other)
    assert (out.read_bytes(), server.asked.total()) == (before, asked)
    # More tokens may answer what failed.
    ask(max_tokens=8192)


def test_a_recipes_step_asks_only_what_got_no_answer(server, tmp_path):
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "chain.yaml"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("three", "four", "five")))
    step = {"do": "generate", "url": server.url, "model": "m", "prompts": str(prompts), "concurrency": 1}
    file.write_text(json.dumps({"name": "chain", "steps": {"dialogues": step}}))
    words = ["run", str(file), "--out", str(tmp_path / "root")]
    server.say = lambda messages, _: (400, "no") if messages[-1]["content"] == "four" else (200, "yes")
    assert CliRunner().invoke(main, words).exit_code == 1
    server.say = lambda messages, _: (200, "yes")
    server.asked.clear()
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert server.asked == {"four": 1}
    # Another recipe's answers are not gone on with.
    file.write_text(json.dumps({"name": "chain", "steps": {"dialogues": step | {"temperature": 0}}}))
    assert CliRunner().invoke(main, words).exit_code == 0
    assert server.asked == {"four": 2, "three": 1, "five": 1}


def test_two_runs_with_one_output_lose_no_answer(server, tmp_path):
    out, going, go_on = tmp_path / "out.jsonl", threading.Event(), threading.Event()
    server.say = lambda *_: going.set() or (go_on.wait(60) and (200, "yes"))
    first = threading.Thread(target=generate, args=(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), out))
    first.start()
    try:
        assert going.wait(60)
        with pytest.raises(OutputExists, match=r"another run is writing .*out\.jsonl"):
            generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), out)
    finally:
        go_on.set()
        first.join()
    assert lines(out).keys() == {"a", "b", "c"}
    assert generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), out) == {"skipped": 3}


def test_a_file_that_was_replaced_while_its_lock_was_waited_for_is_not_taken(tmp_path, monkeypatch):
    """The lock would be on the file before, which a run that ends renames its ordered answers over."""
    out, flock = tmp_path / "out.jsonl", posix.fcntl.flock
    out.touch()

    def late(*how):
        (tmp_path / "ordered").touch()
        (tmp_path / "ordered").replace(out)
        flock(*how)

    monkeypatch.setattr(posix.fcntl, "flock", late)
    with pytest.raises(OutputExists, match="busy"), staging.alone(out, OutputExists("busy")):
        pass


NOT_ANSWERS = {
    "settings": b'{"my": "settings"}',
    "notes": b"first\nlast line",
    "a value with an id": b'{"id": "a", "digest": "b", "mine": 1}',
    "beside answers": b'{"id": "a", "digest": "b", "failed": "c"}\n{"my": "settings"}',
    "an object over lines": b'{"id": "a",\n "digest": "b"',
    "another digest": b'{"digest": 5, "messages": []}\n',
    "bytes": b"\xff\xfe",
}


@pytest.mark.parametrize("content", NOT_ANSWERS.values(), ids=NOT_ANSWERS)
def test_a_file_of_something_else_is_left_as_it_is(server, tmp_path, content):
    out = tmp_path / "out.jsonl"
    out.write_bytes(content)
    with pytest.raises(PromptsInvalid, match="other than answers"):
        generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), out)
    assert out.read_bytes() == content and not server.asked


def test_an_answer_that_was_cut_anywhere_is_asked_for_again(server, tmp_path):
    out, prompts = tmp_path / "out.jsonl", [Prompt("b", "", ("three",)), Prompt('"ä\\', "", ("four",))]
    generate(prompts, http.Client(server.url, "m"), GenerateOptions(), out)
    whole = out.read_bytes()
    first, second = whole.splitlines(keepends=True)
    for size in (*range(40), len(second) - 9, len(second) - 2):
        out.write_bytes(first + second[:size])
        assert generate(prompts, http.Client(server.url, "m"), GenerateOptions(), out) == {
            "answered": 1,
            "skipped": 1,
        }
        assert out.read_bytes() == whole
    # Only the line break is missing.
    out.write_bytes(whole[:-1])
    assert generate(prompts, http.Client(server.url, "m"), GenerateOptions(), out) == {"skipped": 2}
    assert out.read_bytes() == whole


def choice(content: Any = "yes", reason: Any = "stop", **message: Any) -> str:
    said = {"message": {"content": content} | message, "finish_reason": reason}
    return json.dumps({"choices": [said]})


ODD = {
    "deep": "[" * 200_000,
    "half a pair": choice("a\ud800b"),
    "half a pair of reasoning": choice(reasoning="\udfff"),
    "a number": choice(5),
    "a list": choice(["yes"]),
    "an object": choice({"text": "yes"}),
    "reasoning in a list": choice(reasoning_content=["yes"]),
    "no reason": choice(reason=float("nan")),
    "an object of a reason": choice(reason={}),
    "a text of a message": json.dumps({"choices": [{"message": "yes", "finish_reason": "stop"}]}),
    "no choice": json.dumps({"choices": []}),
    "a list of choices": "[]",
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
def test_an_odd_answer_is_one_failed_prompt(server, tmp_path, answer):
    out = tmp_path / "out.jsonl"
    server.raw = {"three": (200, answer)}
    assert generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), out) == {
        "answered": 2,
        "failed": 1,
        "skipped": 0,
    }
    assert "not a chat completion" in lines(out)["b"]["failed"]
    with pytest.raises(EngineFailed, match=r"none of 1 prompts was answered.+not a chat completion"):
        generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), out)
    server.raw.clear()
    assert generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), out) == {
        "answered": 1,
        "skipped": 2,
    }


@pytest.mark.parametrize("packed", [False, True])
def test_an_answer_without_end_is_one_failed_prompt(server, tmp_path, monkeypatch, packed):
    monkeypatch.setattr(http, "LARGEST", 1 << 20)
    body = b" " * (2 << 20)
    server.raw = {"three": (200, gzip.compress(body), {"Content-Encoding": "gzip"}) if packed else (200, body)}
    counts = generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), tmp_path / "out.jsonl")
    assert counts == {"answered": 2, "failed": 1, "skipped": 0}
    assert "larger than" in lines(tmp_path / "out.jsonl")["b"]["failed"]


def test_an_answer_that_trickles_is_one_failed_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr(generating, "CONNECT_SECONDS", 0.3)
    (tmp_path / "out.jsonl").touch()
    # The first is asked whether it is there.
    with trickling(2) as url, pytest.raises(EngineFailed, match=r"none of 1 prompts was answered.*takes too long"):
        generate(PROMPTS[1:2], http.Client(url, "m", 0.3), GenerateOptions(), tmp_path / "out.jsonl")


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:9\r", "http://127.0.0.1:99999", "http:///v1"])
def test_what_is_no_address_is_named(tmp_path, url):
    with pytest.raises(ServerUnreachable):
        generate(PROMPTS, http.Client(url, "m"), GenerateOptions(), tmp_path / "out.jsonl")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "three"}\n')
    words = ["generate", "--url", url, "--model", "m", "--prompts", prompts, "--out", tmp_path / "out.jsonl"]
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == 2 and "is not the address of a server" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_pause_that_is_no_number_is_not_taken_for_one(server, tmp_path):
    answers = iter([(503, "busy", {"Retry-After": "\u00b2"}), (200, choice())])
    server.raw = {"three": lambda: next(answers)}
    assert generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), tmp_path / "out.jsonl") == {
        "answered": 3,
        "skipped": 0,
    }


def test_a_file_keeps_its_mode_and_no_link_beside_it_is_followed(server, tmp_path):
    out, other = tmp_path / "out.jsonl", tmp_path / "other"
    other.write_text("of somebody else")
    (tmp_path / ".out.jsonl.ordered").symlink_to(other)
    out.touch(0o600)
    generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert other.read_text() == "of somebody else" and lines(out).keys() == {"a", "b", "c"}


def test_a_link_to_the_answers_stays_one(server, tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    (tmp_path / "out.jsonl").touch()
    generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), tmp_path / "link.jsonl")
    assert (tmp_path / "link.jsonl").is_symlink() and lines(tmp_path / "out.jsonl").keys() == {"a", "b", "c"}


def test_a_pipe_is_no_output(server, tmp_path):
    os.mkfifo(tmp_path / "out.jsonl")
    with pytest.raises(PromptsInvalid, match="not a regular file"):
        generate(PROMPTS, http.Client(server.url, "m"), GenerateOptions(), tmp_path / "out.jsonl")
