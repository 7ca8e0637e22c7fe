"""Training from stored states is training on the target itself."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from kconv.checkpoint.source import Folder
from kconv.cli import main
from kconv.errors import OutputExists, StatesInvalid, TrainingDataInvalid
from kconv.targets.config import read_target_config
from kconv.targets.model import find_ends, load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.text import read_corpus
from kconv.train.data import place_sequences
from kconv.train.feed import Online
from kconv.train.job import TrainJob, offline_job
from kconv.train.recipe import read_recipe_file
from kconv.train.run import train

VALUES = {
    "attention": {"heads": 4, "kv_heads": 2, "head_dim": 16},
    "rope": {"theta": 10000.0},
    "intermediate": 64,
    "captured": [1, 3, 5],
    "batch": 4,
    "seq": 24,
    "steps": 12,
    "dtype": "F32",
}


def store(target: Path, folder: Path, tokens: int, dtype: str = "F32", seq: int = 4096) -> Path:
    """Store the states of forty texts, of so many tokens each, with tables of rows of `seq` tokens."""
    texts = [text for text in read_corpus().held_out if len(text) > 200][:40]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts) + "\n")
    asked = ["states", target, folder / "states", "--prompts", folder / "prompts.jsonl", "--captured", "1,3,5"]
    done = CliRunner().invoke(
        main, [str(word) for word in [*asked, "--text-tokens", tokens, "--dtype", dtype, "--seq", seq]]
    )
    assert done.exit_code == 0, done.output
    return folder / "states"


@pytest.fixture(scope="module")
def states(tiny_target, tmp_path_factory):
    return store(tiny_target, tmp_path_factory.mktemp("states"), 60)


@pytest.fixture
def job(tiny_target, states) -> TrainJob:
    return offline_job(tiny_target, read_target_config(tiny_target), load_tokenizer(tiny_target), VALUES, states, None)


def test_offline_is_online(job, tiny_target, tmp_path):
    def online():
        target = load_target(tiny_target, torch.float32)
        return Online(target, job.recipe.captured), Online(target, job.recipe.captured)

    # Where a row is the beginning of its sequence, the target sees the same tokens.
    stored = job.states()[0]
    begins = [row for row, ((_, start, _),) in enumerate(stored._places) if start == 0]
    rows = torch.tensor(begins)
    for part, other in zip(
        stored.read(rows, job.text.ids[rows]), online()[0].read(rows, job.text.ids[rows]), strict=True
    ):
        real = job.text.mask[rows]
        assert torch.allclose(part[real], other[real], atol=1e-5)
    offline = train(job, tmp_path / "offline")
    trained = json.loads((offline / "kconv.json").read_text())["training"]
    same = dataclasses.replace(job, states=online)
    beside = json.loads((train(same, tmp_path / "online") / "kconv.json").read_text())["training"]
    learned = beside["untrained"]["loss"] - beside["trained"]["loss"]
    assert learned > 0
    assert trained["trained"]["loss"] == pytest.approx(beside["trained"]["loss"], abs=0.2 * learned)


@pytest.fixture
def one_thread():
    """Sum in one order: threads cut sums by the batch, and Muon gives a direction of mere rounding its full step."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_over_the_same_rows_offline_and_online_end_with_the_same_weights(tiny_target, tmp_path):
    # A text is one row, so the target sees the same tokens before each.
    folder = store(tiny_target, tmp_path, VALUES["seq"])
    config, tokenizer = read_target_config(tiny_target), load_tokenizer(tiny_target)
    offline = offline_job(tiny_target, config, tokenizer, VALUES, folder, None)
    target = load_target(tiny_target, torch.float32)
    seen = Online(target, offline.recipe.captured), Online(target, offline.recipe.captured)
    online = dataclasses.replace(offline, states=lambda: seen)
    one, other = (
        load_file(train(job, tmp_path / name) / "model.safetensors") for job, name in ((offline, "a"), (online, "b"))
    )
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-3, atol=1e-4)


def test_no_prompt_is_both_trained_on_and_looked_at(states, job):
    from kconv.targets.states import open_states

    stored = open_states(states)
    parts = [place_sequences(stored, 24, held_out=held_out).places for held_out in (False, True)]
    digests = [{stored.sequences[sequence].digest for ((sequence, *_),) in places} for places in parts]
    assert not digests[0] & digests[1]
    assert len(digests[0] | digests[1]) == len({record.digest for record in stored.sequences})


