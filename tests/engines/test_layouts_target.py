"""What a head takes from its target, leaves to it, and counts as its own; and rounding, which is asked for by name."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import GQA, MLA, random_slots, read_bytes, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import verify
from kconv.checkpoint.source import Folder
from kconv.convert.execute import execute
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import read_head
from kconv.convert.shared import SharedTensors
from kconv.engines import BY_NAME
from kconv.engines.layout import Row
from kconv.engines.moves import Stack
from kconv.engines.sglang import ENGINE
from kconv.errors import LayoutCannot, TargetInvalid, TensorValue
from kconv.targets.config import read_target_config

MLA, GQA = replace(MLA, captured=(1, 3, 5)), replace(GQA, captured=(1, 3, 5))
LEAN = ("lm_head", "embed_tokens")


@pytest.fixture(params=["", "language_model."], ids=["flat", "text_config"])
def target(request, tmp_path):
    """A target's folder of three files, of which only one, with both matrices, is there; and the matrices."""
    return make_target(tmp_path / "target", request.param)


def make_target(folder, prefix="", hidden=48, dtype=torch.bfloat16):
    folder.mkdir()
    generator = torch.Generator().manual_seed(11)
    matrices = {slot: torch.randn(64, hidden, generator=generator).to(dtype) for slot in LEAN}
    names = {"lm_head": f"{prefix}lm_head.weight", "embed_tokens": f"{prefix}model.embed_tokens.weight"}
    save_file({names[slot]: tensor for slot, tensor in matrices.items()}, folder / "model-00002-of-00003.safetensors")
    placed = dict.fromkeys(names.values(), "model-00002-of-00003.safetensors")
    placed |= {f"{prefix}model.norm.weight": "model-00003-of-00003.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    text = {
        "model_type": "kimi_k2", "hidden_size": hidden, "num_hidden_layers": 9, "vocab_size": 64,
        "num_attention_heads": 4, "max_position_embeddings": 1024,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"text_config": text} if prefix else text))
    return folder, matrices


def shared(folder):
    config = read_target_config(folder)
    names = {"lm_head": config.lm_head, "embed_tokens": config.embed_tokens}
    tensors = Folder(folder).open_tensors(names.values())
    return SharedTensors("org/target", {slot: tensors[name] for slot, name in names.items()})


def head(root, spec, slots):
    return read_head(open_checkpoint(write_head(root / "head", BY_NAME["vllm"], spec, slots)))


@pytest.mark.parametrize("name", ["sglang", "portable"])
def test_an_lm_head_that_the_layout_needs_is_added_as_it_is(tmp_path, target, name):
    folder, matrices = target
    source = head(tmp_path, MLA, random_slots(MLA, without=LEAN))
    with pytest.raises(LayoutCannot, match="lm_head") as caught:
        plan(source, BY_NAME[name])
    assert "--target" in caught.value.fix
    manifest = execute(plan(source, BY_NAME[name], WriteOptions(shared(folder))), tmp_path / "out")
    verify(tmp_path / "out", source.checkpoint)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], matrices["lm_head"])
    assert "embed_tokens.weight" not in written
    (added,) = (step for step in manifest.tensors if step.action == "added")
    assert added.output.name == "lm_head.weight" and added.sources == ()
    assert "org/target" in added.reason and "27829" in added.reason
    assert manifest.exact, "each byte is the source's or the target's"
    assert manifest.parameters_by_origin.copied_from_target == 64 * 48


@pytest.mark.parametrize("name", ["vllm", "trtllm"])
def test_engines_that_share_the_targets_add_nothing(tmp_path, target, name):
    source = head(tmp_path, MLA, random_slots(MLA, without=LEAN))
    assert not [s for s in plan(source, BY_NAME[name], WriteOptions(shared(target[0]))).steps if s.action == "added"]


