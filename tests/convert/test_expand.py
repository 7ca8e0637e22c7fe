"""A reduced head with the full vocabulary: it drafts what it drafted, and a token without a trained row never."""

from dataclasses import replace

import pytest
import torch
from support.heads import GQA, random_slots, write_head
from support.vocab import DRAFT, FULL, REDUCED, VOCAB, assert_carried, draft, load, run, target_ids, text, write

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.convert.vocab import CountedText, expand, prune
from kconv.engines import BY_NAME
from kconv.errors import LayoutCannot, TensorValue


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    root = tmp_path_factory.mktemp("expand")
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:DRAFT]  # by frequency: unsorted
    write(root / "reduced", REDUCED, d2t=kept - torch.arange(DRAFT), without=("t2d",))
    return root / "reduced", root / "out", run(expand, root / "reduced", root / "out")


def test_each_row_stands_at_its_target_id_and_the_rest_is_one_row(heads):
    reduced, out, _ = heads
    ids, rows = target_ids(reduced), load(out)["lm_head.weight"]
    assert rows.shape == (VOCAB, FULL.hidden)
    assert torch.equal(rows[ids], load(reduced)["lm_head.weight"])
    unmapped = rows[[i for i in range(VOCAB) if i not in set(ids.tolist())]]
    assert len(unmapped.unique(dim=0)) == 1
    assert torch.equal(unmapped[0], load(reduced)["lm_head.weight"].double().mean(0).bfloat16())


@pytest.mark.parametrize("tokens, row", [({"pad_token_id": 30, "eos_token_id": 10}, 3), ({"bos_token_id": 10}, 1)])
def test_a_token_that_no_text_goes_on_with_pulls_that_row_down(tmp_path, tokens, row):
    spec = replace(GQA, hidden=16, target_hidden=16, vocab=64, draft_vocab=40)
    ids = torch.tensor([0, 10, 20, 30, *range(25, 30), *range(31, 62)])
    slots = random_slots(spec, without=("t2d",)) | {"d2t": ids - torch.arange(40)}
    config = BY_NAME["vllm"].write_config(spec) | tokens
    write_head(tmp_path / "head", BY_NAME["vllm"], spec, slots, config)
    manifest = run(expand, tmp_path / "head", tmp_path / "out")
    rows = load(tmp_path / "head")["lm_head.weight"].double()
    expected = (0.5 * rows.mean(0) + 0.5 * rows[row]).bfloat16()
    assert torch.equal(load(tmp_path / "out")["lm_head.weight"][1], expected)
    (reason,) = (step.reason for step in manifest.tensors if step.reason)
    assert f"leaning by 50% towards that of token {int(target_ids(tmp_path / 'head')[row])}" in reason


def test_greedy_drafts_stay_the_same_token_for_token(heads):
    (before, ids), (after, _) = draft(heads[0]), draft(heads[1])
    assert torch.equal(after.argmax(1), ids[before.argmax(1)])


def test_all_else_is_the_source_s_and_the_manifest_says_what_was_done(heads):
    reduced, out, manifest = heads
    assert_carried(reduced, out, VOCAB)
    assert "d2t" not in load(out)
    assert not manifest.exact
    (step,) = (step for step in manifest.tensors if step.action != "copied")
    assert (step.action, [source.name for source in step.sources]) == ("expanded", ["lm_head.weight", "d2t"])
    assert "never the only argmax" in step.reason and "1400 others is the mean" in step.reason


def test_tensorrt_llm_takes_an_mla_head_only_afterwards(heads):
    with pytest.raises(LayoutCannot, match="reduced vocabulary"):
        plan(read_head(open_checkpoint(heads[0])), BY_NAME["trtllm"])
    assert plan(read_head(open_checkpoint(heads[1])), BY_NAME["trtllm"]).spec.draft_vocab == VOCAB


def test_pruning_to_the_same_tokens_gives_the_reduced_head_back(heads, tmp_path):
    reduced, full, _ = heads
    counts = torch.zeros(VOCAB, dtype=torch.int64).index_fill(0, target_ids(reduced), 1)
    run(prune, full, tmp_path / "out", DRAFT, CountedText(counts.numpy(), "a text"), {})
    order = target_ids(reduced).argsort()
    assert torch.equal(load(tmp_path / "out")["lm_head.weight"], load(reduced)["lm_head.weight"][order])


def test_with_fewer_rows_than_dims_the_bound_is_stated(tmp_path):
    write(tmp_path / "small", replace(GQA, draft_vocab=24))
    manifest = run(expand, tmp_path / "small", tmp_path / "out")
    (reason,) = (step.reason for step in manifest.tensors if step.reason)
    assert "exceeds the greatest of theirs" in reason and "only argmax" not in reason


def test_a_t2d_is_dropped_with_a_reason(tmp_path):
    write(tmp_path / "small", replace(GQA, draft_vocab=24))
    assert [record.name for record in run(expand, tmp_path / "small", tmp_path / "out").dropped] == ["t2d"]


def test_a_full_head_or_a_doubtful_map_is_refused(tmp_path):
    write(tmp_path / "full", FULL)
    with pytest.raises(LayoutCannot, match="already"):
        run(expand, tmp_path / "full", tmp_path / "out")
    wrong = ~random_slots(REDUCED)["t2d"]
    write(tmp_path / "doubtful", REDUCED, t2d=wrong)
    with pytest.raises(TensorValue, match="t2d marks 2500 tokens otherwise"):
        run(expand, tmp_path / "doubtful", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "layout, layers",
    [("vllm", 1), ("vllm", 2), ("trtllm", 1), ("trtllm", 2), ("sglang", 1), ("portable", 1)],
)
def test_each_layout_is_kept(tmp_path, layout, layers):
    spec = replace(GQA, layers=layers)
    write(tmp_path / "full", spec, layout)
    run(prune, tmp_path / "full", tmp_path / "reduced", 50, text(spec), {})
    run(expand, tmp_path / "reduced", tmp_path / "out")
    source, out = (read_head(open_checkpoint(tmp_path / name)) for name in ("full", "out"))
    assert (out.spec, out.layout.name) == (source.spec, source.layout.name)
