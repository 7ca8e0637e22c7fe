"""The examination of a draft vocabulary: each fault of the field is named, and a sound one has none."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import GQA, MLA, Tokens, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.header import read_header
from kconv.convert.vocab import examine
from kconv.drafters.vocab import ABSOLUTE, EITHER, FULL, IDENTITY, MISSING, NEITHER, OFFSETS
from kconv.engines import BY_NAME
from kconv.errors import TargetInvalid

SPEC = replace(MLA, draft_vocab=8, tokens=Tokens(bos=10, eos=(20, 63), pad=None))
# The ids of a published account of this fault; its exporter's rows were [3, 6, 8, 17, 27, 35, 49, 53].
IDS = torch.tensor([3, 7, 10, 20, 31, 40, 55, 60])
D2T = IDS - torch.arange(8)
T2D = torch.zeros(64, dtype=torch.bool).index_fill(0, IDS, True)
TARGET = torch.randn(64, MLA.hidden, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.fixture
def report(tmp_path):
    """Return a function that writes a head with some tensors changed (None: left out) and examines it."""

    def run(spec=SPEC, layout="vllm", config=None, target=None, **changes):
        kept = {} if spec.draft_vocab == spec.vocab else {"d2t": D2T, "t2d": T2D}
        slots = {name: value for name, value in (random_slots(spec) | kept | changes).items() if value is not None}
        folder = write_head(tmp_path / "head", BY_NAME[layout], spec, slots)
        # Also where the layout has no place for them.
        maps = {name: value for name, value in slots.items() if name in ("d2t", "t2d")}
        save_file(load_file(folder / "model.safetensors") | maps, folder / "model.safetensors")
        if config:
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | config))
        reference = None
        if target is not None:
            save_file({"lm_head.weight": target}, tmp_path / "target.safetensors")
            reference = read_header(tmp_path / "target.safetensors")["lm_head.weight"]
        return examine(open_checkpoint(folder), reference=reference)

    return run


def faults(report):
    return " | ".join(f"{fault.where}: {fault.what}" for fault in report.faults)


def test_a_sound_map_has_no_faults(report):
    found = report()
    assert (found.kind, found.order, found.t2d, found.faults) == (OFFSETS, "ascending", "agrees", ())
    assert (found.vocab, found.draft_vocab, found.lm_head_rows) == (64, 8, 8)
    assert (found.duplicates, found.outside) == (0, 0)
    assert found.kept == ("bos (10)", "eos (20)")
    assert found.lost == ("eos (63)",)
    assert "eos (63)" in found.warnings[0]


def test_an_unsorted_map_is_as_sound(report):
    ids = IDS.flip(0)
    found = report(d2t=ids - torch.arange(8))
    assert (found.kind, found.order, found.t2d, found.faults) == (OFFSETS, "unsorted", "agrees", ())


def test_a_full_vocabulary_needs_no_map(report):
    found = report(replace(SPEC, draft_vocab=64))
    assert (found.kind, found.order, found.lost, found.faults) == (FULL, "", (), ())


def test_a_shared_lm_head_is_no_fault_of_a_full_head(report):
    found = report(replace(SPEC, draft_vocab=64), lm_head=None)
    assert (found.lm_head_rows, found.faults) == (None, ())


@pytest.mark.parametrize("t2d", [T2D, None])
def test_absolute_ids_read_as_offsets(report, t2d):
    found = report(d2t=IDS, t2d=t2d)  # 7 + 60 is out of range, so the ids cannot be offsets
    assert found.kind == ABSOLUTE
    assert "d2t: it holds absolute ids" in faults(found)
    assert "--absolute" in found.faults[0].fix
    assert found.kept == ("bos (10)", "eos (20)")


def test_absolute_ids_that_could_be_offsets_are_told_by_t2d(report):
    low = torch.tensor([3, 7, 10, 20, 31, 40, 45, 50])
    t2d = torch.zeros(64, dtype=torch.bool).index_fill(0, low, True)
    assert report(d2t=low, t2d=t2d).kind == ABSOLUTE


def test_a_map_that_could_be_either_is_warned_of(report):
    found = report(d2t=torch.tensor([3, 7, 10, 20, 31, 40, 45, 50]), t2d=None)
    assert (found.kind, found.t2d, found.faults) == (EITHER, "absent", ())
    assert any("offsets or absolute ids" in warning for warning in found.warnings)


def test_and_the_target_s_rows_tell_which(report):
    low = torch.tensor([3, 7, 10, 20, 31, 40, 45, 50])
    found = report(d2t=low, t2d=None, lm_head=TARGET[low], target=TARGET)
    assert (found.kind, found.copies.by_id, found.copies.by_offset) == (ABSOLUTE, 8, 1)
    assert "absolute ids" in faults(found)


def test_rows_taken_by_offset_are_told_with_a_target(report):
    wrong = TARGET[D2T]
    assert not torch.equal(wrong, TARGET[IDS])
    found = report(lm_head=wrong, target=TARGET)
    assert found.kind == OFFSETS
    assert "8 of 8 rows of lm_head equal the target's rows d2t[i], but only 1" in faults(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copied_rows_at_the_right_ids_are_counted(report, dtype):
    found = report(lm_head=TARGET[IDS], target=TARGET.to(dtype))
    assert (found.copies.rows, found.copies.by_offset, found.faults) == (8, 8, ())


def test_trained_rows_are_no_fault(report):
    found = report(target=TARGET)
    assert (found.copies.by_offset, found.faults) == (0, ())


def test_a_target_of_another_width_cannot_be_compared(report):
    assert report(target=TARGET[:, :-1].contiguous()).copies is None


def test_a_target_of_another_vocabulary_is_refused(report):
    with pytest.raises(TargetInvalid, match="63 tokens"):
        report(target=TARGET[:-1])


@pytest.mark.parametrize("t2d", [T2D, None])
def test_duplicates_are_counted_and_named(report, t2d):
    found = report(d2t=torch.tensor([3, 2, 8, 17, 27, 8, 49, 53]), t2d=t2d)  # 1 + 2 is 3 again
    assert (found.kind, found.duplicates) == (NEITHER, 1)
    assert "1 draft ids map to a target id that another draft id already uses" in faults(found)


def test_a_broken_map_is_not_taken_for_absolute_ids_against_its_t2d(report):
    found = report(d2t=torch.tensor([3, 2, 8, 17, 27, 35, 49, 53]))  # its values are distinct, and no ids
    assert (found.kind, found.duplicates) == (NEITHER, 1)
    assert "already uses" in faults(found)


def test_ids_out_of_range_are_counted_and_named(report):
    found = report(d2t=torch.tensor([3, 70, 8, -17, 27, 27, 49, 53]))
    assert (found.kind, found.outside) == (NEITHER, 2)
    assert "2 of 8 draft ids map outside" in faults(found)


def test_a_map_of_zeros_is_the_identity_prefix_that_engines_fall_back_to(report):
    found = report(d2t=torch.zeros(8, dtype=torch.int64), t2d=None)
    assert found.kind == IDENTITY
    assert any("never filled" in warning for warning in found.warnings)


def test_a_missing_map_or_lm_head_of_a_reduced_head(report):
    found = report(d2t=None, t2d=None, lm_head=None)
    assert found.kind == MISSING
    assert "d2t is missing" in faults(found) and "lm_head.weight is missing" in faults(found)


def test_a_map_beside_a_full_vocabulary(report):
    found = report(replace(SPEC, draft_vocab=64), d2t=torch.zeros(64, dtype=torch.int64))
    assert "d2t I64 [64] has no place in this head" in faults(found)


def test_an_lm_head_of_other_rows_than_the_map(report):
    found = report(lm_head=torch.zeros(9, MLA.hidden, dtype=torch.bfloat16))
    assert "lm_head.weight is [9, 48]; the config demands [8, 48]" in faults(found)


@pytest.mark.parametrize("key", [{"draft_vocab_size": 9}, {"draft_vocab_size": 64}])
def test_a_config_of_another_draft_vocabulary(report, key):
    assert "d2t" in faults(report(config=key))


def test_t2d_of_other_tokens(report):
    other = T2D.clone()
    other[[3, 4]] = torch.tensor([False, True])
    found = report(t2d=other)
    assert found.t2d == "disagrees on 2 tokens"
    assert "--rebuild-t2d" in found.faults[0].fix


def test_a_d2t_that_names_fewer_copied_rows_than_t2d_marks_is_wrong(report):
    found = report(d2t=D2T + 1, lm_head=TARGET[IDS], target=TARGET)
    assert "8 of 8 rows of lm_head equal the target's rows that t2d marks, but only 0" in faults(found)
    assert found.faults[-1].fix.startswith("Keep t2d")
    # Nothing asks which of the two is wrong.
    assert "K178" not in [fault.code for fault in found.faults]


def test_a_t2d_that_contradicts_a_d2t_of_the_targets_rows_is_to_be_rebuilt(report):
    found = report(t2d=T2D.roll(1), lm_head=TARGET[IDS], target=TARGET)
    assert [fault.code for fault in found.faults] == ["K178"]
    assert found.faults[0].fix.startswith("Rebuild t2d")


def test_a_d2t_that_leads_outside_is_wrong_where_the_rows_are_those_that_t2d_marks(report):
    ids = torch.tensor([3, 4, 10, 20, 31, 40, 55, 63])
    marks = torch.zeros(64, dtype=torch.bool).index_fill(0, ids, True)
    found = report(d2t=ids - torch.arange(8) + 1, t2d=marks, lm_head=TARGET[ids], target=TARGET)
    assert found.kind == NEITHER
    assert "8 of 8 rows of lm_head equal the target's rows that t2d marks, but only 0" in faults(found)
    assert "chosen by offset" not in faults(found)


@pytest.mark.parametrize("by", [0, 1])
def test_trained_rows_in_another_order_than_the_maps_are_named(report, by):
    found = report(lm_head=(TARGET[IDS.roll(by)].float() + 0.1).bfloat16(), target=TARGET)
    assert ("part from the target's: row 0 stands for token 3" in faults(found)) == bool(by)
    assert len(found.faults) == by


def test_a_right_d2t_of_which_some_rows_were_trained_is_not_called_wrong(report):
    rows = TARGET[IDS].clone()
    rows[:4] += 1
    found = report(t2d=T2D.roll(1), lm_head=rows, target=TARGET)
    assert found.copies.by_offset == 4 and "t2d marks 16 tokens otherwise" in faults(found)
    assert "d2t is wrong" not in faults(found)


def test_t2d_of_another_dtype(report):
    found = report(t2d=T2D.long())
    assert found.t2d == "unusable: I64 [64]"
    assert "t2d is I64" in faults(found)


def test_an_undecided_config_is_no_hindrance(report):
    config = {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}}
    assert report(config=config).faults == ()


@pytest.mark.parametrize("layout", ["vllm", "trtllm"])
def test_specials_of_a_tokenizer_and_coverage(tmp_path, layout):
    folder = write_head(
        tmp_path / "head",
        BY_NAME[layout],
        replace(GQA, draft_vocab=8),
        random_slots(GQA) | {"d2t": D2T, "t2d": T2D, "lm_head": TARGET[:8]},
    )
    counts = torch.bincount(torch.tensor([3, 3, 3, 4, 60, 61]), minlength=64)
    found = examine(open_checkpoint(folder), specials={3: "[BOS]", 4: "[EOS]"}, counts=counts)
    assert (found.kept, found.lost) == (("[BOS] (3)",), ("[EOS] (4)",))
    assert (found.coverage.covered, found.coverage.tokens, found.coverage.share) == (4, 6, 4 / 6)
