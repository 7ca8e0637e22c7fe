"""Prompts as calibration text: cut into texts by part, so that no prompt is in two."""

import json

import torch
from support.heads import FITTING_GQA

from kconv.checkpoint.source import Folder
from kconv.measure import calibration
from kconv.targets.tokenizer import load_tokenizer


def test_the_texts_of_a_part_are_cut_from_its_own_prompts(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "_run_target", lambda folder, groups, spec: groups)
    prompts = [f"{number} " * 60 for number in range(101, 131)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    texts = calibration.prompted_texts(file, 16, FITTING_GQA, Folder(tiny_target))
    tokenizer = load_tokenizer(tiny_target)
    expected = {"choose": prompts[4::10], "held-out": prompts[9::10]}
    expected["fit"] = [one for one in prompts if one not in (*expected["choose"], *expected["held-out"])]
    for part, own in expected.items():
        groups = [group for group, its in zip(texts.gather(), texts.parts, strict=True) if its == part]
        ids = [i for one in own for i in tokenizer.encode(one)]
        assert torch.cat(groups).flatten().tolist() == ids[: len(ids) // 16 * 16]
