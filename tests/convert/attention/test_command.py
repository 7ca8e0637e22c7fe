"""`--attention` from the command line: a head is written, its manifest says what it is, and others read it so."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from support.heads import FITTING_GQA, FITTING_MLA, random_slots, write_head, written

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import read_manifest, verify
from kconv.cli import main
from kconv.convert.read import read_head, read_slot
from kconv.drafters.spec import Gqa, Mla
from kconv.engines import by_name
from kconv.errors import (
    CalibrationInvalid,
    ConfigInvalid,
    ConversionInaccurate,
    KconvError,
    LayoutCannot,
    PromptsInvalid,
    StatesInvalid,
)
from kconv.measure.batches import Calibration
from kconv.measure.calibration import StoredBatches
from kconv.targets.config import read_target_config
from kconv.targets.states import open_states
from kconv.validate.structure import check_source, check_values, is_identical


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Heads of random weights that share the tiny target's embedding."""
    root = tmp_path_factory.mktemp("heads")
    for name, spec in (("gqa", FITTING_GQA), ("mla", FITTING_MLA), ("narrow", replace(FITTING_GQA, captured=(1, 3)))):
        slots = random_slots(spec, without=("embed_tokens",))
        slots = {n: (w * 0.1 if w.ndim == 2 else w * 0.1 + 1.0).to(w.dtype) for n, w in slots.items()}
        write_head(root / name, by_name("vllm"), spec, slots)
    return root


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Words in a random order: enough of them for the width of a tiny head."""
    words = [w for line in (main.help or "").split("\n") for w in line.split()]
    order = torch.randint(len(words), (30, 60), generator=torch.Generator().manual_seed(1)).tolist()
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": " ".join(words[i] for i in row)}) + "\n" for row in order))
    return file


@pytest.fixture(autouse=True)
def short_gauges(monkeypatch):
    monkeypatch.setattr("kconv.convert.attention.latents.GAUGE_STEPS", 20)


def run(*arguments, fails: type[KconvError] | None = None) -> str:
    """Run kconv; a named fault comes out as exit code 1."""
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    if fails is None:
        assert result.exit_code == 0, result.output
    else:
        assert result.exit_code == 1 and "fix:" in result.output, result.output
    return result.output


@pytest.mark.slow
def test_a_gqa_head_as_mla_and_back(heads, prompts, tiny_target, tmp_path):
    asked = ("--target", tiny_target, "--prompts", prompts, "--context", 32, "--min-retention", 0, "--heal", 2)
    shown = run("to-vllm", heads / "gqa", tmp_path / "mla", "--attention", "mla", *asked)
    assert "approximate: retains" in shown and "held-out sequences of up to 32 tokens" in shown
    source, output = (read_head(open_checkpoint(folder)) for folder in (heads / "gqa", tmp_path / "mla"))
    # The engine's dims, whatever the head has use for; and no bias anywhere.
    assert isinstance(output.spec.attention, Mla)
    assert (output.spec.attention.kv_lora_rank, output.spec.attention.qk_rope_head_dim) == (512, 64)
    assert output.spec.attention.q_lora_rank > 0
    assert not [name for name in output.checkpoint.tensors if name.endswith(".bias")]

    manifest = verify(tmp_path / "mla", source.checkpoint)
    record = manifest.conversion
    assert not manifest.exact and record is not None
    assert "approximate" in record.method and record.heal_steps == 2 and record.rows > 0
    assert len(record.calibration_sha256) == 64 and record.calibration == "prompts.jsonl"
    assert record.held_out["kept"] > 0 and record.held_out["sequences"] >= 8
    measure = ("validate", tmp_path / "mla", "--target", tiny_target, "--prompts", prompts, "--new-tokens", 8)
    assert "30 of 30 prompts are among those that this was trained or calibrated on" in run(
        *measure, fails=PromptsInvalid
    )
    actions = {step.output.name: step.action for step in manifest.tensors}
    assert actions["layers.0.self_attn.kv_b_proj.weight"] == "converted"
    assert actions["lm_head.weight"] in ("copied", "renamed")
    assert check_source(output, source) == [] and check_values(output) == []
    assert not is_identical(output, [])

    # In another layout it is the same approximation, and the same prompts are refused.
    run("to-trtllm", tmp_path / "mla", tmp_path / "exact")
    assert read_manifest(tmp_path / "exact").conversion == record

    shown = run("to-sglang", tmp_path / "mla", tmp_path / "back", "--attention", "mha", *asked, "--head-dim", 192)
    back = read_head(open_checkpoint(tmp_path / "back"))
    assert back.spec.attention == Gqa(4, 4, 192)
    assert check_source(back, output) == []


def test_healing_none_leaves_all_but_the_attention(heads, prompts, tiny_target, tmp_path):
    asked = ("--target", tiny_target, "--prompts", prompts, "--context", 32, "--min-retention", 0, "--heal", 0)
    shown = run("to-vllm", heads / "mla", tmp_path / "out", "--attention", "mha", "--json", *asked)
    progress, brace, text = shown.partition("{")
    assert "healing" not in progress
    tensors = json.loads(brace + text)["tensors"]
    converted = {t["output"]["name"].split(".")[-2] for t in tensors if t["action"] == "converted"}
    assert converted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert read_manifest(tmp_path / "out").conversion is not None


def test_a_smaller_latent_is_used_padded_and_recorded(heads, prompts, tiny_target, tmp_path):
    asked = ("--target", tiny_target, "--prompts", prompts, "--context", 32, "--min-retention", 0, "--heal", 0)
    run("to-vllm", heads / "gqa", tmp_path / "mla", "--attention", "mla", "--latent", 6, *asked)
    head = read_head(open_checkpoint(tmp_path / "mla"))
    rows = read_slot(head, "0.kv_a_proj_with_mqa")[: head.spec.attention.kv_lora_rank]
    assert len(rows) == 512 and int(rows.abs().amax(1).count_nonzero()) == 6
    record = read_manifest(tmp_path / "mla").conversion
    assert record.details["latent"] == 6 and "a latent of 6 entries" in record.method


def test_what_is_refused_leaves_nothing(heads, prompts, tiny_target, tmp_path):
    out = tmp_path / "out"
    asked = ("--target", tiny_target, "--prompts", prompts, "--context", 32, "--heal", 0)
    shown = run(
        "to-vllm", heads / "gqa", out, "--attention", "mla", "--min-retention", 1, *asked, fails=ConversionInaccurate
    )
    assert "of the original's acceptance length" in shown and "--min-retention" in shown
    shown = run("to-vllm", heads / "mla", out, "--attention", "mla", *asked, fails=LayoutCannot)
    assert "already MLA" in shown
    few = tmp_path / "few.jsonl"

    def refused(prompts: list[str], context: int) -> str:
        few.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        return run(
            "to-vllm", heads / "gqa", out, "--attention", "mla", "--target", tiny_target, "--prompts", few,
            "--context", context, fails=CalibrationInvalid,
        )  # fmt: skip

    # The fifth chooses, and the tenth measures.
    numbered = [f"{place}: some few words" * (3 if place % 5 == 4 else 1) for place in range(10)]
    assert "rows are too few to fit 128 attention inputs" in refused(numbered, 16)
    shown = refused(numbered[:5], 16)
    assert "of 5 in all these have" in shown and "Pass more prompts, 20 or more." in shown
    shown = refused([prompt * 8 for prompt in numbered], 512)
    assert "but need 512 and 1,024" in shown and "tokens or fewer (--context)" in shown
    assert not out.exists() and sorted(p.name for p in tmp_path.iterdir()) == ["few.jsonl"]


def test_an_embedding_that_the_engine_would_replace_is_refused_here_too(prompts, tiny_target, tmp_path):
    slots = {n: w * 0.1 if w.ndim == 2 else w * 0.1 + 1.0 for n, w in random_slots(FITTING_GQA).items()}
    write_head(tmp_path / "own", by_name("vllm"), FITTING_GQA, {n: w.bfloat16() for n, w in slots.items()})
    asked = ("--attention", "mla", "--target", tiny_target, "--prompts", prompts, "--context", 32, "--heal", 0)
    shown = run("to-sglang", tmp_path / "own", tmp_path / "out", *asked, fails=LayoutCannot)
    assert "embed_tokens differs from the target's" in shown and "gathering" not in shown


def test_a_theta_that_the_config_lost_is_refused_before_the_target_is_run(prompts, tiny_target, tmp_path):
    config = written(FITTING_GQA, rope_theta=..., rope_scaling=..., rope_parameters=...)
    write_head(tmp_path / "lost", by_name("vllm"), FITTING_GQA, random_slots(FITTING_GQA), config)
    asked = ("--attention", "mla", "--target", tiny_target, "--prompts", prompts, "--context", 32, "--heal", 0)
    shown = run("to-vllm", tmp_path / "lost", tmp_path / "out", *asked, fails=ConfigInvalid)
    assert "rope_theta" in shown and "gathering" not in shown


@pytest.mark.parametrize(
    "option", [("--device", "cpu"), ("--min-retention", "0.5"), ("--context", 64), ("--latent", 8)]
)
def test_what_goes_with_another_attention_is_not_passed_over_without(heads, tmp_path, option):
    result = CliRunner().invoke(main, [str(a) for a in ("to-vllm", heads / "gqa", tmp_path / "out", *option)])
    assert result.exit_code == 2 and "only with --attention" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [("--context", 64), ("--trust-remote-code",)])
def test_what_goes_with_prompts_is_not_passed_over_with_states(heads, tiny_target, tmp_path, option):
    asked = ("--attention", "mla", "--target", tiny_target, "--states", tmp_path, *option)
    result = CliRunner().invoke(main, [str(a) for a in ("to-vllm", heads / "gqa", tmp_path / "out", *asked)])
    assert result.exit_code == 2 and f"{option[0]}: only with --prompts" in result.output


def test_a_device_that_is_not_there_is_a_wrong_wish(heads, prompts, tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = ["--attention", "mla", "--target", tiny_target, "--prompts", prompts, "--device", "cuda"]
    result = CliRunner().invoke(main, [str(a) for a in ("to-vllm", heads / "gqa", tmp_path / "out", *asked)])
    assert result.exit_code == 2 and "torch finds no CUDA device here" in result.output


def test_stored_states_give_what_running_the_target_gives(heads, prompts, tiny_target, fine_tune, tmp_path):
    run("states", tiny_target, tmp_path / "states", "--prompts", prompts, "--captured", "1,3,5", "--text-tokens", 8)
    shown = run(
        "to-vllm", heads / "gqa", tmp_path / "out", "--attention", "mla", "--target", tiny_target,
        "--states", tmp_path / "states", fails=CalibrationInvalid,
    )  # fmt: skip
    assert "rows are too few" in shown
    shown = run(
        "to-vllm", heads / "narrow", tmp_path / "out", "--attention", "mla", "--target", heads / "gqa",
        "--states", tmp_path / "states", fails=KconvError,
    )  # fmt: skip
    shown = run(
        "to-vllm", heads / "gqa", tmp_path / "out", "--attention", "mla", "--target", fine_tune,
        "--states", tmp_path / "states", fails=StatesInvalid,
    )  # fmt: skip
    assert "layers differ" in shown and not (tmp_path / "out").exists()


def test_all_that_comes_of_a_stored_prompt_is_of_one_part(tiny_target, tmp_path):
    """A prompt's text and its answers begin alike: what is fitted on one of them has seen the others."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Prompt {n} is a text about {n * n}."}) + "\n" for n in range(23)))
    asked = ("--captured", "1,3,5", "--text-tokens", 16, "--sampled", 6, "--greedy", 6)
    run("states", tiny_target, tmp_path / "states", "--prompts", file, *asked)
    states = open_states(tmp_path / "states", config=read_target_config(tiny_target))
    batches = StoredBatches(states)
    calibration = Calibration(batches, torch.empty(0), "states", parts=batches.parts)
    whose = {
        tuple(states.read_tokens(index).tolist()): sequence.digest for index, sequence in enumerate(states.sequences)
    }
    parts = [
        {whose[tuple(row)] for batch in calibration.part(part) for row in batch.tokens.tolist()}
        for part in ("fit", "choose", "held-out")
    ]
    assert [len(part) for part in parts] == [19, 2, 2]
    assert len(set.union(*parts)) == 23
    assert sum(len(batch.tokens) for batch in batches) == len(states.sequences) == 69


@pytest.mark.parametrize(
    "arguments",
    [
        ("--attention", "mla"),
        ("--attention", "mla", "--target", "t"),
        ("--attention", "mla", "--target", "t", "--prompts", "p", "--states", "s"),
        ("--attention", "mla", "--target", "t", "--prompts", "p", "--drop-shared"),
        ("--attention", "mla", "--target", "t", "--prompts", "p", "--head-dim", "192"),
        ("--attention", "mha", "--target", "t", "--prompts", "p", "--latent", "64"),
        ("--attention", "mla", "--target", "t", "--prompts", "p", "--latent", "513"),
        ("--attention", "mla", "--target", "t", "--prompts", "p", "--latent", "0"),
        ("--heal", "3"),
    ],
)
def test_wrong_use_is_exit_code_2(heads, tmp_path, arguments):
    given = [str(tmp_path) if a == "t" else a for a in arguments]
    result = CliRunner().invoke(main, ["to-vllm", str(heads / "gqa"), str(tmp_path / "out"), *given])
    assert result.exit_code == 2, result.output
