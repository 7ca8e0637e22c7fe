"""What is often found in the place of a checkpoint's file: named for what it is, with what to do."""

import pytest

from kconv.checkpoint.folder import INDEX, open_checkpoint
from kconv.checkpoint.header import read_header
from kconv.errors import ConfigInvalid, CorruptHeader

IMPOSTORS = {
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "git lfs pull"),
    "a login page": (b"<!DOCTYPE html><html>sign in</html>", "login"),
    "a short page": (b"<html>", "login"),
    "torch.save's archive": (b"PK\x03\x04\x00\x00\x08\x08\x00\x00archive/data.pkl", "safetensors first"),
    "a GGUF file": (b"GGUF\x03\x00\x00\x00\x01\x00\x00\x00", "made from"),
}


@pytest.mark.parametrize("content, fix", IMPOSTORS.values(), ids=IMPOSTORS)
def test_in_the_place_of_weights(tmp_path, content, fix):
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(CorruptHeader, match=r"m\.safetensors is a") as caught:
        read_header(tmp_path / "m.safetensors")
    assert fix in caught.value.fix


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("what", ["a Git LFS pointer", "a login page"])
def test_in_the_place_of_json(tmp_path, name, what):
    content, fix = IMPOSTORS[what]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigInvalid, match=f"{name} is a") as caught:
        open_checkpoint(tmp_path)
    assert fix in caught.value.fix
