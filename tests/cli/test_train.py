"""`kconv train`, as a user runs it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from tokenizers import Tokenizer

from kconv.cli import main
from kconv.tiny.text import read_corpus

SETTINGS = {
    "attention": '{"heads": 4, "kv_heads": 2, "head_dim": 16}',
    "intermediate": "64",
    "captured": "[1, 3, 5]",
    "batch": "4",
    "seq": "24",
    "batches": "6",
    "steps": "12",
    "lr": "3e-3",
    "dtype": "F32",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in read_corpus().train[:40]) + "\n")
    return file


def run(*words: object, settings: dict[str, str] = SETTINGS) -> Result:
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return CliRunner().invoke(main, ["train", *map(str, words), "--recipe", "eagle3-gqa", *given])


@pytest.fixture(scope="module")
def head(tiny_target, data, tmp_path_factory) -> tuple[Path, Result]:
    """Return a head that the command trained, and what it printed."""
    out = tmp_path_factory.mktemp("trained") / "head"
    return out, run(tiny_target, out, "--data", data)


def test_a_head_is_trained_and_the_next_command_is_named(head, tiny_target, data, tmp_path):
    out, done = head
    assert done.exit_code == 0, done.output
    assert "acceptance length" in done.stdout
    assert "next: kconv to-vllm" in done.stdout
    following = CliRunner().invoke(main, ["to-vllm", str(out), str(tmp_path / "vllm")])
    assert following.exit_code == 0, following.output
    training = json.loads((out / "kconv.json").read_text())["training"]
    assert training["recipe"]["lr"] == 3e-3
    assert training["data"]["name"] == str(data)
    # What it was trained on is no held-out text, whichever command reads it, nor after a conversion.
    seen, suite = tmp_path / "seen.jsonl", tmp_path / "suite.jsonl"
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    seen.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    suite.write_text(json.dumps({"prompt": "Why is the sky blue?"}) + "\n" + seen.read_text())
    for command in (
        ["validate", tmp_path / "vllm", "--prompts", seen, "--target", tiny_target],
        ["bench", "--head", tmp_path / "vllm", "--suite", suite, "--out", tmp_path / "a.json", "--target", tiny_target],
        ["bench", "--head", out, "--suite", suite, "--out", tmp_path / "a.json",
         "--url", "http://127.0.0.1:9"],
    ):  # fmt: skip
        refused = CliRunner().invoke(main, [str(word) for word in command])
        assert refused.exit_code == 1 and "was trained or calibrated on" in refused.stderr, refused.output


def test_layers_that_an_engine_could_take_for_inputs_are_the_recipes_outputs(tiny_target, data, tmp_path):
    done = run(tiny_target, tmp_path / "out", "--data", data, settings=SETTINGS | {"captured": "2,4,6", "steps": "2"})
    assert done.exit_code == 0, done.output
    words = ["to-vllm", tmp_path / "out", tmp_path / "vllm", "--captured-are", "outputs"]
    assert CliRunner().invoke(main, [str(word) for word in words]).exit_code == 0
    assert json.loads((tmp_path / "vllm" / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [3, 5, 7]


def test_a_head_is_trained_on_from_another_layout(head, tiny_target, data, tmp_path):
    assert CliRunner().invoke(main, ["to-vllm", str(head[0]), str(tmp_path / "vllm")]).exit_code == 0
    few = {key: SETTINGS[key] for key in ("batch", "seq", "batches", "steps", "lr")}
    done = run(tiny_target, tmp_path / "two", "--data", data, "--init-from", tmp_path / "vllm", settings=few)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "two" / "kconv.json").read_text())["training"]["started_from"].endswith("vllm")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": "1"}, "learning_rate"),
        ({"captured": "[1, 3, 9]"}, "captures layer 9"),
        ({"batches": "100000"}, "rows"),
    ],
)
def test_a_recipe_that_cannot_be_is_one_message_and_nothing_is_made(tiny_target, data, tmp_path, settings, message):
    done = run(tiny_target, tmp_path / "head", "--data", data, settings=SETTINGS | settings)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "head").exists()


def test_a_head_that_no_engine_could_load_is_refused_before_the_target_is_downloaded(
    tiny_target, data, tmp_path, monkeypatch
):
    def fetch(*_):
        raise AssertionError("the target was asked for")

    monkeypatch.setattr("kconv.checkpoint.source.Folder.fetch_model", fetch)
    rope = {"theta": 10000.0, "scaling": {"factor": 8.0, "original_max_positions": 64, "mscale_all_dim": 1.0}}
    dims = {"heads": 2, "q_lora_rank": 32, "kv_lora_rank": 512}
    dims |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
    settings = SETTINGS | {"attention": json.dumps(dims), "rope": json.dumps(rope)}
    done = run(tiny_target, tmp_path / "head", "--data", data, settings=settings)
    assert done.exit_code == 1
    assert "mscale" in done.stderr


def test_data_of_which_all_would_be_held_out_is_named(tiny_target, tmp_path):
    (data := tmp_path / "two.jsonl").write_text('{"text": "A day in May."}\n{"text": "A night in June."}\n')
    done = run(tiny_target, tmp_path / "head", "--data", data)
    assert done.exit_code == 1 and "it holds 2 samples, all of which would be held out" in done.output
    assert "--held-out FILE" in done.output and not (tmp_path / "head").exists()


def test_the_coverage_of_a_draft_vocabulary_is_printed_and_special_tokens_are_kept(tiny_target, data, tmp_path):
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("\n".join(json.dumps({"text": text}) for text in read_corpus().held_out[:20]) + "\n")
    reduced = SETTINGS | {"draft_vocab": "96"}
    done = run(tiny_target, tmp_path / "head", "--data", data, "--held-out", held_out, settings=reduced)
    assert done.exit_code == 0, done.output

    tokenizer = Tokenizer.from_file(str(tiny_target / "tokenizer.json"))
    lines = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    counts = Counter(token for text in lines for token in tokenizer.encode(text).ids)
    specials = set(tokenizer.get_added_tokens_decoder())
    assert len(specials) == 3 and not specials & counts.keys()
    d2t = load_file(tmp_path / "head" / "model.safetensors")["d2t"]
    kept = set((d2t + torch.arange(96)).tolist())
    assert specials <= kept
    # A document's last row is left out where one token is all it holds: no draft is possible in it.
    said = json.loads((tmp_path / "head" / "kconv.json").read_text())["training"]["draft_vocab"]
    share = sum(count for token, count in counts.items() if token in kept) / counts.total()
    assert said["share"] == pytest.approx(share, abs=2e-3)
    assert said["tokens"] == pytest.approx(counts.total(), rel=5e-3)
    assert f"draft vocabulary of 96: {said['share']:.2%} of {said['tokens']:,} training tokens" in done.stdout


@pytest.mark.parametrize("settings", [{"learning_rate": "1"}, {"seq": "many"}, {"passes": "0"}, {"accumulate": "0"}])
@pytest.mark.parametrize("source", ["--data", "--states"])
def test_a_bad_key_or_value_is_refused_before_any_data_is_read(tiny_target, tmp_path, settings, source):
    done = run(tiny_target, tmp_path / "head", source, tmp_path / "no-such-data", settings=SETTINGS | settings)
    assert done.exit_code == 1
    assert next(iter(settings)) in done.stderr
    assert "no-such-data" not in done.stderr


@pytest.mark.parametrize("more", [(), ("--data", "a", "--states", "b")])
def test_either_data_or_states(tiny_target, tmp_path, more):
    assert run(tiny_target, tmp_path / "head", *more).exit_code == 2


def test_an_existing_output_is_refused_before_anything_is_read(tiny_target, data, tmp_path):
    (tmp_path / "head").mkdir()
    done = run(tiny_target, tmp_path / "head", "--data", data)
    assert done.exit_code == 1
    assert "already exists" in done.stderr
