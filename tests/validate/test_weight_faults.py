"""Weight faults of an audit on a really trained head: what validate says of each, with and without a source.

The whole table of 26 is tried three times: with a source and without one on a head that was trained, and on an
approximate head whose manifest was forged. Whole validations take about ten seconds each, so few go through the
command; the rest asks the same judgments with the target's states, run once, in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.heads import write_head
from support.validated import validate
from support.weight_faults import FAULTS, ROUNDINGS, STEPS, Bed, make_bed, scale, swap
from torch import Tensor

from kconv.checkpoint.bytes import digest, file_digest
from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from kconv.checkpoint.source import Folder
from kconv.cli import main
from kconv.convert.opening import open_origin
from kconv.convert.read import Head, read_head, read_weights
from kconv.drafters.fingerprint import difference, fingerprint
from kconv.drafters.forward import DraftHead
from kconv.drafters.spec import Gqa, HeadSpec
from kconv.engines import by_name
from kconv.pipeline.demo import RECIPE, run_demo
from kconv.tiny.recipe import cache_root
from kconv.tiny.text import read_corpus
from kconv.validate.options import ValidateOptions
from kconv.validate.parity import targets_own
from kconv.validate.readings import judge_mistakes, measure_mistakes
from kconv.validate.report import Finding, Report
from kconv.validate.rules.head import HeadSubject
from kconv.validate.rules.table import check_head
from kconv.validate.structure import check_source
from kconv.validate.verdict import judge_baselines, judge_fingerprint, without_network

pytestmark = pytest.mark.slow

# What is said without a source, by rules that look at the head alone or beside its target: K169 finds what YaRN cannot
# reach, K366 a RoPE other than the target's, which on a few tokens of a tiny target no measurement tells.
NAMED = {
    "K169": ("YaRN factor", "YaRN original length"),
    "K365": ("hidden_norm x 1.1", "kv_a norm x 1.2", "final norm x 1.3"),
    "K366": ("YaRN beta", "YaRN mscale", "no YaRN", "RoPE theta"),
}
# These change no draft by as much as a few hundred tokens could show.
UNNAMED = ("hidden_norm x 1.01", "eps 1e-3", "eps 1e-6")
# What whole validations say of some: the rule, and words of what it names.
BLIND = {
    "gate and up swapped": ("K364", "gate_proj and up_proj swapped"),
    "lm_head shifted": ("K363", ""),
}
# Of an approximate head whose manifest was forged to speak of its bytes.
FORGED = ("gate and up swapped", "hidden_norm x 1.01")


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
    origin = open_origin(open_checkpoint(source), head, target) if source else None
    options = ValidateOptions(states=str(states), min_retention=0.5)
    return validate(head, options, target=target, source=origin, say=str)


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
def bed(demo) -> Bed:
    """Return texts, and the states of all the target's layers over them."""
    return make_bed(demo / "target")


def blind(bed: Bed, spec: HeadSpec, slots: Mapping[str, Tensor]) -> list[Finding]:
    """Return what is said of a head beside its target's states, and by its config alone."""
    head = DraftHead(spec, dict(slots))
    rows = [row for text in bed.texts for row in bed.measure(text, head)]
    gains = measure_mistakes(head, bed.texts, bed.run, bed.layers, STEPS, targets_own(bed.config))
    return [*judge_baselines(rows), *judge_mistakes(gains, least=without_network(rows))]


@pytest.mark.parametrize("name", FAULTS)
def test_of_26_faults_23_are_found_without_a_source(trained, bed, tmp_path, name):
    broken = FAULTS[name](trained.spec, bed.whole(trained))
    folder = write_head(tmp_path / "broken", by_name("vllm"), FAULTS[name](trained.spec, read_weights(trained))[0],
                        read_weights(trained))  # fmt: skip
    config = {finding.rule for finding in check_head(HeadSubject(open_checkpoint(folder), frozenset(["vllm-v1"])))}
    said = {finding.rule for finding in blind(bed, *broken)} | (config & {"K169"})
    rule = next((rule for rule, names in NAMED.items() if name in names), "K364")
    assert said & {"K169", "K363", "K364", "K365", "K366"} == set() if name in UNNAMED else rule in said


