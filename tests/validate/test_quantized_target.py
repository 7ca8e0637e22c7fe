"""A quantized target against its source: nothing in a good one, and each single change found by its tensor's noise."""

import json
import math
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from support.heads import MLA, random_slots, write_head
from support.quantized_targets import make_form
from support.validated import validate
from torch.nn.functional import cross_entropy

from kconv.cards.card import gather, make_card
from kconv.cards.facts import Facts
from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.source import Folder
from kconv.cli import main
from kconv.engines import by_name
from kconv.errors import ComparisonUnfit, RequestInvalid
from kconv.operations.base import Context
from kconv.operations.validate import Validate
from kconv.quantize.calibration import data_free
from kconv.quantize.plan import plan_quantize
from kconv.quantize.recipe import load_recipe
from kconv.quantize.run import quantize
from kconv.targets.config import parse_target_config
from kconv.targets.model import load_target
from kconv.tiny.text import read_corpus
from kconv.validate.options import ValidateOptions
from kconv.validate.perplexity import Run, compare_runs, encode_texts, judge_perplexity, measure_perplexity
from kconv.validate.quantized import FLOOR, check_quantized

FORMS = ("bf16", "int4", "fp8")
EXPERT = "model.layers.2.mlp.experts.1"


@pytest.fixture(scope="module")
def pair(tiny_target, tmp_path_factory):
    """Return the folders of the tiny target in a form, and of its NVFP4; each is made once."""
    made = {}

    def find(form):
        if form not in made:
            root = tmp_path_factory.mktemp(form)
            source = open_checkpoint(make_form(tiny_target, root / "source", form))
            recipe = load_recipe("nvfp4-mlp")
            quantize(plan_quantize(source, parse_target_config(source.config), recipe, data_free()), root / "out")
            made[form] = root / "source", root / "out"
        return made[form]

    return find


@pytest.mark.parametrize("form", FORMS)
def test_a_good_one_has_the_noise_of_nvfp4_and_no_finding(form, pair):
    source, out = map(open_checkpoint, pair(form))
    findings, noise = check_quantized(out, source)
    assert findings == []
    assert noise.tensors == len(noise.by_tensor) == 6 * (3 * 4 + 3) + 3
    # Measured: about 20 dB on trained weights, a little less where they lie on INT4's own grid.
    assert FLOOR + 3 < noise.worst <= noise.median < 23


def test_the_noise_is_what_its_definition_says(pair):
    source, out = map(open_checkpoint, pair("bf16"))
    name = f"{EXPERT}.up_proj.weight"
    plain, loaded = load_target(pair("bf16")[0], torch.float32), load_target(pair("bf16")[1], torch.float32)
    _, noise = check_quantized(out, source)
    # Fused experts are [experts, gate rows then up rows, hidden].
    one, other = (m.state_dict()["model.layers.2.mlp.experts.gate_up_proj"][1, 32:] for m in (plain, loaded))
    expected = 20 * math.log10(float(one.norm() / (other - one).norm()))
    assert noise.by_tensor[name] == pytest.approx(expected, abs=0.01)


def scale(name, factor):
    return lambda tensors: tensors.update({name: tensors[name] * factor})


def swap_nibbles(tensors):
    weight = tensors[f"{EXPERT}.up_proj.weight"]
    tensors[f"{EXPERT}.up_proj.weight"] = (weight >> 4) | (weight << 4)


def exchange(one, other):
    def change(tensors):
        for suffix in ("weight", "weight_scale", "weight_scale_2"):
            names = f"{EXPERT}.{one}.{suffix}", f"{EXPERT}.{other}.{suffix}"
            tensors |= {names[0]: tensors[names[1]], names[1]: tensors[names[0]]}

    return change


def double_block_scales(tensors):
    name = f"{EXPERT}.up_proj.weight_scale"
    tensors[name] = (tensors[name].float() * 2).clamp(max=448).to(torch.float8_e4m3fn)


def another_expert(tensors):
    for suffix in ("weight", "weight_scale", "weight_scale_2"):
        tensors[f"{EXPERT}.down_proj.{suffix}"] = tensors[f"{EXPERT[:-1]}2.down_proj.{suffix}"].clone()


def flip_signs(tensors):
    tensors[f"{EXPERT}.down_proj.weight"] ^= 0x88


