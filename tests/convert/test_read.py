"""Reading a head: each tensor is claimed by a slot, and what is missing, unknown or misshapen is refused by name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import GQA, MLA, MODELOPT_KIMIK2, PORTABLE, cut, random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.header import TensorInfo
from kconv.checkpoint.manifest import Hints
from kconv.convert.read import read, read_head, read_slot, read_weights, weight_dtype
from kconv.drafters.contract import Dim, Expected, compare
from kconv.drafters.spec import Norms
from kconv.engines import BY_NAME
from kconv.engines.layout import stored
from kconv.errors import ConfigInvalid, TensorMissing, TensorShape, TensorUnknown, TensorValue, UnknownLayout

VLLM, MODELOPT = BY_NAME["vllm"], BY_NAME["modelopt"]


def change(folder, edit):
    """Edit a head's tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def head(root, spec, edit=lambda tensors: None, config=None):
    return change(write_head(root / "head", VLLM, spec, random_slots(spec), config), edit)


@pytest.mark.parametrize("spec", PORTABLE.values(), ids=PORTABLE)
def test_every_slot_is_read_as_it_was_written(tmp_path, spec):
    slots = random_slots(spec)
    read = read_weights(read_head(open_checkpoint(write_head(tmp_path / "head", VLLM, spec, slots))))
    assert read.keys() == slots.keys()
    assert all(torch.equal(read[name], slots[name]) and read[name].dtype == slots[name].dtype for name in slots)


OPTIONAL = ("lm_head.weight", "embed_tokens.weight")


@pytest.mark.parametrize("spec", [MLA, replace(GQA, layers=2, mlp_bias=True)], ids=["mla", "gqa"])
def test_each_tensor_is_needed(tmp_path, spec):
    folder = head(tmp_path, spec)
    whole = load_file(folder / "model.safetensors")
    for name in stored(VLLM, spec):
        save_file({n: t for n, t in whole.items() if n != name}, folder / "model.safetensors")
        if name in OPTIONAL:
            assert name not in read_head(open_checkpoint(folder)).checkpoint.tensors
            continue
        with pytest.raises(TensorMissing, match=name.replace(".", r"\.")) as caught:
            read_head(open_checkpoint(folder))
        assert caught.value.where == name and caught.value.fix


def test_several_missing_tensors_are_one_message(tmp_path):
    """The six that a peer of kconv's drops of an MLA head, and says that the validation succeeded."""
    parts = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    lost = [f"layers.0.self_attn.{part}.weight" for part in parts]
    folder = head(tmp_path, MLA, lambda tensors: [tensors.pop(name) for name in lost])
    with pytest.raises(TensorMissing, match="5 more do not fit") as caught:
        read_head(open_checkpoint(folder))
    assert all(name in caught.value.what for name in lost)


def test_a_prefix_that_engines_do_not_take_off_is_named(tmp_path):
    def prefix(tensors):
        for name in [*tensors]:
            tensors[f"model.{name}"] = tensors.pop(name)

    folder = head(tmp_path, GQA, prefix)
    with pytest.raises(TensorMissing, match=r"14 of 14 names begin with 'model\.': model\.fc\.weight is fc") as caught:
        read_head(open_checkpoint(folder))
    assert "'model.'" in caught.value.fix


def test_a_wrong_shape_says_what_it_follows_from(tmp_path):
    folder = head(tmp_path, GQA, config=VLLM.write_config(replace(GQA, captured=(1, 3))))
    with pytest.raises(TensorShape, match=r"\[48, 144\]; the config demands \[48, 96\] \(hidden, captured\*target_hid"):
        read_head(open_checkpoint(folder))


def test_a_wrong_shape_names_a_key_that_the_config_leaves_out(tmp_path):
    config = VLLM.write_config(GQA)
    del config["num_key_value_heads"]
    with pytest.raises(TensorShape, match="the config has no num_key_value_heads, so its default is taken") as caught:
        read_head(open_checkpoint(head(tmp_path, GQA, config=config)))
    assert caught.value.fix.startswith("Add num_key_value_heads")


