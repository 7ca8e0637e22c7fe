"""The manifest: it comes back as it was written, and `verify` finds each byte that is not the recorded one.

Of the source's bytes: `test_manifest_source.py`.
"""

import hashlib
import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from support.fuzzing import LINEAR, growth
from support.heads import MLA, random_slots, write_head

from kconv.checkpoint.bytes import Look, Wanted
from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import MANIFEST, hold, read_manifest, verify, write_manifest
from kconv.cli import main
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import BY_NAME
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
    with pytest.raises(ManifestMismatch) as caught:
        verify(root / "out")
    assert ("the file is missing" in caught.value.what) == (how in ("removed", "a loop"))


ADDED = (
    "more.safetensors", "model.safetensors.index.json", "hf_quant_config.json", "quantize_config.json",
    "pytorch_model.bin", "head.pt", "head.pth", "head.gguf",
)  # fmt: skip


@pytest.mark.parametrize("name", ADDED)
def test_an_added_file_that_an_engine_reads_is_found(root, name):
    if name.endswith(".safetensors"):
        save_file({"layers.0.self_attn.q_norm.weight": torch.ones(4)}, root / "out" / name)
    else:
        (root / "out" / name).write_text("{}")
    with pytest.raises(ManifestMismatch, match="engines read this file") as caught:
        verify(root / "out")
    assert name in caught.value.where and "Remove" in caught.value.fix


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "report.json", "acceptance.json", "curves.png"])
def test_what_a_release_has_beside_a_head_may_be_added(root, name):
    (root / "out" / name).write_text("{}")
    verify(root / "out")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_manifest_that_leaves_out_a_file_of_the_checkpoint_is_found(root, name):
    def change(record):
        record["files"] = [file for file in record["files"] if file["name"] != name]

    rewrite(root, change)
    with pytest.raises(ManifestMismatch, match="engines read this file") as caught:
        verify(root / "out")
    assert name in caught.value.where


def test_a_tensor_that_the_manifest_does_not_have_is_found(root):
    name = json.loads((root / "out" / MANIFEST).read_text())["tensors"][3]["output"]["name"]
    rewrite(root, lambda record: record["tensors"].pop(3))
    with pytest.raises(ManifestMismatch, match="does not record") as caught:
        verify(root / "out")
    assert caught.value.where == name


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


@pytest.mark.parametrize("name", ["../victim", "../../x/y", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "a\0b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(root, name):
    rewrite(root, lambda record: record["files"].append({"name": name, "size": 0, "sha256": "0" * 64}))
    with pytest.raises(ManifestMismatch, match="bare name"):
        read_manifest(root / "out")


# What a manifest may be made to say: of these no byte tells, but the manifest itself or the head does.
LIES = {
    "exact of a cast tensor": lambda m: m["tensors"][0].update(action="cast"),
    "not exact of copies": lambda m: m.update(exact=False),
    "a copy of another shape": lambda m: m["tensors"][0]["sources"][0].update(shape=[1]),
    "a copy of other bytes": lambda m: m["tensors"][0]["sources"][0].update(blake3="0" * 64),
    "a copy of nothing": lambda m: m["tensors"][0].update(sources=[]),
    "a tensor twice": lambda m: m["tensors"].append(m["tensors"][0]),
    "a file twice": lambda m: m["files"].append(m["files"][0]),
    "more parameters": lambda m: m.update(parameters=m["parameters"] + 1),
    "parameters of both kinds": lambda m: (
        m["parameters_by_origin"].update(trained=7, copied_from_target=0, unknown=0),
        m.update(parameters=7),
    ),
    "other layers": lambda m: m["spec"].update(captured=[9, 9, 9]),
    "another epsilon": lambda m: m["spec"].update(eps=1e-2),
    "another attention": lambda m: m["spec"].update(kind="mha"),
    "nothing of RoPE": lambda m: m["spec"].pop("rope"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_manifest_says_is_held_against_itself_and_the_head(root, lie):
    rewrite(root, LIES[lie])
    ended = CliRunner().invoke(main, ["verify", str(root / "out")])
    assert ended.exit_code == 1 and MANIFEST in ended.output, ended.output


def test_a_tensor_that_is_recorded_twice_is_found_in_linear_time(root):
    manifest, output = read_manifest(root / "out"), open_checkpoint(root / "out")
    [step, *_] = manifest.tensors

    def make(count):
        names = [str(number) for number in [*range(count), count - 1]]
        steps = [step.model_copy(update={"output": step.output.model_copy(update={"name": name})}) for name in names]
        return manifest.model_copy(update={"tensors": tuple(steps)})

    with Look([Wanted(file, whole=True) for file in output.files]) as look:

        def run(doubled):
            with pytest.raises(ManifestMismatch, match="twice"):
                hold(doubled, output, None, look)

        assert growth(run, make, 2000) < LINEAR


def test_every_size_is_compared_before_a_file_is_hashed(root, monkeypatch):
    def hashed(file):
        raise AssertionError(f"{file} was hashed")

    monkeypatch.setattr("kconv.checkpoint.bytes.file_digest", hashed)
    last = json.loads((root / "out" / MANIFEST).read_text())["files"][-1]["name"]
    with (root / "out" / last).open("ab") as file:
        file.truncate(10 << 40)
    with pytest.raises(ManifestMismatch, match="its bytes differ"):
        verify(root / "out")


def test_how_the_source_was_read_is_held_against_the_source(root):
    rewrite(root, lambda m: m.update(captured_by="a revelation"))
    asked = ["verify", str(root / "out"), str(root / "source")]
    ended = CliRunner().invoke(main, asked)
    assert ended.exit_code == 1 and "a revelation" in ended.output
