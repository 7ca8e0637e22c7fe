"""Starting and stopping, with a small program in vLLM's place: a module of its name that PYTHONPATH leads to."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from kconv.engines import start_server, watch_vllm
from kconv.engines.base import Serving
from kconv.engines.trtllm import ENGINE as TRTLLM
from kconv.engines.vllm import ENGINE as VLLM
from kconv.engines.vllm import command, environment
from kconv.errors import EngineFailed
from kconv.serving.start import serve

# Ready at once, with a child that ignores SIGTERM; both write down their process ids.
READY = """
import http.server, os, pathlib, signal, subprocess, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
ids = pathlib.Path(os.environ["STAND_IN_IDS"])
child = subprocess.Popen([sys.executable, "-c", '''
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
''', str(ids) + ".child"])
while not pathlib.Path(str(ids) + ".child").exists():
    time.sleep(0.01)
ids.write_text(f"{os.getpid()} {child.pid}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
# What vLLM 0.32.0 wrote of a head with linear RoPE scaling, shortened.
DYING = """
print('''(APIServer pid=1) WARNING 11-20 13:56:49 [system_utils.py:255] This can cause errors like `OSError: [Errno 24]`
(Worker pid=3) ERROR 11-20 13:57:45 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=3) ERROR 11-20 13:57:45 [multiproc_executor.py:953] KeyError: 'original_max_position_embeddings'
(EngineCore pid=2) ERROR 11-20 13:57:51 [core.py:1510] Exception: WorkerProc initialization failed
RuntimeError: Engine core initialization failed. See root cause above.''')
raise SystemExit(1)
"""
SILENT = "import time; print('loading'); time.sleep(600)"


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Return a function that puts a program in the place of vLLM's server."""

    def play(program: str) -> None:
        module = tmp_path / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py"
        module.parent.mkdir(parents=True)
        module.write_text(program)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
        monkeypatch.setenv("STAND_IN_IDS", str(tmp_path / "ids"))

    return play


def folder(path: Path, config: dict) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def target(tmp_path) -> Path:
    return folder(tmp_path / "target", {"kv_lora_rank": 512})


def is_running(process: int) -> bool:
    """Whether a process does anything still; a zombie that waits for its reaper does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(processes: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, processes))


def test_what_was_started_is_stopped_with_its_children(play, target, tmp_path):
    play(READY)
    with serve(Serving(Path(sys.executable), target), VLLM) as served:
        started = [int(word) for word in (tmp_path / "ids").read_text().split()]
        assert all(map(is_running, started))
        assert served.client.is_healthy()
    assert len(started) == 2
    assert gone(started)
    assert not served.client.is_healthy()


def test_it_is_stopped_too_when_the_caller_fails(play, target, tmp_path):
    play(READY)
    with pytest.raises(ZeroDivisionError), serve(Serving(Path(sys.executable), target), VLLM):
        raise ZeroDivisionError
    assert gone([int(word) for word in (tmp_path / "ids").read_text().split()])


def test_two_at_once_have_each_their_own_port(play, target):
    play(READY)
    serving = Serving(Path(sys.executable), target)
    with serve(serving, VLLM) as one, serve(serving, VLLM) as other:
        assert one.client.url != other.client.url
        assert one.client.is_healthy()
        assert other.client.is_healthy()


def test_a_death_is_told_with_its_first_cause_and_the_last_lines(play, target):
    play(DYING)
    with pytest.raises(EngineFailed) as fault, serve(Serving(Path(sys.executable), target), VLLM):
        pass
    first, *rest = fault.value.what.splitlines()
    assert first.endswith("(exit status 1): KeyError: 'original_max_position_embeddings'")
    assert rest[-1] == "  | RuntimeError: Engine core initialization failed. See root cause above."


def test_an_environment_without_vllm_is_told(target, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with (
        pytest.raises(EngineFailed, match="No module named 'vllm'"),
        serve(Serving(Path(sys.executable), target), VLLM),
    ):
        pass


def test_a_python_that_is_not_there_is_told(target, tmp_path):
    with (
        pytest.raises(EngineFailed, match="cannot be run: No such file"),
        serve(Serving(tmp_path / "python", target), VLLM),
    ):
        pass


def test_one_that_kconv_cannot_start_is_told(target):
    with (
        pytest.raises(EngineFailed, match="kconv cannot start TensorRT-LLM"),
        serve(Serving(Path(sys.executable), target), TRTLLM),
    ):
        pass


def test_one_that_is_never_ready_is_given_up_and_stopped(play, target):
    play(SILENT)
    with (
        pytest.raises(EngineFailed, match=r"not ready after 1 s(.|\n)*\| loading"),
        serve(Serving(Path(sys.executable), target, ready_seconds=1.0), VLLM),
    ):
        pass


def test_the_command_line_says_what_is_served(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    serving = Serving(Path("env/bin/python"), Path("target"), Path("head"), draft_tokens=5, dtype="bfloat16")
    words = command(serving, 8123)
    # The server runs in a folder of its own, so no path may hang on the caller's.
    program = [start_server.__file__, watch_vllm.__file__, "vllm.entrypoints.openai.api_server"]
    assert words[:4] == [str(tmp_path / "env/bin/python"), *program]
    options = dict(zip(words[5::2], words[6::2], strict=True))
    assert options["--model"] == str(target)
    assert (options["--port"], options["--dtype"], options["--max-model-len"]) == ("8123", "bfloat16", "256")
    assert json.loads(options["--speculative-config"]) == {
        "model": str(tmp_path / "head"),
        "method": "eagle3",
        "num_speculative_tokens": 5,
    }
    assert "--speculative-config" not in command(Serving(Path("python"), target), 8123)


@pytest.mark.parametrize(
    ("target_config", "head_config", "disabled"),
    [
        ({"kv_lora_rank": 512}, {"num_key_value_heads": 2}, True),
        ({"text_config": {"kv_lora_rank": 512}}, {"kv_lora_rank": None}, True),
        ({"kv_lora_rank": 512}, {"kv_lora_rank": 512}, False),
        ({"num_key_value_heads": 2}, {"num_key_value_heads": 2}, False),
        ({"kv_lora_rank": 512}, None, False),
    ],
)
def test_mla_is_computed_as_plain_attention_where_it_meets_a_head_without(
    tmp_path, target_config, head_config, disabled
):
    target = folder(tmp_path / "target", target_config)
    head = None if head_config is None else folder(tmp_path / "head", head_config)
    assert ("VLLM_MLA_DISABLE" in environment(Serving(Path("python"), target, head))) == disabled


def test_importing_it_brings_neither_torch_nor_an_engine(tmp_path):
    program = "import kconv.serving.start, sys; assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", program) == 0
