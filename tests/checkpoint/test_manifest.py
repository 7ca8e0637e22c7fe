"""The manifest: it comes back as it was written, and `verify` finds each byte that is not the recorded one."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import MLA, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import MANIFEST, read_manifest, verify, write_manifest
from kconv.convert.execute import execute
from kconv.convert.layouts import BY_NAME
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.errors import KconvError, ManifestMismatch, NotACheckpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A head and its conversion, made once."""
    root = tmp_path_factory.mktemp("made")
    source = write_head(root / "source", BY_NAME["vllm"], MLA, random_slots(MLA))
    execute(plan(read_head(open_checkpoint(source)), BY_NAME["trtllm"]), root / "out")
    return root


@pytest.fixture
def root(made, tmp_path):
    """A copy of both, to be spoilt."""
    return shutil.copytree(made, tmp_path / "root")


def rewrite(root, change):
    """Change kconv.json as a JSON object."""
    file = root / "out" / MANIFEST
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


def test_a_sound_output_is_verified_with_and_without_its_source(root):
    manifest = verify(root / "out")
    assert verify(root / "out", open_checkpoint(root / "source")) == manifest
    assert len(manifest.tensors) == len(read_head(open_checkpoint(root / "source")).places)


def test_what_is_written_is_read_back(root, tmp_path):
    manifest = read_manifest(root / "out")
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert (tmp_path / MANIFEST).read_bytes() == (root / "out" / MANIFEST).read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "serve-trtllm.yaml"])
@pytest.mark.parametrize("at", [0.0, 0.01, 0.5, 1.0])
def test_one_flipped_bit_anywhere_is_found(root, name, at):
    file = root / "out" / name
    content = bytearray(file.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    file.write_bytes(content)
    with pytest.raises(ManifestMismatch) as caught:
        verify(root / "out")
    assert name in caught.value.where and caught.value.fix


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "serve-trtllm.yaml"])
@pytest.mark.parametrize("how", ["removed", "cut", "longer", "a folder", "a loop"])
def test_a_file_that_is_not_the_recorded_one_is_found(root, name, how):
    file = root / "out" / name
    content = file.read_bytes()
    file.unlink()
    match how:
        case "cut":
            file.write_bytes(content[:-1])
        case "longer":
            file.write_bytes(content + b" ")
        case "a folder":
            file.mkdir()
        case "a loop":
            file.symlink_to(file)
    with pytest.raises(ManifestMismatch):
        verify(root / "out")


def test_an_added_tensor_is_found(root):
    save_file({"layers.0.self_attn.q_norm.weight": torch.ones(4)}, root / "out" / "more.safetensors")
    with pytest.raises(ManifestMismatch, match="does not account") as caught:
        verify(root / "out")
    assert "q_norm" in caught.value.where


def test_a_tensor_that_the_manifest_has_and_the_output_not_is_found(root):
    def change(record):
        record["tensors"].append(record["tensors"][0] | {"output": record["tensors"][0]["output"] | {"name": "ghost"}})

    rewrite(root, change)
    with pytest.raises(ManifestMismatch, match="does not hold"):
        verify(root / "out")


@pytest.mark.parametrize("field, value", [("blake3", "0" * 64), ("dtype", "F32"), ("shape", [1])])
def test_a_record_that_is_not_the_tensors_is_found(root, field, value):
    rewrite(root, lambda record: record["tensors"][3]["output"].update({field: value}))
    with pytest.raises(ManifestMismatch):
        verify(root / "out")


def _spoil(source, how):
    tensors = load_file(source / "model.safetensors")
    match how:
        case "a value":
            tensors["norm.weight"][0] += 1
        case "one more tensor":
            tensors["t2d"] = torch.ones(64, dtype=torch.bool)
        case "one tensor less":
            del tensors["norm.weight"]
        case "another dtype":
            tensors["norm.weight"] = tensors["norm.weight"].half()
        case "another shape":
            tensors["norm.weight"] = tensors["norm.weight"].reshape(1, -1)
    save_file(tensors, source / "model.safetensors")


@pytest.mark.parametrize("how", ["a value", "one more tensor", "one tensor less", "another dtype", "another shape"])
def test_another_source_is_found(root, how):
    _spoil(root / "source", how)
    verify(root / "out")
    with pytest.raises(ManifestMismatch) as caught:
        verify(root / "out", open_checkpoint(root / "source"))
    assert caught.value.where in ("norm.weight", "t2d")


def test_a_tensor_recorded_as_dropped_may_be_in_the_source_or_not(root):
    rewrite(root, lambda record: record["dropped"].update({"t2d": "follows from d2t"}))
    verify(root / "out", open_checkpoint(root / "source"))
    _spoil(root / "source", "one more tensor")
    verify(root / "out", open_checkpoint(root / "source"))


def test_a_tensor_that_is_recorded_as_dropped_and_as_a_source_must_be_there(root):
    rewrite(root, lambda record: record["dropped"].update({"norm.weight": "why not"}))
    _spoil(root / "source", "one tensor less")
    with pytest.raises(ManifestMismatch):
        verify(root / "out", open_checkpoint(root / "source"))


@pytest.mark.parametrize("name", ["../source/config.json", "/dev/zero", "..", ".", "sub/x"])
def test_a_recorded_name_never_leaves_the_folder(root, name):
    file = root / "out" / name
    content = file.read_bytes() if file.is_file() else b""
    record = {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite(root, lambda whole: whole["files"].append(record))
    with pytest.raises(ManifestMismatch):
        verify(root / "out")


BROKEN = {
    "not JSON": b"{",
    "empty": b"",
    "a list": b"[]",
    "binary": b"\x80\xff",
    "another schema": None,
    "an unknown key": None,
    "an action that does not exist": None,
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_not_of_the_schema_is_a_named_fault(root, how):
    if BROKEN[how] is not None:
        (root / "out" / MANIFEST).write_bytes(BROKEN[how])
    elif how == "another schema":
        rewrite(root, lambda record: record.update({"schema": 2}))
    elif how == "an unknown key":
        rewrite(root, lambda record: record.update({"surprise": 2}))
    else:
        rewrite(root, lambda record: record["tensors"][0].update({"action": "improved"}))
    with pytest.raises(ManifestMismatch) as caught:
        verify(root / "out")
    assert caught.value.where.endswith(MANIFEST) and caught.value.fix


def test_a_folder_without_a_manifest_is_not_kconvs(root):
    with pytest.raises(NotACheckpoint):
        verify(root / "source")
    with pytest.raises(NotACheckpoint):
        verify(root / "gone")
    (root / "out" / MANIFEST).unlink()
    (root / "out" / MANIFEST).mkdir()
    with pytest.raises(KconvError):
        verify(root / "out")
