"""An engine of another package is one object: with nothing else touched, all of kconv knows it.

The object is `ENGINE` below. The last test installs it as another package would, by an entry point, and runs
the rest of this file in a process of its own. What the tests ask is imported by them, as an engine imports none of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.heads import GQA, random_slots, write_head
from support.loopback import serving

from kconv.drafters.eagle3 import EAGLE3
from kconv.drafters.keys import CONVENTION, IDS, OUTPUTS, ConfigTable
from kconv.drafters.spec import HeadSpec
from kconv.engines import registry
from kconv.engines.base import Benchmark, Deployment, Engine, Launch, Runner, Sampling
from kconv.engines.common import OUTSIDE, eagle_config, layer_rows, listed_ids
from kconv.engines.config import identity, write_keys
from kconv.engines.counters import Counters, Counts, Totals, totals
from kconv.engines.layout import Layout, Limit
from kconv.escape import Word
from kconv.rule import Found, Rule

DRAFTS, ACCEPTED = "otter_drafts_total", "otter_accepted_total"


def _write(spec: HeadSpec) -> dict[str, Any]:
    config = identity(spec) | write_keys(spec) | {"otter_version": 1}
    config["eagle_config"] |= {IDS: list(spec.captured), CONVENTION: OUTPUTS}
    return config


def _words(served: Deployment) -> list[Word]:
    return ["otter", "serve", served.target, *(["--draft", served.head] if served.head else []), *served.arguments]


def _read(metrics: str) -> Totals:
    return Totals(dict.fromkeys((DRAFTS, ACCEPTED), 0.0) | totals(metrics, (DRAFTS, ACCEPTED)))


def _count(d: Mapping[str, float], _k: int, _requests: int, prompts: int) -> Counts:
    return Counts(d[DRAFTS], d[ACCEPTED], None, prompts)


ENGINE = Engine(
    name="otter",
    title="Otter",
    layouts=(
        Layout(
            name="otter",
            drafter=EAGLE3,
            engine="Otter 1.0",
            rows=OUTSIDE + layer_rows("decoder.{i}"),
            told_by=lambda config, names: "otter_version" in config,
            write_config=_write,
            config=ConfigTable(ballast=frozenset(("otter_version",))),
            limits=(
                Limit(
                    "OTTER1",
                    "otter-mlp-bias",
                    lambda spec: spec.mlp_bias,
                    "Otter has no biases of the MLP",
                    "Serve this head with TensorRT-LLM.",
                    "https://github.com/otter/otter/blob/v1.0/otter/eagle.py#L1",
                ),
            ),
        ),
    ),
    runners=(Runner("otter", lambda config, _: listed_ids(eagle_config(config).get(IDS))),),
    rules=(
        Rule(
            "OTTER2",
            "otter-river-unstated",
            "warning",
            "The config does not state its river, so Otter takes the nearest.",
            "State it: river.",
            lambda head: [] if "river" in head.config else [Found("config.json: river", "the key is absent")],
            subject="Config",
        ),
    ),
    shared_rules=("K154",),
    launch=Launch(_words, "serve-otter.sh", spread=("--gpus", "8")),
    packages=("otter",),
    sampling=Sampling(("/otter-settings",), {"OTTER_PRETENDS": ()}),
    benchmark=Benchmark(
        "otter bench", ("otter_al",), lambda result, _: {"engine": "otter", "value": result["otter_al"]}
    ),
    counters=Counters("otter_", "/otter", "/version", _read, _count, lambda d: bool(d[DRAFTS])),
)

# The header of a head in Otter's own names: the golden one.
HEADER = {
    "fc.weight": [48, 144], "norm.weight": [48], "lm_head.weight": [64, 48], "embed_tokens.weight": [64, 48],
    "decoder.0.input_layernorm.weight": [48], "decoder.0.hidden_norm.weight": [48],
    "decoder.0.post_attention_layernorm.weight": [48],
    "decoder.0.self_attn.q_proj.weight": [64, 96], "decoder.0.self_attn.k_proj.weight": [32, 96],
    "decoder.0.self_attn.v_proj.weight": [32, 96], "decoder.0.self_attn.o_proj.weight": [48, 64],
    "decoder.0.mlp.gate_proj.weight": [40, 48], "decoder.0.mlp.up_proj.weight": [40, 48],
    "decoder.0.mlp.down_proj.weight": [48, 40],
}  # fmt: skip
INSTALLED = "KCONV_TEST_INVENTED"
installed = pytest.mark.skipif(INSTALLED not in os.environ, reason="run by the last test, in a process of its own")


@pytest.fixture
def heads(tmp_path) -> tuple[Path, Path]:
    """A head in vLLM's layout, and the same converted to Otter's."""
    from kconv.checkpoint.folder import open_checkpoint
    from kconv.convert.execute import execute
    from kconv.convert.plan import plan
    from kconv.convert.read import read_head

    source = write_head(tmp_path / "head", registry.by_name("vllm"), GQA, random_slots(GQA))
    execute(plan(read_head(open_checkpoint(source)), registry.by_name("otter")), tmp_path / "otter")
    return source, tmp_path / "otter"


@installed
def test_it_can_be_asked_for():
    assert registry.writable() == ("vllm", "sglang", "trtllm", "otter", "speculators", "portable")
    assert registry.asked()["otter"] == ("otter",) and "otter" in registry.asked()["all"]
    assert "otter" in registry.servable() and "otter" not in registry.startable()
    assert registry.describe("otter") == "Otter's layout"


@installed
def test_a_head_is_converted_there_and_back_and_detected(heads, tmp_path):
    from kconv.checkpoint.folder import open_checkpoint
    from kconv.convert.execute import execute
    from kconv.convert.plan import plan
    from kconv.convert.read import read_head

    source, converted = heads
    head = read_head(open_checkpoint(converted))
    assert (head.layout.name, head.spec) == ("otter", read_head(open_checkpoint(source)).spec)
    assert {name: list(info.shape) for name, info in head.checkpoint.tensors.items()} == HEADER
    assert "exec otter " in (converted / "serve-otter.sh").read_text()
    execute(plan(head, registry.by_name("vllm")), tmp_path / "back")
    back, own = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", source))
    assert back.keys() == own.keys() and all(bool((back[name] == own[name]).all()) for name in own)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


@installed
def test_its_command_and_a_recipe_write_the_same_folder(heads, tmp_path):
    from click.testing import CliRunner

    from kconv.cli import main

    source, written = heads
    recipe = tmp_path / "release.yaml"
    steps = {
        "converted": {"do": "convert", "head": str(source), "to": "otter"},
        "report": {"do": "validate", "head": "$converted", "source": str(source), "for": "otter"},
    }
    recipe.write_text(json.dumps({"name": "otters", "steps": steps}))
    for words in (
        ["to-otter", source, tmp_path / "command"],
        ["run", recipe, "--out", tmp_path / "run"],
        ["inspect", tmp_path / "command"],
    ):
        done = CliRunner().invoke(main, [str(word) for word in words])
        assert done.exit_code == 0, done.output
    assert "otter" in done.output
    folders = (tmp_path / "command", tmp_path / "run" / "converted")
    for one in folders:
        assert {file.name: file.read_bytes() for file in one.iterdir()} == {
            file.name: file.read_bytes() for file in written.iterdir()
        }


@installed
def test_what_it_cannot_hold_is_refused_and_a_rule_of_validate(tmp_path):
    from support.validated import validate

    from kconv.checkpoint.folder import open_checkpoint
    from kconv.checkpoint.source import Folder
    from kconv.convert.plan import plan
    from kconv.convert.read import read_head
    from kconv.errors import LayoutCannot
    from kconv.validate.options import ValidateOptions
    from kconv.validate.rules.table import find_rule

    spec = replace(GQA, mlp_bias=True)
    source = write_head(tmp_path / "head", registry.by_name("vllm"), spec, random_slots(spec))
    with pytest.raises(LayoutCannot, match="Otter has no biases"):
        plan(read_head(open_checkpoint(source)), registry.by_name("otter"))
    report = validate(Folder(source), ValidateOptions(for_=("otter",)))
    assert ("OTTER1", ("otter",)) in [(finding.rule, finding.engines) for finding in report.findings]
    assert find_rule("otter-mlp-bias").engines == ("otter",)


@installed
def test_it_brings_a_rule_of_its_own(heads):
    from support.validated import validate

    from kconv.checkpoint.source import Folder
    from kconv.validate.options import ValidateOptions
    from kconv.validate.rules.table import SUBJECTS, find_rule

    assert find_rule("otter-river-unstated") in SUBJECTS["Config"]
    assert "otter" in find_rule("K154").engines
    for engine, said in (("otter", [("OTTER2", "State it: river.", ("otter",))]), ("vllm", [])):
        report = validate(Folder(heads[1]), ValidateOptions(for_=(engine,)))
        own = [finding for finding in report.findings if finding.rule == "OTTER2"]
        assert [(finding.rule, finding.fix, finding.engines) for finding in own] == said


@installed
def test_a_head_in_its_layout_is_checked_for_it(heads):
    from support.validated import validate

    from kconv.cards.publish.gate import written_for
    from kconv.checkpoint.source import Folder

    report = validate(Folder(heads[1]))
    assert report.provenance["for"] == ["otter"]
    assert [finding for finding in report.findings if finding.severity == "error"] == []
    assert written_for("otter") == ("otter",)


@installed
def test_it_stands_on_a_card(heads):
    from kconv.cards.card import write_card
    from kconv.cards.facts import Facts

    text = write_card(heads[1], None, Facts(serve={"otter": {"requires": "Otter 1.0"}})).read_text()
    assert "Otter's layout" in text and "otter serve" in text and "Requires Otter 1.0." in text


@installed
@pytest.mark.parametrize(("size", "spread"), [(59 * 10**9, ""), (61 * 10**9, " --gpus 8")])
def test_it_stands_on_the_card_of_a_target(heads, tmp_path, size, spread):
    from kconv.cards.evidence import Evidence
    from kconv.cards.facts import Facts
    from kconv.cards.target_card import figures
    from kconv.checkpoint.manifest import FileRecord, read_manifest

    file = FileRecord(name="model.safetensors", size=size, sha256="0" * 64)
    manifest = read_manifest(heads[1]).model_copy(update={"files": (file,)})
    commands = dict(figures(Evidence(tmp_path, Facts(name="org/target-nvfp4"), manifest))["commands"])
    assert commands["Otter"] == f"otter serve org/target-nvfp4{spread}"


@installed
def test_its_packages_are_looked_for():
    from click.testing import CliRunner

    from kconv.cli import main

    done = CliRunner().invoke(main, ["env", "--json"])
    assert json.loads(done.stdout)["engines"]["otter"] == "1.0"


@installed
def test_its_own_results_can_be_quoted(tmp_path):
    from kconv.bench.foreign import quote

    (tmp_path / "result.json").write_text(json.dumps({"otter_al": 2.5}))
    said = {"dataset": "mt-bench", "metric": "al_incl_bonus", "averaging": "micro_steps", "draft_tokens": 3}
    found = quote(tmp_path / "result.json", "my-head", None, said)
    assert (found.rows[0].engine, found.rows[0].value) == ("otter", 2.5) and "otter bench" in found.rows[0].note


@installed
@pytest.mark.parametrize("forging", [False, True])
def test_its_counters_are_read_by_bench(forging):
    from kconv.bench.measure import ServedHead, measure_server
    from kconv.bench.options import MeasureOptions
    from kconv.errors import AcceptanceForged
    from kconv.targets.prompts import Prompt
    from kconv.targets.suites import Suite

    counted = {DRAFTS: 0, ACCEPTED: 0}

    def answer(path: str, body: Any) -> tuple[int, str]:
        if path == "/otter":
            return 200, "".join(f"{name} {count}.0\n" for name, count in counted.items())
        if path == "/version":
            return 200, json.dumps({"version": "1.0"})
        if path == "/otter-settings":
            return 200, json.dumps({"OTTER_PRETENDS": 2.5 if forging else None})
        if body is None:
            return (200, json.dumps({"data": [{"id": "tiny"}]})) if path == "/v1/models" else (404, "")
        counted[DRAFTS] += 2
        counted[ACCEPTED] += 3
        choice = {"message": {"content": "some words of an answer"}, "finish_reason": "stop"}
        return 200, json.dumps({"choices": [choice], "usage": {"completion_tokens": 6}})

    prompts = tuple(Prompt(f"p{i}", "", (f"Say {i}.",)) for i in range(3))
    with serving(answer) as url:
        suite = Suite("tiny", "sha256:00", (("", prompts),))
        if forging:
            with pytest.raises(AcceptanceForged, match="OTTER_PRETENDS is"):
                measure_server(url, suite, ServedHead(3, "my-head"), MeasureOptions())
            return
        found = measure_server(url, suite, ServedHead(3, "my-head"), MeasureOptions())
    row = found.rows[0]
    assert (row.engine, row.engine_version, row.value, row.drafts) == ("otter", "1.0", 2.5, 6)


@installed
def test_the_page_of_layouts_has_it():
    from docs_parts.layouts import layouts

    page = "\n".join(layouts())
    assert "| `otter` | Otter 1.0 |" in page and "`decoder.{i}.hidden_norm.weight`" in page
    assert "- `otter`: OTTER1" in page


@pytest.mark.skipif(INSTALLED in os.environ, reason="runs the others")
def test_an_engine_of_another_package_is_known_everywhere(tmp_path):
    (tmp_path / "otter.py").write_text(f"import runpy\nENGINE = runpy.run_path({__file__!r})['ENGINE']\n")
    info = tmp_path / "otter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: otter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kconv.engines]\notter = otter:ENGINE\n")
    paths = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {INSTALLED: "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert "14 passed" in run.stdout
