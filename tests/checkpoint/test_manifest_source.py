"""The source's side of a manifest: config, tensors and what was left out are the ones that were converted."""

import json
import os

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from support.heads import MLA, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import read_manifest, verify, write_manifest
from kconv.convert.execute import execute
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import read_head
from kconv.convert.shared import SharedTensors
from kconv.engines import BY_NAME
from kconv.errors import AnotherSource, ManifestMismatch


@pytest.fixture
def root(tmp_path):
    """A head and its conversion."""
    source = write_head(tmp_path / "source", BY_NAME["vllm"], MLA, random_slots(MLA))
    execute(plan(read_head(open_checkpoint(source)), BY_NAME["trtllm"]), tmp_path / "out")
    return tmp_path


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


@pytest.fixture
def shared(root):
    """A head, and a conversion that left its embedding to the target."""
    source = read_head(open_checkpoint(root / "source"))
    target = SharedTensors("target", {"embed_tokens": source.places["embed_tokens"][1]})
    execute(plan(source, BY_NAME["vllm"], WriteOptions(target, drop_shared=True)), root / "without")
    return root


def test_a_dropped_tensor_is_recorded_as_it_is_in_the_source(shared):
    (record,) = verify(shared / "without", open_checkpoint(shared / "source")).dropped
    stored = load_file(shared / "source" / "model.safetensors")[record.name]
    assert (record.dtype, record.shape) == ("BF16", tuple(stored.shape)) and "target" in record.reason
    assert record.blake3 == blake3(stored.view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("how", ["another value", "another shape", "gone"])
def test_a_dropped_tensor_that_is_not_the_recorded_one_is_found(shared, how):
    tensors = load_file(shared / "source" / "model.safetensors")
    dropped = tensors.pop("embed_tokens.weight")
    if how != "gone":
        # One bit, the smallest of the first value.
        dropped.view(torch.int16)[0, 0] ^= 1 if how == "another value" else 0
        tensors["embed_tokens.weight"] = dropped[1:].clone() if how == "another shape" else dropped
    save_file(tensors, shared / "source" / "model.safetensors")
    verify(shared / "without")
    with pytest.raises(ManifestMismatch) as caught:
        verify(shared / "without", open_checkpoint(shared / "source"))
    assert caught.value.where == "embed_tokens.weight"


def test_another_config_of_the_source_is_found(root):
    file = root / "source" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 1.0}))
    record = read_manifest(root / "out").model_copy(update={"source": "source"})
    write_manifest(root / "out", record)
    with pytest.raises(AnotherSource, match=r"was made from another head or target") as caught:
        verify(root / "out", open_checkpoint(root / "source"))
    assert caught.value.where == str(file)
    # The source's name is a path as whoever converted it saw it, here from the folder above the output.
    assert f"Pass {os.path.relpath(root / 'source')} as it was" in caught.value.fix
