"""The demo from end to end: with small recipes, and with its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import verify
from kconv.errors import OutputExists
from kconv.pipeline.demo import AFTER, BEFORE, RECIPE, DemoRecipe, Made, run_demo
from kconv.tiny.recipe import TEST, cache_root
from kconv.tiny.target import kept_at
from kconv.train.recipe import TEST_GQA, TEST_MHA, TEST_MLA

SMALL = DemoRecipe(TEST, (("mla", TEST_MLA), ("gqa", TEST_GQA), ("mha", TEST_MHA)), prompts=8)


@contextmanager
def quiet(_: str) -> Iterator:
    yield lambda *_: None


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Path, list[Made]]:
    out = tmp_path_factory.mktemp("demo") / "out"
    return out, run_demo(out, cache_root(), quiet, SMALL)


def proven(made: list[Made]) -> None:
    for head in made:
        assert head.report.clean
        assert head.report.figures.identical
        assert head.rounded
        for parity in head.report.figures.parity:
            # Two programs that order their sums differently: fp32 rounding (2 ** -23 is 1.2e-7) on the whole.
            # The worst of a million logits is further off; each program alone is 1e-5 from the same in float64.
            assert parity.rms_error < 2e-6
            assert parity.relative_error < 1e-4
            assert parity.top1 == 1.0
            assert abs(parity.length_difference) < 1e-6


@pytest.mark.slow
def test_before_and_after_are_the_same_head(small):
    proven(small[1])


@pytest.mark.slow
def test_there_is_everything_it_speaks_of(small):
    out, made = small
    for head in made:
        assert {path.name for path in head.folder.iterdir()} == {"trained", "vllm", "trtllm", "report.json"}
        manifest = verify(head.folder / "vllm", open_checkpoint(head.folder / "trained"))
        assert manifest.source == f"{head.name}/trained"
        assert (head.folder / "vllm" / "README.md").exists()
        for folder, dtype in (("trained", torch.float32), ("vllm", torch.float32), ("trtllm", torch.bfloat16)):
            weights = load_file(head.folder / folder / "model.safetensors").values()
            assert {tensor.dtype for tensor in weights if tensor.is_floating_point()} == {dtype}
    prompts = [json.loads(line) for line in (out / "held-out.jsonl").read_text().splitlines()]
    assert len(prompts) == SMALL.prompts
    assert str(out.parent) not in "".join(p.read_text() for p in out.rglob("*.json"))


class Enough(Exception):
    """What is to be seen was seen."""


def titles(out: Path, cache: Path, until: str) -> list[str]:
    """Return the titles of a demo's stages, up to one in whose name a word stands; that one is not carried out."""
    seen: list[str] = []

    @contextmanager
    def stage(title: str) -> Iterator:
        seen.append(title)
        if until in title:
            raise Enough
        yield lambda *_: None

    with pytest.raises(Enough):
        run_demo(out, cache, stage, SMALL)
    return seen


def test_a_stage_says_training_only_where_something_is_trained(tiny_target, tmp_path):
    assert titles(tmp_path / "out", tmp_path / "empty", "") == ["tiny Kimi-K2: training"]
    target = kept_at(TEST, cache_root())
    assert target == tiny_target
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / target.name).symlink_to(target)
    before = "tiny Kimi-K2: kept from before"
    assert titles(tmp_path / "out", tmp_path / "cache", "head") == [before, "mla head: training with ModelOpt"]


@pytest.mark.slow
def test_a_stage_says_where_all_was_kept(small, tmp_path):
    heads = [f"{name} head: kept from before" for name, _ in SMALL.heads]
    kept = ["tiny Kimi-K2: kept from before", *heads]
    assert titles(tmp_path / "out", cache_root(), "prompts")[:-1] == kept


def test_an_existing_folder_is_refused_before_anything_is_trained(tmp_path):
    def never(_: str):
        raise AssertionError("nothing should be trained")

    with pytest.raises(OutputExists):
        run_demo(tmp_path, tmp_path / "no-cache", never, SMALL)


@pytest.mark.slow
@pytest.mark.demo
def test_the_demos_heads_beat_drafters_without_a_network(tmp_path, demo_lock):
    with demo_lock:
        made = run_demo(tmp_path / "demo", cache_root(), quiet, RECIPE)
    proven(made)
    for head in made:
        for text in ("held-out", "sampled"):
            rows = {row.drafter: row for row in head.report.figures.acceptance if row.text == text}
            assert rows[BEFORE].length == pytest.approx(rows[AFTER].length, abs=1e-6)
            assert rows[AFTER].length >= rows["bigram"].length + 0.3
            assert rows[AFTER].length >= rows["prompt lookup"].length + 0.3
