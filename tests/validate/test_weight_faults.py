"""Weight faults of an audit on a really trained head: what validate says of each, with and without a source.

Each validation takes about ten seconds, so the tests try what must be named; `FAULTS` has the audit's whole list.

The target's states are stored once, of all layers, so that each validation reads two tensors of the target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.heads import write_head
from support.weight_faults import FAULTS

from kconv.checkpoint.bytes import digest, file_digest
from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from kconv.checkpoint.source import Folder
from kconv.cli import main
from kconv.convert.opening import open_origin
from kconv.convert.read import Head, read_head, read_weights
from kconv.engines import by_name
from kconv.pipeline.demo import RECIPE, run_demo
from kconv.targets.config import read_target_config
from kconv.tiny.recipe import cache_root
from kconv.tiny.text import read_corpus
from kconv.validate.parity import Parity
from kconv.validate.report import Report
from kconv.validate.run import Checks, validate

pytestmark = pytest.mark.slow

# What is said of a fault where there is no source: the rule, and words of what it names.
BLIND = {
    "gate and up swapped": ("K364", "gate_proj and up_proj swapped"),
    "captured + 1": ("K312", "outputs of layers [1, 3, 5]"),
    "order in fc": ("K364", "in the order [5, 3, 1]"),
    "norms swapped": ("K364", "hidden_norm and input_layernorm swapped"),
    "lm_head shifted": ("K363", ""),
    "kv_b transposed": ("K363", ""),
}
# Of an approximate head whose manifest was forged to speak of its bytes.
FORGED = ("gate and up swapped", "norms swapped", "hidden_norm x 1.01", "kv_b blockwise")


@contextmanager
def quiet(_: str) -> Iterator:
    yield lambda *_: None


@pytest.fixture(scope="module")
def demo(once, demo_lock) -> Path:
    """Return the demo's folder, as the engine tests make it: trained once, then found in the cache."""
    with demo_lock:
        return once("demo", lambda out: run_demo(out, cache_root(), quiet, replace(RECIPE, prompts=4)))


def run(*arguments: object) -> None:
    made = CliRunner().invoke(main, [str(a) for a in arguments])
    assert made.exit_code == 0, made.output


@pytest.fixture(scope="module")
def states(demo, tmp_path_factory) -> Callable[[str], Path]:
    """Return the states of texts that no head was trained on, or of others to calibrate on."""
    root = tmp_path_factory.mktemp("states")
    corpus = read_corpus()
    texts = {"held-out": [t for t in corpus.held_out if len(t) > 300][:12], "calibration": corpus.train[:50]}
    options = {"held-out": ("--prompt-tokens", 16, "--sampled", 40), "calibration": ()}

    def of(name: str) -> Path:
        if not (root / name).exists():
            lines = "".join(json.dumps({"prompt": text}) + "\n" for text in texts[name])
            (root / f"{name}.jsonl").write_text(lines)
            layers = "0,1,2,3,4,5,6" if name == "held-out" else "1,3,5"
            run("states", demo / "target", root / name, "--prompts", root / f"{name}.jsonl", "--captured", layers,
                "--text-tokens", 56, *options[name])  # fmt: skip
        return root / name

    return of


def check(folder: Path, demo: Path, states: Path, source: Path | None = None) -> Report:
    target, head = Folder(demo / "target"), Folder(folder)
    checks = Checks(target=read_target_config(demo / "target"))
    origin = open_origin(open_checkpoint(source), head, target) if source else None
    return validate(head, checks, source=origin, parity=Parity(target, states=states, min_retention=0.5), say=str)


def worst(report: Report) -> dict[str, str]:
    return {f.rule: f.message for f in report.findings if f.severity != "note"}


@pytest.fixture(scope="module")
def trained(demo) -> Head:
    return read_head(open_checkpoint(demo / "mla" / "vllm"))


@pytest.fixture(scope="module")
def unbroken(trained, demo, states, tmp_path_factory) -> dict[str, str]:
    """Return what is said of the head as it was trained, in a folder without a manifest."""
    folder = write_head(tmp_path_factory.mktemp("good") / "out", by_name("vllm"), trained.spec, read_weights(trained))
    report = check(folder, demo, states("held-out"))
    assert report.clean, report.findings
    return worst(report)


@pytest.mark.parametrize("name", BLIND)
def test_without_a_source_it_is_found_and_named(trained, unbroken, demo, states, tmp_path, name):
    folder = write_head(tmp_path / "broken", by_name("vllm"), *FAULTS[name](trained.spec, read_weights(trained)))
    said = worst(check(folder, demo, states("held-out")))
    rule, words = BLIND[name]
    assert words in said[rule]
    assert rule not in unbroken


@pytest.fixture(scope="module")
def approximate(demo, states, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("approximate") / "mla"
    with pytest.MonkeyPatch.context() as patch:
        # A rougher fit takes seconds; what the faults are held against is whatever its manifest states.
        patch.setattr("kconv.convert.attention.latents.GAUGE_STEPS", 20)
        run("to-vllm", demo / "gqa" / "vllm", out, "--attention", "mla", "--heal", 0, "--states",
            states("calibration"), "--target", demo / "target", "--min-retention", 0.5)  # fmt: skip
    return out


def forge(head: Head, out: Path, fault) -> Path:
    """Write an approximate head as a converter with a fault would: its manifest speaks of the bytes that are there."""
    folder = write_head(out, by_name("vllm"), *fault(head.spec, read_weights(head)))
    manifest = read_manifest(head.checkpoint.folder)
    shown = open_checkpoint(folder)
    steps = tuple(
        step.model_copy(
            update={"output": step.output.model_copy(update={"blake3": digest(shown.tensors[step.output.name])})}
        )
        for step in manifest.tensors
    )
    files = tuple(
        record.model_copy(
            update={"size": (folder / record.name).stat().st_size, "sha256": file_digest(folder / record.name)}
        )
        for record in manifest.files
        if (folder / record.name).exists()
    )
    write_manifest(folder, manifest.model_copy(update={"tensors": steps, "files": files}))
    return folder


@pytest.mark.parametrize("name", FORGED)
def test_a_fault_of_an_approximate_head_is_found_where_its_manifest_is_forged(
    approximate, demo, states, tmp_path, name
):
    head, source = read_head(open_checkpoint(approximate)), demo / "gqa" / "vllm"
    said = worst(check(forge(head, tmp_path / "forged", FAULTS[name]), demo, states("held-out"), source))
    assert "K301" not in said
    assert {"K360", "K362"} & said.keys()


def test_an_approximate_head_as_it_was_made_is_clean(approximate, demo, states):
    assert check(approximate, demo, states("held-out"), demo / "gqa" / "vllm").clean


def test_an_approximate_head_that_loses_too_much_is_refused_by_validate_too(approximate, demo, states, tmp_path):
    assert MANIFEST in {file.name for file in approximate.iterdir()}
    asked = ("validate", approximate, "--source", demo / "gqa" / "vllm", "--target", demo / "target", "--states",
             states("held-out"), "--json", "--min-retention")  # fmt: skip
    shown = CliRunner().invoke(main, [str(a) for a in (*asked, 1.0)])
    rules = {finding["rule"] for finding in json.loads(shown.stdout)["findings"]}
    assert shown.exit_code == 1 and "K361" in rules
