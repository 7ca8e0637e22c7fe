"""What users get wrong: each mistake ends with its exit code and one message that names what and where.

The list began as a newcomer's. A message's words may change; that it names the file, key or option may not.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from support.faults import GQA_VLLM, MLA_VLLM, MODELOPT_GQA
from support.heads import TARGET
from support.hub import offline
from support.published import EAGLE3

import kconv
from kconv.cli import main
from kconv.train.recipe import OTHER_KEYS

RECIPE = {"name": "mine", "steps": {"vllm": {"do": "convert", "head": "head", "to": "vllm"}}}
# What takes as long to load as everything else together.
SLOW = {"torch", "transformers", "huggingface_hub"}
PROMPT = {"prompt": "Say it.", "category": "a"}
# A Python that has no engine.
EMPTY = sys.executable


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of heads, a target's config and small files, which no mistake may change."""
    root = tmp_path_factory.mktemp("mistakes")
    MLA_VLLM.write(root / "head")
    GQA_VLLM.write(root / "gqa")
    MODELOPT_GQA.write(root / "trainer")
    for name, change in CHANGED.items():
        shutil.copytree(root / "head", root / name)
        change(root / name)
    (root / "target").mkdir()
    (root / "target" / "config.json").write_text(json.dumps(TARGET))
    (root / "empty").mkdir()
    (root / "gguf").mkdir()
    (root / "gguf" / "head.gguf").write_bytes(b"GGUF")
    (root / "head.tar.gz").write_bytes(b"\x1f\x8b")
    (root / "cache" / "snapshots" / "abc").mkdir(parents=True)
    shutil.copytree(root / "head", root / "cache" / "snapshots" / "abc", dirs_exist_ok=True)
    (root / "prompts.jsonl").write_text(json.dumps(PROMPT) + "\n")
    (root / "comma.jsonl").write_text(f'{json.dumps(PROMPT)}\n{{"prompt": "Say it.",}}\n'.replace("Say it.", "ok"))
    (root / "messages.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Say it."}]}) + "\n")
    (root / "dialogue.jsonl").write_text(json.dumps({"prompt": "Say it.", "response": "It."}) + "\n")
    (root / "empty.jsonl").write_text('{"prompt": ""}\n')
    (root / "text.jsonl").write_text('{"text": "Say it."}\n')
    (root / "twice.jsonl").write_text('{"id": 7, "prompt": "a"}\n{"id": 7, "prompt": "b"}\n')
    EAGLE3["SafeAILab, Llama-3.1"].write(root / "silent")
    shutil.copytree(root / "target", root / "wide")
    (root / "wide" / "config.json").write_text(json.dumps(TARGET | {"hidden_size": 96, "intermediate_size": 64}))
    (root / "wide" / "tokenizer.json").write_text("{}")
    kconv.convert(str(root / "gqa"), str(root / "written"), to="vllm")
    (root / "notes.md").write_text("# not prompts\n")
    (root / "linked").symlink_to("moved-away")
    (root / "report.json").write_text('{"schema": 1, "subject": "head", "findings": []}')
    for name, recipe in RECIPES.items():
        (root / name).write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe))
    return root


def _config(**keys: object) -> Callable[[Path], None]:
    def change(head: Path) -> None:
        file = head / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return change


