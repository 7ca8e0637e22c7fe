"""A quantized head computes with weights and inputs rounded as engines round them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import FITTING_GQA, FITTING_MLA, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import Head, read_head
from kconv.drafters.chain import draft_logits
from kconv.drafters.forward import DraftHead
from kconv.engines import by_name
from kconv.measure.batches import Calibration, StatesBatch
from kconv.measure.trace import WatchedInputs
from kconv.quantize.head.formats import FORMATS, FP8, NVFP4
from kconv.quantize.head.plan import change_linears, write
from kconv.quantize.head.quantize import quantize_linears
from kconv.quantize.head.served import RoundedHead, read_served

SPECS = {"gqa": replace(FITTING_GQA, dtype="F32"), "mla": replace(FITTING_MLA, dtype="F32")}


def near_one(spec) -> dict[str, torch.Tensor]:
    slots = random_slots(spec, seed=5)
    return {n: (w * 0.1 if w.ndim == 2 else w * 0.1 + 1.0).to(w.dtype) for n, w in slots.items()}


def calibration(spec) -> Calibration:
    drawn = torch.Generator().manual_seed(6)
    made = [
        StatesBatch(
            torch.randint(spec.vocab, (2, 12), generator=drawn),
            torch.randn(2, 12, len(spec.captured) * spec.target_hidden, generator=drawn),
            torch.randn(2, 12, spec.target_hidden, generator=drawn),
        )
        for _ in range(10)
    ]
    return Calibration(made, torch.randn(spec.vocab, spec.target_hidden, generator=drawn), "drawn states")


@pytest.fixture(scope="module", params=[(kind, name) for kind in SPECS for name in FORMATS], ids="-".join)
def quantized(request, tmp_path_factory):
    """Return a head's folder as quantize-head writes it, and what it was made of."""
    kind, name = request.param
    spec, root = SPECS[kind], tmp_path_factory.mktemp("served")
    slots = near_one(spec)
    head = read_head(open_checkpoint(write_head(root / "plain", by_name("vllm"), spec, slots)))
    linears = quantize_linears(spec, slots, FORMATS[name], calibration(spec), min_retention=0)
    with torch.no_grad():
        planned = plan(head, head.layout, WriteOptions(), change_linears(head, linears, calibration(spec)))
        write(planned, FORMATS[name], root / "quantized")
    return read_head(open_checkpoint(root / "quantized")), linears, slots


def opened(head: Head) -> RoundedHead:
    weights, inputs = read_served(head)
    return RoundedHead(head.spec, {n: w.float() if w.is_floating_point() else w for n, w in weights.items()}, inputs)


def text(spec) -> tuple[torch.Tensor, torch.Tensor]:
    batch = calibration(spec).batches[3]
    return batch.tokens, batch.captured


def test_a_folder_drafts_what_was_measured_when_it_was_made(quantized):
    """The way of `quantize-head`, which ModelOpt's exporter and vLLM are held against, and the way from the disk."""
    head, linears, slots = quantized
    format_ = linears.format
    unpacked = {slot: format_.stored.unpack(one) for slot, one in linears.linears.items()}
    made = DraftHead(head.spec, slots | unpacked)

    def rounded(slot: str, x: torch.Tensor) -> torch.Tensor:
        return format_.round(x, linears.linears[slot]["input_scale"])

    with torch.no_grad():
        with WatchedInputs({slot: made.weights[slot] for slot in unpacked}, rounded):
            wanted = draft_logits(made, *text(head.spec), 3)
        served = draft_logits(opened(head), *text(head.spec), 3)
        plain = draft_logits(DraftHead(head.spec, slots), *text(head.spec), 3)
        weights_alone = draft_logits(made, *text(head.spec), 3)
    assert torch.equal(served, wanted)
    # Each of the two roundings is felt.
    assert not torch.equal(served, plain) and not torch.equal(served, weights_alone)


def test_a_head_read_otherwise_still_rounds(quantized):
    head, _, _ = quantized
    one = opened(head)
    with torch.no_grad():
        assert torch.equal(draft_logits(one, *text(head.spec), 2), draft_logits(one.altered(), *text(head.spec), 2))


def edited(head: Head, folder: Path, changed: dict[str, torch.Tensor | None]) -> Head:
    """Return a copy of a head's folder with tensors changed, by the last words of their names, or taken out."""
    folder.mkdir()
    (folder / "config.json").write_bytes((head.checkpoint.folder / "config.json").read_bytes())
    tensors = load_file(head.checkpoint.folder / "model.safetensors")
    for ending, value in changed.items():
        for name in [name for name in tensors if name.endswith(ending)]:
            del tensors[name]
            if value is not None:
                tensors[name] = value
    save_file(tensors, folder / "model.safetensors")
    return read_head(open_checkpoint(folder))


def test_the_parts_of_a_fused_module_share_the_largest_scale(quantized, tmp_path):
    head, linears, _ = quantized
    largest = linears.linears["0.gate_proj"]["input_scale"] * 4
    _, inputs = read_served(edited(head, tmp_path / "edited", {"up_proj.input_scale": largest}))
    x = torch.randn(2, 3, head.spec.hidden, generator=torch.Generator().manual_seed(1))
    for slot in ("0.gate_proj", "0.up_proj"):
        assert torch.equal(inputs[slot](x), linears.format.round(x, largest))


def test_without_an_input_scale_fp8_rounds_each_token_and_nvfp4_nothing(quantized, tmp_path):
    head, linears, _ = quantized
    _, inputs = read_served(edited(head, tmp_path / "edited", {"input_scale": None}))
    if linears.format is NVFP4:
        assert inputs == {}
        return
    x = torch.randn(2, 3, head.spec.hidden, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [[[1e-3]], [[9.0]]]
    )
    x[0, 0] = 0
    found = inputs["0.gate_proj"](x)
    for row, rounded in zip(x.flatten(0, 1), found.flatten(0, 1), strict=True):
        scale = row.abs().max() / 448
        assert torch.equal(rounded, FP8.round(row, scale) if scale > 0 else row)
    assert ((found - x).norm() / x.norm()) < 0.05


def test_the_parts_of_a_fused_module_share_the_largest_weight_scale(quantized, tmp_path):
    """FP8 weights are rounded anew for it, as vLLM's requantize_with_max_scale does; NVFP4's are taken as they are."""
    head, linears, _ = quantized
    suffix = "weight_scale" if linears.format is FP8 else "weight_scale_2"
    own = linears.linears["0.up_proj"]
    largest = own[suffix] * 3
    weights, _ = read_served(edited(head, tmp_path / "edited", {f"gate_proj.{suffix}": largest}))
    plain, found = linears.format.stored.unpack(own), weights["0.up_proj"]
    if linears.format is FP8:
        assert torch.equal(found, (plain / largest).to(torch.float8_e4m3fn).float() * largest)
        assert 0 < ((found - plain).norm() / plain.norm()) < 0.05
    else:
        torch.testing.assert_close(found, plain * 3)