def nudge(tensors):
    tensors["model.norm.weight"][3] *= 1.01


UP, GATE, DOWN = (f"{EXPERT}.{part}_proj.weight" for part in ("up", "gate", "down"))
CHANGES = {
    "one expert's scale doubled": (scale(f"{EXPERT}.up_proj.weight_scale_2", 2.0), "K390", {UP}),
    "one expert's scale halved": (scale(f"{EXPERT}.up_proj.weight_scale_2", 0.5), "K390", {UP}),
    "one expert's block scales doubled": (double_block_scales, "K390", {UP}),
    "one nibble order swapped": (swap_nibbles, "K390", {UP}),
    "gate and up exchanged": (exchange("gate_proj", "up_proj"), "K390", {GATE, UP}),
    "another expert's weight": (another_expert, "K390", {DOWN}),
    "every sign flipped": (flip_signs, "K390", {DOWN}),
    "a scale that is NaN": (scale(f"{EXPERT}.up_proj.weight_scale_2", float("nan")), "K390", {UP}),
    "a norm that is not the source's": (nudge, "K391", {"model.norm.weight"}),
    "a tensor too few": (lambda tensors: tensors.pop("model.norm.weight"), "K392", {"model.norm.weight"}),
    "a tensor too many": (lambda tensors: tensors.update(extra=torch.ones(1)), "K392", {"extra"}),
}


@pytest.fixture
def spoiled(pair, tmp_path):
    """Return a function that changes tensors of a quantized target, and returns the copy's folder."""

    def make(form, change):
        out = tmp_path / "spoiled"
        out.mkdir()
        tensors = load_file(next(pair(form)[1].glob("*.safetensors")))
        change(tensors)
        save_file(tensors, out / "model.safetensors")
        (out / "config.json").write_bytes((pair(form)[1] / "config.json").read_bytes())
        return out

    return make


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change, rule, where", CHANGES.values(), ids=CHANGES)
def test_a_single_change_is_found_where_it_is(form, change, rule, where, pair, spoiled):
    source, out = pair(form)[0], spoiled(form, change)
    findings, _ = check_quantized(open_checkpoint(out), open_checkpoint(source))
    assert {(finding.rule, finding.where, finding.severity) for finding in findings} == {
        (rule, name, "error") for name in where
    }


def test_validate_reports_the_noise_and_the_change(pair, spoiled):
    source, good = pair("int4")
    report = validate(Folder(good), source=open_checkpoint(source))
    assert report.figures.noise is not None and report.figures.noise.tensors == 93
    assert not [finding for finding in report.findings if finding.rule.startswith("K39")]
    assert json.loads(report.to_json())["figures"]["noise"]["worst"] > FLOOR
    bad = validate(Folder(spoiled("int4", swap_nibbles)), source=open_checkpoint(source))
    assert not bad.clean and "K390" in {finding.rule for finding in bad.findings}


@pytest.mark.parametrize("other, said", [(0, "Swap HEAD and --source"), (1, "that kconv quantize read")])
def test_a_quantized_target_is_no_source(pair, other, said):
    source, good = pair("bf16")
    report = validate(Folder((source, good)[other]), source=open_checkpoint(good))
    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert [finding.rule for finding in errors] == ["K392"] and said in errors[0].fix
    assert report.figures.noise is None


def test_another_target_of_the_same_form_is_one_finding(pair, tmp_path):
    source, good = pair("bf16")
    shutil.copytree(source, tmp_path / "other")
    file = next((tmp_path / "other").glob("*.safetensors"))
    tensors = load_file(file)
    save_file({name: t + 0.01 * (t.ndim > 1) for name, t in tensors.items()}, file)
    report = validate(Folder(good), source=open_checkpoint(tmp_path / "other"))
    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert [finding.rule for finding in errors] == ["K392"] and "is not what this was made from" in errors[0].message


def test_a_perplexity_that_grew_is_a_warning():
    figures = compare_runs(*(Run([torch.full((n,), loss) for n in (3, 5)], [torch.zeros(8)]) for loss in (2.0, 2.43)))
    [finding] = judge_perplexity(figures)
    assert (finding.rule, finding.severity) == ("K395", "warning") and "(+53.73%)" in finding.message
    same = Run([torch.full((4,), 2.0)], [torch.zeros(4)])
    assert list(judge_perplexity(compare_runs(same, same))) == []


