"""The tiny target: really trained, spelled as Kimi-K2, made once."""

import dataclasses
import itertools
import json
import math
import multiprocessing
from collections import Counter

import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, PreTrainedConfig

from kconv.drafters.captured import default_outputs
from kconv.errors import PromptsInvalid, TrainingFailed
from kconv.targets.config import read_target_config
from kconv.targets.model import load_target
from kconv.tiny.recipe import DEMO, TEST, cache_root
from kconv.tiny.target import EVALUATED, kimi_config, make_target, pack, write_tiny
from kconv.tiny.text import read_corpus

# A recipe of a few steps and two layers: what it learns does not matter, where it is written does.
QUICK = dataclasses.replace(TEST, num_hidden_layers=2, steps=2, batch=1, seq=64, kv_lora_rank=32, qk_rope_head_dim=16)


def read(folder, name):
    return json.loads((folder / name).read_text())


@pytest.fixture(scope="module")
def held_out(tiny_target):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target, config=PreTrainedConfig())
    return [tokenizer.encode(text)[:128] for text in read_corpus().held_out if len(text) > 300]


def losses_of(logits, ids):
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


def test_it_predicts_held_out_text_far_better_than_token_frequencies(tiny_target, held_out):
    model = load_target(tiny_target, torch.float32)
    with torch.no_grad():
        losses = torch.cat([losses_of(model(torch.tensor([ids])).logits, torch.tensor([ids])) for ids in held_out])
    # The frequencies of the very tokens that are predicted: no unigram can do better than this one.
    counts = Counter(i for ids in held_out for i in ids[1:])
    total = counts.total()
    unigram = -sum(n / total * math.log(n / total) for n in counts.values())
    assert losses.mean().item() < unigram - 1.0
    # What training.json says is of whole held-out documents, the short ones among them.
    assert losses.mean().item() == pytest.approx(read(tiny_target, "training.json")["held_out_loss_nats"], abs=0.25)


