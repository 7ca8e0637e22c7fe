"""Another draft vocabulary for a head: the tokens that remain keep their rows, and a wrong map is never written."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.heads import GQA, MLA, random_slots, write_head
from support.vocab import DRAFT, FULL, REDUCED, VOCAB, assert_carried, draft, load, run, target_ids, text, write

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.header import read_header
from kconv.checkpoint.manifest import verify
from kconv.convert.read import read_head
from kconv.convert.vocab import CountedText, expand, prune, rebuild_t2d, write_offsets
from kconv.engines import BY_NAME
from kconv.errors import (
    ConfigInvalid,
    ConfigUnsupported,
    LayoutCannot,
    TargetInvalid,
    TensorMissing,
    TensorShape,
    TensorValue,
)


class TestPrune:
    @pytest.fixture(scope="class")
    def heads(self, tmp_path_factory):
        root = tmp_path_factory.mktemp("prune")
        write(root / "full", FULL)
        return (
            root / "full",
            root / "out",
            run(prune, root / "full", root / "out", DRAFT, text(), {3: "[EOS]", 2499: "x"}),
        )

    def test_rows_are_those_of_the_target_ids(self, heads):
        full, out, _ = heads
        ids = target_ids(out)
        assert torch.equal(load(out)["lm_head.weight"], load(full)["lm_head.weight"][ids])
        # What another exporter did: rows by offset. They are other rows.
        assert not torch.equal(load(out)["lm_head.weight"], load(full)["lm_head.weight"][load(out)["d2t"]])
        assert torch.equal(load(out)["t2d"].nonzero()[:, 0], ids)
        assert ids.tolist() == sorted(set(ids.tolist()))

    def test_the_tokens_are_the_special_and_the_most_frequent_ones(self, heads):
        counts, ids = text().counts, target_ids(heads[1])
        assert {3, 2499} <= set(ids.tolist())
        lost = set(range(VOCAB)) - set(ids.tolist())
        assert max(int(counts[i]) for i in lost) <= min(int(counts[i]) for i in ids.tolist() if i not in (3, 2499))

    def test_greedy_drafts_are_the_full_head_s_among_the_kept_tokens(self, heads):
        (before, _), (after, ids) = draft(heads[0]), draft(heads[1])
        kept = torch.full_like(before, float("-inf"))
        kept[:, ids] = before[:, ids]
        assert torch.equal(kept.argmax(1), ids[after.argmax(1)])

    def test_all_else_is_the_source_s_and_the_manifest_says_what_was_done(self, heads):
        full, out, manifest = heads
        assert_carried(full, out, DRAFT)
        assert not manifest.exact
        actions = {step.output.name: step.action for step in manifest.tensors}
        assert {actions.pop(name) for name in ("d2t", "t2d")} == {"added"}
        assert actions.pop("lm_head.weight") == "pruned"
        assert set(actions.values()) == {"copied"}
        (reason,) = (step.reason for step in manifest.tensors if step.action == "pruned")
        counts = text().counts
        share = int(counts[target_ids(out)].sum()) / int(counts.sum())
        assert f"{share:.2%} of its {int(counts.sum())} tokens" in reason and "prompts.jsonl (sha256 ab)" in reason

    def test_the_config_s_own_special_tokens_are_kept(self, tmp_path):
        config = BY_NAME["vllm"].write_config(FULL) | {"bos_token_id": 2400, "eos_token_id": [2401, 2402]}
        write_head(tmp_path / "full", BY_NAME["vllm"], FULL, random_slots(FULL), config)
        counts = np.arange(VOCAB, 0, -1)
        run(prune, tmp_path / "full", tmp_path / "out", 5, CountedText(counts, "a text"), {})
        assert target_ids(tmp_path / "out").tolist() == [0, 1, 2400, 2401, 2402]

    def test_what_cannot_be_pruned_is_refused(self, tmp_path):
        write(tmp_path / "reduced", REDUCED)
        write(tmp_path / "shared", FULL, without=("lm_head",))
        write(tmp_path / "full", FULL)
        refused = [
            ("reduced", text(), DRAFT, LayoutCannot, "reduced to 1100"),
            ("shared", text(), DRAFT, TensorMissing, "shares the target's"),
            ("full", CountedText(np.ones(VOCAB + 1, np.int64), ""), DRAFT, TargetInvalid, "2501 tokens"),
            ("full", text(), VOCAB, ConfigInvalid, "cannot be chosen"),
        ]
        for name, counts, size, fault, match in refused:
            with pytest.raises(fault, match=match):
                run(prune, tmp_path / name, tmp_path / "out", size, counts, {})
        assert not (tmp_path / "out").exists()


class TestRebuild:
    WRONG = {  # noqa: RUF012
        "absent": None,
        "of other tokens": torch.zeros(VOCAB, dtype=torch.bool),
        "of integers": torch.ones(VOCAB, dtype=torch.int64),
        "of another length": torch.ones(VOCAB - 1, dtype=torch.bool),
    }

    @pytest.mark.parametrize("wrong", WRONG)
    def test_t2d_follows_from_d2t_whatever_it_was(self, tmp_path, wrong):
        folder = write(tmp_path / "head", REDUCED, without=("t2d",))
        if self.WRONG[wrong] is not None:
            save_file(load(folder) | {"t2d": self.WRONG[wrong]}, folder / "model.safetensors")
        manifest = run(rebuild_t2d, folder, tmp_path / "out")
        out = load(tmp_path / "out")
        assert set(out["t2d"].nonzero()[:, 0].tolist()) == set(target_ids(folder).tolist())
        assert torch.equal(out["d2t"], load(folder)["d2t"])
        assert torch.equal(out["lm_head.weight"], load(folder)["lm_head.weight"])
        assert_carried(folder, tmp_path / "out", DRAFT)
        assert manifest.exact
        assert [step.output.name for step in manifest.tensors if step.action == "rebuilt"] == ["t2d"]

    def test_a_map_that_is_none_is_refused(self, tmp_path):
        write(tmp_path / "full", FULL)
        with pytest.raises(LayoutCannot, match="no map"):
            run(rebuild_t2d, tmp_path / "full", tmp_path / "out")
        write(tmp_path / "zeros", REDUCED, d2t=torch.full((DRAFT,), -1))
        with pytest.raises(TensorValue, match="outside"):
            run(rebuild_t2d, tmp_path / "zeros", tmp_path / "out")

    def test_a_d2t_that_the_targets_rows_contradict_is_not_rebuilt_from(self, tmp_path):
        spec, ids = replace(GQA, draft_vocab=20), torch.arange(0, 40, 2)
        target = torch.randn(64, spec.hidden, generator=torch.Generator().manual_seed(2)).bfloat16()
        save_file({"lm_head.weight": target}, tmp_path / "target.safetensors")
        reference = read_header(tmp_path / "target.safetensors")["lm_head.weight"]
        t2d = torch.zeros(64, dtype=torch.bool).index_fill(0, ids, True)
        write(tmp_path / "wrong", spec, d2t=torch.arange(20) + 1, t2d=t2d, lm_head=target[ids])
        with pytest.raises(TensorValue, match="d2t is wrong"):
            run(rebuild_t2d, tmp_path / "wrong", tmp_path / "out", reference)
        write(tmp_path / "right", spec, d2t=torch.arange(20), t2d=t2d.roll(1), lm_head=target[ids])
        run(rebuild_t2d, tmp_path / "right", tmp_path / "out", reference)
        assert torch.equal(load(tmp_path / "out")["t2d"], t2d)


class TestOffsets:
    def write_absolute(self, folder, spec=REDUCED, layout="vllm", **changes):
        slots = random_slots(spec)
        ids = slots["d2t"] + torch.arange(spec.draft_vocab)
        write_head(folder, BY_NAME[layout], spec, slots | {"d2t": ids} | changes)
        return ids

    @pytest.mark.parametrize("layout, spec", [("vllm", REDUCED), ("trtllm", replace(GQA, draft_vocab=40))])
    def test_absolute_ids_become_offsets_and_all_else_stays(self, tmp_path, layout, spec):
        ids = self.write_absolute(tmp_path / "head", spec, layout)
        with pytest.raises(TensorValue):
            read_head(open_checkpoint(tmp_path / "head"))
        manifest = run(write_offsets, tmp_path / "head", tmp_path / "out")
        assert torch.equal(target_ids(tmp_path / "out"), ids)
        assert torch.equal(load(tmp_path / "out")["t2d"], load(tmp_path / "head")["t2d"])
        assert torch.equal(load(tmp_path / "out")["lm_head.weight"], load(tmp_path / "head")["lm_head.weight"])
        assert_carried(tmp_path / "head", tmp_path / "out", spec.draft_vocab)
        assert manifest.exact
        read_head(open_checkpoint(tmp_path / "out"))

    def test_what_holds_offsets_is_refused(self, tmp_path):
        write(tmp_path / "offsets", REDUCED)
        with pytest.raises(TensorValue, match="repeat an earlier one"):
            run(write_offsets, tmp_path / "offsets", tmp_path / "out")
        # Every second token: either reading is possible, and t2d knows.
        spec = replace(GQA, draft_vocab=20)
        t2d = torch.zeros(64, dtype=torch.bool).index_fill(0, torch.arange(0, 40, 2), True)
        write(tmp_path / "marked", spec, d2t=torch.arange(20), t2d=t2d)
        with pytest.raises(TensorValue, match="t2d would be wrong about 20 tokens"):
            run(write_offsets, tmp_path / "marked", tmp_path / "out")
        write(tmp_path / "full", FULL)
        with pytest.raises(LayoutCannot, match="no map"):
            run(write_offsets, tmp_path / "full", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_the_target_s_rows_decide_where_nothing_else_does(self, tmp_path):
        spec = replace(GQA, draft_vocab=20)
        target = torch.randn(64, spec.hidden, generator=torch.Generator().manual_seed(2)).bfloat16()
        save_file({"lm_head.weight": target}, tmp_path / "target.safetensors")
        reference = read_header(tmp_path / "target.safetensors")["lm_head.weight"]
        for name, ids in (("offsets", torch.arange(0, 40, 2)), ("ids", torch.arange(20))):
            write(tmp_path / name, spec, without=("t2d",), d2t=torch.arange(20), lm_head=target[ids])
        with pytest.raises(TensorValue, match="the target's at i"):
            run(write_offsets, tmp_path / "offsets", tmp_path / "out", reference)
        run(write_offsets, tmp_path / "ids", tmp_path / "out", reference)
        assert load(tmp_path / "out")["d2t"].tolist() == [0] * 20


def test_a_nested_config_states_the_new_size_too(tmp_path):
    folder = write(tmp_path / "full", GQA)
    config = json.loads((folder / "config.json").read_text())
    outer = {"speculators_model_type": "eagle3", "draft_vocab_size": 64, "norm_before_residual": False}
    outer["eagle_aux_hidden_state_layer_ids"] = config.pop("eagle_aux_hidden_state_layer_ids")
    inner = {key: value for key, value in config.items() if key not in ("norm_before_residual", "eagle_config")}
    (folder / "config.json").write_text(json.dumps(outer | {"transformer_layer_config": inner}))
    run(prune, folder, tmp_path / "out", 50, text(GQA), {})
    head = read_head(open_checkpoint(tmp_path / "out"))
    assert (head.layout.name, head.spec.draft_vocab) == ("speculators", 50)


def test_a_trainer_s_names_are_kept(tmp_path):
    folder = write(tmp_path / "full", GQA)
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in load(folder).items()}
    save_file(renamed, folder / "model.safetensors")
    run(prune, folder, tmp_path / "out", 50, text(GQA), {})
    assert load(tmp_path / "out").keys() == renamed.keys() | {"d2t", "t2d"}
    verify(tmp_path / "out", open_checkpoint(folder))


def test_a_map_beside_a_full_vocabulary_gives_way(tmp_path):
    folder = write(tmp_path / "full", GQA)
    idle = {"d2t": torch.zeros(64, dtype=torch.int64), "t2d": torch.ones(64, dtype=torch.bool)}
    save_file(load(folder) | idle, folder / "model.safetensors")
    run(prune, folder, tmp_path / "out", 50, text(GQA), {})
    assert len(target_ids(tmp_path / "out")) == 50
    verify(tmp_path / "out", open_checkpoint(folder))


def test_the_rows_of_a_quantized_lm_head_stay_together(tmp_path):
    folder = write(tmp_path / "full", GQA)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load(folder)
    scaled = {
        "lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn),
        "lm_head.weight_scale": torch.ones(1),
    }
    save_file(tensors | scaled, folder / "model.safetensors")
    with pytest.raises(ConfigUnsupported, match="quantized to F8_E4M3"):
        run(prune, folder, tmp_path / "out", 50, text(GQA), {})


def test_shapes_that_contradict_the_config_are_refused(tmp_path):
    folder = write(tmp_path / "head", REDUCED, without=("t2d",))
    save_file(load(folder) | {"lm_head.weight": torch.zeros(VOCAB, MLA.hidden)}, folder / "model.safetensors")
    for operation in (rebuild_t2d, write_offsets, expand):
        with pytest.raises(TensorShape, match="lm_head"):
            run(operation, folder, tmp_path / "out")