def test_what_could_only_be_passed_over_is_refused(pair, tmp_path):
    source, good = map(str, pair("bf16"))
    head = str(write_head(tmp_path / "head", by_name("vllm"), MLA, random_slots(MLA)))
    states = tmp_path / "states"
    states.mkdir()
    (states / "states.json").write_text("{}")
    for asked, said in (
        ({"head": good, "source": head}, "this is a target, but --source is a head"),
        ({"head": head, "source": source}, "this is a head, but --source is a target"),
        ({"head": good, "states": str(states), "target": source}, "only a head has an acceptance"),
    ):
        with pytest.raises(ComparisonUnfit, match=said):
            Validate(**asked).run(Context())


RESULTS = Path(__file__).parent / "lm_eval.json"


def test_a_harness_results_stand_in_the_report_and_on_the_card(pair, tmp_path):
    source, good = map(str, pair("bf16"))
    lower = json.loads(RESULTS.read_text())
    lower["results"]["sums"]["acc,none"] = 0.25
    (tmp_path / "lower.json").write_text(json.dumps(lower))
    asked = {"results": [str(tmp_path / "lower.json")], "source_results": [str(RESULTS)]}
    report = Validate(head=good, source=source, out=str(tmp_path / "report"), **asked).run(Context())
    assert [one.where for one in report.findings if one.rule == "K394"] == ["accuracy: sums"]
    assert report.provenance["results"] == {"output": asked["results"], "source": asked["source_results"]}
    told = "| sums | 0 | acc | 60 | 25.00% ± 6.55% | 50.00% ± 6.55% | -25.00 ± 9.26 points |"
    assert told in (tmp_path / "report" / "report.md").read_text()
    assert "sums, acc: 25.00%, source 50.00% (-25.00 points)" in "\n".join(map(str, report.lines()))
    card = make_card(gather(Path(good), report, Facts())).text
    assert "Accuracy, by lm_eval 0.4.13, with standard errors:" in card and told in card
    with pytest.raises(RequestInvalid, match="only for a target"):
        head = str(write_head(tmp_path / "head", by_name("vllm"), MLA, random_slots(MLA)))
        Validate(head=head, source=head, **asked).run(Context())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"results": ["a"], "source": "t"}, "go together"),
        ({"source_results": ["a"], "source": "t"}, "go together"),
        ({"results": ["a"], "source_results": ["b"]}, "needs --source"),
    ],
)
def test_results_go_with_the_sources(asked, said):
    with pytest.raises(ValidationError, match=said):
        Validate(head="h", **asked)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """Return a file of held-out text."""
    file = tmp_path_factory.mktemp("text") / "held-out.jsonl"
    texts = [text for text in read_corpus().held_out if len(text) > 300][:120]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_perplexity_on_held_out_text_is_within_half_a_percent_of_the_sources(form, pair, held_out):
    source, out = pair(form)
    options = ValidateOptions(prompts=held_out, prompt_tokens=64, new_tokens=64)
    text = encode_texts(options, Folder(source))
    figures = measure_perplexity(open_checkpoint(out), open_checkpoint(source), text)
    assert abs(figures.output / figures.source - 1) < 0.005, figures
    assert figures.log_ratio == pytest.approx(math.log(figures.output / figures.source))
    assert figures.log_ratio_se is not None and 0 < figures.log_ratio_se < 0.002
    assert 0.9 < figures.top1 < 1
    assert text.file == "held-out.jsonl"
    if form == "int4":
        (before, one), (after, other) = (perplexity(folder) for folder in pair(form))
        assert figures.source == pytest.approx(before, rel=1e-6)
        # Sums in another order put a few inputs on the other side of a rounding's edge.
        assert figures.output == pytest.approx(after, rel=2e-4)
        assert figures.top1 == pytest.approx(float((one == other).float().mean()), abs=0.003)
        assert figures.tokens == len(one)


