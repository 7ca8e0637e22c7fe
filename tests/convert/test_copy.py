"""A conversion that copies: what stops it leaves nothing, and what it takes does not grow with the head."""

import errno
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import GQA, MLA, random_slots, write_head, write_sparse
from support.listing import names

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import BY_NAME
from kconv.errors import CorruptHeader, OutputFailed, TensorValue

VLLM, TRTLLM, TORCHSPEC = BY_NAME["vllm"], BY_NAME["trtllm"], BY_NAME["torchspec"]
LARGE = replace(MLA, vocab=60_000, draft_vocab=60_000)


def decide(source):
    return plan(read_head(open_checkpoint(source)), TRTLLM)


def renamed_head(folder, spec):
    """Write a head under a trainer's names, of which most are not TensorRT-LLM's."""
    assert TRTLLM.write_config is not None
    return write_head(folder, TORCHSPEC, spec, random_slots(spec), TRTLLM.write_config(spec))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_number_stops_it_and_is_named(tmp_path, dtype, wrong):
    names_of = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    source = renamed_head(tmp_path / "source", replace(GQA, dtype=names_of[dtype]))
    tensors = load_file(source / "model.safetensors")
    tensors["midlayer.mlp.up_proj.weight"][[0, 3, -1], [5, 0, -1]] = wrong
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(TensorValue, match=r"^3 values of midlayer\.mlp\.up_proj\.weight are NaN or Inf") as caught:
        execute(decide(source), tmp_path / "out")
    assert caught.value.where == str(source / "model.safetensors")
    assert names(tmp_path) == ["source"]


def test_a_value_that_is_no_number_in_a_tensor_that_is_taken_apart_stops_it(tmp_path):
    source = write_head(tmp_path / "source", VLLM, GQA, random_slots(GQA))
    tensors = load_file(source / "model.safetensors")
    parts = [tensors.pop(f"layers.0.self_attn.{part}_proj.weight") for part in "qkv"]
    parts[1][0, 0] = float("nan")
    save_file(tensors | {"layers.0.self_attn.qkv_proj.weight": torch.cat(parts)}, source / "model.safetensors")
    with pytest.raises(TensorValue, match=r"^1 value of layers\.0\.self_attn\.qkv_proj\.weight is NaN or Inf"):
        execute(decide(source), tmp_path / "out")
    assert names(tmp_path) == ["source"]


@pytest.mark.parametrize("slot", ["norm", "fc", "0.gate_proj"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_weight_that_was_never_filled_stops_it_and_is_named(tmp_path, slot, zero):
    slots = random_slots(MLA)
    slots[slot].fill_(zero)
    source = write_head(tmp_path / "source", VLLM, MLA, slots)
    with pytest.raises(TensorValue, match=rf"^every value of .*{slot.removeprefix('0.')}\.weight is zero") as caught:
        execute(decide(source), tmp_path / "out")
    assert caught.value.where == str(source / "model.safetensors")
    assert names(tmp_path) == ["source"]


def test_biases_of_zeros_are_none_and_are_kept(tmp_path):
    spec = replace(GQA, attention=replace(GQA.attention, bias=True))
    slots = random_slots(spec)
    for name in slots:
        if name.endswith(".bias"):
            slots[name].zero_()
    write_head(tmp_path / "source", VLLM, spec, slots)
    execute(decide(tmp_path / "source"), tmp_path / "out")
    biases = {n: t for n, t in load_file(tmp_path / "out" / "model.safetensors").items() if n.endswith(".bias")}
    assert len(biases) == 4 and not any(bias.any() for bias in biases.values())


def test_a_source_that_shrinks_while_it_is_copied_is_named_and_leaves_nothing(tmp_path):
    decided = decide(renamed_head(tmp_path / "source", LARGE))
    file = tmp_path / "source" / "model.safetensors"
    size = file.stat().st_size
    seen = []

    def shrink(count):
        seen.append(count)
        os.truncate(file, size // 3)

    with pytest.raises(CorruptHeader, match=r"model\.safetensors ended .* before the end of"):
        execute(decided, tmp_path / "out", shrink)
    assert seen, "it shrank on the way"
    assert names(tmp_path) == ["source"]


class Full(io.FileIO):
    """A file on a disk that has 3 MB left."""

    def write(self, data, /):
        if self.tell() + len(data) > 3_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def _fill_while_writing(monkeypatch):
    real = Path.open
    monkeypatch.setattr(
        Path, "open", lambda p, mode="r", *a, **o: Full(p, mode) if mode == "xb" else real(p, mode, *a, **o)
    )


def _fill_while_flushing(monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)


@pytest.mark.parametrize("fill", [_fill_while_writing, _fill_while_flushing])
def test_a_disk_that_fills_up_is_named_and_leaves_nothing(tmp_path, monkeypatch, fill):
    decided = decide(renamed_head(tmp_path / "source", LARGE))
    fill(monkeypatch)
    with pytest.raises(OutputFailed, match="No space left") as caught:
        execute(decided, tmp_path / "out")
    assert "Free some space" in caught.value.fix
    assert names(tmp_path) == ["source"]


KCONV = [sys.executable, "-c", "from kconv.cli import main; main()"]


def test_a_file_system_that_holds_no_such_large_file_is_named_and_leaves_nothing(tmp_path):
    renamed_head(tmp_path / "source", LARGE)
    limited = ["bash", "-c", 'ulimit -f 3000; exec "$@"', "limited", *KCONV]
    ended = subprocess.run(
        [*limited, "to-vllm", str(tmp_path / "source"), str(tmp_path / "out")], capture_output=True, text=True
    )
    assert ended.returncode == 1 and "File too large" in ended.stderr and "another disk" in ended.stderr
    assert names(tmp_path) == ["source"]


# Runs a command and prints what it cost; the peak is of this program alone, as it starts at its exec.
MEASURED = """
import sys
from kconv.cli import main
main(sys.argv[1:], standalone_mode=False)
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak) * 1024, "torch" in sys.modules)
"""


def sparse_head(folder, size):
    """Write a head of about `size` bytes, all zeros that take no disk, under a trainer's names."""
    rows = size // (2 * 2 * MLA.hidden)
    spec = replace(MLA, vocab=rows, draft_vocab=rows)
    return write_sparse(folder, TORCHSPEC, spec, TRTLLM.write_config(spec))


def test_memory_is_constant_and_a_rename_needs_no_torch(tmp_path):
    peaks = []
    for megabytes in (200, 800):
        source, out = tmp_path / f"source-{megabytes}", tmp_path / f"out-{megabytes}"
        size = sparse_head(source, megabytes * 1_000_000)
        command = [sys.executable, "-c", MEASURED, "to-vllm", str(source), str(out)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peak, torch_loaded = printed.splitlines()[-1].split()
        assert (out / "model.safetensors").stat().st_size > size > 0.99e6 * megabytes
        assert torch_loaded == "False", "importing it takes half as long as copying a head of 6 GB"
        peaks.append(int(peak))
    assert peaks[1] - peaks[0] < 20_000_000 and peaks[1] < 150_000_000