@pytest.mark.parametrize(
    ("key", "other", "slots"),
    [("num_key_value_heads", 4, ("k_proj", "v_proj")), ("intermediate_size", 48, ("gate_proj", "up_proj"))],
)
def test_a_wrong_shape_names_the_key_that_alone_explains_it(tmp_path, key, other, slots):
    """What other tensors confirm, as head_dim or the width, is not to blame."""
    config = VLLM.write_config(GQA)
    said, config[key] = config[key], other
    reading = read(open_checkpoint(head(tmp_path, GQA, config=config)))
    found = {problem.where.split(".")[-2]: problem for problem in reading.problems}
    for slot in slots:
        assert found[slot].what.endswith(f"; {key} is {other}, and {said} would fit")
        assert found[slot].knows and found[slot].fix.startswith(f"State {key} ")


def test_a_key_that_is_left_out_and_confirmed_is_not_blamed(tmp_path):
    """Queries and outputs confirm the default of head_dim."""
    spec = replace(GQA, attention=replace(GQA.attention, head_dim=GQA.hidden // GQA.attention.heads))
    config = VLLM.write_config(spec) | {"num_key_value_heads": 4}
    del config["head_dim"]
    reading = read(open_checkpoint(head(tmp_path, spec, config=config)))
    assert reading.problems and all("num_key_value_heads is 4, and 2 would fit" in p.what for p in reading.problems)


def test_one_misplaced_tensor_is_no_prefix(tmp_path):
    def misplace(tensors):
        tensors["layers.0.norm.weight"] = tensors.pop("norm.weight")

    reading = read(open_checkpoint(head(tmp_path, GQA, misplace)))
    assert {problem.code for problem in reading.problems} == {"K106", "K127"}


def test_a_key_that_cannot_explain_a_shape_is_not_named(tmp_path):
    """Two layers' states: no target_hidden_size makes three of them."""
    config = VLLM.write_config(GQA)
    del config["target_hidden_size"]
    folder = head(
        tmp_path,
        GQA,
        lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, :96].clone()}),
        config=config,
    )
    with pytest.raises(TensorShape, match=r"fc\.weight is \[48, 96\]") as caught:
        read_head(open_checkpoint(folder))
    assert "target_hidden_size" not in caught.value.what and "list of captured layers" in caught.value.fix


def test_a_packed_weight_narrower_than_an_assumed_width_is_no_crash():
    want = Expected("fc.weight_packed", (8, 6), ("U8",), False, "hidden, target_hidden")
    held = {"fc.weight_packed": TensorInfo("fc.weight_packed", "U8", (8, 5), Path("f"), 0, 40)}
    (problem,) = compare({want.name: want}, held, ignored={}, unclaimed={}, slots={want.name: "fc"},
                         dims={"target_hidden": Dim("target_hidden_size", 12, assumed=True)})  # fmt: skip
    assert problem.kind is TensorShape and "target_hidden_size, so" not in problem.what


def test_a_transposed_tensor_is_said_to_be_that(tmp_path):
    folder = head(tmp_path, GQA, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].T.contiguous()}))
    with pytest.raises(TensorShape, match=r"\[144, 48\]; the config demands \[48, 144\].*; it is transposed") as caught:
        read_head(open_checkpoint(folder))
    assert caught.value.fix == "Transpose it: a weight is [outputs, inputs]."


