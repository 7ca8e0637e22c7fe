"""A drafter family of another package is one object and row tables: with nothing else touched, kconv works with it.

The object is `MOLE` below: a drafter without attention that proposes its tokens at once and reads nothing of its own
output. The last test installs it and its layouts as another package would, by entry points, and runs the rest of this
file in a process of its own. What the tests ask is imported by them, as a family imports none of it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.heads import random_slots, read_bytes, write_head

from kconv.checkpoint.manifest import Hints
from kconv.drafters import registry
from kconv.drafters.base import Drafter
from kconv.drafters.captured import Captured
from kconv.drafters.facts import Candidate, Fact
from kconv.drafters.keys import ConfigTable, Key
from kconv.drafters.slots import Slot
from kconv.drafters.spec import Rope
from kconv.engines.config import write_keys
from kconv.engines.layout import Layout, Limit, Row
from kconv.engines.moves import Stack
from kconv.errors import ConfigInvalid, PluginInvalid
from kconv.operations import reading
from kconv.options import A_FLAG
from kconv.rule import Rule


@dataclass(frozen=True)
class MoleSpec:
    """A mole: `claws` is how many tokens it proposes, `norm_first` whether its states are normed before the tunnel."""

    hidden: int
    target_hidden: int
    vocab: int
    draft_vocab: int
    captured: tuple[int, ...]
    layers: int
    rope: Rope
    eps: float
    dtype: str
    max_positions: int
    claws: int
    norm_first: bool

    @property
    def kind(self) -> str:
        return "mole"

    @property
    def drafter(self) -> Drafter:
        return MOLE


class Mole:
    """A mole that can run."""

    def __init__(self, spec: MoleSpec, weights: Mapping[str, torch.Tensor]) -> None:
        self.spec, self.weights, self.target_ids = spec, weights, torch.arange(spec.draft_vocab)

    def draft(self, tokens: torch.Tensor, captured: torch.Tensor, steps: int) -> torch.Tensor:
        spec, weights = self.spec, self.weights
        if steps > spec.claws:
            raise ConfigInvalid(f"a mole of {spec.claws} claws cannot draft {steps} tokens", fix="Draft fewer.")
        chains = tokens.shape[1] - 1 - steps
        states = captured[:, :chains]
        states = F.rms_norm(states, states.shape[-1:], None, spec.eps) if spec.norm_first else states
        hidden = F.linear(torch.cat([F.embedding(tokens[:, 1 : 1 + chains], weights["embed_tokens"]), states], -1),
                          weights["tunnel"])  # fmt: skip
        for layer in range(spec.layers):
            one, other = F.linear(hidden, weights[f"{layer}.dig"]), F.linear(hidden, weights[f"{layer}.throw"])
            hidden = hidden + F.silu(one) * other
        normed = F.rms_norm(hidden, hidden.shape[-1:], weights["norm"], spec.eps)
        return torch.stack([F.linear(normed * claw, weights["lm_head"]) for claw in weights["claw"][:steps]])


def _captured(config: Mapping[str, Any], hints: Hints, _names: Any, problems: Any) -> Captured | None:
    reads = hints.captured or config.get("mole_config", {}).get("reads")
    if not reads:
        problems.add(ConfigInvalid, "the config does not say what the mole reads", "config.json: mole_config", "Say.")
        return None
    return Captured(tuple(reads), "mole_config lists outputs")


def _rules() -> tuple[Any, ...]:
    from kconv.rule import Found

    def blunt(subject: Any) -> list[Found]:
        return [Found("config.json: mole_config.claws", "one claw")] if subject.spec and subject.spec.claws == 1 else []

    return (Rule("MOLE2", "mole-blunt", "warning", "A mole of one claw gains little.", "Train another.", check=blunt),)


def _shares(spec: MoleSpec) -> bool:
    return spec.hidden == spec.target_hidden


MOLE = Drafter(
    name="mole",
    title="Mole",
    lead=lambda _: "A mole",
    spec=MoleSpec,
    slots=(
        Slot("tunnel", "hidden, hidden+captured*target_hidden"),
        Slot("{i}.dig", "hidden, hidden", layers="all"),
        Slot("{i}.throw", "hidden, hidden", layers="all"),
        Slot("claw", "2*claws, hidden"),
        Slot("norm", "hidden"),
        Slot("lm_head", "draft_vocab, hidden", absent_when=_shares),
        Slot("embed_tokens", "vocab, hidden", absent_when=_shares),
    ),
    dims=lambda spec, layer: {
        "hidden": spec.hidden, "target_hidden": spec.target_hidden, "captured": len(spec.captured),
        "claws": spec.claws, "vocab": spec.vocab, "draft_vocab": spec.draft_vocab,
    },
    marks=lambda config, names: "mole_config" in config,
    signs=("tunnel.weight",),
    captured=_captured,
    room=lambda names, values: None,
    load=Mole,
    keys=(
        Key("hidden", ("hidden_size",), "count"),
        Key("target_hidden", ("target_hidden_size",), "count", lambda v: v["hidden"]),
        Key("layers", ("num_hidden_layers",), "depth"),
        Key("vocab", ("vocab_size",), "vocabulary"),
        Key("draft_vocab", ("draft_vocab_size",), "vocabulary", lambda v: v["vocab"]),
        Key("eps", ("rms_norm_eps",), "fraction"),
        Key("claws", ("mole_config.claws",), "count"),
        Key("norm_first", ("norm_first",), "flag"),
    ),
    attention={},
    nested="mole_config",
    elsewhere=frozenset(
        "architectures model_type dtype torch_dtype rope_theta rope_parameters max_position_embeddings hidden_act"
        " tie_word_embeddings mole_config.reads".split()
    ),
    facts={
        "norm_first": Fact(
            "norm_first",
            Rule("MOLE1", "mole-norm-unstated", "undecided", "The config says not if states are normed.", "Say it."),
            hint="norm_first", line="states",
            path="norm_first",
            candidates=lambda *_: [Candidate(True, "the paper"), Candidate(False, "the code")],
            put=lambda spec, value: replace(spec, norm_first=value),
            stated=lambda config: config.get("norm_first") is not None,
            answer=A_FLAG,
            words="normed first: {}",
        )
    },
    lines=lambda spec: {"states": "normed first" if spec.norm_first else "as they are", "claws": str(spec.claws)},
    rules=_rules,
)  # fmt: skip


def _write(architecture: str) -> Any:
    def write(spec: MoleSpec) -> dict[str, Any]:
        config = write_keys(spec) | {"architectures": [architecture], "model_type": "mole"}
        return config | {"mole_config": config["mole_config"] | {"reads": list(spec.captured)}}

    return write


OUTSIDE = (
    Row("claw", ("claw",)),
    Row("norm.weight", ("norm",)),
    Row("lm_head.weight", ("lm_head",)),
    Row("embed_tokens.weight", ("embed_tokens",)),
)
# What vLLM would read: the two parts of a layer fused.
MOLE_VLLM = Layout(
    name="mole-vllm",
    drafter=MOLE,
    engine="vLLM's moles",
    rows=(
        Row("tunnel.weight", ("tunnel",)),
        Row("layers.{i}.work.weight", ("{i}.dig", "{i}.throw"), Stack()),
        *OUTSIDE,
    ),
    told_by=lambda config, names: config.get("architectures") == ["VllmMole"],
    write_config=_write("VllmMole"),
    limits=(
        Limit("MOLE3", "mole-deep", lambda s: s.layers > 2, "vLLM digs two layers at most", "Serve it yourself."),
    ),
    written_for=("vllm",),
)  # fmt: skip
# What the trainer saves.
MOLE_TRAINER = Layout(
    name="mole",
    drafter=MOLE,
    engine="the mole trainer",
    rows=(
        Row("model.tunnel.weight", ("tunnel",)),
        Row("model.{i}.dig", ("{i}.dig",)),
        Row("model.{i}.throw", ("{i}.throw",)),
        *(replace(row, name=f"model.{row.name}") for row in OUTSIDE),
    ),
    told_by=lambda config, names: config.get("architectures") == ["Mole"],
    write_config=_write("Mole"),
    config=ConfigTable(ballast=frozenset(("mole_version",))),
)

SPEC = MoleSpec(64, 64, 512, 512, (1, 3, 5), 2, Rope(10000.0), 1e-5, "F32", 1024, 3, True)
INSTALLED = "KCONV_TEST_INVENTED"
installed = pytest.mark.skipif(INSTALLED not in os.environ, reason="run by the last test, in a process of its own")


def kconv(*words: object, fails: bool = False) -> dict[str, Any]:
    """Return the JSON that a command prints."""
    from kconv.cli import main

    done = CliRunner().invoke(main, [*map(str, words), "--json"])
    assert done.exit_code == fails, done.output
    return json.loads(done.stdout)


@pytest.fixture
def trained(tmp_path) -> Path:
    """A mole as its trainer saves it."""
    return write_head(tmp_path / "trained", MOLE_TRAINER, SPEC, random_slots(SPEC))


def without(folder: Path, out: Path, key: str) -> Path:
    """Write a mole whose config lacks a key."""
    out.mkdir()
    save_file(load_file(folder / "model.safetensors"), out / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({name: value for name, value in config.items() if name != key}))
    return out


@installed
def test_inspect_names_it_and_shows_what_its_files_leave_open(trained, tmp_path):
    from kconv.cli import main

    found = kconv("inspect", trained)
    assert (found["kind"], found["layout"], found["undecided"]) == ("Mole", "mole", [])
    assert (found["spec"]["claws"], found["spec"]["captured"]) == (3, [1, 3, 5])
    shown = CliRunner().invoke(main, ["inspect", str(without(trained, tmp_path / "open", "norm_first"))]).output
    assert "UNDECIDED" in shown and "normed first: true: the paper" in shown and "MOLE1" not in shown


@installed
def test_its_files_are_checked_by_its_own_rules_and_by_none_of_another_family(trained, tmp_path):
    found = kconv("validate", trained, fails=True)  # in the trainer's names
    assert {(one["rule"], *one["engines"]) for one in found["findings"]} == {
        ("K131", "vllm-v1", "vllm-v2"),
        ("K132", "vllm-v1", "vllm-v2"),
    }
    blunt = replace(SPEC, claws=1)
    folder = write_head(tmp_path / "blunt", MOLE_VLLM, blunt, random_slots(blunt) | {"norm": torch.ones(64)})
    found = kconv("validate", folder)
    assert {one["rule"] for one in found["findings"]} == {"MOLE2", "K203", "K204"}  # random weights and a norm of ones
    assert found["provenance"]["for"] == ["vllm-v1", "vllm-v2"]
    found = kconv("validate", folder, "--for", "all", fails=True)
    refused = {engine for one in found["findings"] if one["rule"] == "K007" for engine in one["engines"]}
    assert refused == {"sglang", "trtllm"}


@installed
def test_it_is_converted_exactly_there_and_back(trained, tmp_path):
    from kconv.checkpoint.manifest import read_manifest

    kconv("to-vllm", trained, tmp_path / "vllm")
    manifest = read_manifest(tmp_path / "vllm")
    assert (manifest.exact, manifest.layout, manifest.source_layout) == (True, "mole-vllm", "mole")
    assert {step.action for step in manifest.tensors} == {"renamed", "repacked"}
    assert load_file(tmp_path / "vllm" / "model.safetensors")["layers.1.work.weight"].shape == (128, 64)
    assert not list((tmp_path / "vllm").glob("serve-*"))  # vLLM's own command is one for Eagle3
    kconv("verify", tmp_path / "vllm", trained)
    kconv("to-mole", tmp_path / "vllm", tmp_path / "back")
    assert read_bytes(tmp_path / "back") == read_bytes(trained)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (trained / "config.json").read_text()
    )
    report = kconv("validate", tmp_path / "vllm", "--source", trained)
    assert report["figures"]["identical"] is True


@installed
def test_an_open_fact_is_stated_by_its_option_and_recorded(trained, tmp_path):
    from kconv.checkpoint.manifest import read_manifest
    from kconv.cli import main

    folder = without(trained, tmp_path / "open", "norm_first")
    refused = CliRunner().invoke(main, ["to-vllm", str(folder), str(tmp_path / "no")])
    assert refused.exit_code == 1 and "Pass --norm-first" in refused.output
    kconv("to-vllm", folder, tmp_path / "out", "--norm-first", "yes")
    [one] = read_manifest(tmp_path / "out").unverified
    assert (one.fact, one.value) == ("norm_first", True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["norm_first"] is True


@installed
@pytest.mark.parametrize("engine", ["sglang", "trtllm", "portable"])
def test_an_engine_that_has_no_layout_for_it_is_refused_by_name(trained, tmp_path, engine):
    from kconv.cli import main

    refused = CliRunner().invoke(main, [f"to-{engine}", str(trained), str(tmp_path / "no")])
    assert refused.exit_code == 1 and "Moles" in refused.output and "mole, vllm" in refused.output


@installed
def test_what_its_layout_cannot_hold_is_refused_and_a_rule(tmp_path):
    from kconv.cli import main
    from kconv.validate.rules.table import find_rule

    deep = replace(SPEC, layers=3)
    folder = write_head(tmp_path / "deep", MOLE_TRAINER, deep, random_slots(deep))
    refused = CliRunner().invoke(main, ["to-vllm", str(folder), str(tmp_path / "no")])
    assert refused.exit_code == 1 and "two layers at most" in refused.output
    assert find_rule("mole-deep").drafters == ("mole",)


@installed
def test_it_drafts_over_a_text(trained):
    from kconv.checkpoint.folder import open_checkpoint
    from kconv.convert.read import read_head, read_weights
    from kconv.measure.drafting import head_drafter, measure_states
    from kconv.measure.texts import Batch, Text
    from kconv.targets.forward import States

    head = read_head(open_checkpoint(trained))
    running = head.drafter.load(head.spec, read_weights(head))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 512, (2, 20), generator=generator)
    states = States(torch.randn(2, 20, 7 * 64, generator=generator), torch.randn(2, 20, 64), torch.randn(2, 20, 512))
    drafter, one = (head_drafter(running, steps, tuple(range(7))) for steps in (3, 1))
    assert drafter.logits(tokens, states).shape == (3, 2, 16, 512)
    for place in range(2, 20):  # a text in which each token is the first draft after those before it
        tokens[:, place] = one.logits(tokens, states)[0].argmax(-1)[:, place - 2]
    text = Text("greedy", (Batch(tokens, 1),))
    [found] = measure_states(text, lambda batch: states, 1, {"mole": one}).acceptance
    assert found.rates == (1.0,) and found.length == 2.0
    with pytest.raises(ConfigInvalid, match="3 claws cannot draft 4"):
        head_drafter(running, 4, tuple(range(7))).logits(tokens, states)


@installed
def test_it_is_measured_with_its_target(trained, tmp_path, tiny_target):
    """Nothing is trained here: what counts is that every part of the measurement runs."""
    prompts = tmp_path / "held-out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell me about the number {n}."}) + "\n" for n in range(4)))
    kconv("to-vllm", without(trained, tmp_path / "open", "norm_first"), tmp_path / "out", "--norm-first", "yes")
    found = kconv(
        "validate", tmp_path / "out", "--target", tiny_target, "--prompts", prompts, "--new-tokens", 12, fails=True
    )
    # It is not trained, so it drafts worse than a table of pairs.
    assert {one["rule"] for one in found["findings"] if one["severity"] == "error"} <= {"K204", "K363"}
    assert {"output", "bigram"} <= {row["drafter"] for row in found["figures"]["acceptance"]}
    assert {row["facts"]["norm_first"] for row in found["figures"]["readings"]} == {True, False}


@installed
def test_its_card_says_what_it_is(trained, tmp_path):
    from kconv.cards.card import write_card
    from kconv.cards.facts import Facts

    folder = without(trained, tmp_path / "open", "norm_first")
    kconv("to-vllm", folder, tmp_path / "out", "--norm-first", "no")
    text = write_card(tmp_path / "out", None, Facts()).read_text()
    assert "A mole" in text and "- mole\n" in text and "eagle3" not in text.lower()
    assert "normed first: false" in text and "--norm-first" in text


@installed
def test_what_kconv_does_for_eagle3_heads_alone_is_refused_by_name(trained, tmp_path, tiny_target):
    from kconv.cli import main

    prompts = tmp_path / "calibration.jsonl"
    prompts.write_text(json.dumps({"prompt": "Tell me about the number 7."}) + "\n")
    kconv("to-vllm", trained, tmp_path / "out")
    told = [str(tmp_path / "out"), str(tmp_path / "no"), "--target", str(tiny_target)]
    for words in (
        ["to-vllm", *told, "--attention", "mla", "--prompts", str(prompts)],
        ["vocab", told[0]],
        ["vocab", told[0], "--expand", told[1]],
    ):
        refused = CliRunner().invoke(main, words)
        assert refused.exit_code == 1 and "only Eagle3 heads, and this is a Mole" in refused.output, refused.output


def test_a_fact_does_not_take_the_option_of_something_else(monkeypatch):
    taken = replace(MOLE.facts["norm_first"], hint="target")
    monkeypatch.setattr(reading, "drafters", lambda: (replace(MOLE, facts={taken.name: taken}),))
    with pytest.raises(PluginInvalid, match="norm_first is stated by --target, which is an option already"):
        reading.fields_of_facts()


BROKEN = {
    "it cannot be imported": (ImportError("no module named vole"), "cannot be loaded: ImportError: no module"),
    "it is something else": (MOLE_VLLM, "a Layout is no Drafter"),
    "its name is taken": (replace(MOLE, name="eagle3"), "already a drafter eagle3"),
}


@pytest.mark.parametrize(("found", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_refused_by_name(monkeypatch, found, message):
    class Entry(EntryPoint):
        def load(self) -> object:
            if isinstance(found, Exception):
                raise found
            return found

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry("vole", "vole:VOLE", group)])
    registry.drafters.cache_clear()
    try:
        with pytest.raises(PluginInvalid, match=message) as fault:
            registry.drafters()
        assert "vole = vole:VOLE" in fault.value.where and fault.value.fix
    finally:
        registry.drafters.cache_clear()


def test_what_is_broken_stops_no_command_that_reads_no_head(tmp_path):
    info = tmp_path / "vole-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vole\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kconv.drafters]\nvole = vole:VOLE\n")
    ran = {
        words: subprocess.run(
            [sys.executable, "-m", "kconv", *words.split()],
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        for words in ("env", "inspect head")
    }
    assert ran["env"].returncode == 0, ran["env"].stderr
    assert ran["inspect head"].returncode == 1 and "vole = vole:VOLE" in ran["inspect head"].stderr


@pytest.mark.skipif(INSTALLED in os.environ, reason="runs the others")
def test_a_family_of_another_package_is_known_everywhere(tmp_path):
    shutil.copy(__file__, tmp_path / "mole.py")
    info = tmp_path / "mole-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mole\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kconv.drafters]\nmole = mole:MOLE\n[kconv.engines]\nmole = mole:MOLE_TRAINER\nmole-vllm = mole:MOLE_VLLM\n"
    )
    paths = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {INSTALLED: "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert "passed" in run.stdout
