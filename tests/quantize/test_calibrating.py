"""What a calibration keeps between two layers: written whole or not at all, and read only as what it is."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from kconv.errors import InputScalesInvalid
from kconv.quantize.calibrate import CalibrationState, find, keep

HIDDEN = [torch.arange(12.0).reshape(1, 3, 4), torch.ones(1, 2, 4)]
AMAXES = {"model.layers.0.self_attn.o_proj": 0.1, "model.layers.0.mlp.up_proj": 3.0}


@pytest.fixture
def kept(tmp_path):
    """Return what a calibration of seven layers keeps behind its second."""
    keep(tmp_path / "c.partial", CalibrationState(2, HIDDEN, AMAXES))
    return tmp_path / "c.partial"


def test_what_was_kept_is_found(kept, tmp_path):
    found = find(kept, 7)
    assert found and (found.layers, found.amaxes) == (2, AMAXES)
    assert all(torch.equal(one, other) for one, other in zip(found.hidden, HIDDEN, strict=True))
    assert find(tmp_path / "another.partial", 7) is None


BROKEN = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "of no calibration": lambda file: save_file(load_file(file), file),
    "behind more layers than there are": lambda file: keep(file, CalibrationState(8, HIDDEN, AMAXES)),
    "behind less than none": lambda file: keep(file, CalibrationState(-1, HIDDEN, AMAXES)),
}


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_named(spoil, kept):
    spoil(kept)
    with pytest.raises(InputScalesInvalid, match=r"c\.partial.* cannot be read"):
        find(kept, 7)


@pytest.mark.parametrize("limit", [100, 2_000])
def test_on_a_full_disk_what_was_kept_before_stays(limit, kept, tmp_path):
    """A file-size limit stands for the disk: the system refuses the write in the same way."""
    before = kept.read_bytes()
    code = (
        "import resource, signal, sys; from pathlib import Path; import torch;"
        "from kconv.errors import OutputFailed; from kconv.quantize.calibrate import CalibrationState, keep;"
        "sys.dont_write_bytecode = True; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
        f"file, between = Path({str(kept)!r}), CalibrationState(3, [torch.zeros(1, 1000)], {{}})\n"
        "try: keep(file, between)\n"
        "except OutputFailed as fault: print(fault)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "c.partial could not be written" in done.stdout, done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["c.partial"] and kept.read_bytes() == before
