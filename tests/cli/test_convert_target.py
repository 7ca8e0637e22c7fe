"""`to-sglang`, `to-portable` and the options that every conversion has: --target, --drop-shared, --dtype."""

import json
from dataclasses import dataclass, replace
from hashlib import sha256
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save, save_file
from support.heads import FITTING_GQA, GQA, MLA, random_slots, read_bytes, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.cli import main
from kconv.drafters.chain import draft_tokens
from kconv.drafters.forward import DraftHead
from kconv.drafters.spec import Rope, Yarn
from kconv.engines import BY_NAME
from kconv.measure.figures import ReadingsDecided
from kconv.targets.config import read_target_config
from kconv.targets.forward import LocalRunner
from kconv.targets.model import load_target
from kconv.targets.options import StatesOptions
from kconv.targets.tokenizer import load_tokenizer
from kconv.targets.write_states import write_states
from kconv.tiny.text import read_corpus

MLA, GQA = replace(MLA, captured=(1, 3, 5)), replace(GQA, captured=(1, 3, 5))
MATRICES = {"lm_head": torch.arange(64 * 48).reshape(64, 48).bfloat16(), "embed_tokens": torch.ones(64, 48).bfloat16()}
TARGET = {
    "model_type": "kimi_k2", "hidden_size": 48, "num_hidden_layers": 9, "vocab_size": 64,
    "num_attention_heads": 4, "max_position_embeddings": 1024,
}  # fmt: skip
TENSORS = {"lm_head.weight": MATRICES["lm_head"], "model.embed_tokens.weight": MATRICES["embed_tokens"]}


def kconv(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET))
    save_file(TENSORS, folder / "model.safetensors")
    return folder


@pytest.fixture
def lean(tmp_path):
    return write_head(tmp_path / "head", BY_NAME["vllm"], MLA, random_slots(MLA, without=tuple(MATRICES)))


def written(folder):
    return load_file(folder / "model.safetensors"), json.loads((folder / "kconv.json").read_text())


@pytest.mark.parametrize("name", ["sglang", "portable"])
def test_an_lm_head_is_asked_for_and_taken_from_the_target(tmp_path, lean, target, name):
    out = tmp_path / "out"
    refused = kconv(f"to-{name}", lean, out)
    assert refused.exit_code == 1 and "--target" in refused.stderr and not out.exists()
    planned = kconv(f"to-{name}", lean, out, "--target", target, "--dry-run")
    assert planned.exit_code == 0 and "added" in planned.stdout and not out.exists()
    assert kconv(f"to-{name}", lean, out, "--target", target).exit_code == 0
    tensors, manifest = written(out)
    assert torch.equal(tensors["lm_head.weight"], MATRICES["lm_head"])
    assert manifest["exact"] and manifest["layout"] == name
    assert kconv("verify", out, lean).exit_code == 0


def test_of_a_hubs_target_only_the_shard_in_question_is_fetched(tmp_path, lean, hub):
    shards = {"model-1.safetensors": TENSORS, "model-2.safetensors": {"x": torch.zeros(512, 512)}}
    placed = {name: shard for shard, tensors in shards.items() for name in tensors}
    files = {name: save(tensors) for name, tensors in shards.items()}
    index = {"model.safetensors.index.json": json.dumps({"weight_map": placed}).encode()}
    hub.commit("org/target", {"config.json": json.dumps(TARGET).encode()} | index | files)

    def sent(name):
        return hub.sent(sha256(files[name]).hexdigest())

    assert kconv("to-portable", lean, tmp_path / "out", "--target", "org/target", "--dry-run").exit_code == 0
    headers = sent("model-2.safetensors")
    assert 0 < headers < 512 * 512 and 0 < sent("model-1.safetensors") < 2 * 64 * 48 * 2, "a dry run reads headers"
    assert kconv("to-portable", lean, tmp_path / "out", "--target", "org/target").exit_code == 0
    assert torch.equal(written(tmp_path / "out")[0]["lm_head.weight"], MATRICES["lm_head"])
    assert sent("model-1.safetensors") > len(files["model-1.safetensors"])
    assert sent("model-2.safetensors") == 2 * headers
    assert kconv("to-vllm", lean, tmp_path / "vllm", "--target", "org/target").exit_code == 0
    assert "lm_head.weight" not in written(tmp_path / "vllm")[0]