def twice_the_heads(spec: HeadSpec, slots: Mapping[str, Tensor]) -> tuple[HeadSpec, Mapping[str, Tensor]]:
    gqa = spec.attention
    assert isinstance(gqa, Gqa)
    split = Gqa(2 * gqa.heads, 2 * gqa.kv_heads, gqa.head_dim // 2)
    return replace(spec, attention=split), slots


def test_keys_and_values_in_each_others_place_are_named(demo, bed):
    head = read_head(open_checkpoint(demo / "gqa" / "vllm"))
    findings = blind(bed, *swap("0.k_proj", "0.v_proj")(head.spec, bed.whole(head)))
    assert [f.where for f in findings if f.rule == "K364"] == ["k_proj and v_proj swapped"]


@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_a_scale_that_fc_lost_is_named(demo, bed, kind):
    head = read_head(open_checkpoint(demo / kind / "vllm"))
    findings = blind(bed, *scale("fc", 100.0)(head.spec, bed.whole(head)))
    assert [(f.rule, f.where) for f in findings if f.rule == "K364"] == [("K364", "fc times 0.01")]


def test_a_wrong_number_of_heads_that_fits_the_shapes_is_named(demo, bed):
    head = read_head(open_checkpoint(demo / "gqa" / "vllm"))
    gqa = head.spec.attention
    findings = blind(bed, *twice_the_heads(head.spec, bed.whole(head)))
    right = f"{gqa.heads} attention heads of {gqa.head_dim} dims"
    assert [(f.rule, f.where) for f in findings if f.rule == "K364"] == [("K364", right)]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_nothing_is_said_of_right_heads_however_they_are_stored(demo, bed, kind, rounding):
    head = read_head(open_checkpoint(demo / kind / "vllm"))
    slots = {
        name: ROUNDINGS[rounding](weight) if weight.ndim > 1 and name != "embed_tokens" else weight
        for name, weight in bed.whole(head).items()
    }
    assert blind(bed, head.spec, slots) == []


@pytest.mark.parametrize("name", FAULTS)
def test_of_26_faults_26_are_found_with_a_source(trained, demo, tmp_path, name):
    folder = write_head(tmp_path / "broken", by_name("vllm"), *FAULTS[name](trained.spec, read_weights(trained)))
    said = check_source(read_head(open_checkpoint(folder)), read_head(open_checkpoint(demo / "mla" / "trained")))
    assert {finding.rule for finding in said if finding.severity == "error"} & {"K303", "K304"}


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
    # What is said to be copied is held against the source's bytes (K301) beside; a forger may think of that.
    assert {"K360", "K362"} & said.keys()


@pytest.mark.parametrize("name", FAULTS)
def test_of_26_faults_26_are_found_of_an_approximate_head_whose_manifest_is_forged(
    approximate, demo, bed, tmp_path, name
):
    head = read_head(open_checkpoint(approximate))
    folder = forge(head, tmp_path / "forged", FAULTS[name])
    forged, source = read_head(open_checkpoint(folder)), read_head(open_checkpoint(demo / "gqa" / "vllm"))
    record = read_manifest(folder).conversion
    assert record is not None
    apart = difference(record.fingerprint, fingerprint(DraftHead(forged.spec, bed.whole(forged))))
    said = {finding.rule for finding in (*check_source(forged, source), *judge_fingerprint(apart))}
    assert said & {"K303", "K304", "K362"}, said


def test_an_approximate_head_as_it_was_made_is_clean(approximate, demo, states):
    assert check(approximate, demo, states("held-out"), demo / "gqa" / "vllm").clean


def test_an_approximate_head_that_loses_too_much_is_refused_by_validate_too(approximate, demo, states, tmp_path):
    assert MANIFEST in {file.name for file in approximate.iterdir()}
    asked = ("validate", approximate, "--source", demo / "gqa" / "vllm", "--target", demo / "target", "--states",
             states("held-out"), "--json", "--min-retention")  # fmt: skip
    shown = CliRunner().invoke(main, [str(a) for a in (*asked, 1.0)])
    rules = {finding["rule"] for finding in json.loads(shown.stdout)["findings"]}
    assert shown.exit_code == 1 and "K361" in rules
