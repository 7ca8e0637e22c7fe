"""The manifest beside an output: each tensor on both sides with its digest, by the safetensors library's reading."""

import hashlib
import json
import tracemalloc
from dataclasses import replace

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from support.heads import GQA, MLA, random_slots, read_bytes, write_head
from support.listing import names

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import MANIFEST, ConversionRecord, read_manifest, verify, write_manifest
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import BY_NAME
from kconv.errors import ManifestMismatch, NotACheckpoint, OutputExists

VLLM, TRTLLM = BY_NAME["vllm"], BY_NAME["trtllm"]


@pytest.fixture
def decided(tmp_path):
    spec = replace(GQA, draft_vocab=40, layers=2)
    source = write_head(tmp_path / "source", VLLM, spec, random_slots(spec))
    return plan(read_head(open_checkpoint(source)), TRTLLM)


def test_the_manifest_holds_both_sides_of_every_tensor(tmp_path, decided):
    manifest = execute(decided, tmp_path / "out")
    assert read_manifest(tmp_path / "out").model_dump(mode="json") == manifest.model_dump(mode="json")
    before, after = read_bytes(tmp_path / "source"), read_bytes(tmp_path / "out")
    assert {step.output.name for step in manifest.tensors} == after.keys()
    assert {source.name for step in manifest.tensors for source in step.sources} == before.keys()
    for step in manifest.tensors:
        for record, side in [(step.output, after), *((source, before) for source in step.sources)]:
            _, shape, content = side[record.name]
            assert record.shape == shape and record.blake3 == blake3(content).hexdigest()
    assert (manifest.exact, manifest.source_layout, manifest.layout) == (True, "vllm", "trtllm")
    assert manifest.spec["kind"] == "gqa" and manifest.source == str(tmp_path / "source")
    assert manifest.kconv and json.loads((tmp_path / "out" / MANIFEST).read_text())["schema"] == 1


@pytest.fixture
def told(tmp_path, decided):
    """Return a folder whose manifest tells how its head was trained, and of its attention."""
    execute(decided, tmp_path / "told")
    trained = {"recipe": {"steps": 7}, "tokens": {"counted": 11}}
    made = ConversionRecord(
        method="MLA to MHA", calibration="text", calibration_sha256="0" * 64, sequences=3, context=9, rows=27,
        heal_steps=0, held_out={"kept": 0.99}, prompts=("a" * 64, "c" * 64),
    )  # fmt: skip
    manifest = read_manifest(tmp_path / "told")
    write_manifest(tmp_path / "told", manifest.model_copy(update={"training": trained, "conversion": made}))
    return tmp_path / "told"


def test_a_heads_past_is_told_on_from_layout_to_layout(tmp_path, told):
    execute(plan(read_head(open_checkpoint(told)), VLLM), tmp_path / "back")
    before, after = read_manifest(told), read_manifest(tmp_path / "back")
    assert (after.training, after.conversion) == (before.training, before.conversion)


def test_an_approximation_of_an_approximation_tells_of_both(tmp_path, told):
    before = read_manifest(told).conversion
    now = before.model_copy(update={"method": "MHA to MLA", "prompts": ("b" * 64,), "held_out": {"kept": 0.98}})
    again = replace(plan(read_head(open_checkpoint(told)), VLLM), conversion=now)
    record = execute(again, tmp_path / "again").conversion
    assert (record.method, record.before, record.held_out["kept"]) == ("MHA to MLA", before, 0.98)
    assert record.prompts == ("a" * 64, "b" * 64, "c" * 64)


def test_a_past_that_is_of_other_weights_is_not_told_on(tmp_path, told):
    tensors = load_file(told / "model.safetensors")
    changed = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    save_file(tensors | {changed: tensors[changed] + 1}, told / "model.safetensors")
    with pytest.raises(ManifestMismatch, match=f"{changed} differs from kconv.json"):
        execute(plan(read_head(open_checkpoint(told)), VLLM), tmp_path / "back")
    assert not (tmp_path / "back").exists()
    (told / MANIFEST).unlink()
    assert execute(plan(read_head(open_checkpoint(told)), VLLM), tmp_path / "back").training is None


def test_what_is_taken_apart_is_recorded_whole(tmp_path):
    """Fused q, k and v, as vLLM also loads them, become three tensors of one source."""
    source = write_head(tmp_path / "source", VLLM, GQA, random_slots(GQA))
    tensors = load_file(source / "model.safetensors")
    apart = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    fused = "layers.0.self_attn.qkv_proj.weight"
    parts = {name: tensors.pop(name) for name in apart}
    save_file(tensors | {fused: torch.cat(list(parts.values()))}, source / "model.safetensors")
    manifest = execute(plan(read_head(open_checkpoint(source)), TRTLLM), tmp_path / "out")
    verify(tmp_path / "out", open_checkpoint(source))
    before, after = read_bytes(source), read_bytes(tmp_path / "out")
    assert all(after[name][2] == bytes(part.view(torch.uint8).numpy()) for name, part in parts.items())
    steps = {step.output.name: step for step in manifest.tensors if step.action == "repacked"}
    assert steps.keys() == set(apart)
    for step in steps.values():
        (record,) = step.sources
        assert (record.name, record.blake3) == (fused, blake3(before[fused][2]).hexdigest())


def test_parameters_are_the_weights_without_the_vocabulary_maps(tmp_path, decided):
    manifest = execute(decided, tmp_path / "out")
    count = 0
    for name, (_, shape, _) in read_bytes(tmp_path / "out").items():
        size = 1
        for dim in shape:
            size *= dim
        count += 0 if name in ("d2t", "t2d") else size
    assert manifest.parameters == count


def test_every_file_is_in_the_manifest_with_its_digest(tmp_path, decided):
    manifest = execute(decided, tmp_path / "out")
    listed = {record.name: (record.size, record.sha256) for record in manifest.files}
    for name in names(tmp_path / "out"):
        if name != MANIFEST:
            content = (tmp_path / "out" / name).read_bytes()
            assert listed.pop(name) == (len(content), hashlib.sha256(content).hexdigest())
    assert listed == {}


def test_progress_adds_up_to_the_bytes_of_the_tensors(tmp_path, decided):
    seen = []
    execute(decided, tmp_path / "out", seen.append)
    assert sum(seen) == sum(len(content) for _, _, content in read_bytes(tmp_path / "out").values())


def test_twice_gives_the_same_bytes_and_never_over_an_output(tmp_path, decided):
    execute(decided, tmp_path / "a")
    execute(decided, tmp_path / "b")
    for name in names(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with pytest.raises(OutputExists):
        execute(decided, tmp_path / "a")


def test_a_source_that_goes_away_while_it_is_read_leaves_nothing(tmp_path, decided):
    (tmp_path / "source" / "model.safetensors").unlink()
    with pytest.raises(NotACheckpoint, match=r"model\.safetensors cannot be read"):
        execute(decided, tmp_path / "out")
    assert names(tmp_path) == ["source"]


def test_memory_does_not_grow_with_the_head(tmp_path):
    spec = replace(MLA, vocab=400_000, draft_vocab=400_000)
    source = write_head(tmp_path / "source", VLLM, spec, random_slots(spec))
    size = (source / "model.safetensors").stat().st_size
    decided = plan(read_head(open_checkpoint(source)), TRTLLM)
    tracemalloc.start()
    execute(decided, tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size > 70_000_000 and peak < 12_000_000
