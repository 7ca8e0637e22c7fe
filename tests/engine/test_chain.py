"""A real vLLM that hands out states: prompts to a head by one recipe, killed at each stage, leave equal bytes; two
processes that train beside the server end with the weights of stored states, and leave nothing behind when one dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import kconv
from kconv.engines.base import Serving
from kconv.engines.vllm import ENGINE
from kconv.serving.start import serve
from kconv.serving.states import LATE_SECONDS, states_options
from kconv.tiny.recipe import DEMO
from kconv.tiny.target import make_target
from kconv.tiny.text import read_corpus

pytestmark = [pytest.mark.slow, pytest.mark.release, pytest.mark.engine]

SUPPORT = Path(__file__).parent.parent / "support"
SETTINGS = {
    "attention": {"heads": 4, "kv_heads": 2, "head_dim": 16},
    "intermediate": 64,
    "rope": {"theta": 10000.0},
    "batch": 2,
    "seq": 32,
    "steps": 16,
    "warmup": 2,
    "lr": 3e-3,
    "rest_lr": 3e-3,
    "dtype": "F32",
    "compute": None,
}
BLOCK = {
    **{name: value for name, value in SETTINGS.items() if name != "rope"},
    "mask": 258, "block": 4, "anchors": 4, "captured": [1, 3, 5], "steps": 8, "warmup": 1,
}  # fmt: skip
# Of each step, what it leaves before it is done.
STAGES: dict[str, Callable[[Path], bool]] = {
    "dialogues": lambda root: len(lines(root / "dialogues" / "dialogues.jsonl")) > 2,
    "states": lambda root: any(root.glob(".*states-states/states-*.safetensors")),
    "head": lambda root: any(root.glob(".head.training/checkpoint-*/trainer_state.json")),
}


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def recipe(target: Path, prompts: Path, url: str, shared: Path) -> str:
    steps = {
        "dialogues": {"do": "generate", "url": url, "model": str(target), "prompts": str(prompts), "max_tokens": 24,
                      "temperature": 0, "concurrency": 1},
        # One at a time: what a server runs side by side it sums in another order.
        "states": {"do": "states", "target": str(target), "data": "$dialogues/dialogues.jsonl", "captured": [1, 3, 5],
                   "dtype": "F32", "url": url, "shared": str(shared), "concurrency": 1, "shard_mib": 1,
                   "seq": SETTINGS["seq"]},
        "head": {"do": "train", "target": str(target), "states": "$states", "recipe": "eagle3-gqa", "set": SETTINGS,
                 "save_every": 3, "eval_every": 16},
        "vllm": {"do": "convert", "head": "$head", "to": "vllm"},
    }  # fmt: skip
    return json.dumps({"name": "chain", "steps": steps})


def start(file: Path, root: Path) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-c", "from kconv.cli import main; main()", "run", str(file), "--out", str(root)]
    return subprocess.Popen(program, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def made(root: Path) -> dict[str, bytes]:
    """Return what the chain made: dialogues, states and weights. Its records say when and where."""
    kept = [root / "dialogues" / "dialogues.jsonl", *(root / "states").iterdir(), *root.glob("*/*.safetensors")]
    return {str(file.relative_to(root)): file.read_bytes() for file in kept}


@pytest.fixture(scope="module")
def target(cache, demo_lock) -> Path:
    """Return the demo's target: the MoE of the tests' own is too narrow for vLLM's CPU kernels in fp32."""
    with demo_lock:
        return make_target(DEMO, cache)


@dataclass(frozen=True)
class Server:
    """A vLLM that hands out states: its address, the folder in memory that it writes to, and its processes."""

    url: str
    shared: Path
    processes: list[psutil.Process]


@pytest.fixture(scope="module")
def server(engine_python, target) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        options = states_options((1, 3, 5), 7, Path(shared))
        # The CPU build has neither CUDA streams nor pinned memory; all else of the connector is vLLM's.
        connect = json.loads(options["--kv-transfer-config"])
        connect |= {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "vllm_states_connector"}
        options["--kv-transfer-config"] = json.dumps(connect)
        # What it runs side by side it sums in another order.
        options["--max-num-seqs"] = "1"
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
        with serve(Serving(engine_python, target, options=options), ENGINE) as served:
            # What the server needs is no path of kconv's own.
            patch.undo()
            yield Server(served.client.url, Path(shared), psutil.Process().children(recursive=True))


