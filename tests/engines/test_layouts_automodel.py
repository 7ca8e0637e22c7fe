"""NeMo Automodel's heads: names under `model.`, Llama's name for MLA too, and YaRN without its factors.

Held against Automodel 0.7.0's own modules, once and by hand: the states and logits of kconv's forward were its own, bit
for bit, of a GQA head with `fc_norm` and `norm_output`. Here its names and keys stand in for its code.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.heads import GQA, MLA, YARN, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints, verify
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.drafters.attention import CausalContext
from kconv.drafters.forward import DraftHead
from kconv.drafters.spec import Norms, Rope
from kconv.engines import BY_NAME
from kconv.engines.config import identity, write_keys
from kconv.errors import CapturedUndecided, ConfigInvalid, TensorMissing

AUTOMODEL = BY_NAME["automodel"]
CAPTURED = (1, 3, 5)
SPECS = {
    "gqa": replace(GQA, captured=CAPTURED, draft_vocab=40, norms=Norms(fc=True, output=True)),
    "mla": replace(MLA, captured=CAPTURED, rope=Rope(5e4, replace(YARN, mscale=1.0, mscale_all_dim=1.0))),
}


def write(folder, spec, slots):
    """Write a head as Automodel does: the target's model_type, one name for each class, no captured layers."""
    config = identity(spec) | write_keys(spec) | {"architectures": ["LlamaEagle3DraftModel"]}
    config |= {"attn_implementation": "eager"} | ({"model_type": "deepseek_v3"} if spec.kind == "mla" else {})
    return write_head(folder, AUTOMODEL, spec, slots, config)


@pytest.mark.parametrize("kind", SPECS)
def test_its_layers_are_asked_for_and_the_rest_is_read(tmp_path, kind):
    folder = write(tmp_path / "head", SPECS[kind], random_slots(SPECS[kind]))
    with pytest.raises(CapturedUndecided):
        read_head(open_checkpoint(folder))
    head = read_head(open_checkpoint(folder), hints=Hints(captured=CAPTURED))
    assert head.layout is AUTOMODEL
    execute(plan(head, BY_NAME["vllm"]), tmp_path / "out")
    verify(tmp_path / "out", head.checkpoint)
    written = read_head(open_checkpoint(tmp_path / "out"))
    assert written.spec == head.spec and not any(name.startswith("model.") for name in written.checkpoint.tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    # vLLM takes a deepseek_v3 draft for MTP, and LlamaEagle3DraftModel for no class.
    assert config["model_type"] in ("llama", "kimi_k2") and "DraftModel" not in config["architectures"][0]


def test_an_mla_heads_yarn_has_no_factor_of_the_softmax(tmp_path):
    """Automodel scales the softmax by the head's dim alone; DeepSeek's factor, which engines add, is 1 of mscale 0."""
    spec = SPECS["mla"]
    slots = random_slots(spec)
    head = read_head(open_checkpoint(write(tmp_path / "head", spec, slots)), hints=Hints(captured=CAPTURED))
    assert (head.spec.rope.scaling.mscale, head.spec.rope.scaling.mscale_all_dim) == (0.0, 0.0)
    scaling = plan(head, BY_NAME["vllm"]).config["rope_scaling"]
    assert (scaling["mscale"], scaling["mscale_all_dim"]) == (0.0, 0.0)

    import torch

    from kconv.drafters.rope import cos_sin
    from kconv.drafters.yarn import softmax_scale

    dims = spec.attention
    plain = (dims.qk_nope_head_dim + dims.qk_rope_head_dim) ** -0.5
    assert softmax_scale(head.spec.rope, dims) == pytest.approx(plain)
    cos, sin = cos_sin(head.spec.rope, dims, torch.arange(9))
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))
    weights = {name: tensor.float() for name, tensor in slots.items()}
    assert DraftHead(head.spec, weights).step(
        torch.zeros(1, 3, dtype=torch.long), torch.randn(1, 3, spec.hidden), torch.arange(3), CausalContext()
    )


def test_a_parallel_head_needs_its_mask_token(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    file = write(tmp_path / "head", SPECS["gqa"], random_slots(SPECS["gqa"])) / "model.safetensors"
    save_file(load_file(file) | {"mask_hidden": torch.ones(1, 1, 144)}, file)
    with pytest.raises(ConfigInvalid, match="P-EAGLE head, and the config has no mask_token_id") as caught:
        read_head(open_checkpoint(tmp_path / "head"), layout=AUTOMODEL, hints=Hints(captured=CAPTURED))
    assert (caught.value.code, caught.value.needs) == ("K025", "--mask-token")
    told = Hints(captured=CAPTURED, mask_token=5)
    head = read_head(open_checkpoint(tmp_path / "head"), layout=AUTOMODEL, hints=told)
    assert head.spec == replace(SPECS["gqa"], mask=5)
    assert plan(head, BY_NAME["vllm"]).config["mask_token_id"] == 5
    # Of another head the option says something that its files do not hold.
    write(tmp_path / "plain", SPECS["gqa"], random_slots(SPECS["gqa"]))
    with pytest.raises(TensorMissing, match="mask_hidden"):
        read_head(open_checkpoint(tmp_path / "plain"), layout=AUTOMODEL, hints=told)