@pytest.mark.parametrize("name, code", [("sglang", 1), ("trtllm", 1), ("portable", 1), ("vllm", 0)])
def test_a_hubs_embedding_is_fetched_where_it_is_served_in_place_of_the_heads(tmp_path, hub, name, code):
    own = random_slots(GQA)
    head = write_head(tmp_path / "head", BY_NAME["trtllm"], GQA, own)
    config = json.dumps(TARGET).encode()
    hub.commit("org/another", {"config.json": config, "model.safetensors": save(TENSORS)})
    same = save(TENSORS | {"model.embed_tokens.weight": own["embed_tokens"]})
    hub.commit("org/same", {"config.json": config, "model.safetensors": same})
    shown = kconv(f"to-{name}", head, tmp_path / "out", "--target", "org/another")
    assert shown.exit_code == code and ("embed_tokens differs from the target" in shown.stderr) is bool(code)
    assert (tmp_path / "out").exists() is not bool(code)
    assert kconv(f"to-{name}", head, tmp_path / "same", "--target", "org/same").exit_code == 0


def test_what_equals_the_targets_is_left_out_when_asked(tmp_path, target):
    head = write_head(tmp_path / "head", BY_NAME["trtllm"], GQA, random_slots(GQA) | MATRICES)
    planned = kconv("to-vllm", head, tmp_path / "out", "--target", target, "--drop-shared", "--dry-run")
    assert planned.stdout.count("dropped") == 2
    assert kconv("to-vllm", head, tmp_path / "out", "--target", target, "--drop-shared").exit_code == 0
    tensors, manifest = written(tmp_path / "out")
    dropped = {record["name"] for record in manifest["dropped"]}
    assert dropped == {"lm_head.weight", "embed_tokens.weight"} and not dropped & tensors.keys()
    assert kconv("verify", tmp_path / "out", head).exit_code == 0
    apart = write_head(tmp_path / "apart", BY_NAME["trtllm"], GQA, random_slots(GQA))
    said = kconv("to-vllm", apart, tmp_path / "kept", "--target", target, "--drop-shared")
    assert said.exit_code == 0 and "--drop-shared leaves nothing out" in said.stderr
    asked = kconv("to-vllm", head, tmp_path / "other", "--drop-shared")
    assert asked.exit_code == 2 and "--target" in asked.stderr


def test_a_target_of_which_only_the_config_is_here_decides_depth(tmp_path, lean, target):
    (target / "model.safetensors").unlink()
    assert kconv("to-vllm", lean, tmp_path / "out", "--target", target).exit_code == 0
    refused = kconv("to-portable", lean, tmp_path / "portable", "--target", target)
    assert refused.exit_code == 1 and "lm_head" in refused.stderr


def test_of_a_target_that_was_fetched_in_part_only_the_shard_in_question_need_be_there(tmp_path, lean, target):
    (target / "model.safetensors").unlink()
    shards = {"lm_head.weight": "model-1.safetensors", "model.embed_tokens.weight": "model-2.safetensors"}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    out = tmp_path / "portable"
    refused = kconv("to-portable", lean, out, "--target", target)
    assert refused.exit_code == 1 and "model-1.safetensors, which is missing" in refused.stderr and not out.exists()
    save_file({"lm_head.weight": MATRICES["lm_head"]}, target / "model-1.safetensors")
    assert kconv("to-portable", lean, out, "--target", target).exit_code == 0
    assert torch.equal(written(out)[0]["lm_head.weight"], MATRICES["lm_head"])
    # A conversion that takes nothing of the target asks for no shard; one that compares its embedding for that one.
    head = write_head(tmp_path / "own", BY_NAME["trtllm"], GQA, random_slots(GQA))
    (target / "model-1.safetensors").unlink()
    assert kconv("to-vllm", head, tmp_path / "vllm", "--target", target).exit_code == 0
    assert written(tmp_path / "vllm")[1]["parameters_by_origin"]["unknown"] > 0
    for name, more in (("sglang", []), ("vllm", ["--drop-shared"])):
        refused = kconv(f"to-{name}", head, tmp_path / "other", "--target", target, *more)
        assert refused.exit_code == 1 and ", which is missing" in refused.stderr
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("context, reach, said", [(1024, None, ""), (4096, None, "4096"), (4096, 2048, "2048")])
def test_a_longer_context_of_the_targets_is_said_and_not_claimed_for_the_head(tmp_path, target, context, reach, said):
    (target / "config.json").write_text(json.dumps(TARGET | {"max_position_embeddings": context}))
    spec = replace(GQA, rope=Rope(1e4, Yarn(reach / 64, 64))) if reach else GQA
    head = write_head(tmp_path / "head", BY_NAME["vllm"], spec, random_slots(spec))
    words = "to-vllm", head, tmp_path / "out", "--target", target
    line = f"max_position_embeddings: 1024, as the head states, but the target has {context}."
    for more in (["--dry-run"], []):
        shown = kconv(*words, *more)
        assert shown.exit_code == 0 and (line in shown.stderr) is bool(said)
        assert shown.stderr.rstrip().endswith(f"--max-positions {said}") or not said
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 1024
    if said:
        raised = kconv(words[0], head, tmp_path / "raised", *words[3:], "--max-positions", said)
        assert "max_position_embeddings" not in raised.stderr
        assert json.loads((tmp_path / "raised" / "config.json").read_text())["max_position_embeddings"] == int(said)
        assert written(tmp_path / "raised")[1]["hints"]["max_positions"] == int(said)


