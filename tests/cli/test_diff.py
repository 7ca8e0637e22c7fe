"""`kconv diff`: what differs between two drafters is named, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from support.block_drafters import DFLASH
from support.changes import fp8, fuse
from support.heads import GQA, MLA, TARGET, random_slots, write_head
from support.published import EAGLE3, OTHERS

import kconv
from kconv.cli import main
from kconv.engines import BY_NAME
from kconv.errors import LayoutCannot

P = "layers.0."
QKV = [f"{P}self_attn.{x}_proj.weight" for x in "qkv"]
FUSED = f"{P}self_attn.qkv_proj.weight"
Tensors = dict[str, torch.Tensor]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["diff", *map(str, arguments)])


def found(*arguments: object) -> dict[str, Any]:
    """Return the result of a comparison whose exit code says what it found."""
    said = run(*arguments, "--json")
    result = json.loads(said.stdout)
    assert "error" not in result, said.output
    assert said.exit_code == (0 if result["equal"] else 1)
    return result


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_head(tmp_path / "a", BY_NAME["vllm"], GQA, random_slots(GQA))


def changed(head: Path, change: Callable[[dict[str, Any], Tensors], None], name: str = "b") -> Path:
    """Return a copy of a head, with its config and tensors changed."""
    copy = head.parent / name
    shutil.copytree(head, copy)
    config, tensors = json.loads((copy / "config.json").read_text()), load_file(copy / "model.safetensors")
    change(config, tensors)
    (copy / "config.json").write_text(json.dumps(config))
    save_file(tensors, copy / "model.safetensors")
    return copy


def flip(name: str, at: int = 0) -> Callable[[dict[str, Any], Tensors], None]:
    """Return the change of one byte of a tensor."""

    def change(_: dict[str, Any], tensors: Tensors) -> None:
        tensors[name].reshape(-1).view(torch.uint8)[at] ^= 1

    return change


def keys(**values: Any) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, _: config.update(values)


SPECS = {
    "gqa": GQA, "mla": MLA, "reduced vocabulary": replace(GQA, draft_vocab=40), "2 layers": replace(GQA, layers=2),
    "dflash": DFLASH,
}  # fmt: skip


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_same_drafter_in_two_layouts_is_equal(tmp_path, spec):
    slots, prefix = random_slots(spec), "dflash-" if spec is DFLASH else ""
    one, other, third = (
        write_head(tmp_path / name, BY_NAME[prefix + name], spec, slots) for name in ("vllm", "trtllm", "sglang")
    )
    for a, b in ((one, other), (other, third), (third, one), (one, one)):
        result = found(a, b)
        assert result["equal"] and result["compared_by"] == "slot" and result["bytes_compared"]
        assert result["values"] == result["tensors"] == []
    assert any("aux_hidden_state_layer_ids" in one["name"] for one in found(one, other)["keys"]) is (spec is not DFLASH)


def test_a_fused_tensor_is_compared_slot_by_slot(head):
    fused = changed(head, fuse(QKV, FUSED))
    held = load_file(fused / "model.safetensors")
    assert FUSED in held and not held.keys() & set(QKV)
    assert found(head, fused)["equal"]
    # A row is 2 * hidden wide, of two bytes each; the keys follow the 64 rows of the queries.
    for row, slot in ((63, "0.q_proj"), (64, "0.k_proj"), (95, "0.k_proj"), (96, "0.v_proj")):
        other = changed(fused, flip(FUSED, at=row * 96 * 2), f"row {row}")
        [one] = found(head, other)["tensors"]
        assert (one["what"], one["how"], one["b"][0]["name"]) == (slot, "bytes", FUSED)


@pytest.mark.parametrize("name, slot", {"fc.weight": "fc", f"{P}mlp.up_proj.weight": "0.up_proj"}.items())
def test_one_byte_of_a_tensor_names_its_slot(head, name, slot):
    other = changed(head, flip(name, at=-1))
    result = found(head, other)
    assert [(one["what"], one["how"]) for one in result["tensors"]] == [(slot, "bytes")]
    assert result["values"] == result["keys"] == []
    said = run(head, other)
    assert said.exit_code == 1 and name in said.stdout and f"DIFFERENT {head} and {other}: 1 slot" in said.stdout
    only_headers = found(head, other, "--headers-only")
    assert only_headers["equal"] and not only_headers["bytes_compared"]
    assert "bytes were not compared" in run(head, other, "--headers-only").stdout


def test_a_second_copy_of_a_tensor_is_compared_too(tmp_path):
    spec = replace(GQA, layers=2)
    slots, name = random_slots(spec), "layers.1.input_layernorm.weight"
    once, twice = (write_head(tmp_path / layout, BY_NAME[layout], spec, slots) for layout in ("trtllm", "portable"))
    held = [load_file(folder / "model.safetensors") for folder in (once, twice)]
    assert name not in held[0] and torch.equal(held[1][name], held[1]["layers.1.hidden_norm.weight"])
    assert found(once, twice)["equal"]
    for second in (name, "layers.1.hidden_norm.weight"):
        apart = changed(twice, flip(second), second)
        for a, b in ((once, apart), (twice, apart)):
            [one] = found(a, b)["tensors"]
            assert one["how"] == "bytes" and second in [part["name"] for part in one["b"]]


def test_a_changed_meaning_is_named_in_any_layout(head, tmp_path):
    spec = replace(GQA, captured=(1, 3, 6), rope=replace(GQA.rope, theta=50000.0))
    for layout in ("vllm", "trtllm"):
        result = found(head, write_head(tmp_path / layout, BY_NAME[layout], spec, random_slots(spec)))
        assert {one["name"]: (one["a"], one["b"]) for one in result["values"]} == {
            "captured": ([1, 3, 5], [1, 3, 6]), "rope.theta": (10000.0, 50000.0),
        }  # fmt: skip
        assert result["tensors"] == []


def test_a_changed_key_counts_unless_its_meaning_is_the_same(head, tmp_path):
    unknown = found(head, changed(head, keys(a_key_of_tomorrow={"inner": True}), "unknown"))
    assert unknown["keys"] == [{"name": "a_key_of_tomorrow.inner", "b": True, "decides": True}]
    assert not unknown["equal"]
    other = write_head(tmp_path / "trtllm", BY_NAME["trtllm"], GQA, random_slots(GQA))
    in_two_layouts = found(
        changed(head, keys(a_key_of_tomorrow=1), "one"), changed(other, keys(a_key_of_tomorrow=2), "two")
    )
    assert in_two_layouts["values"] == [{"name": "a_key_of_tomorrow", "a": 1, "b": 2}]
    # transformers writes these two, and no engine reads them.
    idle = found(head, changed(head, keys(use_cache=True, transformers_version="5.0.0"), "idle"))
    assert idle["equal"] and {one["name"] for one in idle["keys"]} == {"use_cache", "transformers_version"}
    # To Python, true equals 1.
    assert not found(changed(head, keys(x=True), "true"), changed(head, keys(x=1), "1"))["equal"]


def test_a_missing_and_an_unknown_tensor_are_named(head):
    def move(_: dict[str, Any], tensors: Tensors) -> None:
        tensors["who.knows"] = tensors.pop("norm.weight")

    result = found(head, changed(head, move))
    assert {one["what"]: one["how"] for one in result["tensors"]} == {"norm": "only in A", "who.knows": "only in B"}
    assert [one["code"] for one in result["b"]["problems"]] and not result["a"]["problems"]


def test_another_shape_and_dtype_are_named_without_reading_bytes(head):
    def change(_: dict[str, Any], tensors: Tensors) -> None:
        tensors["norm.weight"] = tensors["norm.weight"].float()
        tensors["fc.weight"] = tensors["fc.weight"][:-1].half().clone()

    result = found(head, changed(head, change), "--headers-only")
    assert {one["what"]: one["how"] for one in result["tensors"]} == {"norm": "dtype", "fc": "dtype and shape"}


def test_what_one_leaves_open_is_no_value(head, tmp_path):
    published = EAGLE3["SafeAILab, Llama-3.1"].write(tmp_path / "published")
    silent = changed(published, keys(rope_theta=10000.0), "silent")
    states = changed(
        silent, keys(eagle_aux_hidden_state_layer_ids=[2, 4, 6], aux_hidden_state_layer_ids_are="layer_inputs")
    )
    result = found(silent, states)
    assert {one["name"]: one["a"] for one in result["values"]} == {"captured": None}
    assert result["a"]["undecided"] == ["captured"]
    assert "UNDECIDED" in run(silent, states).stdout
    assert found(silent, changed(silent, keys(), "copy"))["equal"]


def test_an_option_states_what_one_leaves_open_and_nothing_that_the_other_says(head, tmp_path):
    published = EAGLE3["SafeAILab, Llama-3.1"].write(tmp_path / "published")
    silent = changed(published, keys(rope_theta=10000.0), "silent")
    states = changed(
        silent, keys(eagle_aux_hidden_state_layer_ids=[2, 4, 6], aux_hidden_state_layer_ids_are="layer_inputs")
    )
    result = found(silent, states, "--captured", "1,3,5")
    assert result["values"] == [] and result["a"]["undecided"] == []
    [value] = found(silent, states, "--captured", "1,3,4")["values"]
    assert (value["name"], value["a"], value["b"]) == ("captured", [1, 3, 4], [1, 3, 5])
    [value] = found(silent, states, "--target-layers", "32")["values"]
    assert value["a"] == [1, 15, 28]
    # A RoPE base that both state is theirs, and a number of positions too.
    result = found(silent, states, "--captured", "1,3,5", "--rope-theta", "7", "--max-positions", "9")
    assert result["values"] == [] and not result["a"]["problems"] and not result["b"]["problems"]


def test_a_layout_that_no_mark_shows_is_named(head):
    unknown = changed(head, lambda config, _: config.pop("eagle_aux_hidden_state_layer_ids"), "unknown")
    assert found(head, unknown, "--from", "vllm", "--captured", "1,3,5")["compared_by"] == "slot"


def test_quantized_layers_are_compared_with_their_scales(head):
    quantized = changed(head, fp8(f"{P}mlp.up_proj"), "fp8")
    assert found(quantized, changed(quantized, keys(), "copy"))["equal"]
    [scale] = found(quantized, changed(quantized, flip(f"{P}mlp.up_proj.weight_scale"), "scaled"))["tensors"]
    assert (scale["what"], scale["how"]) == ("0.up_proj.weight_scale", "bytes")
    result = found(head, quantized)
    assert {one["what"]: one["how"] for one in result["tensors"]} == {
        "0.up_proj": "dtype", "0.up_proj.weight_scale": "only in B",
    }  # fmt: skip


def test_fused_and_quantized_layers_are_refused_where_they_cannot_be_taken_apart(head):
    gate_up = f"{P}mlp.gate_up_proj"
    fused = changed(head, fuse([f"{P}mlp.{x}_proj.weight" for x in ("gate", "up")], f"{gate_up}.weight"), "fused")
    quantized = changed(fused, fp8(gate_up), "fp8")
    assert found(quantized, changed(quantized, keys(), "copy"))["equal"]
    [one] = found(quantized, changed(quantized, flip(f"{gate_up}.weight"), "byte"))["tensors"]
    assert one["what"] == "0.gate_proj + 0.up_proj"
    for pair in ((head, quantized), (quantized, head), (fused, quantized)):
        with pytest.raises(LayoutCannot, match=r"gate_up_proj\.weight .* cannot take apart") as error:
            kconv.diff(*pair)
        assert "one layout" in error.value.fix or "same layout" in error.value.fix


def test_two_families_are_told_apart(head, tmp_path):
    block = write_head(tmp_path / "block", BY_NAME["dflash-vllm"], DFLASH, random_slots(DFLASH))
    result = found(head, block)
    assert (result["a"]["family"], result["b"]["family"]) == ("eagle3", "dflash")
    assert result["compared_by"] == "name" and not result["equal"]
    assert all(one["decides"] for one in result["keys"])
    held = [load_file(folder / "model.safetensors") for folder in (head, block)]
    only = {one["what"]: one["how"] for one in result["tensors"] if one["how"].startswith("only")}
    assert only == dict.fromkeys(held[0].keys() - held[1].keys(), "only in A") | dict.fromkeys(
        held[1].keys() - held[0].keys(), "only in B"
    )


def test_one_that_cannot_be_read_is_compared_by_name(head):
    broken = changed(head, lambda config, _: config.pop("num_attention_heads"))
    result = found(head, broken)
    assert result["compared_by"] == "name" and result["tensors"] == []
    assert [one["name"] for one in result["keys"]] == ["num_attention_heads"]
    assert "num_attention_heads" in result["b"]["problems"][0]["what"]
    assert found(broken, changed(broken, keys(), "copy"))["equal"]


def test_engines_that_judge_them_differently_are_shown(head, tmp_path):
    trtllm = write_head(tmp_path / "trtllm", BY_NAME["trtllm"], GQA, random_slots(GQA))
    ran = [
        CliRunner().invoke(main, ["validate", str(one), "--for", "all", "--headers-only", "--json"])
        for one in (head, trtllm)
    ]
    verdicts = [{v["engine"]: v["outcome"] for v in json.loads(one.stdout)["verdicts"]} for one in ran]
    shown = {one["engine"]: (one["a"]["outcome"], one["b"]["outcome"]) for one in found(head, trtllm)["engines"]}
    assert shown and all((verdicts[0][engine], verdicts[1][engine]) == pair for engine, pair in shown.items())
    assert shown.keys() >= {engine for engine in verdicts[0] if verdicts[0][engine] != verdicts[1][engine]}


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_drafter_is_refused(head, tmp_path, place):
    target = OTHERS["a whole Qwen3"].write(tmp_path / "target")
    (empty := tmp_path / "config-only").mkdir()
    (empty / "config.json").write_text(json.dumps(TARGET))
    for other, said in (
        (target, "a whole model"),
        (target, "target/config.json"),
        (target, "kconv validate HEAD --target"),
        (empty, "no *.safetensors"),
        (tmp_path / "gone", "no folder"),
    ):
        refused = run(*((head, other) if place else (other, head)))
        assert refused.exit_code == 1 and said in refused.stderr and refused.stdout == ""


def test_headers_of_the_hub_are_compared_without_the_weights(hub, tmp_path):
    spec = replace(MLA, vocab=20_000, draft_vocab=20_000)
    slots = random_slots(spec)
    local = write_head(tmp_path / "local", BY_NAME["trtllm"], spec, slots)
    hub.commit("org/head", write_head(tmp_path / "hub", BY_NAME["vllm"], spec, slots))
    assert found("org/head", local, "--headers-only")["equal"]
    assert hub.sent() < (local / "model.safetensors").stat().st_size / 100
    assert found("org/head", local)["bytes_compared"]
    other = changed(local, flip("fc.weight"), "other")
    assert [one["what"] for one in found("org/head", other)["tensors"]] == ["fc"]