def test_a_chain_that_is_killed_at_each_stage_leaves_the_same_bytes(server, target, tmp_path):
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "chain.yaml"
    texts = [text for text in read_corpus().train if len(text) > 200][:24]
    prompts.write_text("".join(json.dumps({"prompt": text[:80]}) + "\n" for text in texts))
    file.write_text(recipe(target, prompts, server.url, server.shared))
    assert start(file, tmp_path / "whole").wait() == 0
    root, killed = tmp_path / "killed", []
    for stage, begun in STAGES.items():
        process = start(file, root)
        while process.poll() is None and not begun(root):
            time.sleep(0.005)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed.append(stage)
        process.wait()
        assert not (root / stage / "kconv.json").exists()
    asked = lines(root / "dialogues" / "dialogues.jsonl")
    assert start(file, root).wait() == 0
    assert killed == list(STAGES)
    one, other = made(tmp_path / "whole"), made(root)
    assert one.keys() == other.keys() and {"head/model.safetensors", "vllm/model.safetensors"} < one.keys()
    assert [name for name in one if one[name] != other[name]] == []
    assert len(asked) == 24


class Trainers:
    """Two processes of one run, their output in a file.

    Args:
        words: of `kconv train`.
        log: the file.
    """

    def __init__(self, words: list[object], log: Path) -> None:
        program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--no-python"]
        program += [sys.executable, "-c", "from kconv.cli import main; main()", "train", *map(str, words)]
        self.log = log
        with log.open("w") as output:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(program, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def wait(self) -> str:
        """Wait for the end of both, and return what they said."""
        code = self.process.wait(1200)
        said = self.log.read_text()
        assert (code == 0) == ("error: " not in said), said
        return said

    def wait_until(self, begun: Callable[[], bool]) -> list[psutil.Process]:
        """Wait until something holds, and return the two processes."""
        while not begun():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.005)
        return [one for one in psutil.Process(self.process.pid).children() if "train" in one.cmdline()]


def recipe_words(name: str, settings: dict[str, object]) -> list[object]:
    """Return a recipe and its settings as options of `kconv train`."""
    return ["--recipe", name] + [w for key, value in settings.items() for w in ("--set", f"{key}={json.dumps(value)}")]


def left(folder: Path, before: set[Path]) -> set[Path]:
    """Return what is new in a folder when those who sweep it have ended."""
    end = time.monotonic() + 3 * LATE_SECONDS
    while set(folder.iterdir()) - before and time.monotonic() < end:
        time.sleep(0.1)
    return set(folder.iterdir()) - before


def test_two_processes_beside_the_server_end_with_the_weights_of_stored_states(server, target, tmp_path):
    # The server hands out states of every request, those of kconv generate too, which takes none.
    before = set(server.shared.iterdir())
    data, stored = tmp_path / "dialogues.jsonl", tmp_path / "states"
    texts = [text for text in read_corpus().train if len(text) > 300][:48]
    said = [[("user", text[:60]), ("assistant", text[60:300])] for text in texts]
    rows = [{"messages": [{"role": role, "content": words} for role, words in turns]} for turns in said]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"url": server.url, "shared": server.shared, "dtype": "F32", "seq": SETTINGS["seq"]}
    kconv.states(target, stored, data=data, captured=(1, 3, 5), **asked)
    assert left(server.shared, before) == set()
    common = ["--save-every", 4, "--eval-every", 16, *recipe_words("eagle3-gqa", SETTINGS | {"captured": [1, 3, 5]})]
    from_server = ["--data", data, "--url", server.url, "--shared", server.shared]
    served = [*from_server, *common]
    Trainers([target, tmp_path / "stored", "--states", stored, *common], tmp_path / "stored.log").wait()
    wanted = (tmp_path / "stored" / "model.safetensors").read_bytes()

    # One of the two is killed, and the other one ends; the same command goes on.
    words, work = [target, tmp_path / "streamed", *served], tmp_path / ".streamed.training"
    trainers = Trainers(words, tmp_path / "killed.log")
    [_, last] = trainers.wait_until(lambda: any(work.glob("checkpoint-*/trainer_state.json")))
    last.kill()
    assert trainers.process.wait(600) != 0
    assert left(server.shared, before) == set()
    Trainers(words, tmp_path / "streamed.log").wait()
    assert (tmp_path / "streamed" / "model.safetensors").read_bytes() == wanted
    assert left(server.shared, before) == set()
    told = json.loads((tmp_path / "streamed" / "kconv.json").read_text())["training"]["data"]
    assert told["streamed"] and told["sequences"] == 48

    # A block drafter too.
    blocks = {"block-stored": ["--states", stored], "block-streamed": from_server}
    for name, source in blocks.items():
        Trainers([target, tmp_path / name, *source, *recipe_words("dflash", BLOCK)], tmp_path / f"{name}.log").wait()
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in blocks)
    assert one == other and left(server.shared, before) == set()

    # The server dies: both end, and say so.
    trainers = Trainers([target, tmp_path / "orphaned", *served], tmp_path / "orphaned.log")
    trainers.wait_until(lambda: any(tmp_path.glob(".orphaned.training/untrained.json")))
    for process in server.processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    said = trainers.wait()
    assert "the server does not answer" in said
    # Neither says what a library makes of it; torchrun itself ends in a traceback of its own.
    assert "RuntimeError" not in said and "httpx" not in said
    assert left(server.shared, before) == set()
    assert not (tmp_path / "orphaned").exists()