def test_what_equals_the_targets_is_dropped_when_asked(tmp_path, target):
    folder, matrices = target
    source = head(tmp_path, GQA, random_slots(GQA) | matrices)
    kept = plan(source, BY_NAME["vllm"], WriteOptions(shared(folder)))
    assert not kept.dropped
    manifest = execute(plan(source, BY_NAME["vllm"], WriteOptions(shared(folder), drop_shared=True)), tmp_path / "out")
    verify(tmp_path / "out", source.checkpoint)
    assert {record.name for record in manifest.dropped} == {"lm_head.weight", "embed_tokens.weight"} and manifest.exact
    assert all("byte-identical" in record.reason and "org/target" in record.reason for record in manifest.dropped)
    assert not {"lm_head.weight", "embed_tokens.weight"} & open_checkpoint(tmp_path / "out").tensors.keys()
    back = execute(
        plan(read_head(open_checkpoint(tmp_path / "out")), BY_NAME["sglang"], WriteOptions(shared(folder))),
        tmp_path / "back",
    )
    assert read_bytes(tmp_path / "back")["lm_head.weight"] == read_bytes(tmp_path / "head")["lm_head.weight"]
    assert back.parameters_by_origin.unknown == 0
    # What was left is known after another conversion too, and another target's is not put in its place.
    again = execute(plan(read_head(open_checkpoint(tmp_path / "out")), BY_NAME["trtllm"]), tmp_path / "again")
    assert manifest.left_to_target.keys() == again.left_to_target.keys() == {"lm_head", "embed_tokens"}
    assert back.left_to_target.keys() == {"embed_tokens"}
    (file,) = folder.glob("*.safetensors")
    save_file({name: values + 1 for name, values in load_file(file).items()}, file)
    other = plan(read_head(open_checkpoint(tmp_path / "again")), BY_NAME["sglang"], WriteOptions(shared(folder)))
    with pytest.raises(TargetInvalid, match="is not the one that the head left"):
        execute(other, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_one_bit_of_difference_is_kept(tmp_path, target):
    folder, matrices = target
    odd = matrices["lm_head"].clone()
    odd.view(torch.int16)[63, 47] ^= 1
    source = head(tmp_path, GQA, random_slots(GQA) | matrices | {"lm_head": odd})
    decided = plan(source, BY_NAME["vllm"], WriteOptions(shared(folder), drop_shared=True))
    assert decided.dropped.keys() == {"embed_tokens.weight"}


def test_what_an_engine_does_not_share_is_kept(tmp_path, target):
    folder, matrices = target
    source = head(tmp_path, GQA, random_slots(GQA) | matrices)
    decided = plan(source, BY_NAME["portable"], WriteOptions(shared(folder), drop_shared=True))
    assert decided.dropped.keys() == {"embed_tokens.weight"}, "SGLang needs an lm_head"
    (tmp_path / "wide").mkdir()
    wide = replace(GQA, target_hidden=56)
    source = head(tmp_path / "wide", wide, random_slots(wide) | matrices)
    decided = plan(source, BY_NAME["vllm"], WriteOptions(shared(folder), drop_shared=True))
    assert not decided.dropped, "no engine shares an embedding or lm_head of another width"


UNSAID = {
    "the output of the last layer": (replace(MLA, captured=(1, 3, 8)), {}, "never captures the output of the last"),
    "the same, in a list of inputs": (replace(MLA, captured=(2, 3, 8)), {}, "never captures the output of the last"),
    "the same, of a Qwen3": (
        replace(GQA, captured=(1, 3, 8)),
        {"model_type": "qwen3"},
        "never captures the output of the",
    ),
    "the output of layer 0": (replace(GQA, captured=(0, 3, 5)), {}, "capture the output of layer 0"),
    "a linear Kimi": (MLA, {"model_type": "kimi_linear"}, "has no class for this target"),
}


@pytest.mark.parametrize("name", ["sglang", "portable"])
@pytest.mark.parametrize("spec, other, why", UNSAID.values(), ids=UNSAID)
def test_what_sglang_cannot_be_told_beside_this_target_is_refused(tmp_path, name, spec, other, why):
    """Its class of a DeepSeek or Kimi target captures in `range(layers)`, before the layer runs."""
    beside = {"layers": 9, "model_type": "kimi_k2"} | other
    source = head(tmp_path, spec, random_slots(spec))
    with pytest.raises(LayoutCannot, match=why) as caught:
        plan(source, BY_NAME[name], WriteOptions(SharedTensors("org/target", {}, **beside)))
    assert caught.value.where == "config.json" and caught.value.see.startswith("https://") and caught.value.fix
    assert plan(source, BY_NAME["vllm"], WriteOptions(SharedTensors("org/target", {}, **beside))).steps
    deeper = SharedTensors("org/target", {}, layers=10, model_type="llama" if spec.captured[0] == 0 else "deepseek_v3")
    assert plan(source, BY_NAME[name], WriteOptions(deeper)).steps


def sglang_captures(model_type, ids, layers):
    """Return the 0-based layers whose inputs SGLang 0.5.23 captures for a list, as its classes of targets have it.

    https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama.py#L937-L941
    https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/gpt_oss.py#L1347-L1352
    https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/deepseek_v2.py#L3470-L3473
    """
    if model_type in ("kimi_k2", "deepseek_v3"):
        return [i + 1 for i in ids] if ids[0] == 1 else list(ids)
    if model_type == "gpt_oss" and max(ids) == layers:
        return list(ids)
    return [i + 1 for i in ids]


KINDS = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "kimi_k2")
LISTS = {"the default": (1, 3, 5), "begins with 2": (2, 3, 5), "begins with 0": (0, 3, 5), "five": (1, 2, 3, 5, 6),
         "the last layer": (2, 3, 8)}  # fmt: skip


