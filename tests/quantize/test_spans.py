"""A weight is packed in spans of rows: the bits, and the amax, are those of the weight in one piece."""

import pytest
import torch
from support.quantized_targets import COLUMNS, STORES, store_weight

from kconv.quantize.pack import scale_2
from kconv.quantize.stream import largest, pack_stored


@pytest.mark.parametrize("form", STORES)
def test_the_spans_make_up_what_modelopt_packs_of_the_whole(form, tmp_path, monkeypatch):
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    weight, whole = store_weight(form, tmp_path)
    monkeypatch.setattr("kconv.targets.weights.SPAN", 7 * COLUMNS)
    assert largest(weight) == float(whole.abs().max())
    shared = scale_2(largest(weight))
    parts = list(pack_stored(weight, float(shared)))
    assert len(parts) > 2
    packed, scale, _ = NVFP4QTensor.quantize(whole, 16, None, shared, try_tensorrt=False)
    assert torch.equal(torch.cat([part.weight for part in parts]), packed._quantized_data)
    scales = torch.cat([part.weight_scale.view(torch.uint8) for part in parts])
    assert torch.equal(scales, scale.view(torch.uint8))
