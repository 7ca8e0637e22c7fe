"""Measure how often `kconv validate` finds fault with right heads (K364, K365), and which faults it finds.

    .venv/bin/python scripts/bench readings [--only TARGET] [--markdown]

Four targets of other families, widths, seeds and tokenizers than the demo's, three heads for each, at three stages of
training. Targets and heads are kept in the cache, and what was measured of a head beside it, so that an interrupted
run resumes; from nothing it takes about half an hour of one core. `--markdown` writes the table of
docs/evidence/validation.md from the figures so far.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from support import weight_faults
from support.weight_faults import FAULTS, STEPS, Bed, Fault, Slots, config, make_bed, weights

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.staging import staged
from kconv.convert.read import read_head
from kconv.drafters.forward import DraftHead
from kconv.drafters.spec import Gqa, HeadSpec, Mla, Rope
from kconv.targets.config import parse_target_config
from kconv.targets.model import build_target, one_thread
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.recipe import TEST, TinyRecipe, cache_root
from kconv.tiny.target import initialize, make_target, pack, save_tokenizer, train, train_tokenizer
from kconv.tiny.text import Corpus, read_corpus
from kconv.train.recipe import KIMI_ROPE, TINY_GQA, EagleRecipe
from kconv.train.run import head_key, share_states, train_head
from kconv.validate import readings
from kconv.validate.parity import targets_own
from kconv.validate.readings import judge_mistakes, measure_mistakes

ATTENTION: dict[str, Gqa | Mla] = {
    "MHA": Gqa(4, 4, 32),
    "GQA": Gqa(4, 2, 32),
    "MLA": Mla(4, q_lora_rank=48, kv_lora_rank=96, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32),
}


@dataclass(frozen=True)
class Target:
    """A target and its heads.

    Attributes:
        config: what it has beside what all have.
        training: of the target.
        theta: RoPE base of its heads.
        stages: for how many steps each head is trained.
        rows: sequences per step, of `tokens` tokens each.
        text: what the target reads: "docstrings", or the source "code" below them.
    """

    config: dict[str, Any]
    training: TinyRecipe
    theta: float
    stages: tuple[int, int, int] = (20, 60, 400)
    rows: int = 4
    tokens: int = 80
    text: str = "docstrings"

    def documents(self) -> Corpus:
        """Return what it is trained on, and what it is not."""
        return read_corpus() if self.text == "docstrings" else read_code()

    def make(self, name: str) -> Path:
        """Return the target's folder; it is trained where the cache has it not."""
        if name == "kimi_k2":
            return make_target(self.training, cache_root())
        out = cache_root() / f"readings-{name}-{self.training.seed}"
        if not out.exists():
            documents = self.documents().train
            tokenizer = train_tokenizer(documents, self.config["vocab_size"], 512)
            ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
            config = {"model_type": name, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                      "max_position_embeddings": 512, "tie_word_embeddings": False, **self.config, **ids}  # fmt: skip
            with one_thread(), staged(out) as folder, torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.training.seed)
                model = build_target(parse_target_config(config), torch.float32)
                initialize(model)
                train(model, pack(tokenizer, documents), self.training, lambda *_: None)
                model.save_pretrained(folder)
                save_tokenizer(tokenizer, folder)
        return out


@cache
def read_code() -> Corpus:
    """Return the standard library's own sources, without the tests; whole modules are held out."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(library.glob("*.py")) if 2_000 < file.stat().st_size < 60_000]
    texts = [file.read_text(encoding="utf-8") for file in files]
    return Corpus(tuple(t for i, t in enumerate(texts) if i % 8), tuple(texts[::8]))


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


SHORT = TinyRecipe(steps=300, batch=6, parts=1, lr=3e-3)
LONG = TinyRecipe(steps=600, batch=8, parts=1, lr=2e-3)
LATE = {"stages": (20, 60, 150), "rows": 8, "tokens": 96}
# Those of LONG are hard to draft for: their heads accept 1.5 to 2.5 tokens, the others' up to 3.4 of 4.
TARGETS = {
    "llama": Target({"vocab_size": 448, "hidden_size": 112, "intermediate_size": 288, "num_hidden_layers": 7,
                     "rms_norm_eps": 1e-5} | _rope(500000.0), replace(SHORT, seed=11), 500000.0),
    "kimi_k2": Target({}, replace(TEST, vocab_size=320, hidden_size=112, num_attention_heads=4, seed=14, steps=300,
                                  lr=3e-3), 50000.0),
    "qwen3": Target({"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 8,
                     "rms_norm_eps": 1e-6} | _rope(1e6), replace(LONG, seed=12), 1e6, **LATE),
    "qwen3_moe": Target({"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 7,
                         "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
                         "rms_norm_eps": 1e-6} | _rope(1e6), replace(LONG, seed=13), 10000.0, **LATE, text="code"),
}  # fmt: skip


def recipe_of(target: Target, kind: str, steps: int) -> EagleRecipe:
    """Return how a head is trained; an MLA head of an MLA target has its target's RoPE."""
    rope = KIMI_ROPE if kind == "MLA" and not target.config else Rope(target.theta)
    return replace(TINY_GQA, attention=ATTENTION[kind], rope=rope, intermediate=256, batches=150, steps=steps,
                   batch=target.rows, seq=target.tokens, seed=target.training.seed)  # fmt: skip