OTHERS = {
    "another vocabulary": {"vocab_size": 128},
    "another width": {"hidden_size": 96},
    "both": {"hidden_size": 96, "vocab_size": 128},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("command", ["to-vllm", "to-sglang"])
def test_another_models_target_is_refused(tmp_path, target, command, change):
    head = write_head(tmp_path / "head", BY_NAME["trtllm"], GQA, random_slots(GQA) | MATRICES)
    out = [tmp_path / "out"]
    (target / "config.json").write_text(json.dumps(TARGET | change))
    refused = kconv(command, head, *out, "--target", target)
    assert refused.exit_code == 1 and "hidden states of width 48 and a vocabulary of 64" in refused.stderr
    assert f"where: {target}" in refused.stderr and not (tmp_path / "out").exists()
    (target / "config.json").write_text(json.dumps(TARGET))
    assert kconv(command, head, *out, "--target", target).exit_code == 0


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_another_models_target_is_shown_to_be_that(tmp_path, target, change):
    head = write_head(tmp_path / "head", BY_NAME["trtllm"], GQA, random_slots(GQA) | MATRICES)
    (target / "config.json").write_text(json.dumps(TARGET | change))
    shown = json.loads(kconv("inspect", head, "--target", target, "--json").stdout)
    assert any("hidden states of width 48 and a vocabulary of 64" in problem["what"] for problem in shown["problems"])
    (target / "config.json").write_text(json.dumps(TARGET))
    assert json.loads(kconv("inspect", head, "--target", target, "--json").stdout)["problems"] == []


def test_a_target_whose_class_in_sglang_captures_nothing_is_refused(tmp_path, target):
    head = write_head(tmp_path / "head", BY_NAME["trtllm"], GQA, random_slots(GQA) | MATRICES)
    (target / "config.json").write_text(json.dumps(TARGET | {"model_type": "mamba2"}))
    refused = kconv("to-sglang", head, tmp_path / "out", "--target", target)
    assert refused.exit_code == 1 and "model_type" in refused.stderr and not (tmp_path / "out").exists()
    assert kconv("to-vllm", head, tmp_path / "out", "--target", target).exit_code == 0


def test_a_head_of_another_width_than_its_targets_says_so_and_fits(tmp_path, target):
    spec = replace(GQA, target_hidden=56)
    head = write_head(tmp_path / "head", BY_NAME["trtllm"], spec, random_slots(spec))
    (target / "config.json").write_text(json.dumps(TARGET | {"hidden_size": 56}))
    assert kconv("inspect", head, "--target", target).exit_code == 0
    (target / "config.json").write_text(json.dumps(TARGET))
    refused = kconv("to-vllm", head, tmp_path / "out", "--target", target)
    assert refused.exit_code == 1 and "hidden states of width 56" in refused.stderr


def test_rounding_is_asked_for_by_name(tmp_path):
    spec = replace(GQA, dtype="F32")
    head = write_head(tmp_path / "head", BY_NAME["trtllm"], spec, random_slots(spec))
    assert kconv("to-vllm", head, tmp_path / "as-it-is").exit_code == 0
    assert {dtype for dtype, _, _ in read_bytes(tmp_path / "as-it-is").values()} == {"torch.float32"}
    assert kconv("to-vllm", head, tmp_path / "rounded", "--dtype", "bfloat16").exit_code == 0
    tensors, manifest = written(tmp_path / "rounded")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16} and manifest["exact"] is False
    assert kconv("verify", tmp_path / "rounded", head).exit_code == 0
    assert kconv("to-vllm", head, tmp_path / "other", "--dtype", "float16").exit_code == 2


