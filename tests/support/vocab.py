"""Heads with another draft vocabulary, for tests: made by kconv's operations, looked at with other eyes."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from safetensors.torch import load_file

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints, verify
from kconv.convert.execute import execute
from kconv.convert.read import read_head, read_weights
from kconv.convert.vocab import CountedText
from kconv.drafters.forward import DraftHead
from kconv.engines import BY_NAME

from .heads import MLA, random_slots, write_head

# More than one block of rows on either side, and more trained rows than dims.
VOCAB, DRAFT = 2500, 1100
FULL = replace(MLA, vocab=VOCAB, draft_vocab=VOCAB)
REDUCED = replace(FULL, draft_vocab=DRAFT)
NONE = Hints()


def write(folder, spec, layout="vllm", without=(), **slots):
    return write_head(folder, BY_NAME[layout], spec, random_slots(spec, without=without) | slots)


def run(operation, folder, out, *args):
    return execute(operation(open_checkpoint(folder), None, NONE, *args), out)


def load(folder):
    return load_file(folder / "model.safetensors")


def target_ids(folder):
    d2t = load(folder)["d2t"]
    return torch.tensor([i + offset for i, offset in enumerate(d2t.tolist())])


def text(spec=FULL, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return CountedText(torch.randint(0, 50, (spec.vocab,), generator=generator).numpy(), "prompts.jsonl (sha256 ab)")


def draft(folder):
    """Return logits over 200 random states, and the target id of each of their columns."""
    head = read_head(open_checkpoint(folder))
    weights = {name: w.float() if w.is_floating_point() else w for name, w in read_weights(head).items()}
    states = torch.randn(200, head.spec.hidden, generator=torch.Generator().manual_seed(5))
    normed = torch.nn.functional.rms_norm(states, (head.spec.hidden,), weights["norm"], head.spec.eps)
    return normed @ weights["lm_head"].T, DraftHead(head.spec, weights).target_ids


def others(folder):
    tensors = load(folder)
    return {name: tensors[name] for name in tensors.keys() - {"lm_head.weight", "d2t", "t2d"}}


def assert_carried(source, out, draft_vocab):
    before, after = others(source), others(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, out)]
    assert configs[1] == configs[0] | {"draft_vocab_size": draft_vocab}
    verify(out, open_checkpoint(source))
