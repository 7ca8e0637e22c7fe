"""Changes heads and targets at random (`support.fuzzing`), and has each command read them. Run as a program.

Usage, in tests/: python -m support.fuzz ROOT SEED EXAMPLES. Prints one JSON object: how many examples were refused and
taken, how much the memory grew, and every example that ended in anything but a named fault or a proven output.
`SEED-N` repeats an example alone: python -m support.fuzz ROOT SEED-N 1.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import traceback
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from kconv.cli import main as kconv
from kconv.engines import BY_NAME

from . import good_heads, heads
from .fuzzing import change, kind_of, run_examples

TORCHSPEC, MODELOPT = replace(heads.MLA, captured=(1, 7, 23)), replace(heads.GQA, captured=(1, 7, 23), layers=2)
HEADS = {
    "vllm": heads.MLA,
    "sglang": replace(heads.GQA, draft_vocab=40, captured=(1, 3, 5)),
    "torchspec": TORCHSPEC,
    "modelopt": MODELOPT,
    "speculators": replace(heads.GQA, captured=(1, 7, 23)),
}
COMMANDS = (
    ["inspect", "HEAD"],
    ["inspect", "HEAD", "--json"],
    ["vocab", "HEAD"],
    ["vocab", "HEAD", "--json"],
    ["vocab", "HEAD", "--rebuild-t2d", "OUT"],
    ["vocab", "HEAD", "--expand", "OUT"],
    ["to-vllm", "HEAD", "OUT", "--captured-are", "outputs"],
    ["to-trtllm", "HEAD", "OUT"],
    ["to-sglang", "HEAD", "OUT", "--dry-run", "--json"],
    ["to-portable", "HEAD", "OUT", "--dtype", "bfloat16"],
    ["inspect", "HEAD", "--target", "TARGET"],
    ["to-sglang", "HEAD", "OUT", "--target", "TARGET"],
    ["to-vllm", "HEAD", "OUT", "--target", "TARGET", "--drop-shared"],
    ["verify", "HEAD"],
    ["verify", "HEAD", "HEAD"],
)


def make_target(folder: Path) -> Path:
    """Write the config of a target, wrapped as Kimi-K2.5's is, and the two tensors that heads share with it."""
    text = {"hidden_size": 48, "num_hidden_layers": 61, "vocab_size": 64, "num_attention_heads": 4}
    text |= {"max_position_embeddings": 1024, "model_type": "kimi_k2", "eos_token_id": 3, "torch_dtype": "bfloat16"}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    folder.mkdir(parents=True)
    slots = heads.random_slots(heads.MLA)
    prefix = "language_model."
    tensors = {"lm_head.weight": slots["lm_head"], "model.embed_tokens.weight": slots["embed_tokens"]}
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_heads(root: Path) -> list[Path]:
    """Write a head of each kind, one of them in shards, and one that kconv wrote."""
    made = []
    for name, spec in HEADS.items():
        layout = BY_NAME[name]
        made.append(
            heads.write_head(root / name, layout, spec, heads.random_slots(spec), good_heads.make_config(layout, spec))
        )
    shards = root / "shards"
    shutil.copytree(made[1], shards)
    tensors = sorted(load_file(shards / "model.safetensors").items())
    (shards / "model.safetensors").unlink()
    placed = {}
    for i in range(2):
        part = dict(tensors[i::2])
        save_file(part, shards / f"model-{i}.safetensors")
        placed |= dict.fromkeys(part, f"model-{i}.safetensors")
    (shards / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    written = CliRunner().invoke(kconv, ["to-portable", str(made[0]), str(root / "written"), "--captured", "1,3,5"])
    assert written.exit_code == 0, written.output
    return [*made, shards, root / "written"]


def fill_in(command: list[str], head: Path, target: Path, out: Path) -> list[str]:
    """Return a command with its paths filled in."""
    paths = {"HEAD": head, "TARGET": target, "OUT": out}
    return [str(paths.get(word, word)) for word in command]


def run_one(sources: list[Path], target: Path, work: Path, seed: str) -> tuple[str, str, str]:
    """Run one example; return what was changed, "taken", "refused" or "wrong", and what went wrong."""
    rng = random.Random(seed)
    source, command = rng.choice(sources), rng.choice(COMMANDS)
    head, beside, out = work / "head", work / "target", work / "out"
    work.mkdir()
    shutil.copytree(source, head)
    shutil.copytree(target, beside)
    kind = kind_of(change(beside if "TARGET" in command and rng.random() < 0.5 else head, rng))
    ended = CliRunner().invoke(kconv, fill_in(command, head, beside, out))
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        return kind, "wrong", "".join(traceback.format_exception(ended.exception))[-1500:]
    left = sorted(path.name for path in work.iterdir() if path not in (head, beside, out))
    if left or (ended.exit_code and out.exists()):
        return kind, "wrong", f"left {left}, exit code {ended.exit_code}"
    if ended.exit_code not in (0, 1) or (ended.exit_code and not ended.output.strip()):
        return kind, "wrong", f"exit code {ended.exit_code}: {ended.output[-500:]}"
    if ended.exit_code == 0 and out.exists():
        proven = CliRunner().invoke(kconv, ["verify", str(out), str(head)])
        if proven.exit_code:
            return kind, "wrong", f"the output does not verify: {proven.output[-500:]}"
    return kind, "refused" if ended.exit_code else "taken", ""


def main(root: Path, seed: str, examples: int) -> None:
    """Run examples, and print what they came to."""
    sources, target = make_heads(root / "sources"), make_target(root / "target")
    # Everything is loaded by now, so what is allocated from here on is an example's.
    for command in COMMANDS:
        CliRunner().invoke(kconv, fill_in(command, sources[-1], target, root / "warm"))
        shutil.rmtree(root / "warm", ignore_errors=True)
    work = root / "work"
    run_examples(work, seed, examples, lambda name: run_one(sources, target, work, name))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