def test_the_residual_is_told_where_readers_disagree(tmp_path):
    config = BY_NAME["vllm"].write_config(GQA)
    del config["norm_before_residual"]
    config |= {"speculators_model_type": "eagle3", "transformer_layer_config": {}}
    head = write_head(tmp_path / "head", BY_NAME["speculators"], GQA, random_slots(GQA), config)
    refused = kconv("to-vllm", head, tmp_path / "out")
    assert refused.exit_code == 1 and "--norm-before-residual" in refused.stderr
    for told, value in (("yes", True), ("no", False)):
        shown = kconv("inspect", head, "--norm-before-residual", told, "--json")
        assert json.loads(shown.stdout)["spec"]["norms"]["before_residual"] is value


THETA = 283461213.0


@dataclass(frozen=True)
class Agreeing(LocalRunner):
    """A target that always says what a head drafts first."""

    head: DraftHead

    def capture(self, tokens, captured):
        states, hidden = super().capture(tokens, captured)
        own, _ = super().capture(tokens, self.head.spec.captured)
        drafted = draft_tokens(self.head, tokens, own.float(), 1)[0]
        rows = self.model.lm_head.weight.float()[drafted]
        hidden = hidden.float()
        hidden[:, 1 : 1 + drafted.shape[1]] = 60 * rows / rows.square().sum(-1, keepdim=True)
        return states, hidden.to(self.model.lm_head.weight.dtype)


@pytest.fixture(scope="module")
def agreeing(tiny_target, tmp_path_factory):
    """Return a head without rope_theta in its config, and the states of a target that says what it drafts with one."""
    root = tmp_path_factory.mktemp("agreeing")
    spec = replace(FITTING_GQA, captured=(1, 3, 5), rope=Rope(THETA), dtype="F32")
    slots = random_slots(spec)
    for name, tensor in slots.items():
        if tensor.ndim == 2:
            slots[name] = tensor * (6 if name in ("0.q_proj", "0.k_proj", "lm_head") else 1) / tensor.shape[1] ** 0.5
    config = BY_NAME["vllm"].write_config(spec)
    write_head(root / "head", BY_NAME["vllm"], spec, slots, {k: v for k, v in config.items() if "rope" not in k})
    texts = [text[:300] for text in read_corpus().held_out if len(text) > 300][:8]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    runner = Agreeing(load_target(tiny_target, torch.float32), DraftHead(spec, slots))
    wanted = StatesOptions(prompts=str(root / "prompts.jsonl"), captured=(0, 1, 2, 3, 4, 5, 6), text_tokens=48)
    checkpoint, tokenizer = open_checkpoint(tiny_target), load_tokenizer(tiny_target)
    write_states(
        runner, checkpoint, read_target_config(tiny_target), tokenizer, wanted, root / "states", shard_bytes=1 << 30
    )
    return root


@pytest.mark.parametrize("given, refused", [("2,3,5", True), ("2,4,6", False), ("1,3,5", False)])
def test_layers_that_the_measurement_prefers_to_both_meanings_of_a_list_are_not_put_in_its_place(
    lean, target, tmp_path, monkeypatch, given, refused
):
    decided = ReadingsDecided(winner=0, beaten=(), confirmed=("captured",), undecided=())
    figures = SimpleNamespace(decided=decided, readings=[SimpleNamespace(facts={"captured": (1, 3, 5)})])
    report = SimpleNamespace(findings=(), figures=figures)
    monkeypatch.setattr("kconv.operations.validate.Validate.run", lambda *_: report)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    ran = kconv("to-vllm", lean, tmp_path / "out", "--target", target, "--prompts", prompts, "--captured", given)
    assert (ran.exit_code, (tmp_path / "out").exists()) == ((1, False) if refused else (0, True)), ran.output
    assert ("outputs of layers 1,3,5 are accepted more often" in ran.stderr) is refused


@pytest.mark.slow
def test_a_measured_base_is_written_with_every_digit(agreeing, tiny_target, tmp_path):
    beside = ("--target", tiny_target, "--states", agreeing / "states")
    done = kconv("to-vllm", agreeing / "head", tmp_path / "out", "--rope-theta", "283461213", *beside)
    assert done.exit_code == 0, done.output
    assert "config.json: rope_theta: measured: 283461213.0, acceptance length" in done.stderr
    manifest = written(tmp_path / "out")[1]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_theta"] == THETA
    assert manifest["spec"]["rope"]["theta"] == manifest["hints"]["rope_theta"] == THETA
    assert "rope_theta" not in {one["fact"] for one in manifest["unverified"]}