def test_the_layers_are_not_needed(job, tiny_target, tmp_path):
    """A target of which nothing but its ends is there."""
    weights = load_file(tiny_target / "model.safetensors")
    ends = {name: weight for name, weight in weights.items() if ".layers." not in name}
    assert len(ends) < len(weights)
    folder = tmp_path / "ends"
    folder.mkdir()
    save_file(ends, folder / "model.safetensors")
    (folder / "config.json").write_bytes((tiny_target / "config.json").read_bytes())
    out = train(dataclasses.replace(job, target=folder, ends=find_ends(Folder(folder))), tmp_path / "head")
    assert (out / "kconv.json").exists()


def noisy(target: Path, folder: Path) -> Path:
    """Return a copy of a target whose layers are others, as another quantization of it would be."""
    weights = load_file(target / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    shutil.copytree(target, folder)
    save_file(weights | {name: weights[name] * 1.01}, folder / "model.safetensors")
    return folder


MADE_AGAIN = {
    "in another dtype": (lambda target, _: target, "BF16"),
    "from other weights": (lambda target, folder: noisy(target, folder / "noisy"), "F32"),
}


@pytest.mark.parametrize("how", [pytest.param("in another dtype", marks=pytest.mark.slow), "from other weights"])
def test_a_run_is_not_gone_on_with_over_states_that_were_made_again(tiny_target, tmp_path, how):
    target_of, dtype = MADE_AGAIN[how]

    def stop(*_):
        raise KeyboardInterrupt

    def stored_job(target: Path) -> TrainJob:
        config, tokenizer = read_target_config(target), load_tokenizer(target)
        return offline_job(target, config, tokenizer, VALUES, tmp_path / "states", None)

    store(tiny_target, tmp_path, VALUES["seq"])
    before = stored_job(tiny_target)
    with pytest.raises(KeyboardInterrupt):
        train(before, tmp_path / "head", progress=stop)
    shutil.rmtree(tmp_path / "states")
    other = target_of(tiny_target, tmp_path)
    store(other, tmp_path, VALUES["seq"], dtype)
    after = stored_job(other)
    assert torch.equal(before.text.ids, after.text.ids) and torch.equal(before.unseen.ids, after.unseen.ids)
    with pytest.raises(OutputExists, match=r"the data was another then|the target and the data were others then"):
        train(after, tmp_path / "head")
    shutil.rmtree(tmp_path / "states")
    store(tiny_target, tmp_path, VALUES["seq"])
    said = json.loads((train(stored_job(tiny_target), tmp_path / "head") / "kconv.json").read_text())["training"][
        "data"
    ]
    assert (said["dtype"], said["sha256"]) == ("F32", before.data["sha256"])


def test_layers_that_were_not_stored_are_refused(tiny_target, states):
    config, tokenizer = read_target_config(tiny_target), load_tokenizer(tiny_target)
    with pytest.raises(StatesInvalid, match="layers"):
        offline_job(tiny_target, config, tokenizer, VALUES | {"captured": [0, 3, 5]}, states, None)


def test_a_recipe_of_kconv_s_warms_up_for_a_tenth_of_a_short_run_over_states(tiny_target, states):
    config, tokenizer = read_target_config(tiny_target), load_tokenizer(tiny_target)
    values = read_recipe_file("eagle3-gqa") | {"seq": 64, "batch": 2, "steps": 20}
    assert offline_job(tiny_target, config, tokenizer, values, states, None).recipe.warmup == 2


def test_states_of_another_target_are_refused(tiny_target, states):
    config = dataclasses.replace(read_target_config(tiny_target), layers=9)
    with pytest.raises(StatesInvalid, match="another target"):
        offline_job(tiny_target, config, load_tokenizer(tiny_target), VALUES, states, None)


def test_states_of_too_few_prompts_are_refused(states):
    from kconv.targets.states import open_states

    stored = open_states(states)
    shard = stored.shards[0].model_copy(update={"count": 3})
    few = stored.contents.model_copy(update={"sequences": stored.sequences[:3], "shards": (shard,)})
    record = stored.record.model_copy(update={"sequences": {"held-out": 3}})
    with pytest.raises(TrainingDataInvalid, match="rows"):
        place_sequences(dataclasses.replace(stored, record=record, given=few), 24, held_out=False)
