"""Held-out text that cannot be run over: named before a weight is read, as a target may be a terabyte of them."""

import psutil
import pytest
from click.testing import CliRunner
from support.heads import MLA, random_slots, write_head
from support.quantized_targets import make_form

import kconv
from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.source import Folder
from kconv.cli import main
from kconv.engines import by_name
from kconv.errors import PromptsInvalid, TargetTooLarge
from kconv.quantize.calibration import data_free
from kconv.quantize.plan import plan_quantize
from kconv.quantize.recipe import load_recipe
from kconv.quantize.run import quantize
from kconv.targets.config import parse_target_config
from kconv.validate import quantized, target


@pytest.fixture(scope="module")
def pair(tiny_target, tmp_path_factory):
    """Return the folders of the tiny target and of its NVFP4."""
    root = tmp_path_factory.mktemp("pair")
    source = open_checkpoint(make_form(tiny_target, root / "source", "bf16"))
    plan = plan_quantize(source, parse_target_config(source.config), load_recipe("nvfp4-mlp"), data_free())
    quantize(plan, root / "out")
    return root / "source", root / "out"


@pytest.fixture
def refuse(pair, monkeypatch):
    """Return a function that validates on prompts, and says what is raised before any value is looked at."""
    looked = []
    monkeypatch.setattr(target, "run_rules", lambda *_: looked.append("rules"))
    monkeypatch.setattr(quantized, "check_quantized", lambda *_: looked.append("noise"))

    def run(fault, phrase, prompts):
        with pytest.raises(fault, match=phrase) as raised:
            kconv.validate(pair[1], source=pair[0], prompts=prompts)
        assert looked == []
        return raised.value

    return run


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Return the sum of two numbers."}\n')
    return file


def test_prompts_that_are_not_there(refuse, tmp_path):
    refuse(PromptsInvalid, "no.jsonl", tmp_path / "no.jsonl")


def test_prompts_of_one_token(refuse, prompts):
    prompts.write_text('{"prompt": "a"}\n')
    refuse(PromptsInvalid, "no prompt has two tokens", prompts)


def test_a_target_of_which_no_layer_fits_and_what_to_do_about_it(refuse, prompts, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    said = refuse(TargetTooLarge, "of memory as float32 with one expert at a time", prompts)
    assert "a machine with more memory" in said.fix


@pytest.mark.parametrize("words", [("--engine", "vllm", "--url", "http://x"), ("--draft-tokens", "4"), ("--seed", "1")])
def test_wrong_usage_is_named_before_weights_are_fetched(words, pair, prompts, monkeypatch):
    fetched = []
    monkeypatch.setattr(Folder, "open_weights", fetched.append)
    source, out = map(str, pair)
    done = CliRunner().invoke(main, ["validate", out, "--source", source, "--prompts", str(prompts), *words])
    assert done.exit_code == 2 and "only for a head" in done.output
    assert fetched == []


@pytest.mark.parametrize(
    "words",
    [
        ("validate", "HEAD", "--target", "TARGET", "--prompts", "PROMPTS"),
        ("bench", "--head", "HEAD", "--target", "TARGET", "--suite", "PROMPTS", "--out", "OUT"),
        ("validate", "QUANTIZED", "--source", "TARGET", "--prompts", "PROMPTS"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_before_anything_is_fetched(words, pair, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    monkeypatch.setattr(psutil, "swap_memory", lambda: type("Swap", (), {"free": 0}))
    fetched = []
    monkeypatch.setattr(Folder, "open_weights", fetched.append)
    monkeypatch.setattr(Folder, "fetch_model", fetched.append)
    monkeypatch.setattr(Folder, "fetch_tokenizer", fetched.append)
    head = write_head(tmp_path / "head", by_name("vllm"), MLA, random_slots(MLA))
    paths = {"HEAD": head, "TARGET": pair[0], "QUANTIZED": pair[1], "PROMPTS": prompts, "OUT": tmp_path / "a.json"}
    done = CliRunner().invoke(main, [str(paths.get(word, word)) for word in words])
    assert done.exit_code == 1 and "of memory as float32" in done.output
    assert fetched == []


def test_prompts_that_the_target_was_calibrated_on(pair, prompts, tmp_path):
    calibration, out = tmp_path / "calibration.json", tmp_path / "out"
    kconv.calibrate(pair[0], calibration, prompts=prompts)
    kconv.quantize(pair[0], out, recipe="nvfp4-mlp", input_scale=calibration)
    with pytest.raises(PromptsInvalid, match="1 of 1 prompts are among those that this was trained or calibrated on"):
        kconv.validate(out, source=pair[0], prompts=prompts)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "Return the product of two numbers."}\n')
    assert kconv.validate(out, source=pair[0], prompts=other).figures.perplexity is not None