def _nan(head: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    tensors["fc.weight"][0, 0] = float("nan")
    save_file(tensors, head / "model.safetensors")


CHANGED: dict[str, Callable[[Path], object]] = {
    "no-config": lambda head: (head / "config.json").unlink(),
    "comma": lambda head: (head / "config.json").write_text('{"hidden_size": 48,}'),
    "cut": lambda head: (head / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes()[:-100]),
    "nope": _config(mla_use_nope=True),
    "bin-only": lambda head: ((head / "model.safetensors").unlink(), (head / "head.pt").write_bytes(b"PK")),
    "deep": _config(num_hidden_layers=36),
    "typed": _config(hidden_size="48"),
    "blank": lambda head: (head / "config.json").write_text(""),
    "vocab": _config(vocab_size=100),
    "nan": _nan,
    "first": _config(eagle_aux_hidden_state_layer_ids=[1, 4, 7], aux_hidden_state_layer_ids_are=None),
}


def _step(**keys: object) -> dict[str, object]:
    return {"name": "mine", "steps": {"vllm": RECIPE["steps"]["vllm"] | keys}}


RECIPES: dict[str, object] = {
    "kind.yaml": _step(do="quantise"),
    "later.yaml": _step(head="$tin/target"),
    "brackets.yaml": "name: mine\nsteps:\n  vllm: {do: convert, head: gqa, to: vllm, captured: 1,3,5}\n",
    "key.yaml": RECIPE | {"min_acceptence": {}},
    "name.yaml": {"nmae": "mine"} | RECIPE,
    "floor.yaml": RECIPE | {"min_acceptance": {"draft_token": 3, "suite": "MT-Bench"}},
    "do.yaml": {"name": "mine", "steps": {"vllm": {"head": "head", "to": "vllm"}}},
    "option.yaml": _step(hed="head"),
    "license.yaml": RECIPE | {"facts": {"license": "apache-2.0"}},
    "layout.yaml": _step(to="vlm"),
    "indent.yaml": "name: mine\nsteps:\n  vllm:\n   do: convert\n  head: x\n to: y\n",
    "twice.yaml": "name: mine\nsteps:\n  v: {do: convert, head: head, to: vllm}\n  v: {do: convert, head: gqa}\n",
    "no-steps.yaml": {"name": "mine"},
    "no-head.yaml": _step(head="haed"),
    "modules.yaml": "name: mine\nmodules: all\n",
    "list.yaml": "- a\n- b\n",
    "array.jsonl": '[{"prompt": "Why?"}]\n',
    "bot.jsonl": '{"conversations": [{"from": "human", "value": "Why?"}, {"from": "bot", "value": "So."}]}\n',
    "dollar.yaml": {"name": "mine", "steps": RECIPE["steps"] | {"sglang": {"do": "convert", "head": "vllm",
                                                                          "to": "sglang"}}},
    "train.yaml": {"name": "m", "steps": {"t": {"do": "train", "target": "target", "recipe": "eagle3_mla",
                                               "data": "prompts.jsonl"}}},
    "batch.yaml": {"name": "m", "steps": {"t": {"do": "train", "target": "target", "recipe": "eagle3-mla",
                                               "data": "dialogue.jsonl", "set": {"batch": "four"}}}},
}  # fmt: skip
# Commands that name a target or another checkpoint.
ABSENT = (
    "inspect llama-3.1-8b",
    "to-vllm head out --target llama-3.1-8b",
    "validate head --target llama-3.1-8b",
    "states llama-3.1-8b out --prompts prompts.jsonl",
    "train llama-3.1-8b out --recipe eagle3-mla --data dialogue.jsonl",
    "vocab head --target llama-3.1-8b",
    "quantize llama-3.1-8b out --recipe nvfp4 --input-scale data-free",
    "verify llama-3.1-8b",
    "diff head llama-3.1-8b",
    "card llama-3.1-8b",
)
# A name, the command in the folder, its exit code, and what the message has to name.
MISTAKES: list[tuple[str, str, int, tuple[str, ...]]] = [
    ("a wrong path", "inspect haed", 1, ("haed",)),
    ("a link to nowhere", "inspect linked", 1, ("linked links to moved-away, which does not exist",)),
    ("a wrong path beside a folder of that name", "inspect cache/haed", 1,
     ("there is no folder cache/haed", "write cache/haed@main")),
    ("vLLM's default layers", "to-vllm silent out --target-layers 32 --captured 2,16,29", 1,
     ("--captured-are inputs",)),
    ("a list with layer 1 for vLLM, and a target", "to-vllm first out --target target", 1,
     ("it names layer 1", "--captured-are outputs")),
    ("a model by an option", "quantize --model head out", 2, ("TARGET is an argument",)),
    ("a bare name", "inspect Kimi-K2.6-Eagle3", 1, ("Kimi-K2.6-Eagle3", "org/name")),
    ("a hub id without network", "inspect org/head", 1, ("org/head",)),
    ("a weight file", "inspect head/model.safetensors", 1, ("model.safetensors", "folder")),
    ("a config file", "inspect head/config.json", 1, ("config.json", "folder")),
    ("the Hub's cache folder", "inspect cache", 1, ("config.json", "snapshots")),
    ("a folder with GGUF", "inspect gguf", 1, ("gguf",)),
    ("a GGUF file", "inspect gguf/head.gguf", 1, ("head.gguf", "is a GGUF file", "that it was made from")),
    ("an archive", "inspect head.tar.gz", 1, ("is an archive", "Unpack it")),
    ("a turn of an unknown speaker", "train target out --recipe eagle3-gqa --data bot.jsonl", 1,
     ("bot.jsonl:1", "a turn is from 'bot', not human, gpt")),
    ("a list of prompts", "calibrate target out.json --prompts array.jsonl", 1,
     ("array.jsonl:1", "each object on a line of its own")),
    ("a card for no repository", "card head --name my-head", 2, ("--name my-head is no Hub id",)),
    ("a floor without its target",
     "publish head org/head --min-acceptance 1 --suite MT-Bench --draft-tokens 3 --min-prompts 9 --max-loss 0.1", 2,
     ("--target-name",)),
    ("a release to train by", "train target out --recipe no-head.yaml --data dialogue.jsonl", 1,
     ("a release's recipe", "kconv run no-head.yaml")),
    ("a release of a stranger's folder", "card head --name org/head --out out", 1, ("--out", "no kconv.json")),
    ("a percentage for a share", "publish head org/head --max-loss 1", 2, ("it is a share, and 1 % is 0.01",)),
    ("prompts as dialogues", "train target out --recipe eagle3-gqa --data prompts.jsonl", 1,
     ("These are prompts", "kconv generate")),
    ("a pickle", "inspect bin-only", 1, ("head.pt",)),
    ("an empty folder", "inspect empty", 1, ("config.json",)),
    ("no config", "inspect no-config", 1, ("config.json",)),
    ("broken JSON", "inspect comma", 1, ("config.json", "a comma too many: line 1")),
    ("a truncated file", "inspect cut", 1, ("model.safetensors", "sha256")),
    ("a key of a wrong type", "to-vllm typed out", 1, ("hidden_size",)),
    ("a Kimi-K3 head", "to-vllm nope out", 1, ("mla_use_nope",)),
    ("the target's number of layers", "to-vllm deep out", 1, ("num_hidden_layers", "--layers")),
    ("an output that exists", "to-vllm head gqa", 1, ("gqa", "exists")),
    ("the output first", "to-vllm out head", 1, ("head already exists", "name it first", "out is no folder")),
    ("no output", "to-vllm head", 2, ("OUT", "The folder to write")),
    ("an argument too many", "inspect head gqa", 2, ("gqa", " inspect takes HEAD")),
    ("an output by an option", "to-vllm head -o out", 2, ("-o", "OUT is an argument", " to-vllm HEAD OUT")),
    ("another command's option", "quantize-head head out --recipe fp8", 2, ("--recipe", "Did you mean --format?")),
    ("another tool's data", "calibrate wide out --data prompts.jsonl", 2, ("--data", "Did you mean --prompts?")),
    ("prompts for training", "train wide out --recipe eagle3-mla --prompts p", 2, ("Did you mean --data?",)),
    ("vLLM's draft tokens", "bench --head head --num-speculative-tokens 3", 2, ("Did you mean --draft-tokens?",)),
    ("a number below its range", "inspect silent --target-layers 0", 2, ("--target-layers", "0 is not at least 1.")),
    ("an output file by another option", "bench --head head --output a.json", 2, ("Did you mean --out?",)),
    ("a revision with a colon", "inspect org/head:main", 1, ("org/name@REVISION",)),
    ("an underscore", "to_sglang head out", 2, ("Did you mean to-sglang?",)),
    ("a report into a file", "validate head --out notes.md", 2, ("--out notes.md is a file",)),
    ("a prompt without words", "calibrate target out.json --prompts empty.jsonl", 1,
     ("empty.jsonl:1", "line 1 has an empty prompt")),
    ("training text as prompts", "calibrate target out.json --prompts text.jsonl", 1, ('or "turns", but has text',)),
    ("dialogues as prompts", "calibrate target out.json --prompts messages.jsonl", 1,
     ("has messages", "--data of kconv states")),
    ("answers into the prompts", "generate --url http://h:1 --model m --prompts prompts.jsonl --out prompts.jsonl", 2,
     ("--out is the file of --prompts",)),
    ("MHA as a recipe", "train wide out --recipe eagle3-mha --data dialogue.jsonl", 1, ("Did you mean eagle3-gqa?",)),
    ("an id twice", "calibrate target out.json --prompts twice.jsonl", 1, ("repeats the id '7'", "its own id")),
    ("a recipe in capitals", "quantize target out --recipe NVFP4 --input-scale data-free", 1, ("Did you mean nvfp4?",)),
    ("a recipe's file without its end", "run no-head --dry-run", 1, ("no-head", "Did you mean no-head.yaml?")),
    ("a step without its dollar", "run dollar.yaml --dry-run", 1, ("Did you mean $vllm, the step?",)),
    ("a short option", "-V", 2, ("-V", "--version")),
    ("a command's option before its name", "--json inspect head", 2, ("--json", "after its name")),
    ("no head to measure", "bench --suite prompts.jsonl --out a.json", 2, ("--head", "The head to measure")),
    ("an unknown option", "to-vllm head out --targte target", 2, ("--targte", "--target")),
    ("another dtype", "to-vllm head out --dtype fp16", 2, ("--dtype", "bfloat16")),
    ("a misspelt command", "to-vlm head out", 2, ("to-vlm", "to-vllm")),
    ("a command of other tools", "convert head out", 2, ("convert", "to-vllm")),
    ("its engine behind", "convert head out --to SGLang", 2, ("'convert'. Did you mean to-sglang?",)),
    ("an engine's work", "launch head", 2, ("launch", "serve")),
    ("a head without its target", "serve head", 2, ("--target",)),
    ("an engine's word for the target", "serve head --model-path t", 2, ("Did you mean --target?",)),
    ("an engine's word for the head", "serve --speculative-draft-model-path head", 2, ("HEAD is an argument",)),
    ("an engine's option before --", "serve head --target t --port 8000", 2, ("'--port'", "behind --")),
    ("upload", "upload head", 2, ("upload", "publish")),
    ("help as a command", "help", 2, ("help",)),
    ("an empty name", "inspect ''", 1, ("empty",)),
    ("a dataset", "inspect https://huggingface.co/datasets/org/x", 1, ("datasets/org/x", "not the address of a model")),
    ("another site", "inspect https://github.com/org/x", 1, ("https://github.com/org/x", "org/name")),
    ("an address without https", "inspect huggingface.co/org/head", 1, ("no folder org/head",)),
    ("the source as the output", "to-vllm head head", 2, ("is the source itself", "another name")),
    ("an empty config", "inspect blank", 1, ("blank/config.json", "it is empty")),
    ("another vocabulary in the config", "to-vllm vocab out", 1, ("embed_tokens.weight", "[100, 48]", "1 more does")),
    ("a value that is no number", "to-vllm nan out", 1, ("1 value of fc.weight is NaN",)),
    ("a target as a head", "to-vllm target out", 1, ("safetensors",)),
    ("a head as a target", "to-vllm head out --target gqa", 1, ("draft head", "target")),
    ("layers that the list denies", "to-vllm head out --captured 9,10,11", 1, ("--captured", "config.json")),
    ("the head as its own target", "to-vllm silent out --target silent", 2, ("--target is the head itself",)),
    ("a head of a target's class as a target", "to-vllm head out --target silent", 1,
     ("draft head (['LlamaForCausalLM'])", "silent/config.json")),
    *((f"a target that is not there, {command.split()[0]}", command, 1,
       ("there is no folder llama-3.1-8b", "a Hub id is org/name")) for command in ABSENT),
    ("too few layers", "to-vllm silent out --target-layers 32 --captured 15", 1,
     ("fc.weight takes 3 states, but --captured names 1",)),
    ("a convention without a list", "to-vllm silent out --target-layers 32 --captured-are inputs", 1,
     ("--captured-are inputs", "it has none", "--captured IDS")),
    ("another head as the source", "validate written --source silent", 1,
     ("written was made from another config.json", "/gqa")),
    ("layers with semicolons", "to-vllm head out --captured 1;3;5", 2, ("--captured", "1;3;5")),
    ("layers with blanks", "to-vllm head out --captured 1 3 5", 2, ("(3 5)", "one word with commas")),
    ("a layer that the target lacks", "to-vllm silent out --target-layers 9 --captured 1,3,40", 1,
     ("--captured", "layer 40", "8")),
    ("neither yes nor no", "to-vllm head out --norm-before-residual maybe", 2, ("'maybe'", "neither yes nor no")),
    ("layers that are not ascending", "to-vllm head out --captured 5,3,1", 2, ("--captured", "5,3,1")),
    ("an engine that is none", "validate head --for vlm", 2, ("--for", "vlm", "vllm")),
    ("an engine's short name", "validate head --for tensorrt", 2, ("tensorrt", "did you mean trtllm?")),
    ("an engine's long name", "validate head --for tensorrt-llm", 2, ("tensorrt-llm", "did you mean trtllm?")),
    ("engines with a comma", "validate head --for vllm,sglang", 2, ("--for vllm --for sglang",)),
    ("a layout that is none", "inspect head --from modeloptt", 1, ("modeloptt", "Did you mean modelopt?")),
    ("prompts without a target", "validate head --prompts prompts.jsonl", 2, ("--prompts", "--target")),
    ("two ways to measure", "validate head --target target --prompts prompts.jsonl --states s", 2,
     ("--prompts", "--states")),
    ("headers and values", "validate head --headers-only --source gqa", 2, ("--headers-only", "--source")),
    ("an engine without its python", "validate head --engine vllm --target target --prompts prompts.jsonl", 2,
     ("--engine-python", "--url")),
    ("an engine's python that is none", "validate head --engine vllm --engine-python no/python --target target "
     "--prompts prompts.jsonl", 1, ("no/python", "--engine-python", "vLLM")),
    ("a python without the engine", f"validate head --engine vllm --engine-python {EMPTY} --target target "
     "--prompts prompts.jsonl", 1, (EMPTY, "has no vLLM")),
    ("a target without a tokenizer", "validate head --target target --prompts prompts.jsonl", 1,
     ("target has no tokenizer", "tokenizer.json")),
    ("a head for another target", "to-vllm head out --target wide", 1,
     ("width 48", "has 96", "wide")),
    ("a head to run as a target", "calibrate head out.json --prompts prompts.jsonl", 1, ("draft head", "head/config")),
    ("a layer to store that is none", "states wide out --prompts prompts.jsonl --captured 1,3,50", 1,
     ("--captured", "50", "between 0 and 8")),
    ("prompts with a comma", "calibrate target out.json --prompts comma.jsonl", 1,
     ("comma.jsonl:2", "a comma too many: column 16")),
    ("an unknown rule", "validate head --explain K999", 1, ("K999", "--explain all")),
    ("a suite that is none", "bench --head head --target target --suite mtbench --out a.json", 1, ("mtbench",)),
    ("another suite", "bench --head head --target target --suite humaneval --out a.json", 1,
     ("there is no suite and no file humaneval", "mt-bench")),
    ("a bench of nothing", "bench --head head --suite prompts.jsonl --out a.json", 2, ("--url", "--target")),
    ("a category that is none", "bench --head head --target wide --suite prompts.jsonl --categories b --out a.json", 1,
     ("prompts.jsonl", "category b", "categories are a")),
    ("nobody to answer prompts", "generate --url http://127.0.0.1:9 --model m --prompts prompts.jsonl --out o", 1,
     ("http://127.0.0.1:9", "does not answer: Connection refused")),
    ("a server that is down", "bench --url http://127.0.0.1:9 --head head --suite prompts.jsonl --out a.json", 1,
     ("http://127.0.0.1:9",)),
    ("a URL without http", "bench --url 127.0.0.1:9 --head head --suite prompts.jsonl --out a.json", 2,
     ("--url", "http://127.0.0.1:9")),
    ("K out of range", "validate head --target target --prompts prompts.jsonl --draft-tokens 40", 2,
     ("--draft-tokens", "32")),
    ("a tree that is none", "bench --url http://127.0.0.1:9 --head head --suite p --out a --tree 4x8", 2,
     ("--tree", "topk=4,nodes=8")),
    ("one file to compare", "compare report.json", 2, ("files",)),
    ("a report to compare", "compare report.json report.json", 1, ("report.json", "a report of kconv validate")),
    ("a quantization recipe that is none", "quantize target out --recipe nvpf4 --input-scale data-free", 1,
     ("nvpf4", "Did you mean nvfp4?")),
    ("a quantization recipe's key", "quantize target out --recipe modules.yaml --input-scale data-free", 1,
     ("modules.yaml:2", "wrong: modules is not a known key")),
    ("no input scales", "quantize target out --recipe nvfp4", 2, ("--input-scale", "data-free")),
    ("a head quantized like a target", "quantize head out --recipe nvfp4 --input-scale data-free", 1,
     ("head is a draft head", "kconv quantize-head")),
    ("a license that is none", "card head --license apache", 1, ("apache", "apache-2.0")),
    ("a card of a stranger's folder", "card head", 1, ("kconv.json", "kconv to-vllm head OUT", "--facts")),
    ("facts that are not there", "card head --facts gone.yaml", 1, ("gone.yaml", "--init")),
    ("two questions about a card", "card head --missing --check", 2, ("--missing", "--check")),
    ("a repository without its owner", "publish head my-head", 2, ("REPO", "org/name")),
    ("a reason without a rule", "publish head org/head --allow because", 2, ("--allow", "RULE=REASON")),
    ("a floor without its conditions", "publish head org/head --min-acceptance 2", 2, ("--min-acceptance", "--suite")),
    ("a recipe file that is none", "run gone.yaml", 1, ("gone.yaml",)),
    ("a step's kind", "run kind.yaml --dry-run", 1, ("kind.yaml", "quantise", "quantize")),
    ("a step that is not there", "run later.yaml --dry-run", 1, ("later.yaml", "$tin")),
    ("a list without brackets", "run brackets.yaml --dry-run", 1,
     ("steps.vllm.3 is a number where a key belongs", "in brackets, as in [1, 3, 5]")),
    ("a misspelt part", "run key.yaml --dry-run", 1, ("key.yaml", "wrong: min_acceptence is not a known key")),
    ("a misspelt name", "run name.yaml --dry-run", 1, ("name.yaml", "wrong: nmae is not a known key")),
    ("a key twice", "run twice.yaml --dry-run", 1, ("twice.yaml:4", "the key v occurs twice")),
    ("no steps", "run no-steps.yaml --dry-run", 1, ("no-steps.yaml", "the key steps is missing")),
    ("a head that is not there", "run no-head.yaml --dry-run", 1,
     ("no-head.yaml:", "haed does not exist", "start at its folder")),
    ("a misspelt part of the floor", "run floor.yaml --dry-run", 1, ("floor.yaml", "draft_token")),
    ("a step without do", "run do.yaml --dry-run", 1, ("do.yaml", "do")),
    ("a misspelt option", "run option.yaml --dry-run", 1, ("option.yaml", "hed")),
    ("a license as a word", "run license.yaml --dry-run", 1, ("license.yaml", "write license: {id: apache-2.0}")),
    ("a layout in a recipe", "run layout.yaml --dry-run", 1, ("layout.yaml", "vlm", "vllm")),
    ("an indentation", "run indent.yaml --dry-run", 1, ("indent.yaml", "line 6")),
    ("a list for a recipe", "run list.yaml --dry-run", 1, ("list.yaml",)),
    ("a training recipe that is none", "run train.yaml --dry-run", 1, ("train.yaml:", "Did you mean eagle3-mla?")),
    ("a training recipe's value in a recipe", "run batch.yaml --dry-run", 1,
     ("at batch: it must be a whole number", "'four'")),
    ("a step that is not in the recipe", "run layout.yaml --only vlm --dry-run", 1, ("layout.yaml",)),
    ("an output inside the source", "to-vllm trainer trainer/out", 2, ("trainer/out",)),
    ("a source and its output in the wrong order", "verify gqa written", 2, ("kconv verify written gqa",)),
    ("a manifest that is not there", "verify trainer", 1, ("kconv.json",)),
    ("a pruned vocabulary without text", "vocab head out --prune 10", 2, ("--prune", "--text")),
    ("a change without an output", "vocab head --expand", 2, ("--expand", "OUT")),
    ("two depths", "inspect head --target target --target-layers 8", 2, ("--target", "--target-layers")),
    ("attention without a target", "to-vllm head out --attention mha", 2, ("--attention", "--target")),
    ("states without an attention", "to-vllm head out --states s", 2, ("--states", "--target")),
    ("a context without an attention", "to-vllm head out --heal 5", 2, ("--heal", "--attention")),
    ("data and states", "train target out --recipe eagle3-mla --data d --states s", 2, ("--data", "--states")),
    ("a setting without a value", "train target out --recipe eagle3-mla --data d --set lr", 2, ("--set", "KEY=VALUE")),
    ("two settings in one", "train target out --recipe eagle3-mla --data d --set lr=1e-4,steps=5", 2,
     ("'lr=1e-4,steps=5' holds several settings", "each by its own --set")),
    ("several stand for one engine", "validate head --engine vllm", 2, ("without it, pass --for vllm",)),
    ("a file of prompts as states", "validate head --target target --states prompts.jsonl", 1,
     ("is a file, not a folder of states", "kconv states TARGET OUT --prompts prompts.jsonl")),
    ("prompts and target exchanged", "validate head --target prompts.jsonl --prompts target", 1,
     ("prompts.jsonl is a file",)),
    ("a training recipe's name", "train target out --recipe eagle3_mla --data prompts.jsonl", 1,
     ("eagle3_mla", "eagle3-mla")),
    ("a training recipe's dtype twice", "train wide out --recipe eagle3-gqa --data dialogue.jsonl --set compute=F32", 1,
     ("must be 'BF16'", "or leave it out")),
    ("a training recipe's value", "train wide out --recipe eagle3-gqa --data dialogue.jsonl --set lr=fast", 1,
     ("--set lr", "'fast'")),
    ("prompts as training data", "train wide out --recipe eagle3-mla --data prompts.jsonl", 1,
     ("prompts.jsonl:1", "no answer")),
    ("a training recipe's key", "train target out --recipe eagle3-mla --data prompts.jsonl --set learning_rate=1", 1,
     ("learning_rate", "lr")),
    ("other trainers' key", "train target out --recipe eagle3-mla --data prompts.jsonl --set epochs=1", 1,
     ("epochs", "did you mean passes?")),
    ("a shared folder without a server", "states target out --prompts prompts.jsonl --shared s", 2,
     ("--url", "--shared")),
]  # fmt: skip


@pytest.mark.parametrize("command, code, named", [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_named(folder, monkeypatch, command, code, named):
    monkeypatch.chdir(folder)
    # Whatever other tests of this process made of the constant.
    offline(monkeypatch)
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    done = CliRunner().invoke(main, [*shlex.split(command), "--json"])
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (code, True), _said(done)
    assert [name for name in named if name not in done.stderr] == [], done.stderr
    error = json.loads(done.stdout)["error"]
    assert error.keys() == {"code", "what", "where", "fix", "see", "needs"}
    assert (error["code"] == "request-invalid") == (code == 2) and error["what"]
    parts = "\n".join(error.values())
    assert [name for name in named if name not in parts] == [], parts
    assert "Traceback" not in done.stderr and "pydantic" not in done.stderr and "Errno" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.lower().startswith("error: ")]
    assert len(said) == 1 and len(said[0]) < 400, done.stderr
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


@pytest.mark.parametrize("other, own", OTHER_KEYS.items())
def test_what_another_trainer_calls_a_key_is_translated(folder, monkeypatch, other, own):
    monkeypatch.chdir(folder)
    words = f"train target out --recipe eagle3-mla --data prompts.jsonl --set {other}=1"
    done = CliRunner().invoke(main, shlex.split(words))
    assert done.exit_code == 1 and f"'{other}'; did you mean {own}?" in done.stderr, done.stderr


REFUSED_EARLY = {
    "prompts to measure on": "validate gqa --target target --prompts no.jsonl",
    "prompts to fit on": "to-vllm gqa out --attention mla --target target --prompts no.jsonl",
    "states": "to-vllm gqa out --attention mla --target target --states no",
    "an attention that a head has": "to-vllm gqa out --attention mha --target target --prompts prompts.jsonl",
    "a target": "to-vllm gqa out --attention mla --target no --prompts prompts.jsonl",
    "a head": "to-vllm no out --attention mla --target target --prompts prompts.jsonl",
    "a head for a card": "card no",
    "a report": "card head --report no.json",
    "a release": "publish no org/head",
    "training data": "train target out --recipe eagle3-mla --data no.jsonl",
    "the form of training data": "train target out --recipe eagle3-mla --data prompts.jsonl",
    "a training recipe's value": "train wide out --recipe eagle3-gqa --data dialogue.jsonl --set lr=fast",
    "a head to train": "train head out --recipe eagle3-mla --data dialogue.jsonl",
    "a head to quantize": "quantize head out --recipe nvfp4 --input-scale data-free",
    "a head to calibrate": "calibrate head out.json --prompts prompts.jsonl",
    "a layer to store": "states wide out --prompts prompts.jsonl --captured 1,3,50",
    "a target without a tokenizer": "states target out --prompts prompts.jsonl",
    "a server to validate with": "validate head --engine vllm --url http://127.0.0.1:9 --target target --prompts "
    "prompts.jsonl",
    "an engine's python": "validate head --engine vllm --engine-python no/python --target target --prompts "
    "prompts.jsonl",
    "captured layers of a reduced head": "to-vllm silent out",
    "input scales": "quantize target out --recipe nvfp4 --input-scale no.json",
    "a record of a calibration": "validate head --target wide --prompts prompts.jsonl --calibrated-on empty",
    "a folder of states": "validate head --target wide --states empty",
    "a recipe": "train target out --recipe no.yaml --data prompts.jsonl",
    "an output of training": "train target head --recipe eagle3-mla --data prompts.jsonl",
    "prompts to calibrate on": "calibrate target out --prompts no.jsonl",
    "a folder for a tiny target": "tiny head",
}


@pytest.mark.parametrize("command", REFUSED_EARLY.values(), ids=REFUSED_EARLY)
def test_what_names_configs_and_headers_tell_is_refused_before_anything_slow_is_loaded(folder, command):
    code = f"from kconv.cli import main; main({command.split()}, standalone_mode=False)"
    code = f"import sys\ntry:\n {code}\nfinally:\n print(sorted({SLOW} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "[]\n"), ran.stderr
    assert not (folder / "out").exists()


def test_the_environment_of_several_processes_is_checked(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WORLD_SIZE", "two")
    done = CliRunner().invoke(main, "train wide out --recipe eagle3-mla --data dialogue.jsonl".split())
    assert done.exit_code == 2 and "WORLD_SIZE is 'two'" in done.stderr and "torchrun" in done.stderr, _said(done)


def test_a_dtype_is_taken_by_its_other_names(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for name in ("bf16", "BF16", "bfloat16"):
        done = CliRunner().invoke(main, ["to-vllm", "head", "out", "--dtype", name, "--dry-run"])
        assert done.exit_code == 0, _said(done)
    done = CliRunner().invoke(main, "states wide out --prompts prompts.jsonl --captured 1,99 --dtype fp16".split())
    assert done.exit_code == 1 and "--captured" in done.stderr, _said(done)


def _said(done: Result) -> str:
    return f"{done.output}\n{done.exception!r}"


def test_the_heads_of_the_folder_are_good(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for command in ("inspect head", "inspect gqa", "inspect trainer"):
        done = CliRunner().invoke(main, command.split())
        assert done.exit_code == 0, _said(done)


def test_a_home_folder_is_found_without_a_shell(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert kconv.inspect("~/gqa").kind == "Eagle3 head"
    done = CliRunner().invoke(main, ["inspect", "~/silent", "--target=~/target"])
    assert done.exit_code == 0, _said(done)
