"""Changes what people and tools write beside weights, at random, and has each command or reader that takes it read it.

Recipes, facts, acceptance files, reports, cards, prompts, records of states and calibrations. Run as a program, in
tests/: python -m support.fuzz_evidence ROOT SEED EXAMPLES. It prints what `support.fuzz` prints, under the same bounds:
a traceback, an exit code other than 0, 1 and 2, something left behind or more memory than a few files take is a fault.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import yaml
from click.testing import CliRunner

from kconv.cards.facts import read_facts
from kconv.checkpoint.manifest import read_manifest
from kconv.cli import main as kconv
from kconv.errors import KconvError
from kconv.pipeline.record import read_state
from kconv.quantize.calibration import read_calibration
from kconv.quantize.recipe import load_recipe
from kconv.targets.config import read_target_config
from kconv.targets.prompts import read_prompts
from kconv.targets.states import read_record
from kconv.train.recipe import read_recipe_file

from .fuzzing import change_bytes, change_json, kind_of, run_examples
from .releases import SUITE, write_acceptance, write_release

# What YAML has and JSON has not: values that Python's own types refuse, tags, aliases that grow, what stands in itself.
YAML = (
    "2026-13-45", "2026-02-30T25:61:61", "!!int x", '!!int ""', "!!float abc", "!!bool maybe", "!!binary *", "1e999",
    ".nan", "!!python/object/apply:os.getcwd []", "!!set {a, b}", "!!omap [a: 1]", "!!timestamp x", "0x", "0b",
    "1:99:99", "&a [*a]", "*nowhere", "? [a, b]\n: c", "{" * 300, "[" * 3000, "- " * 3000, "9" * 5000, "<<: 1", "=",
    "!<tag:yaml.org,2002:str> x", "%YAML 9.9", "--- a\n--- b", "&a" * 9, "'\\x1b[2J'", '"\\e[2J"', '"\\ud800"',
)  # fmt: skip
BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else '1'}]\n" for i in range(12))
CALIBRATION = {"kconv": "0.1.0", "target": {}, "prompts": {}, "input_amax": {"model.layers.0.mlp.up_proj": 1.5}}
STATES = {"schema": 2, "kconv": "0.1.0", "target": {}, "captured": [1, 2, 3], "dtype": "BF16", "prompts": {},
          "tokenizer": {}, "seed": 0, "new_tokens": {}, "sequences": {}, "tokens": 0, "contents": {}}  # fmt: skip
STATE = {"schema_version": 1, "kconv": "0.1.0", "steps": {"a": {"status": "done", "fingerprint": "0"}}, "seen": {}}
TARGET = {"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 48, "num_hidden_layers": 61, "vocab_size": 64,
          "num_attention_heads": 4, "max_position_embeddings": 1024, "model_type": "kimi_k2", "eos_token_id": [3, 4],
          "rope_scaling": {"type": "yarn", "factor": 32.0}, "torch_dtype": "bfloat16"}  # fmt: skip
RELEASE = {
    "name": "fuzzed",
    "facts": {"name": "org/head", "base_model": "org/target", "license": {"id": "mit"}},
    "steps": {
        "vllm": {"do": "convert", "head": "HEAD", "to": "vllm", "captured": [1, 3, 5]},
        "report": {"do": "validate", "head": "$vllm", "source": "HEAD", "for": "vllm"},
        "card": {"do": "card", "head": "$vllm", "report": "$report"},
        "publish": {"do": "publish", "folder": "$card", "repo": "org/head", "tag": "v1"},
    },
}
FACTS = {
    "name": "org/head", "base_model": "org/target", "publisher": "Org", "released": "2026-11-22", "version": 2.0,
    "license": {"id": "mit", "target": "modified-mit", "attribution": "Kimi K2"}, "why": ["it is fast"],
    "training": {"framework": "ModelOpt", "datasets": [{"name": "d", "id": "org/d"}], "learning_rate": 1e-4},
    "serve": {"vllm": {"requires": "0.32", "arguments": ["--port", "1"]}}, "languages": ["en"], "tags": ["t"],
    "subcards": {"bias": {"participation": "None"}}, "sources": [{"title": "t", "url": "https://x"}],
}  # fmt: skip
# Results of other programs, of which one stands in quoted.json.
RESULTS = (
    {"date": "20261120-101500", "model_id": "org/target", "num_prompts": 80, "completed": 80, "failed": 0,
     "spec_decode_num_drafts": 4000, "spec_decode_accepted_tokens": 6000,
     "spec_decode_per_position_acceptance_rates": [0.75, 0.5, 0.25]},
    {"aiperf_version": "0.13.0", "request_count": {"avg": 80.0}, "start_time": "2026-11-20T10:15:00",
     "pooled_spec_decode_acceptance_histogram": {"0": 1000, "1": 1000, "2": 1000},
     "input_config": {"models": {"items": [{"name": "org/t"}]}, "datasets": [{"format": "speed_bench_coding"}]}},
    {"backend": "sglang", "dataset_name": "mt-bench", "accept_length": 2.5, "server_info": {
        "model_path": "org/t", "speculative_num_steps": 3, "speculative_eagle_topk": 1, "version": "0.5.23"}},
)  # fmt: skip
CURVE = {
    "_metadata": {"draft_model": "org/head"},
    "target": {"thinking_on": {1: 1.8, 2: 2.4}, "thinking_off": {1: 1.7}},
}
QUOTE = ["--head", "org/head", "--dataset", "mt-bench", "--out", "out"]
PROMPTS = [{"question_id": 1, "category": "math", "turns": ["one", "two"]}, {"id": "b", "prompt": "three"}]
Reading = tuple[str, Callable[[Path], object] | list[str]]
# By the file that is changed: what reads it, a command or a function.
READINGS: tuple[Reading, ...] = (
    ("head/README.md", ["card", "head", "--check"]),
    ("head/README.md", ["publish", "head", "org/head", "--dry-run"]),
    ("head/LICENSE", ["card", "head", "--check"]),
    ("head/acceptance.json", ["publish", "head", "org/head", "--dry-run"]),
    ("head/report.json", ["publish", "head", "org/head", "--dry-run"]),
    ("head/release.yaml", ["publish", "head", "org/head", "--dry-run"]),
    ("head/kconv.json", ["publish", "head", "org/head", "--dry-run"]),
    ("head/kconv.json", ["card", "head", "--check"]),
    ("head/kconv.json", ["card", "head", "--out", "OUT"]),
    ("head/acceptance.json", ["card", "head", "--acceptance", "head/acceptance.json", "--no-chart", "--out", "OUT"]),
    ("head/report.json", ["card", "head", "--report", "head/report.json", "--out", "OUT"]),
    ("facts.yaml", ["card", "head", "--facts", "facts.yaml", "--out", "OUT"]),
    ("facts.yaml", ["card", "head", "--facts", "facts.yaml", "--style", "nvidia", "--missing"]),
    ("facts.yaml", lambda work: read_facts(work / "facts.yaml")),
    ("head/acceptance.json", ["compare", "head/acceptance.json", "head/acceptance.json"]),
    ("quoted.json", ["quote", "quoted.json", *QUOTE]),
    ("quoted.json", ["quote", "quoted.json", *QUOTE, "--draft-tokens", "3"]),
    ("curve.yaml", ["quote", "curve.yaml", *QUOTE]),
    ("head/acceptance.json", ["curve", "head/acceptance.json", "--out", "out"]),
    ("run.yaml", ["run", "run.yaml", "--dry-run", "--out", "OUT"]),
    ("run.yaml", ["run", "run.yaml", "--dry-run", "--json", "--out", "OUT"]),
    ("quantize.yaml", lambda work: load_recipe(str(work / "quantize.yaml"))),
    ("train.yaml", lambda work: read_recipe_file(str(work / "train.yaml"))),
    ("prompts.jsonl", lambda work: [prompt.digest for prompt in read_prompts(work / "prompts.jsonl")]),
    ("calibration.json", lambda work: read_calibration(work / "calibration.json")),
    ("states/states.json", lambda work: read_record(work / "states")),
    ("released/run.json", lambda work: read_state(work / "released")),
    ("target/config.json", lambda work: read_target_config(work / "target")),
    ("head/kconv.json", lambda work: read_manifest(work / "head")),
)  # fmt: skip


def make(root: Path) -> Path:
    """Write one of each file."""
    head = write_release(root / "head")
    write_acceptance(head, **{key: value for key, value in SUITE.items() if key == "target"})
    shutil.rmtree(root / "head-source")
    texts = {
        "facts.yaml": yaml.safe_dump(FACTS),
        "run.yaml": yaml.safe_dump(RELEASE, sort_keys=False).replace("HEAD", "head"),
        "quantize.yaml": yaml.safe_dump({"name": "x", "quantize": ["*.experts.*"], "keep": ["*.0.*"]}),
        "train.yaml": yaml.safe_dump({"decoder": "mla", "lr": 1e-4, "steps": 10, "captured": [1, 3, 5]}),
        "prompts.jsonl": "".join(json.dumps(row) + "\n" for row in PROMPTS),
        **{f"quoted{number}.json": json.dumps(result) for number, result in enumerate(RESULTS)},
        "curve.yaml": yaml.safe_dump(CURVE),
        "calibration.json": json.dumps(CALIBRATION),
        "states/states.json": json.dumps(STATES),
        "released/run.json": json.dumps(STATE),
        "target/config.json": json.dumps(TARGET),
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


def change(file: Path, rng: random.Random) -> None:
    """Change a file by its structure, by what its language has, by its bytes, or put something else in its place."""
    content = file.read_bytes()
    kind = rng.random()
    if kind < 0.04:
        special(file, rng)
    elif file.suffix == ".json" and kind < 0.85:
        file.write_bytes(change_json(content, rng))
    elif file.suffix == ".jsonl" and kind < 0.85:
        lines = content.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = change_json(lines[at], rng)
        file.write_bytes(b"\n".join(lines))
    elif file.suffix == ".yaml" and kind < 0.55:
        held = change_json(json.dumps(yaml.safe_load(content), default=str).encode(), rng)
        file.write_bytes(held)
    elif file.suffix in (".yaml", ".md") and kind < 0.85:
        lines = content.decode().split("\n")
        # Of a card, the front matter above all.
        most = len(lines) if file.suffix == ".yaml" else min(len(lines), 12)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(most)
            key, colon, _ = lines[at].partition(": ")
            raw = rng.choice((*YAML, *YAML, BOMB))
            lines[at] = f"{key}: {raw}" if colon and rng.random() < 0.8 else raw
        file.write_text("\n".join(lines), errors="surrogatepass")
    else:
        file.write_bytes(change_bytes(content, rng))


def special(file: Path, rng: random.Random) -> None:
    """Put something that is no file in a file's place, or a file of a size that no memory has."""
    file.unlink()
    match rng.randrange(6):
        case 0:
            os.mkfifo(file)
        case 1:
            file.symlink_to(rng.choice(("/dev/zero", "/dev/urandom", "/proc/self/mem", "/dev/stdin")))
        case 2:
            file.mkdir()
        case 3:
            file.symlink_to(file.name)
        case 4:
            with file.open("wb") as sparse:
                sparse.truncate(rng.choice((5 << 20, 1 << 30, 10 << 40)))
        case _:
            file.symlink_to("nowhere")