# One of each kind; those of `support.weight_faults` that heads of any attention can have.
TRIED: dict[str, Fault] = {
    **{name: FAULTS[name] for name in ("heads of o", "gate and up swapped", "order in fc", "norms swapped")},
    "input_layernorm less one": weights(lambda _, s: {"0.input_layernorm": s["0.input_layernorm"] - 1}),
    "a state fed back after the norm": config(lambda spec: replace(spec, norms=replace(spec.norms, output=True))),
}
Figures = dict[str, Any]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "validation.md"
BEGIN, END = "<!-- readings: begin -->", "<!-- readings: end -->"
BANDS = ((1.0, 2.0), (2.0, 2.5), (2.5, 3.0), (3.0, 4.0))


def heads(name: str) -> Iterator[tuple[str, int, Path]]:
    """Yield attention, steps and folder of each head of a target, trained where the cache has it not."""
    target, folder = TARGETS[name], TARGETS[name].make(name)
    documents, tokenizer = target.documents(), load_tokenizer(folder).inner
    text, held = pack(tokenizer, documents.train), pack(tokenizer, documents.held_out)
    states = cache_root() / f"readings-states-{name}-{target.training.seed}.safetensors"
    if not states.exists():
        share_states(folder, states, recipe_of(target, "MHA", 1), text, held)
    for kind in ATTENTION:
        for steps in target.stages:
            recipe = recipe_of(target, kind, steps)
            out = cache_root() / f"head-{head_key(folder, recipe, text, held)}"
            yield kind, steps, train_head(folder, out, recipe, text, held, states=states)


def judge(bed: Bed, spec: HeadSpec, slots: Slots) -> Figures:
    """Return what validate says of a head, and the greatest gain from undoing a mistake."""
    head = DraftHead(spec, slots)
    gains = measure_mistakes(head, bed.texts, bed.run, bed.layers, STEPS, targets_own(bed.config))
    clear = [gain for gain in gains if gain.is_clear]
    return {
        "length": gains[0].before,
        "rules": [finding.rule for finding in judge_mistakes(gains) if finding.rule != "K366"],
        "gain": clear[0].gained / (clear[0].before + clear[0].gained - 1) if clear else 0.0,
        "by": clear[0].name if clear else "",
    }


def measure(name: str, bed: Bed, folder: Path) -> Figures:
    """Return what is said of a head as it is and with each fault, or find it in the cache."""
    sources = b"".join(Path(module.__file__).read_bytes() for module in (readings, weight_faults))
    key = hashlib.sha256(sources + repr(sorted(TRIED)).encode() + folder.name.encode()).hexdigest()[:16]
    file = cache_root() / f"readings-{key}.json"
    if not file.exists():
        head = read_head(open_checkpoint(folder))
        own = bed.whole(head)
        found = {"": judge(bed, head.spec, own)}
        for fault in TRIED:
            print(f"{name}: {fault}", flush=True)
            found[fault] = judge(bed, *TRIED[fault](head.spec, own))
        file.write_text(json.dumps(found))
    return json.loads(file.read_text())


def table(found: dict[tuple[str, str, int], Figures]) -> list[str]:
    """Return the page's section: what is said of right heads, and which faults are found at which acceptance."""
    lines = ["| right heads | acceptance length at the three stages | findings | most gained |", "|---|---|---|---|"]
    alarms = 0
    for name in TARGETS:
        for kind in ATTENTION:
            own = [one[""] for (target, attention, _), one in found.items() if (target, attention) == (name, kind)]
            if own:
                said = [rule for one in own for rule in one["rules"]]
                alarms += said.count("K364")
                lengths = ", ".join(f"{one['length']:.2f}" for one in own)
                most = max(one["gain"] for one in own)
                lines.append(f"| {name}, {kind} | {lengths} | {', '.join(said) or 'none'} | {most:.1%} |")
    lines += ["", "| fault, found as an error in | " + " | ".join(f"{low:g} to {high:g}" for low, high in BANDS) + " |",
              "|---|" + "---|" * len(BANDS)]  # fmt: skip
    for fault in TRIED:
        cells = []
        for low, high in BANDS:
            own = [one[fault]["rules"] for one in found.values() if low <= one[""]["length"] < high]
            cells.append(f"{sum('K364' in rules for rules in own)} of {len(own)}")
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    return [f"Of {len(found)} right heads {alarms} have an error.", "", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(TARGETS), action="append", help="this target; may be repeated")
    parser.add_argument("--markdown", action="store_true", help="write the table into docs/evidence/validation.md")
    wish = parser.parse_args()
    found = {}
    for name in wish.only or TARGETS:
        bed = make_bed(TARGETS[name].make(name))
        for kind, steps, folder in heads(name):
            found[name, kind, steps] = measure(f"{name}, {kind}, {steps} steps", bed, folder)
    lines = table(found)
    print("\n".join(lines))
    if wish.markdown:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text("\n".join([before + BEGIN, *lines, END + rest.partition(END)[2]]))


if __name__ == "__main__":
    main()
