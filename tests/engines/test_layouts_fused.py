"""The fused names under which vLLM keeps linears: taken apart into the very bytes that were put together."""

import pytest
import torch
from safetensors.torch import load_file
from support.heads import TORCHSPEC_MLA, cut
from support.published import GQA_PARTS, LLAMA, LM_HEAD, MLA, NVIDIA, OUTSIDE, fill, layer, without, write

from kconv.checkpoint.manifest import Hints
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import BY_NAME

VLLM_KEYS = {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "num_aux_hidden_states": 3}


@pytest.mark.parametrize("prefix", ["layers.0", "midlayer"])
def test_vllms_fused_gqa_names(tmp_path, prefix):
    shapes = layer(prefix, GQA_PARTS) | OUTSIDE | LM_HEAD
    apart = fill(shapes)
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    fused = dict(apart)
    fused[f"{attention}.qkv_proj.weight"] = torch.cat([fused.pop(f"{attention}.{p}_proj.weight") for p in "qkv"])
    fused[f"{mlp}.gate_up_proj.weight"] = torch.cat([fused.pop(f"{mlp}.{p}_proj.weight") for p in ("gate", "up")])
    # Beside a trainer's names the list may be outputs: whoever has such a head says which.
    head = read_head(write(tmp_path / "head", LLAMA | VLLM_KEYS, fused), hints=Hints(captured_are="inputs"))
    assert head.spec.captured == (1, 29, 57)
    manifest = execute(plan(head, BY_NAME["trtllm"]), tmp_path / "out")
    assert manifest.exact and {s.action for s in manifest.tensors} >= {"repacked"}
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in apart.items():
        assert torch.equal(written[name.replace(prefix, "layers.0")], tensor), name


def test_vllms_fused_mla_names(tmp_path):
    apart = fill(NVIDIA)
    fused, attention = dict(apart), "layers.0.self_attn"
    parts = [fused.pop(f"{attention}.{part}.weight") for part in ("q_a_proj", "kv_a_proj_with_mqa")]
    fused[f"{attention}.fused_qkv_a_proj.weight"] = torch.cat(parts)
    config = without(cut(TORCHSPEC_MLA, MLA), "eagle_config") | VLLM_KEYS
    head = read_head(write(tmp_path / "head", config, fused))
    execute(plan(head, BY_NAME["trtllm"]), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == apart.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in apart.items())