def run_one(source: Path, work: Path, seed: str) -> tuple[str, str, str]:
    """Run one example; return what was changed, "taken", "refused" or "wrong", and what went wrong."""
    rng = random.Random(seed)
    name, reading = rng.choice(READINGS)
    shutil.copytree(source, work)
    shutil.move(work / f"quoted{rng.randrange(len(RESULTS))}.json", work / "quoted.json")
    change(work / name, rng)
    kind = kind_of(Path(name))
    before = {path.name for path in work.iterdir()}
    if not isinstance(reading, list):
        try:
            reading(work)
        except KconvError as fault:
            named = str(fault).strip() and fault.fix
            return (kind, "refused", "") if named else (kind, "wrong", f"no fix: {fault}")
        except Exception as fault:
            return kind, "wrong", f"{name}: " + "".join(traceback.format_exception(fault))[-1500:]
        return kind, "taken", ""
    os.chdir(work)
    ended = CliRunner().invoke(kconv, [word.replace("OUT", "out") for word in reading])
    os.chdir("/")
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        return kind, "wrong", f"{name} {reading}: " + "".join(traceback.format_exception(ended.exception))[-1500:]
    left = sorted({path.name for path in work.iterdir()} - before - {"out"})
    # A card is written, and exits with 1, where its license checks find something; it is whole then.
    whole = ended.exit_code == 0 or (work / "out" / "README.md").exists()
    if left or ((work / "out").exists() and not whole):
        return kind, "wrong", f"{name} {reading}: left {left}, exit code {ended.exit_code}"
    if ended.exit_code not in (0, 1, 2) or (ended.exit_code and not ended.output.strip()):
        return kind, "wrong", f"{name} {reading}: exit code {ended.exit_code}: {ended.output[-500:]}"
    return kind, "refused" if ended.exit_code else "taken", ""


def main(root: Path, seed: str, examples: int) -> None:
    """Run examples, and print what they came to."""
    source, work = make(root / "source"), root / "work"
    os.environ["HF_HUB_OFFLINE"] = "1"
    # No Hub is reached here, and publishing would wait for it between its tries.
    time.sleep = lambda _: None
    for _, reading in READINGS:
        shutil.copytree(source, work)
        if isinstance(reading, list):
            os.chdir(work)
            CliRunner().invoke(kconv, [word.replace("OUT", "out") for word in reading])
            os.chdir("/")
        shutil.rmtree(work)
    run_examples(work, seed, examples, lambda name: run_one(source, work, name))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2], int(sys.argv[3]))
