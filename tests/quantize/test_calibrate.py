"""Calibration layer by layer: the amaxes of the whole model, from every form; and a command that hands them on."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from kconv.checkpoint.folder import open_checkpoint
from kconv.cli import main
from kconv.errors import InputScalesInvalid, TargetInvalid
from kconv.quantize.calibrate import calibrate
from kconv.quantize.calibration import CalibrationPrompts, read_calibration
from kconv.targets.config import parse_target_config
from kconv.targets.model import load_target

KIMI = {
    "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840,
    "num_attention_heads": 64, "max_position_embeddings": 262144,
}  # fmt: skip
PROMPTS = CalibrationPrompts(sha256="0" * 64, count=2, tokens=0, digests=())


def sequences(count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 200, (17 + 5 * i,), generator=generator) for i in range(count)]


def run(folder, ids, dtype=torch.float32):
    source = open_checkpoint(folder)
    return calibrate(source, parse_target_config(source.config), ids, PROMPTS, dtype=dtype)


@pytest.mark.parametrize("form, wrapped", [("bf16", False), ("int4", True), ("fp8", False)])
def test_the_amaxes_are_those_that_hooks_see_in_the_whole_model(form, wrapped, forms):
    folder = forms(form, wrapped=wrapped)
    found = run(folder, sequences()).input_amax
    model, seen = load_target(folder, torch.float32), {}

    def hook(name):
        def see(module, inputs):
            seen[name] = max(seen.get(name, 0.0), float(inputs[0].abs().max()))

        return see

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            module.register_forward_pre_hook(hook(name))
        elif name.endswith(".experts"):
            module.register_forward_pre_hook(hook(f"{name}.0.gate_proj"))
    with torch.no_grad():
        for ids in sequences():
            model(ids.unsqueeze(0))
    assert len(seen) > 40 and seen.keys() <= found.keys()
    for name, amax in seen.items():
        assert found[name] == pytest.approx(amax, rel=1e-5), name
    assert len({found[f"model.layers.2.mlp.experts.{e}.down_proj"] for e in range(4)}) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_is_run_by_layers_too(tied, forms, tmp_path):
    folder, seen = forms("llama"), {}
    if tied:
        weights = load_file(folder / "model.safetensors")
        del weights["lm_head.weight"]
        config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(config))
        folder = tmp_path
    found = run(folder, sequences()).input_amax
    model = load_target(folder, torch.float32)

    def see(name):
        return lambda _, inputs: seen.update({name: max(seen.get(name, 0.0), float(inputs[0].abs().max()))})

    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(see(f"model.{name}"))
    with torch.no_grad():
        for ids in sequences():
            model(ids.unsqueeze(0))
    assert len(seen) == 7 * len(model.model.layers)
    assert found == pytest.approx(seen, rel=1e-5)


def test_only_one_layer_is_ever_in_memory(forms, monkeypatch):
    from kconv.quantize.calibrate import Layers

    resident, given = [], Layers._given

    def watched(self, i, states):
        resident.append(sum(next(one.parameters()).device.type == "cpu" for one in self._layers))
        return given(self, i, states)

    monkeypatch.setattr(Layers, "_given", watched)
    run(forms("bf16"), sequences(1))
    assert len(resident) == 7 and set(resident) == {1}


@pytest.mark.parametrize("form, wrapped", [("bf16", False), ("int4", True)])
def test_a_layer_that_does_not_fit_is_run_expert_by_expert(form, wrapped, forms, little_memory, monkeypatch):
    from kconv.quantize import experts

    folder, said, read = forms(form, wrapped=wrapped), [], []
    whole = run(folder, sequences()).input_amax
    little_memory(folder)
    weight = experts.ExpertsOneByOne._weight

    def noted(self, expert, name):
        read.append((self._base, expert, name))
        return weight(self, expert, name)

    monkeypatch.setattr(experts.ExpertsOneByOne, "_weight", noted)
    source = open_checkpoint(folder)
    parted = calibrate(
        source, parse_target_config(source.config), sequences(), PROMPTS, dtype=torch.float32, say=said.append
    ).input_amax
    assert parted.keys() == whole.keys()
    for name, amax in whole.items():
        assert parted[name] == pytest.approx(amax, rel=1e-5), name
    # Of all texts together each is read once.
    assert read and len(read) == len(set(read))
    assert "its experts are read one by one" in said[0] and "GB at a time" in said[0]


def test_what_a_layer_of_kimi_k2_holds():
    """384 experts of 3 * 7168 * 2048 parameters in bf16: 33.8 GB, and with one at a time less than one."""
    from kconv.quantize.experts import layer_bytes

    class Shape:
        def __init__(self, *shape):
            self.shape = shape

    expert = {"gate_proj": (2048, 7168), "up_proj": (2048, 7168), "down_proj": (7168, 2048)}
    names = {
        f"model.layers.1.mlp.experts.{e}.{part}.weight": Shape(*shape)
        for e in range(384)
        for part, shape in expert.items()
    } | {"model.layers.1.self_attn.o_proj.weight": Shape(7168, 8192), "lm_head.weight": Shape(163840, 7168)}
    # A layer of MTP is larger than any, and not run.
    names |= {f"model.layers.{KIMI['num_hidden_layers']}.eh_proj.weight": Shape(7168, 10**7)}
    whole, one = layer_bytes(names, parse_target_config(KIMI), torch.bfloat16)
    assert (round(whole / 1e9, 1), round(one / 1e9, 1)) == (33.9, 0.2)


class Stopped(Exception):
    """As a kill would be, and as often as it is wanted."""


@pytest.fixture
def stopping(monkeypatch):
    """Return a list of the layers that were run, and a function that says before which the next run stops."""
    from kconv.quantize.calibrate import Layers

    given, names, limit = Layers._given, [], [99]

    def watched(self, i, states):
        if i >= limit[0]:
            raise Stopped
        names.append(i)
        return given(self, i, states)

    monkeypatch.setattr(Layers, "_given", watched)
    return names, lambda layer: limit.__setitem__(0, layer)


def test_an_interrupted_command_goes_on_behind_its_last_layer(forms, stopping, tmp_path):
    layers, stop_before = stopping
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "calibration.json"
    prompts.write_text('{"prompt": "Return the sum of two numbers."}\n{"prompt": "A list of names."}\n')
    words = ["calibrate", str(forms("int4")), "--prompts", str(prompts), "--tokens", "12"]
    assert CliRunner().invoke(main, [*words, str(tmp_path / "quiet.json")]).exit_code == 0
    for stop, begin in ((3, 0), (5, 3), (99, 5)):
        layers.clear()
        stop_before(stop)
        done = CliRunner().invoke(main, [*words, str(out)])
        assert sorted(set(layers)) == list(range(begin, min(stop, 7)))
        assert out.exists() == (done.exit_code == 0) == (stop == 99)
    assert "5 of 7 layers are already done" in done.stderr
    assert out.read_bytes() == (tmp_path / "quiet.json").read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"prompts.jsonl", "quiet.json", "calibration.json"}


@pytest.mark.parametrize("change", ["--tokens", "--dtype"])
def test_another_calibration_does_not_go_on_with_this_ones_work(change, forms, stopping, tmp_path):
    layers, stop_before = stopping
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Return the sum of two numbers."}\n')
    words = ["calibrate", str(forms("int4")), str(tmp_path / "c.json"), "--prompts", str(tmp_path / "prompts.jsonl")]
    stop_before(2)
    CliRunner().invoke(main, words)
    layers.clear()
    CliRunner().invoke(main, [*words, change, {"--tokens": "5", "--dtype": "F32"}[change]])
    assert set(layers) == {0, 1}


def test_what_an_interrupted_run_left_and_is_broken_is_named(forms, stopping, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Return the sum of two numbers."}\n')
    words = ["calibrate", str(forms("int4")), str(tmp_path / "c.json"), "--prompts", str(tmp_path / "prompts.jsonl")]
    stopping[1](2)
    CliRunner().invoke(main, words)
    (left,) = tmp_path.glob(".c.json-*.partial")
    left.write_bytes(left.read_bytes()[:-1])
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1 and "cannot be read" in done.output and left.name in done.output


def test_without_a_token_there_is_nothing_to_calibrate_on(forms):
    with pytest.raises(InputScalesInvalid, match="no token"):
        run(forms("bf16"), [torch.tensor([], dtype=torch.long)])


def test_a_layer_that_runs_in_another_way_is_named(forms, monkeypatch):
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: x @ self.weight.T)
    with pytest.raises(InputScalesInvalid, match=r"\d+ modules of model.layers.0 received no input"):
        run(forms("bf16"), sequences(1))


def test_an_input_that_is_no_number_is_named(forms, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(forms("bf16"), folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if (norm := tensors.get("model.layers.1.input_layernorm.weight")) is not None:
            norm[0] = float("nan")
            save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputScalesInvalid, match=r"input of model.layers.1.self_attn.\w+ has .* nan"):
        run(folder, sequences(1))


def test_the_command_writes_what_quantize_takes(forms, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "calibration.json"
    prompts.write_text('{"prompt": "Return the sum of two numbers."}\n{"prompt": "A list of names."}\n')
    words = ["calibrate", str(forms("int4")), str(out), "--prompts", str(prompts), "--tokens", "12"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    calibration = read_calibration(out)
    assert calibration.prompts.count == 2 and 2 < calibration.prompts.tokens <= 24
    made = tmp_path / "made"
    words = ["quantize", str(forms("int4")), str(made), "--recipe", "nvfp4-experts", "--input-scale", str(out)]
    done = CliRunner().invoke(main, [*words, "--jobs", "1"])
    assert done.exit_code == 0, done.output
    assert "calibrated on 2 prompts" in json.loads((made / "kconv.json").read_text())["spec"]["input_scale"]
    again = CliRunner().invoke(main, ["calibrate", str(forms("int4")), str(out), "--prompts", str(prompts)])
    assert again.exit_code == 1 and "already exists" in again.output


def test_a_token_without_a_row_in_the_embedding_is_named(forms):
    folder = forms("bf16")
    rows = open_checkpoint(folder).tensors["model.embed_tokens.weight"].shape[0]
    with pytest.raises(TargetInvalid, match=f"gives id {rows}, but the embedding ends at {rows - 1}"):
        run(folder, [torch.tensor([1, 2, rows])])