def pop(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


REDUCED = replace(GQA, draft_vocab=40)
ATTENTION = "layers.0.self_attn"
FAULTS = {
    "a norm of Qwen's": (GQA, put("layers.0.self_attn.q_norm.weight", torch.ones(16)), TensorUnknown, "q_norm"),
    "a mask for parallel drafts": (GQA, put("mask_hidden", torch.ones(1, 1, 144)), ConfigInvalid, "mask_token_id"),
    "the target's prefix": (GQA, put("model.norm.weight", torch.ones(48)), TensorUnknown, "model.norm"),
    "a layer too many": (GQA, put("layers.1.mlp.up_proj.weight", torch.ones(40, 48)), TensorUnknown, "layers.1"),
    "attention of the other kind": (MLA, put(f"{ATTENTION}.q_proj.weight", torch.ones(1)), TensorUnknown, "q_proj"),
    "a map without a reduced vocabulary": (GQA, put("d2t", torch.arange(64).flip(0)), TensorUnknown, "d2t"),
    "a bias that the config denies": (GQA, put("fc.bias", torch.ones(48)), TensorUnknown, "fc.bias"),
    "a norm that the config denies": (GQA, put("input_norm.weight", torch.ones(144)), TensorUnknown, "input_norm"),
    "fc_norm that the config denies": (GQA, put("fc_norm.0.weight", torch.ones(48)), TensorUnknown, "fc_norm.0"),
    "a transposed matrix": (GQA, put("layers.0.mlp.up_proj.weight", torch.ones(48, 40)), TensorShape, "up_proj"),
    "a first layer of one width": (GQA, put(f"{ATTENTION}.q_proj.weight", torch.ones(64, 48)), TensorShape, "q_proj"),
    "a norm with a dim too many": (GQA, put("norm.weight", torch.ones(1, 48)), TensorShape, "norm.weight"),
    "a scalar": (GQA, put("norm.weight", torch.tensor(1.0)), TensorShape, "norm.weight"),
    "an empty tensor": (GQA, put("norm.weight", torch.empty(0)), TensorShape, "norm.weight"),
    "another vocabulary": (GQA, put("lm_head.weight", torch.ones(63, 48)), TensorShape, "lm_head"),
    "doubles": (GQA, put("norm.weight", torch.ones(48, dtype=torch.float64)), TensorShape, "F64"),
    "integers": (GQA, put("norm.weight", torch.ones(48, dtype=torch.int8)), TensorShape, "I8"),
    "fp8": (GQA, put("fc.weight", torch.ones(48, 144).to(torch.float8_e4m3fn)), TensorShape, "F8_E4M3"),
    "a map of floats": (REDUCED, put("d2t", torch.zeros(40)), TensorShape, "d2t"),
    "a map of another length": (REDUCED, put("d2t", torch.zeros(41, dtype=torch.int64)), TensorShape, "d2t"),
    "a mask of bytes": (REDUCED, put("t2d", torch.zeros(64, dtype=torch.uint8)), TensorShape, "t2d"),
    "no map": (REDUCED, pop("d2t"), TensorMissing, "d2t"),
    "a reduced head without its lm_head": (REDUCED, pop("lm_head.weight"), TensorMissing, "lm_head"),
    "a target of another width, and no embedding": (
        replace(GQA, target_hidden=56),
        pop("embed_tokens.weight"),
        TensorMissing,
        "embed_tokens",
    ),
    "a map beyond the vocabulary": (REDUCED, put("d2t", torch.full((40,), 25)), TensorValue, "1 of 40"),
    "a map below nought": (REDUCED, put("d2t", torch.full((40,), -1)), TensorValue, "1 of 40"),
    "a map far beyond": (REDUCED, put("d2t", torch.full((40,), 2**63 - 1)), TensorValue, "d2t"),
    "ids instead of offsets": (REDUCED, put("d2t", torch.arange(40) + 24), TensorValue, "d2t"),
    "a map that leads twice to one token": (
        REDUCED,
        put("d2t", torch.tensor([1] + [0] * 39)),
        TensorValue,
        "already uses",
    ),
}  # fmt: skip


@pytest.mark.parametrize("spec, edit, fault, phrase", FAULTS.values(), ids=FAULTS)
def test_refused(tmp_path, spec, edit, fault, phrase):
    with pytest.raises(fault) as caught:
        read_head(open_checkpoint(head(tmp_path, spec, edit)))
    assert type(caught.value) is fault and phrase in caught.value.what + caught.value.where
    assert caught.value.where and caught.value.fix


FLAGS = {
    "norm_before_fc": (replace(GQA, norms=Norms(before_fc=True)), {"norm_before_fc": False, "eagle_config": {}}),
    "fc_norm": (replace(GQA, norms=Norms(fc=True)), {"fc_norm": False}),
    "attention_bias": (replace(GQA, attention=replace(GQA.attention, bias=True)), {"attention_bias": False}),
    "mlp_bias": (replace(GQA, mlp_bias=True), {"mlp_bias": False}),
    "num_hidden_layers": (replace(GQA, layers=2), {"num_hidden_layers": 1}),
    "draft_vocab_size": (REDUCED, {"draft_vocab_size": 64}),
}


@pytest.mark.parametrize("spec, flags", FLAGS.values(), ids=FLAGS)
def test_a_flag_and_the_weights_must_agree_both_ways(tmp_path, spec, flags):
    plain = {name: getattr(GQA, name) for name in ("attention", "norms", "mlp_bias", "layers", "draft_vocab")}
    with pytest.raises((TensorUnknown, TensorShape)):
        read_head(open_checkpoint(head(tmp_path / "off", spec, config=VLLM.write_config(spec) | flags)))
    with pytest.raises((TensorMissing, TensorShape)):
        read_head(open_checkpoint(head(tmp_path / "on", replace(spec, **plain), config=VLLM.write_config(spec))))


DIMS = ["hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "head_dim", "target_hidden_size"]


@pytest.mark.parametrize("key", DIMS)
def test_a_config_of_another_head_is_refused(tmp_path, key):
    config = VLLM.write_config(GQA)
    with pytest.raises((TensorShape, TensorMissing)):
        read_head(open_checkpoint(head(tmp_path, GQA, config=config | {key: 2 * config[key]})))


def test_another_number_of_captured_layers_than_fc_reads_is_refused(tmp_path):
    folder = head(tmp_path, GQA)
    with pytest.raises((TensorShape, ConfigInvalid)):
        read_head(open_checkpoint(folder), hints=Hints(captured=(1, 3, 5, 7)))


def test_int32_maps_are_read(tmp_path):
    slots = random_slots(REDUCED)
    folder = head(tmp_path, REDUCED, put("d2t", slots["d2t"].to(torch.int32)))
    assert torch.equal(read_slot(read_head(open_checkpoint(folder)), "d2t").long(), slots["d2t"])


def test_a_reduced_kimik2_export_is_read_though_its_config_is_silent(tmp_path):
    spec = replace(MLA, draft_vocab=40)
    slots = random_slots(spec, without=("embed_tokens", "t2d"))
    folder = write_head(tmp_path / "head", MODELOPT, spec, slots, cut(MODELOPT_KIMIK2, spec))
    assert read_head(open_checkpoint(folder)).spec.draft_vocab == 40
    change(folder, pop("d2t"))
    with pytest.raises(TensorShape, match="lm_head"):
        read_head(open_checkpoint(folder))


def test_the_dtype_is_the_one_of_most_bytes(tmp_path):
    folder = head(tmp_path, GQA, put("norm.weight", torch.ones(48)))
    assert weight_dtype(open_checkpoint(folder)) == "BF16"
    save_file({"x": torch.ones(3, dtype=torch.int8)}, folder / "model.safetensors")
    with pytest.raises(UnknownLayout):
        weight_dtype(open_checkpoint(folder))


def test_a_named_layout_goes_before_the_marks(tmp_path):
    folder = head(tmp_path, replace(GQA, layers=2))
    with pytest.raises(TensorMissing, match="hidden_norm"):
        read_head(open_checkpoint(folder), layout=BY_NAME["trtllm"])


def test_faults_are_the_same_each_time(tmp_path):
    """With several faults, the one that is told must not depend on the order of a set."""
    folder = head(tmp_path, GQA, lambda tensors: tensors.update({f"x{i:03}": torch.ones(1) for i in range(200)}))
    with pytest.raises(TensorUnknown) as caught:
        read_head(open_checkpoint(folder))
    assert caught.value.where == "x000"
