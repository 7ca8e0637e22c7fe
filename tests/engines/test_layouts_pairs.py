"""Every layout that is read into every layout that is written, and back: no tensor loses a bit on the way."""

import json
import tempfile
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.good_heads import can_make, make_config
from support.heads import GQA, MLA, random_slots, read_bytes, write_head
from support.strategies import portable_specs, uneven_specs

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import MANIFEST, Hints, verify
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head, read_slot
from kconv.drafters.eagle3 import EAGLE3
from kconv.drafters.spec import Norms
from kconv.engines import BY_NAME, LAYOUTS, detect
from kconv.errors import LayoutCannot

# What speculators' asks for beside a head, its target, has tests of its own.
WRITABLE = [
    layout for layout in LAYOUTS if layout.write_config and layout.drafter is EAGLE3 and layout.name != "speculators"
]
CAPTURED = (1, 7, 23)
SPECS = {
    "mla": replace(MLA, captured=CAPTURED),
    "gqa": replace(GQA, captured=CAPTURED),
    "gqa, reduced, of another width": replace(GQA, captured=CAPTURED, draft_vocab=40, target_hidden=56),
    "gqa, two layers": replace(GQA, captured=CAPTURED, layers=2),
    "gqa, P-EAGLE": replace(GQA, captured=CAPTURED, mask=5),
    "gqa, P-EAGLE, two layers": replace(GQA, captured=CAPTURED, mask=5, layers=2),
    "mla, EAGLE-3.1": replace(MLA, captured=CAPTURED, norms=Norms(fc=True, output=True)),
    "gqa, norms of queries and keys": replace(GQA, captured=CAPTURED, norms=Norms(qk=True)),
    "gqa, reduced, a norm before fc": replace(GQA, captured=CAPTURED, draft_vocab=40, norms=Norms(before_fc=True)),
}


def convert(source, out, layout, layout_of_source=None, **hints):
    """Convert; then take away what a reader could lean on: the manifest, and the weights' file name."""
    manifest = execute(
        plan(read_head(open_checkpoint(source), layout=layout_of_source, hints=Hints(**hints)), layout), out
    )
    verify(out, open_checkpoint(source))
    (out / MANIFEST).unlink()
    (out / "model.safetensors").rename(out / "weights-00001-of-00001.safetensors")
    return manifest


def slots_of(head):
    """Return each slot's dtype, shape and bytes."""
    tensors = {slot: read_slot(head, slot).contiguous() for slot in head.places}
    return {s: (t.dtype, t.shape, bytes(t.reshape(-1).view(torch.uint8).numpy())) for s, t in tensors.items()}


def pairs():
    for source in LAYOUTS:
        for name, spec in SPECS.items():
            for out in WRITABLE:
                if can_make(source, spec) and can_make(out, spec):
                    yield pytest.param(source, out, spec, id=f"{source.name} to {out.name}: {name}")


@pytest.mark.parametrize("source, out, spec", pairs())
def test_there_and_back(tmp_path, source, out, spec):
    hints = {"captured": spec.captured} if source.name in ("safeailab", "automodel", "specforge-peagle") else {}
    slots = random_slots(spec)
    folder = write_head(tmp_path / "source", source, spec, slots, make_config(source, spec))
    assert detect(open_checkpoint(folder).config, open_checkpoint(folder).tensors) is source
    manifest = convert(folder, tmp_path / "there", out, **hints)
    assert manifest.exact and manifest.source_layout == source.name
    before = read_head(open_checkpoint(folder), hints=Hints(**hints))
    there = read_head(open_checkpoint(tmp_path / "there"))
    assert before.spec == there.spec == spec
    assert there.layout is out
    assert slots_of(there) == slots_of(before)
    if source in WRITABLE:
        convert(tmp_path / "there", tmp_path / "back", source)
        assert read_bytes(tmp_path / "back") == read_bytes(folder)


def test_every_layout_is_read_and_every_engines_is_written():
    read, written = ({p.values[i].name for p in pairs()} for i in (0, 1))
    assert read == {one.name for one in LAYOUTS if one.drafter is EAGLE3} and written == {
        "vllm",
        "trtllm",
        "sglang",
        "portable",
    }


@settings(max_examples=50)
@given(
    portable_specs(), st.sampled_from([layout for layout in LAYOUTS if layout.drafter is EAGLE3]), st.integers(0, 2**32)
)
def test_there_and_back_at_any_dims(spec, source, seed):
    for out in WRITABLE:
        if not can_make(source, spec) or not can_make(out, spec):
            continue
        with tempfile.TemporaryDirectory() as root:
            told = {"captured": spec.captured, "captured_are": "outputs"}
            folder = write_head(
                Path(root) / "source", source, spec, random_slots(spec, seed), make_config(source, spec)
            )
            convert(folder, Path(root) / "there", out, source, **told)
            before = read_head(open_checkpoint(folder), layout=source, hints=Hints(**told))
            there = read_head(open_checkpoint(Path(root) / "there"))
            assert there.spec == before.spec == spec
            assert slots_of(there) == slots_of(before)
            if source in WRITABLE:
                convert(Path(root) / "there", Path(root) / "back", source)
                assert read_bytes(Path(root) / "back") == read_bytes(folder)


@pytest.mark.parametrize("source, out", permutations(WRITABLE, 2), ids=lambda layout: layout.name)
@settings(max_examples=20)
@given(spec=uneven_specs(), seed=st.integers(0, 2**32), lean=st.booleans())
def test_each_pair_of_written_layouts_there_and_back_is_byte_identical(source, out, spec, seed, lean):
    """With the manifest deleted and the files renamed on the way; what the other cannot hold, it refuses."""
    if not can_make(source, spec):
        return
    may_be_absent = ("embed_tokens",) if spec.hidden == spec.target_hidden else ()
    slots = random_slots(spec, seed, (*may_be_absent, "t2d") if lean else ())
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder = write_head(root / "source", source, spec, slots)
        if not can_make(out, spec):
            with pytest.raises(LayoutCannot):
                convert(folder, root / "there", out)
            assert not (root / "there").exists()
            return
        convert(folder, root / "there", out)
        convert(root / "there", root / "back", source)
        assert read_bytes(root / "back") == read_bytes(folder)
        assert read_head(open_checkpoint(root / "there")).spec == spec
        before, after = (json.loads((root / end / "config.json").read_text()) for end in ("source", "back"))
        assert after == before


def test_a_layout_that_is_only_read_is_not_written(tmp_path):
    folder = write_head(tmp_path / "source", BY_NAME["vllm"], GQA, random_slots(GQA))
    for layout in LAYOUTS:
        if layout.write_config is not None or layout.drafter is not EAGLE3:
            continue
        with pytest.raises(LayoutCannot, match=layout.name) as caught:
            plan(read_head(open_checkpoint(folder)), layout)
        assert "portable" in caught.value.fix


@pytest.mark.parametrize("out", WRITABLE, ids=lambda layout: layout.name)
def test_a_head_of_several_files_becomes_one(tmp_path, out):
    spec = replace(SPECS["gqa"], dtype="F32")
    source = BY_NAME["modelopt"]
    folder = write_head(tmp_path / "source", source, spec, random_slots(spec), make_config(source, spec))
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    for i, part in enumerate((tensors[::2], tensors[1::2]), 1):
        save_file(dict(part), folder / f"model-0000{i}-of-00002.safetensors")
    before = slots_of(read_head(open_checkpoint(folder)))
    convert(folder, tmp_path / "out", out)
    assert slots_of(read_head(open_checkpoint(tmp_path / "out"))) == before
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