@pytest.mark.slow
@pytest.mark.demo
def test_the_demos_target_predicts_better_than_pairs_of_tokens_and_reads_far_back(demo_lock):
    with demo_lock:
        folder = make_target(DEMO, cache_root())
    tokenizer = AutoTokenizer.from_pretrained(folder, config=PreTrainedConfig())
    trained, held_out = (pack(tokenizer, part).tolist() for part in (read_corpus().train, read_corpus().held_out))
    pairs, singles = Counter(itertools.pairwise(trained)), Counter(trained)
    weight = 5  # of the unigram in each bigram; 1 and 20 change the loss by 0.01
    bigram = [
        -math.log((pairs[a, b] + weight * (singles[b] + 1) / len(trained)) / (singles[a] + weight))
        for a, b in itertools.pairwise(held_out)
    ]
    assert read(folder, "training.json")["held_out_loss_nats"] < sum(bigram) / len(bigram) - 0.3

    model = load_target(folder, torch.float32)
    ids = torch.tensor(held_out[: len(held_out) // 128 * 128]).view(-1, 128)
    with torch.no_grad():
        far = losses_of(model(ids).logits[:, 95:], ids[:, 95:]).mean()
        near = losses_of(model(ids[:, 91:]).logits[:, 4:], ids[:, 95:]).mean()
    assert far < near - 0.02


def test_the_config_is_spelled_as_kimi_k2(tiny_target):
    config = read(tiny_target, "config.json")
    assert config["model_type"] == "kimi_k2"
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["rope_theta"] == 50000.0
    assert config["rope_scaling"]["type"] == "yarn"
    assert (config["num_nextn_predict_layers"], config["n_group"], config["topk_method"]) == (0, 1, "noaux_tc")
    # Other than the defaults of transformers' config class, so that falling back to them is noticed.
    assert (config["pad_token_id"], config["bos_token_id"], config["eos_token_id"]) == (0, 1, 2)
    assert "rope_parameters" not in config
    assert read(tiny_target, "generation_config.json")["eos_token_id"] == 2
    assert default_outputs(read_target_config(tiny_target).layers) == (1, 2, 3)


@pytest.mark.parametrize("recipe", [DEMO, TEST])
def test_the_dims_are_ones_that_vllm_serves_on_a_cpu(recipe):
    # https://github.com/vllm-project/vllm: its MLA kernel for CPU takes one head size, and its experts whole vectors.
    assert recipe.kv_lora_rank + recipe.qk_rope_head_dim == 576
    assert recipe.hidden_size % 32 == 0
    # With VLLM_MLA_DISABLE=1, which an MHA or GQA head needs there, the target's own head size counts.
    assert recipe.qk_nope_head_dim + recipe.qk_rope_head_dim in (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def test_the_weights_stand_under_the_hubs_names(tiny_target):
    with safe_open(tiny_target / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in list(file.keys())}
        biases = [file.get_tensor(name) for name in shapes if name.endswith("e_score_correction_bias")]
        dtypes = {file.get_slice(name).get_dtype() for name in shapes}
    expert = "model.layers.1.mlp.experts.3"
    assert shapes[f"{expert}.gate_proj.weight"] == [TEST.moe_intermediate_size, TEST.hidden_size]
    assert shapes[f"{expert}.down_proj.weight"] == [TEST.hidden_size, TEST.moe_intermediate_size]
    assert shapes["model.layers.0.mlp.up_proj.weight"] == [TEST.intermediate_size, TEST.hidden_size]
    assert shapes["model.layers.6.self_attn.kv_a_proj_with_mqa.weight"] == [576, TEST.hidden_size]
    assert shapes["lm_head.weight"] == shapes["model.embed_tokens.weight"] == [512, TEST.hidden_size]
    assert dtypes == {"F32"}
    # Balanced by their bias, so that a reader which forgets it routes otherwise.
    assert len(biases) == TEST.num_hidden_layers - 1
    assert all(bias.abs().max() > 0 for bias in biases)


def test_no_expert_lies_idle(tiny_target, held_out):
    model = load_target(tiny_target, torch.float32)
    shares = []

    def count(gate, _args, output):
        shares.append(torch.bincount(output[2].flatten(), minlength=gate.num_experts) / output[2].numel())

    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(count)
    with torch.no_grad():
        model(torch.tensor([ids for ids in held_out if len(ids) == 128]))
    assert torch.stack(shares).min() > 0.05


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Return a quick target, the cache that it is in, and the steps that were told."""
    steps, cache = [], tmp_path_factory.mktemp("quick")
    torch.manual_seed(5)
    return make_target(QUICK, cache, lambda *step: steps.append(step)), cache, steps


def test_more_prompts_than_there_are_texts_are_refused(tiny_target, tmp_path):
    """Those for evaluation would go first, without a word."""
    with pytest.raises(PromptsInvalid, match=r"5000 held-out prompts of 96 tokens are more than the \d+"):
        write_tiny(tmp_path / "out", "test", prompts=5000, prompt_tokens=96)
    write_tiny(tmp_path / "out", "test", prompts=8, prompt_tokens=96)
    written = {file.stem: len(file.read_text().splitlines()) for file in (tmp_path / "out").glob("*.jsonl")}
    assert written["held-out"] == 8 and written["eval"] == EVALUATED


def test_the_same_recipe_is_not_made_twice(quick):
    first, cache, steps = quick
    assert [(done, of) for done, of, _ in steps] == [(1, 2), (2, 2)]
    before = {file: file.stat().st_mtime_ns for file in first.iterdir()}
    again = make_target(dataclasses.replace(QUICK), cache, lambda *step: steps.append(step))
    assert again == first
    assert len(steps) == 2
    assert {file: file.stat().st_mtime_ns for file in first.iterdir()} == before


def test_the_same_recipe_gives_the_same_target_elsewhere_and_another_one_another(quick, tmp_path):
    first = quick[0]
    torch.manual_seed(6)
    state = torch.get_rng_state()
    second = make_target(QUICK, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.name == second.name
    assert sorted(f.name for f in first.iterdir()) == sorted(f.name for f in second.iterdir())
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    other = make_target(dataclasses.replace(QUICK, seed=1), tmp_path)
    assert other != second and other.parent == second.parent


def _make(cache, barrier, queue):
    def meet(done, of, _loss):
        if done == of:
            barrier.wait(60)  # both have found nothing, and both are about to write

    queue.put(make_target(QUICK, cache, meet))


@pytest.mark.slow
def test_two_processes_that_race_end_with_one_whole_target(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    racers = [context.Process(target=_make, args=(tmp_path, barrier, queue)) for _ in range(2)]
    for racer in racers:
        racer.start()
    outs = {queue.get(timeout=120) for _ in racers}
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0]
    assert [*tmp_path.iterdir()] == [*outs]
    load_target(outs.pop(), torch.float32)


def test_a_stopped_training_leaves_nothing(tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_target(QUICK, tmp_path, stop)
    assert not any(tmp_path.iterdir())


def test_a_loss_that_is_no_number_is_named(tmp_path):
    with pytest.raises(TrainingFailed, match="loss is"):
        make_target(dataclasses.replace(QUICK, steps=20, lr=1e30, ends_lr=1e30, warmup=1), tmp_path)
    assert not any(tmp_path.iterdir())


def test_the_recipe_is_in_the_config_except_for_the_training():
    class Ids:
        bos_token_id, eos_token_id, pad_token_id = 1, 2, 0

    config = kimi_config(DEMO, Ids)
    assert config["hidden_size"] == DEMO.hidden_size
    assert not {"steps", "batch", "lr", "seed", "balance"} & config.keys()