@pytest.mark.parametrize("name", ["sglang", "portable"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("captured", LISTS.values(), ids=LISTS)
def test_a_list_is_written_as_sglangs_class_of_the_target_takes_it(tmp_path, name, kind, captured):
    spec = replace(GQA, captured=captured)
    source = head(tmp_path, spec, random_slots(spec))
    options = WriteOptions(SharedTensors("org/target", {}, layers=9, model_type=kind))
    deepseeks = kind in ("deepseek_v3", "kimi_k2")
    if (captured[0] == 0 and deepseeks) or (captured[-1] == 8 and kind != "gpt_oss"):
        with pytest.raises(LayoutCannot):
            plan(source, BY_NAME[name], options)
        return
    execute(plan(source, BY_NAME[name], options), tmp_path / "out")
    written = open_checkpoint(tmp_path / "out")
    listed = written.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert sglang_captures(kind, listed, 9) == [i + 1 for i in captured]
    assert read_head(written).spec == spec
    assert ENGINE.runners[0].aux_layers(written.config, kind) == captured, "as validate reads it"


@pytest.mark.parametrize("name", ["sglang", "portable"])
def test_a_list_that_classes_of_targets_read_otherwise_needs_the_target(tmp_path, name):
    spec = replace(GQA, captured=(2, 3, 5))
    with pytest.raises(LayoutCannot, match="as layer inputs for DeepSeek") as caught:
        plan(head(tmp_path, spec, random_slots(spec)), BY_NAME[name])
    assert "--target" in caught.value.fix


REPLACED = ["sglang", "trtllm", "portable"]


@pytest.mark.parametrize("name", REPLACED)
def test_an_embedding_that_the_engine_would_replace_is_refused(tmp_path, target, name):
    folder, matrices = target
    odd = matrices["embed_tokens"].clone()
    odd.view(torch.int16)[63, 47] ^= 1
    source = head(tmp_path, GQA, random_slots(GQA) | matrices | {"embed_tokens": odd})
    with pytest.raises(LayoutCannot, match="embed_tokens differs from the target's") as caught:
        plan(source, BY_NAME[name], WriteOptions(shared(folder)))
    assert caught.value.where == "embed_tokens.weight" and "vLLM" in caught.value.fix
    assert plan(source, BY_NAME["vllm"], WriteOptions(shared(folder))).steps, "vLLM takes the head's own"
    (tmp_path / "wide").mkdir()
    wide = replace(GQA, target_hidden=56)
    source = head(tmp_path / "wide", wide, random_slots(wide))
    assert plan(source, BY_NAME[name], WriteOptions(shared(folder))).steps, "of another width, each engine does"


@pytest.mark.parametrize("name", REPLACED)
def test_the_targets_own_embedding_in_another_dtype_is_no_other(tmp_path, target, name):
    folder, matrices = target
    spec = replace(GQA, dtype="F32")
    source = head(tmp_path, spec, random_slots(spec) | {slot: own.float() for slot, own in matrices.items()})
    assert plan(source, BY_NAME[name], WriteOptions(shared(folder))).steps


def test_dropping_needs_a_target(tmp_path):
    with pytest.raises(TargetInvalid, match="target"):
        plan(head(tmp_path, GQA, random_slots(GQA)), BY_NAME["vllm"], WriteOptions(drop_shared=True))


def test_a_target_of_another_model_is_refused(tmp_path):
    folder, _ = make_target(tmp_path / "target", hidden=56)
    source = head(tmp_path, MLA, random_slots(MLA, without=LEAN))
    with pytest.raises(TargetInvalid, match=r"\[64, 48\]") as caught:
        plan(source, BY_NAME["sglang"], WriteOptions(shared(folder)))
    assert caught.value.where == "org/target" and caught.value.fix


WITHOUT_BOTH = 48 * 144 + 40 * 48 * 3 + 4 * 48 + 48 + (64 + 32 + 32) * 96 + 48 * 64 - 48


def origins(root, spec, slots, target):
    manifest = execute(plan(head(root, spec, slots), BY_NAME["vllm"], WriteOptions(target)), root / "out")
    found = manifest.parameters_by_origin
    assert found.trained + found.copied_from_target + found.unknown == found.total == manifest.parameters
    return found.trained, found.copied_from_target, found.unknown


def test_parameters_are_counted_by_where_they_come_from(tmp_path, target):
    folder, matrices = target
    slots, one = random_slots(GQA), 64 * 48
    for name in "abc":
        (tmp_path / name).mkdir()
    assert origins(tmp_path / "a", GQA, slots | matrices, None) == (WITHOUT_BOTH, 0, 2 * one)
    assert origins(tmp_path / "b", GQA, slots | matrices, shared(folder)) == (WITHOUT_BOTH, 2 * one, 0)
    mixed = slots | {"embed_tokens": matrices["embed_tokens"]}
    assert origins(tmp_path / "c", GQA, mixed, shared(folder)) == (WITHOUT_BOTH + one, one, 0)


def test_rows_of_a_reduced_head_and_of_another_dtype_count_as_the_targets(tmp_path, target):
    folder, matrices = target
    spec = replace(GQA, draft_vocab=40, dtype="F32")
    slots = random_slots(spec, without=("embed_tokens",))
    ids = slots["d2t"] + torch.arange(40)
    slots["lm_head"] = matrices["lm_head"][ids].float()
    assert origins(tmp_path, spec, slots, shared(folder)) == (WITHOUT_BOTH, 40 * 48, 0)


def test_rounding_is_to_the_nearest_and_ties_go_to_even(tmp_path):
    spec = replace(GQA, dtype="F32")
    slots = random_slots(spec)
    # Halfway between two bf16 values, above and below; a denormal, and the signs of nought.
    slots["norm"][:6] = torch.tensor([1.00390625, 1.01171875, -1.00390625, 1e-40, 0.0, -0.0])
    source = head(tmp_path, spec, slots)
    manifest = execute(plan(source, BY_NAME["vllm"], WriteOptions(dtype="BF16")), tmp_path / "out")
    verify(tmp_path / "out", source.checkpoint)
    assert not manifest.exact and {step.action for step in manifest.tensors} == {"cast"}
    assert all("F32" in step.reason and "BF16" in step.reason for step in manifest.tensors)
    before, after = read_bytes(tmp_path / "head"), read_bytes(tmp_path / "out")
    for name, (dtype, shape, data) in after.items():
        bits = np.frombuffer(before[name][2], np.uint32).astype(np.uint64)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        assert (dtype, shape) == ("torch.bfloat16", before[name][1])
        assert data == nearest.tobytes(), name
    read = read_head(open_checkpoint(tmp_path / "out"))
    assert read.spec == replace(spec, dtype="BF16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_rounding_what_is_in_that_dtype_already_changes_nothing(tmp_path):
    manifest = execute(
        plan(head(tmp_path, GQA, random_slots(GQA)), BY_NAME["vllm"], WriteOptions(dtype="BF16")), tmp_path / "out"
    )
    assert manifest.exact and {step.action for step in manifest.tensors} == {"copied"}


def test_a_value_beyond_the_range_is_refused_and_nothing_is_left(tmp_path):
    spec = replace(GQA, dtype="F32")
    slots = random_slots(spec)
    slots["fc"][3, 4] = torch.finfo(torch.float32).max
    with pytest.raises(TensorValue, match="range"):
        execute(plan(head(tmp_path, spec, slots), BY_NAME["vllm"], WriteOptions(dtype="BF16")), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head"]


def test_weights_of_two_dtypes_are_not_joined_in_one_tensor(tmp_path):
    slots = random_slots(GQA)
    slots["0.up_proj"] = slots["0.up_proj"].half()
    source = head(tmp_path, GQA, slots)
    vllm, gate_up = BY_NAME["vllm"], ("{i}.gate_proj", "{i}.up_proj")
    fused = Row("layers.{i}.mlp.gate_up_proj.weight", gate_up, Stack())
    rows = (*(row for row in vllm.rows if not set(row.slots) & set(gate_up)), fused)
    fusing = replace(vllm, rows=rows)
    with pytest.raises(LayoutCannot, match="which are BF16 and F16") as fault:
        plan(source, fusing)
    assert "--dtype" in fault.value.fix
    assert [step.action for step in plan(source, fusing, WriteOptions(dtype="BF16")).steps].count("cast") == 1


def test_fused_weights_are_rounded_too(tmp_path):
    spec = replace(GQA, dtype="F32")
    slots = random_slots(spec)
    write_head(tmp_path / "head", BY_NAME["vllm"], spec, slots)
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    parts = [tensors.pop(f"layers.0.self_attn.{p}_proj.weight") for p in "qkv"]
    save_file(tensors | {"layers.0.self_attn.qkv_proj.weight": torch.cat(parts)}, file)
    source = read_head(open_checkpoint(tmp_path / "head"))
    manifest = execute(plan(source, BY_NAME["trtllm"], WriteOptions(dtype="BF16")), tmp_path / "out")
    verify(tmp_path / "out", source.checkpoint)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for p, part in zip("qkv", parts, strict=True):
        assert torch.equal(written[f"layers.0.self_attn.{p}_proj.weight"], part.bfloat16())
    assert {step.action for step in manifest.tensors} == {"cast"}
