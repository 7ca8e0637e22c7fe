"""The reading that a head was trained with is found by measuring, whatever its config lost: heads of the demo, really
trained, on held-out text of its target."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kconv.cli import main
from kconv.pipeline.demo import RECIPE, run_demo
from kconv.tiny.recipe import cache_root
from kconv.tiny.text import read_corpus

pytestmark = pytest.mark.slow
IDS = "eagle_aux_hidden_state_layer_ids"
# The demo's heads are trained on the outputs of these layers of a target of 7, whose default is [1, 2, 3].
TRAINED = [1, 3, 5]
DOCUMENTS, TOKENS = 16, 64


def kconv(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@contextmanager
def _quiet(_: str) -> Iterator:
    yield lambda *_: None


@pytest.fixture(scope="session")
def demo(once, demo_lock) -> Path:
    with demo_lock:
        return once("demo", lambda out: run_demo(out, cache_root(), _quiet, dataclasses.replace(RECIPE, prompts=4)))


@pytest.fixture(scope="module")
def states(demo, tmp_path_factory) -> Path:
    """Return states of the demo's target over held-out documents, at every layer that a reading may need."""
    folder = tmp_path_factory.mktemp("readings")
    texts = [text for text in read_corpus().held_out if len(text) > 400][:DOCUMENTS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    made = kconv("states", demo / "target", folder / "states", "--prompts", folder / "prompts.jsonl",
                 "--captured", "0,1,2,3,4,5,6", "--text-tokens", TOKENS)  # fmt: skip
    assert made.exit_code == 0, made.output
    return folder / "states"


@dataclass(frozen=True)
class Lost:
    """A head whose config says less than it did, or of which the user says something.

    Attributes:
        head: "mla" or "gqa".
        config: keys that are changed; `...` takes one out.
        eagle: keys of eagle_config.
        said: options.
        rules: which of K312, K313 and K314 may be said, by the fact that they are about.
        speculators: whether it is written as the speculators library would.
    """

    head: str
    config: dict[str, Any] = field(default_factory=dict)
    eagle: dict[str, Any] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    rules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    speculators: bool = False

    def write(self, demo: Path, folder: Path) -> Path:
        shutil.copytree(demo / self.head / "trained", folder, ignore=shutil.ignore_patterns("modelopt", "kconv.json"))
        config = json.loads((folder / "config.json").read_text())
        for place, changes in ((config, self.config), (config["eagle_config"], self.eagle)):
            for key, value in changes.items():
                place.pop(key, None) if value is ... else place.update({key: value})
        if self.speculators:
            inner = {key: value for key, value in config.items() if key not in ("architectures", "eagle_config")}
            config = {
                "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", IDS: [2, 4, 6],
                "draft_vocab_size": inner.pop("draft_vocab_size"), "transformer_layer_config": inner,
                "aux_hidden_state_layer_ids_are": "layer_inputs",
            }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        return folder


# A list as published Kimi heads have it, without ModelOpt's marks.
BARE = dict.fromkeys(("next_layer_regular", "parallel_draft_step", "parallel_draft_heads_num_layers"), ...)
NO_BASE = {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": ...}
FOUND, BEATEN = {"captured": ("K313",)}, {"config.json": ("K312",)}
CASES = {
    f"{head}, {name}": case
    for head in ("mla", "gqa")
    for name, case in {
        "the list lost, and said rightly": Lost(head, eagle={IDS: []}, said=("--captured", "1,3,5"), rules=FOUND),
        # The MLA head's files leave it open; the GQA head's say outputs, which is wrong.
        "a list of inputs without marks": Lost(head, eagle=BARE | {IDS: [2, 4, 6]},
                                               rules=FOUND if head == "mla" else BEATEN),
        "outputs said to be inputs": Lost(head, said=("--captured-are", "inputs"), rules=BEATEN),
        "the list lost, and one layer late said": Lost(head, eagle={IDS: []}, said=("--captured", "2,4,6"),
                                                       rules=BEATEN),
        "the list lost, and one layer early said": Lost(head, eagle={IDS: []}, said=("--captured", "0,2,4"),
                                                        rules=BEATEN),
    }.items()
} | {
    "gqa, the base lost": Lost("gqa", NO_BASE, rules={"rope_theta": ("K313", "K314")}),
    "gqa, list and base lost": Lost("gqa", NO_BASE, {IDS: []}, ("--captured", "1,3,5"),
                                    rules=FOUND | {"rope_theta": ("K313", "K314")}),
    "gqa, another base said": Lost("gqa", NO_BASE, said=("--rope-theta", "1000000"),
                                   rules={"rope_theta": ("K312", "K314")}),
    "gqa, speculators without norm_before_residual": Lost("gqa", rules={"norm_before_residual": ("K313",)},
                                                          speculators=True),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reading_that_it_was_trained_with_is_found(case, demo, states, tmp_path):
    head = case.write(demo, tmp_path / "head")
    shown = kconv("validate", head, "--target", demo / "target", "--states", states, "--json", *case.said)
    report = json.loads(shown.stdout)
    rows = report["figures"]["readings"]
    best = max(rows, key=lambda row: row["length"])
    assert best["facts"]["captured"] == TRAINED and best["facts"]["norm_before_residual"] is False
    said = {
        f["where"].removeprefix("config.json: "): f for f in report["findings"] if f["rule"] in ("K312", "K313", "K314")
    }
    for where, rules in case.rules.items():
        found = said.get(where, said.get("config.json"))
        assert found is not None and found["rule"] in rules, said
        if found["rule"] == "K312":
            taken = next(row for row in rows if row["taken"])
            assert shown.exit_code == 1
            assert f"{taken['length']:.3f}" in found["message"] and f"{best['length']:.3f}" in found["message"]
    # No wrong answer: what is told of the base is the one that it was trained with, or that it cannot be told.
    if said.get("rope_theta", {}).get("rule") == "K313":
        assert "measured: 10000.0," in said["rope_theta"]["message"]


def test_a_head_as_its_trainer_left_it_is_not_beaten(demo, states):
    for name in ("mla", "gqa"):
        shown = kconv("validate", demo / name / "vllm", "--target", demo / "target", "--states", states, "--json")
        report = json.loads(shown.stdout)
        assert shown.exit_code == 0 and "K312" not in {finding["rule"] for finding in report["findings"]}
        first = report["figures"]["readings"][0]
        assert first["taken"] and first["facts"]["captured"] == TRAINED and first["behind_best"] == 0


def test_the_showcase_fault_warns_at_conversion_and_is_an_error_where_it_is_measured(demo, states, tmp_path):
    written = kconv("to-vllm", demo / "mla" / "trained", tmp_path / "out", "--captured-are", "inputs")
    assert written.exit_code == 0 and "WARNING" in written.stdout
    shown = kconv("validate", tmp_path / "out", "--target", demo / "target", "--states", states)
    assert shown.exit_code == 1 and "K312" in shown.stdout and "[1, 3, 5]" in shown.stdout


@pytest.mark.parametrize(("theta", "found"), [(10000.0, False), (500.0, True)], ids=["right", "lost"])
def test_a_base_is_judged_on_text_no_longer_than_the_heads_training(demo, tmp_path, theta, found):
    """The head saw rows of 96 tokens. In texts of 330 the target's base drafts better from there on."""
    texts = [text for text in read_corpus().held_out if len(text) > 400][:3]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    head = Lost("gqa", NO_BASE | {"rope_theta": theta}).write(demo, tmp_path / "head")
    said = kconv("validate", head, "--target", demo / "target", "--prompts", tmp_path / "prompts.jsonl",
                 "--new-tokens", "300").output  # fmt: skip
    assert ("error K364" in said) == found and ("K365" in said) != found


def test_a_head_of_random_weights_cannot_be_told(demo, states, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    head = Lost("mla", eagle={IDS: []}).write(demo, tmp_path / "head")
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(head / "model.safetensors")
    noise = {n: torch.randn(t.shape, generator=generator).to(t.dtype) * 0.02 for n, t in tensors.items()}
    save_file(noise, head / "model.safetensors")
    shown = kconv("validate", head, "--target", demo / "target", "--states", states, "--json")
    rules = {finding["rule"] for finding in json.loads(shown.stdout)["findings"]}
    assert "K314" in rules and "K312" not in rules


def test_a_conversion_beside_states_measures_what_the_files_leave_open(demo, states, tmp_path):
    head = Lost("mla", eagle={IDS: []}).write(demo, tmp_path / "head")
    beside = ("--target", demo / "target", "--states", states)
    refused = kconv("to-vllm", head, tmp_path / "out", "--captured", "2,4,6", *beside)
    assert refused.exit_code == 1 and "[1, 3, 5]" in refused.stderr and not (tmp_path / "out").exists()
    written = kconv("to-vllm", head, tmp_path / "out", "--captured", "1,3,5", *beside)
    assert written.exit_code == 0, written.output
    manifest = json.loads((tmp_path / "out" / "kconv.json").read_text())
    assert manifest["unverified"] == [] and manifest["spec"]["captured"] == [1, 3, 5]
    bare = Lost("mla", eagle=BARE | {IDS: [2, 4, 6]}).write(demo, tmp_path / "bare")
    assert kconv("to-vllm", bare, tmp_path / "measured", *beside).exit_code == 0
    assert json.loads((tmp_path / "measured" / "kconv.json").read_text())["spec"]["captured"] == [1, 3, 5]
