"""What a release would do, said before anything is made."""

from __future__ import annotations

import pytest
from support.releases import carry_out, planned

from kconv.errors import (
    OutputFailed,
)
from kconv.pipeline.preview import check_disk


def test_a_preview_of_what_was_never_made_reads_no_weights(recipe, root, monkeypatch):
    monkeypatch.setattr("kconv.pipeline.record.file_digest", lambda file: pytest.fail(f"{file} was read"))
    assert planned(recipe, root).steps[0].runs


def test_a_preview_writes_nothing_and_tells_sizes_disk_and_licenses(recipe, root):
    del recipe["facts"]["license"]
    plan = planned(recipe, root)
    assert not root.exists()
    by_name = {step.name: step for step in plan.steps}
    assert by_name["vllm"].runs is True and by_name["trtllm"].runs is None and by_name["trtllm"].why == "waits for vllm"
    assert not plan.whole and not plan.heavy and [finding.rule for finding in plan.findings] == ["L2"]
    carry_out(recipe, root, only="vllm")
    weights = (root / "vllm" / "model.safetensors").stat().st_size
    assert 0 < by_name["vllm"].size <= weights <= by_name["vllm"].size + 10_000
    assert next(step for step in planned(recipe, root).steps if step.name == "vllm").runs is False


def test_a_license_whose_text_is_not_at_hand_is_said_before_anything_is_made(recipe, root, tmp_path):
    carry_out(recipe, root, only="vllm")
    carry_out(recipe, root, only="report")
    (tmp_path / "acceptance.json").write_text("{}")
    (tmp_path / "source" / "LICENSE").unlink()
    assert "L1" in [finding.rule for finding in planned(recipe, root, only="card").findings]


def test_a_disk_that_is_too_small_is_said_before_anything_is_made(recipe, root, monkeypatch):
    monkeypatch.setattr("kconv.pipeline.preview.free_bytes", lambda _: 1000)
    with pytest.raises(OutputFailed, match="are free"):
        check_disk(planned(recipe, root), root)
