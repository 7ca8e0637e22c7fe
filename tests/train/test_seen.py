"""What a manifest says of the prompts that a head was trained on: in few digits, and through every run."""

from __future__ import annotations

from pathlib import Path

from support.heads import MLA, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.execute import execute, fill
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import by_name
from kconv.measure.held_out import KEPT
from kconv.targets.dialogues import prompt_digest
from kconv.train.job import record_prompts

ONE, OTHER = prompt_digest(["Why is the sky blue?"]), prompt_digest(["Name a river."])


def test_as_many_digits_are_kept_as_are_compared():
    assert record_prompts([ONE, OTHER, ONE, ""], None) == sorted((ONE[:KEPT], OTHER[:KEPT]))


def test_what_a_head_was_trained_on_before_counts_too_also_after_a_conversion(tmp_path: Path):
    source = write_head(tmp_path / "source", by_name("trtllm"), MLA, random_slots(MLA))
    (tmp_path / "trained").mkdir()
    planned = plan(read_head(open_checkpoint(source)), by_name("trtllm"))
    fill(planned, tmp_path / "trained", training={"data": {"prompts": record_prompts([ONE], None)}})
    execute(plan(read_head(open_checkpoint(tmp_path / "trained")), by_name("vllm")), tmp_path / "vllm")
    start = read_head(open_checkpoint(tmp_path / "vllm"))
    assert record_prompts([OTHER], start) == sorted((ONE[:KEPT], OTHER[:KEPT]))
    assert record_prompts([OTHER], read_head(open_checkpoint(source))) == [OTHER[:KEPT]]
