"""What --dry-run says a training takes is what it takes: held against what torch allocates, and what is on the disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.good_heads import make_config
from support.heads import KIMI_MLA, write_sparse
from torch.profiler import ProfilerActivity, profile

from kconv.checkpoint.source import Folder
from kconv.cli import main
from kconv.drafters.spec import Gqa, Mla, Rope
from kconv.engines import by_name
from kconv.targets.config import parse_target_config, read_target_config
from kconv.targets.model import find_ends, load_ends
from kconv.train.dflash import build_block, run_block
from kconv.train.dflash_recipe import DFlashRecipe, DSparkRecipe
from kconv.train.drafter_recipe import DrafterRecipe, Sizes
from kconv.train.eagle_memory import attention_bytes, token_bytes
from kconv.train.evaluate import _shares, draft_head, head_state
from kconv.train.family import family_of
from kconv.train.loop import DrafterTrainer
from kconv.train.module import build_module, run_eagle
from kconv.train.plan import plan_training
from kconv.train.recipe import TEST_MLA

from .test_offline import VALUES, store

ROOT = Path(__file__).parent.parent.parent
# Kimi-K2's published text config, as far as a head goes by it.
KIMI = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168,
    "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 163840, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
    "torch_dtype": "bfloat16", "bos_token_id": 163584, "eos_token_id": 163585, "pad_token_id": 163839,
}  # fmt: skip
LEAN = dataclasses.replace(TEST_MLA, kernel="sdpa", optimizer="adamw", batch=1)
RECIPES = {
    # Kimi-K2's ratio of heads' dims to ranks, so that what counts there counts here.
    "mla": dataclasses.replace(
        LEAN, attention=Mla(16, 384, 128, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
    ),
    "gqa": dataclasses.replace(LEAN, attention=Gqa(16, kv_heads=4, head_dim=32)),
}


def seen_of(model, recipe: DrafterRecipe, length: int, run: Callable[..., Any] = run_eagle) -> tuple[int, int]:
    """Return the bytes that a forward pass leaves for the gradient, and the most that are held until it is there."""
    generator = torch.Generator().manual_seed(0)
    batch = {
        "input_ids": torch.randint(3, 512, (1, length), generator=generator),
        "loss_mask": torch.ones(1, length, dtype=torch.bool),
        "base_model_outputs": {
            "aux_hidden_states": torch.randn(1, length, 64 * len(recipe.captured), generator=generator),
            "base_model_hidden_states": torch.randn(1, length, 64, generator=generator),
        },
    }
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        # Of all that it returns, the Trainer holds the loss alone.
        loss = run(model, batch, recipe).loss
    assert loss.requires_grad
    pieces = pieces_of(seen)
    kept = sum(pieces)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss.backward()
    model.zero_grad()
    return kept, max(*accumulate(pieces), kept + max(accumulate(pieces_of(seen))))


def pieces_of(seen: profile) -> list[int]:
    """Return the size of each piece that was taken, or given back as a negative one, in the order of time."""
    found = seen.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    return [size for _, size in sorted((one.start_ns(), one.nbytes()) for one in found if one.name() == "[memory]")]


@pytest.mark.parametrize("compute", [None, "BF16"])
@pytest.mark.parametrize("kind", list(RECIPES))
def test_activations_are_what_torch_keeps_of_each_token(tiny_target, kind, compute):
    recipe = dataclasses.replace(RECIPES[kind], compute=compute)
    model = build_module(load_ends(find_ends(Folder(tiny_target)), torch.float32), recipe)
    model.train()
    seen_of(model, recipe, 64)
    (few, lower), (many, upper) = (seen_of(model, recipe, length) for length in (512, 1024))
    # Of a token, whatever is kept of a whole step: it grows with the tokens, and with nothing else.
    each = recipe.ttt_steps * token_bytes(recipe, 64)
    assert many - few == pytest.approx(512 * each, rel=0.15)
    assert upper - lower == pytest.approx(512 * (each + attention_bytes(recipe)), rel=0.2)


# Where the layers take the most, and where the loss does.
WIDE = {"attention": Gqa(16, kv_heads=4, head_dim=32), "intermediate": 256, "captured": (1, 3, 5)}
NARROW = {"attention": Gqa(2, kv_heads=1, head_dim=8), "intermediate": 16, "captured": (3,)}
OF_BLOCKS: dict[str, Any] = {"rope": Rope(50000.0), "mask": 511, "batch": 1}
BLOCKS = {
    "DFlash": DFlashRecipe(**WIDE, **OF_BLOCKS),
    "narrow DFlash": DFlashRecipe(**NARROW, **OF_BLOCKS),
    "narrow DFlash of the text's tokens": DFlashRecipe(**NARROW, **OF_BLOCKS, distill=False),
    "DSpark": DSparkRecipe(**WIDE, **OF_BLOCKS, markov_rank=16),
    "narrow recurrent DSpark": DSparkRecipe(**NARROW, **OF_BLOCKS, markov_rank=16, markov_kind="rnn"),
}


@pytest.mark.parametrize("compute", [None, "BF16"])
@pytest.mark.parametrize("kind", list(BLOCKS))
def test_a_block_drafters_step_takes_what_is_estimated(tiny_target, kind, compute):
    """With twice the tokens and four times the blocks."""
    config, seen, planned = read_target_config(tiny_target), [], []
    for length, anchors in ((256, 32), (512, 128)):
        recipe = dataclasses.replace(BLOCKS[kind], compute=compute, seq=length, anchors=anchors)
        model = build_block(load_ends(find_ends(Folder(tiny_target)), torch.float32), recipe).train()
        seen_of(model, recipe, 64, run_block)
        seen.append(seen_of(model, recipe, length, run_block))
        memory = plan_training(recipe, config).memory
        # A GPU computes softmax in fp32 under autocast. A CPU does not:
        # https://docs.pytorch.org/docs/2.13/amp.html#cpu-op-specific-behavior
        less = 4 * anchors * recipe.block * config.vocab if compute and getattr(recipe, "distill", False) else 0
        planned.append((memory["activations"] - less, memory["activations"] + memory["at once"] - less))
    for (few, many), (fewer, more), rel in zip(
        zip(*seen, strict=True), zip(*planned, strict=True), (0.15, 0.2), strict=True
    ):
        assert more - fewer == pytest.approx(many - few, rel=rel)
    # The copies of the weights in bf16 are kept too, and estimated by themselves.
    assert planned[1][1] == pytest.approx(seen[1][1], rel=0.2)


@pytest.mark.parametrize("kind", ["DFlash", "narrow DFlash", "narrow recurrent DSpark"])
def test_a_block_drafters_evaluation_takes_what_is_estimated(tiny_target, kind):
    """Scores of some blocks, or the logits of one place."""
    recipe = dataclasses.replace(BLOCKS[kind], seq=512, anchors=1)
    model = build_block(load_ends(find_ends(Folder(tiny_target)), torch.float32), recipe).train()
    family, config = family_of(recipe), read_target_config(tiny_target)
    head = draft_head(head_state(model, family), model, recipe.spec(config), family)
    generator = torch.Generator().manual_seed(0)
    states = {"aux_hidden_states": torch.randn(1, 512, 64 * len(recipe.captured), generator=generator),
              "base_model_hidden_states": torch.randn(1, 512, 64, generator=generator)}  # fmt: skip
    batch = {"input_ids": torch.randint(3, 512, (1, 512), generator=generator), "base_model_outputs": states}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, torch.no_grad():
        list(_shares(model, head, batch, recipe.draft_steps, family))
    memory = plan_training(recipe, config).memory
    planned = sum(memory[part] for part in ("activations", "at once", "more at an evaluation"))
    assert planned == pytest.approx(max(accumulate(pieces_of(seen))), rel=0.15)


@pytest.mark.parametrize(
    ("sizes", "shown"), [(Sizes(3000, 500, 4000), [3000, 500, 500]), (Sizes(3000, 500, 40), [3000, 500, 0]), (None, [])]
)
def test_what_a_batch_takes_is_what_its_recipe_says(tiny_target, sizes, shown):
    """A plan knows no recipe but by what it answers, so another family's is planned like kconv's own."""
    asked = []

    class Other(DFlashRecipe):
        def sizes(self, target, rows):
            asked.append(rows)
            return sizes

    recipe = Other(**WIDE, **OF_BLOCKS | {"batch": 4})
    memory = plan_training(recipe, read_target_config(tiny_target), processes=2).memory
    assert asked == [2]
    assert [memory[name] for name in ("activations", "at once", "more at an evaluation") if memory] == shown


def test_a_plan_at_kimi_k2s_dims_adds_up():
    config = parse_target_config(KIMI)
    mla = Mla(64, 1536, 512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    counts = {"batch": 8, "seq": 4096, "batches": 9279, "steps": 9279}
    recipe = dataclasses.replace(
        LEAN, attention=mla, intermediate=18432, captured=(1, 29, 57), compute="BF16", **counts
    )
    plan = plan_training(recipe, config, processes=8, rate=20_000)
    # As published heads of ModelOpt have them in 16 tensors (1.8 * 10^9), lm_head among them, which the target lends.
    assert plan.parameters + 163840 * 7168 == 1_841_199_104
    assert plan.tokens == 9279 * 8 * 4096
    assert plan.states == 4 * 7168 * 2 * plan.tokens
    assert plan.hours == pytest.approx(9279 * 8 * 4096 / 20_000 / 3600)
    alone = plan_training(recipe, config, processes=8, shard=True)
    assert alone.memory["optimizer"] * 8 == pytest.approx(plan.memory["optimizer"])
    assert alone.memory["activations"] == plan.memory["activations"]
    assert not plan_training(dataclasses.replace(recipe, kernel="eager"), config).memory
    # Of a row of 4,096 tokens: its logits of a step, the target's, and both as probabilities, in fp32. A batch of two
    # such rows holds more for the gradient.
    row = 4 * 4096 * 163840
    activations = plan.memory["activations"] + plan.memory["at once"]
    assert plan.memory["more at an evaluation"] + activations == pytest.approx(2 * row + 2 * row)
    assert plan_training(recipe, config, processes=4).memory["more at an evaluation"] == 0


def run(*words: object) -> str:
    done = CliRunner().invoke(main, ["train", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("kimi-*.yaml")))
def test_the_seeds_recipes_are_planned_without_their_data(example, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KIMI))
    more = []
    if example.endswith("continued.yaml"):
        layout = by_name("vllm")
        write_sparse(tmp_path / "head", layout, KIMI_MLA, make_config(layout, KIMI_MLA))
        more = ["--init-from", tmp_path / "head"]
    words = [tmp_path, tmp_path / "out", "--recipe", ROOT / "examples" / example, "--states", tmp_path / "none"]
    plan = json.loads(run(*words, *more, "--rate", 20_000, "--dry-run", "--json"))
    steps = {"continued": 9279, "112k": 14_000, "48k": 6000}[example.removesuffix(".yaml").rpartition("-")[2]]
    assert plan["steps"] == steps and plan["hours"] == pytest.approx(steps * 8 * 4096 / 20_000 / 3600)
    assert "about" in run(*words, *more, "--rate", 20_000, "--dry-run")
    assert not (tmp_path / "out").exists()


def test_states_without_a_layer_of_the_recipe_are_named_by_a_dry_run(tiny_target, tmp_path):
    states = store(tiny_target, tmp_path, 24)
    (tmp_path / "recipe.yaml").write_text(json.dumps(VALUES))
    words = ["train", tiny_target, tmp_path / "out", "--recipe", tmp_path / "recipe.yaml", "--states", states]
    done = CliRunner().invoke(main, [*map(str, words), "--set", "captured=0,2,6", "--dry-run"])
    assert done.exit_code == 1 and "are needed (as outputs)" in done.output


def test_layers_that_a_recipe_does_not_state_are_the_states_in_a_dry_run_as_in_a_run(tiny_target, tmp_path):
    states = store(tiny_target, tmp_path, 24)  # of layers that are not this target's default
    words = ["train", tiny_target, tmp_path / "out", "--recipe", "eagle3-mla", "--states", states, "--dry-run"]
    done = CliRunner().invoke(main, [*map(str, words), "--set", "seq=24", "--set", "batch=4"])
    assert done.exit_code == 0, done.output


def test_a_plan_of_stored_states_is_of_their_own_rows_and_its_disk_is_what_is_taken(tiny_target, tmp_path, monkeypatch):
    states = store(tiny_target, tmp_path, 24)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(VALUES | {"kernel": "sdpa", "pack": True, "optimizer": "adamw"}))
    out = tmp_path / "out"
    words = [tiny_target, out, "--recipe", recipe, "--states", states, "--save-every", 4]
    plan = json.loads(run(*words, "--dry-run", "--json"))
    assert plan["tokens"] == 12 * 4 * 24
    assert plan["states"] == pytest.approx(sum(f.stat().st_size for f in states.glob("states-*")), rel=0.1)
    seen: list[int] = []

    def watch(*_: object, **__: object) -> None:
        kept = (tmp_path / ".out.training").glob("checkpoint-*/**/*")
        seen.append(sum(f.stat().st_size for f in kept if f.is_file()))

    monkeypatch.setattr(DrafterTrainer, "log", watch)
    run(*words)
    assert plan["parameters"] == json.loads((out / "kconv.json").read_text())["training"]["parameters"]
    # Two checkpoints are there after a save, and three while one is written.
    assert max(seen) == pytest.approx(plan["checkpoints"] * 2 / 3, rel=0.1)
    written = sum(f.stat().st_size for f in out.rglob("*.safetensors"))
    assert plan["output"] == pytest.approx(written, rel=0.1)