@contextmanager
def inputs_rounded(folder, model):
    """Round what the linears of a whole model read with ModelOpt's own quantizer, by the folder's input scales."""
    scales = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if name.endswith(".input_scale"):
                module = name.removeprefix("language_model.").removesuffix(".input_scale")
                scales[module] = tensor
    by_place = {}
    for name, tensor in model.state_dict().items():
        base, _, last = name.rpartition(".")
        if tensor.dim() == 3:
            part = {"gate_up_proj": "gate_proj", "down_proj": "down_proj"}[last]
            by_place |= {own.data_ptr(): f"{base}.{e}.{part}" for e, own in enumerate(tensor)}
        else:
            by_place[tensor.data_ptr()] = base
    linear = torch.nn.functional.linear

    def rounding(x, weight, bias=None):
        scale = scales.get(by_place.get(weight.data_ptr(), ""))
        if scale is not None and x.numel():
            stored, blocks, double = NVFP4QTensor.quantize(x.reshape(-1, x.shape[-1]), 16, None, scale.reshape(1))
            x = stored.dequantize(scale=blocks, double_scale=double, block_sizes={-1: 16}).view(x.shape).to(x.dtype)
        return linear(x, weight, bias)

    torch.nn.functional.linear = rounding
    try:
        yield len(scales)
    finally:
        torch.nn.functional.linear = linear


def perplexity(folder):
    """Return transformers' own tokens of the corpus, run without a batch: perplexity, and the likeliest tokens."""
    from transformers import AutoTokenizer, PreTrainedConfig

    tokenizer = AutoTokenizer.from_pretrained(folder, config=PreTrainedConfig())
    texts = [tokenizer.encode(text)[:128] for text in read_corpus().held_out if len(text) > 300][:120]
    model = load_target(folder, torch.float32)
    model.set_experts_implementation("eager")
    losses, likeliest = [], []
    with torch.no_grad(), inputs_rounded(folder, model):
        for text in texts:
            logits = model(torch.tensor([text])).logits[0, :-1]
            losses.append(cross_entropy(logits, torch.tensor(text[1:]), reduction="none"))
            likeliest.append(logits.argmax(-1))
    return math.exp(float(torch.cat(losses).mean())), torch.cat(likeliest)


def test_two_runs_are_compared_text_by_text():
    """By hand: two texts of one and three tokens, whose losses grow by 0.4 and by 0.1 each."""
    before = Run([torch.tensor([1.0]), torch.tensor([2.0, 2.0, 2.0])], [torch.tensor([5]), torch.tensor([6, 7, 8])])
    after = Run([torch.tensor([1.4]), torch.tensor([2.1, 2.1, 2.1])], [torch.tensor([5]), torch.tensor([6, 0, 8])])
    figures = compare_runs(before, after)
    assert (figures.prompts, figures.tokens, figures.top1) == (2, 4, 0.75)
    assert figures.source == pytest.approx(math.exp(7 / 4)) and figures.output == pytest.approx(math.exp(7.7 / 4))
    assert figures.log_ratio == pytest.approx(0.7 / 4)
    # Each text moves the mean by (0.4 - 0.175) / 4, up and down; of two, the variance is twice the squares' sum.
    assert figures.log_ratio_se == pytest.approx((2 * 2 * (0.225 / 4) ** 2) ** 0.5)


def test_the_command_measures_a_target_on_prompts(pair, spoiled, held_out, tmp_path):
    source, good = pair("bf16")
    few = tmp_path / "few.jsonl"
    few.write_text("".join(held_out.read_text().splitlines(keepends=True)[:4]))

    def kconv(target, *words, out="out"):
        words = (target, *words, "--out", tmp_path / out, "--json")
        done = CliRunner().invoke(main, ["validate", *map(str, words)])
        return done.exit_code, json.loads(done.stdout) if done.exit_code < 2 else done.output

    code, report = kconv(good, "--source", source, "--prompts", few)
    assert code == 0, report["findings"]
    found = report["figures"]["perplexity"]
    assert found["prompts"] == 4 and abs(found["output"] / found["source"] - 1) < 0.02
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"| perplexity on held-out text | {found['output']:.4f} |" in text and "signal over noise, median" in text
    assert "rounded by their input_scale" in text and "input_scale" in report["provenance"]["dtype"]
    # What is wrong is told by the tensors' noise, and not run.
    code, report = kconv(spoiled("bf16", swap_nibbles), "--source", source, "--prompts", few, out="spoiled")
    assert code == 1 and report["figures"]["perplexity"] is None
    assert "not run" in report["provenance"]["not_measured"]
    code, said = kconv(good, "--source", source, "--prompts", few, "--engine", "vllm", "--url", "http://x", out="no")
    assert code == 2 and "only for a head" in said
