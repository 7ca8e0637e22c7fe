"""The two conventions of captured layers: every row of the table that decides which one a config speaks."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.checkpoint.manifest import Hints
from kconv.drafters.captured import decide
from kconv.errors import CapturedUndecided, ConfigInvalid

TOP = "eagle_aux_hidden_state_layer_ids"
MARKS = {"next_layer_regular": True, "parallel_draft_step": 1}
STATED = "aux_hidden_state_layer_ids_are"


def config(top=None, nested=None, **eagle):
    found = {} if top is None else {TOP: top}
    if nested is not None or eagle:
        found["eagle_config"] = eagle | ({} if nested is None else {TOP: nested})
    return found


DECIDED = {
    "the top-level list is vLLM's": (config([2, 30, 58]), Hints(), (1, 29, 57)),
    "of any length": (config([2, 8, 24, 61]), Hints(), (1, 7, 23, 60)),
    "beside the same list nested": (config([2, 30, 58], [2, 30, 58]), Hints(), (1, 29, 57)),
    "beside the outputs nested": (config([2, 30, 58], [1, 29, 57]), Hints(), (1, 29, 57)),
    "stated inputs at the top": (config([1, 29, 57]) | {STATED: "layer_inputs"}, Hints(), (0, 28, 56)),
    "stated inputs at the top, and told so": (
        config([1, 29, 57]) | {STATED: "layer_inputs"},
        Hints(captured_are="inputs"),
        (0, 28, 56),
    ),
    "stated outputs, and told which": (
        config(nested=[1, 29, 57], **{STATED: "layer_outputs"}),
        Hints(captured=(2, 30, 58), captured_are="inputs"),
        (1, 29, 57),
    ),
    "ModelOpt's default at the top, told inputs": (
        config([1, 29, 57]),
        Hints(captured_are="inputs"),
        (0, 28, 56),
    ),
    "beside the outputs, stated": (config([2, 30, 58], [1, 29, 57], **{STATED: "layer_outputs"}), Hints(), (1, 29, 57)),
    "a nested list with 1, which no default of inputs has": (config(nested=[1, 29, 57]), Hints(), (1, 29, 57)),
    "with 1, the table says, also of a list that is no one's default": (config(nested=[1, 8, 24]), Hints(), (1, 8, 24)),
    "with 1 after 0": (config(nested=[0, 1, 3]), Hints(target_layers=61), (0, 1, 3)),
    "ModelOpt's default for the target's depth": (config(nested=[1, 29, 57]), Hints(target_layers=61), (1, 29, 57)),
    "ModelOpt's list of a shallow target": (config(nested=[0, 1, 3], **MARKS), Hints(), (0, 1, 3)),
    "ModelOpt's marks": (config(nested=[7, 23, 51], **MARKS), Hints(), (7, 23, 51)),
    "TorchSpec's mark": (config(nested=[7, 23, 51], use_mtp_layernorm=False), Hints(), (7, 23, 51)),
    "stated outputs": (config(nested=[2, 30, 58], **{STATED: "layer_outputs"}), Hints(), (2, 30, 58)),
    "stated inputs": (config(nested=[2, 30, 58], **{STATED: "layer_inputs"}), Hints(), (1, 29, 57)),
    "the ambiguous list, told inputs": (config(nested=[2, 30, 58]), Hints(captured_are="inputs"), (1, 29, 57)),
    "the ambiguous list, told outputs": (config(nested=[2, 30, 58]), Hints(captured_are="outputs"), (2, 30, 58)),
    "with marks, told inputs": (config(nested=[2, 30, 58], **MARKS), Hints(captured_are="inputs"), (1, 29, 57)),
    "[2, 30, 58] of a deeper target is no default": (
        config(nested=[2, 30, 58], **MARKS),
        Hints(target_layers=80),
        (2, 30, 58),
    ),
    "a top-level list that is told to be outputs": (config([2, 30, 58]), Hints(captured_are="outputs"), (2, 30, 58)),
    "absent, with the target's depth": (config(), Hints(target_layers=61), (1, 29, 57)),
    "absent, with a small target": (config(), Hints(target_layers=7), (1, 2, 3)),
    "an empty list is absent": (config(nested=[]), Hints(target_layers=61), (1, 29, 57)),
    "named by the user": (config(), Hints(captured=(3, 9)), (3, 9)),
    "named by the user, as inputs": (config(), Hints(captured=(3, 9), captured_are="inputs"), (2, 8)),
    "the user's reading of the config's list": (config([2, 30, 58]), Hints(captured=(1, 29, 57)), (1, 29, 57)),
    "the other one": (config(nested=[2, 30, 58]), Hints(captured=(2, 30, 58)), (2, 30, 58)),
    "which of two lists": (config([2, 30, 58], [7, 23, 51]), Hints(captured=(7, 23, 51)), (7, 23, 51)),
    "the last layer's output": (config([2, 30, 61]), Hints(target_layers=61), (1, 29, 60)),
}


@pytest.mark.parametrize("found, hints, outputs", DECIDED.values(), ids=DECIDED)
def test_decided(found, hints, outputs):
    captured = decide(found, hints)
    assert captured.ids == outputs
    assert captured.how


UNDECIDED = {
    "absent": (config(), Hints()),
    "trainers' default for a shallower target, there": (config([1, 29, 57]), Hints(target_layers=80)),
    "with 1 where vLLM looks for inputs": (config([1, 8, 24]), Hints(target_layers=61)),
    "vLLM's default, told without saying what it counts": (config(), Hints(captured=(2, 30, 58))),
    "the same for the target's depth": (config(), Hints(captured=(2, 30, 58), target_layers=61)),
    "[2, 30, 58], vLLM's default for 61 layers": (config(nested=[2, 30, 58]), Hints()),
    "[2, 30, 58] with ModelOpt's marks": (config(nested=[2, 30, 58], **MARKS), Hints()),
    "[2, 30, 58] with the target's depth": (config(nested=[2, 30, 58], **MARKS), Hints(target_layers=61)),
    "[2, 4, 6], the same of 9 layers": (config(nested=[2, 4, 6], **MARKS), Hints()),
    "a list without marks": (config(nested=[7, 23, 51]), Hints()),
    "a list that begins with 2, without marks": (config(nested=[2, 20, 40]), Hints()),
    "ModelOpt's default where vLLM looks for inputs": (config([1, 29, 57]), Hints()),
    "ModelOpt's default for the target's depth, there": (config([1, 29, 57]), Hints(target_layers=61)),
    "ModelOpt's default in both places": (config([1, 29, 57], [1, 29, 57]), Hints()),
    "the embedding, as the input of layer 0": (config([0, 1, 2]), Hints()),
    "told inputs, with a 0": (config(nested=[0, 1, 3], **MARKS), Hints(captured_are="inputs")),
    "absent, with too shallow a target": (config(), Hints(target_layers=5)),
    "absent, with one layer": (config(), Hints(target_layers=1)),
    "told the convention of two different lists": (config([2, 30, 58], [1, 29, 57]), Hints(captured_are="inputs")),
}


@pytest.mark.parametrize("found, hints", UNDECIDED.values(), ids=UNDECIDED)
def test_refused_until_told(found, hints):
    with pytest.raises(CapturedUndecided) as caught:
        decide(found, hints)
    assert "--captured" in caught.value.fix
    lists = (found.get(TOP), found.get("eagle_config", {}).get(TOP))
    told = tuple(next((ids for ids in lists if ids), hints.captured or (3, 9)))
    assert decide(found, Hints(captured=told, captured_are="outputs")).ids == told


INVALID = {
    "contradiction": (config([2, 30, 58], [3, 31, 59]), Hints()),
    "contradiction with what is stated": (config([2, 30, 58], [2, 30, 58], **{STATED: "layer_outputs"}), Hints()),
    "contradiction with stated inputs": (config([2, 30, 58], [1, 29, 57], **{STATED: "layer_inputs"}), Hints()),
    "stated outputs, told inputs": (
        config(nested=[1, 29, 57], **{STATED: "layer_outputs"}),
        Hints(captured_are="inputs"),
    ),
    "stated outputs, told others": (
        config(nested=[1, 29, 57], **{STATED: "layer_outputs"}),
        Hints(captured=(0, 28, 56)),
    ),
    "stated inputs at the top, told outputs": (
        config([2, 30, 58]) | {STATED: "layer_inputs"},
        Hints(captured_are="outputs"),
    ),
    "contradiction with stated inputs at the top": (
        config([2, 30, 58], [7, 23, 51]) | {STATED: "layer_inputs"},
        Hints(),
    ),
    "vLLM's numbers of outputs that are listed": (config(nested=[1, 3, 5], **MARKS), Hints(captured=(2, 4, 6))),
    "the same, of a list at the top": (config([1, 3, 5]), Hints(captured=(2, 4, 6))),
    "told others than either list": (config([2, 30, 58], [1, 29, 57]), Hints(captured=(3, 31, 59))),
    "told fewer": (config(nested=[1, 29, 57]), Hints(captured=(1, 57))),
    "told in place of a list that is none": (config(nested=[57, 29, 1]), Hints(captured=(1, 29, 57))),
    "a convention that does not exist": (config(nested=[1, 29, 57], **{STATED: "outputs"}), Hints()),
    "a convention that is a list": (config(nested=[1, 29, 57], **{STATED: ["layer_outputs"]}), Hints()),
    "beyond the target": (config([2, 30, 58]), Hints(target_layers=30)),
    "the target's end, as an output": (config(nested=[2, 30, 58, 61], **MARKS), Hints(target_layers=61)),
    "the user's, beyond the target": (config(), Hints(captured=(1, 7), target_layers=7)),
    "the user's, unsorted": (config(), Hints(captured=(9, 3))),
    "the user's, empty": (config(), Hints(captured=())),
    "eagle_config is a list": ({"eagle_config": [1]}, Hints()),
}


@pytest.mark.parametrize("found, hints", INVALID.values(), ids=INVALID)
def test_invalid(found, hints):
    with pytest.raises(ConfigInvalid) as caught:
        decide(found, hints)
    assert caught.value.where and caught.value.fix


@pytest.mark.parametrize("nested", [None, [3, 20, 40]], ids=["alone", "twice"])
def test_a_list_at_the_top_beside_the_trainers_names_is_refused_until_told(nested):
    """TorchSpec exports its own config as it is, and adds 1 only where it renames the layer for vLLM."""
    names = ["midlayer.hidden_norm.weight", "fc.weight"]
    with pytest.raises(CapturedUndecided, match="trainer"):
        decide(config([3, 20, 40], nested), Hints(), names)
    assert decide(config([3, 20, 40], nested), Hints(captured_are="outputs"), names).ids == (3, 20, 40)
    assert decide(config([3, 20, 40], [2, 19, 39]), Hints(), names).ids == (2, 19, 39), "the two lists agree"
    assert decide(config([3, 20, 40], nested), Hints(), ["layers.0.hidden_norm.weight"]).ids == (2, 19, 39)


AS_TRAINED = {
    "its eagle_config": config([3, 20, 40], use_mtp_layernorm=False),
    "its exporter's version": config([3, 20, 40]) | {"_torchspec_version": "0.0.1"},
    "both lists": config([3, 20, 40], [3, 20, 40], use_mtp_layernorm=False),
}


@pytest.mark.parametrize("found", AS_TRAINED.values(), ids=AS_TRAINED)
@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_torchspecs_list_of_a_head_that_is_not_kimis_is_refused_until_told(found, model_type):
    """It renames the layer for vLLM and leaves the list as it was trained, where vLLM looks for inputs."""
    names, found = ["layers.0.hidden_norm.weight"], found | {"model_type": model_type}
    with pytest.raises(CapturedUndecided, match="TorchSpec, which counts outputs"):
        decide(found, Hints(), names)
    assert decide(found, Hints(captured_are="outputs"), names).ids == (3, 20, 40)
    assert decide(found, Hints(captured_are="inputs"), names).ids == (2, 19, 39)
    assert decide(found | {"model_type": "kimi_k2"}, Hints(), names).ids == (2, 19, 39), "here it has added 1"
    assert decide(found | {STATED: "layer_inputs"}, Hints(), names).ids == (2, 19, 39), "kconv says which they are"


@pytest.mark.parametrize("model_type, captured", [("llama", (7, 23, 51)), ("kimi_k2", None)])
def test_the_mark_of_torchspecs_exporter_tells_a_list_that_it_leaves_from_one_that_it_shifts(model_type, captured):
    found = config(nested=[7, 23, 51]) | {"model_type": model_type, "_torchspec_version": "0.1.0"}
    if captured is not None:
        assert decide(found, Hints(), ["layers.0.hidden_norm.weight"]).ids == captured
        return
    with pytest.raises(CapturedUndecided, match="does not say"):
        decide(found, Hints(), ["layers.0.hidden_norm.weight"])


def test_modelopts_keys_are_no_mark_of_torchspecs():
    found = config([3, 20, 40], use_mtp_layernorm=False, **MARKS) | {"model_type": "llama"}
    assert decide(found, Hints(), ["layers.0.hidden_norm.weight"]).ids == (2, 19, 39)


def test_a_list_of_inputs_that_begins_with_2_is_no_trainers_by_that():
    with pytest.raises(CapturedUndecided, match="does not say"):
        decide(config(nested=[2, 20, 40]), Hints(), ["layers.0.hidden_norm.weight"])


BAD_LISTS = [
    [58, 30, 2], [2, 2, 58], [2, 30.0, 58], [True, 30], ["2"], [-1, 3], [10_000], 2, "2,30,58", {"0": 2}, [[2]], [None],
]  # fmt: skip


@pytest.mark.parametrize("place", ["top", "nested"])
@pytest.mark.parametrize("value", BAD_LISTS, ids=repr)
def test_a_list_that_is_no_list_of_ascending_layers_is_refused(place, value):
    with pytest.raises(ConfigInvalid):
        decide(config(**{place: value}), Hints())


@settings(deadline=None)
@given(st.integers(8, 200))
def test_the_default_of_any_depth_is_ambiguous_as_inputs_and_plain_as_outputs(layers):
    # The two engines' defaults, from their own sources: vLLM's (2, N//2, N-3) are inputs.
    inputs, outputs = [2, layers // 2, layers - 3], [1, layers // 2 - 1, layers - 4]
    with pytest.raises(CapturedUndecided):
        decide(config(nested=inputs, **MARKS), Hints())
    assert list(decide(config(nested=outputs, **MARKS), Hints()).ids) == outputs
    assert list(decide(config(inputs), Hints()).ids) == outputs
    assert list(decide(config(), Hints(target_layers=layers)).ids) == outputs


def default_aux_layers(layers: int) -> set[int]:
    """Return what ModelOpt's default_eagle_aux_layer_ids says for a target of so many layers."""
    # By path: importing all of it takes ten seconds.
    spec = find_spec("modelopt")
    assert spec is not None and spec.submodule_search_locations
    plugins = Path(spec.submodule_search_locations[0], "torch", "speculative", "plugins")
    source = (plugins / "hf_eagle.py").read_text()
    (function,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "default_eagle_aux_layer_ids"
    )
    scope: dict = {}
    exec(compile(ast.Module([function], []), "hf_eagle.py", "exec"), scope)
    return set(scope["default_eagle_aux_layer_ids"](layers))


def test_the_default_is_modelopts():
    for layers in (7, 27, 61, 93):
        assert set(decide(config(), Hints(target_layers=layers)).ids) == default_aux_layers(layers)


def test_a_default_does_not_confirm_what_the_user_says():
    found = decide(config(), Hints(captured=(1, 29, 57), target_layers=61))
    assert (found.ids, found.word) == ((1, 29, 57), "--captured 1,29,57")
    assert not decide(config(nested=[1, 29, 57]), Hints(captured=(1, 29, 57))).word, "the list confirms it"


def test_a_convention_without_a_list_is_refused_and_not_ignored():
    with pytest.raises(ConfigInvalid, match=r"--captured-are inputs says how to read the config's list .* has none"):
        decide(config(), Hints(captured_are="inputs", target_layers=61))
